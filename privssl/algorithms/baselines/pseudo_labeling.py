"""Pseudo-labels in a federation, the plain way: FedSem, and the rounds of FixMatch and UDA.

What FedMatch (Jeong et al., ICLR 2021), FedSEAL (Bian et al., 2021) and FedTriNet (Che et al.,
2021) are compared with. FixMatch and UDA are in algorithms/baselines/fixmatch_uda.py.

    papers                                               here
    labels at the server: it trains, then the agents do  PseudoLabelled.one_round
    labels at clients: all train, on both kinds of rows  the same -> mixed_pass
    FedSem (Albaseer et al. 2020): T1 rounds of FedAvg   FedSem.round
      W labels all unlabelled rows, once                 label_pass
      FedAvg on given and guessed labels, mixed          FedSem.losses

Where labels may be: at the server (FedMatch, FedSEAL), at mixed agents (FedMatch, FedTriNet), and
at support agents (ours): these do together what the server does, and agents without labels start
from the mean of their weights. With labels at clients all learn at once, in one average; an agent
that lacks one kind of rows has the other term alone.

Settings of training are ``baselines.LocalTraining``'s. Differs from the papers, beside what
algorithms/baselines/supervised.py says: an agent with nothing to learn sends what it got, so that
the others' share does not grow. FedSem labels in evaluation mode, and its last round counts; the
authors of FedTriNet label with dropout and choose a round on test rows.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, final

import pydantic.dataclasses
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.baselines.supervised import (
    Proximal,
    SupervisedRequest,
    SupervisedUpdate,
    labelled_losses,
    load_global_model,
    run_sgd,
)
from privssl.algorithms.local_ssl import needs_unlabelled, no_statistics
from privssl.core.agents import (
    AgentLocation,
    LabelledRows,
    MixedAgent,
    QueryAgent,
    SupportAgent,
    UnlabelledRows,
)
from privssl.core.aggregation import WeightedMean
from privssl.core.federation import Federation
from privssl.core.messages import Ack, StateDict
from privssl.core.task import Context, Phase, Task, on_agent
from privssl.privacy.plan import PrivatePlan
from privssl.settings.schema import Count, Problem, strict
from privssl.training import local_training

CHUNK = 512  # rows of one forward pass when FedSem labels


@dataclass(frozen=True)
class PseudoLabelState:
    """What the server keeps between rounds."""

    F: StateDict  # the average over agents
    labelled: StateDict  # after training where labels are, which agents started from


# Config -------------------------------------------------------------------------------------


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class Guessing(Proximal):
    """What every method here has; as FedProx: ``weights: equal``, ``proximal: 0.01``."""

    released: Literal["labelled", "averaged"] = "labelled"  # see State; FedMatch: averaged


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedSemConfig(Guessing):
    """Section ``algorithm`` for FedSem."""

    name: Literal["fedsem"] = "fedsem"
    warm_up: Count = 40  # T1: rounds on labels alone, then all rows are labelled; FedTriNet, MNIST

    def problems(self) -> Iterator[Problem]:
        """Numbers that contradict each other."""
        if self.warm_up > self.rounds:
            yield Problem(
                "warm_up",
                f"{self.warm_up}, but there are {self.rounds} rounds, and warm_up counts among "
                "them. Give less, or as many for FedAvg on labelled rows",
            )


# The algorithms -----------------------------------------------------------------------------


class PseudoLabelled(Algorithm[PseudoLabelState]):
    """The shared rounds and steps; a subclass says what a visit minimises."""

    StateType = PseudoLabelState
    missing_reply_policy = MissingReplyPolicy(quorum=("support_pass", "query_pass", "mixed_pass"))
    cfg: Guessing

    def __init__(self, config: Guessing, task: Task, plan: PrivatePlan | None = None) -> None:
        super().__init__(config, task, plan)
        self._F = task.new_classifier()

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        yield from needs_unlabelled(config)
        yield from no_statistics(config)

    def start(self, federation: Federation) -> PseudoLabelState:
        F = local_training.fresh_weights(self.task.new_classifier, federation.rng("init F"))
        return PseudoLabelState(F, labelled=F)

    def round(self, state: PseudoLabelState, federation: Federation) -> PseudoLabelState:
        return self.one_round(state, federation, unlabelled=True)

    def one_round(
        self, state: PseudoLabelState, federation: Federation, *, unlabelled: bool
    ) -> PseudoLabelState:
        """Train where labels are, then where there are none; with labels at clients at once.

        Args:
            unlabelled: whether unlabelled rows are learned from.
        """
        if any(agent.role == "mixed" for agent in federation.agents):
            return self._all_at_once(state, federation, unlabelled=unlabelled)
        taught, learned = WeightedMean("F"), WeightedMean("F")
        federation.call_all(
            federation.support,
            self.support_pass,
            lambda who: SupervisedRequest(
                state.F, 0.0 if who.location is AgentLocation.SERVER else self.cfg.proximal
            ),
            aggregator=taught,
        )
        labelled = taught.value_or(state.F)
        if not unlabelled:
            return PseudoLabelState(labelled, labelled)
        drawn = federation.sample(federation.query, self.cfg.agents_per_round)
        federation.call_all(
            drawn,
            self.query_pass,
            SupervisedRequest(labelled, self.cfg.proximal),
            aggregator=learned,
        )
        return PseudoLabelState(learned.value_or(labelled), labelled)

    def _all_at_once(
        self, state: PseudoLabelState, federation: Federation, *, unlabelled: bool
    ) -> PseudoLabelState:
        roster = federation.query if unlabelled else federation.support
        drawn = federation.sample(roster, self.cfg.agents_per_round)
        mixed, others = (
            [agent for agent in drawn if (agent.role == "mixed") == both] for both in (True, False)
        )
        lesson = SupervisedRequest(state.F, self.cfg.proximal)
        step = self.mixed_pass if unlabelled else self.support_pass
        learned = WeightedMean("F")
        federation.call_all(mixed, step, lesson, aggregator=learned)
        federation.call_all(others, self.query_pass, lesson, aggregator=learned)
        F = learned.value_or(state.F)
        return PseudoLabelState(F, F)

    def classifier(self, state: PseudoLabelState) -> StateDict:
        return state.labelled if self.cfg.released == "labelled" else state.F

    def also_evaluated(self, state: PseudoLabelState) -> dict[str, StateDict]:
        if self.cfg.released == "labelled":
            return {"averaged": state.F}
        return {"labelled": state.labelled}

    # Steps: where the data is ---------------------------------------------------------------

    @on_agent
    def support_pass(
        self, agent: SupportAgent, msg: SupervisedRequest, ctx: Context
    ) -> SupervisedUpdate:
        """Learn from labelled rows alone."""
        rows = agent.labelled
        return self._visit(rows, UnlabelledRows(rows.x[:0], rows.ids[:0]), None, msg, ctx)

    @on_agent
    def query_pass(
        self, agent: QueryAgent, msg: SupervisedRequest, ctx: Context
    ) -> SupervisedUpdate:
        """Learn from unlabelled rows alone."""
        rows = agent.unlabelled
        none = LabelledRows(rows.x[:0], torch.empty(0, dtype=torch.int64), rows.ids[:0])
        return self._visit(none, rows, self.recall_labels(agent, msg, ctx), msg, ctx)

    @on_agent
    def mixed_pass(
        self, agent: MixedAgent, msg: SupervisedRequest, ctx: Context
    ) -> SupervisedUpdate:
        """Learn from both kinds."""
        y = self.recall_labels(agent, msg, ctx)
        return self._visit(agent.labelled, agent.unlabelled, y, msg, ctx)

    def _visit(
        self,
        labelled: LabelledRows,
        unlabelled: UnlabelledRows,
        y: Tensor | None,
        msg: SupervisedRequest,
        ctx: Context,
    ) -> SupervisedUpdate:
        self.cfg.weigh(len(labelled) + len(unlabelled), ctx)
        F = load_global_model(self._F, msg, ctx)
        return run_sgd(F, self.losses(F, labelled, unlabelled, y, ctx), self.cfg, msg, ctx)

    def recall_labels(
        self, agent: QueryAgent, msg: SupervisedRequest, ctx: Context
    ) -> Tensor | None:
        """Labels (N,) that were given to the unlabelled rows for good; None: there are none."""
        return None

    @abstractmethod
    def losses(
        self, F: nn.Module, labelled: LabelledRows, unlabelled: UnlabelledRows,
        y: Tensor | None, ctx: Context,
    ) -> Iterator[Tensor]:  # fmt: skip
        """What each step of a visit minimises; either kind of rows may be empty."""


@final
class FedSem(PseudoLabelled):
    """FedAvg on labels, then on labels that its own classifier gave once."""

    Config = FedSemConfig
    # An agent that was away when all others labelled their rows does so at its next visit.
    missing_reply_policy = MissingReplyPolicy(
        quorum=(*PseudoLabelled.missing_reply_policy.quorum, "label_pass")
    )
    cfg: FedSemConfig

    def phases(self) -> tuple[Phase, ...]:
        planned = (
            Phase("labels", self.cfg.warm_up),
            Phase("pseudo-labels", self.cfg.rounds - self.cfg.warm_up),
        )
        return tuple(phase for phase in planned if phase.rounds)

    def round(self, state: PseudoLabelState, federation: Federation) -> PseudoLabelState:
        since = federation.round.number - self.cfg.warm_up
        if since == 1:  # every agent, drawn or not
            federation.call_all(federation.query, self.label_pass, SupervisedRequest(state.F))
        return self.one_round(state, federation, unlabelled=since > 0)

    @on_agent
    def label_pass(self, agent: QueryAgent, msg: SupervisedRequest, ctx: Context) -> Ack:
        """Label all unlabelled rows, as they are, with the global classifier."""
        agent.memory = {**agent.memory, "pseudo_labels": self._labels(agent, msg, ctx)}
        return Ack()

    def recall_labels(self, agent: QueryAgent, msg: SupervisedRequest, ctx: Context) -> Tensor:
        if "pseudo_labels" not in agent.memory:  # it was away when all others labelled theirs
            self.label_pass(agent, msg, ctx)
        y = agent.memory["pseudo_labels"]
        ctx.pseudo_labels(agent.unlabelled.ids, one_hot(y, self.task.classes))
        return y

    @torch.no_grad()
    def _labels(self, agent: QueryAgent, msg: SupervisedRequest, ctx: Context) -> Tensor:
        """The likeliest class (N,) of each unlabelled row."""
        F = load_global_model(self._F, msg, ctx).eval()
        parts = torch.split(agent.unlabelled.x, CHUNK)
        logits = [F(local_training.network_input(part, ctx.device)) for part in parts]
        return torch.cat(logits).argmax(dim=1).cpu()

    def losses(
        self, F: nn.Module, labelled: LabelledRows, unlabelled: UnlabelledRows,
        y: Tensor | None, ctx: Context,
    ) -> Iterator[Tensor]:  # fmt: skip
        """Cross-entropy of batches in which given labels and guessed ones are alike."""
        guessed = torch.empty(0, dtype=torch.int64) if y is None else y
        rows = LabelledRows(
            torch.cat([labelled.x, unlabelled.x]),
            torch.cat([labelled.y, guessed]),
            torch.cat([labelled.ids, unlabelled.ids]),
        )
        return labelled_losses(F, rows, self.cfg, ctx)
