"""A folder of images: ``root/{train,test}/CLASS/*.png`` and the like.

Classes are the names of the folders, sorted; rows are the files, sorted, so that the same
folder gives the same row numbers on every machine. All heads are read before any image is
decoded: a folder that cannot be used is refused at once, and memory is taken once.

A file is opened as one of ``FORMATS`` whatever its name: left to itself Pillow goes by content,
and would hand a PostScript file called ``cat.png`` to Ghostscript, which runs it.
"""

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from privssl.data.arrays import Arrays
from privssl.errors import DataError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm"})
# Pillow's names of what the suffixes stand for.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
MAX_PIXELS = 2**24  # of one image: a file of a few kB can claim a hundred times more
# Pillow's names: those without colour, and those that become RGB. Wider ones would be cut off.
GREY = frozenset({"1", "L", "LA"})
COLOUR = frozenset({"P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})

log = logging.getLogger("privssl")


class _Head(NamedTuple):
    """What a file says about its image before it is decoded."""

    path: Path
    mode: str
    size: tuple[int, int]  # width, height


class _Form(NamedTuple):
    """What every image is turned into."""

    mode: str  # "L" or "RGB"
    size: tuple[int, int]  # width, height


def read_folder(root: Path, image_size: int | None) -> Arrays:
    """All images of a folder.

    Args:
        root: holds ``train`` and ``test``.
        image_size: side of the square that each image is resized to, pixels; None: as they are.

    Returns:
        uint8, one channel when all images are grey, else three.

    Raises:
        DataError: no such folders, classes that differ, a class without images, a file that is
            no image, or sizes that differ while ``image_size`` is not set.
    """
    classes = _classes(root / "train")
    others = _classes(root / "test")
    if classes != others:
        differing = ", ".join(sorted(set(classes) ^ set(others)))
        raise DataError(f"{root}: train and test differ in the classes {differing}")
    train, y_train = _files(root / "train", classes)
    test, y_test = _files(root / "test", classes)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        form = _form(list(pool.map(_head, train + test)), image_size)
        x_train, x_test = _decode(pool, train, form), _decode(pool, test, form)
    counts = (len(train), len(test), len(classes))
    log.info("%s: %d training and %d test images of %d classes", root, *counts)
    return Arrays(x_train, y_train, x_test, y_test, classes)


def _classes(folder: Path) -> tuple[str, ...]:
    try:
        found = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name[0] != ".")
    except OSError as error:
        raise DataError(
            f"{folder}: {error.strerror}. data.root must hold train/CLASS/* and test/CLASS/*"
        ) from None
    if len(found) < 2:
        raise DataError(
            f"{folder} has {len(found)} folders. Make one for each class, at least two, with "
            "the images of the class in it"
        )
    return tuple(found)


def _files(folder: Path, classes: Sequence[str]) -> tuple[list[Path], NDArray[np.int64]]:
    """Image files and their class numbers, class by class."""
    files: list[Path] = []
    counts = []
    for name in classes:
        try:
            images = sorted(
                path
                for path in (folder / name).iterdir()
                if path.suffix.lower() in SUFFIXES and path.name[0] != "."
            )
        except OSError as error:
            raise DataError(
                f"{folder / name}: {error.strerror}. Mend the permissions, or remove the class "
                "from train and test"
            ) from None
        if not images:
            raise DataError(
                f"{folder / name} holds no image ({', '.join(sorted(SUFFIXES))}). Add some, or "
                "remove the class from train and test"
            )
        files += images
        counts.append(len(images))
    return files, np.repeat(np.arange(len(classes)), counts)


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read as an image: {error}. Replace or remove it")


def _head(path: Path) -> _Head:
    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width}x{image.height} pixels, more than {MAX_PIXELS}")
            return _Head(path, image.mode, image.size)
    except Exception as error:  # Pillow's decoders raise what they like on damaged files
        raise _unreadable(path, error) from None


def _form(heads: Sequence[_Head], image_size: int | None) -> _Form:
    for head in heads:
        if head.mode not in GREY | COLOUR:
            raise DataError(
                f"{head.path} is an image of Pillow's mode {head.mode}. Save it with 8 bits per "
                "channel, grey or RGB"
            )
        if image_size is None and head.size != heads[0].size:
            raise DataError(
                f"{head.path} is {head.size[0]}x{head.size[1]} pixels and {heads[0].path} "
                f"{heads[0].size[0]}x{heads[0].size[1]}. Set data.image_size to resize all"
            )
    mode = "L" if all(head.mode in GREY for head in heads) else "RGB"
    return _Form(mode, heads[0].size if image_size is None else (image_size, image_size))


def _decode(pool: ThreadPoolExecutor, files: Sequence[Path], form: _Form) -> NDArray[np.uint8]:
    """(N, C, H, W), each thread writing the rows that it decodes."""
    width, height = form.size
    channels = len(form.mode)  # "L" has one, "RGB" three
    images = np.empty((len(files), channels, height, width), dtype=np.uint8)

    def decode(row: int) -> None:
        try:
            with Image.open(files[row], formats=FORMATS) as image:
                plain = image.convert(form.mode)
        except Exception as error:  # as in _head
            raise _unreadable(files[row], error) from None
        if plain.size != form.size:
            plain = plain.resize(form.size, Image.Resampling.BILINEAR)
        pixels = np.asarray(plain).reshape(height, width, channels)
        images[row] = pixels.transpose(2, 0, 1)

    for _ in pool.map(decode, range(len(files))):
        pass
    return images
