"""Discrete Laplace noise: integers x with P(x) ~ exp(-epsilon |x|), sampled exactly.

Added to a count that one record changes by 1 it makes an epsilon-DP release, delta 0 (the two-sided
geometric mechanism, arXiv:0811.2841). Floating-point noise does not: the gaps between floats reveal
the summands (Mironov 2012). The sampler of Canonne, Kamath and Steinke (arXiv:2004.00010) uses
integer arithmetic only. Epsilon is rounded DOWN to a multiple of 2^-20, so that the noise is never
too small. The time of rejection sampling depends on the noise; no guarantee covers side channels.
"""

import math
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accounting.errors import PlanError
from accounting.events import MAX_PURE_EPSILON, check_real
from accounting.secure_random import random_uint64

DENOMINATOR = 2**20  # of epsilon; 2^-20 is the smallest epsilon

_WORDS = 2**64  # number of values of a 64-bit word


def exact_epsilon(epsilon: float) -> Fraction:
    """Return the epsilon of the noise: the largest multiple of 2^-20 that is at most ``epsilon``.

    Raises PlanError unless epsilon is a number from 2^-20 to 1000.

    >>> exact_epsilon(0.5), exact_epsilon(0.1) <= Fraction(0.1)
    (Fraction(1, 2), True)
    """
    check_real("epsilon of discrete Laplace noise", epsilon)
    if not 1 / DENOMINATOR <= epsilon <= MAX_PURE_EPSILON:
        raise PlanError(
            f"epsilon of discrete Laplace noise is {epsilon:g}; it must be from 1e-6 to "
            f"{MAX_PURE_EPSILON:g} (below, noise is in the millions and no count survives)"
        )
    return Fraction(math.floor(Fraction(epsilon) * DENOMINATOR), DENOMINATOR)


def discrete_laplace(epsilon: float, count: int) -> NDArray[np.int64]:
    """Sample ``count`` >= 0 independent integers (count,) with P(x) ~ exp(-epsilon |x|).

    Mean 0, variance 2 e^-epsilon / (1 - e^-epsilon)^2; epsilon as in :func:`exact_epsilon`.
    Algorithm 2 of arXiv:2004.00010 with s / t = epsilon, vectorised over candidates.

    Raises:
        PlanError: epsilon is out of range, or count is not an integer >= 0.
    """
    exact = exact_epsilon(epsilon)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise PlanError(f"count is {count!r:.40}; it is a number of draws, 0 or more")
    samples = [np.zeros(0, dtype=np.int64)]
    missing = count
    while missing:
        accepted = _draw_candidates(exact.numerator, exact.denominator, 2 * missing + 16)[:missing]
        samples.append(accepted)
        missing -= len(accepted)
    return np.concatenate(samples)


def log_pmf(epsilon: float, values: ArrayLike) -> NDArray[np.float64]:
    """Return the log-probability of each integer: ln tanh(epsilon / 2) - epsilon |x|.

    Raises PlanError where epsilon is out of range, or a value is not an integer.

    >>> float(np.exp(log_pmf(1.0, np.arange(-50, 51))).sum().round(12))
    1.0
    """
    rate = float(exact_epsilon(epsilon))
    x = np.asarray(values, dtype=np.float64)
    if not np.array_equal(x, np.floor(x)):  # NaN is unequal to itself
        raise PlanError("values of discrete Laplace noise are whole numbers")
    at_zero = math.log(-math.expm1(-rate)) - math.log1p(math.exp(-rate))
    return np.asarray(at_zero - rate * np.abs(x), dtype=np.float64)


def _draw_candidates(s: int, t: int, count: int) -> NDArray[np.int64]:
    """Return the accepted ones of ``count`` candidates of Algorithm 2, in sampling order.

    Each is an integer X = U + t V ~ exp(-X / t), then divided by s and given a sign.
    """
    u = _draw_below(t, count)
    u = u[_draw_bernoulli_exp(u, t)].astype(np.int64)  # l. 4-8: U in 0..t-1 with P ~ e^(-U/t)
    v = np.zeros(len(u), dtype=np.int64)
    active = np.arange(len(u))
    while active.size:  # l. 9-14: V is geometric, success probability of each step e^-1
        active = active[_draw_bernoulli_exp(np.ones(active.size, dtype=np.uint64), 1)]
        v[active] += 1
    y = (u + t * v) // s
    negative = _draw_below(2, len(y)) == 1
    accepted = ~(negative & (y == 0))  # l. 18: otherwise 0 would be twice as likely
    return np.asarray(np.where(negative, -y, y)[accepted], dtype=np.int64)


def _draw_bernoulli_exp(numerators: NDArray[np.uint64], denominator: int) -> NDArray[np.bool_]:
    """Sample booleans (N,) that are true with probability exp(-numerators / denominator).

    Quotients lie in [0, 1]. Algorithm 1 of arXiv:2004.00010: sample Bernoulli(gamma / k) for k = 1,
    2, ... until the first failure; the result is true if that k is odd.
    """
    result = np.zeros(len(numerators), dtype=np.bool_)
    active = np.arange(len(numerators))
    k = 1
    while active.size:
        passed = _draw_below(denominator * k, active.size) < numerators[active]
        result[active[~passed]] = k % 2 == 1
        active = active[passed]
        k += 1
    return result


def _draw_below(bound: int, count: int) -> NDArray[np.uint64]:
    """Sample ``count`` uniform integers in 0..bound - 1; words below 2^64 mod bound are redrawn."""
    surplus = np.uint64(_WORDS % bound)
    words = random_uint64(count).copy()
    while (rejected := words < surplus).any():
        words[rejected] = random_uint64(int(np.count_nonzero(rejected)))
    return words % np.uint64(bound)
