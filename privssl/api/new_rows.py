"""Conversion of new rows to a finished run's input: scaled, or encoded.

The run folder has the shape, the columns of a table, and name and checksum of a frozen encoder. The
encoder's package or file of weights must be available.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from privssl.api.frames import field_of, refuse_doubled_columns
from privssl.api.row_sources import to_array, to_pixels
from privssl.core.rows import AS_STORED, BYTES
from privssl.data.column_values import read_scales
from privssl.data.csv_rows import Part, numbers_of, read_new, texts_of
from privssl.data.datasets import encode_new
from privssl.data.npz import Scale, check_rows
from privssl.data.sent140 import TWEET_CLASSES, clean_tweet
from privssl.errors import DataError
from privssl.settings.schema import DataSettings

HERE = "predict"


@dataclass(frozen=True)
class RowForm:
    """The format of a run's rows."""

    folder: Path  # of the run
    data: DataSettings
    shape: tuple[int, ...]  # of a row in the network's input
    raw_shape: tuple[int, ...] | None  # of an image before an encoder
    columns: Mapping[str, Scale] | None  # of a table
    weights: str | None  # checksum of the encoder's weights; None: no encoder
    scaling: str  # of the network's input (``rows.scaling_of``); former versions: another text

    @classmethod
    def of(cls, folder: Path, data: DataSettings, rows: Mapping[str, Any]) -> "RowForm":
        """Read the format from a run folder. ``rows``: of results.json."""
        raw, encoder = rows.get("raw_shape"), rows.get("encoder")
        return cls(
            folder, data, tuple(rows["shape"]), raw and tuple(raw), read_scales(rows),
            encoder and encoder["weights"], rows.get("scaling", ""),
        )  # fmt: skip

    @property
    def picture_shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of an image. Raises DataError for other rows."""
        match self.shape if self.weights is None else self.raw_shape:
            case (channels, height, width):
                return channels, height, width
        raise DataError(
            f"{self.folder} was not trained on pictures, but on {self._description}. Give such rows"
        )

    @property
    def _description(self) -> str:
        """Describe the rows."""
        if self._text_column:
            return f"texts: a CSV file with the column {self._text_column}, or a list of texts"
        if self.columns is not None:
            return f"a table: a CSV file with the columns {', '.join([*self.columns][:10])}"
        return f"rows of {self.shape if self.weights is None else self.raw_shape}"

    @property
    def _text_column(self) -> str:
        return "text" if self._has_tweets else self.data.text

    def read_csv(self, path: Path, labelled: bool) -> tuple[Any, NDArray[np.str_]]:
        """Read a CSV file as rows for ``convert`` and, with ``labelled``, their classes.

        Raises DataError if it cannot be read, lacks a column, or the run had no such rows.
        """
        label = self.data.label if labelled else None
        if text := self._text_column:
            part = read_new(path, (text,), label)
            names = dict(zip("01", TWEET_CLASSES, strict=True)) if self._has_tweets else {}
            return texts_of(part, text), np.array([names.get(c, c) for c in part.labels])
        if self.columns is None:
            outdated = self.data.name == "csv"  # of former versions: results.json has no columns
            raise DataError(
                f"{self.folder} has no columns in results.json: an older version wrote it. Train "
                "again" if outdated else f"{path} is a CSV file, and {self.folder} was trained on "
                f"{self._description}. Give such rows"
            )  # fmt: skip
        part = read_new(path, tuple(self.columns), label)
        return numbers_of(part, self.columns), np.array(part.labels)

    @property
    def _has_tweets(self) -> bool:
        return self.data.name == "sent140"

    def convert(self, x: Any) -> NDArray[Any]:
        """Convert rows to the run's stored format (N, *shape).

        Args:
            x: arrays, tensors or lists of images of Pillow. For runs on texts: texts. For runs on
                tables: a data frame, a mapping of columns, or a list of mappings.

        Raises:
            DataError: rows of another form, or the encoder is missing or has other weights.
        """
        if isinstance(x, Mapping) or hasattr(x, "columns"):
            return self._convert_table(x)
        if self.columns is not None and _has_no_numbers(x):
            return self._convert_table(_collect_columns(self.folder, x, tuple(self.columns)))
        texts = _as_texts(x)
        if texts is not None:
            return self._encode_texts(texts)
        if isinstance(x, Sequence):
            x = [to_pixels(f"{HERE}: row {n}", row) for n, row in enumerate(x)]
            if len({row.shape for row in x}) > 1:
                raise DataError(
                    f"{HERE}: rows have different shapes. Resize them to {self._expected_shape}"
                )
        array = to_array(HERE, x)
        if not array.ndim:
            raise DataError(f"{HERE}: {str(x)[:60]} is one value. Give rows, (N, *shape)")
        if not len(array):
            return np.zeros((0, *self.shape), dtype=np.float32)
        rows = check_rows(HERE, array, sequences=len(self._expected_shape) == 2)
        if self.weights is not None and rows.shape[1:] == self.raw_shape:
            return self._encode_rows(torch.from_numpy(rows))
        if rows.shape[1:] == self.shape:  # encoder output: features
            if self.columns is not None and np.abs(rows).max() > 1:
                raise DataError(
                    f"{HERE}: numbers beyond [-1, 1], to which the run scaled its columns. Give a "
                    "data frame, a mapping of columns, or a CSV file, which are scaled"
                )
            self._refuse_other_scaling(rows)
            return rows
        channels, *sides = self._expected_shape
        row_shapes = [
            self._expected_shape,
            (*sides, channels),
            *([(*sides,)] if channels == 1 else []),
        ]
        advice = "Resize or convert them"
        if array.shape in row_shapes:
            advice = "This is one row: give a batch of it, x[None]"
        raise DataError(
            f"{HERE}: rows have the shape {rows.shape[1:]}, and {self.folder} was trained on "
            f"{self._expected_shape} (of images: channels, height, width). {advice}"
        )

    def _refuse_other_scaling(self, rows: NDArray[Any]) -> None:
        """Raise DataError for vectors that would be scaled otherwise than the training rows."""
        as_bytes = rows.dtype == np.uint8
        if self.scaling == AS_STORED and as_bytes:
            raise DataError(
                f"{HERE}: rows are bytes, which are scaled to [-1, 1], and {self.folder} was "
                "trained on floats, which are not. Give floats"
            )
        # as run.generate makes them
        scaled = as_bytes or (-1 <= rows.min() < 0 and rows.max() <= 1)
        if self.scaling == BYTES and not scaled:
            raise DataError(
                f"{HERE}: rows are floats, which are taken as they are, and {self.folder} was "
                "trained on bytes, which are scaled to [-1, 1]. Give uint8, or x / 127.5 - 1"
            )

    @property
    def _expected_shape(self) -> tuple[int, ...]:
        return self.raw_shape or self.shape

    def _convert_table(self, x: Any) -> NDArray[np.float32]:
        if self.columns is None:
            raise DataError(
                f"{HERE}: {self.folder} was trained on {self._description}, not on columns"
            )
        refuse_doubled_columns(HERE, getattr(x, "columns", x))
        by_name = {str(name): x[name] for name in getattr(x, "columns", x)}
        if absent := [name for name in self.columns if name not in by_name]:
            raise DataError(
                f"{HERE}: no column {', '.join(absent[:3])}. Name columns as those that "
                f"{self.folder} was trained on"
            )
        table = {name: by_name[name] for name in self.columns}
        if scalar := [n for n, v in table.items() if isinstance(v, str) or not np.iterable(v)]:
            raise DataError(
                f"{HERE}: column {scalar[0]} is one value. Give a list, with a value for each row"
            )
        columns = {name: [field_of(value) for value in values] for name, values in table.items()}
        lengths = {len(values) for values in columns.values()}
        if len(lengths) > 1:
            raise DataError(f"{HERE}: columns have different lengths. Give each row all of them")
        return numbers_of(Part(Path(HERE), columns, (), range(*lengths), (), "row"), self.columns)

    def _encode_texts(self, texts: Sequence[str]) -> NDArray[Any]:
        if self.weights is None or self.raw_shape is not None:
            raise DataError(f"{HERE}: texts, and {self.folder} was trained on {self._description}. "
                            "Give numbers")  # fmt: skip
        return self._encode_rows(
            tuple(map(clean_tweet, texts)) if self._has_tweets else tuple(texts)
        )

    def _encode_rows(self, rows: Any) -> NDArray[Any]:
        assert self.weights is not None
        encoded: NDArray[Any] = encode_new(self.data, rows, self.weights).numpy()
        return encoded


def _as_texts(x: Any) -> list[str] | None:
    """Return texts of a list, an array or a series; None for other values."""
    if isinstance(x, str):
        raise DataError(f"{HERE}: one text. Give a list of texts")
    if isinstance(x, Sequence):
        return list(x) if len(x) and all(isinstance(row, str) for row in x) else None
    kind = getattr(getattr(x, "dtype", None), "kind", "")
    if kind in ("U", "O") and len(x) and all(isinstance(row, str) for row in x):
        return [str(row) for row in x]
    return None


def _has_no_numbers(x: Any) -> bool:
    """Return whether these are lines of a table, with or without names, rather than features."""
    if isinstance(x, Sequence):
        return any(isinstance(row, str | Mapping) or _has_no_numbers(row) for row in x)
    return getattr(getattr(x, "dtype", None), "kind", "") in ("O", "U", "S")


def _collect_columns(folder: Path, x: Any, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Return columns of a list of mappings. Raises DataError for a line without a column."""
    for number, line in enumerate(x):
        if not isinstance(line, Mapping):
            raise DataError(
                f"{HERE}: lines without names of columns, and {folder} was trained on a table. "
                "Give a data frame, a mapping of columns, or a list of mappings"
            )
        if absent := [name for name in columns if name not in line]:
            raise DataError(
                f"{HERE}, row {number}: no column {', '.join(absent[:3])}. Give each row all "
                f"columns that {folder} was trained on; None: missing"
            )
    return {name: [line[name] for line in x] for name in columns}
