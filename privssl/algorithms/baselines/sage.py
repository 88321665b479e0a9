"""SAGE: pseudo-labels of the local and the global model, mixed by how far their confidences differ.

Liu, Shang, Zhang, Lu, Gong, Xue, Wang: "Mind the Gap: Confidence Discrepancy Can Guide Federated
Semi-Supervised Learning Across Pseudo-Mismatch" (CVPR 2025; arXiv:2503.13227). Agents hold labelled
and unlabelled rows of skewed classes. The local model is more confident than the global one, and
more often wrong. SAGE is a local loss in FixMatch's place; rounds are FedAvg's.

    paper, authors' code                                    here
    both models label a weak view (CPG)                     losses -> view_probabilities
    mixed target, exp(-kappa |c_local - c_global|) (CDSC)   soft_correction
    KL(target || strong view) where either is sure          losses
    FedAvg by rows                                          PseudoLabelTraining

Where labels may be: at mixed agents (the paper); elsewhere as in pseudo_labeling.py, whose rounds
these are.

Differs from the code: (1) Weak views are predicted in evaluation mode, by the local model too.
(2) SGD is fresh at every visit; the code has one for all agents. (3) A short last batch is kept.
Kappa is the code's, log(2) / 0.05: half of each label at a difference of 0.05.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Literal, final

import pydantic.dataclasses
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from privssl.algorithms.baselines.pseudo_labeling import PseudoLabelSettings, PseudoLabelTraining
from privssl.algorithms.local_ssl import Amount, Share, can_learn_from
from privssl.core.agents import LabelledRows, UnlabelledRows
from privssl.core.task import Context, Task
from privssl.data.augmentations import StrongName, StrongViews
from privssl.privacy.plan import Plan
from privssl.settings.schema import Positive, Problem, Rate, strict
from privssl.training import local_training
from privssl.training.losses import divergence
from privssl.training.pseudo_labels import view_probabilities


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class SAGEConfig(PseudoLabelSettings, StrongViews):
    """Section ``algorithm`` for SAGE. Numbers are the authors' code's (CIFAR-10) unless marked."""

    name: Literal["sage"] = "sage"
    rounds: Positive = 300
    agents_per_round: Positive | None = 8  # of 20
    batch_size: Positive = 128  # of labelled rows
    unlabelled_ratio: Positive = 2  # mu: unlabelled rows per labelled one in a batch
    learning_rate: Rate = 0.1
    weight_decay: Share = 1e-4
    threshold: Share = 0.95  # of either model's confidence
    half_at: Rate = 0.05  # difference of confidences at which both labels count one half
    unlabelled_weight: Amount = 1.0  # lambda_u
    labelled_too: bool = True  # labelled rows are also among the unlabelled ones
    correction: Literal["soft", "local", "global"] = "soft"  # local: FixMatch; ours, as controls
    weak: Literal["none", "crop", "weak", "mid", "fedtrinet"] = "crop"
    strong: StrongName = "fixmatch"

    def problems(self) -> Iterator[Problem]:
        """A number of the soft correction without it."""
        yield from super().problems()
        if self.correction != "soft" and self.half_at != 0.05:
            text = f"{self.half_at:g} has no effect: correction is {self.correction}. Leave it out"
            yield Problem("half_at", text)


@final
class SAGE(PseudoLabelTraining):
    """FedAvg of agents that learn from corrected pseudo-labels."""

    Config = SAGEConfig
    cfg: SAGEConfig

    def __init__(self, config: SAGEConfig, task: Task, plan: Plan | None = None) -> None:
        super().__init__(config, task, plan)
        self._G = task.new_classifier()  # the global model at a visit

    def losses(
        self, F: nn.Module, labelled: LabelledRows, unlabelled: UnlabelledRows,
        y: Tensor | None, ctx: Context,
    ) -> Iterator[Tensor]:  # fmt: skip
        """L_x + lambda_u L_u of each batch; F starts as the global model, which G remains."""
        cfg, G = self.cfg, local_training.load_weights(self._G, F.state_dict(), ctx.device)
        order, weak, strong = ctx.rng("order"), ctx.rng("weak view"), ctx.rng("strong view")
        sources = (
            [unlabelled.x, labelled.x] if cfg.labelled_too and len(unlabelled) else [unlabelled.x]
        )
        x_u, gaps, confident_shares = torch.cat(sources), list[Tensor](), list[Tensor]()
        weak_view = partial(cfg.weak_view, rng=weak)
        strong_view = partial(cfg.strong_view, rng=strong)
        for _ in range(cfg.local_epochs):
            s_batches, u_batches = self._draw_batches(len(labelled), len(x_u), order)
            views = zip(
                local_training.views_of(labelled.x, s_batches, weak_view, ctx.device),
                local_training.views_of(x_u, u_batches, weak_view, ctx.device),
                local_training.views_of(x_u, u_batches, strong_view, ctx.device),
                strict=True,
            )
            for s, u, (x_l, x_weak, x_strong) in zip(s_batches, u_batches, views, strict=True):
                p_local, p_global = (
                    view_probabilities(network, x_weak, self.task.classes) for network in (F, G)
                )
                target, confident = soft_correction(
                    p_local, p_global, cfg.threshold, cfg.half_at, cfg.correction
                )
                mask = u < len(unlabelled)
                ctx.pseudo_labels(
                    unlabelled.ids[u[mask]], target.cpu()[mask], confident.cpu()[mask]
                )
                gaps.append(
                    (p_local.amax(dim=1) - p_global.amax(dim=1)).abs().sum() / max(1, len(u))
                )
                confident_shares.append(confident.float().sum() / max(1, len(u)))
                rows = torch.cat([x_l, x_strong[confident]])
                if not can_learn_from(F, len(rows)):
                    continue
                logits = F(rows)
                L_x = cross_entropy(
                    logits[: len(s)], labelled.y[s].to(ctx.device), reduction="sum"
                ) / max(1, len(s))
                L_u = divergence(target[confident], logits[len(s) :]).sum() / max(1, len(u))
                yield L_x + cfg.unlabelled_weight * L_u
        if gaps:
            ctx.log_metric("train/gap", local_training.mean_of(gaps))
            ctx.log_metric("train/kept", local_training.mean_of(confident_shares))

    def _draw_batches(
        self, labelled: int, unlabelled: int, rng: torch.Generator
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Row numbers of an epoch's steps: labelled (B,) and unlabelled (mu B,), as many steps as
        batches of B unlabelled rows; labelled rows are reused. Without one kind its batches are
        empty."""
        size = self.cfg.batch_size
        steps = -(-(unlabelled or labelled) // size)
        empty = [torch.empty(0, dtype=torch.int64)] * steps
        s_rows = local_training.draw_rows(labelled, steps * size, rng) if labelled else None
        u_size = size * self.cfg.unlabelled_ratio
        u_rows = local_training.draw_rows(unlabelled, steps * u_size, rng) if unlabelled else None
        return (
            empty if s_rows is None else list(torch.split(s_rows, size)),
            empty if u_rows is None else list(torch.split(u_rows, u_size)),
        )


def soft_correction(
    p_local: Tensor, p_global: Tensor, threshold: float, half_gap: float,
    correction: Literal["soft", "local", "global"] = "soft",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Targets (B, C) and which rows are used (B,), from both models' probabilities (B, C).

    Where the local model is confident: l onehot(p_local) + (1 - l) onehot(p_global),
    l = exp(-kappa gap) of their largest probabilities; elsewhere onehot(p_global). A row is used
    where either is confident.
    """
    (c_local, y_local), (c_global, y_global) = p_local.max(dim=1), p_global.max(dim=1)
    classes, confident = p_local.shape[1], c_local >= threshold
    l = torch.exp(-math.log(2) / half_gap * (c_local - c_global).abs())[:, None]  # noqa: E741
    hot_local, hot_global = one_hot(y_local, classes).float(), one_hot(y_global, classes).float()
    if correction == "local":
        return hot_local, confident
    if correction == "global":
        return hot_global, c_global >= threshold
    target = torch.where(confident[:, None], l * hot_local + (1 - l) * hot_global, hot_global)
    return target, confident | (c_global >= threshold)
