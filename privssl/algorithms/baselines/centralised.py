"""What Pi-Model, Mean Teacher and ReMixMatch share: training where all rows are, and a teacher.

Their papers train where labelled and unlabelled rows are together, as upper bounds of federated
methods do: one mixed agent (``data.labels: labels-at-client``, ``agents.mixed: 1``). Several agents
train side by side, each on the rows that it has, and are averaged by their number of rows.

Training: ``LocalTrainingSettings``, the same as FixMatch's and UDA's. Differs from the
papers: SGD, whose momentum starts anew in every round, for Adam.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

import pydantic.dataclasses
import torch
from torch import Tensor, nn

from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.baselines.fedssl_baselines import TeacherRequest
from privssl.algorithms.baselines.local_settings import LocalTrainingSettings
from privssl.algorithms.baselines.supervised import ProximalRequest, run_sgd
from privssl.algorithms.local_ssl import (
    Share,
    TeacherState,
    make_empty_labelled,
    make_empty_unlabelled,
    needs_no_statistics,
    needs_unlabelled,
)
from privssl.core.agents import (
    LabelledRows,
    MixedAgent,
    QueryAgent,
    SupportAgent,
    UnlabelledRows,
)
from privssl.core.aggregation import average
from privssl.core.federation import Federation, with_role
from privssl.core.messages import Message, Reply, StateDict
from privssl.core.task import Context, Task, on_agent
from privssl.privacy.plan import Plan
from privssl.settings.schema import Count, Problem, strict
from privssl.training import local_training


@dataclasses.dataclass(frozen=True)
class TeacherUpdate(Message):
    """Up: the classifier after training, and the moving average of its weights; None: it is F."""

    F: StateDict
    teacher: StateDict | None


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class CentralisedSettings(LocalTrainingSettings):
    """Settings of Pi-Model, Mean Teacher and ReMixMatch."""

    teacher_decay: Share = 0.999  # alpha, per step; of the average that is released
    ramp_up: Count = 80  # rounds until the losses of unlabelled rows have their weight; Laine, Aila
    # Steps of an epoch: a pass over the labelled rows, or over the unlabelled ones
    steps_of: Literal["labelled", "unlabelled"] = "unlabelled"

    def decay(self, round_number: int) -> float:
        """The teacher's decay in a round; 0: it is F."""
        return self.teacher_decay


class CentralisedTraining(Algorithm[TeacherState]):
    """Rounds and steps; a subclass has the losses."""

    StateType = TeacherState
    missing_reply_policy = MissingReplyPolicy(quorum=("support_pass", "query_pass", "mixed_pass"))
    cfg: CentralisedSettings

    def __init__(self, config: Any, task: Task, plan: Plan | None = None) -> None:
        super().__init__(config, task, plan)
        self._teacher = task.new_classifier()

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        yield from needs_unlabelled(config)
        yield from needs_no_statistics(config)

    def start(self, federation: Federation) -> TeacherState:
        F = self.initial_classifier(federation)
        return TeacherState(F, teacher=F)

    def round(self, state: TeacherState, federation: Federation) -> TeacherState:
        replies = list[Reply[TeacherUpdate]]()
        request = TeacherRequest(state.F, state.teacher if self.cfg.teacher_decay else {})
        for step, roles in (
            (self.support_pass, ("support", "server")),
            (self.query_pass, ("query",)),
            (self.mixed_pass, ("mixed",)),
        ):
            replies += federation.call_all(with_role(federation.agents, *roles), step, request)
        F = average(replies, "F", otherwise=state.F)
        if not self.cfg.teacher_decay:
            return TeacherState(F, F)
        return TeacherState(F, average(replies, "teacher", otherwise=state.teacher))

    def classifier(self, state: TeacherState) -> StateDict:
        return state.teacher

    def also_evaluated(self, state: TeacherState) -> dict[str, StateDict]:
        return {"unaveraged": state.F}

    # Steps: where the data is ---------------------------------------------------------------

    @on_agent
    def support_pass(self, agent: SupportAgent, msg: TeacherRequest, ctx: Context) -> TeacherUpdate:
        """Learn from labelled rows alone."""
        return self._train(agent, agent.labelled, make_empty_unlabelled(agent.labelled), msg, ctx)

    @on_agent
    def query_pass(self, agent: QueryAgent, msg: TeacherRequest, ctx: Context) -> TeacherUpdate:
        """Learn from unlabelled rows alone."""
        return self._train(agent, make_empty_labelled(agent.unlabelled), agent.unlabelled, msg, ctx)

    @on_agent
    def mixed_pass(self, agent: MixedAgent, msg: TeacherRequest, ctx: Context) -> TeacherUpdate:
        """Learn from both kinds."""
        return self._train(agent, agent.labelled, agent.unlabelled, msg, ctx)

    def _train(
        self, agent: Any, labelled: LabelledRows, unlabelled: UnlabelledRows,
        msg: TeacherRequest, ctx: Context,
    ) -> TeacherUpdate:  # fmt: skip
        ctx.weight = float(len(labelled) + len(unlabelled))
        F, memory = self.load_classifier(msg.F, ctx), dict(agent.memory)
        teacher = local_training.load_weights(self._teacher, msg.teacher or msg.F, ctx.device)
        losses = self.losses(F, teacher, labelled, unlabelled, memory, ctx)
        run_sgd(
            F,
            self._update_teacher_after_steps(F, teacher, losses, ctx),
            self.cfg,
            ProximalRequest(msg.F),
            ctx,
        )
        agent.memory = memory
        weights = local_training.to_send(teacher.state_dict()) if self.cfg.teacher_decay else None
        return TeacherUpdate(local_training.to_send(F.state_dict()), weights)

    def _update_teacher_after_steps(
        self, F: nn.Module, teacher: nn.Module, losses: Iterator[Tensor], ctx: Context
    ) -> Iterator[Tensor]:
        decay = self.cfg.decay(ctx.round)
        for loss in losses:
            yield loss  # here the step is taken
            if decay:
                update_teacher(teacher, F, decay)

    @abstractmethod
    def losses(
        self, F: nn.Module, teacher: nn.Module, labelled: LabelledRows, unlabelled: UnlabelledRows,
        memory: dict[str, Tensor], ctx: Context,
    ) -> Iterator[Tensor]:  # fmt: skip
        """The loss of each step. Either kind of rows may be empty; ``memory`` is the agent's."""


@torch.no_grad()
def update_teacher(teacher: nn.Module, F: nn.Module, decay: float) -> None:
    """theta' = decay theta' + (1 - decay) theta, in place: Tarvainen and Valpola, Eq. 1. Of integer
    tensors (batch norm's counts) the new one is taken."""
    for mean, new in zip(teacher.state_dict().values(), F.state_dict().values(), strict=True):
        mean.lerp_(new, 1 - decay) if mean.is_floating_point() else mean.copy_(new)
