"""Tests of the mechanism alone, without training, against what the accountant counts.

A canary whose clipped gradient is C e_1, among rows whose gradient is 0, passes private steps many
times; other trials omit it. Likelihood ratios of the releases give a lower bound on epsilon
(arXiv:2302.07956) by :func:`accounting.two_sample_audit.two_sample_bound_from_scores`. Tests check
noise scale, sample rate and repeated noise. The bound detects half the claimed noise from 100,000
trials each; the tests detect 2% from a million draws.

A p-value is the probability of data at least this extreme under a correct mechanism. It is exact or
too large unless stated otherwise. Divide the level by the number of tests.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betainc, betaincc, chdtr, chdtrc, gammainc, gammaincc, ndtr
from scipy.stats import binomtest

from accounting.errors import PlanError
from accounting.events import check_count, check_noise_multiplier, check_sample_rate
from accounting.one_run_audit import check_part

Floats = NDArray[np.float64]


def log_likelihood_ratio(
    releases: ArrayLike, *, noise_multiplier: float, sample_rate: float
) -> Floats:
    """Return the log-likelihood ratio of one row in T noisy sums, the optimal score.

    Sum over t of ln(1 - q + q e^((2 y_t - 1) / (2 sigma^2))), by Neyman and Pearson.

    Args:
        releases: (N, T): first coordinate of the noisy sum, in clip norms, of N runs with T steps.
        noise_multiplier: sigma, 0.2 to 1e6. sample_rate: q, in (0, 1].

    Returns:
        (N,), higher for runs with the canary.
    """
    check_noise_multiplier(noise_multiplier)
    check_sample_rate(sample_rate)
    exponents = (2 * _check_table("releases", releases) - 1) / (2 * noise_multiplier**2)  # (N, T)
    if sample_rate < 1:
        # e^exponent may overflow; above 500 the other terms vanish
        small = np.minimum(exponents, 500.0)
        exponents = np.log1p(sample_rate * np.expm1(small)) + (exponents - small)
    return np.asarray(exponents.sum(axis=1), dtype=np.float64)


def noise_scale_p(residuals: ArrayLike) -> float:
    """Return the p-value that these are standard normal draws: twice the smaller of two.

    The largest distance D of their distribution function from Phi detects a change of shape; its
    p-value is at most 2 e^(-2 N D^2) (Massart). The sum of squares, chi-square with N degrees of
    freedom, detects the scale: 0.5% of it at a million draws.

    Args:
        residuals: N in any shape, finite: (noisy sum - clipped sum) / (sigma C); else PlanError.
    """
    draws = np.sort(_check_finite("residuals", residuals))  # (N,)
    squares = float(np.square(draws).sum())
    by_scale = 2 * min(float(chdtr(draws.size, squares)), float(chdtrc(draws.size, squares)))
    # the empirical distribution function jumps at each draw: compare above and below the jump
    above = np.arange(1, draws.size + 1) / draws.size - ndtr(draws)
    distance = max(float(above.max()), 1 / draws.size - float(above.min()))
    by_shape = 2 * math.exp(-2 * draws.size * distance**2)
    return min(1.0, 2 * by_scale, 2 * by_shape)


def inclusion_p(releases: ArrayLike, *, noise_multiplier: float, sample_rate: float) -> float:
    """Return the two-sided p-value that a canary is in a share q of its steps, by the mean release.

    A release has mean q and variance q (1 - q) + sigma^2. Exact at q = 1, otherwise normal by the
    central limit theorem, good from some hundred releases of runs whose data held the canary.
    """
    check_noise_multiplier(noise_multiplier)
    check_sample_rate(sample_rate)
    sums = _check_finite("releases", releases)
    variance = (sample_rate * (1 - sample_rate) + noise_multiplier**2) / sums.size
    return 2 * float(ndtr(-abs(float(sums.mean()) - sample_rate) / math.sqrt(variance)))


def sample_rate_p(*, hits: int, trials: int, rate: float) -> float:
    """Return the exact two-sided binomial p-value of hits among 1 to 10,000,000 trials at a rate in
    (0, 1)."""
    check_count("trials", trials)
    check_part("hits", hits, trials, "trials")
    check_sample_rate(rate)
    return float(binomtest(hits, trials, rate).pvalue)


def batch_size_p(sizes: ArrayLike, *, rows: int, rate: float) -> float:
    """Return the two-sided p-value that batch sizes (M,) vary as under Poisson sampling.

    Fixed batch sizes vary less, rows that are drawn in blocks more. The mean squared distance from
    ``rows * rate`` is compared with a gamma law of the same, exactly known, mean and variance.
    Close to exact from ``rows * rate * (1 - rate)`` of about 5 on. rate: in (0, 1).
    """
    check_count("rows", rows)
    check_sample_rate(rate)
    observed = _check_finite("sizes", sizes)
    if rate == 1:
        raise PlanError("with a rate of 1 all batches have one size: there is nothing to test")
    expected = rows * rate * (1 - rate)
    mean = float(np.square(observed - rows * rate).mean()) / expected
    # of that mean, which is 1
    variance = (2 + (1 - 6 * rate * (1 - rate)) / expected) / observed.size
    below = float(gammainc(1 / variance, mean / variance))
    above = float(gammaincc(1 / variance, mean / variance))
    return min(1.0, 2 * below, 2 * above)


def repeats_p(residuals: ArrayLike) -> float:
    """Return the p-value that noise is fresh in every step, at any scale: three times the least of
    three.

    If all N T draws are independent normals of one variance, then exactly:

    - the squared cosine of any two steps is Beta(1/2, (N - 1) / 2); the largest, times the number
      of pairs, finds two steps that share noise, also in part of the coordinates;
    - the squared sums over all steps, divided by T times the sum of squares, are
      Beta(N / 2, N (T - 1) / 2): a small noise common to all steps;
    - the same with steps in pairs: slightly correlated neighbours.

    Args:
        residuals: (N, T), N, T >= 2, finite: N coordinates or runs of T steps; else PlanError.

    Returns:
        in [0, 1]; 0 also if a step has no noise. Takes time O(N T^2).
    """
    draws = _check_table("residuals", residuals)  # (N, T)
    count, steps = draws.shape
    if count < 2 or steps < 2:
        raise PlanError(f"residuals are {count} x {steps}; repeats show from 2 x 2 on")
    lengths = np.sqrt(np.square(draws).sum(axis=0))  # (T,)
    if not lengths.all():
        return 0.0
    gram = (draws / lengths).T @ (draws / lengths)  # (T, T)
    closest = float(np.abs(gram[np.triu_indices(steps, 1)]).max())
    sine_squared = max(0.0, 1 - closest**2)
    by_pair = math.comb(steps, 2) * float(betainc((count - 1) / 2, 0.5, sine_squared))
    return min(1.0, 3 * by_pair, 3 * _common_part_p(draws, steps), 3 * _common_part_p(draws, 2))


def _common_part_p(draws: Floats, width: int) -> float:
    """Return the p-value that sums over ``width`` neighbouring steps are as long as by chance."""
    count, steps = draws.shape
    groups = draws[:, : steps // width * width].reshape(count, -1, width)  # (N, groups, width)
    share = float(np.square(groups.sum(axis=2)).sum() / (width * np.square(groups).sum()))
    a = groups.shape[0] * groups.shape[1] / 2
    b = a * (width - 1)
    share = min(1.0, share)
    return 2 * min(float(betainc(a, b, share)), float(betaincc(a, b, share)))


def _check_finite(name: str, values: ArrayLike) -> Floats:
    """Finite numbers of any shape, at least one, as (N,)."""
    numbers = np.asarray(values, dtype=np.float64).ravel()
    if numbers.size == 0 or not np.isfinite(numbers).all():
        raise PlanError(f"{name} must be finite numbers, at least one")
    return numbers


def _check_table(name: str, values: ArrayLike) -> Floats:
    """Finite numbers (N, T), at least one."""
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2:
        raise PlanError(f"{name} must be a table of runs (or coordinates) by steps")
    return _check_finite(name, table).reshape(table.shape)
