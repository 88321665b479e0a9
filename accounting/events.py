"""Privacy events of labelled rows, one class per kind of release.

Adding or removing a row and replacing it by a null record cost the same under these events
(arXiv:2103.00039, Definition 1.1). Replacing one row by another costs about twice as much and is
not covered. Every number is checked here, because the accountants do not check: Opacus never ends
on sigma = NaN, and its PRV accountant fills the memory on sigma = 0.01.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from accounting.canonical_json import Json, only_keys, read_real, real
from accounting.errors import PlanError

MIN_NOISE_MULTIPLIER = 0.2  # below it the numeric accountants need gigabytes; epsilon is > 100
MAX_NOISE_MULTIPLIER = 1e6
MAX_COUNT = 10_000_000
MAX_PURE_EPSILON = 1000.0
_MAX_PARTS = 64
_MAX_DEPTH = 4


@dataclass(frozen=True)
class PoissonSampledGaussianEvent:
    """Noisy clipped sums, each over a fresh Poisson sample of the rows: DP-SGD, arXiv:1908.10530.

    Args:
        noise_multiplier: noise standard deviation divided by the clip norm, 0.2 to 1e6.
        sample_rate: probability that a row is in a batch, in (0, 1]. 1: the plain Gaussian
        mechanism. steps: number of releases, 1 to 10,000,000.

    >>> PoissonSampledGaussianEvent(noise_multiplier=4.0, sample_rate=0.5, steps=10).steps
    10
    """

    noise_multiplier: float
    sample_rate: float
    steps: int

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        check_sample_rate(self.sample_rate)
        check_count("steps", self.steps)


@dataclass(frozen=True)
class PureDpEvent:
    """``count`` releases (1 to 10,000,000), each epsilon-DP with delta 0; epsilon in (0, 1000]."""

    epsilon: float
    count: int

    def __post_init__(self) -> None:
        name, limit = "epsilon of a pure release", MAX_PURE_EPSILON
        check_real(name, self.epsilon)
        if not 0 < self.epsilon <= limit:
            raise PlanError(f"{name} is {self.epsilon}; give a number above 0, at most {limit:g}")
        check_count("count", self.count)


@dataclass(frozen=True)
class NonPrivateEvent:
    """Rows read without a mechanism; epsilon is infinite. ``reason``: which networks."""

    reason: str

    def __post_init__(self) -> None:
        text = self.reason
        if not isinstance(text, str) or not 0 < len(text) <= 200 or not text.isprintable():
            raise PlanError("an unprotected read needs a reason of 1 to 200 printable characters")


@dataclass(frozen=True)
class ComposedEvent:
    """1 to 64 releases about the same rows, each on fresh randomness; nested at most 4 deep."""

    events: tuple["Event", ...]

    def __post_init__(self) -> None:
        if not isinstance(self.events, tuple) or not 1 <= len(self.events) <= _MAX_PARTS:
            raise PlanError(f"a composed event needs a tuple of 1 to {_MAX_PARTS} events")
        for event in self.events:
            if not isinstance(event, Event):
                raise PlanError(f"{type(event).__name__} is not a kind of event")
        if _depth_of(self) > _MAX_DEPTH:
            raise PlanError(f"composed events are nested more than {_MAX_DEPTH} deep")


LeafEvent = PoissonSampledGaussianEvent | PureDpEvent | NonPrivateEvent
Event = LeafEvent | ComposedEvent


def leaf_events(event: Event) -> tuple[LeafEvent, ...]:
    """Return the leaf events of an event, in order."""
    if isinstance(event, ComposedEvent):
        return tuple(leaf for part in event.events for leaf in leaf_events(part))
    return (event,)


def is_protected(events: Iterable[Event]) -> list[PoissonSampledGaussianEvent | PureDpEvent]:
    """Return the leaf events with a finite cost: all but unprotected reads."""
    leaves = (leaf for event in events for leaf in leaf_events(event))
    return [leaf for leaf in leaves if not isinstance(leaf, NonPrivateEvent)]


def event_to_json(event: Event) -> Json:
    """Return the event as a canonical record; see :mod:`accounting.canonical_json`."""
    match event:
        case PoissonSampledGaussianEvent(sigma, rate, steps):
            numbers = {"noise_multiplier": real(sigma), "sample_rate": real(rate)}
            return {"kind": "sampled_gaussian", **numbers, "steps": steps}
        case PureDpEvent(epsilon, count):
            return {"kind": "pure_epsilon", "epsilon": real(epsilon), "count": count}
        case NonPrivateEvent(reason):
            return {"kind": "unprotected", "reason": reason}
        case ComposedEvent(events):
            return {"kind": "composed", "events": [event_to_json(part) for part in events]}


def event_from_json(record: object) -> Event:
    """Return the event that :func:`event_to_json` wrote.

    Raises:
        PlanError: unknown kind, missing or extra key, or a number out of range.
    """
    if not isinstance(record, dict):
        raise PlanError("an event is not a JSON object")
    match record.get("kind"):
        case "sampled_gaussian":
            only_keys(record, {"kind", "noise_multiplier", "sample_rate", "steps"}, "event")
            sigma, rate = (read_real(record[n], n) for n in ("noise_multiplier", "sample_rate"))
            return PoissonSampledGaussianEvent(sigma, rate, record["steps"])
        case "pure_epsilon":
            only_keys(record, {"kind", "epsilon", "count"}, "event")
            return PureDpEvent(read_real(record["epsilon"], "epsilon"), record["count"])
        case "unprotected":
            only_keys(record, {"kind", "reason"}, "event")
            return NonPrivateEvent(record["reason"])
        case "composed":
            only_keys(record, {"kind", "events"}, "event")
            if not isinstance(record["events"], list):
                raise PlanError("events of a composed event are not a list")
            return ComposedEvent(tuple(event_from_json(part) for part in record["events"]))
        case other:
            raise PlanError(f"unknown kind of event: {str(other)[:40]!r}")


def check_real(name: str, value: object) -> None:
    """Raise PlanError unless the value is a finite number (not a bool or a string)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        hint = " Write 1.0e-3, not 1e-3: YAML reads the latter as text." * isinstance(value, str)
        raise PlanError(f"{name} is {value!r:.40}; it must be a number.{hint}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an int beyond the range of floats
        finite = False
    if not finite:
        raise PlanError(f"{name} is {value!r:.40}; it must be finite")


def check_noise_multiplier(value: float) -> None:
    """Raise PlanError unless 0.2 <= value <= 1e6."""
    check_real("noise_multiplier", value)
    if not MIN_NOISE_MULTIPLIER <= value <= MAX_NOISE_MULTIPLIER:
        raise PlanError(
            f"noise_multiplier is {value}; it must be between {MIN_NOISE_MULTIPLIER} and "
            f"{MAX_NOISE_MULTIPLIER:g}. With less noise epsilon is beyond any use."
        )


def check_sample_rate(value: float) -> None:
    """Raise PlanError unless 0 < value <= 1."""
    check_real("sample_rate", value)
    if not 0 < value <= 1:
        raise PlanError(f"sample_rate is {value}; give the chance, in (0, 1], of a row in a batch")


def check_count(name: str, value: object) -> None:
    """Raise PlanError unless the value is an integer from 1 to 10,000,000."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"{name} is {value!r:.40}; it must be a whole number")
    if not 1 <= value <= MAX_COUNT:
        raise PlanError(f"{name} is out of range; it must be from 1 to {MAX_COUNT:,}")


def check_delta(value: float) -> None:
    """Raise PlanError unless 0 < value < 1."""
    check_real("delta", value)
    if not 0 < value < 1:
        raise PlanError(f"delta is {value}; give a number above 0, and well below 1 / rows")


def _depth_of(event: Event) -> int:
    return 1 + max(map(_depth_of, event.events)) if isinstance(event, ComposedEvent) else 0
