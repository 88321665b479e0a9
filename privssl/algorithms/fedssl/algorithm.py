"""FedSSL and FedSSL-DP: one global generator mixes every agent's rows with any class.

Fan, Hu, Huang: "Private Semi-Supervised Federated Learning" (IJCAI 2022). F is the classifier,
G the conditional generator, D the conditional discriminator.

    paper                                        here
    Alg. 1 l. 1     initialise F, G, D           start
    Alg. 1 l. 3-5   support agents in parallel   round -> support_pass
    Alg. 1 l. 6-8   query agents in parallel     round -> query_pass
    l. 4, 7         G-Reg: Eq. 6, 7              losses.mixing_losses, generators.objectives
    l. 5, 8         G-MixUp: Eq. 4, 5            losses.mixing_losses
    Alg. 1 l. 9     FedAvg, weighted as Eq. 1    round -> local_ssl.average_groups
    Alg. 1 l. 10    the networks go to clients   FedSSLRequest
    Alg. 2 l. 2-8   support agents in sequence   round -> support_pass -> _private_pass
    Alg. 2 l. 9-10  query agents in parallel     round -> query_pass
    Eq. 2           pseudo-labels                query_pass -> guess, training/pseudo_labels.py
    Eq. 3           lambda, p'                   training/mixup.py

Differs from the paper: (1) One joint step takes the place of G-Reg and then G-MixUp (``updates``):
the same gradients up to simultaneity, at two thirds of the cost. (2) F also learns from real
rows, augmented (``real_rows``); read literally Algorithm 1 trains F on G's images alone.
(3) Mixes train F only once F recognises them, or while they help (``gate``). (4) D judges a mix
against its mixed label p'; Eq. 6 prints p2, which contradicts Eq. 7 at lambda 1 (``judge``).
(5) A moving average of F predicts pseudo-labels and is released (``teacher_decay``). (6) Query
agents do not train F in the first rounds (``warm_up``). (7) In Algorithm 2 every support agent has
its own budget, tested with the visit to come. The paper adds all agents up, and tests what past
visits spent, which can overshoot. Each is a setting but the last. docs/fedssl.md has them all.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor, nn

from accounting.errors import BudgetExhausted
from generators import ConditionalGenerator, draw_samples, networks_for
from privssl.algorithms.base import Algorithm, CanaryLoss, MissingReplyPolicy
from privssl.algorithms.fedssl import losses
from privssl.algorithms.fedssl.gate import update_gate
from privssl.algorithms.fedssl.losses import NETWORKS, MixupBatch, SyntheticRows
from privssl.algorithms.fedssl.settings import FedSSLConfig
from privssl.algorithms.local_ssl import (
    TeacherState,
    average_groups,
    needs_no_statistics,
    needs_unlabelled,
    one_hot_labels,
)
from privssl.core.agents import QueryAgent, SupportAgent
from privssl.core.federation import Federation, Roster
from privssl.core.messages import BUDGET_EXHAUSTED, Declined, Message, Reply, StateDict
from privssl.core.task import Context, NetworkFactory, Task, on_agent
from privssl.models import optimize_layout
from privssl.ops.precision import in_precision
from privssl.privacy.plan import PrivatePlan
from privssl.reporting import figures
from privssl.settings.schema import Problem
from privssl.training import local_training
from privssl.training.batched.deferred import batched_call

PROBED = 64  # synthetic rows that an agent looks at while the gate is closed

# Messages and state -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FedSSLRequest(Message):
    """Down to an agent: the global networks and the teacher that predicts pseudo-labels."""

    F: StateDict
    G: StateDict
    D: StateDict
    teacher: StateDict
    train_classifier: bool  # not in a query agent's warm-up
    train_on_mixes: bool  # the gate is open


@dataclasses.dataclass(frozen=True)
class FedSSLUpdate(Message):
    """Up from an agent: the networks; None is one that it did not train.

    ``agreement`` is the share of mixes that F classifies as p' or, with ``synthetic_share``, the
    share of G's samples that the teacher recognises. ``similarity`` is ``gradient_similarity``
    before training, if the gate asks for it. Both are None in a private step.
    """

    F: StateDict | None
    G: StateDict | None
    D: StateDict | None
    agreement: float | None = None
    similarity: float | None = None


@dataclasses.dataclass(frozen=True)
class FedSSLState(TeacherState):
    """What the server keeps between rounds."""

    G: StateDict
    D: StateDict
    agreement: float = 0.0  # of the last round
    gate_round: int = 0  # the round from which mixes train F; 0: they do not
    similarity: float = 0.0  # moving average of the gradients' cosine similarity, in [-1, 1]


# The algorithm ------------------------------------------------------------------------------


@final
class FedSSL(Algorithm[FedSSLState]):
    """Algorithm 1, and with a private plan Algorithm 2."""

    Config = FedSSLConfig
    StateType = FedSSLState
    can_be_private = True
    can_be_lengthened = True
    sides_divisible_by = 4  # G and D halve them twice
    cfg: FedSSLConfig

    @classmethod
    def missing_reply_policy_for(cls, cfg: FedSSLConfig, *, private: bool) -> MissingReplyPolicy:
        """In sequence a missing agent is skipped, as one whose budget is spent: l. 3-4."""
        if private or cfg.order == "sequential":
            absent: Literal["skip", "stop"] = "skip" if private else "stop"
            return MissingReplyPolicy(quorum=("query_pass",), skip=("support_pass",), absent=absent)
        return MissingReplyPolicy(quorum=("support_pass", "query_pass"))

    def __init__(self, config: FedSSLConfig, task: Task, plan: PrivatePlan | None = None) -> None:
        super().__init__(config, task, plan)
        shape, classes, width = task.shape, task.classes, config.generator_width
        spectral = config.spectral_norm and not (plan is not None and "D" in plan.protect)
        G, D = (
            in_precision(network, task.precision)
            for network in networks_for(shape, config.generator)
        )
        self._new: dict[str, NetworkFactory] = {
            "F": task.new_classifier,
            "G": lambda: optimize_layout(
                G(shape, classes, width=width, noise_size=config.noise_size)
            ),
            "D": lambda: optimize_layout(D(shape, classes, width=width, spectral=spectral)),
        }
        self._networks = {"F": self._F, "G": self._new["G"](), "D": self._new["D"]()}

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        yield from needs_unlabelled(config)
        yield from needs_no_statistics(config)
        if getattr(config, "privacy", None) is None:
            return
        if config.algorithm.synthetic_share and config.algorithm.synthetic_at == "all":
            yield Problem(
                "algorithm.synthetic_at",
                "all, but in a private run support agents learn from labelled rows alone. Set "
                "query",
            )

    def networks(self) -> Mapping[str, nn.Module]:
        return self._networks

    def check_private(self) -> None:
        losses.check_private_rows(self.cfg, self._networks, self.task)

    def try_private(self, device: torch.device) -> None:
        nets = {name: network.to(device) for name, network in self._networks.items()}
        gated = self.cfg.gate != 0
        losses.dry_run_private_step(self.plan, self.cfg, nets, self.task, device, gated=gated)

    def canary_losses(self) -> Mapping[str, CanaryLoss]:
        return {**super().canary_losses(), **losses.canary_losses(self.cfg, self.task)}

    def start(self, federation: Federation) -> FedSSLState:
        F, G, D = (
            local_training.fresh_weights(self._new[name], federation.rng(f"init {name}"))
            for name in NETWORKS
        )
        return FedSSLState(F, teacher=F, G=G, D=D)

    def round(self, state: FedSSLState, federation: Federation) -> FedSSLState:
        participants = federation.sample(federation.query, self.cfg.query_per_round)
        support: list[Reply[FedSSLUpdate]] = []
        if self.plan is not None or self.cfg.order == "sequential":
            for agent in self._support_agents(federation):  # Alg. 2 l. 2
                request = self._make_request(state, federation)
                reply = federation.call(agent, self.support_pass, request)
                if not reply.declined:  # l. 3-4: declines when its budget is spent
                    state = _apply_update(state, reply.payload)
        else:  # Alg. 1 l. 3-5
            request = self._make_request(state, federation)
            support = federation.call_all(federation.support, self.support_pass, request)
        request = self._make_request(state, federation, query=True)
        query = federation.call_all(participants, self.query_pass, request)
        F, G, D = (  # Alg. 1 l. 9
            average_groups(self.cfg.weights, support, query, name, getattr(state, name))
            for name in NETWORKS
        )
        decay = self.cfg.decay(federation.round.number)
        teacher = local_training.moving_average(state.teacher, F, decay)
        updates = [reply.payload for reply in [*support, *query] if not reply.declined]
        gate = update_gate(self.cfg.gate, state, updates, federation.round.number)
        return FedSSLState(F, teacher, G, D, *gate)

    def _support_agents(self, federation: Federation) -> Roster:
        """Support agents, while the plan has visits left for them."""
        no_visits_left = self.plan is not None and federation.round.number > self.plan.visits
        return () if no_visits_left else federation.support

    def _make_request(
        self, state: FedSSLState, federation: Federation, query: bool = False
    ) -> FedSSLRequest:
        in_warm_up = federation.round.number <= self.cfg.warm_up and self.cfg.real_rows
        G, D = state.G, state.D
        if self.plan is None:  # what an agent neither trains nor draws from is not sent
            D = D if self.cfg.weight_real else {}
            if not query and self.cfg.generator_at == "query":
                D, G = {}, G if self.cfg.synthetic_at == "all" else {}
        return FedSSLRequest(
            F=state.F, G=G, D=D, teacher=state.teacher,
            train_classifier=not (query and in_warm_up),
            train_on_mixes=self.cfg.gate == 0 or state.gate_round > 0,
        )  # fmt: skip

    def classifier(self, state: FedSSLState) -> StateDict:
        return state.teacher

    def also_evaluated(self, state: FedSSLState) -> Mapping[str, StateDict]:
        return {"unaveraged": state.F}

    def metrics(self, state: FedSSLState) -> Mapping[str, float]:
        is_open = float(state.gate_round > 0)
        metrics = {"train/agreement": state.agreement, "train/gate_open": is_open}
        if self.cfg.gate == "similarity":
            metrics["train/gradient_similarity"] = state.similarity
        return metrics

    # Steps: where the data is ---------------------------------------------------------------

    @on_agent
    def support_pass(
        self, agent: SupportAgent, msg: FedSSLRequest, ctx: Context
    ) -> FedSSLUpdate | Declined:
        """G-Reg and G-MixUp on labelled rows: Alg. 1 l. 4-5; under a plan Alg. 2 l. 3-8."""
        if self.plan is not None:
            return self._private_pass(agent, msg, ctx)
        ctx.weight = float(len(agent.labelled))
        to_train = NETWORKS if self.cfg.generator_at == "all" else ("F",)
        batch = self._draw_labelled_batch(agent, ctx, msg)
        return self._train(to_train, batch, agent, msg, ctx, "support")

    @on_agent
    def query_pass(self, agent: QueryAgent, msg: FedSSLRequest, ctx: Context) -> FedSSLUpdate:
        """The same on unlabelled rows with pseudo-labels: Alg. 1 l. 7-8, Eq. 2."""
        rows = agent.unlabelled
        ctx.weight = float(len(rows))
        indices = self.cfg.draw_rows(len(rows), ctx)
        q1 = self.cfg.guess(self.load_classifier(msg.teacher, ctx), rows.x[indices], ctx)
        ctx.pseudo_labels(rows.ids[indices], q1)
        synthetic, recognised = self._sample_generator(msg, len(indices), ctx)
        batch = losses.draw_mixup_batch(self.cfg, rows.x[indices], q1, ctx, synthetic)
        update = self._train(NETWORKS, batch, agent, msg, ctx, "query")
        return update if recognised is None else dataclasses.replace(update, agreement=recognised)

    def _private_pass(
        self, agent: SupportAgent, msg: FedSSLRequest, ctx: Context
    ) -> FedSSLUpdate | Declined:
        """Alg. 2 l. 3-8 at one support agent: charge, then read."""
        assert agent.account is not None
        try:
            with agent.account.spend(self.plan.event, ctx.charge_id):  # l. 3, 7
                private_update = self._train_privately(agent, msg, ctx)  # l. 6
                unprotected = tuple(n for n in self.plan.update if n not in self.plan.protect)
                if not unprotected:
                    return private_update
                # l. 8, the published scheme only: D and F are trained without protection
                request = dataclasses.replace(msg, G=private_update.G or msg.G)
                batch = self._draw_labelled_batch(agent, ctx)
                update = self._train(unprotected, batch, agent, request, ctx, "support")
                return FedSSLUpdate(update.F, private_update.G, update.D)
        except BudgetExhausted:
            return BUDGET_EXHAUSTED

    # Local training -------------------------------------------------------------------------

    def _draw_labelled_batch(
        self, agent: SupportAgent, ctx: Context, msg: FedSSLRequest | None = None
    ) -> MixupBatch:
        """The labelled rows of a step, with all draws; with a message also synthetic rows."""
        rows = agent.labelled
        indices = self.cfg.draw_rows(len(rows), ctx)
        labels = one_hot_labels(rows, indices, self.task.classes)
        synthetic = None
        if msg is not None and self.cfg.synthetic_at == "all":
            synthetic, _ = self._sample_generator(msg, len(indices), ctx)
        return losses.draw_mixup_batch(self.cfg, rows.x[indices], labels, ctx, synthetic)

    def _sample_generator(
        self, msg: FedSSLRequest, rows: int, ctx: Context
    ) -> tuple[SyntheticRows | None, float | None]:
        """Samples of G, all classes equally often, and the share whose class the teacher predicts.

        F gets none in the warm-up, and none with the classes that G was given while the gate is
        closed: then a few samples show what the teacher predicts.
        """
        if not self.cfg.synthetic_share:
            return None, None
        by_teacher = self.cfg.synthetic_labels == "teacher"  # else the class that G was given
        is_used = (msg.train_on_mixes or by_teacher) and msg.train_classifier
        count = len(losses.select_synthetic_rows(self.cfg, rows)) if is_used else PROBED
        classes = local_training.draw_rows(self.task.classes, count, ctx.rng("synthetic classes"))
        G = local_training.load_weights(self._networks["G"], msg.G, ctx.device).eval()
        assert isinstance(G, ConditionalGenerator)
        samples = draw_samples(G, classes, self.task.classes, self.task.shape, ctx.rng("synthetic"))
        if samples.dim() == 4:
            samples = samples.contiguous(memory_format=torch.channels_last)
        teacher = self.load_classifier(msg.teacher, ctx)
        predicted = self.cfg.guess_input(teacher, samples, ctx, "names")
        recognised = float((predicted.argmax(dim=1).cpu() == classes).float().mean())
        if not is_used:
            return None, recognised
        given = torch.eye(self.task.classes)[classes].to(ctx.device)
        return SyntheticRows(samples, predicted if by_teacher else given), recognised

    def _train(
        self, to_train: Sequence[str], rows: MixupBatch, agent: SupportAgent | QueryAgent,
        msg: FedSSLRequest, ctx: Context, role: str,
    ) -> FedSSLUpdate:  # fmt: skip
        """Ordinary local training of some of the networks."""
        untrained = {"F": not msg.train_classifier, "D": not self.cfg.weight_real}
        to_train = [name for name in to_train if not untrained.get(name)]
        nets = self._load_networks(msg, ctx)
        rates = self.cfg.generator_learning_rate, self.cfg.discriminator_learning_rate
        groups: dict[str, local_training.Group] = {
            "F": self.cfg.make_optimiser_group(nets["F"], ctx.round),
            "G": local_training.AdamGroup(nets["G"], rates[0], (0.5, 0.99)),
            "D": local_training.AdamGroup(nets["D"], rates[1], (0.5, 0.99)),
        }
        for name, network in nets.items():
            network.requires_grad_(name in to_train)
        optimiser = local_training.LocalOptimiser(
            {name: groups[name] for name in to_train}, agent.memory, role
        )
        compares = self.cfg.gate == "similarity" and "F" in to_train
        similarity = losses.gradient_similarity(self.cfg, nets, rows) if compares else None
        mean_losses: dict[str, list[Tensor]] = {name: [] for name in NETWORKS}
        agreements = []
        for cfg, names, has_mixes, batch in self._local_steps(to_train, rows):
            train_on_mixes = has_mixes and msg.train_on_mixes
            means, loss, agreement = batched_call(
                losses.step_losses, batch.fields(), cfg, names, train_on_mixes, **nets
            )
            optimiser.minimise(loss)
            for name, mean in zip(NETWORKS, means.detach(), strict=True):
                if name in names:
                    mean_losses[name].append(mean)
            if train_on_mixes or names != ("F",):  # else no mix was made
                agreements.append(agreement)
        agent.memory = {**agent.memory, **optimiser.remember()}
        for name, values in mean_losses.items():
            if values:
                ctx.log_metric(f"train/loss_{name}/{role}", local_training.mean_of(values))
        mean_agreement = local_training.mean_of(agreements) if agreements else None
        agreement_of_mixes = None if self.cfg.synthetic_share else mean_agreement
        return _make_update(nets, to_train, agreement_of_mixes, similarity)

    def _local_steps(
        self, to_train: Sequence[str], rows: MixupBatch
    ) -> Iterator[tuple[FedSSLConfig, tuple[str, ...], bool, MixupBatch]]:
        """Of each step: weights of losses, networks to train, whether it has mixes, rows."""
        for cfg, networks in self.cfg.training_phases():
            for step, batch in enumerate(rows.batches(self.cfg.batch_size)):
                has_mixes = step % self.cfg.mix_every == 0 or not self.cfg.real_rows
                names = tuple(n for n in to_train if n in networks and (has_mixes or n == "F"))
                if names:
                    yield cfg, names, has_mixes, batch

    def _train_privately(
        self, agent: SupportAgent, msg: FedSSLRequest, ctx: Context
    ) -> FedSSLUpdate:
        """DP-SGD on the protected networks; the others are not changed."""
        assert agent.account is not None
        nets = self._load_networks(msg, ctx)
        losses.train_networks_privately(
            self.plan, self.cfg, nets, agent.labelled, ctx, classes=self.task.classes,
            train_on_mixes=msg.train_on_mixes,
            counts_public=agent.account.plan.record_counts == "public",
        )  # fmt: skip
        return _make_update(nets, self.plan.protect)

    def _load_networks(self, msg: FedSSLRequest, ctx: Context) -> dict[str, nn.Module]:
        weights = {name: getattr(msg, name) for name in NETWORKS}
        return {
            name: local_training.load_weights(network, weights[name], ctx.device)
            if weights[name] else network.to(ctx.device)
            for name, network in self._networks.items()
        }  # fmt: skip

    def generator(self, state: FedSSLState) -> ConditionalGenerator:
        G = local_training.load_weights(self._networks["G"].cpu(), state.G).eval()
        assert isinstance(G, ConditionalGenerator)
        return G

    def pictures(self, state: FedSSLState, x: Tensor, y: Tensor) -> Mapping[str, np.ndarray]:
        return figures.of_generator(self.generator(state), x, y, self.task.classes)


def _make_update(
    nets: Mapping[str, nn.Module], trained: Sequence[str], *reports: float | None
) -> FedSSLUpdate:
    F, G, D = (
        local_training.to_send(nets[n].state_dict()) if n in trained else None for n in NETWORKS
    )
    return FedSSLUpdate(F, G, D, *reports)


def _apply_update(state: FedSSLState, update: FedSSLUpdate) -> FedSSLState:
    """The state with the networks that an agent sent."""
    changed = {n: getattr(update, n) for n in NETWORKS if getattr(update, n) is not None}
    return dataclasses.replace(state, **changed)
