"""FedMatch: weights are a sum, one part learns from labels and one without; like agents agree.

Jeong, Yoon, Yang, Hwang: "Federated Semi-Supervised Learning with Inter-Client Consistency &
Disjoint Learning" (ICLR 2021; arXiv:2006.12097). Every weight is a sum, theta = sigma + psi: sigma
learns from labelled rows and psi from unlabelled ones, each while the other is fixed.

    paper                                              here
    Eq. 1  KL of helpers' and own predictions          inter_client_loss
    Eq. 2  Phi                                         DisjointTrainer._compute_consistency_loss
    Eq. 3  agreement on a pseudo-label                 helper_agents.vote_agreement
    Eq. 4  L_s(sigma)                                  DisjointTrainer.learn_sigma
    Eq. 5  L_u(psi)                                    DisjointTrainer.learn_psi, penalties
    3.1    embeddings, KD-tree, every 10 rounds        _collect, _make_downloads, helper_agents
    3.2    sparse differences                          sparse_updates, core/sparse_tensors
    A.3    learning rate by the validation loss        _update_plateaus, step_plateau
    Alg. 1 labels at clients                           round -> learn_both
    Alg. 2 labels at the server                        round -> learn_sigma, learn_psi

Where labels may be: at the server (Alg. 2), at mixed agents (Alg. 1), and at support agents (ours).
Each of these does what the server does, and the mean of their sigma is taken.

Where paper and authors' code differ we do as the code does; ``profile: fedmatch-paper`` does as the
paper (settings.py). Differs from both: (1) The server computes the loss of an agent's network on
``data.validation`` and sends it its rate: there every client has the labelled validation set.
(2) Rows are in [-1, 1], not in [0, 1]. (3) A first visit always counts as two dense models (the
code compares with what another client left). (4) Every visit has at least one local step. (5) No
row is dropped when rows are divided among agents. docs/fedmatch.md has them all.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.fedmatch import disjoint_training as disjoint
from privssl.algorithms.fedmatch.disjoint_training import DisjointTrainer
from privssl.algorithms.fedmatch.exchange import (
    Downloads,
    FedMatchRequest,
    FedMatchUpdate,
    decode_request,
    encode_update,
)
from privssl.algorithms.fedmatch.helper_agents import draw_probe, nearest_agents
from privssl.algorithms.fedmatch.settings import FedMatchConfig, LabelLocation, SlicesOf
from privssl.algorithms.fedmatch.sparse_updates import (
    DecomposedWeights,
    make_sparse_download,
    zero_small_entries,
)
from privssl.algorithms.local_ssl import needs_unlabelled, select_stream_slice
from privssl.core.agents import MixedAgent, QueryAgent, SupportAgent
from privssl.core.aggregation import average, uniform_weight
from privssl.core.federation import Federation, Roster
from privssl.core.messages import Declined, Reply, StateDict
from privssl.core.task import Context, on_agent
from privssl.settings.schema import Problem

# State ----------------------------------------------------------------------------------


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
    cost_down_sigma: float = 0.0  # of cost_down
    cost_down_psi: float = 0.0  # of cost_down; the rest is of helpers
    bytes_down: float = 0.0  # of messages per agent of the last round, in dense models
    bytes_up: float = 0.0
    helped_at: Mapping[str, int] = field(default_factory=dict)  # agent -> round of its helpers
    plateaus: Mapping[str, Tensor] = field(default_factory=dict)  # agent -> (3,), by validation


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
        hparams = config.algorithm.hyperparameters("server")
        if hparams.decay_on == "validation" and not config.data.validation:
            yield Problem(
                "data.validation",
                "0, but learning rates fall by the loss on validation rows, as in the paper. Give "
                "some (paper: 3,000), or set algorithm.decay_on: labelled",
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
        if not self.cfg.decomposition:  # psi is the whole network
            psi, sigma = {name: weight + psi[name] for name, weight in sigma.items()}, {}
        probe = draw_probe(self.task.shape, federation.rng("probe"))
        negligible = self.cfg.hyperparameters(_labels_at(federation)).negligible
        return FedMatchState(sigma, psi, probe, negligible, {}, {}, {})

    def round(self, state: FedMatchState, federation: Federation) -> FedMatchState:
        at_clients = _labels_at(federation) == "client"
        if not at_clients:  # Alg. 2 l. 4-8
            state = self._train_at_support(state, federation)
        downloads = self._make_downloads(state, federation)  # Alg. 1 l. 4-6, Alg. 2 l. 9-11
        step, traffic_before = self.learn_both if at_clients else self.learn_psi, federation.traffic
        # Alg. 1 l. 7, Alg. 2 l. 12
        replies = federation.call_all(downloads.agents, step, downloads.make_request)
        # Alg. 1 l. 8-11, Alg. 2 l. 13-15
        state = self._collect(state, downloads, replies, federation)
        dense_bytes = sum(w.numel() * w.element_size() for w in state.psi.values())
        dense_bytes_of_all = dense_bytes * max(len(downloads.agents), 1)
        return dataclasses.replace(
            state,
            bytes_down=(federation.traffic.down - traffic_before.down) / dense_bytes_of_all,
            bytes_up=(federation.traffic.up - traffic_before.up) / dense_bytes_of_all,
        )

    def _train_at_support(self, state: FedMatchState, federation: Federation) -> FedMatchState:
        learning_rates = self._assign_learning_rates(state, federation.support, "server")
        replies = federation.call_all(
            federation.support, self.learn_sigma,
            lambda agent: FedMatchRequest(
                state.sigma, state.psi, learning_rate=learning_rates[agent.id]
            ),
        )  # fmt: skip
        networks = {
            reply.sender.id: DecomposedWeights(
                reply.payload.sigma or state.sigma, reply.payload.psi or state.psi
            )
            for reply in replies
            if not reply.declined
        }
        return dataclasses.replace(
            state,
            sigma=average(replies, "sigma", otherwise=state.sigma, weight=uniform_weight),
            psi=average(replies, "psi", otherwise=state.psi, weight=uniform_weight),
            plateaus=self._update_plateaus(state, networks, federation),
        )

    def _assign_learning_rates(
        self, state: FedMatchState, agents: Roster, labels_at: LabelLocation
    ) -> dict[str, float | None]:
        """The rate that each agent is sent; None: its own, by the loss on its labels."""
        hparams = self.cfg.hyperparameters(labels_at)
        if hparams.decay_on == "labelled":
            return dict.fromkeys(agent.id for agent in agents)
        plateau = disjoint.make_plateau(self.cfg.learning_rate, hparams.patience)
        return {agent.id: float(state.plateaus.get(agent.id, plateau)[0]) for agent in agents}

    def _update_plateaus(
        self, state: FedMatchState, networks: Mapping[str, DecomposedWeights],
        federation: Federation,
    ) -> Mapping[str, Tensor]:  # fmt: skip
        """A.3: after each visit, the agent's plateau with its network's loss on validation rows."""
        hparams = self.cfg.hyperparameters(_labels_at(federation))
        if hparams.decay_on == "labelled":
            return state.plateaus
        new_plateau = disjoint.make_plateau(self.cfg.learning_rate, hparams.patience)
        plateaus = dict(state.plateaus)
        for agent, network in networks.items():
            psi = zero_small_entries(network.psi, state.negligible)
            loss = federation.validation_loss(disjoint.theta(network.sigma, psi))
            if loss is not None or agent in plateaus:
                plateaus[agent] = disjoint.step_plateau(
                    plateaus.get(agent, new_plateau),
                    math.nan if loss is None else loss,
                    hparams.patience,
                )
        return plateaus

    def _make_downloads(self, state: FedMatchState, federation: Federation) -> Downloads:
        """The agents of a round, and what each is sent."""
        hparams, now = self.cfg.hyperparameters(_labels_at(federation)), federation.round.number
        agents = federation.sample(federation.query, self.cfg.query_per_round)
        period, never = self.cfg.helpers_every, -self.cfg.helpers_every
        if hparams.refresh_helpers == "age":
            due = [a.id for a in agents if now - state.helped_at.get(a.id, never) >= period]
        else:
            due = [a.id for a in agents if now % period == 0]
        helper_ids = nearest_agents(state.embeddings, due, self.cfg.helpers)
        helpers = {agent: [state.held_psi[h] for h in ids] for agent, ids in helper_ids.items()}
        weights, by_agent = DecomposedWeights(state.sigma, state.psi), {}
        sparse = self.cfg.sparse_down or hparams.sparse_messages
        for agent in (agent.id for agent in agents):
            agent_weights = None
            if agent in state.held_psi:
                agent_weights = DecomposedWeights(state.held_sigma[agent], state.held_psi[agent])
            download = make_sparse_download(
                agent_weights, weights, helpers.get(agent, []), hparams.sparsity_thresholds,
                decodable=hparams.sparse_messages,
            )  # fmt: skip
            # If not sparse: the difference is counted, as in the code, but not applied.
            by_agent[agent] = download if sparse else dataclasses.replace(download, weights=weights)
        learning_rates = self._assign_learning_rates(state, agents, _labels_at(federation))
        return Downloads(agents, by_agent, helpers, learning_rates, hparams.sparse_messages)

    def _collect(
        self, state: FedMatchState, downloads: Downloads, replies: Sequence[Reply[FedMatchUpdate]],
        federation: Federation,
    ) -> FedMatchState:  # fmt: skip
        """Embed the new models and average them, each with the same weight (Alg. 1 l. 10, Alg. 2
        l. 15)."""
        replies = [downloads.decode(reply) for reply in replies if not reply.declined]
        sigmas, psis, embeddings = {}, {}, {}
        for reply in replies:
            agent, sigma, psi = reply.sender.id, reply.payload.sigma, reply.payload.psi
            assert psi is not None
            # None: it trained with the sigma that it got
            sigmas[agent] = downloads.by_agent[agent].weights.sigma if sigma is None else sigma
            psis[agent] = psi
            embeddings[agent] = disjoint.predict(
                self._F, disjoint.theta(sigmas[agent], psi), state.probe
            )[0]
        networks = {agent: DecomposedWeights(sigmas[agent], psi) for agent, psi in psis.items()}
        # downloads.helpers: who got new ones now; state.helped_at: who ever did, and may keep them.
        agents_with_helpers = set(downloads.helpers)
        if self.cfg.hyperparameters(_labels_at(federation)).keep_helpers:
            agents_with_helpers |= {agent.id for agent in downloads.agents} & state.helped_at.keys()
        sent_downloads, agent_count = downloads.by_agent.values(), max(len(downloads.agents), 1)
        return dataclasses.replace(
            state,
            sigma=average(replies, "sigma", otherwise=state.sigma, weight=uniform_weight),
            psi=average(replies, "psi", otherwise=state.psi, weight=uniform_weight),
            embeddings={**state.embeddings, **embeddings},
            held_sigma={**state.held_sigma, **sigmas},
            held_psi={**state.held_psi, **psis},
            helped_at={
                **state.helped_at,
                **{agent: federation.round.number for agent in downloads.helpers if agent in psis},
            },
            plateaus=self._update_plateaus(state, networks, federation),
            cost_down=sum(download.cost for download in sent_downloads) / agent_count,
            cost_down_sigma=sum(download.cost_of_sigma for download in sent_downloads)
            / agent_count,
            cost_down_psi=sum(download.cost_of_psi for download in sent_downloads) / agent_count,
            helped=len(agents_with_helpers) / agent_count,
        )

    def classifier(self, state: FedMatchState) -> StateDict:
        return disjoint.theta(state.sigma, zero_small_entries(state.psi, state.negligible))

    def also_evaluated(self, state: FedMatchState) -> dict[str, StateDict]:
        if not self.cfg.evaluate_parts:
            return {}
        return {"sigma": state.sigma, "psi": zero_small_entries(state.psi, state.negligible)}

    def own_classifiers(self, state: FedMatchState) -> dict[str, StateDict]:
        return {
            agent: disjoint.theta(
                state.held_sigma[agent], zero_small_entries(psi, state.negligible)
            )
            for agent, psi in state.held_psi.items()
        }

    def metrics(self, state: FedMatchState) -> dict[str, float]:
        gap = sum(float((w - state.psi[n]).square().sum()) for n, w in state.sigma.items())
        size = sum(float(w.square().sum()) for w in state.sigma.values())
        return {
            "train/cost_down": state.cost_down,
            "train/cost_down_sigma": state.cost_down_sigma,
            "train/cost_down_psi": state.cost_down_psi,
            "train/bytes_down": state.bytes_down,
            "train/bytes_up": state.bytes_up,
            "train/helped": state.helped,
            "train/psi_gap": (gap / size) ** 0.5 if size else 0.0,  # |psi - sigma| / |sigma|
        }

    # Steps: where the data is ---------------------------------------------------------------

    @on_agent
    def learn_sigma(
        self, agent: SupportAgent, msg: FedMatchRequest, ctx: Context
    ) -> FedMatchUpdate:
        """Eq. 4 at an agent with labels alone: psi is fixed, without its small entries."""
        hparams, rows = self.cfg.hyperparameters("server"), agent.labelled
        order = disjoint.recall_order("labelled", len(rows), agent, ctx)
        start = DecomposedWeights(msg.sigma, zero_small_entries(msg.psi, hparams.negligible))
        trainer = DisjointTrainer(self.cfg, "server", self._F, start, agent, ctx, msg.learning_rate)
        for indices in torch.split(order, hparams.batch_size) * self.cfg.server_epochs:
            trainer.learn_sigma(rows, indices)
            trainer.measure_accuracy(rows)
        trainer.finish()
        if not self.cfg.decomposition:
            return FedMatchUpdate(None, trainer.copy_weights("psi"))
        return FedMatchUpdate(trainer.copy_weights("sigma"), None)

    @on_agent
    def learn_psi(
        self, agent: QueryAgent, msg: FedMatchRequest, ctx: Context
    ) -> FedMatchUpdate | Declined:
        """Eq. 5 at an agent without labels: sigma is fixed."""
        hparams, rows = self.cfg.hyperparameters("server"), agent.unlabelled
        order = self._select_slice(agent, ctx, hparams.slices_of)
        start, helpers = decode_request(agent, msg, keep_helpers=hparams.keep_helpers)
        if not len(order):
            return Declined("no rows in this slice of the stream")
        trainer = DisjointTrainer(self.cfg, "server", self._F, start, agent, ctx, msg.learning_rate)
        for indices in disjoint.split_batches(order, hparams.batch_size) * self.cfg.epochs:
            trainer.learn_psi(rows, indices, helpers)
        trainer.finish()
        updated = DecomposedWeights({}, trainer.copy_weights("psi"))
        return encode_update(updated, start, agent, hparams, ctx)

    @on_agent
    def learn_both(self, agent: MixedAgent, msg: FedMatchRequest, ctx: Context) -> FedMatchUpdate:
        """Eq. 4 and 5 in turn, step by step: Alg. 1 l. 15-19."""
        hparams, s_rows, u_rows = (
            self.cfg.hyperparameters("client"),
            agent.labelled,
            agent.unlabelled,
        )
        s_order = disjoint.recall_order("labelled", len(s_rows), agent, ctx)
        u_order = self._select_slice(agent, ctx, hparams.slices_of)
        start, helpers = decode_request(agent, msg, keep_helpers=hparams.keep_helpers)
        trainer = DisjointTrainer(self.cfg, "client", self._F, start, agent, ctx, msg.learning_rate)
        for s, u in disjoint.pair_batches(s_order, u_order, hparams.batch_size) * self.cfg.epochs:
            trainer.learn_sigma(s_rows, s)
            trainer.learn_psi(u_rows, u, helpers)
            trainer.measure_accuracy(s_rows)
        trainer.finish()
        updated = DecomposedWeights(trainer.copy_weights("sigma"), trainer.copy_weights("psi"))
        return encode_update(updated, start, agent, hparams, ctx)

    def _select_slice(self, agent: QueryAgent, ctx: Context, slices_of: SlicesOf) -> Tensor:
        """Numbers of the unlabelled rows of this round's slice of the stream, in kept order."""
        order = disjoint.recall_order("unlabelled", len(agent.unlabelled), agent, ctx)
        positions = select_stream_slice(
            len(order), self.cfg.stream_slices, ctx.round, self.cfg.rounds
        )
        if slices_of == "stored":  # a slice's rows still come in the agent's own order
            return order[torch.isin(order, positions)]
        return order[positions]


def _labels_at(federation: Federation) -> LabelLocation:
    """Where labels are: at clients when agents hold both kinds of rows."""
    return "client" if any(agent.role == "mixed" for agent in federation.support) else "server"
