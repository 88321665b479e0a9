"""Rows in memory as a data set of a run: ``privssl.Dataset``."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from logging.handlers import BufferingHandler
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from privssl.data import datasets
from privssl.data.npz import NAMES, NO_LABEL, UNLABELLED, check_arrays
from privssl.errors import DataError
from privssl.runtime.process import logging_to

ARRAYS = "arrays"  # as data.name


class Dataset:
    """Training and test rows in memory, checked as an NPZ file is.

    Rows are (N, H, W), (N, H, W, C) or (N, C, H, W) with 1 or 3 channels: bytes, or floats in
    [0, 1]. Classes are 0, 1, 2, ...; the label -1 is none. Made by one of the functions below.
    """

    def __init__(self, checked: datasets.Dataset) -> None:
        """``checked``: as the functions below make it."""
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
    ) -> "Dataset":
        """A data set from NumPy arrays, tensors or nested lists, which are copied.

        Args:
            x_train: training rows, in one of the forms of the class.
            y_train: their classes (N,); -1: no label.
            x_test: test rows, which measure accuracy and train nothing.
            y_test: their classes, without -1.
            class_names: names in the order of the class numbers; None: the numbers.
            x_unlabelled: training rows without a label, beside those of -1.

        Raises:
            privssl.UserError: the arrays are not in that form.
        """
        given = dict(zip(NAMES, (x_train, y_train, x_test, y_test), strict=True))
        if x_unlabelled is not None:
            given[UNLABELLED] = x_unlabelled
        return _checked("Dataset.from_arrays", given, class_names)

    @classmethod
    def from_torch(cls, train: Any, test: Any) -> "Dataset":
        """A data set from two map-style ``torch.utils.data.Dataset`` of (row, label).

        Rows are images of Pillow, arrays or tensors, without normalisation: bytes, or floats in
        [0, 1]. The label None or -1 is none. Class names are ``train.classes``, if there are.

        Raises:
            privssl.UserError: an item is no (row, label), or the rows are not in that form.
        """
        names = getattr(train, "classes", None)
        parts: dict[str, Any] = {}
        for part, items in (("train", train), ("test", test)):
            where = f"Dataset.from_torch: {part}"
            parts[f"x_{part}"], parts[f"y_{part}"] = _collected(where, _pairs(where, items))
        return _checked("Dataset.from_torch", parts, names)

    @classmethod
    def from_huggingface(
        cls, train: Any, test: Any, row: str = "image", label: str = "label"
    ) -> "Dataset":
        """A data set from two splits of a Hugging Face data set.

        Args:
            train: an object with ``features`` and items that are mappings, as
                ``datasets.Dataset``; the package itself is not imported.
            test: as train.
            row: column of the images or arrays, as in ``from_torch``.
            label: column of the class numbers; its ``names`` become the class names.

        Raises:
            privssl.UserError: no such column, or the rows are not in that form.
        """
        parts: dict[str, Any] = {}
        for part, items in (("train", train), ("test", test)):
            where = f"Dataset.from_huggingface: {part}"
            features = getattr(items, "features", None)
            if not isinstance(features, Mapping):
                raise DataError(
                    f"{where} is a {type(items).__name__} without features. Give a split of a "
                    "Hugging Face data set, or use Dataset.from_torch"
                )
            for key, column in (("row", row), ("label", label)):
                if column not in features:
                    known = ", ".join(map(str, features))
                    raise DataError(
                        f"{where} has no column {column!r}. Set {key}= to one of {known}"
                    )
            pairs = ((item[row], item[label]) for item in _items(where, items))
            parts[f"x_{part}"], parts[f"y_{part}"] = _collected(where, pairs)
        names = getattr(train.features[label], "names", None)
        return _checked("Dataset.from_huggingface", parts, names)

    @property
    def class_names(self) -> tuple[str, ...]:
        """In the order of the class numbers."""
        return self.rows.class_names

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a row."""
        return self.rows.shape

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of all rows and labels, which a run's config and split.json record."""
        return datasets.checksum(self.rows)

    def __len__(self) -> int:
        return len(self.rows.y_train)

    def __repr__(self) -> str:
        unknown = int((self.rows.y_train == NO_LABEL).sum())
        return (
            f"Dataset({len(self)} training rows, {unknown} of them without a label, "
            f"{len(self.rows.y_test)} test rows, shape {self.shape}, "
            f"{len(self.class_names)} classes)"
        )


def _checked(where: str, given: Mapping[str, Any], names: Sequence[str] | None) -> Dataset:
    found = {name: to_array(f"{where}: {name}", value) for name, value in given.items()}
    if names is not None and (isinstance(names, str) or not isinstance(names, Sequence)):
        raise DataError(f"{where}: class_names is {names!r}. Give a list of names")
    recorder = BufferingHandler(capacity=10**6)
    with logging_to(recorder):
        arrays = check_arrays(where, found, names)
        datasets.warn_of_equal_rows(where, arrays)
        said = tuple(recorder.buffer)
    return Dataset(dataclasses.replace(datasets.from_arrays(ARRAYS, arrays), said=said))


def to_array(where: str, value: Any) -> NDArray[Any]:
    """A copy of an array, a tensor or nested lists of numbers. Raises DataError."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    try:
        found = np.array(value)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where} is no array: {error}. Give rows of one shape") from None
    if found.dtype.kind not in "biuf" and found.size:
        raise DataError(
            f"{where} has values of {found.dtype}. Give numbers; number the classes 0, 1, 2, ..."
        )
    return found


def _items(where: str, items: Any) -> Iterator[Any]:
    """The items of a map-style data set, which may lack ``__iter__``."""
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


def _pairs(where: str, items: Any) -> Iterator[tuple[Any, Any]]:
    for number, item in enumerate(_items(where, items)):
        if not (isinstance(item, tuple | list) and len(item) == 2):
            raise DataError(f"{where}: item {number} is no (row, label) but {_short(item)}")
        yield item[0], item[1]


def _collected(
    where: str, pairs: Iterator[tuple[Any, Any]]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """All rows, of one form, and their labels."""
    rows: list[NDArray[Any]] = []
    labels: list[int] = []
    for number, (row, label) in enumerate(pairs):
        here = f"{where}: row {number}"
        rows.append(to_pixels(here, row))
        labels.append(_label(here, label))
        first, last = rows[0], rows[-1]
        if (last.shape, last.dtype) != (first.shape, first.dtype):
            raise DataError(
                f"{here} is {last.dtype} of shape {last.shape}, and row 0 {first.dtype} of "
                f"{first.shape}. Resize or convert them to one form"
            )
    if not rows:
        raise DataError(f"{where} has no rows. Give at least one")
    return np.stack(rows), np.array(labels)


def to_pixels(where: str, row: Any) -> NDArray[Any]:
    """One row as an array; of an image of Pillow its grey or RGB pixels."""
    convert: Callable[[str], Any] | None = getattr(row, "convert", None)
    if convert is not None and hasattr(row, "mode"):
        row = (
            row if row.mode in ("L", "RGB") else convert("L" if row.mode in ("1", "LA") else "RGB")
        )
    return to_array(where, row)


def _label(where: str, label: Any) -> int:
    if label is None:
        return NO_LABEL
    try:
        number = int(label)
    except (TypeError, ValueError):
        number = NO_LABEL - 1
    if number < NO_LABEL or number != label:
        raise DataError(
            f"{where} has the label {_short(label)}. Give its class number, or None or -1 for none"
        )
    return number


def _short(value: object) -> str:
    return repr(value)[:60]
