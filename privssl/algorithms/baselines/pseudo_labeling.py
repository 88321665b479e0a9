"""Plain pseudo-labels in a federation: FedSem, and the rounds of FixMatch and UDA.

FedMatch (Jeong et al., ICLR 2021), FedSEAL (Bian et al., 2021) and FedTriNet (Che et al., 2021)
compare themselves with these. FixMatch and UDA: algorithms/baselines/fixmatch_uda.py.

    papers                                               here
    labels at the server: it trains, then the agents do  PseudoLabelTraining.train_one_round
    labels at clients: all train, on both kinds of rows  the same -> mixed_pass
    FedSem (Albaseer et al. 2020): T1 rounds of FedAvg   FedSem.round
      all unlabelled rows are labelled, once             label_pass, label_locally
      FedAvg on labels and pseudo-labels, mixed          FedSem.losses

Where labels may be: at the server (FedMatch, FedSEAL), at mixed agents (FedMatch, FedTriNet), and
at support agents (ours). Each of these trains as the server would, and query agents start from the
mean of their weights. With labels at clients all train at once, in one average; an agent that lacks
one kind of rows has the other term alone.

Local training: ``LocalTrainingSettings``. Differs from the papers, beside what
supervised.py says: (1) An agent with nothing to learn sends its weights back unchanged. So the
share of the others does not grow. (2) FedSem labels in evaluation mode, and its last round counts.
The authors of FedTriNet label with dropout and choose a round on test rows; their paper lets the
local model label (``labelled_by``).
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, final

import pydantic.dataclasses
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.baselines.local_settings import ProximalSettings, StreamSettings
from privssl.algorithms.baselines.supervised import ProximalRequest, labelled_losses, run_sgd
from privssl.algorithms.local_ssl import (
    ModelUpdate,
    make_empty_labelled,
    make_empty_unlabelled,
    needs_no_statistics,
    needs_unlabelled,
    predict,
    select_first_classifier,
    train_alone,
    train_and_average,
    warm_up_fits,
)
from privssl.core.agents import (
    AgentLocation,
    LabelledRows,
    MixedAgent,
    QueryAgent,
    SupportAgent,
    UnlabelledRows,
)
from privssl.core.aggregation import WeightedMean
from privssl.core.federation import Federation, with_role
from privssl.core.messages import Ack, StateDict
from privssl.core.task import Context, Phase, on_agent
from privssl.settings.schema import Count, Problem, strict


@dataclasses.dataclass(frozen=True)
class PseudoLabelState:
    """What the server keeps between rounds."""

    F: StateDict  # the average over agents
    labelled: StateDict  # after training where labels are, which agents started from
    own: Mapping[str, StateDict] = dataclasses.field(default_factory=dict)  # without aggregation


# Config -------------------------------------------------------------------------------------


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class PseudoLabelSettings(ProximalSettings):
    """Settings of every method here; as FedProx: ``weights: equal``, ``proximal: 0.01``."""

    # weights after training on labels, or averaged over query agents; FedMatch: averaged
    released: Literal["labelled", "averaged"] = "labelled"


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedSemConfig(PseudoLabelSettings):
    """Section ``algorithm`` for FedSem."""

    name: Literal["fedsem"] = "fedsem"
    warm_up: Count = 40  # T1: rounds on labels alone, then all rows are labelled; FedTriNet, MNIST
    # Who labels an agent's rows: W (code of FedTriNet's authors), or W after local_epochs on the
    # agent's labels ("the local model", their paper, IV.A)
    labelled_by: Literal["global", "local"] = "global"

    def problems(self) -> Iterator[Problem]:
        """Numbers that contradict each other."""
        yield from super().problems()
        yield from warm_up_fits(self.warm_up, self.rounds)


# The algorithms -----------------------------------------------------------------------------


class PseudoLabelTraining(Algorithm[PseudoLabelState]):
    """The shared rounds and steps; a subclass has the losses."""

    StateType: ClassVar[type[PseudoLabelState]] = PseudoLabelState
    missing_reply_policy = MissingReplyPolicy(quorum=("support_pass", "query_pass", "mixed_pass"))
    cfg: PseudoLabelSettings

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        yield from needs_unlabelled(config)
        yield from needs_no_statistics(config)
        if _skips_aggregation(config.algorithm) and config.data.labels != "labels-at-client":
            yield Problem(
                "algorithm.aggregation",
                f"none, but with data.labels {config.data.labels} an agent alone has one kind of "
                "rows. Set data.labels: labels-at-client",
            )

    def start(self, federation: Federation) -> PseudoLabelState:
        F = self.initial_classifier(federation)
        return PseudoLabelState(F, labelled=F)

    def round(self, state: PseudoLabelState, federation: Federation) -> PseudoLabelState:
        return self.train_one_round(state, federation, unlabelled=True)

    def train_one_round(
        self, state: PseudoLabelState, federation: Federation, *, unlabelled: bool
    ) -> PseudoLabelState:
        """Train where labels are, then where there are none; with labels at clients at once.

        Args:
            unlabelled: whether unlabelled rows are learned from.
        """
        if any(agent.role == "mixed" for agent in federation.agents):
            return self._train_at_clients(state, federation, unlabelled=unlabelled)
        mu = self.cfg.proximal
        labelled = train_and_average(
            federation, federation.support, self.support_pass,
            lambda agent: ProximalRequest(
                state.F, 0.0 if agent.location is AgentLocation.SERVER else mu
            ),
            otherwise=state.F,
        )  # fmt: skip
        if not unlabelled:
            return PseudoLabelState(labelled, labelled)
        participants = federation.sample(federation.query, self.cfg.agents_per_round)
        request = ProximalRequest(labelled, mu)
        F = train_and_average(
            federation, participants, self.query_pass, request, otherwise=labelled
        )
        return PseudoLabelState(F, labelled)

    def _train_at_clients(
        self, state: PseudoLabelState, federation: Federation, *, unlabelled: bool
    ) -> PseudoLabelState:
        roster = federation.query if unlabelled else federation.support
        participants = federation.sample(roster, self.cfg.agents_per_round)
        mixed, others = with_role(participants, "mixed"), with_role(participants, "query")
        if _skips_aggregation(self.cfg):
            classifiers = train_alone(
                federation, mixed, self.mixed_pass, ProximalRequest, state.own, state.F
            )
            return PseudoLabelState(state.F, state.F, classifiers)
        request, mean = ProximalRequest(state.F, self.cfg.proximal), WeightedMean("F")
        step = self.mixed_pass if unlabelled else self.support_pass
        federation.call_all(mixed, step, request, aggregator=mean)
        federation.call_all(others, self.query_pass, request, aggregator=mean)
        F = mean.value_or(state.F)
        return PseudoLabelState(F, F)

    def own_classifiers(self, state: PseudoLabelState) -> Mapping[str, StateDict]:
        return state.own

    def classifier(self, state: PseudoLabelState) -> StateDict:
        if state.own:
            return select_first_classifier(state.own, state.F)
        return state.labelled if self.cfg.released == "labelled" else state.F

    def also_evaluated(self, state: PseudoLabelState) -> dict[str, StateDict]:
        if self.cfg.released == "labelled":
            return {"averaged": state.F}
        return {"labelled": state.labelled}

    # Steps: where the data is ---------------------------------------------------------------

    @on_agent
    def support_pass(self, agent: SupportAgent, msg: ProximalRequest, ctx: Context) -> ModelUpdate:
        """Learn from labelled rows alone."""
        return self._train(agent.labelled, make_empty_unlabelled(agent.labelled), None, msg, ctx)

    @on_agent
    def query_pass(self, agent: QueryAgent, msg: ProximalRequest, ctx: Context) -> ModelUpdate:
        """Learn from unlabelled rows alone."""
        rows, empty = agent.unlabelled, make_empty_labelled(agent.unlabelled)
        return self._train(empty, rows, self.recall_labels(agent, empty, msg, ctx), msg, ctx)

    @on_agent
    def mixed_pass(self, agent: MixedAgent, msg: ProximalRequest, ctx: Context) -> ModelUpdate:
        """Learn from both kinds."""
        y = self.recall_labels(agent, agent.labelled, msg, ctx)
        return self._train(agent.labelled, agent.unlabelled, y, msg, ctx)

    def _train(
        self, labelled: LabelledRows, unlabelled: UnlabelledRows, y: Tensor | None,
        msg: ProximalRequest, ctx: Context,
    ) -> ModelUpdate:  # fmt: skip
        if isinstance(self.cfg, StreamSettings) and self.cfg.stream_slices > 1:
            indices = self.cfg.select_current_slice(len(unlabelled), ctx)
            unlabelled = UnlabelledRows(unlabelled.x[indices], unlabelled.ids[indices])
        self.cfg.weigh(len(labelled) + len(unlabelled), ctx)
        F = self.load_classifier(msg.F, ctx)
        return run_sgd(F, self.losses(F, labelled, unlabelled, y, ctx), self.cfg, msg, ctx)

    def recall_labels(
        self, agent: QueryAgent, labelled: LabelledRows, msg: ProximalRequest, ctx: Context
    ) -> Tensor | None:
        """Fixed pseudo-labels (N,) of the unlabelled rows; None: there are none."""
        return None

    @abstractmethod
    def losses(
        self, F: nn.Module, labelled: LabelledRows, unlabelled: UnlabelledRows,
        y: Tensor | None, ctx: Context,
    ) -> Iterator[Tensor]:  # fmt: skip
        """The loss of each training step; either kind of rows may be empty."""


def _skips_aggregation(cfg: PseudoLabelSettings) -> bool:
    """Whether nothing is averaged."""
    return isinstance(cfg, StreamSettings) and cfg.aggregation == "none"


@final
class FedSem(PseudoLabelTraining):
    """FedAvg on labels, then on pseudo-labels that its own classifier gave once."""

    Config = FedSemConfig
    # An agent that missed label_pass labels its rows at its next visit (recall_labels).
    missing_reply_policy = MissingReplyPolicy(
        quorum=(*PseudoLabelTraining.missing_reply_policy.quorum, "label_pass", "label_locally")
    )
    cfg: FedSemConfig

    def phases(self) -> tuple[Phase, ...]:
        phases = (
            Phase("labels", self.cfg.warm_up),
            Phase("pseudo-labels", self.cfg.rounds - self.cfg.warm_up),
        )
        return tuple(phase for phase in phases if phase.rounds)

    def round(self, state: PseudoLabelState, federation: Federation) -> PseudoLabelState:
        rounds_after_warm_up = federation.round.number - self.cfg.warm_up
        if rounds_after_warm_up == 1:  # every agent, drawn or not
            request, local = ProximalRequest(state.F), self.cfg.labelled_by == "local"
            mixed = with_role(federation.query, "mixed") if local else ()
            others = [agent for agent in federation.query if agent not in set(mixed)]
            federation.call_all(mixed, self.label_locally, request)
            federation.call_all(others, self.label_pass, request)
        return self.train_one_round(state, federation, unlabelled=rounds_after_warm_up > 0)

    @on_agent
    def label_pass(self, agent: QueryAgent, msg: ProximalRequest, ctx: Context) -> Ack:
        """Label all unlabelled rows (N,), not augmented, with the global classifier."""
        self._label_rows(agent, make_empty_labelled(agent.unlabelled), msg, ctx)
        return Ack()

    @on_agent
    def label_locally(self, agent: MixedAgent, msg: ProximalRequest, ctx: Context) -> Ack:
        """The same with the global classifier after training on the agent's labels."""
        self._label_rows(agent, agent.labelled, msg, ctx)
        return Ack()

    def _label_rows(
        self, agent: QueryAgent, labelled: LabelledRows, msg: ProximalRequest, ctx: Context
    ) -> None:
        F = self.load_classifier(msg.F, ctx)
        if self.cfg.labelled_by == "local":
            run_sgd(F, labelled_losses(F, labelled, self.cfg, ctx), self.cfg, msg, ctx)
        logits = predict(F, agent.unlabelled.x, ctx.device)
        agent.memory = {**agent.memory, "pseudo_labels": logits.argmax(dim=1).cpu()}

    def recall_labels(
        self, agent: QueryAgent, labelled: LabelledRows, msg: ProximalRequest, ctx: Context
    ) -> Tensor:
        if "pseudo_labels" not in agent.memory:  # the agent missed label_pass
            self._label_rows(agent, labelled, msg, ctx)
        y = agent.memory["pseudo_labels"]
        ctx.pseudo_labels(agent.unlabelled.ids, one_hot(y, self.task.classes))
        return y

    def losses(
        self, F: nn.Module, labelled: LabelledRows, unlabelled: UnlabelledRows,
        y: Tensor | None, ctx: Context,
    ) -> Iterator[Tensor]:  # fmt: skip
        """Cross-entropy of batches of rows with labels and pseudo-labels, mixed."""
        pseudo_labels = torch.empty(0, dtype=torch.int64) if y is None else y
        rows = LabelledRows(
            torch.cat([labelled.x, unlabelled.x]),
            torch.cat([labelled.y, pseudo_labels]),
            torch.cat([labelled.ids, unlabelled.ids]),
        )
        return labelled_losses(F, rows, self.cfg, ctx)
