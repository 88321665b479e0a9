"""FedSEAL: agents learn from past models' mean prediction, and from what a row is not.

Bian, Fu, Xu: "FedSEAL: Semi-Supervised Federated Learning with Self-Ensemble Learning and Negative
Learning" (arXiv:2110.07829, version 2). A server holds few labelled rows, agents many without.

    paper                                          here
    4.1.3 bootstrapping: w^0                       start -> bootstrap
    Alg. 1 step 1: average (Eq. 2), train (3, 4)   round -> learn_from_labels
    step 1: threshold of each class (Eq. 5)        round -> class_thresholds
    step 2: all agents download, p-bar (Eq. 7, 8)  round -> remember_prediction, _update_history
    step 3: D+ and D- (Eq. 9 to 12)                negative_learning.draw_signed_labels
    step 3: local training (Eq. 13 to 16)          learn_from_both_signs, batch_loss
    step 4: upload                                 the reply of learn_from_both_signs

The server keeps ``validation_rows`` of its labelled rows for Eq. 5, at most half of them and the
same ones for the whole run.

Where labels may be: at the server (the paper). At support or mixed agents (ours) each does what
the server does with its own labelled rows. Then w^t is the plain mean of their weights, and a class
has the mean of the thresholds of the agents with validation rows of it.

Differs from the paper: (1) lambda grows from the printed value to 1 (``weight_schedule``). (2) A
class without validation rows, for which Eq. 5 divides by 0, is never positive. (3) Rows are in
[-1, 1], not standardised. (4) An agent without a usable row sends its weights back unchanged; a
batch of one row is left out where a batch norm needs two. What the paper does not give: Config and
docs/fedseal.md.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal, final

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.fedseal import negative_learning
from privssl.algorithms.local_ssl import (
    ModelState,
    ModelUpdate,
    Share,
    TrainRequest,
    can_learn_from,
    model_update,
    needs_no_statistics,
    needs_unlabelled,
    predict,
    train_and_average,
)
from privssl.core.agents import LabelledRows, QueryAgent, SupportAgent, UnlabelledRows
from privssl.core.aggregation import uniform_weight
from privssl.core.federation import Federation, Roster
from privssl.core.messages import Ack, Message, StateDict
from privssl.core.task import Context, on_agent
from privssl.data.augmentations import view
from privssl.runtime import randomness
from privssl.settings.schema import Count, Positive, Problem, Rate, strict
from privssl.training import local_training, optim

ViewName = Literal["none", "crop", "weak", "mid", "strong", "fixmatch", "fedmatch", "fedseal"]
LARGEST_WEIGHT = 1000.0  # of the positive loss: beyond it training overflows


# Messages and state -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ClassThresholds(Message):
    """Up from an agent with labels: tau (C,) of Eq. 5, >= 0; NEVER_SEEN where it has no row."""

    tau: Tensor


@dataclasses.dataclass(frozen=True)
class SignedRequest(TrainRequest):
    """Down to an agent that trains: w^t and tau^t (C,)."""

    tau: Tensor


@dataclasses.dataclass(frozen=True)
class FedSEALState(ModelState):
    """What the server keeps between rounds: w^t as F, which is sent, evaluated and released."""

    averaged: StateDict  # w-bar: mean of the last uploads; F is w-bar after labelled training


# Config -------------------------------------------------------------------------------------


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedSEALConfig:
    """Section ``algorithm`` for FedSEAL. Numbers are the paper's (Fashion-MNIST) unless marked."""

    name: Literal["fedseal"] = "fedseal"
    rounds: Positive = 150
    query_per_round: Count | None = None  # agents that train; null: all; 0: none (Server-SL)
    server_epochs: Positive = 5  # E_s
    client_epochs: Positive = 5  # E_c
    batch_size: Positive = 32  # B_s and B_c; 100 for CIFAR-10
    learning_rate: Rate = 1e-3  # of SGD in round 1, of server and agents
    learning_rate_decay: Annotated[float, Field(gt=0, le=1)] = 0.995  # factor per round
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # starts anew at every visit
    validation_rows: Positive = 20  # of an agent's labelled rows, at most half; paper: 200 of 700
    bootstrap_epochs: Count = 200  # at most; 0: none. Ours: the paper says "good enough"
    bootstrap_patience: Count = 20  # epochs without better validation; 0: never stop early. Ours
    server_view: ViewName = "crop"  # a(x); none: the paper's row "without DA"
    positive_view: ViewName = "fedseal"  # A(x); RandAugment is applied to a crop
    negative_view: ViewName = "none"  # Eq. 15 has no augmentation
    flip: bool = True  # mirror images left to right: objects yes, digits no
    history: Literal["all", "sampled", "none"] = "all"  # who updates p-bar; none: p-bar is p
    history_from_start: bool = False  # count w^0 too, as Eq. 7's text does and its sum does not
    threshold: Share | None = None  # the same for all classes (ablation); null: Eq. 5
    threshold_floor: Share = 0.0  # ours; Eq. 5 gives 0 to a class that is never predicted
    unlikely_at_most: Share = 0.1  # theta; 0.1 in the table, 0.05 in the text and on CIFAR-10
    exclude_likeliest: bool = False  # ours; true: y- is never y+
    hard_labels: bool = True  # false: rows of D+ have the target p-bar (ablation)
    positive_weight: Annotated[float, Field(gt=0, le=1)] = 0.25  # lambda in round 1; CIFAR-10: 0.1
    # How lambda moves: docs/fedseal.md. The paper says that it grows and prints a "decay rate"
    weight_schedule: negative_learning.Schedule = "complement"
    weight_rate: Annotated[float, Field(ge=0.01, le=1)] = 0.95
    weight_rounds: Positive = 100  # e stops here
    # D+ and D- as one set (union, exact), in turn, or side by side
    batches: negative_learning.Batching = "union"

    def problems(self) -> Iterator[Problem]:
        """Settings that overflow, or have no effect."""
        rounds = min(self.rounds - 1, self.weight_rounds)
        overflows = self.positive_weight > LARGEST_WEIGHT * self.weight_rate**rounds
        if self.weight_schedule == "inverse" and overflows:
            yield Problem(
                "weight_rate",
                f"{self.weight_rate} lets lambda grow beyond {LARGEST_WEIGHT:g} in {rounds} "
                "rounds. Give a rate nearer to 1, fewer weight_rounds, or another weight_schedule",
            )
        if self.history == "none" and self.history_from_start:
            yield Problem("history_from_start", "has no effect: there is no history")

    def sign_weights(self, round_number: int) -> tuple[float, float]:
        """Weights of the positive and the negative loss in a round, counted from 1. Eq. 13."""
        return negative_learning.sign_weights(
            self.weight_schedule, self.positive_weight, self.weight_rate,
            rounds=min(round_number - 1, self.weight_rounds), max_rounds=self.weight_rounds,
        )  # fmt: skip

    def rate(self, round_number: int) -> float:
        """Learning rate in a round, counted from 1; bootstrapping is round 0."""
        return self.learning_rate * self.learning_rate_decay ** max(0, round_number - 1)

    def sample_view(self, name: ViewName, x: Tensor, rng: torch.Generator) -> Tensor:
        """One view of each row (B, *shape) in [-1, 1]."""
        return x if name == "none" else view(name, x, rng, flip=self.flip)


# The algorithm ------------------------------------------------------------------------------


@final
class FedSEAL(Algorithm[FedSEALState]):
    """Algorithm 1."""

    Config = FedSEALConfig
    StateType = FedSEALState
    # A prediction that an agent missed is not in its mean.
    missing_reply_policy = MissingReplyPolicy(
        quorum=(
            "bootstrap", "learn_from_labels", "class_thresholds", "remember_prediction",
            "learn_from_both_signs",
        )
    )  # fmt: skip
    cfg: FedSEALConfig

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        cfg, agents, labels = config.algorithm, config.agents, config.data.labels
        if cfg.query_per_round != 0:
            yield from needs_unlabelled(config)
        unlabelled = agents.query + (agents.mixed if labels == "labels-at-client" else 0)
        if unlabelled and (cfg.query_per_round or 0) > unlabelled:
            yield Problem(
                "algorithm.query_per_round",
                f"{cfg.query_per_round}, but {unlabelled} agents hold unlabelled rows. Give at "
                f"most {unlabelled}, or null for all of them",
            )
        holders = {"support": agents.support, "labels-at-client": agents.mixed}.get(labels, 1)
        rows = config.data.labelled // max(1, holders)
        if cfg.validation_rows >= rows:
            yield Problem(
                "algorithm.validation_rows",
                f"{cfg.validation_rows} of the {rows} labelled rows of each agent, and no row "
                f"would be left to learn from. Give less than {rows}, or raise data.labelled",
            )
        if config.model.norm == "batch" and cfg.batch_size == 1:
            text = "1, but batch norm needs two rows: every batch would be left out. Give 2 or more"
            yield Problem("algorithm.batch_size", text)
        yield from needs_no_statistics(config)

    def start(self, federation: Federation) -> FedSEALState:
        F = self.initial_classifier(federation)
        if self.cfg.bootstrap_epochs:
            F = self._train_and_average(
                federation, federation.support, self.bootstrap, TrainRequest(F)
            )
        if self.cfg.history_from_start:
            federation.call_all(federation.query, self.remember_prediction, TrainRequest(F))
        return FedSEALState(F, averaged=F)

    def round(self, state: FedSEALState, federation: Federation) -> FedSEALState:
        request = TrainRequest(state.averaged)
        # Step 1
        F = self._train_and_average(federation, federation.support, self.learn_from_labels, request)
        signed = SignedRequest(F, self._ask_thresholds(F, federation))
        participants = federation.sample(federation.query, self.cfg.query_per_round)
        if self.cfg.history == "all" and participants:  # step 2
            others = [agent for agent in federation.query if agent not in set(participants)]
            federation.call_all(others, self.remember_prediction, TrainRequest(F))
        # steps 3 and 4, and Eq. 2 of the next round
        averaged = self._train_and_average(
            federation, participants, self.learn_from_both_signs, signed
        )
        return FedSEALState(F, averaged)

    def _train_and_average(
        self,
        federation: Federation,
        agents: Roster,
        step: Callable[..., Any],
        request: TrainRequest,
    ) -> StateDict:
        """Eq. 2: the plain mean of what the agents send after a step; what they got if none did."""
        return train_and_average(federation, agents, step, request, request.F, uniform_weight)

    def _ask_thresholds(self, F: StateDict, federation: Federation) -> Tensor:
        """tau (C,): of the server, or the mean over the agents with labels."""
        if self.cfg.threshold is not None:
            return torch.full((self.task.classes,), self.cfg.threshold)
        replies = federation.call_all(federation.support, self.class_thresholds, TrainRequest(F))
        thresholds = [reply.payload.tau for reply in replies if not reply.declined]
        return negative_learning.average_thresholds(thresholds, self.task.classes)

    def classifier(self, state: FedSEALState) -> StateDict:
        return state.F

    def also_evaluated(self, state: FedSEALState) -> dict[str, StateDict]:
        return {"averaged": state.averaged}

    # Steps where labels are -----------------------------------------------------------------

    @on_agent
    def bootstrap(self, agent: SupportAgent, msg: TrainRequest, ctx: Context) -> ModelUpdate:
        """Train F until accuracy on validation rows stops rising, and keep the best: 4.1.3."""
        rows, (train_indices, val_indices) = agent.labelled, self._split_rows(agent.labelled, ctx)
        F = self.load_classifier(msg.F, ctx)
        sgd, rng = self._make_sgd(F, ctx), ctx.rng("bootstrap")
        patience = self.cfg.bootstrap_patience if len(val_indices) else 0
        best: StateDict = msg.F
        best_accuracy, epochs_waited = -1.0, 0
        for _ in range(self.cfg.bootstrap_epochs):
            self._train_labelled_epoch(F, sgd, rows, train_indices, ctx, rng)
            predicted = _predict_probabilities(F, rows.x[val_indices], ctx).argmax(dim=1)
            accuracy = float((predicted == rows.y[val_indices]).float().mean()) if patience else 0.0
            epochs_waited += 1
            if accuracy > best_accuracy or not patience:
                best, best_accuracy, epochs_waited = local_training.weights_of(F), accuracy, 0
            elif epochs_waited == patience:
                break
        return ModelUpdate(best)

    @on_agent
    def learn_from_labels(
        self, agent: SupportAgent, msg: TrainRequest, ctx: Context
    ) -> ModelUpdate:
        """E_s epochs on labelled rows: Eq. 3, 4."""
        rows, (train_indices, _) = agent.labelled, self._split_rows(agent.labelled, ctx)
        F = self.load_classifier(msg.F, ctx)
        sgd, rng, losses = self._make_sgd(F, ctx), ctx.rng("labels"), []
        for _ in range(self.cfg.server_epochs):
            losses += self._train_labelled_epoch(F, sgd, rows, train_indices, ctx, rng)
        ctx.log_metric("train/loss_labelled", local_training.mean_of(losses))
        return model_update(F)

    @on_agent
    def class_thresholds(
        self, agent: SupportAgent, msg: TrainRequest, ctx: Context
    ) -> ClassThresholds:
        """Eq. 5 on the validation rows, not augmented; logs Figures 3 and 4 on them."""
        rows, (_, val_indices) = agent.labelled, self._split_rows(agent.labelled, ctx)
        p = _predict_probabilities(self.load_classifier(msg.F, ctx), rows.x[val_indices], ctx)
        tau = negative_learning.compute_class_thresholds(p, rows.y[val_indices])
        tau = tau.clamp(min=self.cfg.threshold_floor)
        finite = tau[tau.isfinite()]
        if len(finite):
            ctx.log_metric("train/threshold_min", float(finite.min()))
            ctx.log_metric("train/threshold_max", float(finite.max()))
            labels = negative_learning.draw_signed_labels(
                p, tau, self.cfg.unlikely_at_most, ctx.rng("complement"),
                exclude_likeliest=self.cfg.exclude_likeliest,
            )  # fmt: skip
            for name, value in negative_learning.compute_validation_metrics(
                p, rows.y[val_indices], labels
            ).items():
                ctx.log_metric(name, value)
        # NaN stays, and is refused as a message: training diverged
        return ClassThresholds(torch.where(tau.isposinf(), negative_learning.NEVER_SEEN, tau))

    def _split_rows(self, rows: LabelledRows, ctx: Context) -> tuple[Tensor, Tensor]:
        """Numbers of training and of validation rows, the same in every round."""
        rng = randomness.stream(ctx.seed, 0, ctx.agent, "validation rows")
        count = min(self.cfg.validation_rows, len(rows) // 2)
        is_validation = negative_learning.split_validation(rows.y, count, rng)
        return torch.nonzero(~is_validation)[:, 0], torch.nonzero(is_validation)[:, 0]

    def _train_labelled_epoch(
        self, F: nn.Module, sgd: optim.SGD, rows: LabelledRows, train_indices: Tensor,
        ctx: Context, rng: torch.Generator,
    ) -> list[Tensor]:  # fmt: skip
        """One pass over labelled rows; the losses of its batches."""
        epoch = local_training.epoch_batches(len(train_indices), self.cfg.batch_size, rng)
        batches = [train_indices[batch] for batch in epoch if can_learn_from(F, len(batch))]
        sample_view = partial(self.cfg.sample_view, self.cfg.server_view, rng=rng)
        views = local_training.views_of(rows.x, batches, sample_view, ctx.device)
        return [
            local_training.minimise(sgd, cross_entropy(F(x), rows.y[batch].to(ctx.device)))
            for batch, x in zip(batches, views, strict=True)
        ]

    # Steps where unlabelled rows are --------------------------------------------------------

    @on_agent
    def remember_prediction(self, agent: QueryAgent, msg: TrainRequest, ctx: Context) -> Ack:
        """Eq. 8 at an agent that does not train in this round."""
        self._update_history(agent, msg.F, ctx)
        return Ack()

    @on_agent
    def learn_from_both_signs(
        self, agent: QueryAgent, msg: SignedRequest, ctx: Context
    ) -> ModelUpdate:
        """Eq. 8 to 16: pseudo-labels of confident rows, complementary labels of the others."""
        cfg, rows = self.cfg, agent.unlabelled
        p_bar = self._update_history(agent, msg.F, ctx)  # Eq. 8
        labels = negative_learning.draw_signed_labels(
            p_bar, msg.tau.cpu(), cfg.unlikely_at_most, ctx.rng("complement"),
            exclude_likeliest=cfg.exclude_likeliest, hard=cfg.hard_labels,
        )  # Eq. 9 to 12  # fmt: skip
        ctx.pseudo_labels(rows.ids, p_bar, labels.positive)
        F, weights = self.load_classifier(msg.F, ctx), cfg.sign_weights(ctx.round)
        _log_signs(labels, weights[0], ctx)
        sgd, order, losses = self._make_sgd(F, ctx), ctx.rng("order"), list[Tensor]()
        sample_view = partial(self._draw_views, rows, labels, ctx, ctx.rng("views"))
        for _ in range(cfg.client_epochs):
            batches = negative_learning.draw_signed_batches(
                cfg.batches, labels, cfg.batch_size, order
            )
            views = local_training.in_blocks(
                batches, sample_view, local_training.rows_per_pass(rows.x)
            )
            for batch, x in zip(batches, views, strict=True):
                if can_learn_from(F, len(batch)):  # Eq. 14 and 15; Eq. 13; Eq. 16
                    pos, neg = negative_learning.compute_signed_losses(F(x), labels, batch)
                    loss = negative_learning.batch_loss(
                        cfg.batches, pos, neg, labels.sizes, weights
                    )
                    losses.append(local_training.minimise(sgd, loss))
        ctx.log_metric("train/loss_signs", local_training.mean_of(losses))
        return model_update(F)

    def _update_history(self, agent: QueryAgent, weights: StateDict, ctx: Context) -> Tensor:
        """p-bar (N, C) with the prediction of one more model: Eq. 8."""
        p = _predict_probabilities(self.load_classifier(weights, ctx), agent.unlabelled.x, ctx)
        if self.cfg.history == "none":
            return p
        memory = agent.memory
        model_count = int(memory["models"]) + 1 if "models" in memory else 1
        p_bar = memory["p_bar"] + (p - memory["p_bar"]) / model_count if model_count > 1 else p
        agent.memory = {**memory, "p_bar": p_bar, "models": torch.tensor(model_count)}
        return p_bar

    def _draw_views(
        self, rows: UnlabelledRows, labels: negative_learning.SignedLabels, ctx: Context,
        rng: torch.Generator, indices: Tensor,
    ) -> Tensor:  # fmt: skip
        """The positive view of rows of D+, the negative view of the others (N, *shape)."""
        x = local_training.network_input(rows.x[indices], ctx.device)
        positive, views = labels.positive[indices], torch.empty_like(x)
        views[positive] = self.cfg.sample_view(self.cfg.positive_view, x[positive], rng)
        views[~positive] = self.cfg.sample_view(self.cfg.negative_view, x[~positive], rng)
        return views

    def _make_sgd(self, F: nn.Module, ctx: Context) -> optim.SGD:
        rate = self.cfg.rate(ctx.round)
        return optim.SGD(F.parameters(), lr=rate, momentum=self.cfg.momentum)


def _log_signs(labels: negative_learning.SignedLabels, weight: float, ctx: Context) -> None:
    """Shares of D+ and D-, lambda, and the largest class of D+: near 1, training collapses."""
    n_plus, n_minus = labels.sizes
    counts = torch.bincount(labels.y_plus[labels.positive], minlength=1)
    ctx.log_metric("train/positive", n_plus / len(labels.y_plus))
    ctx.log_metric("train/negative", n_minus / len(labels.y_plus))
    ctx.log_metric("train/positive_largest_class", int(counts.max()) / max(1, n_plus))
    ctx.log_metric("train/positive_weight", weight)


def _predict_probabilities(F: nn.Module, x: Tensor, ctx: Context) -> Tensor:
    """Predictions (N, C) on stored rows, not augmented; F is left in training mode."""
    return predict(F, x, ctx.device).softmax(dim=1).cpu()
