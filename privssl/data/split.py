"""Sample a split: labelled, unlabelled and validation rows, and the agents that hold them.

Labelled rows are sampled first, then validation rows, then unlabelled ones from the rest; each kind
is divided by its own rule among its agents. The split is a function of (data set, settings, seed).
If the rows name persons, persons are sampled and divided, and their rows follow them.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from privssl.core.agents import rows_by_person
from privssl.data.datasets import Dataset
from privssl.data.npz import NO_LABEL
from privssl.data.partition import DirichletEqual, Iid, Ints, Partition, from_settings
from privssl.data.split_manifest import AgentRows
from privssl.errors import DataError
from privssl.runtime import randomness
from privssl.settings.schema import AgentSettings, DataSettings, Problem

SERVER = "server"


class RoleAssignment(NamedTuple):
    """Ids of the agents that hold each kind of rows."""

    labelled: tuple[str, ...]
    unlabelled: tuple[str, ...]

    @property
    def everyone(self) -> tuple[str, ...]:
        """Return each agent once, in the order of the rosters."""
        return tuple(dict.fromkeys((*self.labelled, *self.unlabelled)))


def role_problems(labels: str, agents: AgentSettings) -> Iterator[Problem]:
    """Yield kinds of agents that ``data.labels`` needs but are 0, or that it does not permit."""
    needed, forbidden = {
        "support": ("support", ("mixed",)),
        "labels-at-server": ("", ("support", "mixed")),
        "labels-at-client": ("mixed", ("support",)),
        "labels-at-both": ("support", ("query", "mixed")),
    }[labels]
    if needed and not getattr(agents, needed):
        text = f"data.labels is {labels}, but agents.{needed} is 0, so no agent would hold labels. "
        yield Problem(needed, f"{text}Set agents.{needed} to at least 1")
    for kind in forbidden:
        if count := getattr(agents, kind):
            text = f"agents.{kind} is {count}, but with data.labels {labels} there can be none. "
            yield Problem(kind, f"{text}Set agents.{kind} to 0")


def holders(labels: str, agents: AgentSettings) -> RoleAssignment:
    """Return the agents that hold each kind of rows. Raises DataError on a ``role_problems``."""
    for _, text in role_problems(labels, agents):
        raise DataError(text)
    support, query, mixed = (
        tuple(f"{prefix}{number}" for number in range(count))
        for prefix, count in (("s", agents.support), ("q", agents.query), ("m", agents.mixed))
    )
    return {
        "support": RoleAssignment(support, query),
        "labels-at-server": RoleAssignment((SERVER,), query),
        "labels-at-client": RoleAssignment(mixed, (*mixed, *query)),
        "labels-at-both": RoleAssignment((SERVER, *support), ()),
    }[labels]


class Split(NamedTuple):
    """Row ids of each agent, and of the validation rows."""

    agents: Mapping[str, AgentRows]
    validation: tuple[int, ...]


class PersonRows:
    """The rows of each person of a data set."""

    def __init__(self, persons: Sequence[str], labels: Ints) -> None:
        """Group rows. ``labels`` (N,): classes, ``NO_LABEL`` if unknown."""
        self._rows = [np.array(rows) for rows in rows_by_person(persons).values()]
        self._labels = labels

    @property
    def classes(self) -> Ints:
        """The class of each person (P,): that of most of its labelled rows, of equals the lowest;
        ``NO_LABEL`` without one."""
        return np.array([self._class_of(rows) for rows in self._rows], dtype=np.int64)

    def _class_of(self, rows: Ints) -> int:
        labels = self._labels[rows]
        known = labels[labels != NO_LABEL]
        return int(np.bincount(known).argmax()) if len(known) else NO_LABEL

    def rows_of(self, persons: Collection[int], *, labelled: bool) -> tuple[int, ...]:
        """Return the sorted row ids of some persons; ``labelled``: those with a label alone."""
        ids = np.sort(np.concatenate([np.empty(0, dtype=int), *(self._rows[p] for p in persons)]))
        ids = ids[self._labels[ids] != NO_LABEL] if labelled else ids
        return tuple(ids.tolist())


def draw_split(data: DataSettings, roles: RoleAssignment, seed: int, dataset: Dataset) -> Split:
    """Sample a split.

    Raises DataError if there are too few rows, an agent would get none, or a rule does not fit. See
    :mod:`privssl.data.partition`.
    """
    row_labels: Ints = dataset.y_train.numpy()
    persons = dataset.persons and PersonRows(dataset.persons, row_labels)
    labels = persons.classes if persons else row_labels
    labelled, validation, unlabelled = _draw_rows(
        data, labels, seed, has_unlabelled=bool(roles.unlabelled),
        unit="persons" if persons else "rows",
    )  # fmt: skip
    rule = labelled_rule = from_settings(data.partition, data.alpha, data.k)
    if isinstance(rule, DirichletEqual):  # it samples rows by class
        rule = dataclasses.replace(rule, rows=data.unlabelled)
    elif data.unlabelled is not None:
        unlabelled = _choose_rows(
            unlabelled, labels, data.unlabelled, False, _rng(seed, "unlabelled")
        )
    if data.labelled_partition is not None:
        labelled_rule = from_settings(data.labelled_partition, data.labelled_alpha, data.labelled_k)
    with_labels = {}
    if data.server_labelled is not None:
        rng = _rng(seed, "server")
        server_rows = np.sort(
            _choose_rows(labelled, labels, data.server_labelled, data.stratified, rng)
        )
        with_labels = {SERVER: tuple(server_rows.tolist())}
        labelled = np.setdiff1d(labelled, server_rows)
    others = tuple(agent for agent in roles.labelled if agent not in with_labels)
    with_labels |= _divide_among_agents("labelled", labelled_rule, others, labelled, labels, seed)
    without = _divide_among_agents("unlabelled", rule, roles.unlabelled, unlabelled, labels, seed)
    held_out = tuple(validation.tolist())
    if persons:
        with_labels = {a: persons.rows_of(p, labelled=True) for a, p in with_labels.items()}
        without = {a: persons.rows_of(p, labelled=False) for a, p in without.items()}
        held_out = persons.rows_of(held_out, labelled=True)
    if data.order == "by-class":
        with_labels, without = (
            {agent: _spread_classes(ids, row_labels) for agent, ids in kind.items()}
            for kind in (with_labels, without)
        )
    return Split(
        {a: AgentRows(with_labels.get(a, ()), without.get(a, ())) for a in roles.everyone},
        held_out,
    )


_NOT_OF_SPLIT = (
    "root", "split", "checksum", "encoder", "encoder_weights", "label", "text", "columns",
    "person",
)  # fmt: skip
#: Settings of later versions, recorded only if used, so that hashes stay the same.
_LATER = {"test": None, "order": "stored", "server_labelled": None}


def settings_of_split(data: DataSettings) -> dict[str, str | int | float | bool | None]:
    """Return the settings that determine a split: all but paths, the rows and the encoder."""
    settings = dataclasses.asdict(data)
    return {
        key: value
        for key, value in settings.items()
        if key not in _NOT_OF_SPLIT and (key not in _LATER or value != _LATER[key])
    }


def _draw_rows(
    data: DataSettings, labels: Ints, seed: int, *, has_unlabelled: bool, unit: str
) -> tuple[Ints, Ints, Ints]:
    """Sample ids of labelled and validation rows; return them with possible unlabelled rows.

    The three are disjoint. ``has_unlabelled``: whether any agent holds unlabelled rows. ``unit``:
    what the labels are of, for errors: rows or persons.
    """
    rows = len(labels)
    requested = data.labelled + data.validation + (data.unlabelled or 0)
    if requested > rows:
        raise DataError(
            f"data.labelled {data.labelled} + data.validation {data.validation} + "
            f"data.unlabelled {data.unlabelled or 0} = {requested}, but {data.name} has {rows} "
            f"training {unit}. Ask for fewer"
        )
    with_label = np.flatnonzero(labels != NO_LABEL)
    if data.labelled + data.validation > len(with_label):
        raise DataError(
            f"data.labelled {data.labelled} + data.validation {data.validation}, but {data.name} "
            f"has {len(with_label)} training {unit} with a label. Ask for fewer"
        )
    if data.unlabelled and not has_unlabelled:
        raise DataError(
            f"data.unlabelled is {data.unlabelled}, but no agent holds unlabelled rows. "
            "Set agents.query, or leave data.unlabelled out"
        )
    all_rows = np.arange(rows)
    labelled = _choose_rows(
        with_label, labels, data.labelled, data.stratified, _rng(seed, "labelled")
    )
    remaining = np.setdiff1d(all_rows, labelled)
    others = np.setdiff1d(with_label, labelled)
    validation = _choose_rows(
        others, labels, data.validation, data.stratified, _rng(seed, "validation")
    )
    remaining = np.setdiff1d(remaining, validation) if has_unlabelled else remaining[:0]
    return np.sort(labelled), np.sort(validation), remaining


def _choose_rows(
    candidates: Ints, labels: Ints, count: int, stratified: bool, rng: np.random.Generator
) -> Ints:
    """Choose ``count`` candidates at random, or ``stratified``: equally many of each class (within
    one).

    Stratified, a class with too few rows contributes all of them, and the others the rest.
    """
    rows = rng.permutation(candidates)
    if not stratified or not count:
        return rows[:count]
    classes = labels[rows]
    class_order = rng.permutation(int(classes.max()) + 1)  # order of classes in the last round
    rank = np.empty(len(rows), dtype=np.int64)  # of a row among the rows of its class
    for number in np.flatnonzero(np.bincount(classes)):  # np.unique is ten times slower
        in_class = classes == number
        rank[in_class] = np.arange(in_class.sum())
    # The first of each class, then the second of each, and so on.
    return rows[np.lexsort((class_order[classes], rank))[:count]]


def _divide_among_agents(
    kind: str, rule: Partition, agents: tuple[str, ...], rows: Ints, labels: Ints, seed: int
) -> dict[str, tuple[int, ...]]:
    """Return sorted row ids of each agent.

    Both kinds use the same random stream, so with equal rules the labelled and the unlabelled rows
    of a mixed agent are of the same classes.
    """
    if not agents:
        return {}
    if agents == (SERVER,):  # partition rules are for agents
        return {SERVER: tuple(np.sort(rows).tolist())}
    if len(agents) > len(rows):
        raise DataError(
            f"{len(agents)} agents are to share {len(rows)} {kind} rows, and each needs at "
            f"least one. Change data.{kind}, or have fewer agents"
        )
    classes = labels[rows]
    if (classes == NO_LABEL).any():
        if not isinstance(rule, Iid):
            raise DataError(
                f"{rule} divides rows by their class, and {(classes == NO_LABEL).sum()} of the "
                f"{len(rows)} {kind} rows have no label. Set data.partition: iid (and "
                "data.labelled_partition for the labelled rows)"
            )
        classes = np.where(classes == NO_LABEL, labels.max() + 1, classes)  # a separate class
    parts = rule.split(classes, len(agents), _rng(seed, "partition"))
    for agent, part in zip(agents, parts, strict=True):
        if not len(part):
            raise DataError(
                f"{rule} leaves {agent} without {kind} rows: {len(rows)} rows of "
                f"{len(np.unique(labels[rows]))} classes among {len(agents)} agents. Raise "
                f"data.{kind}, have fewer agents, or choose another partition"
            )
    return {a: tuple(rows[part].tolist()) for a, part in zip(agents, parts, strict=True)}


def _spread_classes(ids: tuple[int, ...], labels: Ints) -> tuple[int, ...]:
    """Order row ids so that the rows of each class are evenly spread.

    Row i of n of a class gets the position (i + 1/2) / n, so that T equal slices have n / T of
    them, within one.
    """
    rows = np.array(ids, dtype=np.int64)
    positions = np.empty(len(rows))
    for number in np.unique(labels[rows]):
        in_class = np.flatnonzero(labels[rows] == number)
        positions[in_class] = (np.arange(len(in_class)) + 0.5) / len(in_class)
    return tuple(rows[np.argsort(positions, kind="stable")].tolist())


def _rng(seed: int, purpose: str) -> np.random.Generator:
    """Return NumPy's generator for one purpose of the split."""
    return np.random.default_rng(
        randomness.stream(seed, 0, "world", f"split {purpose}").initial_seed()
    )
