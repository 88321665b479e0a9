"""SemiFL: the server trains on its labels between rounds, agents on fixed pseudo-labels.

Diao, Ding, Tarokh: "SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with
Alternate Training" (NeurIPS 2022; arXiv:2106.01432). A server holds few labelled rows, agents many
without labels. *Alternate training*: (1) agents take pseudo-labels from the global model, once per
visit, not from the model that they train; (2) the server fine-tunes the average on its labels.

    paper, authors' code                              here
    agents drawn for the round                        round -> federation.sample
    pseudo-labels of the global model, max P >= tau   query_pass -> guess_labels
    FIX: rows with a confident label, MIX: any row    _fixed_label_losses
    CE(strong view, y) + lambda CE(mix, y1, y2)       fix_and_mix_loss, mix_loss
    average of active agents, global momentum 0.5     _aggregate, momentum_step
    server trains E epochs on its labels              support_pass
    static batch norm: statistics of all rows         _with_statistics, *_statistics
    learning rate: cosine over the rounds             SemiFLConfig.rate
    FedAvg + FixMatch, "parallel" (ablation)          fine_tune: false, pseudo_labels: training

Where labels may be: at the server (the paper). At support or mixed agents (ours) all of them
fine-tune the average at the same time; the mean of their weights, by rows, is taken.

Differs from the paper, as the authors' code does: agents work first and the server last in a
round; gradients are clipped; the average is stepped with momentum; MIX draws from all local rows
(profile semifl-text: from rows without a confident label, if there are any). Differs from both:
rows are in [-1, 1] and not standardised, batches of statistics are one agent's rows, shuffled, and
momentum moves parameters alone. An agent without a confident row declines. docs/semifl.md.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, final

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.local_ssl import (
    ModelState,
    ModelUpdate,
    Share,
    TrainRequest,
    average_over,
    needs_unlabelled,
)
from privssl.core.agents import LabelledRows, Memory, QueryAgent, SupportAgent, UnlabelledRows
from privssl.core.aggregation import WeightedMean, uniform_weight
from privssl.core.federation import Federation
from privssl.core.messages import Declined, Message, StateDict
from privssl.core.task import Context, on_agent
from privssl.data.augmentations import view
from privssl.models.static_norm import collect, statistics_of
from privssl.runtime import randomness
from privssl.settings.schema import Positive, Problem, Rate, strict
from privssl.training import device_transfer, local_training, optim
from privssl.training.batched.deferred import batched_call
from privssl.training.losses import hard_label_loss
from privssl.training.mixup import sample_mix
from privssl.training.pseudo_labels import guess_labels

Momentum = Annotated[float, Field(ge=0, lt=1)]
Losses = Iterator[Tensor]  # scalars; each is computed after the step on the one before

BIG_BATCH = 250  # rows at most in a pass for pseudo-labels or statistics; authors' code


# Messages and state -------------------------------------------------------------------------
# ModelUpdate has the parameters alone, without statistics of a norm.


@dataclasses.dataclass(frozen=True)
class Statistics(Message):
    """Up from an agent: its rows' mean and variance at every static norm; weight: its rows."""

    statistics: StateDict


@dataclasses.dataclass(frozen=True)
class SemiFLState(ModelState):
    """What the server keeps between rounds. F: fine-tuned, with statistics; is released."""

    velocity: StateDict  # of the global momentum, by parameter; zeros at first
    active: int = 0  # agents that had a confident row in the last round


# Config -------------------------------------------------------------------------------------


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class SemiFLConfig:
    """Section ``algorithm`` for SemiFL. Numbers are the paper's (CIFAR-10) unless marked."""

    name: Literal["semifl"] = "semifl"
    rounds: Positive = 800
    # semifl-2021, behind most published numbers: momentum of fine-tuning starts anew each round.
    # semifl-head, the code since Sept 2022: it is kept. semifl-text: MIX draws from the other rows.
    profile: Literal["semifl-2021", "semifl-head", "semifl-text"] = "semifl-2021"
    query_per_round: Positive | None = 10  # 0.1 of 100 agents; all when null or fewer
    epochs: Rate = 5.0  # E of a visit; below 1: that share of one epoch's batches
    server_epochs: Rate = 5.0  # E of fine-tuning
    batch_size: Positive = 10
    server_batch_size: Positive = 10  # 10 with 250 labels, 250 with 2500 or more
    learning_rate: Rate = 0.03  # SGD with Nesterov momentum, in round 1; see rate
    momentum: Momentum = 0.9
    weight_decay: Share = 5e-4  # of all parameters, biases included
    clip_norm: Rate | None = 1.0  # of the whole gradient; authors' code, the paper has none
    threshold: Share = 0.95  # tau: a label is confident where max P >= tau
    mix_alpha: Rate = 0.75  # a of lambda ~ Beta(a, a), one draw per batch
    mix_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0  # 0: FIX alone
    global_momentum: Momentum = 0.5  # beta_g of the server's step; 0: the plain average
    fine_tune: bool = True  # false: the server trains beside the agents and counts one half
    pseudo_labels: Literal["global", "training"] = "global"  # training: FixMatch, without MIX
    statistics: Literal["everyone", "labelled"] = "everyone"  # whose rows, for norm: static
    weak: Literal["none", "weak", "mid", "crop"] = "crop"
    strong: Literal["none", "weak", "mid", "strong", "fixmatch", "fedmatch", "fedseal"] = "fixmatch"
    flip: bool = False  # mirror images left to right: CIFAR yes (authors' code); digits no

    def rate(self, round_number: int) -> float:
        """Learning rate of agents and server in a round, counted from 1: cosine down to near 0."""
        return self.learning_rate * (1 + math.cos(math.pi * (round_number - 1) / self.rounds)) / 2

    def weak_view(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """A weak view of rows (B, *shape) in [-1, 1]."""
        return view(self.weak, x, rng, flip=self.flip)

    def strong_view(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """A strong view of rows (B, *shape) in [-1, 1]; RandAugment works on a weak one."""
        return view(self.strong, x, rng, flip=self.flip, under=self.weak)


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
        return SemiFLState(self._with_statistics(F, federation), zeros)

    def round(self, state: SemiFLState, federation: Federation) -> SemiFLState:
        F, velocity, mean = state.F, state.velocity, WeightedMean("F", uniform_weight)
        taking_part = federation.sample(federation.query, self.cfg.query_per_round)
        replies = federation.call_all(
            taking_part, self.query_pass, TrainRequest(F), aggregator=mean
        )
        active = sum(not reply.declined for reply in replies)
        if not self.cfg.fine_tune:
            F = self._fine_tune(F, federation)
        if active:
            F, velocity = self._aggregate(F, velocity, mean.value_or(F))
        if self.cfg.fine_tune:
            F = self._fine_tune(F, federation)
        return SemiFLState(self._with_statistics(F, federation), velocity, active)

    def _aggregate(
        self, F: StateDict, velocity: StateDict, mean: StateDict
    ) -> tuple[StateDict, StateDict]:
        """One step from F to the plain mean of the active agents."""
        if not self.cfg.fine_tune:  # F was trained beside the agents: one half each
            mean = {name: (F[name] + value) / 2 for name, value in mean.items()}
        return momentum_step(F, velocity, mean, self.cfg.global_momentum)

    def _fine_tune(self, F: StateDict, federation: Federation) -> StateDict:
        """F after training where labels are."""
        request = TrainRequest(F)
        return {**F, **average_over(federation, federation.support, self.support_pass, request, F)}

    def _with_statistics(self, F: StateDict, federation: Federation) -> StateDict:
        """F with statistics gathered over agents, where its norm has any.

        The next round distributes the same weights, so the paper's two gatherings are one.
        """
        if not statistics_of(self._F):
            return F
        request, mean = TrainRequest(F), WeightedMean("statistics")
        federation.call_all(federation.support, self.support_statistics, request, aggregator=mean)
        if self.cfg.statistics == "everyone":
            federation.call_all(federation.query, self.query_statistics, request, aggregator=mean)
        return {**F, **mean.value_or({})}

    def classifier(self, state: SemiFLState) -> StateDict:
        return state.F

    def metrics(self, state: SemiFLState) -> dict[str, float]:
        return {"train/active": float(state.active)}

    # Steps: where the data is ---------------------------------------------------------------

    @on_agent
    def query_pass(
        self, agent: QueryAgent, msg: TrainRequest, ctx: Context
    ) -> ModelUpdate | Declined:
        """Learn from pseudo-labels of the global model."""
        F = self.load_classifier(msg.F, ctx)
        in_training = self.cfg.pseudo_labels == "training"
        losses = self._fixmatch_losses if in_training else self._fixed_label_losses
        momentum = local_descent(
            F, losses(F, agent.unlabelled, ctx), self.cfg, agent.memory, "query", ctx
        )
        if momentum is None:
            return Declined("no row has a confident label")
        agent.memory = {**agent.memory, **momentum}
        return ModelUpdate(local_training.to_send(dict(F.named_parameters())))

    @on_agent
    def support_pass(self, agent: SupportAgent, msg: TrainRequest, ctx: Context) -> ModelUpdate:
        """Fine-tune: cross-entropy of weak views of labelled rows."""
        rows = agent.labelled
        ctx.weight = float(len(rows))
        F = self.load_classifier(msg.F, ctx)
        kept = self.cfg.profile == "semifl-head"
        losses = self._true_label_losses(F, rows, ctx)
        momentum = local_descent(F, losses, self.cfg, agent.memory if kept else {}, "support", ctx)
        if kept and momentum is not None:
            agent.memory = {**agent.memory, **momentum}
        return ModelUpdate(local_training.to_send(dict(F.named_parameters())))

    @on_agent
    def support_statistics(
        self, agent: SupportAgent, msg: TrainRequest, ctx: Context
    ) -> Statistics:
        """Statistics of labelled rows."""
        return self._gather_rows(agent.labelled.x, msg, ctx)

    @on_agent
    def query_statistics(self, agent: QueryAgent, msg: TrainRequest, ctx: Context) -> Statistics:
        """Statistics of unlabelled rows."""
        return self._gather_rows(agent.unlabelled.x, msg, ctx)

    # Losses, one batch after the other ------------------------------------------------------

    def _fixed_label_losses(self, F: nn.Module, rows: UnlabelledRows, ctx: Context) -> Losses:
        """FIX and MIX: ``fix_and_mix_loss`` of rows with a confident label."""
        x = local_training.network_input(rows.x, ctx.device)
        P = guess_labels(
            F.eval(), x, augment=self.cfg.weak_view, views=1, sharpness=1.0,
            rng=ctx.rng("guess"), chunk=BIG_BATCH,
        ).cpu()  # (N, C)  # fmt: skip
        F.train()
        confident = P.max(dim=1).values >= self.cfg.threshold  # (N,)
        ctx.pseudo_labels(rows.ids, P, confident)
        y = P.argmax(dim=1)  # (N,)
        fix, others = confident.nonzero()[:, 0], (~confident).nonzero()[:, 0]
        if not len(fix):
            return
        text = self.cfg.profile == "semifl-text" and len(others)
        pool = others if text else torch.arange(len(x))
        weak, strong, mixing = ctx.rng("weak view"), ctx.rng("strong view"), ctx.rng("mix")
        for order in passes(len(fix), self.cfg.batch_size, self.cfg.epochs, ctx.rng("order")):
            one = fix[order]
            other = pool[torch.randint(len(pool), (len(one),), generator=mixing)]
            views = {
                "strong": self.cfg.strong_view(x[one], strong), "y": y[one].to(ctx.device),
                "x1": self.cfg.weak_view(x[one], weak),
                "x2": self.cfg.weak_view(x[other], weak), "y2": y[other].to(ctx.device),
            }  # fmt: skip
            for batch in local_training.batches(views, self.cfg.batch_size):
                if self.cfg.mix_weight:
                    lam = sample_mix(1, self.cfg.mix_alpha, mixing)[0].double()  # so is 1 - lam
                    batch = {**batch, "lam": lam.to(ctx.device)}
                yield batched_call(fix_and_mix_loss, batch, self.cfg.mix_weight, F=F)

    def _fixmatch_losses(self, F: nn.Module, rows: UnlabelledRows, ctx: Context) -> Losses:
        """FixMatch: the model in training labels every batch; confident rows are used."""
        x = local_training.network_input(rows.x, ctx.device)
        weak, strong = ctx.rng("weak view"), ctx.rng("strong view")
        for order in passes(len(x), self.cfg.batch_size, self.cfg.epochs, ctx.rng("order")):
            views = {
                "weak": self.cfg.weak_view(x[order], weak),
                "strong": self.cfg.strong_view(x[order], strong), "ids": rows.ids[order],
            }  # fmt: skip
            for batch in local_training.batches(views, self.cfg.batch_size):
                with torch.no_grad():
                    P = F(batch["weak"]).softmax(dim=1)  # (B, C)
                confident = P.max(dim=1).values >= self.cfg.threshold  # (B,)
                ctx.pseudo_labels(batch["ids"], P, confident.cpu())
                if confident.any():
                    yield cross_entropy(F(batch["strong"][confident]), P.argmax(dim=1)[confident])

    def _true_label_losses(self, F: nn.Module, rows: LabelledRows, ctx: Context) -> Losses:
        """CE(F(weak), y) where labels are."""
        x, y = local_training.network_input(rows.x, ctx.device), rows.y.to(ctx.device)
        size, weak = self.cfg.server_batch_size, ctx.rng("weak view")
        for order in passes(len(x), size, self.cfg.server_epochs, ctx.rng("order")):
            views = {"x": self.cfg.weak_view(x[order], weak), "y": y[order]}
            for batch in local_training.batches(views, size):
                yield batched_call(hard_label_loss, batch, F=F)

    def _gather_rows(self, x: Tensor, msg: TrainRequest, ctx: Context) -> Statistics:
        """Mean of the statistics of batches that differ by at most a row; not augmented."""
        F = self.load_classifier(msg.F, ctx)
        rng = randomness.stream(ctx.seed, 0, ctx.agent, "statistics")  # one order for all rounds
        x = x[torch.randperm(len(x), generator=rng)]  # batches of one class would vary too little
        parts = torch.tensor_split(x, -(-len(x) // BIG_BATCH))
        ctx.weight = float(len(x))
        collect(F, (local_training.network_input(part, ctx.device) for part in parts))
        return Statistics(statistics_of(F))


# Local training and the server's step -------------------------------------------------------


def local_descent(
    F: nn.Module, losses: Losses, cfg: SemiFLConfig, memory: Memory, group: str, ctx: Context
) -> StateDict | None:  # fmt: skip
    """A step of SGD on each loss: clipped gradients, Nesterov momentum.

    Momentum continues from ``memory``, under ``group``. Returns the momentum to remember; None
    when there was no loss.
    """
    named = {f"{group}/{name}#momentum": p for name, p in F.named_parameters()}
    sgd = optim.SGD(
        named.values(), lr=cfg.rate(ctx.round), momentum=cfg.momentum,
        weight_decay=cfg.weight_decay, nesterov=cfg.momentum > 0,
    )  # fmt: skip
    remembered = {key: memory[key] for key in named if key in memory}
    for key, momentum in device_transfer.move_to(remembered, ctx.device).items():
        # in the memory format of the parameter: a checkpoint has another
        kept = torch.empty_like(named[key], requires_grad=False).copy_(momentum)
        sgd.state[named[key]]["momentum_buffer"] = kept
    values = []
    with randomness.seeded(ctx.rng("dropout")):
        for loss in losses:
            values.append(local_training.minimise(sgd, loss, clip_norm=cfg.clip_norm))
    if not values:
        return None
    ctx.log_metric(f"train/loss_F/{group}", local_training.mean_of(values))
    buffers = {key: sgd.state[p].get("momentum_buffer") for key, p in named.items()}
    return device_transfer.copy_tensors({key: b for key, b in buffers.items() if b is not None})


def momentum_step(
    F: StateDict, velocity: StateDict, mean: StateDict, momentum: float
) -> tuple[StateDict, StateDict]:
    """g = F - mean; v = momentum v + g; F - v: SGD of rate 1 on a pseudo-gradient (FedAvgM).

    Names that ``mean`` lacks are kept from F. Returns the new weights and the new v.
    """
    v = {name: momentum * velocity[name] + (F[name] - value) for name, value in mean.items()}
    return {**F, **{name: F[name] - step for name, step in v.items()}}, v


def fix_and_mix_loss(
    batch: Mapping[str, Tensor], mix_weight: float, *, F: Callable[..., Tensor]
) -> Tensor:
    """CE(F(strong), y) + mix_weight mix_loss of F(lam x1 + (1 - lam) x2), a scalar. y is the class
    of strong and of x1."""
    loss = cross_entropy(F(batch["strong"]), batch["y"])
    if not mix_weight:
        return loss
    logits = F(batch["lam"] * batch["x1"] + (1 - batch["lam"]) * batch["x2"])
    return loss + mix_weight * mix_loss(logits, batch["y"], batch["y2"], batch["lam"])


def mix_loss(logits: Tensor, y1: Tensor, y2: Tensor, lam: float | Tensor) -> Tensor:
    """lam CE(logits, y1) + (1 - lam) CE(logits, y2): logits (B, C), y1 and y2 (B,), scalar."""
    return lam * cross_entropy(logits, y1) + (1 - lam) * cross_entropy(logits, y2)


def passes(held: int, size: int, epochs: float, rng: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of each epoch, shuffled, for batches of ``size``.

    Args:
        held: rows, >= 0; none give empty epochs.
        epochs: > 0, rounded up; up to 1, one epoch stops after that share of its batches.
    """
    share = min(epochs, 1.0)
    rows = size * math.ceil(share * math.ceil(held / size))
    for _ in range(math.ceil(epochs)):
        yield torch.randperm(held, generator=rng)[:rows]
