"""Data frames of pandas or polars, read like CSV files (``data/csv_rows.py``)."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privssl.data import csv_rows, datasets, declared_columns
from privssl.data.csv_rows import Part
from privssl.data.npz import Scale, refuse_unprintable
from privssl.data.persons import check_names
from privssl.errors import DataError

WHERE = "Dataset.from_frame"
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")


def read_frame(
    frame: Any,
    label: str,
    test: Any,
    columns: Mapping[str, Sequence[Any]] | None,
    class_names: Sequence[str] | None,
    person: str = "",
) -> datasets.Dataset:
    """Read the rows of a frame; arguments and errors as in ``Dataset.from_frame``."""
    label = str(label)
    declared = None if columns is None else _check_declared_columns(columns, label)
    column_names = None if declared is None else tuple(declared)
    table = _read_columns(WHERE, frame, label, column_names, others=True)  # they identify a record
    sampled = isinstance(test, float)
    persons = _read_persons(table, declared, label, person, sampled=sampled)
    if isinstance(test, int | str):
        raise DataError(
            f"{WHERE}: test is {test!r}. Give the share of rows that test, such as 0.2, or a frame"
        )
    if sampled:
        is_test = _draw_test_rows(table[label], test, by_class=class_names is None)
        parts = [_build_part(WHERE, table, label, rows) for rows in (~is_test, is_test)]
    else:
        features = tuple(name for name in table if name != person)
        test_table = _read_columns(f"{WHERE}: test", test, label, column_names or features)
        parts = [
            _build_part(WHERE, table, label, person=person),
            _build_part(f"{WHERE}: test", test_table, label),
        ]
    names = None if class_names is None else _check_class_names(class_names, parts)
    with datasets.recorded() as warnings:
        scales = declared or csv_rows.scales_of(parts[0])
        arrays = csv_rows.table_of(parts[0], parts[1], scales, names)
        datasets.warn_of_equal_rows(WHERE, arrays)
    dataset = datasets.from_arrays("arrays", arrays)
    table_kind: Any = "measured" if declared is None else "declared"
    return replace(
        dataset, said=tuple(warnings), table=table_kind, persons=persons,
        tests_drawn=sampled, names_declared=names is not None, label=label,
    )  # fmt: skip


def _read_persons(
    table: Mapping[str, list[str]], declared: Mapping[str, Scale] | None, label: str, person: str,
    *, sampled: bool,
) -> tuple[str, ...] | None:  # fmt: skip
    """Return the person of each row; None without their column."""
    if not person:
        return None
    if person not in table or person == label or person in (declared or ()):
        raise DataError(
            f"{WHERE}: person is {person!r}, which is no column of the frame, or is its label or a "
            f"declared column. The frame has {', '.join(table)}"
        )
    if sampled:
        raise DataError(
            f"{WHERE}: with person, test rows drawn at random would be of persons who train, too. "
            "Give test as a frame of other persons"
        )
    return check_names(f"{WHERE}: {person}", table[person])


def frame_rows(frame: Any, scales: Mapping[str, Scale]) -> NDArray[np.float32]:
    """Convert to rows (N, features) by known scales. Raises DataError."""
    table = _read_columns("network_rows", frame, None, tuple(scales))
    return csv_rows.numbers_of(_build_part("network_rows", table, ""), scales)


def _check_class_names(class_names: Sequence[str], parts: Sequence[Part]) -> tuple[str, ...]:
    """Return the declared class names. Raises DataError if a label is none of them."""
    if isinstance(class_names, str) or not isinstance(class_names, Sequence):
        raise DataError(f"{WHERE}: class_names is {class_names!r}. Give a list of names")
    names = tuple(map(str, class_names))
    refuse_unprintable(WHERE, names)
    if len(set(names)) < max(2, len(names)):
        raise DataError(f"{WHERE}: class_names is {names}. Give two or more, each once")
    if unknown := sorted({text for part in parts for text in part.labels} - {"", *names}):
        raise DataError(f"{WHERE}: class_names lacks the label {unknown[0]!r}. Add it")
    return names


def _check_declared_columns(columns: Mapping[str, Sequence[Any]], label: str) -> dict[str, Scale]:
    def to_python(value: Any) -> Any:
        return value.item() if isinstance(value, np.generic) else value

    if not isinstance(columns, Mapping):
        raise DataError(
            f"{WHERE}: columns is {repr(columns)[:60]}. Give bounds or categories for each column: "
            '{"age": [0, 120], "colour": ["red", "blue"]}'
        )
    values = {
        str(name): [to_python(v) for v in scale] if isinstance(scale, Iterable) else scale
        for name, scale in columns.items()
    }
    return declared_columns.check_scales(f"{WHERE}: columns", values, label)


def _read_columns(
    where: str, frame: Any, label: str | None, chosen: Sequence[str] | None, *, others: bool = False
) -> dict[str, list[str]]:
    """Return the chosen columns of a frame as text, like a CSV file; None: all. Raises DataError.

    ``others``: include the other columns.
    """
    available = list(frame) if isinstance(frame, Mapping) else getattr(frame, "columns", None)
    if available is None or not hasattr(frame, "__getitem__"):
        raise DataError(
            f"{where} is a {type(frame).__name__} without columns. Give a frame of pandas or "
            "polars, or a mapping from columns to their values"
        )
    if isinstance(frame, Mapping):
        _check_lengths(where, frame)
    by_name = {str(name): name for name in available}
    names = list(by_name) if chosen is None else [*chosen]
    needed = dict.fromkeys([*([] if label is None else [label]), *names])
    if missing := ", ".join(sorted(set(needed) - set(by_name))):
        raise DataError(f"{where} has no {missing}; it has {', '.join(map(str, available))}")
    refuse_doubled_columns(where, available)
    needed |= dict.fromkeys(by_name) if others else {}
    table = {name: [field_of(value) for value in frame[by_name[name]]] for name in needed}
    if label is not None:
        table[label] = [label_of(value) for value in frame[by_name[label]]]
    if not table or not len(next(iter(table.values()))):
        raise DataError(f"{where} has no rows. Give at least one")
    return table


def _check_lengths(where: str, columns: Mapping[Any, Any]) -> None:
    """Raise DataError unless every column of a mapping has one value for each row."""
    for name, values in columns.items():
        if isinstance(values, str | bytes) or np.ndim(values) != 1:
            raise DataError(f"{where}: the column {name} is no list of values, one for each row")
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise DataError(f"{where}: columns have different numbers of values: {counts}")


def refuse_doubled_columns(where: str, columns: Iterable[Any]) -> None:
    """Raise DataError if two columns have one name."""
    names = [str(name) for name in columns]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{where} has the column {twice[0]} twice. Rename one, or leave it out")


def refuse_other_columns(where: str, parts: Mapping[str, Any]) -> None:
    """Raise DataError if two frames differ in their columns (an array has none)."""
    names = {n: [str(c) for c in rows.columns] for n, rows in parts.items() if _is_frame(rows)}
    for name, columns in names.items():
        first = next(iter(names))
        if columns != names[first]:
            raise DataError(
                f"{where}: {name} has the columns {', '.join(columns)}, and {first} "
                f"{', '.join(names[first])}. Bring them into one order: rows are taken by place"
            )


def _is_frame(rows: Any) -> bool:
    return hasattr(rows, "columns") and hasattr(rows, "__getitem__")


def label_of(value: Any) -> str:
    """Return a label as text; pandas turns integers beside a missing one into floats."""
    text = field_of(value)
    return text.removesuffix(".0") if isinstance(value, float | np.floating) else text


def field_of(value: Any) -> str:
    """Return a field as text, the same in every process; missing values are empty.

    The text identifies the record to an account, so it has no memory address and no order of a set.
    """
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else repr(float(value))
    if isinstance(value, str):
        return str(value)
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return ""
    if hasattr(value, "mode") and hasattr(value, "tobytes"):  # an image of Pillow
        return f"{value.mode} {value.size} {hashlib.sha256(value.tobytes()).hexdigest()}"
    ordered = sorted(map(str, value)) if isinstance(value, set | frozenset) else value
    return _ADDRESS.sub("", str(ordered))


def _draw_test_rows(labels: Sequence[str], share: float, *, by_class: bool) -> NDArray[np.bool_]:
    """Choose test rows: a share of each class, or of all labelled rows, always the same ones.

    By class, a training row's label influences the number of test rows of its class.
    """
    if not 0 < share < 1:
        raise DataError(f"{WHERE}: test is {share}. Give a share in (0, 1), or a frame")
    y, is_test = np.array([text.strip() for text in labels]), np.zeros(len(labels), dtype=bool)
    order = np.random.RandomState(0).permutation(len(y))  # NumPy guarantees its numbers
    labelled = order[y[order] != ""]
    parts = [order[y[order] == name] for name in sorted(set(y.tolist()) - {""})]
    for rows in parts if by_class else [labelled]:
        is_test[rows[: round(share * len(rows))]] = True
    if not is_test.any():
        reason = f"of {len(y)} rows is none" if len(parts) < 2 or not by_class else (
            f"of each class is none: {len(labelled)} rows have {len(parts)} different labels"
        )  # fmt: skip
        raise DataError(
            f"{WHERE}: test {share} {reason}. Give a larger share, or another column as label"
        )
    return is_test


def _build_part(
    where: str, columns: Mapping[str, list[str]], label: str,
    rows: NDArray[np.bool_] | None = None, *, person: str = "",
) -> Part:  # fmt: skip
    """Return some of the rows, or all."""
    indices = list(range(len(next(iter(columns.values())))))
    if rows is not None:
        indices = np.flatnonzero(rows).tolist()
    picked = {name: [values[index] for index in indices] for name, values in columns.items()}
    return csv_rows.part_of(where, picked, label, indices, person)
