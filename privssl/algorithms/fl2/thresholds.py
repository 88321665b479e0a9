"""(FL)^2's thresholds, perturbed weights and weights of agents: Lee et al., Eq. 7 to 15.

The rounds are in ``algorithms/fl2/algorithm.py``.
"""

from typing import Any

import torch
from torch import Tensor

from privssl.core.messages import Reply, StateDict

ASAM = 0.01  # added to |w|; Kwon et al. 2021


def adaptive_thresholds(q: Tensor) -> tuple[float, Tensor]:
    """tau of an agent, Eq. 7, and of each class (C,), Eq. 8 and 9, of predictions q (N, C)."""
    tau, p = q.amax(dim=1).mean(), q.mean(dim=0)
    return float(tau), p / p.max() * tau


def perturbation(
    weights: StateDict, gradients: tuple[Tensor, ...], radius: float, adaptive: bool
) -> dict[str, Tensor]:
    """eps* of Eq. 12: radius T^2 g / |T g|, with T = 1 (SAM), or |w| + 0.01 (ASAM)."""
    T = [w.detach().abs() + ASAM if adaptive else torch.ones_like(w) for w in weights.values()]
    scaled = [t * g.detach() for t, g in zip(T, gradients, strict=True)]
    norm = torch.stack([s.square().sum() for s in scaled]).sum().sqrt().clamp(min=1e-12)
    return {name: radius * t * s / norm for name, t, s in zip(weights, T, scaled, strict=True)}


def learning_status(reply: Reply[Any]) -> float:
    """1 - tau, the weight of Eq. 15; above 0, so that agents confident in all rows count."""
    return max(1 - float(reply.payload.tau), 1e-6)
