"""Mixing two rows and their labels. Zhang et al. 2018; Fan et al., Eq. 3."""

import torch
from torch import Tensor


def sample_mix(rows: int, alpha: float, rng: torch.Generator) -> Tensor:
    """Sample lambda ~ Beta(alpha, alpha), (rows,) in [0, 1]; for 0 < alpha < 1 most are near 0 or
    1."""
    # torch's Beta accepts no generator. float64: with a small alpha, float32 would often underflow.
    shapes = torch.full((2, rows), alpha, dtype=torch.float64)
    gammas = torch._standard_gamma(shapes, generator=rng)
    first, second = gammas.clamp_min(torch.finfo(torch.float64).tiny)
    share: Tensor = first / (first + second)
    return share.float()


def mix(lam: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return lam * first + (1 - lam) * second by row, of lam (B,) and tensors (B, ...). Eq. 3."""
    lam = lam.view(-1, *[1] * (first.dim() - 1))
    return lam * first + (1 - lam) * second


def local_mixup(
    x: Tensor, p: Tensor, alpha: float, rng: torch.Generator, *, towards_first: bool = False
) -> tuple[Tensor, Tensor]:
    """Mix every row of a batch, and its label, with another row of it (L-MixUp, Eq. 3).

    Args:
        x: rows (B, *shape).
        p: label distributions (B, C).
        alpha: of the Beta distribution, > 0.
        towards_first: the row itself has the larger share, lambda' = max(lambda, 1 - lambda):
            Berthelot et al. (MixMatch, ReMixMatch).
    """
    lam = sample_mix(len(x), alpha, rng)
    lam = (torch.maximum(lam, 1 - lam) if towards_first else lam).to(x.device)
    partner = torch.randperm(len(x), generator=rng).to(x.device)
    return mix(lam, x, x[partner]), mix(lam, p, p[partner])
