"""FedOwn: FedAvg whose query agents learn from rows with a confident mean prediction.

A query agent keeps a running mean of the global classifier's predictions for each of its rows
(temporal ensembling, Laine and Aila 2017).
"""

from typing import final

import pydantic.dataclasses
from torch import Tensor, nn

from accounting.errors import BudgetExhausted
from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.baselines import dp_classifier as dp
from privssl.algorithms.local_ssl import (
    ModelState,
    ModelUpdate,
    Share,
    TrainRequest,
    model_update,
    predict,
)
from privssl.core.agents import QueryAgent, SupportAgent
from privssl.core.aggregation import WeightedMean
from privssl.core.federation import Federation
from privssl.core.messages import BUDGET_EXHAUSTED, Declined, StateDict
from privssl.core.task import Context, on_agent
from privssl.settings.schema import Positive, Rate, strict
from privssl.training import local_training, optim
from privssl.training.batched.deferred import batched_call
from privssl.training.losses import hard_label_loss


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedOwnConfig:
    """Section ``algorithm``."""

    name: str = "fedown"
    rounds: Positive = 20
    batch_size: Positive = 32
    learning_rate: Rate = 0.05
    threshold: Share = 0.8  # of the mean prediction; rows above it are trained on
    decay: Share = 0.6  # of the mean, in a round


@final
class FedOwn(Algorithm[ModelState]):
    """The algorithm: server first, then the steps on agents."""

    Config = FedOwnConfig
    StateType = ModelState
    can_be_private = True
    # Steps of a run over sites that tolerate missing agents.
    missing_reply_policy = MissingReplyPolicy(quorum=("support_pass", "query_pass"))
    cfg: FedOwnConfig

    # The server ---------------------------------------------------------------------------

    def start(self, federation: Federation) -> ModelState:
        return ModelState(self.initial_classifier(federation))

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        F, request = WeightedMean("F"), TrainRequest(state.F)
        if self.plan is None or federation.round.number <= self.plan.visits:
            federation.call_all(federation.support, self.support_pass, request, aggregator=F)
        federation.call_all(federation.query, self.query_pass, request, aggregator=F)
        return ModelState(F.value_or(state.F))

    def classifier(self, state: ModelState) -> StateDict:
        return state.F

    # Where the data is --------------------------------------------------------------------

    @on_agent
    def support_pass(
        self, agent: SupportAgent, msg: TrainRequest, ctx: Context
    ) -> ModelUpdate | Declined:
        F = self.load_classifier(msg.F, ctx)
        if self.plan is None:
            self._train(F, agent.labelled.x, agent.labelled.y, ctx)
            return model_update(F)
        try:
            dp.train_classifier(self.plan, F, agent, ctx, flip=False)  # charges, then reads
        except BudgetExhausted:
            return BUDGET_EXHAUSTED
        return model_update(F)

    @on_agent
    def query_pass(
        self, agent: QueryAgent, msg: TrainRequest, ctx: Context
    ) -> ModelUpdate | Declined:
        F, rows = self.load_classifier(msg.F, ctx), agent.unlabelled
        guesses = predict(F, rows.x, ctx.device).softmax(dim=1).cpu()  # (N, C)
        if "mean" in agent.memory:
            guesses = agent.memory["mean"].lerp(guesses, 1 - self.cfg.decay)
        agent.memory = {"mean": guesses}  # replaced, never mutated
        confidence, classes = guesses.max(dim=1)
        kept = confidence >= self.cfg.threshold
        ctx.pseudo_labels(rows.ids, guesses, kept)  # logs coverage and accuracy
        if not kept.any():
            return Declined("no row has a confident prediction")
        self._train(F, rows.x[kept], classes[kept], ctx)
        return model_update(F)

    def _train(self, F: nn.Module, x: Tensor, y: Tensor, ctx: Context) -> None:
        """An epoch of cross-entropy."""
        sgd, losses = optim.SGD(F.parameters(), lr=self.cfg.learning_rate), []
        for picked in local_training.epoch_batches(len(x), self.cfg.batch_size, ctx.rng("order")):
            seen = local_training.network_input(x[picked], ctx.device)
            batch = {"x": seen, "y": y[picked].to(ctx.device)}
            losses.append(batched_call(hard_label_loss, batch, F=F))
            local_training.minimise(sgd, losses[-1])
        ctx.log_metric("train/loss_F", local_training.mean_of([loss.detach() for loss in losses]))

    # For a privacy plan -------------------------------------------------------------------

    def check_private(self) -> None:
        dp.check_classifier(self._F, self.task)
