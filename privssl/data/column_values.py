"""From a table's numbers back to its values: the inverse of ``csv_rows.numbers_of``.

Synthetic rows are any numbers. A line of a table has one category of a column, and a value is
missing or not.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privssl.data.declared_columns import MISSING
from privssl.data.npz import Scale

#: A number, a category; or a missing number, or a category that is none of the column's.
Value = float | str | None


def read_scales(rows: Mapping[str, Any]) -> dict[str, Scale] | None:
    """Return the columns of a table, None for other rows. ``rows``: of results.json."""
    columns = rows.get("columns")
    return columns and {name: tuple(scale) for name, scale in columns.items()}


def snap_to_columns(x: NDArray[np.float32], scales: Mapping[str, Scale]) -> NDArray[np.float32]:
    """Return the nearest rows of a table (N, features) to any numbers.

    Numbers are cut to their bounds, and the largest number of a column of categories names its
    category; if all are -1 it has none, as ``numbers_of`` writes an unknown one.
    """
    rows = x.copy()
    for _, scale, part in _parts_of(rows, scales):
        if not _is_numeric(scale):
            is_named = np.arange(part.shape[1]) == part.argmax(axis=1)[:, None]
            part[:] = np.where(is_named & (part != -1).any(axis=1, keepdims=True), 1, -1)
        elif MISSING in scale:
            absent = part[:, 1] > 0
            part[:] = np.stack([np.where(absent, 0, part[:, 0]), 2.0 * absent - 1], axis=1)
    return rows.clip(-1, 1)


def values_of(x: NDArray[np.float32], scales: Mapping[str, Scale]) -> dict[str, list[Value]]:
    """Return the values of each column, in their own units.

    Args:
        x: (N, features), a table's numbers; others count as the nearest row of a table.
    """
    values: dict[str, list[Value]] = {}
    for name, scale, part in _parts_of(snap_to_columns(x, scales), scales):
        if _is_numeric(scale):
            low, high = float(scale[0]), float(scale[1])
            shares = (part[:, 0].astype(np.float64) + 1) / 2
            numbers = (low + shares * (high - low)).clip(low, high).tolist()
            absent = part[:, 1] > 0 if MISSING in scale else np.zeros(len(part), dtype=bool)
            values[name] = [None if a else v for v, a in zip(numbers, absent, strict=True)]
        else:
            values[name] = [
                str(scale[numbers.argmax()]) if numbers.max() > 0 else None for numbers in part
            ]
    return values


def _is_numeric(scale: Sequence[float | str]) -> bool:
    return isinstance(scale[0], float)


def _parts_of(
    x: NDArray[np.float32], scales: Mapping[str, Scale]
) -> Iterator[tuple[str, Sequence[float | str], NDArray[np.float32]]]:
    """Yield each column with its scale and its numbers (N, 1 or more), as a view."""
    start = 0
    for name, scale in scales.items():
        width = (2 if MISSING in scale else 1) if _is_numeric(scale) else len(scale)
        yield name, scale, x[:, start : start + width]
        start += width
