"""Who gets which rows: six rules, each a small frozen class with one method.

All of them give every row to exactly one agent, and one can be told to leave rows over. Sources:
Dirichlet per class is Hsu et al. 2019 (arXiv:1909.06335), per agent FedSEAL's (Bian et al.,
arXiv:2110.07829); round robin is Fan et al., section 5.5; the imbalance table is FedMatch's
(the authors' released code).
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from privssl.errors import DataError
from privssl.settings.schema import PartitionName

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Partition(Protocol):
    """A rule that hands out rows by their class."""

    def split(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        """Hand out all rows.

        Args:
            labels: (N,) class of each row, >= 0. The rule sees no more of a row.
            agents: how many, >= 1 and at most N.
            rng: the only randomness.

        Returns:
            One sorted array of row numbers per agent: disjoint, together 0..N-1 unless the rule
            says how many rows it hands out. Rules by class may leave an agent without rows when a
            class has fewer rows than owners.

        Raises:
            DataError: more agents than rows, or a rule that cannot fit these classes.
        """
        ...


@dataclass(frozen=True)
class Iid:
    """Equally many rows for each agent (within one), and of each class (within one)."""

    def split(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        """See :meth:`Partition.split`."""
        _check(labels, agents)
        by_class = np.concatenate(list(_rows_of_classes(labels, rng).values()))
        return _deal(by_class, rng.permutation(agents))


@dataclass(frozen=True)
class Dirichlet:
    """Each class is cut in shares drawn from a symmetric Dirichlet distribution.

    Differs from the paper: an agent that would get nothing gets one row of the agent that has
    most.

    Args:
        alpha: concentration, > 0. Small: a class belongs to one agent; large: as iid. Beyond
            1e-9 and 1e9 nothing changes for any number of rows.
    """

    alpha: float

    def split(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        """See :meth:`Partition.split`. Every agent gets at least one row."""
        _check(labels, agents)
        alpha = min(max(self.alpha, 1e-9), 1e9)  # outside numpy's sampler loses its digits
        classes = int(labels.max()) + 1
        # All shares before any row, so that they do not depend on how many rows there are.
        shares = rng.dirichlet(np.full(agents, alpha), size=classes)  # (C, agents)
        hands: list[list[Ints]] = [[] for _ in range(agents)]
        for number, rows in _rows_of_classes(labels, rng).items():
            ends = np.round(np.cumsum(shares[number])[:-1] * len(rows)).astype(np.int64)
            for hand, part in zip(hands, np.split(rows, ends), strict=True):
                hand.append(part)
        return _nobody_empty([np.concatenate(hand) for hand in hands], rng)


@dataclass(frozen=True)
class DirichletEqual:
    """Agents of equal size (within one), whose class shares are drawn from a symmetric Dirichlet.

    One agent after the other, in random order, draws the class of each of its rows from its
    shares, and takes a row of that class that nobody has. Of a class that is used up no more is
    drawn; when all of an agent's classes are, rows that are left are as likely as each other.

    Args:
        alpha: see :class:`Dirichlet`. Small: an agent has one class, and classes may be left over.
        rows: how many are handed out in all; None: every row, so that the last agents get what
            the first left. Many more rows than that keep the shares what they were drawn as.
    """

    alpha: float
    rows: int | None = None

    def split(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        """See :meth:`Partition.split`. Raises DataError where there are fewer than ``rows``."""
        total = len(labels) if self.rows is None else self.rows
        if total > len(labels):
            raise DataError(
                f"partition dirichlet_equal: {total} of {len(labels)} rows. Ask for fewer"
            )
        _check(labels[:total], agents)
        alpha = min(max(self.alpha, 1e-9), 1e9)
        classes = int(labels.max()) + 1
        # All shares before any row, so that they do not depend on how many rows there are.
        shares = rng.dirichlet(np.full(classes, alpha), size=agents)  # (agents, C)
        order = rng.permutation(agents)
        sizes, pools = _even_sizes(total, order), _rows_of_classes(labels, rng)
        left = np.bincount(labels, minlength=classes)
        hands: list[Ints] = [labels[:0]] * agents
        for agent in order:
            drawn = _draw_classes(shares[agent], sizes[agent], left, rng)
            hands[agent] = np.sort(
                np.concatenate([p[left[c] - drawn[c] : left[c]] for c, p in pools.items()])
            )
            left = left - drawn
        return hands


def _draw_classes(shares: Floats, rows: int, left: Ints, rng: np.random.Generator) -> Ints:
    """How many of so many rows are of each class (C,), no more than are ``left`` of it."""
    drawn = np.zeros_like(left)
    while missing := rows - int(drawn.sum()):
        chances = np.where(drawn < left, shares, 0.0)
        if not chances.sum():
            chances = (left - drawn).astype(float)
        more = rng.multinomial(missing, chances / chances.sum())
        drawn = np.minimum(drawn + more, left)  # what a class cannot give is drawn anew
    return drawn


@dataclass(frozen=True)
class ClassesPerAgent:
    """Each agent owns ``k`` classes; each class has as many owners as any other (within one).

    Args:
        k: classes of one agent, >= 1.
    """

    k: int

    def split(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        """See :meth:`Partition.split`."""
        _check(labels, agents)
        # Before any row, so that who gets which class does not depend on how many rows there are.
        classes = rng.permutation(np.unique(labels))
        if self.k > len(classes):
            raise DataError(
                f"partition classes_per_agent: k is {self.k}, but the rows have only "
                f"{len(classes)} classes. Lower k"
            )
        if agents * self.k < len(classes):
            raise DataError(
                f"partition classes_per_agent: {agents} agents with k={self.k} classes each "
                f"cannot own all {len(classes)} classes. Raise k to "
                f"{-(-len(classes) // agents)}, or add agents"
            )
        owners: dict[int, list[int]] = {int(number): [] for number in classes}
        # k places in a row of a cycle of at least k classes: never the same class twice.
        for place in range(agents * self.k):
            owners[int(classes[place % len(classes)])].append(place // self.k)
        return _share(_rows_of_classes(labels, rng), owners, agents, rng)


@dataclass(frozen=True)
class RoundRobin:
    """Class c goes to agent c mod n: the non-IID split of Fan et al., section 5.5.

    With more agents than classes the agents go round instead, and agent a shares class
    a mod C; the paper does not say.
    """

    def split(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        """See :meth:`Partition.split`."""
        _check(labels, agents)
        classes = int(labels.max()) + 1
        owners = {
            number: list(range(number, agents, classes)) or [number % agents]
            for number in range(classes)
        }
        return _share(_rows_of_classes(labels, rng), owners, agents, rng)


# Chances of the ten classes at an agent of type 0; type t is the same rotated right by t places.
# Source: FedMatch's released code.
_BASE = (0.50, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15)


@dataclass(frozen=True)
class Imbalanced:
    """FedMatch's imbalanced agents: half of an agent's rows are of one class. Ten classes only.

    Agent a draws floor(N / n) classes from type a mod 10 of the table and takes the next rows
    of each. Differs from the paper's code: it drops what is left over, and an agent that finds
    a class used up has fewer rows; here the rest fills the agents up, so that every row has an
    owner and sizes differ by at most one.
    """

    def split(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        """See :meth:`Partition.split`."""
        _check(labels, agents)
        if labels.max() >= len(_BASE):
            raise DataError(
                f"partition imbalanced is a table for {len(_BASE)} classes, and there is a "
                f"class number {labels.max()}. Use partition dirichlet"
            )
        pools = _rows_of_classes(labels, rng)
        hands: list[Ints] = []
        for agent in range(agents):
            drawn = rng.multinomial(len(labels) // agents, np.roll(_BASE, agent % len(_BASE)))
            hands.append(np.concatenate([rows[: drawn[c]] for c, rows in pools.items()]))
            pools = {c: rows[drawn[c] :] for c, rows in pools.items()}
        left = rng.permutation(np.concatenate(list(pools.values())))
        goal = _even_sizes(len(labels), rng.permutation(agents))
        ends = np.cumsum([size - len(hand) for size, hand in zip(goal, hands, strict=True)])[:-1]
        filling = np.split(left, ends)
        return [np.sort(np.concatenate(pair)) for pair in zip(hands, filling, strict=True)]


def from_settings(
    name: PartitionName, alpha: float | None = None, k: int | None = None
) -> Partition:
    """The rule that a config names.

    Raises:
        DataError: dirichlet without alpha, or classes_per_agent without k.
    """
    if name in ("dirichlet", "dirichlet_equal"):
        if alpha is None:
            raise DataError(f"partition {name} needs alpha, for example 0.5")
        return Dirichlet(alpha) if name == "dirichlet" else DirichletEqual(alpha)
    if name == "classes_per_agent":
        if k is None:
            raise DataError("partition classes_per_agent needs k, for example 2")
        return ClassesPerAgent(k)
    rules: dict[str, Partition] = {
        "iid": Iid(),
        "round_robin": RoundRobin(),
        "imbalanced": Imbalanced(),
    }
    return rules[name]


def _check(labels: Ints, agents: int) -> None:
    if agents > len(labels):
        raise DataError(
            f"{agents} agents are to share {len(labels)} rows, and each needs at least one. "
            "Have fewer agents, or more rows"
        )


def _rows_of_classes(labels: Ints, rng: np.random.Generator) -> dict[int, Ints]:
    """Rows of each class that has any, shuffled."""
    return {
        int(number): rng.permutation(np.flatnonzero(labels == number))
        for number in np.flatnonzero(np.bincount(labels))  # np.unique takes ten times as long
    }


def _even_sizes(rows: int, order: Ints) -> Ints:
    """Sizes that differ by at most one; agents that come first in ``order`` get the extra row."""
    sizes = np.full(len(order), rows // len(order))
    sizes[order[: rows % len(order)]] += 1
    return sizes


def _deal(rows: Ints, order: Iterable[int]) -> list[Ints]:
    """Deal rows like cards, beginning with the first agent in ``order``; a hand per agent."""
    players = list(order)
    hands = {agent: np.sort(rows[seat :: len(players)]) for seat, agent in enumerate(players)}
    return [hands[agent] for agent in sorted(hands)]


def _share(
    pools: dict[int, Ints], owners: dict[int, list[int]], agents: int, rng: np.random.Generator
) -> list[Ints]:
    """Deal each class evenly among its owners."""
    hands: list[list[Ints]] = [[] for _ in range(agents)]
    for number, rows in pools.items():
        holders = owners[number]
        order = rng.permutation(len(holders))
        for agent, part in zip(holders, _deal(rows, order), strict=True):
            hands[agent].append(part)
    empty = np.empty(0, dtype=np.int64)
    return [np.sort(np.concatenate([empty, *hand])) for hand in hands]


def _nobody_empty(hands: list[Ints], rng: np.random.Generator) -> list[Ints]:
    """Each agent without rows takes a random one of the richest. There are rows for all."""
    # The richest comes first; of several, the one with the lowest number.
    ranking = [(-len(hand), agent) for agent, hand in enumerate(hands)]
    heapq.heapify(ranking)
    for poor in [agent for agent, hand in enumerate(hands) if not len(hand)]:
        size, rich = ranking[0]
        taken = rng.integers(-size)
        hands[poor] = hands[rich][[taken]]
        hands[rich] = np.delete(hands[rich], taken)
        heapq.heapreplace(ranking, (size + 1, rich))
    return [np.sort(hand) for hand in hands]
