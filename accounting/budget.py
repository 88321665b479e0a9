"""Budgets, and guarantees with the sentence that states their meaning. Numbers are rounded up.

An epsilon is a guarantee only with its unit, adjacency, observer and exclusions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from accounting.errors import PlanError
from accounting.events import check_delta, check_real

Adjacency = Literal["zero_out", "add_remove"]
#: The runs whose messages a guarantee covers.
Span = Literal["this run", "this run and the earlier runs of its account"]

#: What one neighbour differs in: one labelled record, or all labelled records of one person.
Unit = Literal["record", "person"]
#: The phrase for each unit and adjacency.
NEIGHBOUR_WORDS: Mapping[Unit, Mapping[Adjacency, str]] = {
    "record": {
        "zero_out": "replacing one labelled record of that agent by an empty one (counts are "
        "public)",
        "add_remove": "adding or removing one labelled record of that agent",
    },
    "person": {
        "zero_out": "replacing all labelled records of one person at that agent by empty ones "
        "(numbers of persons and of their records are public)",
        "add_remove": "adding or removing all labelled records of one person at that agent",
    },
}
#: The people for whom a guarantee of each unit is weaker.
PEOPLE_NOT_COVERED: Mapping[Unit, str] = {
    "record": "people with more than one record",
    "person": "people with records at more than one agent or under more than one name",
}

NO_GUARANTEE = (
    "NO GUARANTEE: this run is not private. Models trained on the labelled rows left their agents "
    "without noise; nothing is guaranteed for any record."
)


@dataclass(frozen=True)
class Budget:
    """The privacy budget of an agent for each of its labelled rows.

    epsilon: >= 0 and finite; 0: no labelled row is ever read. delta: in (0, 1), well below 1 /
    rows.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_real("epsilon", self.epsilon)
        if self.epsilon < 0:
            raise PlanError(f"epsilon is {self.epsilon}; it must be 0 or more")
        check_delta(self.delta)


@dataclass(frozen=True)
class Guarantee:
    """A guarantee that holds for every support agent. ``str()`` is its full text.

    Args:
        epsilon, delta: of the agent that spent most, or the largest budget if visits were not fixed
            beforehand. delta 0: pure epsilon-DP, for ideal random bits.
        unit: what one neighbour differs in.
        neighbours: relation between neighbouring data sets.
        covers: names of all covered releases.
        rule: "largest agent": one number holds for all because their records, or persons, are
            disjoint.
        span: the runs that the guarantee covers; other runs on the same rows cost more.
    """

    epsilon: float
    delta: float
    unit: Unit
    neighbours: Adjacency
    covers: tuple[str, ...]
    rule: Literal["largest agent"]
    span: Span = "this run"

    def __str__(self) -> str:
        number = f"({round_up(self.epsilon)}, {delta_up(self.delta)})-DP"
        if self.delta == 0:
            epsilon = round_up(self.epsilon).rstrip("0").removesuffix(".")
            number = f"{epsilon}-DP (pure epsilon, delta 0 for ideal random bits)"
        return (
            f"GUARANTEE: for every support agent, all it sends in {self.span} "
            f"({', '.join(self.covers)}) is {number} with respect to "
            f"{NEIGHBOUR_WORDS[self.unit][self.neighbours]}, against an observer of "
            f"all traffic who also controls the server, all query agents and all other support "
            f"agents. Each support agent adds its own noise; no trusted aggregator. "
            f"Not covered: data of query agents, {PEOPLE_NOT_COVERED[self.unit]}, timing and other "
            f"side channels, files on the agent's own disk."
        )


@dataclass(frozen=True)
class Nominal:
    """The nominal epsilon of a scheme without a guarantee. ``str()`` begins by saying so.

    Args:
        epsilon: what the protected part alone would cost. delta: as in :class:`Budget`.
        protect: networks whose gradients got noise. unprotected: networks trained without.
    """

    epsilon: float
    delta: float
    protect: tuple[str, ...]
    unprotected: tuple[str, ...]

    def __str__(self) -> str:
        noisy, others = " and ".join(self.protect), " and ".join(self.unprotected)
        delta = delta_up(self.delta)
        return (
            f"NOMINAL epsilon = {round_up(self.epsilon)} (delta {delta}): this counts "
            f"the noise on the labelled-data gradients of {noisy} as if {others} were fixed public "
            f"networks. {others} are trained on the labelled records without noise and leave the "
            f"agent; the gradients of {noisy} flow through them. There is no "
            f"differential-privacy guarantee for any record."
        )


def round_up(number: float) -> str:
    """Format with four decimals, rounded up.

    >>> round_up(7.61231)
    '7.6124'
    """
    if not math.isfinite(number):
        return str(number)
    text = f"{number:.4f}"
    return text if float(text) >= number else f"{math.nextafter(number + 5e-5, math.inf):.4f}"


def delta_up(delta: float) -> str:
    """Format with six digits, or with all if six would round down.

    >>> delta_up(1e-5), delta_up(1.0000004e-5)
    ('1e-05', '1.0000004e-05')
    """
    text = f"{delta:g}"
    return text if float(text) >= delta else repr(delta)
