"""Lower and upper bounds: Server-SL, FedAvg and FedProx on labelled rows, and what all share.

    Server-SL   the labelled server trains alone; nobody else is asked (Bian et al., FedSEAL, 4)
    FedAvg      mean of agents that learn from their labels (McMahan et al., AISTATS 2017)
    FedProx     the same with a pull towards the global weights (Li et al., MLSys 2020)

    papers                                            here
    local training: epochs of SGD, cross-entropy      labelled_pass -> labelled_losses, descend
    FedAvg: the mean, by rows held                    _Supervised.round, LocalTraining.weigh
    FedAvg under a plan: DP-SGD at agents             FedAvg, private_classifier
    FedProx: + mu / 2 |theta - theta_global|^2        descend, squared_distance

``LocalTrainingSettings`` is the one set of settings for these and for FixMatch, UDA
(algorithms/baselines/fixmatch_uda.py) and
FedSem (algorithms/baselines/pseudo_labeling.py): what a table shows between them is what the method
does. Supervise of algorithms/baselines/fedssl_baselines.py is FedAvg too, with Adam, a strong view
and a moving average, as FedSSL is judged.

FedAvg can be private: with a ``privacy`` section each agent trains by DP-SGD (Abadi et al., CCS
2016) under an account of its own, so that what FedSSL-DP gains from unlabelled rows has something
to be held against at the same epsilon. Then the section says how local training is done, and all
agents count alike in the mean.

Where labels may be: Server-SL needs ``labels-at-server``, the other two ``support`` or
``labels-at-client`` (with all labels at one party there is nothing to average). Nobody reads an
unlabelled row here, and there are no labels of unlabelled rows to read: the upper bound "all rows
labelled" is a split that hands out every row with its label (``data.labelled``: all rows,
``agents.query: 0``; docs/baselines.md), with Server-SL as its centralised form.

Differs from the papers: (1) rows are in [-1, 1], FedMatch has [0, 1] and the others standardise.
(2) A network starts from its own initial weights; FedMatch starts baselines from 1.2 times these.
(3) The learning rate falls by a factor per round, FedSEAL's rule; FedMatch's falls with the loss
on labelled validation rows that no agent has here. (4) No weight decay: FedMatch declares one
that its released code never adds (``weight_decay``).
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal, final

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from accounting.errors import BudgetExhausted
from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.baselines.dp_classifier import (
    check_classifier,
    private_problems,
    train_classifier,
    try_classifier,
)
from privssl.algorithms.local_ssl import Share, no_statistics
from privssl.core.agents import LabelledRows, SupportAgent
from privssl.core.aggregation import WeightedMean
from privssl.core.federation import Federation, Roster
from privssl.core.messages import BUDGET_EXHAUSTED, Declined, Message, StateDict
from privssl.core.task import Context, Task, on_agent
from privssl.data.augmentations import view
from privssl.privacy.plan import PrivatePlan
from privssl.runtime import randomness
from privssl.settings.schema import Positive, Problem, Rate, strict
from privssl.training import local_training, optim
from privssl.training.batched.deferred import batched_call
from privssl.training.lazy_linear_sgd import plain_sgd
from privssl.training.losses import hard_label_loss

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


# What travels -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SupervisedRequest(Message):
    """Down: the global classifier, and mu, how hard training is pulled towards it (0: not)."""

    F: StateDict
    proximal: float = 0.0


@dataclass(frozen=True)
class SupervisedUpdate(Message):
    """Up: the classifier after local training."""

    F: StateDict


@dataclass(frozen=True)
class SupervisedState:
    """What the server keeps between rounds; agents keep nothing."""

    F: StateDict


# Config -------------------------------------------------------------------------------------


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class LocalTrainingSettings:
    """Training of any party on its own rows: the same for every baseline. Numbers are ours, the
    published ones are in docs/baselines.md."""

    rounds: Positive = 100
    local_epochs: Positive = 5  # of every visit, the server's included; FedMatch: 1
    batch_size: Positive = 32  # a last short batch is kept
    learning_rate: Rate = 0.01  # SGD, fresh at every visit; in round 1
    learning_rate_decay: Annotated[float, Field(gt=0, le=1)] = 1.0  # factor per round
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Share = 0.0
    weak: Literal["none", "crop", "weak", "mid"] = "weak"  # view of rows with given labels
    flip: bool = False  # mirror images left to right: objects yes, digits no

    def rate(self, round_number: int) -> float:
        """Learning rate in a round, counted from 1."""
        return self.learning_rate * self.learning_rate_decay ** max(0, round_number - 1)

    def weak_view(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """A weak view of rows (B, *shape) in [-1, 1]."""
        return view(self.weak, x, rng, flip=self.flip)


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class Federated(LocalTrainingSettings):
    """Training at several agents, and the average of what they send."""

    agents_per_round: Positive | None = None  # drawn from the agents averaged; null: all
    weights: Literal["rows", "equal"] = "rows"  # in the average; FedMatch: rows, FedProx equal

    def weigh(self, rows: int, ctx: Context) -> None:
        """Count this visit by the rows it had; no count leaves the agent under "equal"."""
        if self.weights == "rows":
            ctx.weight = float(rows)


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class Proximal(Federated):
    """A method that may be federated as FedProx: ``weights: equal``, ``proximal: 0.01``."""

    proximal: Amount = 0.0  # mu; FedMatch's FedProx rows: 0.01. 0: FedAvg


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class ServerSLConfig(LocalTrainingSettings):
    """Section ``algorithm`` for Server-SL: labels at the server and nothing else."""

    name: Literal["server_sl"] = "server_sl"


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedAvgConfig(Federated):
    """Section ``algorithm`` for FedAvg on labelled rows."""

    name: Literal["fedavg"] = "fedavg"


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedProxConfig(Proximal):
    """Section ``algorithm`` for FedProx on labelled rows."""

    name: Literal["fedprox"] = "fedprox"
    weights: Literal["rows", "equal"] = "equal"  # in the average; FedMatch: equal
    proximal: Amount = 0.01  # mu; FedMatch


# The algorithms -----------------------------------------------------------------------------


class _Supervised(Algorithm[SupervisedState]):
    """The shared round and step; a subclass says who learns."""

    StateType = SupervisedState
    reads_unlabelled = False
    missing_reply_policy = MissingReplyPolicy(quorum=("labelled_pass",))
    cfg: LocalTrainingSettings

    def __init__(
        self, config: LocalTrainingSettings, task: Task, plan: PrivatePlan | None = None
    ) -> None:
        super().__init__(config, task, plan)
        self._F = task.new_classifier()

    def start(self, federation: Federation) -> SupervisedState:
        return SupervisedState(
            local_training.fresh_weights(self.task.new_classifier, federation.rng("init F"))
        )

    def round(self, state: SupervisedState, federation: Federation) -> SupervisedState:
        mu = self.cfg.proximal if isinstance(self.cfg, Proximal) else 0.0
        F = WeightedMean("F")
        federation.call_all(
            self._learners(federation),
            self.labelled_pass,
            SupervisedRequest(state.F, mu),
            aggregator=F,
        )
        return SupervisedState(F.value_or(state.F))

    def _learners(self, federation: Federation) -> Roster:
        """Who is asked in this round."""
        drawn = self.cfg.agents_per_round if isinstance(self.cfg, Federated) else None
        return federation.sample(federation.support, drawn)

    def classifier(self, state: SupervisedState) -> StateDict:
        return state.F

    @on_agent
    def labelled_pass(
        self, agent: SupportAgent, msg: SupervisedRequest, ctx: Context
    ) -> SupervisedUpdate | Declined:
        """Epochs of cross-entropy on labelled rows."""
        if isinstance(self.cfg, Federated):
            self.cfg.weigh(len(agent.labelled), ctx)
        F = load_global_model(self._F, msg, ctx)
        return run_sgd(F, labelled_losses(F, agent.labelled, self.cfg, ctx), self.cfg, msg, ctx)


@final
class ServerSL(_Supervised):
    """The labelled server alone: what labels are worth without agents."""

    Config = ServerSLConfig
    missing_reply_policy = MissingReplyPolicy(
        needed=("labelled_pass",), needed_because="It has the labels, all of them"
    )

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        if config.data.labels != "labels-at-server":
            yield Problem(
                "data.labels",
                f"{config.data.labels}, but server_sl learns at a server that holds all labels. "
                "Set data.labels: labels-at-server, or algorithm.name: fedavg",
            )
        yield from no_statistics(config)


class _Averaged(_Supervised):
    """Several agents hold labels."""

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        if config.data.labels == "labels-at-server":
            name = config.algorithm.name
            yield Problem(
                "data.labels",
                f"labels-at-server, but {name} averages agents that learn from labels, and the "
                "server alone would have any. Set algorithm.name: server_sl, or data.labels: "
                "support or labels-at-client",
            )
        yield from no_statistics(config)


@final
class FedAvg(_Averaged):
    """The mean of agents that learn from their labels; under a plan, of noisy ones."""

    Config = FedAvgConfig
    can_be_private = True
    cfg: FedAvgConfig

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        yield from super().problems(config)
        if config.privacy is not None:
            yield from private_problems(config)

    def networks(self) -> Mapping[str, nn.Module]:
        return {"F": self._F}

    def check_private(self) -> None:
        check_classifier(self._F, self.task)

    def try_private(self, device: torch.device) -> None:
        assert self.plan is not None
        try_classifier(self.plan, self._F, self.task, device, flip=self.cfg.flip)

    def _learners(self, federation: Federation) -> Roster:
        over = self.plan is not None and federation.round.number > self.plan.visits
        return () if over else super()._learners(federation)

    @on_agent
    def labelled_pass(
        self, agent: SupportAgent, msg: SupervisedRequest, ctx: Context
    ) -> SupervisedUpdate | Declined:
        if self.plan is None:
            return super().labelled_pass(agent, msg, ctx)
        F = load_global_model(self._F, msg, ctx)
        try:
            train_classifier(self.plan, F, agent, ctx, flip=self.cfg.flip)
        except BudgetExhausted:
            return BUDGET_EXHAUSTED
        return SupervisedUpdate(local_training.to_send(F.state_dict()))


@final
class FedProx(_Averaged):
    """FedAvg whose agents are pulled towards the global weights."""

    Config = FedProxConfig


# What all baselines do alike ----------------------------------------------------------------


def load_global_model(F: nn.Module, msg: SupervisedRequest, ctx: Context) -> nn.Module:
    """The global weights in a network on the visit's device, in training mode."""
    return local_training.load_weights(F, msg.F, ctx.device)


def labelled_losses(
    F: nn.Module, rows: LabelledRows, cfg: LocalTrainingSettings, ctx: Context
) -> Iterator[Tensor]:
    """Mean cross-entropy of each batch of weak views, epoch after epoch."""
    order, chance = ctx.rng("order"), ctx.rng("weak view")
    for _ in range(cfg.local_epochs):
        epoch = local_training.epoch_batches(len(rows), cfg.batch_size, order)
        batches = [picked for picked in epoch if can_learn_from(F, len(picked))]
        seen = local_training.views_of(
            rows.x, batches, lambda x: cfg.weak_view(x, chance), ctx.device
        )
        for picked, x in zip(batches, seen, strict=True):
            y = rows.y[picked].to(ctx.device)
            yield batched_call(hard_label_loss, {"x": x, "y": y}, F=F)


def run_sgd(
    F: nn.Module,
    losses: Iterator[Tensor],
    cfg: LocalTrainingSettings,
    msg: SupervisedRequest,
    ctx: Context,
) -> SupervisedUpdate:
    """One step of a fresh SGD on each loss as it comes, then what is sent.

    Args:
        F: holds the weights of ``msg``, to which ``msg.proximal`` pulls.
        losses: scalars; each is computed after the step on the one before. None: F goes back as
            it came, so that a visit with nothing to learn holds the average where it was.
    """
    anchor = [p.detach().clone() for p in F.parameters()] if msg.proximal else []
    values = []
    with randomness.seeded(ctx.rng("dropout")), _sgd(F, cfg, msg, ctx) as sgd:
        for loss in losses:
            values.append(loss.detach())
            if msg.proximal:
                loss = loss + msg.proximal / 2 * squared_distance(F, anchor)
            local_training.minimise(sgd, loss)
    if values:
        ctx.log_metric("train/loss_F", local_training.mean_of(values))
    return SupervisedUpdate(local_training.to_send(F.state_dict()))


def _sgd(
    F: nn.Module, cfg: LocalTrainingSettings, msg: SupervisedRequest, ctx: Context
) -> AbstractContextManager[optim.SGD]:
    """A fresh SGD on F. Its steps are on F's weights when the context ends."""
    rate = cfg.rate(ctx.round)
    if cfg.momentum or cfg.weight_decay or msg.proximal:
        sgd = optim.SGD(
            F.parameters(), lr=rate, momentum=cfg.momentum, weight_decay=cfg.weight_decay
        )
        return nullcontext(sgd)
    return plain_sgd(F, rate)


def squared_distance(F: nn.Module, anchor: list[Tensor]) -> Tensor:
    """|theta - anchor|^2 over all parameters of F, a scalar: Li et al. 2020, Eq. 2."""
    pairs = zip(F.parameters(), anchor, strict=True)
    return torch.stack([(mine - theirs).square().sum() for mine, theirs in pairs]).sum()


def can_learn_from(F: nn.Module, rows: int) -> bool:
    """Whether F can take a training step on so many rows: some, and two where it has batch norm."""
    return rows > 1 or (
        rows == 1 and not any(isinstance(layer, _BatchNorm) for layer in F.modules())
    )
