"""Rows as arrays, as every reader returns them, and the NPZ file that brings them as they are.

An NPZ file has ``x_train``, ``y_train``, ``x_test`` and ``y_test``. Images are (N, H, W), one
channel; (N, H, W, C), the custom of NumPy and Keras; or (N, C, H, W), that of torch. With 1 or 3
in both places the last axis is taken for the channels. Nothing in the file can run code:
pickles are refused.
"""

import logging
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from privssl.errors import DataError

log = logging.getLogger("privssl")

CHANNELS = (1, 3)
DARK = 64  # bytes of which none is as large are hardly pictures

MAX_BYTES = 2**34  # of one array, unpacked: a zip of a few MB can hold a thousand times more

# What zipfile, zlib and NumPy raise on a file that is damaged, encrypted or made of pickles.
_DAMAGE = (OSError, ValueError, EOFError, RuntimeError, MemoryError, BadZipFile, zlib.error)


class Rows(NamedTuple):
    """What one agent holds, in the form of ``Arrays``; None: nothing of that kind."""

    x: NDArray[Any] | None
    y: NDArray[np.int64] | None
    unlabelled: NDArray[Any] | None


class Arrays(NamedTuple):
    """Images (N, C, H, W), uint8 in 0..255 or float32 in [0, 1]; classes (N,) int64."""

    x_train: NDArray[Any]
    y_train: NDArray[np.int64]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]
    class_names: tuple[str, ...]


def read_npz(path: Path) -> Arrays:
    """The four arrays of an NPZ file, checked.

    Raises:
        DataError: no such file, or whatever in it is not as the head of this module says.
    """
    found = _open(path, ("x_train", "y_train", "x_test", "y_test"))
    x_train, y_train = _rows(path, found, "train")
    x_test, y_test = _rows(path, found, "test")
    if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype:
        raise DataError(
            f"{path}: x_train has rows {x_train.shape[1:]} of {x_train.dtype} and x_test "
            f"{x_test.shape[1:]} of {x_test.dtype} (channels, height, width). Make them alike"
        )
    classes = int(y_train.max()) + 1
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
    if empty := sorted(set(range(classes)) - set(np.unique(y_train).tolist())):
        log.warning(
            "%s: no training row has class %s, and the classifier has an output for it all the "
            "same. Number the classes 0, 1, 2, ... without gaps.",
            path, ", ".join(map(str, empty[:5])) + ", ..." * (len(empty) > 5),
        )  # fmt: skip
    return Arrays(x_train, y_train, x_test, y_test, tuple(map(str, range(classes))))


def read_rows(path: Path, *, labelled: bool, unlabelled: bool, may_be_empty: bool = False) -> Rows:
    """The rows of one agent: ``x_labelled`` with ``y_labelled``, and ``x_unlabelled``.

    Args:
        labelled, unlabelled: which of them it holds; at least one.
        may_be_empty: whether there may be no labelled row: where their number is private, no
            refusal tells of it.

    Raises:
        DataError: as in :func:`read_npz`.
    """
    names = (*(("x_labelled", "y_labelled") if labelled else ()),
             *(("x_unlabelled",) if unlabelled else ()))  # fmt: skip
    found = _open(path, names)
    x, y = _rows(path, found, "labelled", may_be_empty) if labelled else (None, None)
    rest = None
    if unlabelled:
        rest = _numbers(path, names[-1], _channels_first(path, names[-1], found[names[-1]]))
        if not len(rest):
            raise DataError(f"{path}: x_unlabelled has no rows. Give at least one")
    if x is not None and rest is not None:
        _check_alike(path, x, rest)
    return Rows(x, y, rest)


def _check_alike(path: Path, x: NDArray[Any], rest: NDArray[Any]) -> None:
    if (x.shape[1:], x.dtype) != (rest.shape[1:], rest.dtype):
        raise DataError(
            f"{path}: x_labelled has rows {x.shape[1:]} of {x.dtype} and x_unlabelled "
            f"{rest.shape[1:]} of {rest.dtype} (channels, height, width). Make them alike"
        )


def _open(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as stream:  # NumPy would leave a damaged file open
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DataError(
                    f"{path} is a single array. Save {', '.join(names)}: numpy.savez_compressed"
                )
            missing = [name for name in names if name not in file.files]
            if missing:
                raise DataError(
                    f"{path} has no {', '.join(missing)} (it has {', '.join(file.files)}). "
                    f"Save it with numpy.savez_compressed, with {', '.join(names)}"
                )
            assert file.zip is not None  # it is open
            for info in file.zip.infolist():  # zipfile never unpacks more than what this states
                if info.file_size > MAX_BYTES:
                    raise ValueError(f"{info.filename} has {info.file_size} bytes")
            found = {name: file[name] for name in names}
            if not all(isinstance(array, np.ndarray) for array in found.values()):
                raise ValueError("an entry is no array")  # NumPy hands out such bytes as they are
            return found
    except (FileNotFoundError, IsADirectoryError) as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else "a folder"
        raise DataError(f"{path}: {what}. Give the NPZ file itself") from None
    except PermissionError as error:
        raise DataError(f"{path}: {error.strerror}. Mend the permissions") from None
    except _DAMAGE as error:
        raise DataError(
            f"{path} cannot be read as an NPZ file of plain numbers: {error}. "
            "Save it again with numpy.savez_compressed"
        ) from None


def _rows(
    path: Path, found: dict[str, NDArray[Any]], part: str, may_be_empty: bool = False
) -> tuple[NDArray[Any], Any]:
    """Images and labels of one part in their final layout and type."""
    x, y = found[f"x_{part}"], found[f"y_{part}"]
    x = _channels_first(path, f"x_{part}", x)
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
    if y.size and y.min() < 0:
        raise DataError(f"{path}: y_{part} has the label {y.min()}. Classes are 0, 1, 2, ...")
    return _numbers(path, f"x_{part}", x), y.astype(np.int64)


def _channels_first(path: Path, name: str, x: NDArray[Any]) -> NDArray[Any]:
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in CHANNELS:
        return x.transpose(0, 3, 1, 2)
    if x.ndim == 4 and x.shape[1] in CHANNELS:
        return x
    raise DataError(
        f"{path}: {name} has the shape {x.shape}. Give (N, H, W), (N, H, W, C) or (N, C, H, W) "
        "with 1 or 3 channels"
    )


def _numbers(path: Path, name: str, x: NDArray[Any]) -> NDArray[Any]:
    if x.dtype == np.uint8:
        if x.size and x.max() < DARK:
            log.warning(
                "%s: %s has bytes up to %d. They are taken for shades from 0 to 255, so all of it "
                "is nearly black: bring them to that range, or give floats in [0, 1].",
                path, name, x.max(),
            )  # fmt: skip
        return np.ascontiguousarray(x)
    # Written so that NaN is refused as well: no comparison with it is true.
    if x.dtype.kind == "f" and (not x.size or (x.min() >= 0 and x.max() <= 1)):
        return np.ascontiguousarray(x, dtype=np.float32)
    seen = f", from {x.min()} to {x.max()}" if x.dtype.kind in "iuf" and x.size else ""
    raise DataError(
        f"{path}: {name} is {x.dtype}{seen}. Give uint8 in 0..255, or floats in [0, 1] without NaN"
    )
