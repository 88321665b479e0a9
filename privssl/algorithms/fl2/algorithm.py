"""(FL)^2: few labels at a server, thresholds by agent and class, and flat minima for sure rows.

Lee, Le, Shin, Lee: "(FL)^2: Overcoming Few Labels in Federated Semi-Supervised Learning" (NeurIPS
2024; arXiv:2410.23227). It keeps SemiFL's rounds, where the global model gives all pseudo-labels of
a visit and the server fine-tunes the average, and replaces its fixed threshold.

    paper                                               here
    server: E epochs on its labels (Eq. 2)              support_pass
    agents: threshold, and one for each class (7 to 9)  adaptive_thresholds
    cross-entropy of rows above it (Eq. 10)             _compute_loss
    weights moved against rows above tau_f (11, 12)     perturbation
    KL between both predictions of them (Eq. 13)        _compute_loss
    average with weights 1 - tau_k (Eq. 15)             learning_status
    momentum 0.5 of the server's step (appendix C)      round, momentum_step

Where labels may be: at the server (the paper). At support or mixed agents (ours) all of them
fine-tune the average at the same time; the mean of their weights, by rows, is taken.

Readings, where the paper is open: The consistency term is over the rows above tau_f, as its text
says; Eq. 13 has no indicator. It is KL(Q* || Q), and its gradient goes through both
(``moving_target``). Differs from the paper: group norm (the paper: static batch norm); an agent's
momentum starts anew.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.baselines.supervised import ProximalRequest, labelled_losses, run_sgd
from privssl.algorithms.fl2.settings import FL2Config
from privssl.algorithms.fl2.thresholds import adaptive_thresholds, learning_status, perturbation
from privssl.algorithms.local_ssl import (
    ModelState,
    TrainRequest,
    needs_no_statistics,
    needs_unlabelled,
    train_and_average,
)
from privssl.core.agents import QueryAgent, SupportAgent
from privssl.core.aggregation import WeightedMean, momentum_step, uniform_weight
from privssl.core.federation import Federation
from privssl.core.messages import Message, StateDict
from privssl.core.task import Context, on_agent
from privssl.settings.schema import Problem
from privssl.training import local_training
from privssl.training.losses import divergence
from privssl.training.pseudo_labels import guess_labels


@dataclasses.dataclass(frozen=True)
class ParameterUpdate(Message):
    """Up from an agent: its parameters; of one without labels also tau, in (0, 1]."""

    F: StateDict
    tau: float = 0.0


@dataclasses.dataclass(frozen=True)
class FL2State(ModelState):
    """What the server keeps between rounds. F: fine-tuned; is released."""

    velocity: StateDict  # of the server's momentum, by parameter; zeros at first


@final
class FL2(Algorithm[FL2State]):
    """Algorithm 1, with the server's training last in a round, so that it is released."""

    Config = FL2Config
    StateType = FL2State
    missing_reply_policy = MissingReplyPolicy(quorum=("support_pass", "query_pass"))
    cfg: FL2Config

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        yield from needs_unlabelled(config)
        yield from needs_no_statistics(config)
        if config.model.norm == "batch":
            text = "batch keeps averages that fl2 does not average. Set group or none"
            yield Problem("model.norm", text)

    def start(self, federation: Federation) -> FL2State:
        F = self.initial_classifier(federation)
        zeros = {name: torch.zeros_like(F[name]) for name, _ in self._F.named_parameters()}
        return FL2State(self._fine_tune(F, federation), zeros)

    def round(self, state: FL2State, federation: Federation) -> FL2State:
        agents = federation.sample(federation.query, self.cfg.query_per_round)
        equal = self.cfg.aggregation == "equal"
        mean = WeightedMean("F", uniform_weight if equal else learning_status)
        F, velocity = state.F, state.velocity
        replies = federation.call_all(agents, self.query_pass, TrainRequest(F), aggregator=mean)
        if any(not reply.declined for reply in replies):  # else momentum alone would move F
            F, velocity = momentum_step(F, velocity, mean.value_or(F), self.cfg.global_momentum)
        return FL2State(self._fine_tune(F, federation), velocity)

    def _fine_tune(self, F: StateDict, federation: Federation) -> StateDict:
        return train_and_average(
            federation, federation.support, self.support_pass, TrainRequest(F), F
        )

    def classifier(self, state: FL2State) -> StateDict:
        return state.F

    # Steps: where the data is ---------------------------------------------------------------

    @on_agent
    def support_pass(self, agent: SupportAgent, msg: TrainRequest, ctx: Context) -> ParameterUpdate:
        """E epochs of cross-entropy on weak views of labelled rows: Eq. 2."""
        ctx.weight = float(len(agent.labelled))
        F = self.load_classifier(msg.F, ctx)
        cfg = dataclasses.replace(self.cfg, batch_size=self.cfg.server_batch_size)
        return self._train(F, labelled_losses(F, agent.labelled, cfg, ctx), 0.0, msg, ctx)

    @on_agent
    def query_pass(self, agent: QueryAgent, msg: TrainRequest, ctx: Context) -> ParameterUpdate:
        """Learn from pseudo-labels that the global model gives once, of weak views."""
        F, rows = self.load_classifier(msg.F, ctx), agent.unlabelled
        q = guess_labels(
            F.eval(), local_training.network_input(rows.x, ctx.device), views=1, sharpness=1.0,
            augment=self.cfg.weak_view, rng=ctx.rng("guess"),
        ).cpu()  # (N, C)  # fmt: skip
        (confidence, y), (tau, class_thresholds) = q.max(dim=1), adaptive_thresholds(q)
        high_confidence = confidence > self.cfg.sure_above
        confident = confidence > class_thresholds[y] if self.cfg.adaptive else high_confidence
        ctx.pseudo_labels(rows.ids, q, confident)
        ctx.log_metric("train/tau", tau)
        ctx.log_metric("train/sure", float(high_confidence.float().mean()))
        order_rng, view_rng = ctx.rng("order"), ctx.rng("strong view")

        def losses() -> Iterator[Tensor]:
            F.train()
            for _ in range(self.cfg.local_epochs):
                epoch = local_training.epoch_batches(len(q), self.cfg.batch_size, order_rng)
                used_batches = [batch[(confident | high_confidence)[batch]] for batch in epoch]
                batches = [batch for batch in used_batches if len(batch)]
                views = local_training.views_of(
                    rows.x, batches, lambda x: self.cfg.strong_view(x, view_rng), ctx.device
                )
                for batch, x in zip(batches, views, strict=True):
                    target = y[batch].to(ctx.device)
                    yield self._compute_loss(F, x, target, confident[batch], high_confidence[batch])

        return self._train(F, losses(), tau, msg, ctx)

    def _compute_loss(
        self, F: nn.Module, x: Tensor, y: Tensor, confident: Tensor, high_confidence: Tensor
    ) -> Tensor:
        """w_a L_a + w_cs L_cs of one batch, Eq. 14: strong views (B, *shape), labels (B,)."""
        logits, weights = F(x), dict(F.named_parameters())
        loss: Tensor = logits.new_zeros(())
        if confident.any():
            loss = loss + self.cfg.learned_weight * cross_entropy(logits[confident], y[confident])
        if self.cfg.consistency_weight and high_confidence.any():
            L_p = cross_entropy(logits[high_confidence], y[high_confidence])  # Eq. 11
            g = torch.autograd.grad(L_p, list(weights.values()), retain_graph=True)
            eps = perturbation(weights, g, self.cfg.radius, self.cfg.perturbation == "asam")
            perturbed = {name: w + eps[name] for name, w in weights.items()}  # W*, Eq. 12
            Q = functional_call(F, perturbed, (x[high_confidence],)).softmax(dim=1)
            target = Q if self.cfg.moving_target else Q.detach()
            loss = (
                loss
                + self.cfg.consistency_weight * divergence(target, logits[high_confidence]).mean()
            )
        return loss

    def _train(
        self, F: nn.Module, losses: Iterator[Tensor], tau: float, msg: TrainRequest, ctx: Context
    ) -> ParameterUpdate:
        """A step of a fresh SGD on each loss, then the reply."""
        run_sgd(F, losses, self.cfg, ProximalRequest(msg.F), ctx)
        return ParameterUpdate(local_training.to_send(dict(F.named_parameters())), tau)
