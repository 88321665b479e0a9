"""Discrete Laplace noise: whole numbers x with P(x) ~ exp(-epsilon |x|), drawn exactly.

Added to a count that one record changes by 1 it makes an epsilon-DP release, delta 0 (Ghosh,
Roughgarden, Sundararajan 2009, arXiv:0811.2841: the two-sided geometric mechanism). Noise in
floating point has no such guarantee: the gaps between its values tell what was added to what
(Mironov 2012). Here nothing is rounded: the sampler is that of Canonne, Kamath and Steinke 2020
(arXiv:2004.00010), which compares whole numbers with whole numbers and knows no logarithm.

    coins     words of 64 bits, see ``secure_random.py``; never seeded, stored or resumed
    epsilon   rounded DOWN to a multiple of 2^-20 (0.5, 1, 2, 4, 8 are such), so that the noise is
              never less than what was asked for; :func:`exact_epsilon` is what is drawn with

How long a draw takes depends on the noise that is drawn, as with all rejection samplers; whoever
can time it learns something of the noise. Side channels are no part of any claim made here.
"""

import math
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accounting.errors import PlanError
from accounting.events import MAX_PURE_EPSILON, check_real
from accounting.secure_random import random_uint64

DENOMINATOR = 2**20  # of epsilon; so 2^-20 is the smallest that there is

_WORDS = 2**64  # values of one word of coins


def exact_epsilon(epsilon: float) -> Fraction:
    """The epsilon that noise is drawn with: the largest multiple of 2^-20 that is not larger.

    Raises:
        PlanError: not a number from 2^-20 to 1000.

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
    """``count`` independent whole numbers from the law P(x) ~ exp(-epsilon |x|).

    Algorithm 2 of arXiv:2004.00010 with s / t = epsilon, many candidates at a time.

    Args:
        epsilon: from 2^-20 to 1000, no unit; rounded down, see :func:`exact_epsilon`.
        count: how many, >= 0.

    Returns:
        (count,), mean 0, variance 2 e^-epsilon / (1 - e^-epsilon)^2.

    Raises:
        PlanError: epsilon is out of range, or count is negative or no whole number.
    """
    exact = exact_epsilon(epsilon)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise PlanError(f"count is {count!r:.40}; it is a number of draws, 0 or more")
    found = [np.zeros(0, dtype=np.int64)]
    missing = count
    while missing:
        kept = _candidates(exact.numerator, exact.denominator, 2 * missing + 16)[:missing]
        found.append(kept)
        missing -= len(kept)
    return np.concatenate(found)


def log_pmf(epsilon: float, values: ArrayLike) -> NDArray[np.float64]:
    """Natural logarithm of the chance of each value: ln tanh(epsilon / 2) - epsilon |x|.

    Args:
        epsilon: as in :func:`discrete_laplace`, and rounded down as there.
        values: whole numbers of any shape, as integers or floats.

    Returns:
        as ``values`` in shape.

    Raises:
        PlanError: epsilon is out of range, or a value is no whole number.

    >>> float(np.exp(log_pmf(1.0, np.arange(-50, 51))).sum().round(12))
    1.0
    """
    rate = float(exact_epsilon(epsilon))
    x = np.asarray(values, dtype=np.float64)
    if not np.array_equal(x, np.floor(x)):  # NaN is unequal to itself
        raise PlanError("values of discrete Laplace noise are whole numbers")
    at_zero = math.log(-math.expm1(-rate)) - math.log1p(math.exp(-rate))
    return np.asarray(at_zero - rate * np.abs(x), dtype=np.float64)


def _candidates(s: int, t: int, count: int) -> NDArray[np.int64]:
    """What is left of ``count`` candidates of Algorithm 2, in the order in which they were drawn.

    Each is X = U + t V ~ exp(-X / t), a whole number, then divided by s and given a sign.
    """
    u = _below(t, count)
    u = u[_bernoulli_exp(u, t)].astype(np.int64)  # l. 4-8: U in 0..t-1 with chance ~ e^(-U/t)
    v = np.zeros(len(u), dtype=np.int64)
    going = np.arange(len(u))
    while going.size:  # l. 9-14: V is geometric, each further one with chance e^-1
        going = going[_bernoulli_exp(np.ones(going.size, dtype=np.uint64), 1)]
        v[going] += 1
    y = (u + t * v) // s
    negative = _below(2, len(y)) == 1
    once = ~(negative & (y == 0))  # l. 18: or 0 would be drawn twice as often
    return np.asarray(np.where(negative, -y, y)[once], dtype=np.int64)


def _bernoulli_exp(numerators: NDArray[np.uint64], denominator: int) -> NDArray[np.bool_]:
    """Coins (N,) that are true with chance exp(-numerators / denominator), quotients in [0, 1].

    Algorithm 1 of arXiv:2004.00010: throw coins of chance gamma / k for k = 1, 2, ... until one
    fails; true when the failing k is odd.
    """
    true = np.zeros(len(numerators), dtype=np.bool_)
    going = np.arange(len(numerators))
    k = 1
    while going.size:
        passed = _below(denominator * k, going.size) < numerators[going]
        true[going[~passed]] = k % 2 == 1
        going = going[passed]
        k += 1
    return true


def _below(bound: int, count: int) -> NDArray[np.uint64]:
    """``count`` uniform whole numbers from 0 to ``bound`` - 1, without a modulo's bias.

    The first 2^64 mod bound words are drawn again, so that what is left is a multiple of bound.
    """
    surplus = np.uint64(_WORDS % bound)
    words = random_uint64(count).copy()
    while (again := words < surplus).any():
        words[again] = random_uint64(int(np.count_nonzero(again)))
    return words % np.uint64(bound)
