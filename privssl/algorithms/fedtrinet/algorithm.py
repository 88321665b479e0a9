"""FedTriNet: three networks vote on pseudo-labels, one of them spliced from the other two.

Che, Long, Wang, Wang, Xiao, Ma: "FedTriNet: A Pseudo Labeling Method with Three Players for
Federated Semi-supervised Learning" (IEEE BigData 2021). W is the global network, l an agent's own
network after its last visit, c the spliced one: the shallow half of W, the deep half of l.

    paper                                         here
    phase 1: FedAvg on labelled rows, T1 rounds   round -> supervised_pass (Eq. 2)
    phase 2: largest confidence of every client   round -> confidence_pass (Eq. 4)
    threshold theta(t)                            voting.shrinkage (Eq. 5)
    third player: splice, then fine-tune          _vote_and_train, models.splice
    vote of three, rows above theta(t)            _make_pseudo_labels, voting.vote (Eq. 3)
    loss on labels + lambda * on pseudo-labels    voting.plan_steps, _learn (Eq. 6, 7)
    mean of what participants trained (Eq. 1)     WeightedMean

Where an agent lacks one kind of rows its term drops out, so labels may be anywhere. The paper has
mixed agents alone (``labels-at-client``). A support agent trains on its labels alone. A query agent
sits out phase 1, does not fine-tune, and declines when it admits no row. A labelled server takes
part in every round, in addition to the drawn agents.

Differs from the paper: (1) lambda is 1, as none is given. (2) An agent that never trained has
W for l, so that c is W. (3) Rows are in [-1, 1] and in their own size; the authors resize digits
to 32x32. (4) No augmentation, as in the authors' code (``augment``). (5) Rates
and momentum are the authors' code's. (6) Agents send the trained network. The algorithm box adds up
differences; that equals Eq. 1 only for differences from W, and phase 2 starts from c. Where
the paper contradicts itself or its code, a setting has both readings: docs/fedtrinet.md.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.fedtrinet.players import (
    pack_local_weights,
    select_shallow_modules,
    unpack_local_weights,
)
from privssl.algorithms.fedtrinet.voting import PROFILED, FedTriNetConfig, Part, plan_steps, vote
from privssl.algorithms.local_ssl import (
    ModelState,
    ModelUpdate,
    TrainRequest,
    can_learn_from,
    make_empty_labelled,
    make_empty_unlabelled,
    needs_unlabelled,
)
from privssl.core.agents import (
    LabelledRows,
    Memory,
    MixedAgent,
    QueryAgent,
    SupportAgent,
    UnlabelledRows,
)
from privssl.core.aggregation import WeightedMean
from privssl.core.federation import Federation, Roster, with_role
from privssl.core.messages import Ack, Declined, Message, StateDict
from privssl.core.task import Context, Phase, Task, on_agent
from privssl.data.affine_augment import NONE
from privssl.models.splice import splice
from privssl.privacy.plan import PrivatePlan
from privssl.runtime import randomness
from privssl.settings.schema import Problem
from privssl.training import local_training, optim

CHUNK = 512  # rows of one forward pass when labels are predicted


# Messages and state -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LabelRequest(TrainRequest):
    """Down in phase 1: W. Without ``upload`` the agent trains for itself."""

    upload: bool = True


@dataclasses.dataclass(frozen=True)
class VoteRequest(TrainRequest):
    """Down in phase 2: W, and theta(t), which a vote must exceed."""

    threshold: float
    upload: bool = True


@dataclasses.dataclass(frozen=True)
class Confidence(Message):
    """Up in phase 2: W's confidence in an agent's unlabelled rows, largest or mean, in [0, 1]."""

    value: float


@dataclasses.dataclass(frozen=True)
class FedTriNetState(ModelState):
    """What the server keeps between rounds; F is W."""

    confidence: float = 1.0  # theta-bar when it was measured last
    threshold: float = 1.0  # theta(t) of the last round; 1: no row exceeds it


# The algorithm ------------------------------------------------------------------------------


@final
class FedTriNet(Algorithm[FedTriNetState]):
    """Phase 1 on labels, phase 2 with three players."""

    Config = FedTriNetConfig
    StateType = FedTriNetState
    needs_images = "it splices networks at their convolutions"
    missing_reply_policy = MissingReplyPolicy(
        quorum=("supervised_pass", "confidence_pass", "mixed_pass", "support_pass", "query_pass")
    )
    cfg: FedTriNetConfig

    def __init__(
        self, config: FedTriNetConfig, task: Task, plan: PrivatePlan | None = None
    ) -> None:
        super().__init__(config, task, plan)
        self._shallow = select_shallow_modules(self._F, config)

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        yield from needs_unlabelled(config)
        if config.model.norm == "static":
            yield Problem(
                "model.norm",
                "static collects the statistics of one network, but fedtrinet predicts with three "
                "at every visit. Set group",
            )
        if config.model.norm == "batch" and config.algorithm.votes_in == "train":
            yield Problem(
                "algorithm.votes_in",
                "train, but model.norm is batch: a row's pseudo-label would depend on the rows of "
                "its batch. Set eval, or model.norm: group",
            )

    def phases(self) -> tuple[Phase, ...]:
        vote_rounds = self.cfg.rounds - self.cfg.warm_up
        phases = (
            Phase("cold start", self.cfg.cold_start),
            Phase("labels", self.cfg.warm_up),
            Phase("three players", vote_rounds),
        )
        return tuple(phase for phase in phases if phase.rounds)

    def start(self, federation: Federation) -> FedTriNetState:
        return FedTriNetState(self.initial_classifier(federation))

    def round(self, state: FedTriNetState, federation: Federation) -> FedTriNetState:
        t = self._count_phase_2_rounds(federation.round.number)
        if t < 0:  # phase 1
            cold, agents = federation.round.number <= self.cfg.cold_start, federation.support
            phase_1_participants = agents if cold else self._sample_agents(federation, agents)
            request, mean = LabelRequest(state.F), WeightedMean("F")
            self._train_at_agents(
                federation, phase_1_participants, agents, self.supervised_pass, request, mean
            )
            return dataclasses.replace(state, F=mean.value_or(state.F))  # Eq. 1
        participants = self._sample_agents(federation, federation.agents)
        confidence = state.confidence
        if self.cfg.measured == "every_round" or t == 0:
            measured = federation.agents if self.cfg.measured_at == "all" else participants
            confidence = self._ask_confidence(state, federation, measured)
        threshold = self.cfg.threshold(confidence, t)
        mean, vote_request = WeightedMean("F"), VoteRequest(state.F, threshold)
        for step, roles in (
            (self.mixed_pass, ("mixed",)),
            (self.support_pass, ("support", "server")),
            (self.query_pass, ("query",)),
        ):
            role_participants, agents = (
                with_role(participants, *roles),
                with_role(federation.agents, *roles),
            )
            self._train_at_agents(federation, role_participants, agents, step, vote_request, mean)
        return FedTriNetState(mean.value_or(state.F), confidence, threshold)  # Eq. 1

    def _train_at_agents(
        self, federation: Federation, participants: Roster, agents: Roster,
        step: Callable[..., Any], request: LabelRequest | VoteRequest, mean: WeightedMean,
    ) -> None:  # fmt: skip
        """The participants train and upload; the others train for themselves, if all do."""
        federation.call_all(participants, step, request, aggregator=mean)
        if self.cfg.trains == "all":
            others = [agent for agent in agents if agent not in set(participants)]
            federation.call_all(others, step, dataclasses.replace(request, upload=False))

    def _count_phase_2_rounds(self, round_number: int) -> int:
        """Rounds since phase 2 began: 0 in its first, negative in phase 1."""
        return round_number - 1 - self.cfg.cold_start - self.cfg.warm_up

    def _sample_agents(self, federation: Federation, roster: Roster) -> Roster:
        """The participants: m of the agents, and a labelled server always."""
        at_server = tuple(agent for agent in roster if agent == federation.server)
        others = tuple(agent for agent in roster if agent != federation.server)
        return (*at_server, *federation.sample(others, self.cfg.agents_per_round))

    def _ask_confidence(
        self, state: FedTriNetState, federation: Federation, roster: Roster
    ) -> float:
        """theta-bar of Eq. 4: the mean over agents, or over all their rows ("mean")."""
        agents = with_role(roster, "mixed", "query")
        replies = federation.call_all(agents, self.confidence_pass, TrainRequest(state.F))
        pairs = [(reply.payload.value, reply.weight) for reply in replies if not reply.declined]
        if not pairs:  # no agent with unlabelled rows replied
            return state.confidence
        return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)

    def classifier(self, state: FedTriNetState) -> StateDict:
        return state.F

    def metrics(self, state: FedTriNetState) -> dict[str, float]:
        return {"train/confidence": state.confidence, "train/threshold": state.threshold}

    # Steps: where the data is ---------------------------------------------------------------

    @on_agent
    def supervised_pass(
        self, agent: SupportAgent, msg: LabelRequest, ctx: Context
    ) -> ModelUpdate | Ack:
        """Phase 1: E epochs on labelled rows, from W."""
        rows = agent.labelled
        self._weigh(len(rows), ctx)
        with randomness.seeded(ctx.rng("dropout")):
            self._load_weights(msg.F, ctx)
            self._learn_labels(rows, self.cfg.local_epochs, ctx, "labels")
        trained = local_training.weights_of(self._F)
        agent.memory = {**agent.memory, **pack_local_weights(trained)}
        return ModelUpdate(trained) if msg.upload else Ack()

    @on_agent
    def confidence_pass(self, agent: QueryAgent, msg: TrainRequest, ctx: Context) -> Confidence:
        """Eq. 4: W's confidence in this agent's unlabelled rows."""
        largest = self._predict(msg.F, agent.unlabelled, ctx, votes=False).amax(dim=1)
        if self.cfg.confidence == "max":
            return Confidence(float(largest.max()))
        ctx.weight = float(len(largest))
        return Confidence(float(largest.mean()))

    @on_agent
    def mixed_pass(
        self, agent: MixedAgent, msg: VoteRequest, ctx: Context
    ) -> ModelUpdate | Ack | Declined:
        """Phase 2 with rows of both kinds: the paper's only case."""
        return self._vote_and_train(agent, agent.labelled, agent.unlabelled, msg, ctx)

    @on_agent
    def support_pass(
        self, agent: SupportAgent, msg: VoteRequest, ctx: Context
    ) -> ModelUpdate | Ack | Declined:
        """Phase 2 without unlabelled rows: c learns from labels."""
        return self._vote_and_train(
            agent, agent.labelled, make_empty_unlabelled(agent.labelled), msg, ctx
        )

    @on_agent
    def query_pass(
        self, agent: QueryAgent, msg: VoteRequest, ctx: Context
    ) -> ModelUpdate | Ack | Declined:
        """Phase 2 without labels: c votes without fine-tuning and learns from pseudo-labels."""
        return self._vote_and_train(
            agent, make_empty_labelled(agent.unlabelled), agent.unlabelled, msg, ctx
        )

    def _vote_and_train(
        self, agent: SupportAgent | QueryAgent, labelled: LabelledRows,
        unlabelled: UnlabelledRows, msg: VoteRequest, ctx: Context,
    ) -> ModelUpdate | Ack | Declined:  # fmt: skip
        """Phase 2 at one agent: splice c, fine-tune it, vote (Eq. 3), train c (Eq. 6, 7)."""
        self._weigh(len(labelled) + len(unlabelled), ctx)
        local = unpack_local_weights(agent.memory) or msg.F
        with randomness.seeded(ctx.rng("dropout")):
            if self.cfg.local_player == "labelled":
                self._load_weights(msg.F, ctx)
                self._learn_labels(labelled, self.cfg.local_epochs, ctx, "labels")
                local = local_training.weights_of(self._F)
            self._load_weights(splice(msg.F, local, self._shallow), ctx)
            self._learn_labels(labelled, self.cfg.fine_tune_epochs, ctx, "fine-tuning")
            fine_tuned = local_training.weights_of(self._F)
            y, admitted, remembered = self._make_pseudo_labels(
                [local, msg.F, fine_tuned], unlabelled, agent.memory, msg.threshold, ctx
            )
            if not len(labelled) and not admitted.any():
                return Declined("no labelled row, and no row whose vote exceeds the threshold")
            self._load_weights(fine_tuned, ctx)
            planned_steps = plan_steps(
                self.cfg, len(labelled), int(admitted.sum()),
                t=self._count_phase_2_rounds(ctx.round),
                is_hot=int(remembered.get("hot", torch.zeros(()))) > 0,
                rng=ctx.rng("batches, both"),
            )  # fmt: skip
            x = torch.cat([labelled.x, unlabelled.x[admitted]])
            self._learn(x, torch.cat([labelled.y, y[admitted]]), planned_steps, ctx, "both")
        trained = local_training.weights_of(self._F)
        local = fine_tuned if self.cfg.remember == "fine_tuned" else trained
        agent.memory = {**agent.memory, **pack_local_weights(local), **remembered}
        return ModelUpdate(trained) if msg.upload else Ack()

    def _make_pseudo_labels(
        self, players: Sequence[StateDict], rows: UnlabelledRows, memory: Memory,
        threshold: float, ctx: Context,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Pseudo-labels (N,), which of them are admitted (N,), and what the agent remembers."""
        if not len(rows):
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool), {}
        probs = [self._predict(player, rows, ctx, votes=True) for player in players]
        agreements = [p.argmax(dim=1) == probs[0].argmax(dim=1) for p in probs]
        ctx.log_metric("train/agreement", float(torch.stack(agreements).all(dim=0).float().mean()))
        y, confident = vote(probs if self.cfg.local_votes else probs[1:], threshold)
        newly_admitted = admitted = confident
        remembered = dict[str, Tensor]()
        if self.cfg.pseudo_labels == "kept":
            former = memory.get("kept", torch.full_like(y, -1))
            newly_admitted = confident & (former < 0)
            y = torch.where(former < 0, y, former)
            admitted = confident | (former >= 0)
            remembered["kept"] = torch.where(admitted, y, -1)
        if self.cfg.retrain == "ramp":
            # "hot": visits so far that newly admitted PROFILED rows or more
            hot_visits = memory.get("hot", torch.zeros((), dtype=torch.int64))
            remembered["hot"] = hot_visits + (newly_admitted.sum() >= PROFILED)
        ctx.pseudo_labels(rows.ids, functional.one_hot(y, self.task.classes), admitted)
        return y, admitted, remembered

    # Local training -------------------------------------------------------------------------

    def _weigh(self, rows: int, ctx: Context) -> None:
        if self.cfg.weights == "rows":  # otherwise no count leaves the agent
            ctx.weight = float(rows)

    def _load_weights(self, weights: StateDict, ctx: Context) -> None:
        self.load_classifier(weights, ctx)

    @torch.no_grad()
    def _predict(
        self, weights: StateDict, rows: UnlabelledRows, ctx: Context, *, votes: bool
    ) -> Tensor:
        """Class probabilities (N, C). In a vote all players see the same view of a row."""
        self._load_weights(weights, ctx)
        self._F.train(votes and self.cfg.votes_in == "train")
        augment = self.cfg.augmentation() if votes else NONE
        rng, probs = ctx.rng("view of unlabelled rows"), []
        for x in torch.split(rows.x, CHUNK):
            views = augment(local_training.network_input(x, ctx.device), rng)
            probs.append(self._F(views).softmax(dim=1).cpu())
        return torch.cat(probs)

    def _learn_labels(self, rows: LabelledRows, epochs: int, ctx: Context, stage: str) -> None:
        """Epochs of cross-entropy on labelled rows alone."""
        rng, size = ctx.rng(f"batches, {stage}"), self.cfg.batch_size
        epoch_batches = (local_training.epoch_batches(len(rows), size, rng) for _ in range(epochs))
        batches = itertools.chain.from_iterable(epoch_batches)
        frozen = self.cfg.freeze_shallow and stage == "fine-tuning"
        for module in map(self._F.get_submodule, self._shallow):
            module.requires_grad_(not frozen)
        self._learn(rows.x, rows.y, ([(batch, 1.0)] for batch in batches), ctx, stage)
        self._F.requires_grad_(True)

    def _learn(
        self,
        x: Tensor,
        y: Tensor,
        planned_steps: Iterable[Sequence[Part]],
        ctx: Context,
        stage: str,
    ) -> None:
        """The planned steps by a fresh SGD on stored rows x (N, *shape) of classes y (N,)."""
        parameters = [p for p in self._F.parameters() if p.requires_grad]
        if not parameters:
            return  # every layer is shallow, and frozen
        sgd = optim.SGD(parameters, lr=self.cfg.learning_rate, momentum=self.cfg.momentum)
        augment, rng = self.cfg.augmentation(), ctx.rng(f"view, {stage}")
        steps = [(torch.cat([indices for indices, _ in parts]), parts) for parts in planned_steps]
        steps = [step for step in steps if can_learn_from(self._F, len(step[0]))]
        batches, losses = [rows for rows, _ in steps], list[Tensor]()
        view_batches = local_training.views_of(x, batches, lambda x: augment(x, rng), ctx.device)
        for (_, parts), views in zip(steps, view_batches, strict=True):
            logits_by_part = torch.split(self._F(views), [len(indices) for indices, _ in parts])
            terms = [
                weight * functional.cross_entropy(logits, y[indices].to(ctx.device))
                for (indices, weight), logits in zip(parts, logits_by_part, strict=True)
            ]
            loss = torch.stack(terms).sum()
            losses.append(local_training.minimise(sgd, loss))
        if losses:
            ctx.log_metric(f"train/loss/{stage}", local_training.mean_of(losses))
