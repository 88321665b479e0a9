"""FedSEAL: past models vote on labels, and agents also learn what a row is not.

Bian, Fu, Xu: "FedSEAL: Semi-Supervised Federated Learning with Self-Ensemble Learning and Negative
Learning" (arXiv:2110.07829, version 2). A server holds few labelled rows, agents many without.

    paper                                          here
    4.1.3 bootstrapping: w^0                       start -> bootstrap
    Alg. 1 step 1: average (Eq. 2), train (3, 4)   round -> learn_from_labels
    step 1: threshold of each class (Eq. 5)        round -> class_thresholds
    step 2: all agents download, p-bar (Eq. 7, 8)  round -> remember_prediction, _remembered
    step 3: D+ and D- (Eq. 9 to 12)                signs.signed_labels
    step 3: local training (Eq. 13 to 16)          learn_from_both_signs, signs.batch_loss
    step 4: upload                                 the reply of learn_from_both_signs

The server sets apart ``validation_rows`` of its own labelled rows for Eq. 5, at most half of them
and the same ones for the whole run. The small maths is in algorithms/fedseal/negative_learning.py.

Where labels may be: at the server (the paper). At support or mixed agents (ours) each of them
does what the server does, ``validation_rows`` included, with its own labelled rows; w^t is the
plain mean of their weights, and a class has the mean of the thresholds of those that can judge it.

Differs from the paper: (1) lambda grows from the printed value to 1 (``weight_schedule``). (2) A
class without validation rows, for which Eq. 5 divides by 0, is never positive. (3) Rows are in
[-1, 1], not standardised. (4) An agent without a usable row sends what it got; a batch of one row
is left out where a batch norm needs two. Where the paper is silent: Config and docs/fedseal.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, final

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.fedseal import negative_learning
from privssl.algorithms.local_ssl import Share, needs_unlabelled, no_statistics
from privssl.core.agents import LabelledRows, QueryAgent, SupportAgent, UnlabelledRows
from privssl.core.aggregation import WeightedMean, uniform_weight
from privssl.core.federation import Federation
from privssl.core.messages import Ack, Message, StateDict
from privssl.core.task import Context, Task, on_agent
from privssl.data.augmentations import view
from privssl.privacy.plan import PrivatePlan
from privssl.runtime import randomness
from privssl.settings.schema import Count, Positive, Problem, Rate, strict
from privssl.training import local_training, optim

View = Literal["none", "crop", "weak", "mid", "strong", "fixmatch", "fedmatch", "fedseal"]
LARGEST_WEIGHT = 1000.0  # of the positive loss: beyond it nothing but overflow


# What travels -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FedSEALModel(Message):
    """A classifier, down to an agent or up from one."""

    F: StateDict


@dataclass(frozen=True)
class ClassThresholds(Message):
    """Up from who holds labels: tau (C,) of Eq. 5, >= 0; NEVER for a class it cannot judge."""

    tau: Tensor


@dataclass(frozen=True)
class FedSEALRequest(Message):
    """Down to an agent that is to train: w^t and tau^t (C,)."""

    F: StateDict
    tau: Tensor


@dataclass(frozen=True)
class FedSEALState:
    """What the server keeps between rounds. An agent keeps p-bar and the number of its models."""

    averaged: StateDict  # w-bar: mean of the last uploads
    F: StateDict  # w^t: w-bar after labelled training; is sent, evaluated and released


# Config -------------------------------------------------------------------------------------


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedSEALConfig:
    """Section ``algorithm`` for FedSEAL. Numbers are the paper's (Fashion-MNIST) unless marked."""

    name: Literal["fedseal"] = "fedseal"
    rounds: Positive = 150
    query_per_round: Count | None = None  # agents that train; null: all; 0: nobody (Server-SL)
    server_epochs: Positive = 5  # E_s
    client_epochs: Positive = 5  # E_c
    batch_size: Positive = 32  # B_s and B_c; 100 for CIFAR-10
    learning_rate: Rate = 1e-3  # of SGD in round 1, of server and agents
    learning_rate_decay: Annotated[float, Field(gt=0, le=1)] = 0.995  # factor per round
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # starts anew at every visit
    validation_rows: Positive = 20  # of a holder's labelled rows, at most half; paper: 200 of 700
    bootstrap_epochs: Count = 200  # at most; 0: none. Ours: the paper says "good enough"
    bootstrap_patience: Count = 20  # epochs without better validation; 0: never stop early. Ours
    server_view: View = "crop"  # a(x); none: the paper's row "without DA"
    positive_view: View = "fedseal"  # A(x); RandAugment is applied to a crop
    negative_view: View = "none"  # Eq. 15 has no augmentation
    flip: bool = True  # mirror images left to right: objects yes, digits no
    history: Literal["all", "sampled", "none"] = "all"  # who updates p-bar; none: p-bar is p
    history_from_start: bool = False  # count w^0 too, as Eq. 7's text does and its sum does not
    threshold: Share | None = None  # the same for all classes (ablation); null: Eq. 5
    threshold_floor: Share = 0.0  # ours; Eq. 5 gives 0 to a class that is never predicted
    unlikely_at_most: Share = 0.1  # theta; 0.1 in the table, 0.05 in the text and on CIFAR-10
    exclude_likeliest: bool = False  # ours; true: y- is never y+
    hard_labels: bool = True  # false: rows of D+ are taught p-bar (ablation)
    positive_weight: Annotated[float, Field(gt=0, le=1)] = 0.25  # lambda in round 1; CIFAR-10: 0.1
    # How lambda moves: sign_weights. The paper says that it grows and prints a "decay rate"
    weight_schedule: negative_learning.Schedule = "complement"
    weight_rate: Annotated[float, Field(ge=0.01, le=1)] = 0.95
    weight_rounds: Positive = 100  # e stops here
    batches: negative_learning.Batching = "union"  # of D+ and D-: signed_batches. Ours

    def problems(self) -> Iterator[Problem]:
        """Settings that would overflow, or have no effect."""
        last = min(self.rounds - 1, self.weight_rounds)
        grows = self.positive_weight > LARGEST_WEIGHT * self.weight_rate**last
        if self.weight_schedule == "inverse" and grows:
            yield Problem(
                "weight_rate",
                f"{self.weight_rate} lets lambda grow beyond {LARGEST_WEIGHT:g} in {last} rounds. "
                "Give a rate nearer to 1, fewer weight_rounds, or another weight_schedule",
            )
        if self.history == "none" and self.history_from_start:
            yield Problem("history_from_start", "has no effect: there is no history")

    def sign_weights(self, round_number: int) -> tuple[float, float]:
        """Weights of the positive and the negative loss in a round, counted from 1. Eq. 13."""
        return negative_learning.sign_weights(
            self.weight_schedule, self.positive_weight, self.weight_rate,
            rounds=min(round_number - 1, self.weight_rounds), of=self.weight_rounds,
        )  # fmt: skip

    def rate(self, round_number: int) -> float:
        """Learning rate in a round, counted from 1; bootstrapping is round 0."""
        return self.learning_rate * self.learning_rate_decay ** max(0, round_number - 1)

    def view(self, name: View, x: Tensor, rng: torch.Generator) -> Tensor:
        """One view of each row (B, *shape) in [-1, 1]."""
        return x if name == "none" else view(name, x, rng, flip=self.flip)


# The algorithm ------------------------------------------------------------------------------


@final
class FedSEAL(Algorithm[FedSEALState]):
    """Algorithm 1."""

    Config = FedSEALConfig
    StateType = FedSEALState
    # Of predictions that it missed, an agent's own mean is simply not made.
    missing_reply_policy = MissingReplyPolicy(
        quorum=(
            "bootstrap", "learn_from_labels", "class_thresholds", "remember_prediction",
            "learn_from_both_signs",
        )
    )  # fmt: skip
    cfg: FedSEALConfig

    def __init__(self, config: FedSEALConfig, task: Task, plan: PrivatePlan | None = None) -> None:
        super().__init__(config, task, plan)
        self._F = task.new_classifier()

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        asked, agents, labels = config.algorithm, config.agents, config.data.labels
        if asked.query_per_round != 0:
            yield from needs_unlabelled(config)
        unlabelled = agents.query + (agents.mixed if labels == "labels-at-client" else 0)
        if unlabelled and (asked.query_per_round or 0) > unlabelled:
            yield Problem(
                "algorithm.query_per_round",
                f"{asked.query_per_round}, but {unlabelled} agents hold unlabelled rows. Give at "
                f"most {unlabelled}, or null for all of them",
            )
        holders = {"support": agents.support, "labels-at-client": agents.mixed}.get(labels, 1)
        each = config.data.labelled // max(1, holders)
        if asked.validation_rows >= each:
            yield Problem(
                "algorithm.validation_rows",
                f"{asked.validation_rows} are set apart of the labelled rows of each agent that "
                f"has any, but it has {each} and learns from the others. Give less than {each}, "
                "or raise data.labelled",
            )
        if config.model.norm == "batch" and asked.batch_size == 1:
            text = "1, but batch norm needs two rows: every batch would be left out. Give 2 or more"
            yield Problem("algorithm.batch_size", text)
        yield from no_statistics(config)

    def start(self, federation: Federation) -> FedSEALState:
        F: StateDict = local_training.fresh_weights(
            self.task.new_classifier, federation.rng("init F")
        )
        if self.cfg.bootstrap_epochs:
            trained = WeightedMean("F", uniform_weight)
            federation.call_all(
                federation.support, self.bootstrap, FedSEALModel(F), aggregator=trained
            )
            F = trained.value_or(F)
        if self.cfg.history_from_start:
            federation.call_all(federation.query, self.remember_prediction, FedSEALModel(F))
        return FedSEALState(averaged=F, F=F)

    def round(self, state: FedSEALState, federation: Federation) -> FedSEALState:
        trained, uploads = (
            WeightedMean("F", uniform_weight),
            WeightedMean("F", uniform_weight),
        )  # Eq. 2: the plain mean
        federation.call_all(
            federation.support,
            self.learn_from_labels,
            FedSEALModel(state.averaged),
            aggregator=trained,
        )
        F = trained.value_or(state.averaged)
        lesson = FedSEALRequest(F, self._thresholds(F, federation))
        chosen = federation.sample(federation.query, self.cfg.query_per_round)
        if self.cfg.history == "all" and chosen:
            training = set(chosen)
            others = [agent for agent in federation.query if agent not in training]
            federation.call_all(others, self.remember_prediction, FedSEALModel(F))
        federation.call_all(chosen, self.learn_from_both_signs, lesson, aggregator=uploads)
        return FedSEALState(averaged=uploads.value_or(F), F=F)

    def _thresholds(self, F: StateDict, federation: Federation) -> Tensor:
        """tau (C,): of the server, or the mean over the holders of labels that can judge."""
        if self.cfg.threshold is not None:
            return torch.full((self.task.classes,), self.cfg.threshold)
        told = federation.call_all(federation.support, self.class_thresholds, FedSEALModel(F))
        return negative_learning.mean_where_known(
            [r.payload.tau for r in told if not r.declined], self.task.classes
        )

    def classifier(self, state: FedSEALState) -> StateDict:
        return state.F

    def also_evaluated(self, state: FedSEALState) -> dict[str, StateDict]:
        return {"averaged": state.averaged}

    # Steps where labels are -----------------------------------------------------------------

    @on_agent
    def bootstrap(self, agent: SupportAgent, msg: FedSEALModel, ctx: Context) -> FedSEALModel:
        """Train F until validation rows stop getting better, and keep the best: 4.1.3."""
        rows, (taught, checked) = agent.labelled, self._parts(agent.labelled, ctx)
        F = self._load_classifier(msg.F, ctx)
        sgd, rng = self._sgd(F, ctx), ctx.rng("bootstrap")
        patience = self.cfg.bootstrap_patience if len(checked) else 0
        best: StateDict = msg.F
        best_accuracy, waited = -1.0, 0
        for _ in range(self.cfg.bootstrap_epochs):
            self._labelled_epoch(F, sgd, rows, taught, ctx, rng)
            guessed = _probabilities(F, rows.x[checked], ctx).argmax(dim=1)
            reached = float((guessed == rows.y[checked]).float().mean()) if patience else 0.0
            waited += 1
            if reached > best_accuracy or not patience:
                best, best_accuracy, waited = local_training.weights_of(F), reached, 0
            elif waited == patience:
                break
        return FedSEALModel(best)

    @on_agent
    def learn_from_labels(
        self, agent: SupportAgent, msg: FedSEALModel, ctx: Context
    ) -> FedSEALModel:
        """E_s epochs on labelled rows: Eq. 3, 4."""
        rows, (taught, _) = agent.labelled, self._parts(agent.labelled, ctx)
        F = self._load_classifier(msg.F, ctx)
        sgd, rng, losses = self._sgd(F, ctx), ctx.rng("labels"), []
        for _ in range(self.cfg.server_epochs):
            losses += self._labelled_epoch(F, sgd, rows, taught, ctx, rng)
        ctx.log_metric("train/loss_labelled", local_training.mean_of(losses))
        return FedSEALModel(local_training.to_send(F.state_dict()))

    @on_agent
    def class_thresholds(
        self, agent: SupportAgent, msg: FedSEALModel, ctx: Context
    ) -> ClassThresholds:
        """Eq. 5 on the validation rows, as they are."""
        rows, (_, checked) = agent.labelled, self._parts(agent.labelled, ctx)
        p = _probabilities(self._load_classifier(msg.F, ctx), rows.x[checked], ctx)
        tau = negative_learning.class_thresholds(p, rows.y[checked]).clamp(
            min=self.cfg.threshold_floor
        )
        known = tau[tau.isfinite()]
        if len(known):
            ctx.log_metric("train/threshold_min", float(known.min()))
            ctx.log_metric("train/threshold_max", float(known.max()))
        return ClassThresholds(
            torch.where(tau.isposinf(), negative_learning.NEVER_SEEN, tau)
        )  # nan stays: it diverged

    def _parts(self, rows: LabelledRows, ctx: Context) -> tuple[Tensor, Tensor]:
        """Numbers of rows to learn from and of those set apart, at most half; never redrawn."""
        rng = randomness.stream(ctx.seed, 0, ctx.agent, "validation rows")
        apart = negative_learning.split_validation(
            rows.y, min(self.cfg.validation_rows, len(rows) // 2), rng
        )
        return torch.nonzero(~apart)[:, 0], torch.nonzero(apart)[:, 0]

    def _labelled_epoch(
        self, F: nn.Module, sgd: optim.SGD, rows: LabelledRows, taught: Tensor,
        ctx: Context, rng: torch.Generator,
    ) -> list[Tensor]:  # fmt: skip
        """One pass over labelled rows; the losses of its batches."""
        epoch = local_training.epoch_batches(len(taught), self.cfg.batch_size, rng)
        batches = [taught[batch] for batch in epoch if not _too_few(F, batch)]
        view = partial(self.cfg.view, self.cfg.server_view, rng=rng)
        losses = []
        for batch, x in zip(
            batches, local_training.views_of(rows.x, batches, view, ctx.device), strict=True
        ):
            loss = cross_entropy(F(x), rows.y[batch].to(ctx.device))
            losses.append(local_training.minimise(sgd, loss))
        return losses

    # Steps where unlabelled rows are --------------------------------------------------------

    @on_agent
    def remember_prediction(self, agent: QueryAgent, msg: FedSEALModel, ctx: Context) -> Ack:
        """Let w^t into the history: Eq. 8, at an agent that does not train in this round."""
        self._update_history(agent, msg.F, ctx)
        return Ack()

    @on_agent
    def learn_from_both_signs(
        self, agent: QueryAgent, msg: FedSEALRequest, ctx: Context
    ) -> FedSEALModel:
        """Eq. 8 to 16: sure rows teach what they are, others what they are not."""
        p_bar = self._update_history(agent, msg.F, ctx)
        both = negative_learning.signed_labels(
            p_bar, msg.tau.cpu(), self.cfg.unlikely_at_most, ctx.rng("complement"),
            exclude_likeliest=self.cfg.exclude_likeliest, hard=self.cfg.hard_labels,
        )  # fmt: skip
        ctx.pseudo_labels(agent.unlabelled.ids, p_bar, both.positive)
        self._note_signs(both, ctx)
        F, weights = self._load_classifier(msg.F, ctx), self.cfg.sign_weights(ctx.round)
        sgd, order, views = self._sgd(F, ctx), ctx.rng("order"), ctx.rng("views")
        losses, how = [], self.cfg.batches
        for _ in range(self.cfg.client_epochs):
            batches = negative_learning.signed_batches(how, both, self.cfg.batch_size, order)
            seen = local_training.in_blocks(
                batches, partial(self._view_batch, agent.unlabelled, both, ctx, views),
                local_training.rows_per_pass(agent.unlabelled.x),
            )  # fmt: skip
            for batch, x in zip(batches, seen, strict=True):
                if not _too_few(F, batch):
                    up, down = negative_learning.signed_losses(F(x), both, batch)
                    loss = negative_learning.batch_loss(how, up, down, both.sizes, weights)
                    losses.append(local_training.minimise(sgd, loss))
        ctx.log_metric("train/loss_signs", local_training.mean_of(losses))
        return FedSEALModel(local_training.to_send(F.state_dict()))

    def _update_history(self, agent: QueryAgent, weights: StateDict, ctx: Context) -> Tensor:
        """p-bar (N, C) with one more model in it: Eq. 8."""
        p = _probabilities(self._load_classifier(weights, ctx), agent.unlabelled.x, ctx)
        if self.cfg.history == "none":
            return p
        memory = agent.memory
        models = int(memory["models"]) + 1 if "models" in memory else 1
        p_bar = memory["p_bar"] + (p - memory["p_bar"]) / models if models > 1 else p
        agent.memory = {**memory, "p_bar": p_bar, "models": torch.tensor(models)}
        return p_bar

    def _view_batch(
        self, rows: UnlabelledRows, both: negative_learning.SignedLabels, ctx: Context,
        rng: torch.Generator,
        picked: Tensor,
    ) -> Tensor:  # fmt: skip
        """Views of positive and of negative rows (N, *shape), by the kind of each."""
        x, positive = (
            local_training.network_input(rows.x[picked], ctx.device),
            both.positive[picked],
        )
        seen = torch.empty_like(x)
        seen[positive] = self.cfg.view(self.cfg.positive_view, x[positive], rng)
        seen[~positive] = self.cfg.view(self.cfg.negative_view, x[~positive], rng)
        return seen

    def _note_signs(self, both: negative_learning.SignedLabels, ctx: Context) -> None:
        """Shares of D+ and D-, lambda, and the largest class of D+: near 1, training collapses."""
        n_plus, n_minus = both.sizes
        counts = torch.bincount(both.y_plus[both.positive], minlength=1)
        ctx.log_metric("train/positive", n_plus / len(both.y_plus))
        ctx.log_metric("train/negative", n_minus / len(both.y_plus))
        ctx.log_metric("train/positive_largest_class", int(counts.max()) / max(1, n_plus))
        ctx.log_metric("train/positive_weight", self.cfg.sign_weights(ctx.round)[0])

    # Local training -------------------------------------------------------------------------

    def _load_classifier(self, weights: StateDict, ctx: Context) -> nn.Module:
        return local_training.load_weights(self._F, weights, ctx.device)

    def _sgd(self, F: nn.Module, ctx: Context) -> optim.SGD:
        rate = self.cfg.rate(ctx.round)
        return optim.SGD(F.parameters(), lr=rate, momentum=self.cfg.momentum)


# Small things -------------------------------------------------------------------------------


@torch.no_grad()
def _probabilities(F: nn.Module, x: Tensor, ctx: Context) -> Tensor:
    """Predictions (N, C) on rows as stored, as they are; F is left in training mode."""
    F.eval()
    parts = [F(local_training.network_input(part, ctx.device)) for part in torch.split(x, 512)]
    F.train()
    return torch.cat(parts).softmax(dim=1).cpu()


def _too_few(F: nn.Module, batch: Tensor) -> bool:
    """Whether a batch is one row and F has a batch norm, which may need two."""
    return len(batch) == 1 and any(isinstance(layer, _BatchNorm) for layer in F.modules())
