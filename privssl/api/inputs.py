"""Inputs of the commands predict and evaluate: images, folders, NPZ, NPY and CSV files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privssl.api.new_rows import RowForm
from privssl.data import image_folder, npz
from privssl.errors import DataError

ROWS = (("x",), ("x_test",), ("x_unlabelled",))
LABELLED = (("x", "y"), ("x_test", "y_test"))
ARRAYS = (".npz", ".npy")
CSV = ".csv"


def read_rows(inputs: Sequence[Path], form: RowForm) -> list[tuple[list[str], Any]]:
    """Read the rows of each input as (names, rows); images are one batch.

    A row's name is its file, with its number for arrays and CSV files.

    Args:
        inputs: images, folders of images, NPZ files with x, x_test or x_unlabelled, NPY files,
            CSV files.
        form: of the run's rows: images are resized to it, and columns scaled.

    Raises:
        DataError: an input is missing or cannot be read.
    """
    pictures: list[Path] = []
    batches: list[tuple[list[str], Any]] = []
    for path in inputs:
        suffix = path.suffix.lower()
        if suffix in ARRAYS or (suffix == CSV and path.is_file()):
            x = form.read_csv(path, False)[0] if suffix == CSV else npz.read_one_of(path, ROWS)[0]
            batches.append(([f"{path}:{number}" for number in range(len(x))], x))
        elif path.is_dir():
            _ = form.picture_shape  # report another kind of rows before an empty folder
            pictures += image_folder.list_images(path)
        elif suffix in image_folder.SUFFIXES:
            pictures.append(path)
        else:
            raise DataError(
                f"{path} is no picture, folder, NPZ, NPY or CSV file. Give one of these"
                if path.exists()
                else f"{path}: no such file"
            )
    if pictures:
        x = image_folder.read_images(pictures, form.picture_shape)
        batches.append(([str(p) for p in pictures], x))
    return batches


def read_labelled(path: Path, form: RowForm) -> tuple[Any, NDArray[Any]]:
    """Read rows (N, ...) and labels (N,).

    From an NPZ file (x and y, or x_test and y_test: class numbers), a CSV file, or a folder of
    classes (class names).
    """
    if path.is_dir():
        shape = form.picture_shape  # report another kind of rows before a folder without classes
        files, classes = image_folder.list_labelled_images(path)
        return image_folder.read_images(files, shape), np.array(classes)
    if path.suffix.lower() == CSV and path.is_file():
        return form.read_csv(path, True)
    x, y = npz.read_one_of(path, LABELLED)
    return x, y
