"""The epsilon of a list of releases, and the noise that a budget needs.

Enforcement uses Renyi DP from Opacus: one vector of orders per event, added up, converted once. It
is valid when later releases depend on earlier ones (arXiv:1605.08294, arXiv:2103.01379); where
their noise does, see ``Cost.account_epsilon``.

    Poisson-sampled Gaussian            Opacus compute_rdp; arXiv:1908.10530
    pure epsilon-DP release             min(order * eps^2 / 2, eps); arXiv:1605.02065, Prop. 1.4
    RDP -> (epsilon, delta)             arXiv:2004.00010, Prop. 12
    Gaussian without sampling (q = 1)   exact: arXiv:1905.02383, Corollary 2.13

Opacus' PRV accountant gives a tighter epsilon for a plan fixed beforehand. Its Gaussian-DP
accountant, a central limit approximation, can report less than a certified lower bound and is not
used. Opacus and scipy.optimize load slowly and are imported where they are needed.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from accounting.errors import PlanError
from accounting.events import (
    MAX_COUNT,
    Event,
    LeafEvent,
    NonPrivateEvent,
    PoissonSampledGaussianEvent,
    PureDpEvent,
    check_count,
    check_delta,
    check_real,
    check_sample_rate,
    leaf_events,
)

#: Renyi orders, version "v1" in a ledger's plan line. Opacus' orders end at 63, where epsilon
#: cannot fall below 0.103 at delta 1e-5; hence the large ones.
ORDERS: tuple[float, ...] = (
    *(order / 10 for order in range(11, 110)),
    *(float(order) for order in (*range(11, 65), 80, 96, 128, 192, 256, 384, 512, 768, 1024)),
)
_ORDERS = np.array(ORDERS)

#: Leaf events of a visit, counts in lowest terms: costs of one kind are multiples of one cost.
Kind = tuple[tuple[LeafEvent, int], ...]

_PRV_LIMIT = 40.0  # above this RDP epsilon the numeric accountant needs gigabytes
_PRV_MIN_DELTA = 1e-10
_CALIBRATION_RANGE = (0.3, 1000.0)  # search range of noise multipliers
_TICKS = 10_000  # of a noise multiplier of 1: four decimals
#: First orders of the calibration. Integers, because fractional orders are sums of many more terms.
_FEW_ORDERS = tuple(map(float, (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)))


@dataclass(frozen=True, eq=False)
class Cost:
    """The cost of a set of releases, in an additive form.

    ``rdp`` is the Renyi divergence at each of ``ORDERS`` (inf where a read was unprotected),
    ``mu_squared`` the sum of sigma^-2 over full-batch Gaussian steps, ``pure`` that of epsilon over
    pure releases; ``sampled``: a Gaussian step was on a sample (q < 1), or a read unprotected.
    ``kinds``: of the events, in order; ``as_full``: mu^2 of full-batch steps that cost no less.
    """

    rdp: NDArray[np.float64]
    mu_squared: float
    pure: float
    sampled: bool
    kinds: tuple[Kind, ...] = ()
    as_full: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.rdp + other.rdp, self.mu_squared + other.mu_squared, self.pure + other.pure,
            self.sampled or other.sampled, tuple(dict.fromkeys((*self.kinds, *other.kinds))),
            self.as_full + other.as_full,
        )  # fmt: skip

    def times(self, count: int) -> "Cost":
        """Return the cost of ``count`` >= 1 repetitions."""
        rdp, mu_squared, pure = count * self.rdp, count * self.mu_squared, count * self.pure
        return Cost(rdp, mu_squared, pure, self.sampled, self.kinds, count * self.as_full)

    def at_most(self, other: "Cost") -> bool:
        """Return whether this costs no more than the other at every order."""
        slack = 1 + 1e-12  # the same releases added up in another order differ by rounding
        return bool(np.all(self.rdp <= other.rdp * slack))

    def summable_epsilon(self, delta: float) -> float:
        """Return an epsilon that may be summed over releases at one delta, as an upper bound.

        Renyi values with a conversion term >= 0, since the composed cost at the smallest of the
        best orders is at most their sum. Exact Gaussian values may not be added up: each can be 0.
        """
        if delta == 0 or not self.rdp.any():
            return self.epsilon(delta)
        best = float((self.rdp + np.maximum(_compute_conversion(delta, _ORDERS), 0.0)).min())
        return min(best, self.pure) if self.is_pure else best

    @property
    def is_pure(self) -> bool:
        """Whether it contains only pure releases (an empty set is pure as well)."""
        return not self.sampled and self.mu_squared == 0

    def epsilon(self, delta: float) -> float:
        """Return epsilon at this delta, >= 0; inf if a read was unprotected.

        Valid for releases that were fixed beforehand. At delta 0 it is the sum over pure releases,
        and inf if there are others.
        """
        if delta == 0:
            return self.pure if self.is_pure else math.inf
        check_delta(delta)
        if not self.rdp.any():
            return 0.0
        by_rdp = rdp_to_epsilon(self.rdp, delta)
        if self.sampled:
            return by_rdp
        if self.mu_squared == 0:
            return min(by_rdp, self.pure)  # plain sum, delta 0
        if self.pure == 0:
            return min(by_rdp, gaussian_epsilon(math.sqrt(self.mu_squared), delta))
        return by_rdp

    def account_epsilon(self, delta: float, budget: float) -> float:
        """Return epsilon for an account that never lets it exceed ``budget``.

        Noise may be chosen adaptively, so the first kind fixes one rule for every path:

        - One kind: the order that fits at the largest count that fits, fits on every path.
        - Others too: that order of the first kind counts (Renyi filter, arXiv:2103.01379).
        - First kind full batches: all as full batches (Gaussian filter, arXiv:2210.17520).
        - First kind pure, so that its sum holds: every order at delta / number of orders.
        """
        if delta == 0 or len(self.kinds) < 2:
            return self.epsilon(delta)
        first_cost = _cost_of_kind(self.kinds[0])
        if first_cost.is_pure:
            return self.pure if self.is_pure else rdp_to_epsilon(self.rdp, delta / len(ORDERS))
        if first_cost.sampled or first_cost.pure:
            best = _find_best_order(self.kinds[0], delta, budget)
            return max(0.0, float(self.rdp[best] + _compute_conversion(delta, _ORDERS)[best]))
        exact = math.isfinite(self.as_full)
        return gaussian_epsilon(math.sqrt(self.as_full), delta) if exact else math.inf


ZERO_COST = Cost(np.zeros(len(ORDERS)), 0.0, 0.0, False)


def cost_of(events: Iterable[Event]) -> Cost:
    """Return the cost of all these events about the same rows."""
    return sum((_compute_cost(event) for event in events), ZERO_COST)


def epsilon(events: Iterable[Event], delta: float) -> float:
    """Return the epsilon of the composition of these events; 0 if there are none.

    Valid for events fixed beforehand; inf if one is unprotected. PlanError unless 0 < delta < 1.

    >>> round(epsilon([PoissonSampledGaussianEvent(4.0, 1.0, steps=20)], 1e-5), 4)
    4.9833
    """
    check_delta(delta)
    return cost_of(events).epsilon(delta)


def rdp_epsilon(events: Iterable[Event], delta: float, orders: Sequence[float] = ORDERS) -> float:
    """Return epsilon by Renyi DP alone, at the caller's orders (each > 1); for checks."""
    check_delta(delta)
    order_tuple = tuple(orders)
    leaves = (leaf for event in events for leaf in leaf_events(event))
    rdp = sum((_rdp(leaf, order_tuple) for leaf in leaves), np.zeros(len(order_tuple)))
    return rdp_to_epsilon(rdp, delta, order_tuple) if rdp.any() else 0.0


def rdp_to_epsilon(
    rdp: NDArray[np.float64], delta: float, orders: Sequence[float] = ORDERS
) -> float:
    """Convert Renyi divergences at ``orders`` to epsilon. arXiv:2004.00010, Proposition 12."""
    a = _ORDERS if orders is ORDERS else np.asarray(orders)
    return max(0.0, float((rdp + _compute_conversion(delta, a)).min()))


def _compute_conversion(delta: float, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the conversion term at each order; negative at orders above about 0.37 / delta."""
    terms = np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return np.asarray(terms, dtype=np.float64)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon of a Gaussian mechanism with sensitivity / noise = mu > 0.

    Solves delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), arXiv:1905.02383, Corollary 2.13.
    T steps at q = 1 with noise sigma are one mechanism with mu = sqrt(T)/sigma.

    >>> round(gaussian_epsilon(math.sqrt(100) / 8, 1e-5), 6)
    5.679587
    """

    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    def log_delta_excess(eps: float) -> float:
        first = float(log_ndtr(mu / 2 - eps / mu))
        second = eps + float(log_ndtr(-mu / 2 - eps / mu))  # < first
        return first + math.log(-math.expm1(second - first)) - math.log(delta)

    if log_delta_excess(0.0) <= 0:
        return 0.0
    upper = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # by the RDP of order best
    return float(brentq(log_delta_excess, 0.0, upper, xtol=1e-12, rtol=1e-14))


def prv_epsilon(events: Iterable[Event], delta: float) -> float | None:
    """Return a tighter epsilon by numeric composition (Opacus PRV, arXiv:2106.02848), or None.

    Valid only for events fixed before the first one ran. None without events, if one is not a
    subsampled Gaussian (q < 1), or if the computation needs gigabytes or does not converge.
    """
    check_delta(delta)
    steps: dict[tuple[float, float], int] = {}
    for leaf in (leaf for event in events for leaf in leaf_events(event)):
        if not isinstance(leaf, PoissonSampledGaussianEvent) or leaf.sample_rate == 1:
            return None
        key = (leaf.noise_multiplier, leaf.sample_rate)
        steps[key] = steps.get(key, 0) + leaf.steps
    total = [PoissonSampledGaussianEvent(*key, count) for key, count in steps.items()]
    if not total or delta < _PRV_MIN_DELTA or rdp_epsilon(total, delta) > _PRV_LIMIT:
        return None
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(sigma, rate, count) for (sigma, rate), count in steps.items()]
    with warnings.catch_warnings():
        # Opacus sizes its grid by RDP at few orders and warns that more would make it smaller.
        warnings.filterwarnings("ignore", message="Optimal order is the", category=UserWarning)
        try:
            return max(0.0, float(accountant.get_epsilon(delta)))  # Opacus can return less than 0
        except (ArithmeticError, RuntimeError, ValueError):  # "discrete mean differs" and similar
            return None


def calibrate_noise(*, epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """Return the least noise multiplier, rounded up to 4 decimals, whose steps fit the budget.

    Args:
        epsilon: the budget, > 0. delta: in (0, 1).
        sample_rate: in (0, 1]. steps: 1 to 10,000,000, over the whole run.

    Raises:
        PlanError: a number is out of range, or no noise between 0.3 and 1000 fits.

    >>> calibrate_noise(epsilon=4.9834, delta=1e-5, sample_rate=1.0, steps=20)
    4.0
    """
    from scipy.optimize import brentq

    check_delta(delta)
    check_real("epsilon", epsilon)
    check_sample_rate(sample_rate)
    check_count("steps", steps)

    def make_event(sigma: float) -> PoissonSampledGaussianEvent:
        return PoissonSampledGaussianEvent(sigma, sample_rate, steps)

    def fits(ticks: int) -> bool:
        return _compute_cost(make_event(ticks / _TICKS)).epsilon(delta) <= epsilon

    def compute_epsilon(sigma: float, orders: tuple[float, ...]) -> float:
        if sample_rate == 1:
            return _compute_cost(make_event(sigma)).epsilon(delta)  # by the formula, without orders
        return rdp_to_epsilon(_rdp(make_event(sigma), orders), delta, orders)

    def find_least_noise(orders: tuple[float, ...], high: float) -> float:
        """Return nearly the least sufficient noise in ``min_noise..high`` by these orders."""

        def log_excess(log_sigma: float) -> float:  # nearly linear: Brent takes ~8 calls
            return math.log(max(compute_epsilon(math.exp(log_sigma), orders), 1e-300) / epsilon)

        if log_excess(math.log(min_noise)) <= 0:
            return min_noise
        if log_excess(math.log(high)) >= 0:
            return high
        return math.exp(brentq(log_excess, math.log(min_noise), math.log(high), xtol=1e-7))

    min_noise, max_noise = _CALIBRATION_RANGE
    first_tick, last_tick = round(min_noise * _TICKS), round(max_noise * _TICKS)
    # All orders take 0.1 s, a few take 0.01 s and never give too small an epsilon: the few find the
    # region, all of them decide at the end.
    if epsilon <= 0 or not (compute_epsilon(max_noise, _FEW_ORDERS) <= epsilon or fits(last_tick)):
        raise PlanError(
            f"epsilon {epsilon:g} at delta {delta:g} cannot pay for {steps} steps at sample rate "
            f"{sample_rate:g}, even with noise {max_noise:g}. Plan fewer steps or a larger epsilon."
        )
    noise = find_least_noise(_FEW_ORDERS, max_noise)
    best = int((_rdp(make_event(noise), ORDERS) + _compute_conversion(delta, _ORDERS)).argmin())
    noise = find_least_noise(ORDERS[max(0, best - 2) : best + 3], noise)
    return _find_least_fitting(fits, first_tick, math.ceil(noise * _TICKS), last_tick) / _TICKS


def _find_least_fitting(fits: Callable[[int], bool], first: int, guess: int, last: int) -> int:
    """Return the least number in first..last that fits, if all larger ones fit too.

    Calls ``fits`` twice if the guess is right, and a few times if it is close.
    """
    if fits(guess):
        step, fitting, failing = 1, guess, guess - 1
        while failing >= first and fits(failing):
            step, fitting = 2 * step, failing
            failing = fitting - step
        failing = max(failing, first - 1)
    else:
        step, failing, fitting = 1, guess, guess + 1
        while fitting < last and not fits(fitting):
            step, failing = 2 * step, fitting
            fitting = failing + step
        fitting = min(fitting, last)
    while fitting - failing > 1:
        middle = (fitting + failing) // 2
        fitting, failing = (middle, failing) if fits(middle) else (fitting, middle)
    return fitting


def max_repeats(
    once: Cost, *, budget: float, delta: float, spent: Cost = ZERO_COST, began: float | None = None
) -> int:
    """Return how often a cost fits a budget (``began`` at first) after ``spent``, at most 10^7."""
    check_real("epsilon", budget)

    def exceeds(count: int) -> bool:
        after = spent + once.times(count)
        return budget <= 0 or not after.account_epsilon(delta, began or budget) <= budget

    return _find_least_fitting(exceeds, 1, 1, MAX_COUNT + 1) - 1


@lru_cache(maxsize=256)
def _compute_cost(event: Event) -> Cost:
    total = sum((_cost_of_leaf(leaf) for leaf in leaf_events(event)), ZERO_COST)
    return replace(total, kinds=(_kind_of(event),))


def _kind_of(event: Event) -> Kind:
    counts: Counter[LeafEvent] = Counter()
    for leaf in leaf_events(event):
        match leaf:
            case PoissonSampledGaussianEvent(steps=steps):
                counts[replace(leaf, steps=1)] += steps
            case PureDpEvent(count=count):
                counts[replace(leaf, count=1)] += count
            case NonPrivateEvent():
                counts[leaf] += 1
    divisor = math.gcd(*counts.values())
    return tuple(sorted(((leaf, n // divisor) for leaf, n in counts.items()), key=repr))


def _cost_of_kind(kind: Kind) -> Cost:
    return sum((_cost_of_leaf(leaf).times(count) for leaf, count in kind), ZERO_COST)


@lru_cache(maxsize=256)
def _find_best_order(kind: Kind, delta: float, budget: float) -> int:
    """Return the index in ``ORDERS`` of the order that fits at the largest count that fits."""
    cost = _cost_of_kind(kind)
    max_count = max(1, max_repeats(cost, budget=budget, delta=delta))
    return int((max_count * cost.rdp + _compute_conversion(delta, _ORDERS)).argmin())


def _cost_of_leaf(leaf: LeafEvent) -> Cost:
    rdp = _rdp(leaf, ORDERS)
    match leaf:
        case PoissonSampledGaussianEvent(sigma, 1.0, steps):
            return Cost(rdp, steps / sigma**2, 0.0, sampled=False, as_full=steps / sigma**2)
        case PoissonSampledGaussianEvent(sigma, _, steps):  # subsampling only lowers the cost
            return Cost(rdp, 0.0, 0.0, sampled=True, as_full=steps / sigma**2)
        case PureDpEvent(eps, count):  # mu = eps sqrt(pi / 2): Phi(-mu / 2) <= 1 / (1 + e^eps)
            as_full = count * eps**2 * math.pi / 2
            return Cost(rdp, 0.0, eps * count, sampled=False, as_full=as_full)
        case NonPrivateEvent():
            return Cost(rdp, 0.0, 0.0, sampled=True, as_full=math.inf)


def _rdp(leaf: LeafEvent, orders: tuple[float, ...]) -> NDArray[np.float64]:
    match leaf:
        case PoissonSampledGaussianEvent(sigma, rate, steps):
            return steps * _step_rdp(sigma, rate, orders)
        case PureDpEvent(eps, count):
            return count * np.minimum(np.asarray(orders) * eps**2 / 2, eps)
        case NonPrivateEvent():
            return np.full(len(orders), np.inf)


@lru_cache(maxsize=256)
def _step_rdp(sigma: float, rate: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    from opacus.accountants.analysis.rdp import compute_rdp

    values = compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=list(orders))
    rdp = np.asarray(values, dtype=np.float64)
    # NaN compares false with everything, so it must become infinite cost, never zero cost.
    return np.where(np.isnan(rdp), np.inf, np.maximum(rdp, 0.0))
