"""CSV files: tables of numbers and categories, and texts.

The folder has ``train.csv`` and ``test.csv`` with the same columns, UTF-8 with or without a BOM. A
training row with an empty label is unlabelled. A table's columns become numbers in [-1, 1]: a
numeric column is scaled by its bounds, a category has one number for each of its values (one-hot, 1
and -1). A numeric column with missing values has a second number, 1 if the value is missing. Bounds
and categories come from a declared file (``data.columns``), or from the training rows, which
private runs refuse, because bounds are a release.
"""

import csv
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from privssl.data.declared_columns import MISSING, read_columns
from privssl.data.fields import (
    ADVICE,
    class_number,
    doubled,
    is_absent,
    is_number,
    odd_categories,
    odd_numbers,
    places_of,
    plain,
    tells_classes,
)  # fmt: skip
from privssl.data.npz import NO_LABEL, Arrays, Scale, refuse_unprintable
from privssl.data.persons import check_names
from privssl.errors import DataError, first_few

log = logging.getLogger("privssl")

MOST_CATEGORIES = 1000  # of a column
FEW_ROWS = 20  # fewer rows may all have different values by chance
COLUMNS = "Set data.label to the column of the classes"  # advice


class Texts(NamedTuple):
    """Texts and classes, in the form of ``Arrays``."""

    x_train: tuple[str, ...]
    y_train: NDArray[np.int64]
    x_test: tuple[str, ...]
    y_test: NDArray[np.int64]
    class_names: tuple[str, ...]
    persons: tuple[str, ...] | None = None  # of training rows


@dataclass(frozen=True)
class Part:
    """One file or frame: its fields as text, without the label, and the line numbers."""

    path: object
    columns: Mapping[str, Sequence[str]]
    labels: Sequence[str]
    lines: Sequence[int]
    records: tuple[str, ...]  # all fields but the label, which identify a record to an account
    unit: str = "line"  # the unit of ``lines``
    persons: tuple[str, ...] | None = None  # whose rows they are


# Reading -------------------------------------------------------------------------------------


def read_texts(
    root: Path, *, text: str, label: str, classes: tuple[str, ...] | None = None,
    may_be_empty: bool = False, person: str = "",
) -> Texts:  # fmt: skip
    """Read the texts of two files.

    ``classes``, ``may_be_empty``, ``person``: see :func:`read_table`. Raises DataError.
    """
    train = _read_part(root / "train.csv", label, (text,), may_be_empty=may_be_empty, person=person)
    names = classes or _collect_class_names(train)
    test = _drop_rows(train) if classes else _read_part(root / "test.csv", label, (text,))
    return Texts(
        texts_of(train, text), _convert_labels(train, names), texts_of(test, text),
        _convert_labels(test, names, is_test=True), names, train.persons,
    )  # fmt: skip


def texts_of(part: Part, column: str) -> tuple[str, ...]:
    """Return the texts of a part; warn of empty ones."""
    texts = tuple(part.columns[column])
    if empty := [line for text, line in zip(texts, part.lines, strict=True) if not text.strip()]:
        log.warning(
            "%s: %d rows have no text in column %s (the first: %s %d). They are used as empty "
            "texts: leave them out.", part.path, len(empty), column, part.unit, empty[0],
        )  # fmt: skip
    return texts


def read_table(
    root: Path, *, label: str, columns: Path | None, classes: tuple[str, ...] | None = None,
    may_be_empty: bool = False, person: str = "",
) -> Arrays:  # fmt: skip
    """Read the numbers of two files. A record is identified by its fields, independently of the
    scales.

    Args:
        columns: a YAML file of bounds and categories (``declared_columns``); None: from the
            training rows.
        classes: all classes; then test.csv is not read. None: those of the training rows.
        may_be_empty: whether train.csv may have no row, if columns and classes are given.
        person: a column of train.csv that names whose row a row is, and is no feature; empty: none.

    Raises:
        DataError: a file or column is missing, or a value is no finite number.
    """
    declared = None if columns is None else read_columns(columns, label)
    column_names = None if declared is None else tuple(declared)
    advice = f"Correct the columns in {columns}" if columns else "Give both files the same columns"
    if person in (column_names or ()):
        raise DataError(f"{columns} has {person}, which data.person names. Leave it out of one")
    train = _read_part(
        root / "train.csv", label, column_names, COLUMNS, advice, may_be_empty, person
    )
    scales = declared or scales_of(train)
    if classes:
        return table_of(train, _drop_rows(train), scales, classes)
    test = _read_part(root / "test.csv", label, tuple(scales), COLUMNS, advice)
    return table_of(train, test, scales)


def _drop_rows(part: Part) -> Part:
    """Return the same columns without rows."""
    return Part(part.path, dict.fromkeys(part.columns, ()), (), (), ())


def table_of(
    train: Part, test: Part, scales: Mapping[str, Scale], names: tuple[str, ...] | None = None
) -> Arrays:
    """Return the numbers of two parts.

    ``names``: of the classes; None: those of training rows. Raises DataError.
    """
    names = names or _collect_class_names(train)
    for column in scales:
        if tells_classes(train.columns[column], train.labels):
            log.warning(
                "%s: column %s alone tells the class of every row with a label. %s if it was made "
                "from the label.", train.path, column, ADVICE,
            )  # fmt: skip
    x_train, x_test = (numbers_of(part, scales) for part in (train, test))
    y_train, y_test = _convert_labels(train, names), _convert_labels(test, names, is_test=True)
    return Arrays(
        x_train, y_train, x_test, y_test, names, train.records, scales, persons=train.persons
    )


def numbers_of(part: Part, scales: Mapping[str, Scale]) -> NDArray[np.float32]:
    """Return all columns in [-1, 1], concatenated (N, features). Raises DataError."""
    return np.concatenate(
        [_scale_column(part, name, scale) for name, scale in scales.items()], axis=1
    )


def part_of(
    path: object, columns: Mapping[str, Sequence[str]], label: str, rows: Sequence[int],
    person: str = "",
) -> Part:  # fmt: skip
    """Build a part of columns in memory. ``label`` and ``person``: one of them, or absent;
    ``rows``: the numbers of its rows."""
    fields = sorted(name for name in columns if name != label)
    labels = [value.strip() for value in columns.get(label, ())]
    features = {name: columns[name] for name in columns if name not in (label, person or None)}
    return Part(path, features, labels, rows, _build_records(fields, columns), "row")


def _build_records(fields: Sequence[str], columns: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    return tuple(
        "\x1f".join(f"{n}={plain(v)}" for n, v in zip(fields, values, strict=True))
        for values in zip(*(columns[n] for n in fields), strict=True)
    )


def read_new(path: Path, columns: Sequence[str], label: str | None) -> Part:
    """Read a file of new rows for a finished run, with at least these columns. Raises DataError if
    it cannot be read, lacks a column, or with ``label`` a row has none."""
    part = _read_part(path, label, columns, "The run was trained on them: name yours the same")
    if label is not None and "" in part.labels:
        line = part.lines[part.labels.index("")]
        raise DataError(f"{path}, line {line}: no label. Give each row its class in {label}")
    return part


def _read_part(
    path: Path, label: str | None, column_names: Sequence[str] | None,
    advice: str = f"{COLUMNS}, and data.text to that of texts", other_advice: str = "",
    may_be_empty: bool = False, person: str = "",
) -> Part:  # fmt: skip
    """Read one file; ``column_names``: its columns, all but label and person if None. Raises
    DataError.

    ``label``: None if the file needs no classes. ``advice``: for a missing column;
    ``other_advice``: that if the label's column exists.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            if len(header) == 1 and any(separator in header[0] for separator in ";\t|"):
                raise DataError(
                    f"{path}: the first line is {header[0]!r}. Separate columns by commas"
                )
            rows, lines = [], []
            for row in reader:
                if len(row) != len(header) and row:
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(row)} fields, and the first line "
                        f"has {len(header)}. Quote fields with commas or line breaks"
                    )
                if row:
                    rows.append(row)
                    lines.append(reader.line_num)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}. Give the folder of train.csv and test.csv in "
                        "data.root (of a site: rows.root)") from None  # fmt: skip
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is no CSV file in UTF-8: {error}. Save it again, as UTF-8"
        ) from None
    if not header:
        raise DataError(f"{path} is empty. Give a line of column names, then a line for each row")
    if repeated := sorted({name for name in header if header.count(name) > 1}):
        raise DataError(f"{path} has the column {repeated[0]} twice. Rename one")
    others = [name for name in (label, person or None) if name is not None]
    features = [name for name in header if name not in others]
    names = features if column_names is None else [*column_names]
    needed = [*others, *names]
    if missing := [name for name in needed if name not in header]:
        hint = other_advice if other_advice and label in header else advice
        hint = "Correct data.person" if person in missing else hint
        raise DataError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(header)}. {hint}"
        )
    if not (rows or may_be_empty):
        raise DataError(f"{path} has no rows. Give at least one")
    by_name = {name: [row[index] for row in rows] for index, name in enumerate(header)}
    records = _build_records([n for n in sorted(header) if n != label], by_name)
    labels = [""] * len(rows) if label is None else [value.strip() for value in by_name[label]]
    persons = check_names(f"{path}: {person}", by_name[person]) if person else None
    return Part(path, {n: by_name[n] for n in names}, labels, lines, records, persons=persons)


# Classes -------------------------------------------------------------------------------------


def _collect_class_names(train: Part) -> tuple[str, ...]:
    """Return names of the classes: numbers by size, others by name."""
    names = sorted(set(train.labels) - {""})
    if len(names) < 2:
        raise DataError(f"{train.path} has {len(names)} classes in its label column. Give two")
    refuse_unprintable(train.path, names)
    if similar := doubled(names):
        log.warning(
            "%s: %r and %r are two classes. Write them alike if they are one.", train.path, *similar
        )
    # -1 beside two others is no label in arrays and in scikit-learn
    if missing_words := [
        n for n in names if is_absent(n) or (plain(n) == "-1.0" and len(names) > 2)
    ]:
        count = train.labels.count(missing_words[0])
        log.warning(
            "%s: %d rows have the label %s, which counts as a class. Leave the field empty where "
            "a row has no label.", train.path, count, missing_words[0],
        )  # fmt: skip
    return tuple(sorted(names, key=int) if all(n.isdecimal() for n in names) else names)


def _convert_labels(part: Part, names: Sequence[str], is_test: bool = False) -> NDArray[np.int64]:
    """Return class numbers; ``is_test``: labels must occur in the training rows."""
    numbers = {name: number for number, name in enumerate(names)} | {"": NO_LABEL}
    for value, line in zip(part.labels, part.lines, strict=True):
        if is_test and not value:
            raise DataError(
                f"{part.path}, {part.unit} {line}: no label. Give each test row its class, or move "
                "it to the training rows"
            )
        if class_number(value, numbers) is None:
            reason = "which no training row has" if is_test else "which is no declared class"
            raise DataError(
                f"{part.path}, {part.unit} {line}: the label is {value!r}, {reason}. Give one of "
                f"{', '.join(names[:10])}"
            )
    return np.array([class_number(value, numbers) for value in part.labels], dtype=np.int64)


# Columns -------------------------------------------------------------------------------------


def scales_of(train: Part) -> dict[str, Scale]:
    """Return bounds and categories of the training rows; a column is numeric if all values are
    numbers or missing.

    Raises:
        DataError: too many categories, or a column of numbers with a few other values: as a
            category it would have one feature per number.
    """
    scales: dict[str, Scale] = {}
    counts = list[str]()
    for name, values in train.columns.items():
        if not name.strip() or name.startswith("Unnamed: "):  # pandas' name of an unnamed column
            raise DataError(
                f"{train.path} has a column without a name: row numbers of another program? Leave "
                "it out (pandas: to_csv(index=False)), or name it"
            )
        present = [(index, v) for index, v in enumerate(values) if not is_absent(v)]
        if present and all(is_number(value) for _, value in present):
            numbers = [_parse_number(train, name, v, index) for index, v in present]
            low, high, absent = min(numbers), max(numbers), len(values) - len(present)
            if low == high and not absent:
                log.warning(
                    "%s: column %s is constant, so it has no information.", train.path, name
                )
            if len(values) >= FEW_ROWS and (warning := odd_numbers(numbers)):
                log.warning("%s: column %s %s.", train.path, name, warning)
            high = high if high > low else max(low + 1, math.nextafter(low, math.inf))
            scales[name] = (low, high)
            if absent:
                scales[name] = (low, high, MISSING)
                counts.append(f"{name} ({absent} of {len(values)})")
            continue
        not_numeric = [index for index, value in present if not is_number(value)]
        if not_numeric and 2 * len(not_numeric) < len(present):
            index = not_numeric[0]
            raise DataError(
                f"{train.path}, {train.unit} {train.lines[index]}: column {name} has "
                f"{values[index]!r}, and most of its values are numbers. Correct it, or declare "
                "categories in data.columns (Python: columns=)"
            )
        categories = tuple(sorted(set(values)))
        if len(categories) == 1:
            log.warning("%s: column %s is constant, so it has no information.", train.path, name)
        if len(categories) > MOST_CATEGORIES:
            raise DataError(
                f"{train.path}: column {name} has {len(categories)} different values that are no "
                f"numbers. Leave it out, or set data.text: {name}"
            )
        if len(values) >= FEW_ROWS and (warning := odd_categories(values)):
            log.warning("%s: column %s %s.", train.path, name, warning)
        scales[name] = categories
    if not scales:
        raise DataError(f"{train.path} has no column beside its label")
    if counts:
        log.warning(
            "%s: %d columns have missing values, so each has a second number for them: "
            "%s.", train.path, len(counts), ", ".join([*counts[:10], *["..."][: len(counts) > 10]]),
        )  # fmt: skip
    return scales


def _scale_column(part: Part, name: str, scale: Scale) -> NDArray[np.float32]:
    """Scale a column to [-1, 1]: (N, 1), (N, 2) with missing values, or (N, categories)."""
    values = part.columns[name]
    if isinstance(scale[0], float):
        low, high = float(scale[0]), float(scale[1])
        if has_missing := MISSING in scale:
            absent = np.array([is_absent(value) for value in values], dtype=bool)
            values = ["0" if is_absent(value) else value for value in values]
        x = np.array([_parse_number(part, name, v, index) for index, v in enumerate(values)])
        x = np.where(absent, (low + high) / 2, x) if has_missing else x
        if clipped := int(((x < low) | (x > high)).sum()):
            log.warning("%s: column %s has values beyond its bounds (%d), which are clipped.",
                        part.path, name, clipped)  # fmt: skip
        scaled = 2 * (x.clip(low, high) - low) / (high - low) - 1
        parts = (scaled, 2.0 * absent - 1) if has_missing else (scaled,)
        return np.stack(parts, axis=1).astype(np.float32)
    categories = tuple(map(str, scale))
    indices = np.array(places_of(values, categories), dtype=np.int64)
    if unknown := int((indices < 0).sum()):
        log.warning(
            "%s: %d values of column %s are not among its categories (the first: %.40r; it has %s) "
            "and count as none.", part.path, unknown, name, values[int((indices < 0).argmax())],
            first_few(categories),
        )  # fmt: skip
    one_hot: NDArray[np.bool_] = indices[:, None] == np.arange(len(categories))
    return np.where(one_hot, 1, -1).astype(np.float32)


def _parse_number(part: Part, name: str, value: str, index: int) -> float:
    """Parse a finite number. Raises DataError that names the line."""
    number = float(value) if is_number(value) else math.nan
    if not math.isfinite(number):
        raise DataError(
            f"{part.path}, {part.unit} {part.lines[index]}: column {name} has {value!r}. Give "
            f"finite numbers, or declare missing values in data.columns (Python: columns=): "
            f"{name}: [lowest, highest, {MISSING}]"
        )
    return number
