"""FixMatch and UDA in a federation: a strong view must be classified as the clean view was.

FedAvg-FixMatch and FedAvg-UDA; with ``weights: equal`` and ``proximal: 0.01`` FedProx-FixMatch and
FedProx-UDA, as in FedMatch (Jeong et al., ICLR 2021) and FedSEAL (Bian et al., 2021).

    papers                                                    here
    FixMatch (Sohn et al. 2020): label of a clean view where
      max p >= tau, cross-entropy of a strong view            ConsistencyTraining._unlabelled_losses
    UDA (Xie et al. 2020): KL(p of a clean view || p strong)  UDA._unlabelled_losses, divergence
      training signal annealing (TSA)                         UDA._labelled_loss
    one step on L_s + L_u                                     ConsistencyTraining.losses
    as many steps as on labels alone                          joint_batches

Rounds, and where labels may be: algorithms/baselines/pseudo_labeling.py.

Differs from the papers: (1) A clean view is predicted by the network in training, without dropout
or batch statistics. (2) No paper gives UDA's sharpening, masking and clock in a federation:
``temperature`` (none by default), ``threshold`` and rounds. (3) FixMatch has seven unlabelled rows
to a labelled one. Here an agent's unlabelled batches follow from its labelled ones, as in FedMatch
(``steps_of``).
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal, final

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from privssl.algorithms.baselines.local_settings import StreamSettings
from privssl.algorithms.baselines.pseudo_labeling import PseudoLabelSettings, PseudoLabelTraining
from privssl.algorithms.local_ssl import Amount, Share, can_learn_from, predict
from privssl.core.agents import LabelledRows, UnlabelledRows
from privssl.core.task import Context
from privssl.data.augmentations import StrongName, StrongViews
from privssl.settings.schema import Rate, strict
from privssl.training import local_training
from privssl.training.losses import divergence
from privssl.training.pseudo_labels import sharpen, view_probabilities

# Config -------------------------------------------------------------------------------------


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class ConsistencySettings(PseudoLabelSettings, StrongViews):
    """Settings of FixMatch and UDA; profiles of both papers: docs/baselines.md."""

    threshold: Share = 0.85  # tau: a row counts where max p >= tau; FedMatch. FedSEAL: 0.9
    strong: StrongName = "fedmatch"
    guess_on: Literal["raw", "weak"] = "raw"  # the clean view; FedMatch: raw, FedSEAL: weak
    mean_over: Literal["kept", "batch"] = "kept"  # FedMatch's own loss: kept; FedSEAL: batch
    labelled_weight: Rate = 1.0  # of L_s; FedMatch: 10
    unlabelled_weight: Amount = 1.0  # of L_u; both papers
    # Steps of a visit: as many as FedAvg on the labelled rows, or one pass over the unlabelled ones
    steps_of: Literal["labelled", "unlabelled"] = "labelled"
    measure_labelled: bool = False  # accuracy on an agent's labels after each step (Fig. 6c)


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FixMatchConfig(ConsistencySettings, StreamSettings):
    """Section ``algorithm`` for FedAvg-FixMatch and FedProx-FixMatch."""

    name: Literal["fixmatch"] = "fixmatch"


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class UDAConfig(ConsistencySettings, StreamSettings):
    """Section ``algorithm`` for FedAvg-UDA and FedProx-UDA."""

    name: Literal["uda"] = "uda"
    # Of predictions, below 1 sharpens; UDA: 0.4, not given by FedMatch and FedSEAL. p^(1 / 0.05)
    # of an unsure row is a float32; p^50 of ten equal classes is 0 / 0.
    temperature: Annotated[float, Field(ge=0.05, allow_inf_nan=False)] = 1.0
    annealing: Literal["exponential", "none"] = "exponential"  # FedMatch; FedSEAL gives none

    def annealing_threshold(self, round_number: int, classes: int) -> float:
        """eta of TSA: rows whose class has a higher probability are left out. Xie et al.

        exp(5 (t / T - 1)) (1 - 1 / C) + 1 / C in round t of T; 1 without annealing.
        """
        if self.annealing == "none":
            return 1.0
        growth = math.exp(5 * (min(round_number / self.rounds, 1.0) - 1))
        return growth * (1 - 1 / classes) + 1 / classes


# The algorithms -----------------------------------------------------------------------------


class ConsistencyTraining(PseudoLabelTraining):
    """The training steps with FixMatch's terms of the loss."""

    cfg: ConsistencySettings

    def losses(
        self, F: nn.Module, labelled: LabelledRows, unlabelled: UnlabelledRows,
        y: Tensor | None, ctx: Context,
    ) -> Iterator[Tensor]:  # fmt: skip
        """L_s + L_u of each batch, in one forward pass; a batch without any term is no step."""
        order, weak, strong = ctx.rng("order"), ctx.rng("weak view"), ctx.rng("strong view")
        size, counts = self.cfg.batch_size, (len(labelled), len(unlabelled))
        confident_shares, accuracies = [], []

        weak_view = partial(self.cfg.weak_view, rng=weak)
        strong_view = partial(self.cfg.strong_view, rng=strong)
        clean_view = weak_view if self.cfg.guess_on == "weak" else _raw_view
        for _ in range(self.cfg.local_epochs):
            batches = list(local_training.joint_batches(*counts, size, self.cfg.steps_of, order))
            s_batches, u_batches = ([pair[kind] for pair in batches] for kind in (0, 1))
            views = zip(
                local_training.views_of(labelled.x, s_batches, weak_view, ctx.device),
                local_training.views_of(unlabelled.x, u_batches, clean_view, ctx.device),
                local_training.views_of(unlabelled.x, u_batches, strong_view, ctx.device),
                strict=True,
            )
            for (s, u), (x_l, x, x_u) in zip(batches, views, strict=True):
                p = view_probabilities(F, x, self.task.classes)  # (B, C)
                confident = p.amax(dim=1) >= self.cfg.threshold  # (B,)
                ctx.pseudo_labels(unlabelled.ids[u], p, confident.cpu())
                rows = torch.cat([x_l, x_u[confident]])
                if len(u):
                    confident_shares.append(float(confident.float().mean()))
                if not can_learn_from(F, len(rows)):
                    continue
                logits = F(rows)
                terms = [
                    self.cfg.labelled_weight
                    * self._labelled_loss(logits[: len(s)], labelled.y[s].to(ctx.device), ctx),
                    self.cfg.unlabelled_weight
                    * self._average(
                        self._unlabelled_losses(logits[len(s) :], p[confident]), len(u)
                    ),
                ]
                loss = torch.stack(terms).sum()
                if not loss.detach() <= 0:  # FedMatch: no step, else momentum alone would move F
                    yield loss  # here the step is taken
                if self.cfg.measure_labelled and len(labelled):
                    predicted = predict(F, labelled.x, ctx.device).argmax(dim=1).cpu()
                    accuracies.append(float((predicted == labelled.y).float().mean()))
        if accuracies:
            ctx.log_metric("train/labelled_accuracy", sum(accuracies) / len(accuracies))
        if confident_shares:
            ctx.log_metric("train/kept", sum(confident_shares) / len(confident_shares))

    def _average(self, losses: Tensor, batch: int) -> Tensor:
        """Mean of the losses of kept rows over these, or over the batch; 0 of none."""
        count = len(losses) if self.cfg.mean_over == "kept" else batch
        return losses.sum() / max(1, count)

    def _labelled_loss(self, logits: Tensor, y: Tensor, ctx: Context) -> Tensor:
        """Mean cross-entropy; 0 of no rows."""
        return cross_entropy(logits, y, reduction="sum") / max(1, len(y))

    def _unlabelled_losses(self, logits: Tensor, p: Tensor) -> Tensor:
        """Losses (B,) of strong views with these logits (B, C) whose clean views have p (B, C):
        FixMatch's, cross-entropy with the likeliest class."""
        return cross_entropy(logits, p.argmax(dim=1), reduction="none")


@final
class FixMatch(ConsistencyTraining):
    """FedAvg-FixMatch, FedProx-FixMatch."""

    Config = FixMatchConfig
    cfg: FixMatchConfig


@final
class UDA(ConsistencyTraining):
    """FedAvg-UDA, FedProx-UDA."""

    Config = UDAConfig
    cfg: UDAConfig

    def _unlabelled_losses(self, logits: Tensor, p: Tensor) -> Tensor:
        return divergence(sharpen(p, 1 / self.cfg.temperature), logits)

    def _labelled_loss(self, logits: Tensor, y: Tensor, ctx: Context) -> Tensor:
        below_eta = training_signal_annealing(
            logits.detach(), y, self.cfg.annealing_threshold(ctx.round, self.task.classes)
        )
        return super()._labelled_loss(logits[below_eta], y[below_eta], ctx)


# Terms --------------------------------------------------------------------------------------


def _raw_view(x: Tensor) -> Tensor:
    return x


def training_signal_annealing(logits: Tensor, y: Tensor, eta: float) -> Tensor:
    """Which rows (B,) have at most probability eta of their class: logits (B, C), y (B,).

    A row whose probability is not a number is kept, so that diverged training is visible.
    """
    return ~(logits.softmax(dim=1).gather(1, y[:, None])[:, 0] > eta)
