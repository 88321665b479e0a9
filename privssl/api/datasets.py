"""Data sets from rows in memory: ``privssl.Dataset``."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from privssl.api.frames import frame_rows, read_frame, refuse_other_columns
from privssl.api.row_sources import is_huggingface_split, names_of, read_pairs, read_split, to_array
from privssl.core.agents import natural_order
from privssl.data import datasets
from privssl.data.npz import KIND, NAMES, NO_LABEL, PERSONS, UNLABELLED, check_arrays
from privssl.data.persons import PREFIX, count_persons, read_persons
from privssl.data.split import holders
from privssl.errors import DataError
from privssl.settings.schema import AgentSettings

ARRAYS = "arrays"  # value of data.name


class Dataset:
    """Training and test rows in memory, checked like an NPZ file.

    Images are (N, H, W), (N, H, W, C) or (N, C, H, W) with 1 or 3 channels: bytes, or floats in [0,
    1]. Vectors are (N, F), time series and other sequences (N, length, F) with ``kind="sequence"``.
    Classes are 0, 1, 2, ...; the label -1 means none. Created by one of the functions below.
    """

    def __init__(self, checked: datasets.Dataset) -> None:
        """Wrap a checked data set; use the functions below."""
        self.rows = checked

    @classmethod
    def from_arrays(
        cls,
        x_train: Any,
        y_train: Any,
        x_test: Any,
        y_test: Any,
        class_names: Sequence[str] | None = None,
        x_unlabelled: Any = None,
        kind: Literal["sequence"] | None = None,
        persons: Any = None,
    ) -> "Dataset":
        """Create a data set from NumPy arrays, tensors or nested lists, which are copied.

        Args:
            x_train: training rows, in one of the forms of the class.
            y_train: their classes (N,); -1: no label.
            x_test: test rows, used only to measure accuracy.
            y_test: their classes, without -1.
            class_names: names in the order of the class numbers; None: the numbers.
            x_unlabelled: training rows without a label, beside those of -1.
            kind: "sequence": three axes are (N, length, features), not images.
            persons: the person of each training row, and then of each row of ``x_unlabelled``, as
                names or whole numbers (docs/persons.md); None: not known.

        Raises:
            privssl.UserError: the arrays are not in that form.
        """
        unlabelled = () if x_unlabelled is None else (x_unlabelled,)
        arrays = (x_train, y_train, x_test, y_test, *unlabelled)
        return _build_dataset(
            "Dataset.from_arrays", arrays, class_names, kind=kind, persons=persons
        )

    @classmethod
    def from_torch(cls, train: Any, test: Any) -> "Dataset":
        """Create a data set from two map-style ``torch.utils.data.Dataset`` of (row, label).

        Rows are images of Pillow, arrays or tensors, without normalisation: bytes, or floats in [0,
        1]. The label None or -1 means none. Class names are ``train.classes``, if present.

        Raises:
            privssl.UserError: an item is not (row, label), or the rows are not in that form.
        """
        where = "Dataset.from_torch"
        arrays = (*read_pairs(f"{where}: train", train), *read_pairs(f"{where}: test", test))
        return _build_dataset(where, arrays, getattr(train, "classes", None))

    @classmethod
    def from_huggingface(
        cls, train: Any, test: Any, row: str = "image", label: str = "label"
    ) -> "Dataset":
        """Create a data set from two splits of a Hugging Face data set.

        Args:
            train: an object with ``features`` and items that are mappings, as
                ``datasets.Dataset``; the package itself is not imported.
            test: as train.
            row: column of the images or arrays, as in ``from_torch``.
            label: column of the class numbers; its ``names`` become the class names.

        Raises:
            privssl.UserError: no such column, or the rows are not in that form.
        """
        where = "Dataset.from_huggingface"
        rows = read_split(f"{where}: train", train, row, label)
        tests = read_split(f"{where}: test", test, row, label)
        return _build_dataset(where, (*rows, *tests), getattr(train.features[label], "names", None))

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        label: str = "label",
        test: Any = 0.2,
        columns: Mapping[str, Sequence[Any]] | None = None,
        class_names: Sequence[str] | None = None,
        person: str = "",
    ) -> "Dataset":
        """Create a data set from a table: a data frame of pandas or polars, or a mapping.

        Numeric columns are scaled to [-1, 1] by their bounds, with a second number if values are
        missing; others are one-hot encoded. A row without a label is unlabelled.

        Args:
            frame: an object with ``columns`` and ``frame[column]``, or ``{column: values}``.
            label: column of the classes.
            test: share of the labelled rows that are test rows, in (0, 1), always the same ones; of
                each class, unless class_names are given. Or another frame.
            columns: bounds and categories from public knowledge, ``{"age": [0, 120], "weight":
                [30, 200, "missing"], "colour": ["red", "blue"]}``; other columns are left out.
                None: from the training rows, which a private run refuses.
            class_names: names of the classes, from public knowledge; None: from the training rows.
                Private runs need them if ``test`` is a share.
            person: column of the person whose row a row is, which is no feature; ``test`` is then
                a frame, of other persons. Empty: not known.

        Raises:
            privssl.UserError: no such column, an undeclared missing value, or a wrong declaration.
        """
        return cls(read_frame(frame, label, test, columns, class_names, person))

    def network_rows(self, frame: Any) -> NDArray[np.float32]:
        """Convert another frame with these columns to rows (N, features) for ``run.predict``.

        Raises:
            privssl.UserError: the data set is not from a frame, or a column is missing.
        """
        if self.rows.scales is None:
            raise DataError(
                "network_rows: this data set is from no frame. Give rows as it has them"
            )
        return frame_rows(frame, self.rows.scales)

    @classmethod
    def federated(
        cls,
        agents: Mapping[str, Any],
        test: Any,
        class_names: Sequence[str] | None = None,
        row: str = "image",
        label: str = "label",
        kind: Literal["sequence"] | None = None,
        persons: Mapping[str, Any] | None = None,
    ) -> "Dataset":
        """Create a data set whose rows are assigned to agents already.

        Args:
            agents: the rows of each agent by its name. s0, s1, ... (support) and server: (x, y);
                q0, q1, ... (query): x; m0, m1, ... (mixed): (x, y) with -1 for no label. Or a split
                of a Hugging Face data set, as flwr-datasets' ``load_partition`` gives.
            test: (x, y) of the test rows, or such a split.
            class_names: as of ``from_arrays``.
            row: column of the rows in such splits.
            label: column of their class numbers.
            kind: as of ``from_arrays``.
            persons: the person whose row each row is, by agent: {"s0": [...], "q0": [...]}.

        Raises:
            privssl.UserError: unknown agent names, or rows not in the form of the class.
        """
        where = "Dataset.federated"
        if not isinstance(agents, Mapping) or not all(isinstance(name, str) for name in agents):
            raise DataError(
                f"{where}: agents is {repr(agents)[:60]}. Give the rows of each agent by its name: "
                '{"s0": (x, y), "q0": x}'
            )
        x: list[NDArray[Any]] = []
        y: list[NDArray[Any]] = []
        holdings: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        inputs: dict[str, Any] = {}
        if is_huggingface_split(test):
            class_names = class_names or getattr(test.features.get(label), "names", None)
            test = read_split(f"{where}: test", test, row, label)
        for name in sorted(agents, key=natural_order):
            if name.rstrip("0123456789") not in (*KINDS, "server"):
                raise DataError(f"{where}: {name!r} is no agent's name. Call agents s0, q0, m0")
            value = agents[name]
            if is_huggingface_split(value):
                split = read_split(f"{where}: {name}", value, row, label)
                value = split[0] if name.startswith("q") else split
            rows, labels = _read_agent_rows(where, name, value)
            inputs[name] = value if name.startswith("q") else value[0]
            ids = np.arange(len(rows)) + sum(map(len, x))
            labelled = labels != NO_LABEL
            holdings[name] = tuple(ids[labelled].tolist()), tuple(ids[~labelled].tolist())
            x.append(rows)
            y.append(labels)
        if not isinstance(test, tuple | list) or len(test) != 2:
            raise DataError(f"{where}: test is {type(test).__name__}. Give (x, y) of the test rows")
        refuse_other_columns(where, inputs | {"test": test[0]})
        _infer_settings(where, holdings)
        if len({rows.shape[1:] for rows in x}) != 1 or len({rows.dtype for rows in x}) != 1:
            forms = {name: (r.dtype.name, r.shape[1:]) for name, r in zip(holdings, x, strict=True)}
            raise DataError(
                f"{where}: agents have rows of different forms or types: {forms}. Make them alike"
            )
        value = (np.concatenate(x), np.concatenate(y), *test)
        names = _join_persons(
            where, persons, {name: len(r) for name, r in zip(holdings, x, strict=True)}
        )
        return _build_dataset(where, value, class_names, holdings, kind, names)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the config keys that follow from the data set."""
        # The keys of the file's own data set would be refused beside arrays.
        keys: dict[str, Any] = {"data.name": ARRAYS, "data.root": "", "data.image_size": None}
        holdings = self.rows.held
        if holdings is None:
            return keys
        labelled, unlabelled = (
            sum(count_persons(self.rows.persons, ids[kind]) for ids in holdings.values())
            for kind in (0, 1)
        )
        keys["data.labelled"] = labelled
        return keys | {"data.unlabelled": unlabelled or None, **_infer_settings("data", holdings)}

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names in the order of the class numbers."""
        return self.rows.class_names

    @property
    def warnings(self) -> list[str]:
        """Warnings about the rows. Private runs show them only here, because they count rows."""
        return self.rows.warnings

    @property
    def shape(self) -> tuple[int, ...]:
        """(channels, height, width) of an image, (length, features) of a sequence, (features,) of a
        vector."""
        return self.rows.shape

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of all rows and labels, recorded in a run's config and split.json."""
        return datasets.checksum(self.rows)

    def __len__(self) -> int:
        return len(self.rows.y_train)

    def __repr__(self) -> str:
        unlabelled = int((self.rows.y_train == NO_LABEL).sum())
        return (
            f"Dataset({len(self)} training rows, {unlabelled} of them without a label, "
            f"{len(self.rows.y_test)} test rows, shape {self.shape}, "
            f"{len(self.class_names)} classes)"
        )


def _join_persons(
    where: str, persons: Mapping[str, Any] | None, rows: Mapping[str, int]
) -> tuple[str, ...] | None:
    """Return the persons of all agents' rows, agent after agent."""
    where = f"{where}: persons"
    if persons is not None and not isinstance(persons, Mapping):
        raise DataError(
            f"{where} is a {type(persons).__name__}. Give those of each agent by its name: "
            '{"s0": [...], "q0": [...]}'
        )
    parts = {f"{PREFIX}{a}": names_of(where, names) for a, names in (persons or {}).items()}
    return read_persons(where, parts, rows)


#: First letters of agent names, and the kinds of agents.
KINDS = {"s": "support", "q": "query", "m": "mixed"}


def _read_agent_rows(where: str, name: str, value: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return rows and labels of one agent."""
    prefix = f"{where}: {name}"
    if not name.startswith("q") and not (isinstance(value, tuple | list) and len(value) == 2):
        raise DataError(
            f"{prefix} is a {type(value).__name__}. Give (x, y), or call it q0, q1, ..."
        )
    axes = [getattr(part, "ndim", 0) for part in value] if isinstance(value, tuple) else []
    if name.startswith("q") and len(axes) == 2 and axes[0] > axes[1] == 1:
        raise DataError(f"{prefix} has labels, and a query agent holds none. Give x alone")
    x, y = (value, None) if name.startswith("q") else value
    rows = to_array(f"{prefix}: x", x)
    labels = np.full(len(rows), NO_LABEL) if y is None else to_array(f"{prefix}: y", y)
    if labels.shape != (len(rows),) or not len(rows):
        raise DataError(
            f"{prefix} has {len(rows)} rows and labels of shape {labels.shape}. Give each row one, "
            "and at least one row"
        )
    if not name.startswith(("q", "m")) and (labels == NO_LABEL).any():
        raise DataError(f"{prefix} has rows without a label. Move them to a query agent (q0)")
    return rows, labels


def _infer_settings(where: str, agents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that create these agents. Raises DataError if the names permit none."""
    counts = {kind: sum(name[:1] == letter for name in agents) for letter, kind in KINDS.items()}
    labels = "labels-at-client" if counts["mixed"] else "support"
    labels = "labels-at-server" if "server" in agents else labels
    settings = AgentSettings(**({**counts, "support": 0} if "server" in agents else counts))
    try:
        expected = holders(labels, settings).everyone
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    if set(expected) != set(agents):
        raise DataError(
            f"{where}: agents are {', '.join(agents)}, where a run would have "
            f"{', '.join(expected)}. Number the agents of each kind from 0"
        )
    return {"data.labels": labels, **{f"agents.{k}": v for k, v in vars(settings).items()}}


def _build_dataset(
    where: str, values: Sequence[Any], names: Sequence[str] | None, holdings: Any = None,
    kind: str | None = None, persons: Any = None,
) -> Dataset:  # fmt: skip
    """Check rows and classes in the order of ``NAMES``, with unlabelled rows, if any; and persons,
    if known."""
    by_name = dict(zip((*NAMES, UNLABELLED), values, strict=False))
    refuse_other_columns(where, {n: x for n, x in by_name.items() if n.startswith("x")})
    raw = {name: to_array(f"{where}: {name}", value) for name, value in by_name.items()}
    if names is not None and (isinstance(names, str) or not isinstance(names, Sequence)):
        raise DataError(f"{where}: class_names is {names!r}. Give a list of names")
    if kind is not None:
        raw[KIND] = np.array(kind)
    if persons is not None:
        parts = PERSONS[: 1 + (UNLABELLED in raw)]
        owners = names_of(f"{where}: persons", persons)
        ends = [len(raw[NAMES[0]])][: len(parts) - 1]
        raw |= dict(zip(parts, np.split(owners, ends), strict=True))
    with datasets.recorded() as warnings:
        arrays = check_arrays(where, raw, names)
        datasets.warn_of_equal_rows(where, arrays)
    rows = datasets.from_arrays(ARRAYS, arrays)
    return Dataset(dataclasses.replace(rows, said=tuple(warnings), held=holdings))
