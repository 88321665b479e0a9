"""Epsilon: golden values, exact formulas, an independent library, and refused arguments.

Golden values were computed outside this project (shared/golden/epsilon.csv: Opacus, dp-accounting
and certified bounds). Every check of a bound has a control that breaks the bound.
"""

import csv
import itertools
import json
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import GaussianAccountant, PRVAccountant
from opacus.accountants.analysis import rdp
from scipy.stats import norm

from accounting import verify
from accounting.accountants import (
    ORDERS,
    _find_least_fitting,
    calibrate_noise,
    cost_of,
    epsilon,
    gaussian_epsilon,
    max_repeats,
    prv_epsilon,
    rdp_epsilon,
    rdp_to_epsilon,
)
from accounting.canonical_json import decode, encode
from accounting.errors import AccountingError, PlanError
from accounting.events import (
    ComposedEvent,
    Event,
    NonPrivateEvent,
    PoissonSampledGaussianEvent,
    PureDpEvent,
    event_from_json,
    event_to_json,
)

GOLDEN = Path(__file__).parents[3] / "shared/golden/epsilon.csv"
OPACUS_ORDERS = (*(order / 10 for order in range(11, 110)), *map(float, range(12, 64)))
needs_library = pytest.mark.skipif(
    not verify.available(), reason="dp-accounting is not installed (extra: verify)"
)


class Row(NamedTuple):
    """One line of the golden grid."""

    event: PoissonSampledGaussianEvent
    delta: float
    pld_lower: float
    pld_upper: float
    opacus: float
    integer: float


@cache
def golden() -> tuple[Row, ...]:
    if not GOLDEN.exists():
        pytest.skip("shared/golden/epsilon.csv is not beside the checkout")
    with GOLDEN.open() as file:
        return tuple(
            Row(
                PoissonSampledGaussianEvent(
                    float(line["sigma"]), float(line["q"]), int(line["steps"])
                ),
                float(line["delta"]),
                float(line["eps_pld_lower"]),
                float(line["eps_pld_upper"]),
                float(line["eps_rdp_opacus"]),
                float(line["eps_rdp_int2to256"]),
            )
            for line in csv.DictReader(file)
        )


def golden_sample() -> list[Row]:
    """All rows of every seventh (sigma, q) pair: each pair takes a fifth of a second."""
    pairs = sorted({(row.event.noise_multiplier, row.event.sample_rate) for row in golden()})
    kept = set(pairs[::7])
    return [r for r in golden() if (r.event.noise_multiplier, r.event.sample_rate) in kept]


def disagreements_with_golden(rows: list[Row], noise_factor: float = 1.0) -> list[Row]:
    """Rows on which our RDP disagrees with Opacus or with the certified lower bound."""
    wrong = []
    for row in rows:
        sigma, q, steps = row.event.noise_multiplier, row.event.sample_rate, row.event.steps
        events = [PoissonSampledGaussianEvent(noise_factor * sigma, q, steps)]
        at_integers = rdp_epsilon(events, row.delta, verify.INTEGER_ORDERS)
        at_opacus = rdp_epsilon(events, row.delta, OPACUS_ORDERS)
        ours = epsilon(events, row.delta)
        # Above 1000 the "lower" bound of the grid is wrong: at q = 1, sigma = 1, T = 2000 it is
        # 1190.63, but the exact equation solved with 60 digits gives 1189.77669841.
        lower = row.pld_lower if row.pld_lower < 1000 else 0.0
        if (
            abs(at_integers - row.integer) > 1.1e-6
            or abs(at_opacus - row.opacus) > 1e-4 * row.opacus
            or not lower - 1e-6 <= ours <= row.opacus + 1e-4 * row.opacus
        ):
            wrong.append(row)
    return wrong


@pytest.mark.ci
def test_rdp_agrees_with_the_golden_grid_and_stays_above_the_certified_lower_bound() -> None:
    rows = golden_sample()
    assert len(rows) >= 64
    assert disagreements_with_golden(rows) == []


@pytest.mark.ci
def test_the_golden_grid_detects_noise_that_is_one_percent_too_small() -> None:
    rows = golden_sample()[:8]
    assert disagreements_with_golden(rows, noise_factor=0.99) == rows


@pytest.mark.slow
def test_rdp_agrees_with_all_640_rows_of_the_golden_grid() -> None:
    assert len(golden()) == 640
    assert disagreements_with_golden(list(golden())) == []


def test_a_central_limit_accountant_would_fall_below_the_certified_lower_bound() -> None:
    # The control, and the reason why Gaussian DP is not offered: q 8/34, sigma 2, T 20 has the
    # certified lower bound 2.6252 in the golden grid.
    row = next(
        r
        for r in golden()
        if r.event == PoissonSampledGaussianEvent(2.0, 8 / 34, 20) and r.delta == 1e-5
    )
    with pytest.warns(UserWarning, match="underestimate"):
        limit = GaussianAccountant()
    limit.history = [(2.0, 8 / 34, 20)]
    assert limit.get_epsilon(1e-5) < row.pld_lower - 0.1
    assert epsilon([row.event], 1e-5) >= row.pld_lower


@pytest.mark.parametrize(
    ("sigma", "steps", "delta", "exact"),
    [
        (4.0, 20, 1e-5, 4.98330641),
        (8.0, 100, 1e-5, 5.67958686),
        (8.0, 100, 1e-6, 6.31206019),
        (2.0, 20, 1e-5, 11.48002281),
        (1.0, 2000, 1e-5, 1189.77669841225),  # 60 digits
        (8.0, 500, 1e-5, 15.22271357),
    ],
)
def test_full_batches_cost_the_exact_closed_form(
    sigma: float, steps: int, delta: float, exact: float
) -> None:
    event = PoissonSampledGaussianEvent(sigma, 1.0, steps)
    assert epsilon([event], delta) == pytest.approx(exact, abs=1e-6)
    # The same noise in separate visits, and as one release with noise sigma / sqrt(steps).
    assert epsilon([PoissonSampledGaussianEvent(sigma, 1.0, 1)] * steps, delta) == pytest.approx(
        exact, 1e-7
    )
    assert gaussian_epsilon(math.sqrt(steps) / sigma, delta) == pytest.approx(exact, 1e-7)


@given(mu=st.floats(1e-3, 60.0), delta=st.floats(1e-10, 0.1))
def test_the_closed_form_solves_its_equation(mu: float, delta: float) -> None:
    eps = gaussian_epsilon(mu, delta)
    at = norm.cdf(mu / 2 - eps / mu) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu))
    if eps == 0:
        assert norm.cdf(mu / 2) - norm.cdf(-mu / 2) <= delta * (1 + 1e-9)
    else:
        assert at == pytest.approx(delta, rel=1e-5)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("sigma", "q", "delta", "exact"),
    [
        (1.0, 8 / 34, 1e-5, 2.63559827),
        (1.0, 8 / 34, 1e-3, 1.40788348),
        (2.0, 16 / 34, 1e-5, 1.30248870),
        (0.8, 16 / 500, 1e-5, 1.40750053),
        (0.7, 32 / 2500, 1e-5, 1.07095659),
    ],
)
def test_no_accountant_is_below_the_exact_epsilon_of_one_sampled_step(
    sigma: float, q: float, delta: float, exact: float
) -> None:
    def exact_delta(eps: float) -> float:  # docs/privacy.md: one Poisson step
        z = sigma**2 * math.log((math.exp(eps) - 1 + q) / q) + 0.5
        return float(q * norm.sf((z - 1) / sigma) + (1 - q - math.exp(eps)) * norm.sf(z / sigma))

    assert exact_delta(exact) == pytest.approx(delta, rel=1e-4)
    event = PoissonSampledGaussianEvent(sigma, q, 1)
    assert epsilon([event], delta) >= exact
    prv = prv_epsilon([event], delta)
    assert prv is not None
    assert exact <= prv <= exact + 0.02


@pytest.mark.ci
def test_the_prv_headline_is_within_its_error_of_the_upper_bound_on_the_grid() -> None:
    rows = [r for r in golden_sample() if 0.5 < r.opacus < 12][::8]
    assert rows
    for row in rows:
        prv = prv_epsilon([row.event], row.delta)
        assert prv is not None
        assert row.pld_lower <= prv <= row.pld_upper + 0.02


def test_the_prv_headline_is_omitted_where_it_would_exhaust_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the numeric accountant ran")

    monkeypatch.setattr(PRVAccountant, "get_epsilon", fail)
    assert prv_epsilon([PoissonSampledGaussianEvent(0.2, 0.9, 2000)], 1e-5) is None
    assert prv_epsilon([PureDpEvent(1.0, 1)], 1e-5) is None
    assert prv_epsilon([], 1e-5) is None
    with pytest.raises(AssertionError, match="accountant ran"):  # the control
        prv_epsilon([PoissonSampledGaussianEvent(2.0, 0.1, 3)], 1e-5)


def test_an_epsilon_is_never_below_zero_at_a_large_delta() -> None:
    step = PoissonSampledGaussianEvent(4.0, 0.25, 1)
    opacus = PRVAccountant()
    opacus.history = [(4.0, 0.25, 1)]
    assert opacus.get_epsilon(0.1) < 0  # the control: the value without a bound
    assert prv_epsilon([step], 0.1) == 0.0


# Few (sigma, q) pairs, because the library takes a tenth of a second for each new one.
GAUSSIANS = st.builds(
    PoissonSampledGaussianEvent,
    noise_multiplier=st.sampled_from([1.0, 2.5]),
    sample_rate=st.sampled_from([0.02, 0.4, 1.0]),
    steps=st.integers(1, 300),
)
EVENTS = st.lists(
    GAUSSIANS | st.builds(PureDpEvent, epsilon=st.floats(0.01, 2.0), count=st.integers(1, 5)),
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(events=EVENTS, more=EVENTS, delta=st.sampled_from([1e-7, 1e-5, 1e-3]))
def test_epsilon_grows_with_events_and_does_not_depend_on_their_order_or_nesting(
    events: list[Event], more: list[Event], delta: float
) -> None:
    together = epsilon([*events, *more], delta)
    assert together >= epsilon(events, delta) * (1 - 1e-9)
    assert together == pytest.approx(epsilon([*more, *events][::-1], delta), rel=1e-9, abs=1e-9)
    assert epsilon(events, delta) <= epsilon(events, delta / 10) * (1 + 1e-9)
    if events:
        nested = epsilon([ComposedEvent((ComposedEvent(tuple(events)),))], delta)
        assert nested == pytest.approx(epsilon(events, delta), rel=1e-9)


def test_the_conversion_to_epsilon_follows_proposition_12() -> None:
    # arXiv:2004.00010, Prop. 12: r + ln(1 - 1/a) - (ln delta + ln a) / (a - 1)
    at_2 = 1.0 - math.log(2) - (math.log(1e-5) + math.log(2))
    at_11 = 3.0 + math.log(10 / 11) - (math.log(1e-5) + math.log(11)) / 10
    assert rdp_to_epsilon(np.array([1.0]), 1e-5, (2.0,)) == pytest.approx(at_2)
    assert rdp_to_epsilon(np.array([1.0, 3.0]), 1e-5, (2.0, 11.0)) == pytest.approx(at_11)


def test_orders_are_large_enough_for_an_epsilon_far_below_a_tenth() -> None:
    # At order 63 the conversion alone adds 0.103, at 1024 it adds 0.0035.
    assert epsilon([PoissonSampledGaussianEvent(100.0, 0.01, 1)], 1e-5) < 0.01


def test_steps_charged_separately_cost_the_same_as_steps_charged_together() -> None:
    for rate in (0.4, 1.0):
        parts = [PoissonSampledGaussianEvent(2.5, rate, steps) for steps in (50, 70)]
        whole = PoissonSampledGaussianEvent(2.5, rate, 120)
        assert epsilon(parts, 1e-5) == pytest.approx(epsilon([whole], 1e-5), rel=1e-9)


def test_full_batches_beside_sampled_batches_are_composed_by_renyi_divergence() -> None:
    full = PoissonSampledGaussianEvent(4.0, 1.0, 20)
    sampled = PoissonSampledGaussianEvent(2.5, 0.4, 100)
    together = epsilon([full, sampled], 1e-5)
    assert together == pytest.approx(rdp_epsilon([full, sampled], 1e-5), rel=1e-9)
    assert together > max(epsilon([full], 1e-5), epsilon([sampled], 1e-5))


@pytest.mark.parametrize("each", [0.05, 1.0, 8.0])
def test_a_pure_release_costs_at_least_randomized_response_at_every_order(each: float) -> None:
    # One bit, kept with chance p = e^each / (1 + e^each); its divergence in logarithms.
    a = np.array(ORDERS)
    kept, turned = -np.log1p(np.exp(-each)), -np.log1p(np.exp(each))
    terms = np.stack([a * kept + (1 - a) * turned, a * turned + (1 - a) * kept])
    divergence = np.logaddexp(*terms) / (a - 1)
    assert (cost_of([PureDpEvent(each, 1)]).rdp >= divergence * (1 - 1e-9)).all()


def test_more_noise_and_a_lower_rate_cost_less() -> None:
    def cost(sigma: float, q: float) -> float:
        return epsilon([PoissonSampledGaussianEvent(sigma, q, 50)], 1e-5)

    for low, high in itertools.pairwise([1.0, 2.5]):
        assert all(cost(high, q) < cost(low, q) for q in (0.02, 0.4, 1.0))
    for low, high in itertools.pairwise([0.02, 0.4, 1.0]):
        assert all(cost(sigma, low) < cost(sigma, high) for sigma in (1.0, 2.5))


def test_no_event_costs_nothing_and_an_unprotected_read_costs_infinity() -> None:
    assert epsilon([], 1e-5) == 0
    assert (
        epsilon([PoissonSampledGaussianEvent(4.0, 1.0, 1), NonPrivateEvent("F without noise")], 0.5)
        == math.inf
    )


def test_a_nan_from_the_library_counts_as_infinity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nan(*, orders: list[float], **_: Any) -> Any:
        return np.full(len(orders), np.nan)

    monkeypatch.setattr(rdp, "compute_rdp", nan)
    assert epsilon([PoissonSampledGaussianEvent(1.2345, 0.54321, 1)], 1e-5) == math.inf


def test_pure_releases_add_up_at_delta_zero() -> None:
    assert epsilon([PureDpEvent(0.5, 3)], 1e-5) == pytest.approx(1.5)
    assert epsilon([PureDpEvent(0.5, 1), PureDpEvent(1.0, 2)], 1e-9) == pytest.approx(2.5)


def test_many_small_pure_releases_cost_less_than_their_sum() -> None:
    # 1000 releases of 0.05 are (1000 * 0.05^2 / 2)-zCDP: rho = 1.25, so epsilon is at most
    # rho + 2 sqrt(rho ln(1/delta)) = 1.25 + 2 sqrt(1.25 * 11.513) = 8.837 (arXiv:1605.02065).
    eps = epsilon([PureDpEvent(0.05, 1000)], 1e-5)
    assert 5.0 < eps <= 8.837


def test_a_pure_release_beside_gaussians_costs_at_most_its_epsilon() -> None:
    gaussian = PoissonSampledGaussianEvent(2.5, 0.4, 100)
    alone = epsilon([gaussian], 1e-5)
    assert alone < epsilon([gaussian, PureDpEvent(1.0, 1)], 1e-5) <= alone + 1.0 + 1e-12


@pytest.mark.parametrize(
    "sigma", [0, 0.0, -1.0, math.nan, math.inf, 1e-9, 0.19, 1e7, "1e-3", True, None, 10**400]
)
def test_noise_without_a_bound_is_refused_before_any_accountant_runs(
    sigma: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise AssertionError("an accountant ran")

    for owner, name in (
        *((rdp, "compute_rdp"), (PRVAccountant, "get_epsilon")),
        (GaussianAccountant, "get_epsilon"),
    ):
        monkeypatch.setattr(owner, name, fail)
    with pytest.raises(PlanError, match="noise_multiplier"):
        PoissonSampledGaussianEvent(sigma, 0.5, 10)


@pytest.mark.parametrize("rate", [0, -0.1, 1.0001, math.nan, math.inf, "0.1", True])
def test_a_sample_rate_outside_zero_to_one_is_refused(rate: Any) -> None:
    with pytest.raises(PlanError, match="sample_rate"):
        PoissonSampledGaussianEvent(1.0, rate, 10)


@pytest.mark.parametrize("steps", [0, -90, 10**8, 10**400, 1.5, "10", True, math.nan])
def test_a_number_of_steps_that_would_lower_or_hang_the_account_is_refused(steps: Any) -> None:
    with pytest.raises(PlanError, match="steps"):
        PoissonSampledGaussianEvent(1.0, 0.5, steps)


@pytest.mark.parametrize("delta", [0, 1, 1.5, -1e-5, math.nan, math.inf, "1e-5", True])
def test_a_delta_outside_zero_to_one_is_refused(delta: Any) -> None:
    with pytest.raises(PlanError, match="delta"):
        epsilon([PoissonSampledGaussianEvent(2.5, 1.0, 1)], delta)


@pytest.mark.parametrize("each", [0, -1.0, math.nan, math.inf, 1e4, "1", True])
def test_a_pure_release_with_an_invalid_epsilon_is_refused(each: Any) -> None:
    with pytest.raises(PlanError, match="epsilon"):
        PureDpEvent(each, 1)


def test_composed_events_are_bounded_in_width_and_depth() -> None:
    leaf = PureDpEvent(1.0, 1)
    deep: Event = leaf
    with pytest.raises(PlanError, match="deep"):
        for _ in range(5):
            deep = ComposedEvent((deep,))
    with pytest.raises(PlanError, match="1 to 64"):
        ComposedEvent((leaf,) * 65)
    with pytest.raises(PlanError, match="not a kind"):
        ComposedEvent(("leaf",))  # type: ignore[arg-type]


def test_the_error_on_a_text_says_how_yaml_reads_small_numbers() -> None:
    with pytest.raises(PlanError, match=r"Write 1\.0e-3"):
        PoissonSampledGaussianEvent("1e-3", 0.5, 1)  # type: ignore[arg-type]


@given(
    events=EVENTS.filter(bool),
    reason=st.text(st.characters(codec="ascii", categories=["L"]), min_size=1),
)
def test_events_survive_a_round_trip_through_canonical_json(
    events: list[Event], reason: str
) -> None:
    event = ComposedEvent((*events, NonPrivateEvent(reason[:200])))
    assert event_from_json(decode(encode(event_to_json(event)))) == event


def test_only_listed_kinds_of_event_are_read() -> None:
    good = event_to_json(PoissonSampledGaussianEvent(2.0, 0.5, 10))
    for bad, why in [
        ({**good, "kind": "os.system"}, "unknown kind"),
        ({**good, "extra": 1}, "has keys"),
        ({key: value for key, value in good.items() if key != "steps"}, "has keys"),
        ({**good, "steps": -5}, "steps"),
        ({**good, "noise_multiplier": 2.0}, "decimal and hex"),
        ({**good, "noise_multiplier": {"decimal": "2.0", "hex": "0x1.8p+1"}}, "same number"),
        ({**good, "noise_multiplier": {"decimal": "inf", "hex": "inf"}}, "finite"),
        ([good], "not a JSON object"),
    ]:
        with pytest.raises(PlanError, match=why):
            event_from_json(bad)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"a":NaN}', "NaN"),
        (b'{"a":Infinity}', "Infinity"),
        (b'{"a":1,"a":2}', "twice"),
        (b'{"a":99999999999999999999}', "out of range"),
        (b'{"a":1.5}', "raw real"),
        (b'{"a": 1}', "canonical"),
        (b'{"b":1,"a":2}', "canonical"),
        (b'{"a":"\\ud800"}', "not a JSON record"),
        (b"[1]", "not a JSON object"),
        (b"\xff", "not a JSON record"),
        (b'{"a":' + b"[" * 60000, "not a JSON record"),
        (b"{" + b" " * 70000 + b"}", "at most"),
    ],
)
def test_only_canonical_records_are_read(line: bytes, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        decode(line)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("target", "rate", "steps"),
    [
        *((8.0, 1.0, 200), (4.0, 0.4, 50), (2.0, 0.02, 500)),
        (60.0, 0.3, 40),  # by an order between 1 and 2
        (0.05, 0.01, 300),  # by one of the longest
        (0.011, 1.0, 4),  # the largest noise that is tried is barely enough
        (0.0125, 0.9, 4),
    ],
)
def test_calibrated_noise_fits_the_budget_and_a_tick_less_does_not(
    target: float, rate: float, steps: int
) -> None:
    sigma = calibrate_noise(epsilon=target, delta=1e-5, sample_rate=rate, steps=steps)
    assert sigma == round(sigma, 4)
    assert epsilon([PoissonSampledGaussianEvent(sigma, rate, steps)], 1e-5) <= target
    assert epsilon([PoissonSampledGaussianEvent(sigma - 1e-4, rate, steps)], 1e-5) > target


@pytest.mark.slow
@given(
    target=st.floats(0.05, 80.0),
    rate=st.floats(1e-3, 0.9),
    steps=st.integers(1, 300),
    delta=st.sampled_from([1e-9, 1e-5, 1e-2]),
)
@settings(deadline=None, max_examples=5)
def test_calibrated_noise_of_any_plan_fits_and_a_tick_less_does_not(
    target: float, rate: float, steps: int, delta: float
) -> None:
    def fits(sigma: float) -> bool:
        return epsilon([PoissonSampledGaussianEvent(sigma, rate, steps)], delta) <= target

    try:
        found = calibrate_noise(epsilon=target, delta=delta, sample_rate=rate, steps=steps)
    except PlanError:
        assert not fits(1000.0)
        return
    assert fits(found)
    assert found == 0.3 or not fits(found - 1e-4)


@pytest.mark.slow
def test_noise_is_found_where_divergences_underflow() -> None:
    # At most orders they round to 0, and the few others bound nothing there.
    sigma = calibrate_noise(epsilon=0.001, delta=1e-5, sample_rate=1e-8, steps=100)
    assert epsilon([PoissonSampledGaussianEvent(sigma, 1e-8, 100)], 1e-5) <= 0.001
    assert epsilon([PoissonSampledGaussianEvent(sigma - 1e-4, 1e-8, 100)], 1e-5) > 0.001


@pytest.mark.parametrize("least", range(3, 21))
@pytest.mark.parametrize("guess", [3, 4, 9, 19, 20])
def test_the_smallest_number_that_fits_is_found_from_any_guess(least: int, guess: int) -> None:
    asked = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number >= least

    assert _find_least_fitting(fits, 3, guess, 20) == least
    assert all(3 <= number <= 20 for number in asked)
    assert len(asked) <= (2 if guess == least else 10)


def test_calibration_returns_the_noise_of_the_closed_form_anchors() -> None:
    # Epsilons of the anchors are rounded up in the seventh digit; one tick less noise costs 1e-4
    # more.
    for sigma, steps, exact in [(8.0, 100, 5.679587), (2.0, 20, 11.480023)]:
        calibrated = calibrate_noise(epsilon=exact, delta=1e-5, sample_rate=1.0, steps=steps)
        assert calibrated == pytest.approx(sigma, abs=1e-9)


def test_a_budget_that_no_noise_can_meet_is_refused_with_advice() -> None:
    with pytest.raises(PlanError, match="fewer steps or a larger epsilon"):
        calibrate_noise(epsilon=1e-3, delta=1e-5, sample_rate=1.0, steps=1_000_000)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PlanError, match="epsilon"):
            calibrate_noise(epsilon=bad, delta=1e-5, sample_rate=1.0, steps=10)


@given(budget=st.floats(0.01, 30.0), rate=st.sampled_from([0.02, 0.4, 1.0]))
@settings(deadline=None)
def test_max_repeats_is_the_last_count_that_fits(budget: float, rate: float) -> None:
    once = cost_of([PoissonSampledGaussianEvent(2.5, rate, 1)])
    steps = max_repeats(once, budget=budget, delta=1e-5)

    def cost(count: int) -> float:
        return epsilon([PoissonSampledGaussianEvent(2.5, rate, count)] if count else [], 1e-5)

    assert cost(steps) <= budget < cost(steps + 1)


def test_a_budget_of_zero_pays_for_no_step() -> None:
    once = cost_of([PoissonSampledGaussianEvent(1000.0, 1.0, 1)])
    assert max_repeats(once, budget=0.0, delta=0.9) == 0
    with pytest.raises(PlanError, match="epsilon"):
        max_repeats(once, budget=math.nan, delta=1e-5)


@pytest.mark.slow
@needs_library
def test_the_independent_bracket_equals_that_of_the_golden_grid() -> None:
    rows = [row for row in golden_sample() if 1 < row.pld_lower < 8][::24]
    assert len(rows) >= 2
    for row in rows:
        lower, upper = verify.pld_bracket([row.event], row.delta)
        assert lower == pytest.approx(row.pld_lower, abs=2e-3)
        assert upper == pytest.approx(row.pld_upper, abs=2e-3)
        assert lower <= epsilon([row.event], row.delta)


@pytest.mark.ci
@needs_library
def test_the_independent_bracket_contains_the_exact_value_and_detects_one_percent() -> None:
    exact = 5.67958686  # sigma 8, T 100, delta 1e-5, closed form
    lower, upper = verify.pld_bracket([PoissonSampledGaussianEvent(8.0, 1.0, 100)], 1e-5)
    assert lower <= exact <= upper <= lower + 0.01
    less_noise, _ = verify.pld_bracket([PoissonSampledGaussianEvent(8.0 * 0.99, 1.0, 100)], 1e-5)
    assert less_noise - 1e-3 > exact


@pytest.mark.ci
@needs_library
def test_two_libraries_agree_on_integer_orders_for_mixed_events() -> None:
    events: list[Event] = [
        PoissonSampledGaussianEvent(1.0, 0.02, 30),
        ComposedEvent(
            (PoissonSampledGaussianEvent(2.5, 0.4, 7), PoissonSampledGaussianEvent(2.5, 1.0, 2))
        ),
    ]
    theirs = verify.rdp_epsilon(events, 1e-5)
    assert theirs == pytest.approx(rdp_epsilon(events, 1e-5, verify.INTEGER_ORDERS), rel=1e-9)
    assert verify.rdp_epsilon([*events, PureDpEvent(1.0, 1)], 1e-5) is None
    assert verify.rdp_epsilon([], 1e-5) == 0


@pytest.mark.ci
@needs_library
def test_the_bracket_of_pure_releases_is_that_of_randomized_response() -> None:
    # One bit kept with probability e^eps / (1 + e^eps): delta(e') = (e^eps - e^e') / (1 + e^eps).
    eps, delta = 1.2345, 0.01
    exact = math.log(math.exp(eps) - delta * (1 + math.exp(eps)))
    lower, upper = verify.pld_bracket([PureDpEvent(eps, 1)], delta)
    assert exact - 2e-4 <= lower <= exact <= upper <= exact + 2e-4
    many = [PureDpEvent(0.05, 1000)]  # composed by RDP, so the sum of epsilons is not the bound
    assert verify.pld_bracket(many, 1e-5).lower <= epsilon(many, 1e-5)
    mixed: list[Event] = [PureDpEvent(1.0, 2), PoissonSampledGaussianEvent(2.5, 0.4, 20)]
    assert verify.pld_bracket(mixed, 1e-5).lower <= epsilon(mixed, 1e-5)


@needs_library
def test_a_delta_too_small_for_numeric_composition_is_an_error_and_not_infinity() -> None:
    with pytest.raises(PlanError, match="Use the RDP value"):
        verify.pld_bracket([PoissonSampledGaussianEvent(4.0, 1.0, 10)], 1e-15)
    with pytest.raises(PlanError, match="unprotected"):
        verify.pld_bracket([NonPrivateEvent("F")], 1e-5)
    assert verify.pld_bracket([], 1e-5) == (0, 0)


def test_without_the_second_library_the_error_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify, "available", lambda: False)
    with pytest.raises(AccountingError, match="pip install dp-accounting"):
        verify.pld_bracket([PoissonSampledGaussianEvent(4.0, 1.0, 10)], 1e-5)


def test_events_are_written_with_integer_counts_and_exact_reals() -> None:
    text = json.dumps(event_to_json(PoissonSampledGaussianEvent(4.0, 16 / 34, 10)))
    assert '"steps": 10' in text
    assert (16 / 34).hex() in text


def test_three_blocks_of_one_batch_and_three_batches_cost_their_divergence() -> None:
    # At order 2 the divergence of one sampled release with noise s is ln(1 + q^2 (e^(1/s^2) - 1))
    # (arXiv:1908.10530, eq. 6). Three blocks of one batch see each row three times or not at all:
    # 3 / s^2 in the exponent. Three batches are three releases: their divergences add up.
    s, q = 2.0, 16 / 34
    two = ORDERS.index(2.0)
    one_batch = cost_of([PoissonSampledGaussianEvent(s / math.sqrt(3), q, 1)])
    assert one_batch.rdp[two] == pytest.approx(math.log1p(q**2 * math.expm1(3 / s**2)))
    fresh = cost_of([PoissonSampledGaussianEvent(s, q, 3)])
    assert fresh.rdp[two] == pytest.approx(3 * math.log1p(q**2 * math.expm1(1 / s**2)))
    composed = cost_of(
        [
            ComposedEvent(
                (PoissonSampledGaussianEvent(s, q, 1), PoissonSampledGaussianEvent(s, q, 2))
            )
        ]
    )
    assert composed.rdp[two] == pytest.approx(fresh.rdp[two])
    assert one_batch.rdp[two] > 1.05 * fresh.rdp[two]  # the control: they differ
