"""FedMatch: weights are a sum, one part learns from labels and one without; like agents agree.

Jeong, Yoon, Yang, Hwang: "Federated Semi-Supervised Learning with Inter-Client Consistency &
Disjoint Learning" (ICLR 2021; arXiv:2006.12097). Every weight is a sum, theta = sigma + psi: sigma
learns from labelled rows and psi from unlabelled ones, each while the other is fixed.

    paper                                              here
    Eq. 1  KL of helpers' and own predictions          inter_client_loss
    Eq. 2  Phi                                         DisjointTrainer._consistency
    Eq. 3  agreement on a pseudo-label                 helper_agents.vote_agreement
    Eq. 4  L_s(sigma)                                  DisjointTrainer.learn_sigma
    Eq. 5  L_u(psi)                                    DisjointTrainer.learn_psi, penalties
    3.1    embeddings, KD-tree, every 10 rounds        _collect, _downloads, helper_agents
    3.2    sparse differences                          sparse_updates
    Alg. 1 labels at clients                           round -> learn_both
    Alg. 2 labels at the server                        round -> learn_sigma, learn_psi

Where labels may be: at the server (Alg. 2), at mixed agents (Alg. 1), and at support agents (ours:
each does what the server does, and the mean of their sigma is taken).

Where paper and authors' code differ we do as the code does, and every such difference is an option
(docs/fedmatch.md). Differs from both: (1) No labelled validation rows. There every client and the
server lower their learning rate when the loss on one common labelled set stalls; here the loss on
an agent's own labelled rows decides, and an agent without labels keeps its rate. (2) Rows are in
[-1, 1], not in [0, 1]. (3) A first visit always counts as two dense models (the code compares with
what another client left). (4) The slices of a stream are cut from an agent's shuffled rows, not
class by class, which would need their labels. (5) Every visit has at least one local step. (6) No
row is dropped when rows are divided among agents.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import pydantic.dataclasses
import torch
from torch import Tensor

from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.fedmatch import disjoint_training as disjoint
from privssl.algorithms.fedmatch.disjoint_training import DisjointTrainer, DisjointTraining, Place
from privssl.algorithms.fedmatch.helper_agents import bundle, draw_probe, nearest_agents, unbundle
from privssl.algorithms.fedmatch.sparse_updates import (
    DecomposedWeights,
    Download,
    sparse_download,
    sparse_upload,
    without_small,
)
from privssl.algorithms.local_ssl import Amount, needs_unlabelled
from privssl.core.agents import AgentRef, MixedAgent, QueryAgent, SupportAgent
from privssl.core.aggregation import average, uniform_weight
from privssl.core.federation import Federation, Roster
from privssl.core.messages import Declined, Message, Reply, StateDict
from privssl.core.task import Context, on_agent
from privssl.settings.schema import Count, Positive, Problem, strict

# Messages and state -------------------------------------------------------------------------


@dataclass(frozen=True)
class FedMatchRequest(Message):
    """Down to an agent: sigma and psi, and psi of its helpers (``helper_agents.bundle``)."""

    sigma: StateDict
    psi: StateDict
    helpers: StateDict | None = None


@dataclass(frozen=True)
class FedMatchUpdate(Message):
    """Up from an agent: what it trained."""

    sigma: StateDict | None
    psi: StateDict | None


@dataclass(frozen=True)
class FedMatchState:
    """What the server keeps between rounds.

    By agent that ever sent psi: its weights at the end of its last visit, and the prediction of
    that model for the probe.
    """

    sigma: StateDict
    psi: StateDict
    probe: Tensor  # (1, *shape) noise
    negligible: float  # entries of psi up to this size count as 0 in the released sum
    embeddings: Mapping[str, Tensor]  # agent -> (C,)
    held_sigma: Mapping[str, StateDict]
    held_psi: Mapping[str, StateDict]
    cost_down: float = 0.0  # dense models per agent of the last round, paper's accounting
    helped: float = 0.0  # share of the last round's agents that had helpers


# Config -------------------------------------------------------------------------------------


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedMatchConfig(DisjointTraining):
    """Section ``algorithm`` for FedMatch. Numbers are the authors' code's (CIFAR-10)."""

    name: Literal["fedmatch"] = "fedmatch"
    rounds: Positive = 200
    query_per_round: Positive | None = 5  # 0.05 of 100 agents; all when null or fewer
    server_epochs: Positive = 1  # of an agent with labels alone
    psi_factor: Amount = 0.2  # psi_0 / sigma_0; the paper has none
    sparse_down: bool = False  # true: agents train with what sparse differences give (paper)
    helpers: Count = 2  # H; 0: none
    helpers_every: Positive = 10  # rounds
    keep_helpers: bool = False  # true: an agent uses them until it gets others (paper)
    stream_slices: Positive = 1  # above 1: agents see one slice of their rows after the other

    def problems(self) -> Iterator[Problem]:
        """Settings under which psi diverges, or rows are never used."""
        product = self.learning_rate * self.l2_weight
        if product >= 1:
            yield Problem(
                "learning_rate",
                f"{self.learning_rate:g} times l2_weight {self.l2_weight:g} is {product:g}: from 1 "
                "on psi diverges from sigma. Lower one of them",
            )
        if self.stream_slices > self.rounds:
            yield Problem(
                "stream_slices",
                f"{self.stream_slices}, but there are {self.rounds} rounds: some rows would never "
                "be used. Give at most that many",
            )


# The algorithm ------------------------------------------------------------------------------


@final
class FedMatch(Algorithm[FedMatchState]):
    """Algorithm 1 where agents hold both kinds of rows, Algorithm 2 otherwise."""

    Config = FedMatchConfig
    StateType = FedMatchState
    # After a missing reply, server and agent compare with the last visit that both know of.
    missing_reply_policy = MissingReplyPolicy(quorum=("learn_sigma", "learn_psi", "learn_both"))
    cfg: FedMatchConfig

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        yield from needs_unlabelled(config)
        if config.data.labels == "labels-at-client" and config.agents.query:
            yield Problem(
                "agents.query",
                f"{config.agents.query}, but with labels at clients every agent of fedmatch holds "
                "both kinds of rows. Set agents.query to 0",
            )
        if config.model.norm in ("batch", "static"):
            yield Problem(
                "model.norm",
                f"{config.model.norm} has statistics, which are no sum of sigma and psi. Set none, "
                "as in the paper, or group",
            )

    def start(self, federation: Federation) -> FedMatchState:
        sigma = self.initial_classifier(federation)
        psi = {name: self.cfg.psi_factor * weight for name, weight in sigma.items()}
        probe = draw_probe(self.task.shape, federation.rng("probe"))
        negligible = self.cfg.hyperparameters(_place(federation)).negligible
        return FedMatchState(sigma, psi, probe, negligible, {}, {}, {})

    def round(self, state: FedMatchState, federation: Federation) -> FedMatchState:
        at_clients = _place(federation) == "client"
        if not at_clients:  # Alg. 2 l. 4-8
            request = FedMatchRequest(state.sigma, state.psi)
            replies = federation.call_all(federation.support, self.learn_sigma, request)
            sigma = average(replies, "sigma", otherwise=state.sigma, weight=uniform_weight)
            state = dataclasses.replace(state, sigma=sigma)
        down = self._downloads(state, federation)  # Alg. 1 l. 4-6, Alg. 2 l. 9-11
        step = self.learn_both if at_clients else self.learn_psi
        replies = federation.call_all(down.agents, step, down.request)  # Alg. 1 l. 7, Alg. 2 l. 12
        return self._collect(state, down, replies)  # Alg. 1 l. 8-11, Alg. 2 l. 13-15

    def _downloads(self, state: FedMatchState, federation: Federation) -> "Downloads":
        """The agents of a round, and what each is sent."""
        agents = federation.sample(federation.query, self.cfg.query_per_round)
        names: Mapping[str, tuple[str, ...]] = {}
        if federation.round.number % self.cfg.helpers_every == 0:
            ids = [agent.id for agent in agents]
            names = nearest_agents(state.embeddings, ids, self.cfg.helpers)
        helpers = {agent: [state.held_psi[h] for h in chosen] for agent, chosen in names.items()}
        cuts = self.cfg.hyperparameters(_place(federation)).sparsity_thresholds
        sent, by_agent = DecomposedWeights(state.sigma, state.psi), {}
        for agent in (agent.id for agent in agents):
            held = None
            if agent in state.held_psi:
                held = DecomposedWeights(state.held_sigma[agent], state.held_psi[agent])
            sparse = sparse_download(held, sent, helpers.get(agent, []), cuts)
            by_agent[agent] = sparse if self.cfg.sparse_down else Download(sent, sparse.cost)
        return Downloads(agents, by_agent, helpers)

    def _collect(
        self, state: FedMatchState, down: "Downloads", replies: Sequence[Reply[FedMatchUpdate]]
    ) -> FedMatchState:
        """Embed the new models and average them, each with the same weight (Alg. 1 l. 10, Alg. 2
        l. 15)."""
        replies = [reply for reply in replies if not reply.declined]
        sigmas, psis, embeddings = {}, {}, {}
        for reply in replies:
            agent, sigma, psi = reply.sender.id, reply.payload.sigma, reply.payload.psi
            assert psi is not None
            # None: it trained with the sigma that it got
            sigmas[agent] = down.by_agent[agent].weights.sigma if sigma is None else sigma
            psis[agent] = psi
            embeddings[agent] = disjoint.predict(
                self._F, disjoint.theta(sigmas[agent], psi), state.probe
            )[0]
        return dataclasses.replace(
            state,
            sigma=average(replies, "sigma", otherwise=state.sigma, weight=uniform_weight),
            psi=average(replies, "psi", otherwise=state.psi, weight=uniform_weight),
            embeddings={**state.embeddings, **embeddings},
            held_sigma={**state.held_sigma, **sigmas},
            held_psi={**state.held_psi, **psis},
            cost_down=sum(d.cost for d in down.by_agent.values()) / max(len(down.agents), 1),
            helped=len(down.helpers) / max(len(down.agents), 1),
        )

    def classifier(self, state: FedMatchState) -> StateDict:
        return disjoint.theta(state.sigma, without_small(state.psi, state.negligible))

    def metrics(self, state: FedMatchState) -> dict[str, float]:
        gap = sum(float((w - state.psi[n]).square().sum()) for n, w in state.sigma.items())
        size = sum(float(w.square().sum()) for w in state.sigma.values())
        return {
            "train/cost_down": state.cost_down,
            "train/helped": state.helped,
            "train/psi_gap": (gap / size) ** 0.5 if size else 0.0,  # |psi - sigma| / |sigma|
        }

    # Steps: where the data is ---------------------------------------------------------------

    @on_agent
    def learn_sigma(
        self, agent: SupportAgent, msg: FedMatchRequest, ctx: Context
    ) -> FedMatchUpdate:
        """Eq. 4 where labels are alone: sigma learns beside psi without its small entries."""
        numbers, rows = self.cfg.hyperparameters("server"), agent.labelled
        order = disjoint.kept_order("labelled", len(rows), agent, ctx)
        start = DecomposedWeights(msg.sigma, without_small(msg.psi, numbers.negligible))
        trainer = DisjointTrainer(self.cfg, "server", self._F, start, agent, ctx)
        for picked in torch.split(order, numbers.batch_size) * self.cfg.server_epochs:
            trainer.learn_sigma(rows, picked)
        trainer.end()
        return FedMatchUpdate(trainer.update_of("sigma"), None)

    @on_agent
    def learn_psi(
        self, agent: QueryAgent, msg: FedMatchRequest, ctx: Context
    ) -> FedMatchUpdate | Declined:
        """Eq. 5 at an agent without labels: psi learns beside a fixed sigma."""
        numbers, rows = self.cfg.hyperparameters("server"), agent.unlabelled
        order, helpers = self._slice(agent, ctx), self._helpers(agent, msg)
        if not len(order):
            return Declined("no rows in this slice of the stream")
        start = DecomposedWeights(msg.sigma, msg.psi)
        trainer = DisjointTrainer(self.cfg, "server", self._F, start, agent, ctx)
        for picked in disjoint.whole_batches(order, numbers.batch_size) * self.cfg.epochs:
            trainer.learn_psi(rows, picked, helpers)
        trainer.end()
        cuts = numbers.sparsity_thresholds
        psi, cost = sparse_upload(trainer.update_of("psi"), msg.psi, cuts, is_psi=True)
        ctx.log_metric("train/cost_up", cost)
        return FedMatchUpdate(None, psi)

    @on_agent
    def learn_both(self, agent: MixedAgent, msg: FedMatchRequest, ctx: Context) -> FedMatchUpdate:
        """Eq. 4 and 5 in turn, step by step: Alg. 1 l. 15-19."""
        numbers, rows, more = self.cfg.hyperparameters("client"), agent.labelled, agent.unlabelled
        labelled = disjoint.kept_order("labelled", len(rows), agent, ctx)
        unlabelled, helpers = self._slice(agent, ctx), self._helpers(agent, msg)
        start = DecomposedWeights(msg.sigma, msg.psi)
        trainer = DisjointTrainer(self.cfg, "client", self._F, start, agent, ctx)
        for s, u in (
            disjoint.paired_batches(labelled, unlabelled, numbers.batch_size) * self.cfg.epochs
        ):
            trainer.learn_sigma(rows, s)
            trainer.learn_psi(more, u, helpers)
        trainer.end()
        cuts = numbers.sparsity_thresholds
        sigma, cost = sparse_upload(trainer.update_of("sigma"), msg.sigma, cuts, is_psi=False)
        psi, cost_of_psi = sparse_upload(trainer.update_of("psi"), msg.psi, cuts, is_psi=True)
        ctx.log_metric("train/cost_up", cost + cost_of_psi)
        return FedMatchUpdate(sigma, psi)

    def _slice(self, agent: QueryAgent, ctx: Context) -> Tensor:
        """Numbers of the unlabelled rows of this round's slice of the stream, in kept order."""
        order = disjoint.kept_order("unlabelled", len(agent.unlabelled), agent, ctx)
        slices = self.cfg.stream_slices
        number = min((ctx.round - 1) * slices // self.cfg.rounds, slices - 1)
        return torch.tensor_split(order, slices)[number]

    def _helpers(self, agent: QueryAgent, msg: FedMatchRequest) -> list[dict[str, Tensor]]:
        """Psi of the helpers in the message, or of those that the agent keeps."""
        if not self.cfg.keep_helpers:
            return unbundle(msg.helpers)
        if msg.helpers is not None:
            rest = {k: v for k, v in agent.memory.items() if not k.startswith("helper/")}
            agent.memory = rest | {f"helper/{k}": v for k, v in msg.helpers.items()}
        kept = {k: v for k, v in agent.memory.items() if k.startswith("helper/")}
        return unbundle({k.removeprefix("helper/"): v for k, v in kept.items()})


@dataclass(frozen=True)
class Downloads:
    """What a round sends: to which agents, which weights, which helpers."""

    agents: Roster
    by_agent: Mapping[str, Download]
    helpers: Mapping[str, Sequence[StateDict]]  # psi of each helper; only of agents that get any

    def request(self, agent: AgentRef) -> FedMatchRequest:
        """The message for one agent."""
        weights = self.by_agent[agent.id].weights
        return FedMatchRequest(weights.sigma, weights.psi, bundle(self.helpers.get(agent.id, ())))


def _place(federation: Federation) -> Place:
    """Where labels are: at clients when agents hold both kinds of rows."""
    return "client" if any(agent.role == "mixed" for agent in federation.support) else "server"
