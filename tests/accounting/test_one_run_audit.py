"""One-run audits: golden values, a plain reference, and how often a true claim is rejected.

Golden values were computed by another library, to five decimals. How often a true claim is rejected
is summed exactly where the worst run is known (each guess is right with probability e^eps / (1 +
e^eps)), and simulated with a fixed seed otherwise.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri
from scipy.stats import binom, norm

from accounting.accountants import gaussian_epsilon
from accounting.errors import PlanError
from accounting.one_run_audit import (
    claim_rejected,
    count_correct,
    guess,
    one_run_ceiling,
    one_run_lower_bound,
    one_run_p_value,
    profile_inverse,
)

DELTA = 1e-5

# canaries, guesses, right guesses; the epsilon that they reject; the same if the run is Gaussian
GOLDEN = [
    (34, 34, 34, 2.38380, 5.994),
    (34, 34, 30, 1.10198, 2.667),
    (100, 100, 100, 3.49022, 8.216),
    (100, 40, 38, 1.73993, 3.408),
    (1000, 100, 99, 3.00283, 4.727),
    (1000, 200, 180, 1.79629, 2.901),
    (1000, 1000, 600, 0.29723, None),
    (5000, 500, 500, 4.97776, 7.981),
]


def tally(canaries: int, guesses: int, correct: int) -> dict[str, Any]:
    return {"canaries": canaries, "guesses": guesses, "correct": correct}


def gaussian_profile(mu: float) -> list[tuple[float, float]]:
    """The privacy profile of a Gaussian mechanism at 120 epsilons: arXiv:1905.02383, Corollary
    2.13.
    """
    eps = np.linspace(0, 4 * mu + mu**2, 120)
    deltas = norm.cdf(mu / 2 - eps / mu) - np.exp(eps) * norm.cdf(-mu / 2 - eps / mu)
    return list(zip(eps.tolist(), deltas.tolist(), strict=True))


# The test for any (epsilon, delta) ----------------------------------------------------------


@pytest.mark.parametrize(("m", "r", "v", "bound"), [row[:4] for row in GOLDEN])
def test_lower_bounds_equal_the_golden_values(m: int, r: int, v: int, bound: float) -> None:
    assert one_run_lower_bound(**tally(m, r, v), delta=DELTA) == pytest.approx(bound, abs=1e-5)


def test_p_values_equal_the_golden_values() -> None:
    # 75 of 100 at ln 3 is the median of Binomial(100, 3/4): an example in appendix D of the paper
    for m, r, v, epsilon, delta, expected in (
        (34, 34, 30, 1.0, DELTA, 0.0293629),
        (1000, 100, 99, 4.0, DELTA, 0.466497),
        (100, 100, 75, math.log(3), 1e-15, 0.553),
    ):
        p = one_run_p_value(**tally(m, r, v), epsilon=epsilon, delta=delta)
        assert p == pytest.approx(expected, abs=1e-5 if delta == DELTA else 5e-4)


def plain_p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """The p-value with loops and integer binomials."""
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    chance = [math.comb(r, k) * p**k * (1 - p) ** (r - k) for k in range(r + 1)]
    tail = sum(chance[k] for k in range(v, r + 1))
    alpha = max((sum(chance[k] for k in range(v - i, v)) / i for i in range(1, v + 1)), default=0)
    return float(min(1, tail + 2 * m * delta * alpha))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), epsilon=st.floats(0, 8), delta=st.floats(1e-9, 0.5))
def test_the_p_value_equals_that_of_a_plain_loop_and_rises_with_epsilon(
    data: st.DataObject, epsilon: float, delta: float
) -> None:
    m = data.draw(st.integers(1, 60))
    r = data.draw(st.integers(0, m))
    v = data.draw(st.integers(0, r))
    p = one_run_p_value(**tally(m, r, v), epsilon=epsilon, delta=delta)
    assert p == pytest.approx(plain_p_value(m, r, v, epsilon, delta), rel=1e-9, abs=1e-12)
    assert p <= one_run_p_value(**tally(m, r, v), epsilon=epsilon + 0.1, delta=delta) + 1e-12


@pytest.mark.parametrize(("m", "r", "v"), [row[:3] for row in GOLDEN])
def test_the_bound_is_where_the_p_value_crosses_the_level(m: int, r: int, v: int) -> None:
    for confidence in (0.8, 0.95, 0.999):
        bound = one_run_lower_bound(**tally(m, r, v), delta=DELTA, confidence=confidence)
        at = [
            one_run_p_value(**tally(m, r, v), epsilon=bound + step, delta=DELTA)
            for step in (0.0, 1e-6)
        ]
        assert at[0] <= 1 - confidence < at[1]


def test_ceilings_are_the_published_ones() -> None:
    for m, ceiling in {
        10: 1.05,
        20: 1.82,
        34: 2.38,
        64: 3.04,
        100: 3.49,
        200: 4.19,
        500: 5.10,
        1000: 5.78,
        5000: 7.28,
    }.items():
        assert one_run_ceiling(canaries=m, delta=DELTA) == pytest.approx(ceiling, abs=5e-3)
    # with few guesses the ceiling is that of as many canaries, less the cost of delta
    assert one_run_ceiling(canaries=1000, guesses=100, delta=DELTA) < 3.490


def test_random_guesses_give_no_bound() -> None:
    assert one_run_lower_bound(**tally(100, 100, 50), delta=DELTA) == 0.0
    assert one_run_lower_bound(**tally(10, 0, 0), delta=DELTA) == 0.0
    # half of the guesses are right: nothing significant at 95%
    assert one_run_ceiling(canaries=1, delta=DELTA) == 0.0


# How often a true claim is rejected ---------------------------------------------------------

Rejects = Callable[[int, int, int, float], bool]  # canaries, guesses, right ones, epsilon


def by_p_value(m: int, r: int, v: int, epsilon: float) -> bool:
    return one_run_p_value(**tally(m, r, v), epsilon=epsilon, delta=1e-12) <= 0.05


def by_profile(m: int, r: int, v: int, epsilon: float) -> bool:
    return claim_rejected(**tally(m, r, v), profile=[(epsilon, 0.0)])


def rejected_share(rejects: Rejects, m: int, r: int, claimed: float, true: float) -> float:
    """The probability that a claim is rejected when each guess is right as often as ``true``
    allows.
    """
    p = math.exp(true) / (1 + math.exp(true))
    return sum(float(binom.pmf(v, r, p)) for v in range(r + 1) if rejects(m, r, v, claimed))


@pytest.mark.parametrize("rejects", [by_p_value, by_profile])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(("m", "r"), [(34, 34), (200, 80)])
def test_the_leakiest_run_that_keeps_its_claim_is_rejected_once_in_twenty(
    rejects: Rejects, epsilon: float, m: int, r: int
) -> None:
    assert rejected_share(rejects, m, r, claimed=epsilon, true=epsilon) <= 0.05
    # control: a run that leaks far more than it claims is rejected
    assert rejected_share(rejects, m, r, claimed=epsilon, true=epsilon + 2.5) > 0.4


def bounds_of_gaussian_canaries(mu: float, trials: int, m: int, r: int, seed: int) -> list[float]:
    """Lower bounds of a run that adds standard normal noise to mu for every included canary."""
    random = np.random.default_rng(seed)
    bounds = []
    for _ in range(trials):
        included = random.random(m) < 0.5
        said = guess(mu * included + random.standard_normal(m), r)
        right = tally(m, r, count_correct(said, included))
        bounds.append(one_run_lower_bound(**right, delta=DELTA))
    return bounds


@pytest.mark.slow
def test_uninformative_scores_are_called_a_leak_in_at_most_one_run_of_twenty() -> None:
    # Binomial(34, 1/2) is 23 or more with chance 0.0288, so that 400 runs give 11.5 +- 3.3
    # alarms, and 20 or fewer with chance 0.99; the seed is fixed, so the count is as well.
    alarm_rate = float(binom.sf(22, 34, 0.5))
    assert alarm_rate == pytest.approx(0.0288, abs=5e-5)
    alarms = sum(bound > 0 for bound in bounds_of_gaussian_canaries(0.0, 400, 34, 34, seed=1))
    assert abs(alarms - 400 * alarm_rate) <= 3 * math.sqrt(400 * alarm_rate)
    assert alarms <= 20
    # control: slightly informative scores are called a leak far more often
    told = bounds_of_gaussian_canaries(1.0, 100, 34, 34, seed=1)
    assert sum(bound > 0 for bound in told) > 20


@pytest.mark.parametrize(("mu", "epsilon"), [(1.0, 4.38), (2.0, 10.0), (4.0, 24.4)])
def test_bounds_of_a_gaussian_run_stay_below_its_true_epsilon(mu: float, epsilon: float) -> None:
    true = gaussian_epsilon(mu, DELTA)
    assert true == pytest.approx(epsilon, rel=2e-3)
    bounds = bounds_of_gaussian_canaries(mu, 20, 1000, 100, seed=2)
    assert max(bounds) <= true
    assert np.mean(bounds) > 1.0  # and they are positive


# The test for a whole trade-off function ----------------------------------------------------


def test_the_inverse_of_one_pair_equals_its_two_lines_by_hand() -> None:
    inverse = profile_inverse([(math.log(3), 0.1)])  # f(a) = max(0, 0.9 - 3 a, (0.9 - a) / 3)
    for power, accused in ((0.05, 0.0), (0.1, 0.0), (0.4, 0.1), (0.8, 0.3), (0.95, 0.75)):
        assert inverse(power) == pytest.approx(accused)
        # an attack that just keeps the claim has exactly this power
        assert power <= min(1.0, 3 * accused + 0.1, 1 - (0.9 - accused) / 3) + 1e-12


def test_a_vacuous_pair_allows_every_attack() -> None:
    nothing = profile_inverse([(0.0, 1.0), (1e6, 0.0)])
    assert max(nothing(x) for x in (0.0, 0.5, 0.999)) < 1e-300  # overflow gives no nan
    assert not claim_rejected(**tally(34, 34, 34), profile=[(0.0, 1.0)])


@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
def test_the_profile_of_a_gaussian_approximates_its_trade_off_function_from_below(
    mu: float,
) -> None:
    lines = profile_inverse(gaussian_profile(mu))

    def exact(x: float) -> float:  # the inverse of a Gaussian with sensitivity / noise = mu
        return float(ndtr(ndtri(x) - mu))

    powers = np.linspace(1e-4, 1 - 1e-4, 500)
    gaps = np.array([exact(x) - lines(x) for x in powers])
    assert gaps.min() >= -1e-12  # never stronger than the truth
    assert gaps.max() < 5e-4  # 120 lines in place of all
    # control: pairs that a Gaussian with this mu violates exceed it somewhere
    too_strong = profile_inverse(gaussian_profile(0.9 * mu))
    assert max(too_strong(x) - exact(x) for x in powers) > 1e-3


def test_a_run_that_spends_twice_its_claim_is_refuted_and_an_honest_one_is_not() -> None:
    random = np.random.default_rng(3)
    refuted = {1.0: 0, 0.5: 0}  # claimed mu of a run whose mu is 1
    for _ in range(40):
        included = random.random(2000) < 0.5
        said = guess(included + random.standard_normal(2000), 400)
        right = tally(2000, 400, count_correct(said, included))
        for mu in refuted:
            refuted[mu] += claim_rejected(**right, profile=gaussian_profile(mu))
    assert refuted[1.0] == 0
    assert refuted[0.5] >= 35


def test_dropping_pairs_from_a_claim_only_makes_it_harder_to_refute() -> None:
    whole, part = gaussian_profile(0.8), gaussian_profile(0.8)[::40]
    for v in range(20, 35):
        if claim_rejected(**tally(34, 34, v), profile=part):
            assert claim_rejected(**tally(34, 34, v), profile=whole)
    assert claim_rejected(**tally(34, 34, 34), profile=part)


# Guesses ------------------------------------------------------------------------------------


def test_the_highest_scores_are_guessed_in_and_the_lowest_out() -> None:
    said = guess([0.3, -1.0, 7.0, 2.0, -math.inf, 0.4], 4)
    assert said.tolist() == [0, -1, 1, 1, -1, 0]
    assert guess([1.0, 2.0], 0).tolist() == [0, 0]
    # ties: any of them, but the same number
    assert guess([1.0, 1.0, 1.0, 1.0], 4).tolist() == [-1, -1, 1, 1]


def test_a_guess_is_right_if_it_names_the_side_of_the_coin() -> None:
    included = np.array([True, False, False, True, True])
    assert count_correct(np.array([1, -1, 1, -1, 0]), included) == 2
    assert count_correct(np.array([1, -1, -1, 1, 1]), included) == 5
    assert count_correct(np.zeros(5), included) == 0


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: guess([0.0, math.nan], 2), "NaN"),
        (lambda: guess([[0.0, 1.0]], 2), "one list"),
        (lambda: guess([0.0, 1.0, 2.0], 1), "even"),
        (lambda: guess([0.0, 1.0], 4), "guesses is 4; it must be from 0 to 2, the canaries"),
        (lambda: guess([], 0), "canaries"),
        (lambda: count_correct([1, 0], [True]), "as long"),
        (lambda: count_correct([1, 0], [1, 0]), "true or false"),
        (lambda: count_correct([2, 0], [True, False]), "neither"),
    ],
)
def test_invalid_scores_and_guesses_are_refused(call: Callable[[], object], part: str) -> None:
    with pytest.raises(PlanError, match=part):
        call()


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"guesses": 35}, "guesses is 35; it must be from 0 to 34, the canaries"),
        ({"correct": 31}, "correct is 31; it must be from 0 to 30, the guesses"),
        ({"correct": -1}, "correct"),
        ({"guesses": -2, "correct": -2}, "guesses"),
        ({"canaries": 0}, "canaries"),
        ({"canaries": 34.0}, "whole number"),
        ({"correct": math.nan}, "whole number"),
        ({"correct": True}, "whole number"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"confidence": 1.0}, "confidence"),
        ({"confidence": 0.4}, "confidence is 0.4; it must be from 0.5 to below 1"),
        ({"confidence": math.nan}, "confidence"),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(wrong: dict[str, Any], part: str) -> None:
    usual: dict[str, Any] = {**tally(34, 30, 28), "delta": DELTA, "confidence": 0.95}
    assert one_run_lower_bound(**usual) > 0
    with pytest.raises(PlanError, match=part):
        one_run_lower_bound(**{**usual, **wrong})


@pytest.mark.parametrize("epsilon", [-0.1, math.nan, math.inf])
def test_an_invalid_claimed_epsilon_has_no_p_value(epsilon: float) -> None:
    with pytest.raises(PlanError, match="epsilon"):
        one_run_p_value(**tally(34, 34, 30), epsilon=epsilon, delta=DELTA)


@pytest.mark.parametrize(
    "profile", [[], [(-1.0, 0.1)], [(1.0, -0.1)], [(1.0, 1.5)], [(math.nan, 0)], [(math.inf, 0)]]
)
def test_an_invalid_profile_is_refused(profile: list[tuple[float, float]]) -> None:
    with pytest.raises(PlanError, match=r"profile|pair|epsilon"):
        claim_rejected(**tally(34, 34, 30), profile=profile)
