"""Arrays of rows, returned by every reader, and the reader of NPZ files.

An NPZ file has ``x_train``, ``y_train``, ``x_test`` and ``y_test``. Training rows without a label
have y = -1, or are in ``x_unlabelled``, and come after the others. Images are (N, H, W), one
channel; (N, H, W, C) as in NumPy and Keras; or (N, C, H, W) as in torch. If both axes are 1 or 3,
the last one has the channels. Vectors are (N, F), as bytes or as finite floats, which networks take
as they are. With ``kind="sequence"`` in the file rows are sequences (N, length, F) of finite
floats, such as time series. ``person_train``, and ``person_unlabelled`` where there are such rows,
name the person of each row (``persons.py``). Pickles are refused: loading one can run code.
"""

import logging
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from privssl.data.persons import PREFIX, read_persons
from privssl.errors import DataError, first_few

log = logging.getLogger("privssl")

NAMES, UNLABELLED = ("x_train", "y_train", "x_test", "y_test"), "x_unlabelled"
KIND = "kind"  # of rows; absent: images or vectors, by their axes
PERSONS = (f"{PREFIX}train", f"{PREFIX}unlabelled")  # whose rows they are; absent: not known
CHANNELS = (1, 3)
NO_LABEL = -1
DARK = 64  # of 255: images without a pixel this bright are probably scaled wrongly

MAX_FEATURE = 1e4  # largest feature: networks expect numbers of about 1
MAX_CLASS = 2**20 - 1  # largest class number: a classifier has an output for each
MAX_BYTES = 2**34  # of one unpacked array: zip files can expand a thousandfold

# Errors of zipfile, zlib and NumPy for damaged, encrypted or pickled files.
_DAMAGE = (OSError, ValueError, EOFError, RuntimeError, MemoryError, BadZipFile, zlib.error)


class NpzRows(NamedTuple):
    """Rows of one agent, in the form of ``Arrays``; None: no rows of that kind."""

    x: NDArray[Any] | None
    y: NDArray[np.int64] | None
    unlabelled: NDArray[Any] | None
    persons: tuple[str, ...] | None = None  # of x
    unlabelled_persons: tuple[str, ...] | None = None


#: Of a table's column: bounds, with "missing" if values may be missing, or categories.
Scale = tuple[float, float] | tuple[float, float, str] | tuple[str, ...]


class Arrays(NamedTuple):
    """Checked arrays of a data set.

    Images (N, C, H, W), uint8 in 0..255 or float32 in [0, 1]; vectors (N, F), uint8 or float32;
    sequences (N, length, F), float32; classes (N,) int64.
    """

    x_train: NDArray[Any]
    y_train: NDArray[np.int64]  # NO_LABEL if the class is unknown
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]
    class_names: tuple[str, ...]
    records: tuple[str, ...] | None = None  # what identifies training rows to an account; None: x
    scales: Mapping[str, Scale] | None = None  # of a table's columns, in their order
    coloured_by_train: bool = False  # whether all have three channels because a training image has
    persons: tuple[str, ...] | None = None  # whose training rows they are; None: not known


def read_npz(path: Path) -> Arrays:
    """Read and check the four arrays of an NPZ file. Raises DataError if the file is missing, or
    not in the format above."""
    optional = (UNLABELLED, KIND, *PERSONS)
    return check_arrays(path, _read_arrays(path, NAMES, optional, warn=True))


def check_arrays(
    path: object, by_name: Mapping[str, NDArray[Any]], class_names: Sequence[str] | None = None
) -> Arrays:
    """Convert arrays of a file, or in memory, to the layout and type of rows.

    Raises DataError if they are not in the format above.

    Args:
        path: their origin, for errors.
        by_name: arrays by their names in an NPZ file; ``x_unlabelled``, ``kind`` and persons may
            be absent.
        class_names: in the order of the class numbers; None: the numbers.
    """
    x_train, y_train = _convert_part(path, by_name, "train")
    x_test, y_test = _convert_part(path, by_name, "test")
    parts = {"x_train": x_train, "x_test": x_test}
    if UNLABELLED in by_name:
        parts[UNLABELLED] = _convert_unlabelled(path, by_name)
    _check_same_form(path, parts)
    names = None if class_names is None else tuple(map(str, class_names))
    classes = int(y_train.max()) + 1
    if names is not None:
        _check_names(path, names, classes)
        classes = len(names)
    if not 2 <= classes <= len(y_train):
        raise DataError(
            f"{path}: the largest label of {len(y_train)} rows in y_train is {classes - 1}. "
            "Number the classes 0, 1, 2, ... and give at least two"
        )
    if y_test.max() >= classes:
        raise DataError(
            f"{path}: y_test has class {y_test.max()}, but the largest in y_train is "
            f"{classes - 1}. A class without training rows cannot be learned: leave it out"
        )
    if missing := sorted(set(range(classes)) - set(y_train.tolist())):
        log.warning(
            "%s: no training row has class %s, but the classifier has an output for it. Number the "
            "classes 0, 1, 2, ... without gaps.",
            path, first_few(missing),
        )  # fmt: skip
    persons = read_persons(
        path, by_name, {p.removeprefix("x_"): len(x) for p, x in parts.items() if p != "x_test"}
    )
    arrays = Arrays(
        x_train, y_train, x_test, y_test, names or tuple(map(str, range(classes))), persons=persons
    )
    return with_unlabelled(arrays, parts[UNLABELLED]) if UNLABELLED in parts else arrays


def refuse_unprintable(path: object, names: Sequence[str]) -> None:
    """Raise DataError for a class name that could begin a new line in a file."""
    if invalid := [name for name in names if not name.isprintable()]:
        raise DataError(
            f"{path}: the class name {invalid[0]!a:.60} has line breaks, or other characters that "
            "cannot be printed, and class names are written to files. Rename it"
        )


def _check_names(path: object, names: tuple[str, ...], classes: int) -> None:
    refuse_unprintable(path, names)
    if len(names) < classes or len(set(names)) < len(names):
        raise DataError(
            f"{path}: class_names has {len(names)} names, {len(set(names))} of them different, and "
            f"y_train {classes} classes. Give each class a name of its own"
        )


def check_rows(path: object, x: NDArray[Any], *, sequences: bool = False) -> NDArray[Any]:
    """Return rows in their final layout and type. Raises DataError."""
    return _convert_numbers(path, "x", _convert_layout(path, "x", x, sequences=sequences))


def with_unlabelled(arrays: Arrays, x: NDArray[Any]) -> Arrays:
    """Append training rows of unknown class."""
    y = np.concatenate([arrays.y_train, np.full(len(x), NO_LABEL)])
    return arrays._replace(x_train=np.concatenate([arrays.x_train, x]), y_train=y)


def read_rows(
    path: Path, *, labelled: bool, unlabelled: bool, may_be_empty: bool = False
) -> NpzRows:
    """Read the rows of one agent: ``x_labelled`` with ``y_labelled``, and ``x_unlabelled``, as
    requested.

    Raises DataError as :func:`read_npz`.

    Args:
        may_be_empty: whether zero labelled rows are allowed: an error would reveal a private
            number of rows.
    """
    names = [*(("x_labelled", "y_labelled") if labelled else ()),
             *(("x_unlabelled",) if unlabelled else ())]  # fmt: skip
    wanted = [name.removeprefix("x_") for name in names if name.startswith("x_")]
    arrays = _read_arrays(path, names, (KIND, *(PREFIX + part for part in wanted)))
    x, y = _convert_part(path, arrays, "labelled", may_be_empty) if labelled else (None, None)
    x_unlabelled = _convert_unlabelled(path, arrays) if unlabelled else None
    parts = {"x_labelled": x, "x_unlabelled": x_unlabelled}
    _check_same_form(path, {name: part for name, part in parts.items() if part is not None})
    counts = {name[2:]: len(part) for name, part in parts.items() if part is not None}
    persons = read_persons(path, arrays, counts)
    if persons is None:
        return NpzRows(x, y, x_unlabelled)
    with_labels = counts.get("labelled", 0)
    return NpzRows(x, y, x_unlabelled, persons[:with_labels], persons[with_labels:])


def read_one_of(path: Path, choices: Sequence[Sequence[str]]) -> list[NDArray[Any]]:
    """Read the arrays of the first choice whose names an NPZ file all has; or one NPY file's array.
    Raises DataError if the file is missing, neither NPY nor NPZ, or has none of the choices."""
    if path.suffix.lower() == ".npy" and all(len(names) == 1 for names in choices):
        try:
            return [np.load(path, allow_pickle=False)]
        except _DAMAGE as error:
            reason = getattr(error, "strerror", None) or _describe_damage(error)
            raise DataError(
                f"{path} cannot be read as an NPY file: {reason}. Save it with numpy.save, or "
                "correct its path"
            ) from None
    expected = ", or ".join(" and ".join(names) for names in choices)
    all_names = {name for names in choices for name in names}
    arrays = _read_arrays(path, (), all_names, instead=expected)
    for names in choices:
        if set(names) <= arrays.keys():
            return [arrays[name] for name in names]
    raise DataError(
        f"{path} has no {expected}. Save it with numpy.savez_compressed, under such names"
    )


def _convert_unlabelled(path: object, arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    x = _convert_layout(
        path, UNLABELLED, arrays[UNLABELLED], sequences=_are_sequences(path, arrays)
    )
    x = _convert_numbers(path, UNLABELLED, x)
    if not len(x):
        raise DataError(f"{path}: {UNLABELLED} has no rows. Give at least one, or leave it out")
    return x


def _check_same_form(path: object, parts: dict[str, NDArray[Any]]) -> None:
    """Raise DataError if shapes or types differ; warn of dark images and of different ranges."""
    (first, x), *others = parts.items()
    for name, other in others:
        if (x.shape[1:], x.dtype) != (other.shape[1:], other.dtype):
            raise DataError(
                f"{path}: {first} has rows {x.shape[1:]} of {x.dtype} and {name} "
                f"{other.shape[1:]} of {other.dtype} (channels, height, width; or features; or "
                "length, features). Make them alike"
            )
    if x.ndim < 4:
        return
    maximum = 255 if x.dtype == np.uint8 else 1
    levels = {name: float(part.max()) for name, part in parts.items() if part.size}
    dark = {name: value for name, value in levels.items() if value < DARK * maximum / 255}
    for name, value in dark.items():
        form, other_form = ("bytes", "floats in [0, 1]") if maximum == 255 else ("floats", "bytes")
        log.warning(
            "%s: %s has %s up to %.5g. They are taken for shades from 0 to %d, so all pixels are "
            "nearly black: scale them to that range, or give %s.",
            path, name, form, value, maximum, other_form,
        )  # fmt: skip
    lowest, highest = min(levels, key=levels.__getitem__), max(levels, key=levels.__getitem__)
    if not dark and levels[highest] > 2 * levels[lowest]:
        log.warning(
            "%s: %s goes up to %.5g and %s up to %.5g. Scale both equally.",
            path, lowest, levels[lowest], highest, levels[highest],
        )  # fmt: skip


def _read_arrays(
    path: Path, names: Sequence[str], optional: Collection[str] = (), *,
    warn: bool = False, instead: str = "",
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """Read required and optional arrays of an NPZ file; ``warn`` of others. ``instead``: the
    required form of a single array, if no name is required."""
    try:
        with path.open("rb") as stream:  # NumPy leaves a damaged file open
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DataError(
                    f"{path} is a single array. Save {instead or ', '.join(names)} with "
                    "numpy.savez_compressed"
                )
            missing = [name for name in names if name not in file.files]
            if missing:
                raise DataError(
                    f"{path} has no {', '.join(missing)} (it has {', '.join(file.files)}). "
                    f"Save it with numpy.savez_compressed, with {', '.join(names)}"
                )
            assert file.zip is not None  # the file is open
            for info in file.zip.infolist():  # zipfile never unpacks more than this
                if info.file_size > MAX_BYTES:
                    raise ValueError(f"{info.filename} has {info.file_size} bytes")
            read_names = [*names, *(name for name in optional if name in file.files)]
            if warn and (extra := sorted({*file.files} - {*read_names})):
                log.warning(
                    "%s: not read: %s. Read are %s.",
                    path, ", ".join(extra), ", ".join((*names, *optional)),
                )  # fmt: skip
            arrays = {name: _read_array(path, name, file) for name in read_names}
            if not all(isinstance(array, np.ndarray) for array in arrays.values()):
                raise ValueError("an entry is no array")  # NumPy returns other entries as bytes
            return arrays
    except (FileNotFoundError, IsADirectoryError) as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else "a folder"
        raise DataError(f"{path}: {problem}. Give the NPZ file itself") from None
    except PermissionError as error:
        raise DataError(f"{path}: {error.strerror}. Change the permissions") from None
    except _DAMAGE as error:
        raise DataError(
            f"{path} cannot be read as an NPZ file of plain numbers: {_describe_damage(error)}. "
            "Save it again with numpy.savez_compressed"
        ) from None


def _read_array(path: Path, name: str, file: np.lib.npyio.NpzFile) -> NDArray[Any]:
    """Read one array. Raises DataError if it has Python objects, which are never unpickled."""
    try:
        array: NDArray[Any] = file[name]
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise
        raise DataError(
            f"{path}: {name} has Python objects. Give an array of numbers, all rows of one shape"
        ) from None
    return array


def _describe_damage(error: BaseException) -> str:
    """Return NumPy's message without its advice to unpickle a file."""
    return "it is no file of arrays" if "pickle" in str(error) else str(error).rstrip(".")


def _convert_part(
    path: object, arrays: Mapping[str, NDArray[Any]], part: str, may_be_empty: bool = False
) -> tuple[NDArray[Any], Any]:
    """Return rows and labels of one part in their final layout and type."""
    x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    x = _convert_layout(path, f"x_{part}", x, sequences=_are_sequences(path, arrays))
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(
            f"{path}: y_{part} is {y.dtype} of shape {y.shape}. Give integers of shape (N,), "
            "the class number of each row"
        )
    if len(x) != len(y) or not (len(x) or may_be_empty):
        raise DataError(
            f"{path}: x_{part} has {len(x)} rows and y_{part} {len(y)}. Give one label for each "
            "row, and at least one row"
        )
    lowest = NO_LABEL if part == "train" else 0
    max_value = np.iinfo(y.dtype).max
    unsigned = y.dtype.kind == "u" and (y == max_value).any() and not (y == max_value - 1).any()
    if y.size and (y.min() < lowest or y.max() > MAX_CLASS or unsigned):
        label = y.min() if y.min() < lowest else y.max()
        hint = " (-1, stored without a sign?)" if label == max_value else ""
        raise DataError(
            f"{path}: y_{part} has the label {label}{hint}. Classes are 0, 1, 2, ..., at most "
            f"{MAX_CLASS}, and -1 in y_train is no label"
        )
    return _convert_numbers(path, f"x_{part}", x), y.astype(np.int64)


def _are_sequences(path: object, arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether the arrays declare sequences."""
    kind = arrays.get(KIND)
    if kind is not None and str(kind) != "sequence":
        raise DataError(
            f'{path}: {KIND} is {str(kind)!a:.40}. Give "sequence" for rows (length, features), or '
            "leave it out for images and vectors"
        )
    return kind is not None


def _convert_layout(path: object, name: str, x: NDArray[Any], *, sequences: bool) -> NDArray[Any]:
    """Return images (N, channels, height, width), vectors (N, F) or sequences (N, length, F)."""
    if 0 in x.shape[1:]:
        raise DataError(f"{path}: {name} has the shape {x.shape}: its rows have no number")
    if sequences and x.ndim != 3:
        raise DataError(
            f"{path}: {name} has the shape {x.shape}, and sequences are (N, length, features). "
            f"Reshape it, or leave {KIND} out"
        )
    if x.ndim == 2 or sequences:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in CHANNELS:
        if x.shape[1] in CHANNELS:
            log.warning(
                "%s: %s has the shape %s, and is read as (N, H, W, C). If it is (N, C, H, W), give "
                "x.transpose(0, 2, 3, 1).",
                path, name, x.shape,
            )  # fmt: skip
        return x.transpose(0, 3, 1, 2)
    if x.ndim == 4 and x.shape[1] in CHANNELS:
        return x
    raise DataError(
        f"{path}: {name} has the shape {x.shape}. Give images (N, H, W), (N, H, W, C) or "
        "(N, C, H, W) with 1 or 3 channels, or vectors (N, F)"
    )


def _convert_numbers(path: object, name: str, x: NDArray[Any]) -> NDArray[Any]:
    if x.dtype == np.uint8 and x.ndim != 3:
        return np.ascontiguousarray(x)
    if x.ndim < 4:
        return _convert_features(path, name, x)
    # NaN fails the comparison too.
    if x.dtype.kind == "f" and (not x.size or (x.min() >= 0 and x.max() <= 1)):
        return np.ascontiguousarray(x, dtype=np.float32)
    detail = f", from {x.min()} to {x.max()}" if x.dtype.kind in "iuf" and x.size else ""
    detail = _describe_not_finite(x) or detail
    raise DataError(
        f"{path}: {name} is {x.dtype}{detail}. Give uint8 in 0..255, or floats in [0, 1] without "
        f'NaN, as images have them; of time series (N, length, features) say {KIND}="sequence"'
    )


def _convert_features(path: object, name: str, x: NDArray[Any]) -> NDArray[Any]:
    """Return vectors or sequences as float32. Raises DataError for numbers not finite, or too
    large."""
    largest = float(np.abs(x).max(initial=0.0)) if x.dtype.kind == "f" else np.nan
    if largest <= MAX_FEATURE:  # NaN fails the comparison
        return np.ascontiguousarray(x, dtype=np.float32)
    detail = _describe_not_finite(x) or (
        f", with numbers up to {largest:g}" if x.dtype.kind == "f" else ""
    )
    kind, types = ("sequences", "") if x.ndim == 3 else ("vectors", "uint8, or ")
    raise DataError(
        f"{path}: {name} has {kind} of {x.dtype}{detail}. Give {types}finite floats scaled by "
        f"public bounds to about [-1, 1], none beyond {MAX_FEATURE:g}"
    )


def _describe_not_finite(x: NDArray[Any]) -> str:
    """Return the index of the first NaN or infinite number; empty if there is none."""
    if x.dtype.kind != "f" or np.isfinite(x).all():
        return ""
    bad = ~np.isfinite(x).reshape(len(x), -1).all(axis=1)
    return f", and {bad.sum()} rows have NaN or infinity (the first: row {bad.argmax()}, from 0)"
