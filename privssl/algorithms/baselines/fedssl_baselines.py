"""The baselines of FedSSL's paper, on the same agents: Supervise, Pseudo and MixMatch.

Fan, Hu, Huang (IJCAI 2022), section 5.3 and the top rows of their Tables 1 to 4.

    Supervise   FedAvg over support agents; unlabelled rows are not used
    Pseudo      query agents learn from their own sharpened predictions as well (section 3.3)
    MixMatch    Pseudo, and every agent mixes rows of its own (L-MixUp, Eq. 3)

The three share everything but two switches, and their training of F with FedSSL
(``ClassifierTraining``): a difference in a table is the effect of the switch.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, final

import pydantic.dataclasses
import torch
from torch import Tensor

from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.local_ssl import (
    ClassifierTraining,
    ModelUpdate,
    TeacherState,
    TrainRequest,
    average_groups,
    model_update,
    needs_no_statistics,
    needs_unlabelled,
    one_hot_labels,
)
from privssl.core.agents import QueryAgent, SupportAgent
from privssl.core.federation import Federation
from privssl.core.messages import Reply, StateDict
from privssl.core.task import Context, on_agent
from privssl.settings.schema import Problem, Rate, strict
from privssl.training import local_training
from privssl.training.batched.deferred import batched_call
from privssl.training.losses import soft_label_loss
from privssl.training.mixup import local_mixup


@dataclasses.dataclass(frozen=True)
class TeacherRequest(TrainRequest):
    """Down: the global classifier and the teacher that predicts pseudo-labels."""

    teacher: StateDict


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class SuperviseConfig(ClassifierTraining):
    """Section ``algorithm`` for Supervise: labelled rows alone."""

    name: Literal["supervise"] = "supervise"


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class PseudoConfig(ClassifierTraining):
    """Section ``algorithm`` for Pseudo: pseudo-labels as well."""

    name: Literal["pseudo"] = "pseudo"


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class MixMatchConfig(ClassifierTraining):
    """Section ``algorithm`` for MixMatch: pseudo-labels and L-MixUp."""

    name: Literal["mixmatch"] = "mixmatch"
    mix_alpha: Rate = 0.5  # alpha of lambda ~ Beta(alpha, alpha), Eq. 3


class _FedSSLBaseline(Algorithm[TeacherState]):
    """The shared rounds and steps; a subclass sets the switches and nothing else."""

    StateType = TeacherState
    can_be_lengthened = True
    missing_reply_policy = MissingReplyPolicy(quorum=("support_pass", "query_pass"))
    cfg: ClassifierTraining
    uses_unlabelled: ClassVar[bool]

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        if cls.uses_unlabelled:
            yield from needs_unlabelled(config)
        yield from needs_no_statistics(config)

    def start(self, federation: Federation) -> TeacherState:
        F = self.initial_classifier(federation)
        return TeacherState(F, teacher=F)

    def round(self, state: TeacherState, federation: Federation) -> TeacherState:
        request = TeacherRequest(state.F, state.teacher)
        support = federation.call_all(federation.support, self.support_pass, request)
        query: list[Reply[ModelUpdate]] = []
        if self.uses_unlabelled and federation.round.number > self.cfg.warm_up:
            participants = federation.sample(federation.query, self.cfg.query_per_round)
            query = federation.call_all(participants, self.query_pass, request)
        F = average_groups(self.cfg.weights, support, query, "F", otherwise=state.F)
        decay = self.cfg.decay(federation.round.number)
        return TeacherState(F, local_training.moving_average(state.teacher, F, decay))

    def classifier(self, state: TeacherState) -> StateDict:
        return state.teacher

    def also_evaluated(self, state: TeacherState) -> dict[str, StateDict]:
        return {"unaveraged": state.F}

    @on_agent
    def support_pass(self, agent: SupportAgent, msg: TeacherRequest, ctx: Context) -> ModelUpdate:
        """Learn from labelled rows."""
        rows = agent.labelled
        ctx.weight = float(len(rows))
        indices = self.cfg.draw_rows(len(rows), ctx)
        labels = one_hot_labels(rows, indices, self.task.classes)
        return self._train(rows.x[indices], labels, agent, msg, ctx, "support")

    @on_agent
    def query_pass(self, agent: QueryAgent, msg: TeacherRequest, ctx: Context) -> ModelUpdate:
        """Predict labels with the teacher (Eq. 2), learn from them."""
        rows = agent.unlabelled
        ctx.weight = float(len(rows))
        indices = self.cfg.draw_rows(len(rows), ctx)
        p = self.cfg.guess(self.load_classifier(msg.teacher, ctx), rows.x[indices], ctx)
        ctx.pseudo_labels(rows.ids[indices], p)
        return self._train(rows.x[indices], p, agent, msg, ctx, "query")

    def _train(
        self, x: Tensor, p: Tensor, agent: SupportAgent | QueryAgent, msg: TeacherRequest,
        ctx: Context, group: str,
    ) -> ModelUpdate:  # fmt: skip
        F = self.load_classifier(msg.F, ctx)
        optimiser = local_training.LocalOptimiser(
            {"F": self.cfg.make_optimiser_group(F, ctx.round)}, agent.memory, group
        )
        real, rng = local_training.network_input(x, ctx.device), ctx.rng("mixup")
        views = self.cfg.augmentation()(real, ctx.rng("augment F"))

        def loss(batch: dict[str, Tensor]) -> Tensor:
            mixed, labels = self._mix(batch["x"], batch["p"], rng)
            mean: Tensor = batched_call(soft_label_loss, {"x": mixed, "p": labels}, F=F)
            return mean

        fields = {"x": views, "p": p.to(ctx.device)}
        mean_loss = local_training.fit(optimiser, fields, self.cfg.batch_size, loss)
        ctx.log_metric(f"train/loss_F/{group}", mean_loss)
        agent.memory = {**agent.memory, **optimiser.remember()}
        return model_update(F)

    def _mix(self, x: Tensor, p: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        if isinstance(self.cfg, MixMatchConfig):
            return local_mixup(x, p, self.cfg.mix_alpha, rng)
        return x, p


@final
class Supervise(_FedSSLBaseline):
    """FedAvg over the agents that hold labels."""

    Config = SuperviseConfig
    uses_unlabelled = False


@final
class Pseudo(_FedSSLBaseline):
    """FedAvg over all agents, with pseudo-labels at query agents."""

    Config = PseudoConfig
    uses_unlabelled = True


@final
class MixMatch(_FedSSLBaseline):
    """Pseudo with L-MixUp at every agent."""

    Config = MixMatchConfig
    uses_unlabelled = True
