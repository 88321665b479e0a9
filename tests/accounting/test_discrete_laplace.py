"""Discrete Laplace noise: its distribution, its random bits, and refused arguments.

Expected probabilities come from the formula of the distribution. Statistical tests have a level of
one in a million: by chance one of them fails once in 100,000 runs of this file.
"""

import math
import random
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binomtest, chisquare

from accounting import discrete_laplace as module
from accounting.discrete_laplace import discrete_laplace, exact_epsilon, log_pmf
from accounting.errors import PlanError

LEVEL = 1e-6
DRAWS = 200_000

Whole = NDArray[np.int64]


def chance(epsilon: float, x: int) -> float:
    """(1 - q) / (1 + q) * q^|x| with q = e^-epsilon: the two-sided geometric law."""
    q = math.exp(-epsilon)
    return (1 - q) / (1 + q) * q ** abs(x)


def law_p(draws: Whole, epsilon: float) -> float:
    """Chi-square p-value of draws: one bin per value with at least 20 expected draws, and two
    tails.
    """
    reach = 0
    while len(draws) * chance(epsilon, reach + 1) >= 20:
        reach += 1
    inside = [chance(epsilon, x) for x in range(-reach, reach + 1)]
    expected = np.array([(1 - sum(inside)) / 2, *inside, (1 - sum(inside)) / 2]) * len(draws)
    seen = np.bincount(np.clip(draws, -reach - 1, reach + 1) + reach + 1, minlength=len(expected))
    return float(chisquare(seen, expected).pvalue)


# The distribution -----------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0625, 0.5, 1.0, 2.0, 4.0])
def test_draws_follow_the_two_sided_geometric_law(epsilon: float) -> None:
    assert law_p(discrete_laplace(epsilon, DRAWS), epsilon) > LEVEL


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_the_check_of_the_distribution_detects_other_noise(epsilon: float) -> None:
    half = discrete_laplace(2 * epsilon, DRAWS)
    assert law_p(half, epsilon) < LEVEL
    rounded = np.rint(np.random.default_rng(0).laplace(scale=1 / epsilon, size=DRAWS))
    assert law_p(rounded.astype(np.int64), epsilon) < LEVEL
    # An easily forgotten step: +0 and -0 are one number, and only one of them may be kept.
    draws = discrete_laplace(epsilon, DRAWS)
    zeros = np.zeros(np.count_nonzero(draws == 0), dtype=np.int64)
    assert law_p(np.concatenate([draws, zeros]), epsilon) < LEVEL


@pytest.mark.slow
def test_a_call_may_have_any_size_and_small_calls_follow_the_distribution_too() -> None:
    assert [len(discrete_laplace(1.0, count)) for count in (0, 1, 7, 1000)] == [0, 1, 7, 1000]
    many = np.concatenate([discrete_laplace(1.0, 3) for _ in range(4000)])
    assert many.dtype == np.int64
    assert law_p(many, 1.0) > LEVEL


def test_neighbouring_values_have_log_probabilities_that_differ_by_exactly_epsilon() -> None:
    for epsilon in (0.25, 1.0, 8.0, 64.0):
        steps = np.diff(log_pmf(epsilon, np.arange(-30, 31)))
        assert np.abs(steps) == pytest.approx(epsilon, rel=1e-12)


@pytest.mark.parametrize("epsilon", [2**-20, 0.001, 0.5, 3.0, 30.0, 1000.0])
def test_log_pmf_equals_the_logarithm_of_the_formula(epsilon: float) -> None:
    exact = float(Fraction(math.floor(Fraction(epsilon) * 2**20), 2**20))
    at_zero = math.log(math.tanh(exact / 2))
    assert log_pmf(epsilon, [[0, 1], [-1, 700]]) == pytest.approx(
        np.array([[at_zero, at_zero - exact], [at_zero - exact, at_zero - 700 * exact]])
    )


def test_probabilities_sum_to_one() -> None:
    for epsilon in (0.01, 1.0, 5.0):
        assert np.exp(log_pmf(epsilon, np.arange(-5000, 5001))).sum() == pytest.approx(1.0)


# The parts of the sampler ---------------------------------------------------------------------


def test_a_bernoulli_draw_has_probability_e_to_the_minus_gamma() -> None:
    for gamma in (Fraction(0), Fraction(1, 3), Fraction(1)):
        numerators = np.full(DRAWS, gamma.numerator, dtype=np.uint64)
        heads = int(module._draw_bernoulli_exp(numerators, gamma.denominator).sum())
        assert binomtest(heads, DRAWS, math.exp(-gamma)).pvalue > LEVEL
        # The control: a probability that is three percent lower is detected. (Two percent is 6.8
        # standard deviations, of which the level takes 4.9: undetected once in 40 runs.)
        if gamma:
            assert binomtest(heads, DRAWS, math.exp(-gamma) * 0.97).pvalue < LEVEL


def test_a_word_that_would_bias_a_remainder_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2^64 = 3 * n + 1: among 2^64 words remainder 0 occurs once more than 1 or 2, so word 0 is
    # rejected.
    words = iter([[0, 5, 0], [0, 1], [2]])
    asked: list[int] = []

    def scripted_words(count: int) -> NDArray[np.uint64]:
        asked.append(count)
        return np.array(next(words), dtype=np.uint64)

    monkeypatch.setattr(module, "random_uint64", scripted_words)
    assert module._draw_below(3, 3).tolist() == [2, 2, 1]
    assert asked == [3, 2, 1]


def test_epsilon_is_never_rounded_up() -> None:
    assert [exact_epsilon(e) for e in (0.5, 4.0, 1000.0)] == [Fraction(1, 2), 4, 1000]
    assert exact_epsilon(0.1) == Fraction(104857, 2**20)  # 0.1 * 2^20 = 104857.6


@given(st.floats(2**-20, 1000.0))
def test_the_epsilon_of_the_noise_is_at_most_2_to_the_minus_20_below_the_requested_one(
    epsilon: float,
) -> None:
    exact = exact_epsilon(epsilon)
    assert 0 <= Fraction(epsilon) - exact < Fraction(1, 2**20)
    assert exact.denominator <= 2**20


# Random bits ----------------------------------------------------------------------------------


def draws_after_seeding(count: int = 200) -> Whole:
    """Draws made after every seeded generator was set to the same seed."""
    random.seed(0)
    np.random.seed(0)
    return discrete_laplace(0.5, count)


def test_no_seed_repeats_noise() -> None:
    # Two equal lists of 200 draws: chance below 0.25^200.
    assert not np.array_equal(draws_after_seeding(), draws_after_seeding())


def test_the_check_of_seeds_detects_a_seeded_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded(count: int) -> NDArray[np.uint64]:
        return np.frombuffer(np.random.bytes(8 * count), dtype=np.uint64).copy()

    monkeypatch.setattr(module, "random_uint64", seeded)
    assert np.array_equal(draws_after_seeding(), draws_after_seeding())


def test_all_random_bits_come_from_the_secure_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(count: int) -> NDArray[np.uint64]:
        raise OSError("no coins")

    monkeypatch.setattr(module, "random_uint64", failing)
    with pytest.raises(OSError, match="no coins"):
        discrete_laplace(1.0, 1)


def test_a_thousand_draws_take_less_than_a_tenth_of_a_second() -> None:
    spent = []
    for _ in range(5):
        begun = time.perf_counter()
        discrete_laplace(0.1, 1000)
        spent.append(time.perf_counter() - begun)
    assert min(spent) < 0.1


# What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf, 1000.5, 1e-7, "1", True, None])
def test_an_invalid_epsilon_is_refused(epsilon: float) -> None:
    for use in (lambda: discrete_laplace(epsilon, 1), lambda: log_pmf(epsilon, [0])):
        with pytest.raises(PlanError, match="epsilon of discrete Laplace noise"):
            use()


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_an_invalid_count_is_refused(count: int) -> None:
    with pytest.raises(PlanError, match="number of draws"):
        discrete_laplace(1.0, count)


@pytest.mark.parametrize("values", [0.5, [1.0, math.nan]])
def test_log_pmf_accepts_integers_only(values: object) -> None:
    with pytest.raises(PlanError, match="whole numbers"):
        log_pmf(1.0, values)  # type: ignore[arg-type]
