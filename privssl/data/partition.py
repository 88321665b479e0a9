"""Partition rules: seven frozen classes that divide rows among agents.

Every row goes to exactly one agent (``DirichletEqual`` may leave rows unassigned). Sources:
Dirichlet per class is Hsu et al. 2019 (arXiv:1909.06335), per agent FedSEAL's (Bian et al.,
arXiv:2110.07829); round robin is Fan et al., section 5.5; the imbalance table is FedMatch's
released code.
"""

import heapq
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from privssl.errors import ConfigError, DataError
from privssl.runtime import plugins

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Partition(ABC):
    """A rule that divides rows among agents by their class."""

    @final
    def split(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        """Return sorted row numbers of each agent: disjoint, together 0..N-1 unless the rule has
        ``rows``.

        Rules by class may leave an agent without rows when a class has fewer rows than owners.

        Args:
            labels: (N,) class of each row, >= 0.
            agents: their number, 1..N.

        Raises:
            DataError: more agents than rows, or a rule that does not fit these classes.
        """
        if agents > self.total(labels):
            raise DataError(
                f"{agents} agents are to share {self.total(labels)} rows, and each needs at least "
                "one. Have fewer agents, or more rows"
            )
        if type(self).__module__ == __name__:
            return self.divide(labels, agents, rng)
        prefix = f"data.partition {self!r} fails:"
        return self._check_result(
            plugins.call(prefix, self.divide, labels, agents, rng), labels, agents
        )

    def _check_result(self, parts: Any, labels: Ints, agents: int) -> list[Ints]:
        """Check and sort the result of a plug-in's rule. Raises DataError unless it partitions
        rows."""
        rows = len(labels)
        try:
            arrays = [np.sort(np.asarray(part)) for part in parts]
            ids = np.concatenate(arrays)
            valid = len(arrays) == agents and ids.dtype.kind in "iu"
            if valid and len(ids):
                valid = ids.min() >= 0 and ids.max() < rows and np.bincount(ids).max() == 1
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise DataError(
                f"data.partition {self!r} does not divide {rows} rows among {agents} agents. "
                "Return a list of arrays of row numbers, one for each agent, each row at most once"
            )
        return [part.astype(np.int64) for part in arrays]

    def total(self, labels: Ints) -> int:
        """Return the number of rows to divide."""
        return len(labels)

    @abstractmethod
    def divide(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        """Divide the rows; arguments and result as of :meth:`split`, which checks them."""


@dataclass(frozen=True)
class Iid(Partition):
    """An equal number of rows for each agent (within one), and of each class (within one)."""

    def divide(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        by_class = np.concatenate(list(_shuffle_classes(labels, rng).values()))
        return _divide_in_turn(by_class, rng.permutation(agents))


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Shares of each class sampled from a symmetric Dirichlet distribution.

    Differs from the paper: an agent without rows gets one row of the agent with most.

    Args:
        alpha: concentration, > 0. Small: a class belongs to one agent; large: as iid. Clipped to
            1e-9..1e9; beyond these the split no longer changes.
    """

    alpha: float

    def divide(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        shares = _draw_shares(self.alpha, int(labels.max()) + 1, agents, rng)  # (C, agents)
        holdings: list[list[Ints]] = [[] for _ in range(agents)]
        for number, rows in _shuffle_classes(labels, rng).items():
            ends = np.round(np.cumsum(shares[number])[:-1] * len(rows)).astype(np.int64)
            for holding, part in zip(holdings, np.split(rows, ends), strict=True):
                holding.append(part)
        return _fill_empty_agents([np.concatenate(holding) for holding in holdings], rng)


@dataclass(frozen=True)
class DirichletEqual(Partition):
    """Agents of equal size (within one), with class shares sampled from a symmetric Dirichlet.

    In random order, each agent samples the class of each of its rows from its shares, and takes an
    unassigned row of that class. When all of an agent's classes are used up, unassigned rows are
    equally likely.

    Args:
        alpha: see :class:`Dirichlet`. Small: an agent has one class, and classes may remain
            unassigned. rows: number of rows to divide; None: all, so the last agents get the
            remaining rows.
    """

    alpha: float
    rows: int | None = None

    def total(self, labels: Ints) -> int:
        total = len(labels) if self.rows is None else self.rows
        if total > len(labels):
            raise DataError(
                f"partition dirichlet_equal: {total} of {len(labels)} rows. Ask for fewer"
            )
        return total

    def divide(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        total = self.total(labels)
        classes = int(labels.max()) + 1
        shares = _draw_shares(self.alpha, agents, classes, rng)  # (agents, C)
        order = rng.permutation(agents)
        sizes, pools = _compute_even_sizes(total, order), _shuffle_classes(labels, rng)
        unused = np.bincount(labels, minlength=classes)
        holdings: list[Ints] = [labels[:0]] * agents
        for agent in order:
            counts = _draw_class_counts(shares[agent], sizes[agent], unused, rng)
            holdings[agent] = np.sort(
                np.concatenate([p[unused[c] - counts[c] : unused[c]] for c, p in pools.items()])
            )
            unused = unused - counts
        return holdings


def _draw_shares(alpha: float, draws: int, size: int, rng: np.random.Generator) -> Floats:
    """Sample shares (draws, size) before any row, so that they are independent of the number of
    rows."""
    alpha = min(max(alpha, 1e-9), 1e9)  # numpy's sampler is inexact outside
    return rng.dirichlet(np.full(size, alpha), size=draws)


def _draw_class_counts(shares: Floats, rows: int, unused: Ints, rng: np.random.Generator) -> Ints:
    """Sample numbers of rows by class (C,), ``rows`` in total, at most ``unused`` of each class."""
    counts = np.zeros_like(unused)
    while missing := rows - int(counts.sum()):
        weights = np.where(counts < unused, shares, 0.0)
        if not weights.sum():
            weights = (unused - counts).astype(float)
        extra = rng.multinomial(missing, weights / weights.sum())
        counts = np.minimum(counts + extra, unused)  # missing rows are sampled again
    return counts


@dataclass(frozen=True)
class ClassesPerAgent(Partition):
    """Each agent owns ``k`` >= 1 classes; classes have equally many owners (within one)."""

    k: int

    def divide(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        # Before any row, so that classes of agents are independent of the number of rows.
        classes = rng.permutation(np.unique(labels))
        if self.k > len(classes):
            raise DataError(
                f"partition classes_per_agent: k is {self.k}, but the rows have only "
                f"{len(classes)} classes. Lower k"
            )
        # k consecutive positions in a cycle of at least k classes: k different classes.
        shards = _assign_shard_classes("classes_per_agent", classes, agents, self.k)
        return _divide_classes(
            _shuffle_classes(labels, rng), _find_owners(shards, self.k), agents, rng
        )


@dataclass(frozen=True)
class Shards(Partition):
    """``k`` >= 1 random shards for each agent.

    A shard is a part of one class; classes have equally many shards (within one). Two shards of an
    agent may be of the same class.

    SemiFL's and HeteroFL's non-IID split with "at most K classes" (authors' code), after McMahan et
    al. 2017.
    """

    k: int

    def divide(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        shards = rng.permutation(
            _assign_shard_classes("shards", rng.permutation(np.unique(labels)), agents, self.k)
        )
        return _divide_classes(
            _shuffle_classes(labels, rng), _find_owners(shards, self.k), agents, rng
        )


def _assign_shard_classes(rule: str, classes: Ints, agents: int, k: int) -> Ints:
    """Return the class of each of the k shards of all agents: the classes in turn."""
    if agents * k < len(classes):
        raise DataError(
            f"partition {rule}: {agents} agents with k={k} classes each cannot own all "
            f"{len(classes)} classes. Raise k to {-(-len(classes) // agents)}, or add agents"
        )
    return np.resize(classes, agents * k)


def _find_owners(shards: Ints, k: int) -> dict[int, list[int]]:
    """Map classes to the agents that own a part of them, k entries per agent."""
    owners: dict[int, list[int]] = {}
    for index, number in enumerate(shards.tolist()):
        owners.setdefault(number, []).append(index // k)
    return owners


@dataclass(frozen=True)
class RoundRobin(Partition):
    """Class c at agent c mod n: the non-IID split of Fan et al., section 5.5.

    With more agents than classes agent a shares class a mod C; the paper does not say.
    """

    def divide(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        classes = int(labels.max()) + 1
        owners = {
            number: list(range(number, agents, classes)) or [number % agents]
            for number in range(classes)
        }
        return _divide_classes(_shuffle_classes(labels, rng), owners, agents, rng)


# Probabilities of the ten classes at an agent of type 0; type t is rotated right by t places.
# Source: FedMatch's released code.
_BASE = (0.50, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15)


@dataclass(frozen=True)
class Imbalanced(Partition):
    """FedMatch's imbalanced agents: half of an agent's rows are of one class. Ten classes only.

    Agent a draws floor(N / n) classes from type a mod 10 of the table and takes the next rows of
    each. Differs from the paper's code, which drops remaining rows: here they fill up agents whose
    class was used up, so sizes differ by at most one.
    """

    def divide(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        if labels.max() >= len(_BASE):
            raise DataError(
                f"partition imbalanced is a table for {len(_BASE)} classes, and there is a "
                f"class number {labels.max()}. Use partition dirichlet"
            )
        pools = _shuffle_classes(labels, rng)
        holdings: list[Ints] = []
        for agent in range(agents):
            counts = rng.multinomial(len(labels) // agents, np.roll(_BASE, agent % len(_BASE)))
            holdings.append(np.concatenate([rows[: counts[c]] for c, rows in pools.items()]))
            pools = {c: rows[counts[c] :] for c, rows in pools.items()}
        remaining = rng.permutation(np.concatenate(list(pools.values())))
        goal = _compute_even_sizes(len(labels), rng.permutation(agents))
        ends = np.cumsum([size - len(rows) for size, rows in zip(goal, holdings, strict=True)])[:-1]
        extras = np.split(remaining, ends)
        return [np.sort(np.concatenate(pair)) for pair in zip(holdings, extras, strict=True)]


RULES: dict[str, Callable[..., Partition]] = {
    "iid": Iid, "dirichlet": Dirichlet, "dirichlet_equal": DirichletEqual,
    "classes_per_agent": ClassesPerAgent, "shards": Shards, "round_robin": RoundRobin,
    "imbalanced": Imbalanced,
}  # fmt: skip


def from_settings(name: str, alpha: float | None = None, k: int | None = None) -> Partition:
    """Return the rule of a config; its class gets alpha and k, if given (``DataSettings`` checked).

    Raises:
        ConfigError: a plug-in cannot be imported, or is not a rule.
    """
    options = {key: v for key, v in (("alpha", alpha), ("k", k)) if v is not None}
    return RULES[name](**options) if name in RULES else _load_rule(name, options)


def _load_rule(name: str, options: dict[str, float | int]) -> Partition:
    """Return the rule of a plug-in."""
    rule = plugins.load("partitions", "data.partition", name)
    if inspect.isclass(rule) and issubclass(rule, Partition):
        rule = plugins.call(f"data.partition {name} cannot be made:", rule, **options)
    if not isinstance(rule, Partition):
        raise ConfigError(
            f"data.partition {name} is {str(rule)[:60]}. Name a class of "
            "privssl.data.partition.Partition"
        )
    return rule


def _shuffle_classes(labels: Ints, rng: np.random.Generator) -> dict[int, Ints]:
    """Return the shuffled rows of each class that has rows."""
    return {
        int(number): rng.permutation(np.flatnonzero(labels == number))
        for number in np.flatnonzero(np.bincount(labels))  # np.unique is ten times slower
    }


def _compute_even_sizes(rows: int, order: Ints) -> Ints:
    """Return sizes that differ by at most one; the first agents of ``order`` get the extra rows."""
    sizes = np.full(len(order), rows // len(order))
    sizes[order[: rows % len(order)]] += 1
    return sizes


def _divide_in_turn(rows: Ints, order: Iterable[int]) -> list[Ints]:
    """Deal rows one by one in ``order`` (a permutation of agents); return them sorted."""
    agents = list(order)
    holdings = {agent: np.sort(rows[index :: len(agents)]) for index, agent in enumerate(agents)}
    return [holdings[agent] for agent in sorted(holdings)]


def _divide_classes(
    pools: dict[int, Ints], owners: dict[int, list[int]], agents: int, rng: np.random.Generator
) -> list[Ints]:
    """Divide each class evenly among its owners."""
    holdings: list[list[Ints]] = [[] for _ in range(agents)]
    for number, rows in pools.items():
        class_owners = owners[number]
        order = rng.permutation(len(class_owners))
        for agent, part in zip(class_owners, _divide_in_turn(rows, order), strict=True):
            holdings[agent].append(part)
    empty = np.empty(0, dtype=np.int64)
    return [np.sort(np.concatenate([empty, *holding])) for holding in holdings]


def _fill_empty_agents(holdings: list[Ints], rng: np.random.Generator) -> list[Ints]:
    """Give each agent without rows a random row of the agent with most. N >= agents."""
    # the largest first; among equals the lowest number
    ranking = [(-len(holding), agent) for agent, holding in enumerate(holdings)]
    heapq.heapify(ranking)
    for receiver in [agent for agent, holding in enumerate(holdings) if not len(holding)]:
        size, donor = ranking[0]
        index = rng.integers(-size)
        holdings[receiver] = holdings[donor][[index]]
        holdings[donor] = np.delete(holdings[donor], index)
        heapq.heapreplace(ranking, (size + 1, donor))
    return [np.sort(holding) for holding in holdings]
