"""An attack on private steps alone, without training: many canaries that share no coordinate.

A private step releases a noisy sum of clipped gradients. Give canary i a gradient along coordinate
i of every protected network and nowhere else, and each coordinate is an experiment of its own: the
canary is in or out by a coin, and the attacker sees its coordinate of every release. The best test
there is, the likelihood ratio (Neyman and Pearson), then bounds epsilon from below (Clopper and
Pearson), and what was released must follow the distributions that the accounting assumes. The code
is that of training: ``privacy.PrivateTraining`` with the run's own plan. Specification: privacy.md,
section 4.3.

Noise hides a single row that counts twice, from an honest attacker and from a test. So a few steps
are taken without noise as well, and the largest contribution of a canary is measured.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from accounting.empirical import (
    inclusion_p,
    log_likelihood_ratio,
    noise_scale_p,
    repeats_p,
    sample_rate_p,
)
from accounting.two_worlds import two_world_from_scores
from privssl.privacy import PrivatePlan, PrivateTraining, secure_uniform
from privssl.row_gradients import Parameters

COORDINATES = 2000  # canaries of one repetition

_LARGEST_SEEN = 8.5  # epsilon; trials grow with its exponential, and this takes two minutes
_MOST_RELEASES = 20_000_000  # coordinates x steps; one or two minutes
_TOO_LONG = 2.0  # length of a canary's gradient in clip norms, so that clipping is tested
_MASKS = 500
_MOST_COMPARED = 1000  # steps whose noise is compared, each with each
_STEPS_WITHOUT_NOISE = 4


@dataclass(frozen=True)
class MechanismAttack:
    """What the releases of private steps gave away, and whether they were as promised.

    ``p_values`` are of tests of the noise, its independence between steps (where there are two),
    the mean of included canaries (sample rate and clip norm), and the batches that are drawn.
    ``sensitivity`` is the largest contribution of one canary to one step, in clip norms: 1 at most.
    """

    steps: int
    trials: int
    lower_bound: float
    ceiling: float
    sensitivity: float
    p_values: Mapping[str, float]

    @property
    def tried(self) -> str:
        """What was done, in the words of a report."""
        return f"{self.trials} canaries in each world, {self.steps} private steps"


class _Coordinates(nn.Module):
    """A network of nothing but a vector: what is released is the noisy sum itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


def attack_mechanism(
    plan: PrivatePlan, steps: int, epsilon: float, delta: float, confidence: float
) -> MechanismAttack:
    """Attack ``steps`` private steps of a plan that claim (epsilon, delta)-DP together."""
    wanted = 2 * trials_to_see(epsilon, confidence)
    affordable = max(1, _MOST_RELEASES // (COORDINATES * steps))
    repetitions = min(affordable, -(-wanted // COORDINATES))
    inside, outside = [], []
    for _ in range(repetitions):
        included = secure_uniform(COORDINATES) < 0.5
        releases = _releases(plan, steps, included)
        inside.append(releases[included])
        outside.append(releases[~included])
    members, others = np.concatenate(inside), np.concatenate(outside)
    sigma, rate = plan.noise_multiplier, plan.sample_rate
    worlds = two_world_from_scores(
        log_likelihood_ratio(members, noise_multiplier=sigma, sample_rate=rate),
        log_likelihood_ratio(others, noise_multiplier=sigma, sample_rate=rate),
        delta,
        confidence,
    )
    drawn = sum(int(plan.draw_batch(COORDINATES).sum()) for _ in range(_MASKS))
    residuals = others / sigma
    p_values = {
        "noise": noise_scale_p(residuals),
        "included rows": inclusion_p(members, noise_multiplier=sigma, sample_rate=rate),
        "batches": sample_rate_p(hits=drawn, trials=_MASKS * COORDINATES, rate=rate),
    }
    if steps > 1:
        p_values["repeated noise"] = repeats_p(residuals[:COORDINATES, :_MOST_COMPARED])
    everybody = np.ones(COORDINATES, dtype=np.bool_)
    silent = dataclasses.replace(plan, noise_multiplier=0.0)
    return MechanismAttack(
        steps=steps,
        trials=min(len(members), len(others)),
        lower_bound=worlds.lower_bound,
        ceiling=worlds.ceiling,
        sensitivity=float(np.abs(_releases(silent, _STEPS_WITHOUT_NOISE, everybody)).max()),
        p_values=p_values,
    )


def trials_to_see(epsilon: float, confidence: float) -> int:
    """Trials of each world with which a total leak would show an epsilon as large as is claimed.

    Without an error in n counted trials the Clopper-Pearson limit is ln(2 / (1 - confidence)) / n,
    and the lower bound minus its logarithm. Half of the trials choose the threshold; a tenth more,
    because coins do not divide the worlds evenly. At least 1,000.
    """
    counted = math.log(2 / (1 - confidence)) * math.exp(min(epsilon, _LARGEST_SEEN))
    return max(1000, math.ceil(2 * 1.1 * counted))


def _releases(plan: PrivatePlan, steps: int, included: NDArray[np.bool_]) -> NDArray[np.float64]:
    """What each step released about each canary, in clip norms: (canaries, steps).

    Canary i has a gradient along coordinate i only, the same in every protected network and too
    long, so that clipping all of them together must shorten it. Seen is their mean direction.
    """
    nets = {name: _Coordinates(len(included)) for name in plan.protect}
    once = dataclasses.replace(plan, steps=1, learning_rate=1.0, momentum=0.0, average_last=0.0)
    training = PrivateTraining(once, nets)
    at = torch.from_numpy(np.flatnonzero(included))
    each = 1 / math.sqrt(len(nets))
    length = _TOO_LONG * plan.clip_norm * each

    def fields_of(picked: Tensor, step: int) -> Mapping[str, Tensor]:
        direction = nn.functional.one_hot(at[picked], len(included)).float()
        return {"direction": length * direction}

    def row_loss(parameters: Parameters, fields: Mapping[str, Tensor]) -> Tensor:
        weight = torch.stack([net["weight"] for net in parameters.values()]).sum(dim=0)
        return weight @ fields["direction"]

    seen = np.empty((len(included), steps))
    for step in range(steps):
        with torch.no_grad():
            for net in nets.values():
                net.weight.zero_()
        training.run(len(at), fields_of, row_loss)
        # lr 1: each weight is now minus the noisy sum over the public divisor
        moved = [net.weight.detach().double().numpy() for net in nets.values()]
        seen[:, step] = -np.sum(moved, axis=0)
    return seen * (each * plan.expected_batch / plan.clip_norm)
