"""Rows as arrays: from tensors and lists, map-style data sets, and Hugging Face data sets."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from privssl.api.frames import field_of
from privssl.data.image_folder import pixels_of
from privssl.data.npz import MAX_CLASS, NO_LABEL
from privssl.errors import DataError


def to_array(where: str, value: Any) -> NDArray[Any]:
    """Copy an array, a tensor or nested lists of numbers. Raises DataError."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise DataError(f"{where} has masked values. Fill them (x.filled), or leave out their rows")
    try:
        array = np.array(value)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where} is no array: {error}. Give rows of one shape") from None
    if array.dtype.kind not in "biuf" and array.size:
        raise DataError(
            f"{where} has values of {array.dtype}. Give numbers; number the classes 0, 1, 2, ..."
        )
    return array


def names_of(where: str, values: Any) -> NDArray[Any]:
    """Return names or whole numbers (N,) as texts; absent ones are empty. Raises DataError."""
    if np.ma.is_masked(values) or not hasattr(values, "__len__") or isinstance(values, str):
        raise DataError(f"{where} is {values!r:.60}. Give a list of names, one for each row")
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    if any(isinstance(value, list | tuple) for value in listed):
        raise DataError(f"{where} has lists as names. Give one name for each row")
    return np.array([field_of(value) for value in listed], dtype=str)


def _iterate_items(where: str, items: Any) -> Iterator[Any]:
    """Yield the items of a map-style data set, which may lack ``__iter__``."""
    if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        raise DataError(
            f"{where} is a {type(items).__name__}, which has no length or no items by number. Give "
            "a map-style data set"
        )
    for number in range(len(items)):
        try:
            yield items[number]
        except Exception as error:
            raise DataError(
                f"{where}: item {number} cannot be read: {type(error).__name__}: {error}"
            ) from error


def is_huggingface_split(items: Any) -> bool:
    """Return whether it is a split of a Hugging Face data set."""
    return isinstance(getattr(items, "features", None), Mapping)


def read_split(
    where: str, items: Any, row: str, label: str
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return rows and labels of a split of a Hugging Face data set."""
    if not is_huggingface_split(items):
        raise DataError(
            f"{where} is a {type(items).__name__} without features. Give a split of a "
            "Hugging Face data set, or use Dataset.from_torch"
        )
    for key, column in (("row", row), ("label", label)):
        if column not in items.features:
            columns = ", ".join(map(str, items.features))
            raise DataError(f"{where} has no column {column!r}. Set {key}= to one of {columns}")
    return _collect_rows(where, ((item[row], item[label]) for item in _iterate_items(where, items)))


def read_pairs(where: str, items: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return rows and labels of a map-style data set of (row, label)."""

    def iterate_pairs() -> Iterator[tuple[Any, Any]]:
        for number, item in enumerate(_iterate_items(where, items)):
            if not (isinstance(item, tuple | list) and len(item) == 2):
                raise DataError(f"{where}: item {number} is no (row, label) but {item!r:.60}")
            yield item[0], item[1]

    return _collect_rows(where, iterate_pairs())


def _collect_rows(
    where: str, pairs: Iterator[tuple[Any, Any]]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return all rows, which must have one shape, and their labels."""
    rows: list[NDArray[Any]] = []
    labels: list[int] = []
    for number, (row, label) in enumerate(pairs):
        prefix = f"{where}: row {number}"
        rows.append(to_pixels(prefix, row))
        labels.append(_parse_label(prefix, label))
        first, last = rows[0], rows[-1]
        if (last.shape, last.dtype) != (first.shape, first.dtype):
            raise DataError(
                f"{prefix} is {last.dtype} of shape {last.shape}, and row 0 {first.dtype} of "
                f"{first.shape}. Resize or convert them to one form"
            )
    if not rows:
        raise DataError(f"{where} has no rows. Give at least one")
    return np.stack(rows), np.array(labels)


def to_pixels(where: str, row: Any) -> NDArray[Any]:
    """Return one row as an array; of an image of Pillow its pixels, as those of an image file."""
    return to_array(where, pixels_of(where, row) if isinstance(row, Image.Image) else row)


def _parse_label(where: str, label: Any) -> int:
    if label is None:
        return NO_LABEL
    try:
        number = int(label)
    except (TypeError, ValueError, OverflowError):
        number = NO_LABEL - 1
    if not NO_LABEL <= number <= MAX_CLASS or number != label:
        raise DataError(
            f"{where} has the label {label!r:.60}. Give its class number, or None or -1 for none"
        )
    return number
