"""What FedSSL is judged by, on the same agents: Supervise, Pseudo and MixMatch.

Fan, Hu, Huang (IJCAI 2022), section 5.3 and the top rows of their Tables 1 to 4.

    Supervise   FedAvg over support agents; unlabelled rows are not used
    Pseudo      query agents learn from their own sharpened guesses as well (section 3.3)
    MixMatch    Pseudo, and every agent mixes rows of its own (L-MixUp, Eq. 3)

The three differ by two switches, so they share everything else with each other and, through
``ClassifierTraining``, the recipe for F with FedSSL: what a table shows between them is what
the switch does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import pydantic.dataclasses
import torch
from torch import Tensor

from privssl import learn
from privssl.agents import QueryAgent, SupportAgent
from privssl.algorithms.base import Algorithm, Context, Task, Without, on_agent
from privssl.algorithms.local_ssl import (
    ClassifierTraining,
    federate,
    needs_unlabelled,
    no_statistics,
    one_hot,
)
from privssl.losses import soft_label_loss
from privssl.messages import Message, Reply, StateDict
from privssl.mixup import local_mixup
from privssl.privacy import PrivatePlan
from privssl.pseudo import guess_labels
from privssl.settings import Problem, Rate, strict
from privssl.together import compute
from privssl.world import World


@dataclass(frozen=True)
class Lesson(Message):
    """Down: the global classifier and the teacher that guesses labels."""

    F: StateDict
    teacher: StateDict


@dataclass(frozen=True)
class Classifier(Message):
    """Up: the classifier after local training."""

    F: StateDict


@dataclass(frozen=True)
class State:
    """What the server keeps between rounds."""

    F: StateDict
    teacher: StateDict  # moving average of F: guesses labels, is evaluated and released


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class SuperviseConfig(ClassifierTraining):
    """Section ``algorithm`` for Supervise: labelled rows alone."""

    name: Literal["supervise"] = "supervise"


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class PseudoConfig(ClassifierTraining):
    """Section ``algorithm`` for Pseudo: guessed labels as well."""

    name: Literal["pseudo"] = "pseudo"


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class MixMatchConfig(ClassifierTraining):
    """Section ``algorithm`` for MixMatch: guessed labels and L-MixUp."""

    name: Literal["mixmatch"] = "mixmatch"
    mix_alpha: Rate = 0.5  # alpha of lambda ~ Beta(alpha, alpha), Eq. 3


class _Bound(Algorithm[State]):
    """The shared rounds and steps; a subclass sets the switches and nothing else."""

    StateType = State
    without = Without(quorum=("support_pass", "query_pass"))
    cfg: ClassifierTraining
    uses_unlabelled: ClassVar[bool]

    def __init__(
        self, config: ClassifierTraining, task: Task, plan: PrivatePlan | None = None
    ) -> None:
        super().__init__(config, task, plan)
        self._F = task.new_classifier()

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        if cls.uses_unlabelled:
            yield from needs_unlabelled(config)
        yield from no_statistics(config)

    def start(self, world: World) -> State:
        F = learn.fresh_weights(self.task.new_classifier, world.rng("init F"))
        return State(F, teacher=F)

    def round(self, state: State, world: World) -> State:
        lesson = Lesson(state.F, state.teacher)
        support = world.ask_each(world.support, self.support_pass, lesson)
        query: list[Reply[Classifier]] = []
        if self.uses_unlabelled and world.round.number > self.cfg.warm_up:
            taking_part = world.sample(world.query, self.cfg.query_per_round)
            query = world.ask_each(taking_part, self.query_pass, lesson)
        F = federate(self.cfg.weights, support, query, "F", otherwise=state.F)
        decay = self.cfg.decay(world.round.number)
        return State(F, learn.moving_average(state.teacher, F, decay))

    def classifier(self, state: State) -> StateDict:
        return state.teacher

    def also_evaluated(self, state: State) -> dict[str, StateDict]:
        return {"unaveraged": state.F}

    @on_agent
    def support_pass(self, agent: SupportAgent, msg: Lesson, ctx: Context) -> Classifier:
        """Learn from labelled rows."""
        rows = agent.labelled
        ctx.weight = float(len(rows))
        picked = self._picked(len(rows), ctx)
        labels = one_hot(rows, picked, self.task.classes)
        return self._train(rows.x[picked], labels, agent, msg, ctx, "support")

    @on_agent
    def query_pass(self, agent: QueryAgent, msg: Lesson, ctx: Context) -> Classifier:
        """Guess labels with the teacher (Eq. 2), learn from them."""
        rows = agent.unlabelled
        ctx.weight = float(len(rows))
        picked = self._picked(len(rows), ctx)
        guesses = guess_labels(
            learn.load(self._F, msg.teacher, ctx.device).eval(),
            learn.network_input(rows.x[picked], ctx.device), augment=self.cfg.augmentation("weak"),
            views=self.cfg.views, sharpness=self.cfg.sharpness, rng=ctx.rng("guess"),
        )  # fmt: skip
        ctx.pseudo_labels(rows.ids[picked], guesses)
        return self._train(rows.x[picked], guesses, agent, msg, ctx, "query")

    def _picked(self, held: int, ctx: Context) -> Tensor:
        return learn.draw_rows(held, self.cfg.local_steps * self.cfg.batch_size, ctx.rng("rows"))

    def _train(
        self, x: Tensor, p: Tensor, agent: SupportAgent | QueryAgent, msg: Lesson,
        ctx: Context, group: str,
    ) -> Classifier:  # fmt: skip
        F = learn.load(self._F, msg.F, ctx.device)
        optimiser = learn.LocalOptimiser({"F": self.cfg.stepping(F)}, agent.memory, group)
        seen = self.cfg.augmentation()(learn.network_input(x, ctx.device), ctx.rng("augment F"))
        rng = ctx.rng("mixup")

        def loss(batch: dict[str, Tensor]) -> Tensor:
            rows, labels = self._mixed(batch["x"], batch["p"], rng)
            mean: Tensor = compute(soft_label_loss, {"x": rows, "p": labels}, F=F)
            return mean

        fields = {"x": seen, "p": p.to(ctx.device)}
        ctx.note(f"train/loss_F/{group}", learn.fit(optimiser, fields, self.cfg.batch_size, loss))
        agent.memory = {**agent.memory, **optimiser.remember()}
        return Classifier(learn.to_send(F.state_dict()))

    def _mixed(self, x: Tensor, p: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        if isinstance(self.cfg, MixMatchConfig):
            return local_mixup(x, p, self.cfg.mix_alpha, rng)
        return x, p


@final
class Supervise(_Bound):
    """FedAvg over the agents that hold labels."""

    Config = SuperviseConfig
    uses_unlabelled = False


@final
class Pseudo(_Bound):
    """FedAvg over all agents, with guessed labels where there are none."""

    Config = PseudoConfig
    uses_unlabelled = True


@final
class MixMatch(_Bound):
    """Pseudo with L-MixUp at every agent."""

    Config = MixMatchConfig
    uses_unlabelled = True
