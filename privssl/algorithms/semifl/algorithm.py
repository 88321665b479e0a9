"""SemiFL: the server trains on its labels between rounds, agents on fixed pseudo-labels.

Diao, Ding, Tarokh: "SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with
Alternate Training" (NeurIPS 2022; arXiv:2106.01432). A server holds few labelled rows, agents many
without labels. *Alternate training*: (1) Agents take pseudo-labels from the global model, once per
visit, not from the model that they train. (2) The server fine-tunes the average on its labels.

    paper, authors' code                              here
    agents drawn for the round                        round -> federation.sample
    Eq. 2, 3  pseudo-labels, those with max P >= tau  query_pass -> _fix_and_mix_losses
    Eq. 4     D-: rows to mix with                    losses.pair_rows
    Eq. 5-7   mixes; L_fix + lambda L_mix             _fix_and_mix_losses, fix_and_mix_loss
    Eq. 8     steps of an agent                       run_local_sgd
    Eq. 9     average of active agents, momentum 0.5  _aggregate, momentum_step
    Eq. 1     server trains E epochs on its labels    support_pass -> _supervised_losses
    static batch norm: statistics of all rows         _aggregate_bn_statistics, *_statistics
    learning rate: cosine over the rounds             SemiFLConfig.rate
    FedAvg + FixMatch, "parallel" (ablation)          fine_tune: false, pseudo_labels: training

Where labels may be: at the server (the paper). At support or mixed agents (ours) all of them
fine-tune the average at the same time; the mean of their weights, by rows, is taken.

Where the authors' code differs from the paper's text there is a switch, ``PROFILES``: the profiles
semifl-2021 and semifl-head are the code, semifl-text is the text. Differs from both: rows are in
[-1, 1] and not standardised, batches of statistics are one agent's rows, shuffled, and momentum
moves parameters alone. An agent without a confident row declines. docs/semifl.md.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.local_ssl import (
    ModelState,
    ModelUpdate,
    TrainRequest,
    needs_unlabelled,
    train_and_average,
)
from privssl.algorithms.semifl.losses import epoch_permutations, fix_and_mix_loss, pair_rows
from privssl.algorithms.semifl.settings import SemiFLConfig
from privssl.algorithms.static_statistics import (
    BIG_BATCH,
    Statistics,
    aggregate_bn_statistics,
    compute_bn_statistics,
)
from privssl.core.agents import LabelledRows, Memory, QueryAgent, SupportAgent, UnlabelledRows
from privssl.core.aggregation import WeightedMean, momentum_step, uniform_weight
from privssl.core.federation import Federation, Roster
from privssl.core.messages import Declined, StateDict
from privssl.core.task import Context, on_agent
from privssl.runtime import randomness
from privssl.settings.schema import Problem
from privssl.training import device_transfer, local_training, optim
from privssl.training.batched.deferred import batched_call
from privssl.training.losses import hard_label_loss
from privssl.training.mixup import mix, sample_mix
from privssl.training.pseudo_labels import guess_labels

LossStream = Iterator[Tensor]  # scalars; each is computed after the step on the one before


# State --------------------------------------------------------------------------------------
# ModelUpdate has the parameters alone, without statistics of a norm.


@dataclasses.dataclass(frozen=True)
class SemiFLState(ModelState):
    """What the server keeps between rounds. F: fine-tuned, with statistics; is released."""

    velocity: StateDict  # of the global momentum, by parameter; zeros at first
    active: int = 0  # agents that had a confident row in the last round


# The algorithm ------------------------------------------------------------------------------


@final
class SemiFL(Algorithm[SemiFLState]):
    """Alternate training; by switches also FedAvg + FixMatch, the paper's baseline."""

    Config = SemiFLConfig
    StateType = SemiFLState
    missing_reply_policy = MissingReplyPolicy(
        quorum=("query_pass", "support_pass", "support_statistics", "query_statistics")
    )
    cfg: SemiFLConfig

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        yield from needs_unlabelled(config)
        if config.model.norm == "batch":
            text = "batch keeps averages that semifl does not average. Set static or group"
            yield Problem("model.norm", text)
        if config.algorithm.statistics != "everyone" and config.model.norm != "static":
            yield Problem("algorithm.statistics", "has no effect: it belongs to model.norm static")

    def start(self, federation: Federation) -> SemiFLState:
        F = self.initial_classifier(federation)
        zeros = {name: torch.zeros_like(F[name]) for name, _ in self._F.named_parameters()}
        if self.cfg.fine_tune and self.cfg.variant.server_first:
            # The server's turn of round t + 1 ends round t, so that of the last round is the
            # paper's final fine-tuning: Algorithm 1 but for its learning rate.
            F = self._fine_tune(F, federation)
        return SemiFLState(self._aggregate_bn_statistics(F, federation), zeros)

    def round(self, state: SemiFLState, federation: Federation) -> SemiFLState:
        F, velocity, mean = state.F, state.velocity, WeightedMean("F", uniform_weight)
        participants = federation.sample(federation.query, self.cfg.query_per_round)
        replies = federation.call_all(
            participants, self.query_pass, TrainRequest(F), aggregator=mean
        )
        active = sum(not reply.declined for reply in replies)
        # fine_tune true: agents train, then the server trains their average. False: both train the
        # same F, and _aggregate takes the mean of the two.
        if not self.cfg.fine_tune:
            F = self._fine_tune(F, federation)
        if active:
            F, velocity = self._aggregate(F, velocity, mean.value_or(F))
        if self.cfg.fine_tune:
            F = self._fine_tune(F, federation)
        return SemiFLState(self._aggregate_bn_statistics(F, federation), velocity, active)

    def _aggregate(
        self, F: StateDict, velocity: StateDict, mean: StateDict
    ) -> tuple[StateDict, StateDict]:
        """One step from F to the plain mean of the active agents: Eq. 9, with momentum."""
        if not self.cfg.fine_tune:  # F was trained at the same time: one half each
            mean = {name: (F[name] + value) / 2 for name, value in mean.items()}
        return momentum_step(F, velocity, mean, self.cfg.global_momentum)

    def _fine_tune(self, F: StateDict, federation: Federation) -> StateDict:
        """F after training where labels are."""
        request = TrainRequest(F)
        return {
            **F,
            **train_and_average(federation, federation.support, self.support_pass, request, F),
        }

    def _aggregate_bn_statistics(self, F: StateDict, federation: Federation) -> StateDict:
        """F with statistics gathered over agents, where its norm has any."""
        sources: list[tuple[Roster, Callable[..., Any]]] = [
            (federation.support, self.support_statistics)
        ]
        if self.cfg.statistics == "everyone" and self.cfg.query_per_round != 0:
            sources.append((federation.query, self.query_statistics))
        return aggregate_bn_statistics(F, self._F, federation, TrainRequest(F), sources)

    def classifier(self, state: SemiFLState) -> StateDict:
        return state.F

    def metrics(self, state: SemiFLState) -> dict[str, float]:
        return {"train/active": float(state.active)}

    # Steps: where the data is ---------------------------------------------------------------

    @on_agent
    def query_pass(
        self, agent: QueryAgent, msg: TrainRequest, ctx: Context
    ) -> ModelUpdate | Declined:
        """ClientUpdate: learn from pseudo-labels of the global model; Eq. 2 to 8."""
        F = self.load_classifier(msg.F, ctx)
        uses_fixmatch = self.cfg.pseudo_labels == "training"
        losses = self._fixmatch_losses if uses_fixmatch else self._fix_and_mix_losses
        momentum = run_local_sgd(
            F, losses(F, agent.unlabelled, ctx), self.cfg, agent.memory, "query", ctx
        )
        if momentum is None:
            return Declined("no row has a confident label")
        agent.memory = {**agent.memory, **momentum}
        return ModelUpdate(local_training.to_send(dict(F.named_parameters())))

    @on_agent
    def support_pass(self, agent: SupportAgent, msg: TrainRequest, ctx: Context) -> ModelUpdate:
        """ServerUpdate: cross-entropy of weak views of labelled rows; Eq. 1."""
        rows = agent.labelled
        ctx.weight = float(len(rows))
        F = self.load_classifier(msg.F, ctx)
        keeps = self.cfg.variant.keeps_momentum
        losses = self._supervised_losses(F, rows, ctx)
        momentum = run_local_sgd(F, losses, self.cfg, agent.memory if keeps else {}, "support", ctx)
        if keeps and momentum is not None:
            agent.memory = {**agent.memory, **momentum}
        return ModelUpdate(local_training.to_send(dict(F.named_parameters())))

    @on_agent
    def support_statistics(
        self, agent: SupportAgent, msg: TrainRequest, ctx: Context
    ) -> Statistics:
        """Statistics of labelled rows."""
        return compute_bn_statistics(self.load_classifier(msg.F, ctx), agent.labelled.x, ctx)

    @on_agent
    def query_statistics(self, agent: QueryAgent, msg: TrainRequest, ctx: Context) -> Statistics:
        """Statistics of unlabelled rows."""
        return compute_bn_statistics(self.load_classifier(msg.F, ctx), agent.unlabelled.x, ctx)

    # Losses, one batch after the other ------------------------------------------------------

    def _fix_and_mix_losses(self, F: nn.Module, rows: UnlabelledRows, ctx: Context) -> LossStream:
        """FIX and MIX: ``fix_and_mix_loss`` of rows with a confident label.

        Labels come from F before the first step: all up to the first loss runs at the first
        ``next``, before ``run_local_sgd`` takes a step.
        """
        cfg, variant = self.cfg, self.cfg.variant
        x = local_training.network_input(rows.x, ctx.device)
        P = guess_labels(
            F.eval(), x, augment=cfg.weak_view, views=1, sharpness=1.0,
            rng=ctx.rng("guess"), chunk=BIG_BATCH,
        ).cpu()  # (N, C), Eq. 2  # fmt: skip
        F.train()
        confident = P.max(dim=1).values >= cfg.threshold  # (N,), Eq. 3
        ctx.pseudo_labels(rows.ids, P, confident)
        y = P if variant.soft_labels else P.argmax(dim=1)  # (N, C) or (N,)
        if not confident.any():
            return  # "If D+ is empty then stop"
        weak_rng, strong_rng, mix_rng = ctx.rng("weak view"), ctx.rng("strong view"), ctx.rng("mix")
        orders = epoch_permutations(
            int(confident.sum()), cfg.batch_size, cfg.epochs, ctx.rng("order")
        )
        for plus, minus in pair_rows(confident, orders, variant, mix_rng):  # D+, D-: Eq. 4
            views = {
                "strong": cfg.strong_view(x[plus], strong_rng),
                "y": y[plus].to(ctx.device), "y2": y[minus].to(ctx.device),
            }  # fmt: skip
            if cfg.mix_weight and variant.mix_view == "rows":
                views["x1"] = cfg.weak_view(x[plus], weak_rng)
                views["x2"] = cfg.weak_view(x[minus], weak_rng)
            elif cfg.mix_weight:
                lams = sample_mix(-(-len(plus) // cfg.batch_size), cfg.mix_alpha, mix_rng)
                lam = lams.repeat_interleave(cfg.batch_size)[: len(plus)].to(ctx.device)
                mixed = cfg.weak_view(mix(lam, x[plus], x[minus]), weak_rng)
                views |= {"lam": lam.double(), "mix": mixed}
            for batch in local_training.batches(views, cfg.batch_size):
                if "lam" in batch:
                    batch["lam"] = batch["lam"][0]  # one for a batch
                elif cfg.mix_weight:
                    # float64, in which the loss then computes 1 - lam too
                    lam = sample_mix(1, cfg.mix_alpha, mix_rng)[0].double()
                    batch["lam"] = lam.to(ctx.device)
                # Eq. 5 to 7; run_local_sgd takes the step of Eq. 8
                yield batched_call(fix_and_mix_loss, batch, cfg.mix_weight, F=F)

    def _fixmatch_losses(self, F: nn.Module, rows: UnlabelledRows, ctx: Context) -> LossStream:
        """FixMatch: the model in training labels every batch; confident rows are used."""
        x = local_training.network_input(rows.x, ctx.device)
        weak_rng, strong_rng = ctx.rng("weak view"), ctx.rng("strong view")
        for order in epoch_permutations(
            len(x), self.cfg.batch_size, self.cfg.epochs, ctx.rng("order")
        ):
            views = {
                "weak": self.cfg.weak_view(x[order], weak_rng),
                "strong": self.cfg.strong_view(x[order], strong_rng), "ids": rows.ids[order],
            }  # fmt: skip
            for batch in local_training.batches(views, self.cfg.batch_size):
                with torch.no_grad():
                    P = F(batch["weak"]).softmax(dim=1)  # (B, C)
                confident = P.max(dim=1).values >= self.cfg.threshold  # (B,)
                ctx.pseudo_labels(batch["ids"], P, confident.cpu())
                if confident.any():
                    yield cross_entropy(F(batch["strong"][confident]), P.argmax(dim=1)[confident])

    def _supervised_losses(self, F: nn.Module, rows: LabelledRows, ctx: Context) -> LossStream:
        """CE(F(weak), y) where labels are."""
        x, y = local_training.network_input(rows.x, ctx.device), rows.y.to(ctx.device)
        size, weak_rng = self.cfg.server_batch_size, ctx.rng("weak view")
        for order in epoch_permutations(len(x), size, self.cfg.server_epochs, ctx.rng("order")):
            views = {"x": self.cfg.weak_view(x[order], weak_rng), "y": y[order]}
            for batch in local_training.batches(views, size):
                yield batched_call(hard_label_loss, batch, F=F)


# Local training -----------------------------------------------------------------------------


def run_local_sgd(
    F: nn.Module, losses: LossStream, cfg: SemiFLConfig, memory: Memory, role: str, ctx: Context
) -> StateDict | None:  # fmt: skip
    """A step of SGD on each loss: clipped gradients, Nesterov momentum.

    Momentum continues from ``memory``, under ``role``. Returns the momentum to remember; None
    when there was no loss.
    """
    params = {f"{role}/{name}#momentum": p for name, p in F.named_parameters()}
    sgd = optim.SGD(
        params.values(), lr=cfg.rate(ctx.round), momentum=cfg.momentum,
        weight_decay=cfg.weight_decay, nesterov=cfg.momentum > 0,
    )  # fmt: skip
    remembered = {key: memory[key] for key in params if key in memory}
    for key, momentum in device_transfer.move_to(remembered, ctx.device).items():
        # in the memory format of the parameter: a checkpoint has another
        buffer = torch.empty_like(params[key], requires_grad=False).copy_(momentum)
        sgd.state[params[key]]["momentum_buffer"] = buffer
    loss_values = []
    with randomness.seeded(ctx.rng("dropout")):
        for loss in losses:
            loss_values.append(local_training.minimise(sgd, loss, clip_norm=cfg.max_gradient_norm))
    if not loss_values:
        return None
    ctx.log_metric(f"train/loss_F/{role}", local_training.mean_of(loss_values))
    buffers = {key: sgd.state[p].get("momentum_buffer") for key, p in params.items()}
    return device_transfer.copy_tensors({key: b for key, b in buffers.items() if b is not None})
