"""Lower and upper bounds: Server-SL, FedAvg and FedProx on labelled rows, and what all share.

    Server-SL   the labelled server trains alone (Bian et al., FedSEAL, section 4)
    FedAvg      mean of agents that learn from their labels (McMahan et al., AISTATS 2017)
    FedProx     the same with a pull towards the global weights (Li et al., MLSys 2020)

    papers                                            here
    local training: epochs of SGD, cross-entropy      labelled_pass -> labelled_losses, run_sgd
    FedAvg: the mean, by rows held; under a plan      round, FederatedSettings.weigh; FedAvg
    FedProx: + mu / 2 |theta - theta_global|^2        run_sgd, squared_distance
    SemiFL's recipe: cosine, Nesterov, clipping       LocalTrainingSettings, run_sgd
    static batch norm: statistics of labelled rows    aggregate_bn_statistics, labelled_statistics

``LocalTrainingSettings`` is the one set of settings for these, for FixMatch, UDA and FedSem, and
for all methods of docs/comparators.md: a difference in a table is the effect of the method. With a
``privacy`` section FedAvg's agents train by DP-SGD (Abadi et al., CCS 2016) under their own
accounts; the section sets the local training.

Where labels may be: docs/placements.md. With ``labels-at-both`` the server trains first in a round,
and agents start from its weights. No unlabelled row is read.

Differs from the papers: (1) Rows are in [-1, 1]. (2) A network starts from its own initial weights.
(3) The learning rate falls by a factor per round (FedSEAL); FedMatch's by the validation loss.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, final

import pydantic.dataclasses
import torch
from torch import Tensor, nn

from accounting.errors import BudgetExhausted
from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.baselines import dp_classifier
from privssl.algorithms.baselines.local_settings import (
    FederatedSettings,
    LocalTrainingSettings,
    ProximalSettings,
    StreamSettings,
)
from privssl.algorithms.local_ssl import (
    Amount,
    ModelState,
    ModelUpdate,
    TrainRequest,
    can_learn_from,
    model_update,
    select_first_classifier,
    train_alone,
    train_and_average,
)
from privssl.algorithms.static_statistics import (
    Statistics,
    aggregate_bn_statistics,
    compute_bn_statistics,
)
from privssl.core.agents import LabelledRows, SupportAgent
from privssl.core.federation import Federation, Roster
from privssl.core.messages import BUDGET_EXHAUSTED, Declined, StateDict
from privssl.core.task import Context, on_agent
from privssl.runtime import randomness
from privssl.settings.schema import Problem, strict
from privssl.training import local_training, optim
from privssl.training.batched.deferred import batched_call
from privssl.training.losses import hard_label_loss


@dataclasses.dataclass(frozen=True)
class SupervisedState(ModelState):
    """What the server keeps between rounds."""

    own: Mapping[str, StateDict] = dataclasses.field(default_factory=dict)  # without aggregation


@dataclasses.dataclass(frozen=True)
class ProximalRequest(TrainRequest):
    """Down: the global classifier, and mu, the strength of the pull towards it (0: none)."""

    proximal: float = 0.0


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class ServerSLConfig(LocalTrainingSettings):
    """Section ``algorithm`` for Server-SL: labels at the server and nothing else."""

    name: Literal["server_sl"] = "server_sl"


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedAvgConfig(StreamSettings):
    """Section ``algorithm`` for FedAvg on labelled rows."""

    name: Literal["fedavg"] = "fedavg"


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedProxConfig(ProximalSettings, StreamSettings):
    """Section ``algorithm`` for FedProx on labelled rows."""

    name: Literal["fedprox"] = "fedprox"
    weights: Literal["rows", "equal"] = "equal"  # in the average; FedMatch: equal
    proximal: Amount = 0.01  # mu; FedMatch


class _SupervisedTraining(Algorithm[ModelState]):
    """The shared round and step; a subclass says who learns."""

    StateType: ClassVar[type[ModelState]] = SupervisedState
    can_be_lengthened = True
    reads_unlabelled = False
    missing_reply_policy = MissingReplyPolicy(quorum=("labelled_pass", "labelled_statistics"))
    cfg: LocalTrainingSettings

    def start(self, federation: Federation) -> ModelState:
        return SupervisedState(self.initial_classifier(federation))

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        mu = self.cfg.proximal if isinstance(self.cfg, ProximalSettings) else 0.0
        participants, step = self.select_participants(federation), self.labelled_pass
        if isinstance(self.cfg, StreamSettings) and self.cfg.aggregation == "none":
            classifiers = self.own_classifiers(state)
            classifiers = train_alone(
                federation, participants, step, ProximalRequest, classifiers, state.F
            )
            return SupervisedState(state.F, classifiers)
        F = train_and_average(federation, participants, step, ProximalRequest(state.F, mu), state.F)
        return SupervisedState(self.aggregate_bn_statistics(F, federation))

    def aggregate_bn_statistics(self, F: StateDict, federation: Federation) -> StateDict:
        """F with statistics of all labelled rows, where its norm has any."""
        sources = [(federation.support, self.labelled_statistics)]
        return aggregate_bn_statistics(F, self._F, federation, TrainRequest(F), sources)

    def select_participants(self, federation: Federation) -> Roster:
        """The agents that train in this round."""
        return federation.support

    def classifier(self, state: ModelState) -> StateDict:
        return select_first_classifier(self.own_classifiers(state), state.F)

    def own_classifiers(self, state: ModelState) -> Mapping[str, StateDict]:
        return state.own if isinstance(state, SupervisedState) else {}

    @on_agent
    def labelled_pass(
        self, agent: SupportAgent, msg: ProximalRequest, ctx: Context
    ) -> ModelUpdate | Declined:
        """Epochs of cross-entropy on labelled rows."""
        rows = agent.labelled
        if isinstance(self.cfg, StreamSettings) and self.cfg.stream_slices > 1:
            indices = self.cfg.select_current_slice(len(rows), ctx)
            rows = LabelledRows(rows.x[indices], rows.y[indices], rows.ids[indices])
        if isinstance(self.cfg, FederatedSettings):
            self.cfg.weigh(len(rows), ctx)
        return self._train(rows, msg, ctx)

    def _train(self, rows: LabelledRows, msg: ProximalRequest, ctx: Context) -> ModelUpdate:
        F = self.load_classifier(msg.F, ctx)
        return run_sgd(F, labelled_losses(F, rows, self.cfg, ctx), self.cfg, msg, ctx)

    @on_agent
    def labelled_statistics(
        self, agent: SupportAgent, msg: TrainRequest, ctx: Context
    ) -> Statistics:
        """Statistics of labelled rows."""
        return compute_bn_statistics(self.load_classifier(msg.F, ctx), agent.labelled.x, ctx)


@final
class ServerSL(_SupervisedTraining):
    """The labelled server alone."""

    Config = ServerSLConfig
    missing_reply_policy = MissingReplyPolicy(
        needed=("labelled_pass", "labelled_statistics"), needed_because="It has all the labels"
    )

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        if config.data.labels != "labels-at-server":
            text = f"{config.data.labels}, but server_sl learns at a server that holds all labels. "
            advice = "Set data.labels: labels-at-server, or algorithm.name: fedavg"
            yield Problem("data.labels", text + advice)


class AveragedTraining(_SupervisedTraining):
    """Several agents hold labels, and with ``labels-at-both`` the server too."""

    missing_reply_policy = MissingReplyPolicy(
        quorum=("labelled_pass", "labelled_statistics"),
        needed=("server_pass",), needed_because="The server is always there",
    )  # fmt: skip
    cfg: FederatedSettings

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        if len(federation.support) > 1 and (server := federation.server) is not None:
            request = ProximalRequest(state.F)
            F = train_and_average(federation, (server,), self.server_pass, request, state.F)
            state = SupervisedState(F)
        return super().round(state, federation)

    def select_participants(self, federation: Federation) -> Roster:
        agents = tuple(agent for agent in federation.support if agent != federation.server)
        return federation.sample(agents or federation.support, self.cfg.agents_per_round)

    @on_agent
    def server_pass(self, agent: SupportAgent, msg: ProximalRequest, ctx: Context) -> ModelUpdate:
        """Epochs on all of the server's rows, which come in no slices."""
        return self._train(agent.labelled, msg, ctx)

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        if config.data.labels == "labels-at-server":
            name = config.algorithm.name
            text = f"labels-at-server, but {name} averages agents that learn from labels, and the "
            advice = "Set algorithm.name: server_sl, or data.labels: support or labels-at-client"
            yield Problem("data.labels", f"{text}server alone would have any. {advice}")
        cfg = config.algorithm
        if not isinstance(cfg, StreamSettings):
            return
        if cfg.aggregation == "none" and config.data.labels == "labels-at-both":
            text = "none, but agents go on from the server's weights. Set data.labels: support"
            yield Problem("algorithm.aggregation", text)
        if cfg.aggregation == "none" and config.model.norm == "static":
            text = "static needs statistics of all agents, and aggregation none has none. Set group"
            yield Problem("model.norm", text)
        if cfg.aggregation == "none" and config.privacy is not None:
            text = "none releases a network of each agent, which no privacy plan covers. Set mean"
            yield Problem("algorithm.aggregation", text)
        if config.privacy is not None and cfg.stream_slices > 1:
            yield Problem("algorithm.stream_slices", "not with privacy, whose steps draw all rows")


@final
class FedAvg(AveragedTraining):
    """The mean of agents that learn from their labels, under a plan by DP-SGD."""

    Config = FedAvgConfig
    can_be_private = True
    cfg: FedAvgConfig

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        yield from super().problems(config)
        if config.privacy is not None:
            yield from dp_classifier.private_problems(config)

    def check_private(self) -> None:
        dp_classifier.check_classifier(self._F, self.task)

    def try_private(self, device: torch.device) -> None:
        dp_classifier.try_classifier(self.plan, self._F, self.task, device, flip=self.cfg.flip)

    def select_participants(self, federation: Federation) -> Roster:
        no_visits_left = self.plan is not None and federation.round.number > self.plan.visits
        return () if no_visits_left else super().select_participants(federation)

    @on_agent
    def labelled_pass(
        self, agent: SupportAgent, msg: ProximalRequest, ctx: Context
    ) -> ModelUpdate | Declined:
        if self.plan is None:
            return super().labelled_pass(agent, msg, ctx)
        F = self.load_classifier(msg.F, ctx)
        try:
            dp_classifier.train_classifier(self.plan, F, agent, ctx, flip=self.cfg.flip)
        except BudgetExhausted:
            return BUDGET_EXHAUSTED
        return model_update(F)


@final
class FedProx(AveragedTraining):
    """FedAvg whose agents are pulled towards the global weights."""

    Config = FedProxConfig


def labelled_losses(
    F: nn.Module, rows: LabelledRows, cfg: LocalTrainingSettings, ctx: Context,
    loss: Callable[..., Tensor] = hard_label_loss, **extra_fields: Tensor,
) -> Iterator[Tensor]:  # fmt: skip
    """Mean cross-entropy, or another loss, of each batch of weak views, epoch after epoch.

    Args:
        loss: of a batch with ``x`` and ``y``, for ``deferred.batched_call``.
        extra_fields: further fields of every batch.
    """
    order_rng, view_rng = ctx.rng("order"), ctx.rng("weak view")
    for _ in range(cfg.local_epochs):
        epoch = local_training.epoch_batches(len(rows), cfg.batch_size, order_rng)
        batches = [indices for indices in epoch if can_learn_from(F, len(indices))]
        views = local_training.views_of(
            rows.x, batches, lambda x: cfg.weak_view(x, view_rng), ctx.device
        )
        for indices, x in zip(batches, views, strict=True):
            y = rows.y[indices].to(ctx.device)
            yield batched_call(loss, {"x": x, "y": y, **extra_fields}, F=F)


def run_sgd(
    F: nn.Module, losses: Iterator[Tensor], cfg: LocalTrainingSettings, msg: ProximalRequest,
    ctx: Context, penalty: Callable[[], Tensor] | None = None,
) -> ModelUpdate:  # fmt: skip
    """One step of a fresh SGD on each loss, then the reply.

    Args:
        F: has the weights of ``msg``, towards which ``msg.proximal`` pulls.
        losses: scalars; each is computed after the step on the one before. With none, F is sent
            back unchanged.
        penalty: a scalar of F's weights, added to each loss but not to the loss that is logged.
    """
    anchor = [p.detach().clone() for p in F.parameters()] if msg.proximal else []
    loss_values = []
    sgd = optim.SGD(
        F.parameters(), lr=cfg.rate(ctx.round),
        momentum=cfg.momentum, weight_decay=cfg.weight_decay, nesterov=cfg.nesterov,
    )  # fmt: skip
    with randomness.seeded(ctx.rng("dropout")):
        for loss in losses:
            loss_values.append(loss.detach())
            if msg.proximal:
                loss = loss + msg.proximal / 2 * squared_distance(F, anchor)
            if penalty is not None:
                loss = loss + penalty()
            local_training.minimise(sgd, loss, clip_norm=cfg.clip_gradients)
    if loss_values:
        ctx.log_metric("train/loss_F", local_training.mean_of(loss_values))
    return model_update(F)


def squared_distance(F: nn.Module, anchor: list[Tensor]) -> Tensor:
    """|theta - anchor|^2 over all parameters of F, a scalar: Li et al. 2020, Eq. 2."""
    pairs = zip(F.parameters(), anchor, strict=True)
    return torch.stack([(p - p_anchor).square().sum() for p, p_anchor in pairs]).sum()
