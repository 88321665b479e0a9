"""What the commands predict and evaluate read: pictures, folders, NPZ and NPY files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privssl.data import image_folder, npz
from privssl.errors import DataError

ROWS = (("x",), ("x_test",), ("x_unlabelled",))
LABELLED = (("x", "y"), ("x_test", "y_test"))
ARRAYS = (".npz", ".npy")


def read_rows(
    inputs: Sequence[Path], shape: tuple[int, ...]
) -> list[tuple[list[str], NDArray[Any]]]:
    """The rows of each input, as (names, rows), pictures together.

    Args:
        inputs: pictures, folders of pictures, NPZ files with x, x_test or x_unlabelled, NPY files.
        shape: of the run's rows, to which pictures are resized.

    Returns:
        A row's name is its file, and for arrays its number too.

    Raises:
        DataError: an input is missing or cannot be read.
    """
    pictures: list[Path] = []
    found = []
    for path in inputs:
        if path.suffix.lower() in ARRAYS:
            [x] = npz.read_one_of(path, ROWS)
            found.append(([f"{path}:{number}" for number in range(len(x))], x))
        elif path.is_dir():
            pictures += image_folder.list_images(path)
        elif path.suffix.lower() in image_folder.SUFFIXES:
            pictures.append(path)
        else:
            raise DataError(
                f"{path} is no picture, folder, NPZ or NPY file. Give one of these"
                if path.exists()
                else f"{path}: no such file"
            )
    if pictures:
        found.append(([str(p) for p in pictures], _pictures(pictures, shape)))
    return found


def read_labelled(path: Path, shape: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows and labels of an NPZ file (x and y, or x_test and y_test), or of a folder of classes.

    Returns:
        Rows (N, ...), and class numbers (NPZ) or class names (folder) (N,).
    """
    if path.is_dir():
        files, classes = image_folder.list_labelled_images(path)
        return _pictures(files, shape), np.array(classes)
    x, y = npz.read_one_of(path, LABELLED)
    return x, y


def _pictures(files: Sequence[Path], shape: tuple[int, ...]) -> NDArray[Any]:
    if len(shape) != 3:
        raise DataError(
            f"{files[0]} is a picture, and the run was trained on rows of {shape}. Encode the "
            "pictures as the run's rows were, and give an NPZ or NPY file"
        )
    channels, height, width = shape
    return image_folder.read_images(files, (channels, height, width))
