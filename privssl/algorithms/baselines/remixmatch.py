"""ReMixMatch: MixMatch with aligned class frequencies and strong views anchored by a weak one.

Berthelot, Carlini, Cubuk, Kurakin, Sohn, Zhang, Raffel (ICLR 2020). A centralised method that
SemiFL (Diao et al., Table 1) compares with. Rounds: centralised.py.

    paper                                                       here
    3.1 distribution alignment: q p(y) / p~(y), normalised      align
        p~(y): mean prediction of the last 128 batches          _guess
    3.2 augmentation anchoring: K strong views, one weak guess  losses
    Alg. 1 l. 6   sharpen, T                                    sharpen
    Alg. 1 l. 9-17 mixing with lambda' = max(lambda, 1-lambda)  training/mixup.py
    Eq. 3, 4      cross-entropies of X', U' and the first view  losses
    3.3, Eq. 4    which way the first view is turned            _compute_rotation_loss

Weights, T, alpha and K are the paper's. Differs from it, beside what centralised.py says: (1) The
rotation loss is off by default. Its head of four classes stays with the agent, and learns by SGD
without momentum and bias. (2) RandAugment in place of CTAugment. (3) Guesses are made in evaluation
mode.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal, final

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import one_hot

from privssl.algorithms.baselines.centralised import CentralisedSettings, CentralisedTraining
from privssl.algorithms.local_ssl import Amount, can_learn_from
from privssl.core.agents import LabelledRows, UnlabelledRows
from privssl.core.task import Context
from privssl.data.augmentations import StrongName, StrongViews
from privssl.errors import ConfigError
from privssl.settings.schema import Positive, Rate, strict
from privssl.training import local_training
from privssl.training.losses import soft_cross_entropy
from privssl.training.mixup import local_mixup
from privssl.training.pseudo_labels import sharpen, view_probabilities
from privssl.training.rotation import TURNS, features_of, last_linear, rotate, rotation_loss

KEPT = 128  # batches whose predictions are averaged; paper


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class ReMixMatchConfig(CentralisedSettings, StrongViews):
    """Section ``algorithm`` for ReMixMatch."""

    name: Literal["remixmatch"] = "remixmatch"
    strong: StrongName = "fixmatch"
    strong_views: Positive = 8  # K; paper
    sharpness: Annotated[float, Field(gt=1)] = 2.0  # 1 / T, T = 0.5; paper
    mix_alpha: Rate = 0.75  # of lambda ~ Beta(alpha, alpha); paper
    mixed_weight: Amount = 1.5  # lambda_U; paper
    anchor_weight: Amount = 0.5  # lambda_U1, of the first strong view, not mixed; paper
    rotation_weight: Amount = 0.0  # lambda_r, of naming how that view is turned; paper: 0.5


@final
class ReMixMatch(CentralisedTraining):
    """The losses of Algorithm 1."""

    Config = ReMixMatchConfig
    cfg: ReMixMatchConfig

    def __init__(self, config: Any, *task_args: Any) -> None:
        super().__init__(config, *task_args)
        shape = self.task.shape
        if config.rotation_weight and (len(shape) != 3 or shape[1] != shape[2]):
            raise ConfigError("algorithm.rotation_weight needs square images. Leave it out")
        if config.rotation_weight and last_linear(self._F) is None:
            raise ConfigError("algorithm.rotation_weight needs a linear last layer. Leave it out")

    def losses(
        self, F: nn.Module, teacher: nn.Module, labelled: LabelledRows, unlabelled: UnlabelledRows,
        memory: dict[str, Tensor], ctx: Context,
    ) -> Iterator[Tensor]:  # fmt: skip
        """Cross-entropies of mixed labelled rows, mixed others, and the first strong view."""
        cfg, classes = self.cfg, self.task.classes
        order_rng, mix_rng, rotation_rng = (
            ctx.rng(name) for name in ("order", "mixup", "rotation")
        )
        rate = cfg.rate(ctx.round)
        weak = partial(cfg.weak_view, rng=ctx.rng("weak view"))
        strong = partial(cfg.strong_view, rng=ctx.rng("strong view"))
        row_counts, K = (len(labelled), len(unlabelled)), cfg.strong_views
        ramp = min(1.0, ctx.round / cfg.ramp_up) if cfg.ramp_up else 1.0
        for _ in range(cfg.local_epochs):
            pairs = list(
                local_training.joint_batches(*row_counts, cfg.batch_size, cfg.steps_of, order_rng)
            )
            s_batches, u_batches = ([pair[kind] for pair in pairs] for kind in (0, 1))
            steps = zip(
                pairs,
                local_training.views_of(labelled.x, s_batches, strong, ctx.device),
                local_training.views_of(unlabelled.x, u_batches, weak, ctx.device),
                local_training.views_of(
                    unlabelled.x, [rows.repeat(K) for rows in u_batches], strong, ctx.device
                ),
                strict=True,
            )
            for (s, u), x, x_weak, x_strong in steps:
                if not can_learn_from(F, len(s) + len(u)):
                    continue
                p = one_hot(labelled.y[s], classes).float().to(ctx.device)
                q = self._guess(F, x_weak, labelled, memory)  # l. 3-6
                ctx.pseudo_labels(unlabelled.ids[u], q)
                rows = torch.cat([x, x_strong, x_weak])  # X and U of l. 9-12
                probs = torch.cat([p, q.repeat(K + 1, 1)])
                mixed, targets = local_mixup(
                    rows, probs, cfg.mix_alpha, mix_rng, towards_first=True
                )
                logits = F(torch.cat([mixed, x_strong[: len(u)]]))
                mixed_losses = soft_cross_entropy(logits[: len(rows)], targets)
                anchor_losses = soft_cross_entropy(logits[len(rows) :], q)
                loss = (
                    _average(mixed_losses[: len(s)])
                    + ramp * cfg.mixed_weight * _average(mixed_losses[len(s) :])
                    + ramp * cfg.anchor_weight * _average(anchor_losses)
                )
                if cfg.rotation_weight and len(u):
                    rotation = self._compute_rotation_loss(
                        F, x_strong[: len(u)], memory, rotation_rng, rate
                    )
                    loss = loss + cfg.rotation_weight * rotation
                yield loss

    def _compute_rotation_loss(
        self, F: nn.Module, x: Tensor, memory: dict[str, Tensor], rng: torch.Generator, rate: float
    ) -> Tensor:
        """The rotation loss of views (B, *shape); its head (4, D) takes its step at once."""
        turns = torch.randint(TURNS, (len(x),), generator=rng).to(x.device)
        with features_of(F) as features:
            F(rotate(x, turns))
        zero = torch.zeros(TURNS, features[0].shape[1])
        head = memory.get("rotation head", zero).to(x.device).requires_grad_()
        loss = rotation_loss(head, features[0], turns)
        [gradient] = torch.autograd.grad(loss, head, retain_graph=True)
        memory["rotation head"] = (head - rate * gradient).detach().cpu()
        return loss

    @torch.no_grad()
    def _guess(
        self, F: nn.Module, x: Tensor, labelled: LabelledRows, memory: dict[str, Tensor]
    ) -> Tensor:
        """Aligned, sharpened predictions (B, C) of weak views; remembers their mean."""
        if not len(x):
            return torch.empty(0, self.task.classes, device=x.device)
        q = view_probabilities(F, x, self.task.classes)
        batch_mean = q.mean(dim=0, keepdim=True).cpu()
        memory["means"] = torch.cat([memory.get("means", batch_mean[:0]), batch_mean])[-KEPT:]
        counts = torch.bincount(labelled.y, minlength=q.shape[1]).float()
        counts = counts if len(labelled) else torch.ones_like(counts)
        p, p_tilde = counts / counts.sum(), memory["means"].mean(dim=0)
        return sharpen(align(q, p.to(q.device), p_tilde.to(q.device)), self.cfg.sharpness)


def align(q: Tensor, p: Tensor, p_tilde: Tensor) -> Tensor:
    """q p / p_tilde, normalised to sum to 1: section 3.1; with the authors' code's 1e-6.

    Args:
        q: predictions (B, C).
        p: frequency of each class among labelled rows (C,).
        p_tilde: mean prediction (C,).
    """
    aligned = q * (p + 1e-6) / (p_tilde + 1e-6)
    return aligned / aligned.sum(dim=1, keepdim=True)


def _average(losses: Tensor) -> Tensor:
    """0 of none."""
    return losses.sum() / max(1, len(losses))
