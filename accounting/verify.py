"""Epsilon by an independent library, dp-accounting (the extra ``verify``).

It composes privacy loss distributions: a pessimistic one gives an upper bound, an optimistic one a
lower bound. A claimed epsilon below the lower bound is wrong. Numeric composition needs events that
were all fixed beforehand. A pure epsilon-DP release is represented by its worst case, randomized
response.
"""

import importlib.util
import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from accounting.errors import AccountingError, PlanError
from accounting.events import (
    Event,
    NonPrivateEvent,
    PoissonSampledGaussianEvent,
    PureDpEvent,
    check_delta,
    leaf_events,
)

#: Integer orders at which two libraries must agree to rounding; fractional ones differ, because
#: dp-accounting's are an upper bound of the divergence.
INTEGER_ORDERS: tuple[float, ...] = tuple(float(order) for order in range(2, 257))

_MIN_DELTA = 1e-12  # the tails are cut at e^-50; far below this delta epsilon becomes infinite
_INTERVAL = 1e-4  # width of the grid of privacy losses

# Adjacency as in accounting.events; the program prints unrounded numbers.
_PROGRAM = """\
import dp_accounting as dp  # pip install dp-accounting

# Everything released about one record; neighbours: it takes part, or it does not.
released = dp.ComposedDpEvent([{released}])
accountant = dp.pld.PLDAccountant(value_discretization_interval={interval})
epsilon = accountant.compose(released).get_epsilon({delta}){added}
print("epsilon at most", float(epsilon), "at delta {delta}")
"""
# If every release is pure, the sum needs no accountant: see the comment in the program.
_PURE_PROGRAM = """\
import dp_accounting as dp  # pip install dp-accounting

# Everything released about one record; neighbours: it takes part, or it does not. Each release is
# a count with Laplace noise of scale 1 / epsilon, and epsilon-DP with delta 0. LaplaceDpEvent is
# of the continuous law; the noise here is whole numbers from the discrete law, which is epsilon-DP
# as well. At delta 0 both cost the same: epsilons add up. Do not ask an accountant for epsilon at
# a delta above 0: there the continuous law costs less than the discrete one.
released = dp.ComposedDpEvent([
{released}])
epsilon = sum(many.count / many.event.noise_multiplier for many in released.events)
print("epsilon at most", float(epsilon), "at delta 0")
"""
_PURE_COMMENT = """\
# dp-accounting has no event for a release that is epsilon-DP with delta 0. Each adds its epsilon
# (basic composition): count * epsilon."""


#: Each kind of release with a finite cost, and its count.
Counted = tuple[tuple[PoissonSampledGaussianEvent | PureDpEvent, int], ...]


class Bracket(NamedTuple):
    """A lower and an upper bound on the true epsilon of a list of events."""

    lower: float
    upper: float


def available() -> bool:
    """Return whether dp-accounting is installed."""
    return importlib.util.find_spec("dp_accounting") is not None


def rdp_epsilon(events: Iterable[Event], delta: float) -> float | None:
    """Return epsilon by dp-accounting's Renyi accountant at ``INTEGER_ORDERS``; 0 without events.

    None when an event is not a sampled Gaussian: the library has no event for any pure epsilon-DP
    release, and its LaplaceDpEvent costs less than discrete noise.

    Raises:
        AccountingError: dp-accounting is not installed.
        PlanError: delta is out of range, or an event is unprotected.
    """
    check_delta(delta)
    _check_library()
    return _compute_rdp_epsilon(_count_events(events), delta)


@lru_cache(maxsize=128)  # agents often spend the same amount
def _compute_rdp_epsilon(counted: Counted, delta: float) -> float | None:
    import dp_accounting

    accountant = dp_accounting.rdp.RdpAccountant(orders=list(INTEGER_ORDERS))
    for leaf, count in counted:
        if not isinstance(leaf, PoissonSampledGaussianEvent):
            return None
        gaussian = dp_accounting.GaussianDpEvent(leaf.noise_multiplier)
        sampled = dp_accounting.PoissonSampledDpEvent(leaf.sample_rate, gaussian)
        accountant.compose(sampled, count * leaf.steps)
    return float(accountant.get_epsilon(delta)) if counted else 0.0


def pld_bracket(events: Iterable[Event], delta: float) -> Bracket:
    """Return a certified lower and upper bound on epsilon by privacy loss distributions.

    The lower bound is too low by up to half a grid cell for each step.

    Args:
        events: no unprotected ones; none give (0, 0).
        delta: at least 1e-12, below 1.

    Raises:
        AccountingError: dp-accounting is not installed.
        PlanError: delta is out of range or too small, or an event is unprotected.
    """
    _check_numeric_delta(delta)
    _check_library()
    counted = _count_events(events)
    if not counted:
        return Bracket(0.0, 0.0)
    bounds = [_compose(counted, pessimistic, delta) for pessimistic in (False, True)]
    if not all(map(math.isfinite, bounds)):
        raise PlanError(f"numeric composition found no finite epsilon at delta {delta:g}")
    return Bracket(*bounds)


def dp_event_source(events: Iterable[Event], delta: float) -> str:
    """Return a short Python program that computes the same epsilon with dp-accounting alone.

    Equal releases are counted together. For pure releases alone the program prints the sum, at
    delta 0; otherwise the upper bound of :func:`pld_bracket`, plus the epsilons of pure releases,
    for which there is no DpEvent. Arguments and errors as in :func:`pld_bracket`.

    # doctest: +ELLIPSIS
    >>> print(dp_event_source([PoissonSampledGaussianEvent(4.0, 0.5, 10)] * 3, 1e-5))
    import dp_accounting as dp ...
    <BLANKLINE>
    # Everything ...
    released = dp.ComposedDpEvent([
        dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.5, dp.GaussianDpEvent(4.0)), 30),
    ])
    ...
    """
    _check_numeric_delta(delta)
    noisy: Counter[str] = Counter()
    pure: Counter[float] = Counter()
    for leaf, count in _count_events(events):
        match leaf:
            case PoissonSampledGaussianEvent(sigma, 1.0, steps):
                noisy[f"dp.GaussianDpEvent({sigma!r})"] += count * steps
            case PoissonSampledGaussianEvent(sigma, rate, steps):
                gaussian = f"dp.GaussianDpEvent({sigma!r})"
                noisy[f"dp.PoissonSampledDpEvent({rate!r}, {gaussian})"] += count * steps
            case PureDpEvent(epsilon, repeats):
                pure[epsilon] += count * repeats
    if pure and not noisy:
        lines = (
            f"    dp.SelfComposedDpEvent(dp.LaplaceDpEvent({1 / epsilon!r}), {n}),\n"
            for epsilon, n in pure.items()
        )
        return _PURE_PROGRAM.format(released="".join(lines))
    released = "".join(f"    dp.SelfComposedDpEvent({event}, {n}),\n" for event, n in noisy.items())
    pure_sum = " + ".join(f"{n} * {epsilon!r}" for epsilon, n in pure.items())
    return _PROGRAM.format(
        released=f"\n{released}" if released else "",
        added=f"\n{_PURE_COMMENT}\nepsilon += {pure_sum}" if pure_sum else "",
        delta=float(delta),
        interval=_INTERVAL,
    )


@lru_cache(maxsize=128)  # agents often spend the same amount, and card and audit both ask
def _compose(counted: Counted, pessimistic: bool, delta: float) -> float:
    total: Any = None
    for leaf, count in counted:
        match leaf:
            case PoissonSampledGaussianEvent(_, _, repeats):
                loss = _build_gaussian_loss(leaf, pessimistic)
            case PureDpEvent(epsilon, repeats):
                loss = _build_pure_loss(epsilon, pessimistic)
        loss = loss.self_compose(count * repeats)
        total = loss if total is None else total.compose(loss)
    return float(total.get_epsilon_for_delta(delta))


def _build_gaussian_loss(event: PoissonSampledGaussianEvent, pessimistic: bool) -> Any:
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        event.noise_multiplier,
        sampling_prob=event.sample_rate,
        pessimistic_estimate=pessimistic,
        value_discretization_interval=_INTERVAL,
        use_connect_dots=pessimistic,  # connect-the-dots exists for upper bounds only
    )


def _build_pure_loss(epsilon: float, pessimistic: bool) -> Any:
    """Represent by randomized response, with epsilon rounded to the grid: up for an upper bound,
    else down."""
    from dp_accounting.pld import privacy_loss_distribution

    cell = (math.ceil if pessimistic else math.floor)(epsilon / _INTERVAL)
    truth = 1 / (1 + math.exp(-cell * _INTERVAL))
    masses = {cell: truth, -cell: 1 - truth} if cell else {0: 1.0}
    return privacy_loss_distribution.PrivacyLossDistribution.create_from_rounded_probability(
        masses, 0.0, _INTERVAL, pessimistic_estimate=pessimistic
    )


def _count_events(events: Iterable[Event]) -> Counted:
    counted: Counter[PoissonSampledGaussianEvent | PureDpEvent] = Counter()
    for leaf in (leaf for event in events for leaf in leaf_events(event)):
        if isinstance(leaf, NonPrivateEvent):
            raise PlanError(f"an unprotected read ({leaf.reason}) has no finite epsilon")
        counted[leaf] += 1
    return tuple(counted.items())


def _check_numeric_delta(delta: float) -> None:
    check_delta(delta)
    if delta < _MIN_DELTA:
        raise PlanError(
            f"delta {delta:g} is below {_MIN_DELTA:g}, too small for numeric composition. Use the "
            "RDP value."
        )


def _check_library() -> None:
    if not available():
        raise AccountingError(
            "dp-accounting is not installed, so epsilon has no second opinion. "
            "Run: pip install dp-accounting"
        )
