"""(FL)^2's settings, thresholds, perturbed weights and weights of agents: Lee et al., Eq. 7 to 15.

The rounds are in ``algorithms/fl2/algorithm.py``.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import pydantic.dataclasses
import torch
from torch import Tensor

from privssl.algorithms.baselines.supervised import LocalTrainingSettings
from privssl.algorithms.local_ssl import Amount, Share
from privssl.core.messages import Reply, StateDict
from privssl.data.augmentations import view
from privssl.settings.schema import Positive, Problem, Rate, strict

ASAM = 0.01  # added to |w|; Kwon et al. 2021


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FL2Config(LocalTrainingSettings):
    """Section ``algorithm`` for (FL)^2. Numbers are the paper's (CIFAR-10) unless marked."""

    name: Literal["fl2"] = "fl2"
    rounds: Positive = 800
    query_per_round: Positive | None = 10  # of 100
    server_batch_size: Positive = 10  # of labelled rows
    learning_rate: Rate = 0.03  # in round 1
    schedule: Literal["factor", "cosine"] = "cosine"  # of the rate: half a cosine over the rounds
    nesterov: bool = True  # momentum of agents and server
    weight_decay: Share = 5e-4
    global_momentum: Share = 0.5  # beta_g
    weak: Literal["none", "crop", "weak", "mid", "fedtrinet"] = "crop"
    strong: Literal["none", "weak", "mid", "strong", "fixmatch", "fedmatch", "fedseal"] = "fixmatch"
    adaptive: bool = True  # false: the threshold of all classes and agents is tau_f (Table 2)
    sure_above: Share = 0.95  # tau_f
    learned_weight: Amount = 1.0  # w_a
    consistency_weight: Amount = 1.0  # w_cs; 0: no perturbation (Table 2)
    radius: Rate = 0.1  # rho; section 5.1. Appendix C: 0.5; CIFAR-100: 1
    perturbation: Literal["asam", "sam"] = "asam"  # of weights by their size, or of all alike
    moving_target: bool = True  # false: Q* of Eq. 13 is a constant
    aggregation: Literal["status", "equal"] = "status"  # Eq. 15, or the plain mean (Table 2)

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other, or have no effect."""
        if self.nesterov and not self.momentum:
            yield Problem("nesterov", "true, but momentum is 0. Give momentum, or set false")
        if self.schedule == "cosine" and self.learning_rate_decay != 1:
            text = f"{self.learning_rate_decay:g} has no effect with schedule cosine. Leave it out"
            yield Problem("learning_rate_decay", text)

    def strong_view(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """A strong view of rows (B, *shape) in [-1, 1]; RandAugment works on a weak one."""
        return view(self.strong, x, rng, flip=self.flip, under=self.weak)

    def rate(self, round_number: int) -> float:
        """Learning rate in a round, counted from 1."""
        if self.schedule == "factor":
            return super().rate(round_number)
        return self.learning_rate * (1 + math.cos(math.pi * (round_number - 1) / self.rounds)) / 2


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
    """1 - tau, the weight of Eq. 15; above 0, so that agents that are sure of all rows count."""
    return max(1 - float(reply.payload.tau), 1e-6)
