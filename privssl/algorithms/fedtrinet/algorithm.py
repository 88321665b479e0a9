"""FedTriNet: three networks vote on pseudo-labels, one of them spliced from the other two.

Che, Long, Wang, Wang, Xiao, Ma: "FedTriNet: A Pseudo Labeling Method with Three Players for
Federated Semi-supervised Learning" (IEEE BigData 2021). W is the global network, l an agent's own
network as its last visit left it, c the spliced one: the shallow half of W, the deep half of l.

    paper                                         here
    phase 1: FedAvg on labelled rows, T1 rounds   round -> supervised_pass
    phase 2: largest confidence of every client   round -> confidence_pass (Eq. 4)
    threshold theta(t)                            three_players.shrinkage (Eq. 5)
    third player: splice, then fine-tune          _visit, models.surgery.splice
    vote of three, rows above theta(t)            three_players.vote
    loss on labels + lambda * on pseudo-labels    three_players.steps, _learn (Eq. 6)
    mean of what participants trained (Eq. 1)     mean.Mean

Where an agent lacks one kind of rows its term drops out, so labels may be anywhere. The paper has
mixed agents alone (``labels-at-client``). A support agent finds nothing to admit and keeps to its
labels; a query agent sits out phase 1, does not fine-tune, and says nothing when it admits no
row; a labelled server takes part in every round, beside the agents that are drawn.

Differs from the paper: (1) lambda is 1, as none is given. (2) An agent that never trained has
W for l, so that c is W. (3) Rows come in [-1, 1] and in their own size; the authors resize digits
to 32x32. (4) No augmentation, as in the authors' code (``augment``). (5) T1, T2, E, batches and
rates are the authors' code's. (6) What goes up is the trained network: the algorithm box adds up
differences, which equals Eq. 1 only for differences from W, and phase 2 starts from c. Where
the code is another method than the paper, a switch has both readings: docs/fedtrinet.md.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.fedtrinet.voting import PROFILED, FedTriNetConfig, Part, steps, vote
from privssl.algorithms.local_ssl import needs_unlabelled
from privssl.core.agents import (
    LabelledRows,
    Memory,
    MixedAgent,
    QueryAgent,
    SupportAgent,
    UnlabelledRows,
)
from privssl.core.aggregation import WeightedMean
from privssl.core.federation import Federation, Roster
from privssl.core.messages import Declined, Message, StateDict
from privssl.core.task import Context, Phase, Task, on_agent
from privssl.data.affine_augment import NONE
from privssl.models.splice import splice
from privssl.privacy.plan import PrivatePlan
from privssl.runtime import randomness
from privssl.settings.schema import Problem
from privssl.training import local_training, optim

CHUNK = 512  # rows of one forward pass when labels are guessed


# What travels -------------------------------------------------------------------------------


@dataclass(frozen=True)
class GlobalModel(Message):
    """Down: the global network W, to learn labels from or to be asked for its confidence."""

    F: StateDict


@dataclass(frozen=True)
class FedTriNetRequest(Message):
    """Down in phase 2: W, and what a vote must exceed to be believed."""

    F: StateDict
    threshold: float


@dataclass(frozen=True)
class Confidence(Message):
    """Up in phase 2: W's confidence in an agent's unlabelled rows, largest or mean, in [0, 1]."""

    value: float


@dataclass(frozen=True)
class FedTriNetUpdate(Message):
    """Up: the network after local training; never a difference."""

    F: StateDict


@dataclass(frozen=True)
class FedTriNetState:
    """What the server keeps between rounds."""

    F: StateDict  # W
    confidence: float = 1.0  # theta-bar when it was measured last
    threshold: float = 1.0  # theta(t) of the last round; 1: nothing can exceed it


# The algorithm ------------------------------------------------------------------------------


@final
class FedTriNet(Algorithm[FedTriNetState]):
    """Phase 1 on labels, phase 2 with three players."""

    Config = FedTriNetConfig
    StateType = FedTriNetState
    missing_reply_policy = MissingReplyPolicy(
        quorum=("supervised_pass", "confidence_pass", "mixed_pass", "support_pass", "query_pass")
    )
    cfg: FedTriNetConfig

    def __init__(
        self, config: FedTriNetConfig, task: Task, plan: PrivatePlan | None = None
    ) -> None:
        super().__init__(config, task, plan)
        self._F = task.new_classifier()
        self._shallow = _shallow_modules(self._F, config)
        self._couples = any(isinstance(module, nn.BatchNorm2d) for module in self._F.modules())

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        yield from needs_unlabelled(config)
        if config.model.norm == "static":
            yield Problem(
                "model.norm",
                "static norm predicts with statistics that are collected for one network, and "
                "FedTriNet predicts with three at every visit. Set model.norm: group",
            )
        if config.model.norm == "batch" and config.algorithm.votes_in == "train":
            yield Problem(
                "algorithm.votes_in",
                "train, but model.norm is batch: what a row is called would go by the rows beside "
                "it. Set algorithm.votes_in: eval, or model.norm: group",
            )

    def phases(self) -> tuple[Phase, ...]:
        after = self.cfg.rounds - self.cfg.warm_up
        planned = (
            Phase("cold start", self.cfg.cold_start),
            Phase("labels", self.cfg.warm_up),
            Phase("three players", after),
        )
        return tuple(phase for phase in planned if phase.rounds)

    def start(self, federation: Federation) -> FedTriNetState:
        return FedTriNetState(
            local_training.fresh_weights(self.task.new_classifier, federation.rng("init F"))
        )

    def round(self, state: FedTriNetState, federation: Federation) -> FedTriNetState:
        t = self._clock(federation.round.number)
        mean = WeightedMean("F")  # of what participants trained
        if t < 0:  # phase 1
            cold = federation.round.number <= self.cfg.cold_start
            learners = (
                federation.support if cold else self._sample_agents(federation, federation.support)
            )
            federation.call_all(
                learners, self.supervised_pass, GlobalModel(state.F), aggregator=mean
            )
            return dataclasses.replace(state, F=mean.value_or(state.F))  # Eq. 1
        taking_part = self._sample_agents(federation, federation.agents)
        confidence = state.confidence
        if self.cfg.measured == "every_round" or t == 0:
            asked = federation.agents if self.cfg.measured_at == "all" else taking_part
            confidence = self._ask_confidence(state, federation, asked)
        threshold = self.cfg.threshold(confidence, t)
        lesson = FedTriNetRequest(state.F, threshold)
        with_labels = _having(taking_part, "support", "server")
        federation.call_all(_having(taking_part, "mixed"), self.mixed_pass, lesson, aggregator=mean)
        federation.call_all(with_labels, self.support_pass, lesson, aggregator=mean)
        federation.call_all(_having(taking_part, "query"), self.query_pass, lesson, aggregator=mean)
        return FedTriNetState(mean.value_or(state.F), confidence, threshold)  # Eq. 1

    def _clock(self, round_number: int) -> int:
        """Rounds since phase 2 began: 0 in its first, negative in phase 1."""
        return round_number - 1 - self.cfg.cold_start - self.cfg.warm_up

    def _sample_agents(self, federation: Federation, roster: Roster) -> Roster:
        """Who takes part: m of the agents, and a labelled server always."""
        at_server = tuple(agent for agent in roster if agent == federation.server)
        others = tuple(agent for agent in roster if agent != federation.server)
        return (*at_server, *federation.sample(others, self.cfg.agents_per_round))

    def _ask_confidence(
        self, state: FedTriNetState, federation: Federation, asked: Roster
    ) -> float:
        """theta-bar of Eq. 4: the mean over agents, or over all their rows ("mean")."""
        group = _having(asked, "mixed", "query")
        replies = federation.call_all(group, self.confidence_pass, GlobalModel(state.F))
        told = [(reply.payload.value, reply.weight) for reply in replies if not reply.declined]
        if not told:  # nobody who holds unlabelled rows answered
            return state.confidence
        return sum(value * weight for value, weight in told) / sum(weight for _, weight in told)

    def classifier(self, state: FedTriNetState) -> StateDict:
        return state.F

    def metrics(self, state: FedTriNetState) -> dict[str, float]:
        return {"train/confidence": state.confidence, "train/threshold": state.threshold}

    # Steps: where the data is ---------------------------------------------------------------

    @on_agent
    def supervised_pass(
        self, agent: SupportAgent, msg: GlobalModel, ctx: Context
    ) -> FedTriNetUpdate:
        """Phase 1: E epochs on labelled rows, from W."""
        rows = agent.labelled
        self._weigh(len(rows), ctx)
        with randomness.seeded(ctx.rng("dropout")):
            self._load(msg.F, ctx)
            self._learn_labels(rows, self.cfg.local_epochs, ctx, "labels")
        trained = local_training.weights_of(self._F)
        agent.memory = {**agent.memory, **_as_memory(trained)}
        return FedTriNetUpdate(trained)

    @on_agent
    def confidence_pass(self, agent: QueryAgent, msg: GlobalModel, ctx: Context) -> Confidence:
        """Eq. 4: how sure W is of this agent's unlabelled rows."""
        sure = self._predict(msg.F, agent.unlabelled, ctx, votes=False).amax(dim=1)
        if self.cfg.confidence == "max":
            return Confidence(float(sure.max()))
        ctx.weight = float(len(sure))
        return Confidence(float(sure.mean()))

    @on_agent
    def mixed_pass(
        self, agent: MixedAgent, msg: FedTriNetRequest, ctx: Context
    ) -> FedTriNetUpdate | Declined:
        """Phase 2 where there are rows of both kinds: the paper's only case."""
        return self._visit(agent, agent.labelled, agent.unlabelled, msg, ctx)

    @on_agent
    def support_pass(
        self, agent: SupportAgent, msg: FedTriNetRequest, ctx: Context
    ) -> FedTriNetUpdate | Declined:
        """Phase 2 without unlabelled rows: the splice learns from labels."""
        rows = agent.labelled
        return self._visit(agent, rows, UnlabelledRows(rows.x[:0], rows.ids[:0]), msg, ctx)

    @on_agent
    def query_pass(
        self, agent: QueryAgent, msg: FedTriNetRequest, ctx: Context
    ) -> FedTriNetUpdate | Declined:
        """Phase 2 without labels: the splice votes untuned and learns from pseudo-labels."""
        rows = agent.unlabelled
        none = LabelledRows(rows.x[:0], torch.empty(0, dtype=torch.int64), rows.ids[:0])
        return self._visit(agent, none, rows, msg, ctx)

    def _visit(
        self, agent: SupportAgent | QueryAgent, labelled: LabelledRows,
        unlabelled: UnlabelledRows, msg: FedTriNetRequest, ctx: Context,
    ) -> FedTriNetUpdate | Declined:  # fmt: skip
        self._weigh(len(labelled) + len(unlabelled), ctx)
        own = _from_memory(agent.memory) or msg.F
        with randomness.seeded(ctx.rng("dropout")):
            self._load(splice(msg.F, own, self._shallow), ctx)
            self._learn_labels(labelled, self.cfg.fine_tune_epochs, ctx, "fine-tuning")
            tuned = local_training.weights_of(self._F)
            y, admitted, kept = self._pseudo_labels(
                [own, msg.F, tuned], unlabelled, agent.memory, msg.threshold, ctx
            )
            if not len(labelled) and not admitted.any():
                return Declined("no labelled row, and no row that the three are sure of")
            self._load(tuned, ctx)
            hot = int(kept.get("hot", torch.zeros(()))) > 0
            self._learn(
                torch.cat([labelled.x, unlabelled.x[admitted]]),
                torch.cat([labelled.y, y[admitted]]),
                steps(
                    self.cfg,
                    len(labelled),
                    int(admitted.sum()),
                    t=self._clock(ctx.round),
                    hot=hot,
                    rng=ctx.rng("batches, both"),
                ),
                ctx,
                "both",
            )
        trained = local_training.weights_of(self._F)
        own = tuned if self.cfg.remember == "fine_tuned" else trained
        agent.memory = {**agent.memory, **_as_memory(own), **kept}
        return FedTriNetUpdate(trained)

    def _pseudo_labels(
        self, players: Sequence[StateDict], rows: UnlabelledRows, memory: Memory,
        threshold: float, ctx: Context,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Labels (N,), which of them are believed (N,), and what of it is remembered."""
        if not len(rows):
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool), {}
        probs = [self._predict(player, rows, ctx, votes=True) for player in players]
        same = [p.argmax(dim=1) == probs[0].argmax(dim=1) for p in probs]
        ctx.log_metric("train/agreement", float(torch.stack(same).all(dim=0).float().mean()))
        y, admitted = vote(probs if self.cfg.local_votes else probs[1:], threshold)
        new, kept = admitted, dict[str, Tensor]()
        if self.cfg.pseudo_labels == "kept":
            before = memory.get("kept", torch.full_like(y, -1))
            new = admitted & (before < 0)
            y = torch.where(before < 0, y, before)
            admitted = admitted | (before >= 0)
            kept["kept"] = torch.where(admitted, y, -1)
        if self.cfg.retrain == "ramp":
            visits = memory.get("hot", torch.zeros((), dtype=torch.int64))
            kept["hot"] = visits + (new.sum() >= PROFILED)
        ctx.pseudo_labels(rows.ids, functional.one_hot(y, self.task.classes), admitted)
        return y, admitted, kept

    # Local training -------------------------------------------------------------------------

    def _weigh(self, rows: int, ctx: Context) -> None:
        if self.cfg.weights == "rows":  # else no count leaves the agent
            ctx.weight = float(rows)

    def _load(self, weights: StateDict, ctx: Context) -> None:
        local_training.load_weights(self._F, weights, ctx.device)

    @torch.no_grad()
    def _predict(
        self, weights: StateDict, rows: UnlabelledRows, ctx: Context, *, votes: bool
    ) -> Tensor:
        """Class probabilities (N, C). In a vote all players see the same view of a row."""
        self._load(weights, ctx)
        self._F.train(votes and self.cfg.votes_in == "train")
        augment = self.cfg.augmentation() if votes else NONE
        rng, probs = ctx.rng("view of unlabelled rows"), []
        for x in torch.split(rows.x, CHUNK):
            seen = augment(local_training.network_input(x, ctx.device), rng)
            probs.append(self._F(seen).softmax(dim=1).cpu())
        return torch.cat(probs)

    def _learn_labels(self, rows: LabelledRows, epochs: int, ctx: Context, purpose: str) -> None:
        """Epochs of cross-entropy on labelled rows alone."""
        rng = ctx.rng(f"batches, {purpose}")
        size = self.cfg.batch_size
        batches = (
            b for _ in range(epochs) for b in local_training.epoch_batches(len(rows), size, rng)
        )
        frozen = self.cfg.freeze_shallow and purpose == "fine-tuning"
        for module in map(self._F.get_submodule, self._shallow):
            module.requires_grad_(not frozen)
        self._learn(rows.x, rows.y, ([(batch, 1.0)] for batch in batches), ctx, purpose)
        self._F.requires_grad_(True)

    def _learn(
        self, x: Tensor, y: Tensor, planned: Iterable[Sequence[Part]], ctx: Context, purpose: str
    ) -> None:
        """A fresh SGD takes the planned steps on stored rows x (N, *shape), classes y (N,)."""
        trained = [p for p in self._F.parameters() if p.requires_grad]
        if not trained:
            return  # the shallow half is everything, and frozen
        sgd = optim.SGD(trained, lr=self.cfg.learning_rate, momentum=self.cfg.momentum)
        augment, rng = self.cfg.augmentation(), ctx.rng(f"view, {purpose}")
        steps = [(torch.cat([picked for picked, _ in parts]), parts) for parts in planned]
        if self._couples:  # batch norm cannot normalise a single row
            steps = [(rows, parts) for rows, parts in steps if len(rows) > 1]
        batches, losses = [rows for rows, _ in steps], list[Tensor]()
        seen = local_training.views_of(x, batches, lambda x: augment(x, rng), ctx.device)
        for (_, parts), views in zip(steps, seen, strict=True):
            by_part = torch.split(self._F(views), [len(picked) for picked, _ in parts])
            loss = torch.stack(
                [
                    weight * functional.cross_entropy(mine, y[picked].to(ctx.device))
                    for (picked, weight), mine in zip(parts, by_part, strict=True)
                ]
            ).sum()
            losses.append(local_training.minimise(sgd, loss))
        if losses:
            ctx.log_metric(f"train/loss/{purpose}", local_training.mean_of(losses))


# Small things -----------------------------------------------------------------------------


def _having(roster: Roster, *roles: str) -> Roster:
    """The agents of a roster that have one of the roles."""
    return tuple(agent for agent in roster if agent.role in roles)


def _shallow_modules(network: nn.Module, cfg: FedTriNetConfig) -> tuple[str, ...]:
    """Names of the modules that c takes from W.

    Raises:
        ConfigError: ``shallow`` names one that is not there.
    """
    weights = network.state_dict()
    if cfg.shallow:
        splice(weights, weights, cfg.shallow)
        return cfg.shallow
    owners = dict.fromkeys(key.rpartition(".")[0] for key in weights)  # in the order they run
    layers = {name: network.get_submodule(name) for name in owners}
    if cfg.shallow_convolutions is None:
        return tuple(layers)
    found, shallow = 0, []
    for name, module in layers.items():
        found += isinstance(module, nn.Conv2d)
        if found > cfg.shallow_convolutions or isinstance(module, nn.Linear):
            break
        shallow.append(name)
    return tuple(shallow)


def _as_memory(weights: StateDict) -> dict[str, Tensor]:
    return {f"local/{name}": tensor for name, tensor in weights.items()}


def _from_memory(memory: Memory) -> dict[str, Tensor]:
    """l, or nothing where an agent never trained."""
    local = {n: tensor for n, tensor in memory.items() if n.startswith("local/")}
    return {name.removeprefix("local/"): tensor for name, tensor in local.items()}
