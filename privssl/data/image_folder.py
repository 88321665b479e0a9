"""A folder of images: ``root/{train,test}/CLASS/**/*.png`` and the like.

Classes are the folder names in natural order (2 before 10); rows are the files, sorted, so row
numbers are equal on every machine. All headers are read before any image is decoded, so that an
unusable folder is refused at once.

The EXIF orientation is applied, and transparent pixels become white. Only the first frame or page
is read. Skipped files are counted by reason.

A file is opened as one of ``FORMATS`` only. Otherwise Pillow would detect the format by content,
and pass a PostScript file called ``cat.png`` to Ghostscript, which executes it.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from PIL.ExifTags import Base as Tag

from privssl.core.agents import natural_order
from privssl.data.npz import Arrays, refuse_unprintable, with_unlabelled
from privssl.errors import DataError

SUFFIXES = frozenset(
    {*(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".gif", ".webp"),
     *(".tif", ".tiff", ".pbm", ".pgm", ".ppm", ".pnm")}
)  # fmt: skip
# Pillow's names of the formats.
FORMATS = ("PNG", "JPEG", "BMP", "DIB", "GIF", "WEBP", "TIFF", "PPM")
MAX_PIXELS = 2**24  # of one image: a file of a few kB can claim far more
# Pillow's modes without colour, and those converted to RGB. Others would lose bits.
GREY = frozenset({"1", "L", "LA"})
COLOUR = frozenset({"P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})

UNLABELLED = "unlabelled"
HIDDEN = "hidden"  # a name that begins with a dot

log = logging.getLogger("privssl")


class _ImageHeader(NamedTuple):
    """The header of an image file."""

    path: Path
    mode: str
    size: tuple[int, int]  # width, height, as turned by the orientation
    turned: bool  # whether its EXIF orientation is not upright
    frames: int


class _ImageForm(NamedTuple):
    """The common form of all rows."""

    mode: str  # "L" or "RGB"
    size: tuple[int, int]  # width, height
    resized: bool  # whether images of other sizes are resized to it


def read_folder(
    root: Path, image_size: int | None, classes: tuple[str, ...] | None = None
) -> Arrays:
    """Read all images of a folder: uint8, one channel when all images are grey, else three.

    Args:
        root: holds ``train`` and ``test``, and optionally ``unlabelled`` with training images of
            unknown class, which come after the others.
        image_size: side of the square that each image is resized to, pixels; None: no resizing.
        classes: all classes; then ``test`` is not read, and ``train`` may be absent or lack some.
            None: the folders of ``train``.

    Raises:
        DataError: no such folders, classes that differ, a class without images, a file that is not
            an image, or different sizes without ``image_size``.
    """
    skipped: Counter[str] = Counter()
    declared = classes is not None
    if classes is None:
        classes = _list_common_classes(root, skipped)
    else:
        _refuse_undeclared(root / "train", classes)
    train, y_train = _list_files(root / "train", classes, skipped, may_lack=declared)
    test: list[Path] = []
    y_test: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    if not declared:
        test, y_test = _list_files(root / "test", classes, skipped)
    folder = root / UNLABELLED
    unlabelled = _list_sorted_images(folder, skipped, "it") if folder.is_dir() else []
    if not train and not unlabelled:
        raise DataError(f"{root} holds no image in train/CLASS or unlabelled. Correct its path")
    other_folders = _list_folders(root) - {"train", "test", UNLABELLED}
    skipped |= Counter(f"folder {name}" for name in other_folders)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        headers = list(pool.map(_read_header, train + test + unlabelled))
        form = _choose_form(headers, image_size)
        x_train, transparent_train = _decode_images(pool, train, form)
        x_test, transparent_test = _decode_images(pool, test, form)
        x_unlabelled, transparent_rest = _decode_images(pool, unlabelled, form)
    counts = (len(train), len(test), len(classes))
    log.info("%s: %d training and %d test images of %d classes", root, *counts)
    if unlabelled:
        log.info("%s: %d training images without a label", folder, len(unlabelled))
    _log_changes(root, headers, transparent_train + transparent_test + transparent_rest)
    _log_skipped(root, skipped)
    if declared:  # one colour image changes the rows of the others
        coloured_by_train = any(header.mode in GREY for header in headers)
    else:
        coloured_by_train = all(header.mode in GREY for header in headers[len(train) :])
    arrays = Arrays(
        x_train, y_train, x_test, y_test, classes,
        coloured_by_train=coloured_by_train and form.mode == "RGB",
    )  # fmt: skip
    return with_unlabelled(arrays, x_unlabelled) if unlabelled else arrays


def _list_common_classes(root: Path, skipped: Counter[str]) -> tuple[str, ...]:
    """Return the classes of ``train`` and ``test``. Raises DataError if they differ."""
    classes = _list_classes(root / "train", skipped)
    others = _list_classes(root / "test", skipped)
    if classes != others:
        # ascii: names that look equal can differ in the encoding of an accent, or in spaces
        differing = ", ".join(ascii(name) for name in sorted(set(classes) ^ set(others)))
        raise DataError(
            f"{root}: train and test differ in the classes {differing}. "
            "Give each class images in both, or remove its folders"
        )
    refuse_unprintable(root, classes)
    return classes


def _refuse_undeclared(folder: Path, classes: Sequence[str]) -> None:
    """Raise DataError for a folder that is not a declared class."""
    if undeclared := sorted(_list_folders(folder).difference(classes) if folder.is_dir() else ()):
        raise DataError(
            f"{folder}: {', '.join(map(ascii, undeclared))} is no declared class. Give one of "
            f"{', '.join(classes[:10])}"
        )


def read_images(files: Sequence[Path], shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Read image files as rows (N, *shape) with 1 (grey) or 3 (RGB) channels, resized if needed.

    Raises DataError if a file is not an image, or has more than 8 bits per channel.
    """
    channels, height, width = shape
    form = _ImageForm("L" if channels == 1 else "RGB", (width, height), resized=True)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for header in pool.map(_read_header, files):
            _refuse_mode(header.path, header.mode)
        return _decode_images(pool, files, form)[0]


def list_images(folder: Path) -> list[Path]:
    """List image files of a folder at any depth, sorted. Raises DataError if there is none."""
    return _list_sorted_images(folder, Counter(), "it")


def list_labelled_images(folder: Path) -> tuple[list[Path], list[str]]:
    """List image files of ``folder/CLASS/**`` with their classes, or of ``folder/test`` if it
    exists. Raises DataError without folders of classes, or for a folder without images."""
    root = folder / "test" if (folder / "test").is_dir() else folder
    classes = _list_classes(root, Counter())
    files, y = _list_files(root, classes, Counter())
    return files, [classes[number] for number in y]


def _log_changes(root: Path, headers: Sequence[_ImageHeader], transparent: int) -> None:
    """Warn of images that are changed when they are read."""
    if turned := sum(header.turned for header in headers):
        log.warning("%s: %d images were rotated by their EXIF orientation", root, turned)
    if transparent:
        log.warning("%s: %d images have transparent pixels, which became white", root, transparent)
    if multi_frame := [header for header in headers if header.frames > 1]:
        log.warning(
            "%s: %d images have several frames or pages (%s has %d). The first of each was read, "
            "and %d frames were not: save those that are rows as files of their own.",
            root, len(multi_frame), multi_frame[0].path.name, multi_frame[0].frames,
            sum(header.frames - 1 for header in multi_frame),
        )  # fmt: skip


def _log_skipped(root: Path, skipped: Counter[str]) -> None:
    """Log the number of skipped files and folders by reason."""
    skipped = +skipped  # drop zeros
    if not skipped:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    level = logging.INFO if set(skipped) == {HIDDEN} else logging.WARNING
    log.log(level, "%s: not read: %s. Images are %s.", root, reasons, ", ".join(sorted(SUFFIXES)))


def _list_classes(folder: Path, skipped: Counter[str]) -> tuple[str, ...]:
    try:
        names, entries = _list_folders(folder), list(folder.iterdir())
    except OSError as error:
        raise DataError(
            f"{folder}: {error.strerror}. data.root must hold train/CLASS/* and test/CLASS/*"
        ) from None
    for entry in entries:
        if entry.name[0] == ".":
            skipped[HIDDEN] += 1
        elif not entry.is_dir():
            skipped["outside of the folders of classes"] += 1
    if len(names) < 2:
        raise DataError(
            f"{folder} has {len(names)} folders. Make one for each class, at least two, with "
            "the images of the class in it"
        )
    return tuple(sorted(names, key=lambda name: (natural_order(name), name)))


def _list_folders(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if p.is_dir() and p.name[0] != "."}


def _list_files(
    folder: Path, classes: Sequence[str], skipped: Counter[str], *, may_lack: bool = False
) -> tuple[list[Path], NDArray[np.int64]]:
    """List image files and their class numbers, class by class; ``may_lack``: classes may have no
    folder."""
    by_class = [
        _list_sorted_images(folder / name, skipped, "the class from train and test")
        if not may_lack or (folder / name).is_dir() else []
        for name in classes
    ]  # fmt: skip
    y = np.repeat(np.arange(len(classes)), [len(images) for images in by_class])
    return [path for images in by_class for path in images], y


def _list_sorted_images(folder: Path, skipped: Counter[str], to_remove: str) -> list[Path]:
    """List image files of a folder. Raises DataError with the advice to remove ``to_remove``."""
    try:
        paths = sorted(_find_images(folder, skipped))
    except OSError as error:
        raise DataError(
            f"{error.filename}: {error.strerror}. Change the permissions, or remove {to_remove}"
        ) from None
    if not paths:
        suffixes = ", ".join(sorted(SUFFIXES))
        raise DataError(f"{folder} holds no image ({suffixes}). Add some, or remove {to_remove}")
    return paths


def _find_images(folder: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Yield image files at any depth; skip linked folders, because they may be cyclic."""

    def raise_error(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(folder, onerror=raise_error):
        linked = [name for name in folders if Path(parent, name).is_symlink()]
        hidden = [name for name in (*folders, *files) if name[0] == "."]
        skipped.update({"linked folders": len(linked), HIDDEN: len(hidden)})
        folders[:] = [name for name in folders if name not in {*linked, *hidden}]
        for path in (Path(parent, name) for name in files if name[0] != "."):
            if path.exists() and not path.is_file():  # reading a pipe would block
                skipped["pipes and devices"] += 1
            elif path.suffix.lower() in SUFFIXES:
                yield path
            else:
                skipped[path.suffix.lower() or "without a suffix"] += 1


def _make_read_error(path: Path, error: Exception) -> DataError:
    if isinstance(error, FileNotFoundError) and not path.is_symlink():
        return DataError(f"{path}: no such file")
    return DataError(f"{path} cannot be read as an image: {error}. Replace or remove it")


def _read_header(path: Path) -> _ImageHeader:
    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.mode in COLOUR and _has_deep_channels(image):
                raise ValueError("it has more than 8 bits per channel: save it with 8")
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width}x{image.height} pixels, more than {MAX_PIXELS}")
            orientation = _read_orientation(image)
            across = orientation >= 5  # the four orientations turned by 90 degrees
            size = image.size[::-1] if across else image.size
            frames = getattr(image, "n_frames", 1)
            return _ImageHeader(path, image.mode, size, orientation > 1, frames)
    except Exception as error:  # Pillow's decoders raise many types on damaged files
        raise _make_read_error(path, error) from None


def _has_deep_channels(image: Image.Image) -> bool:
    """Return whether Pillow would reduce channels of 16 bits to 8, as it does in colour."""
    for tile in getattr(image, "tile", ()):
        args = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        if any(isinstance(arg, str) and re.search(r";16[BLN]", arg) for arg in args):
            return True
        if image.format == "PPM" and any(isinstance(arg, int) and arg > 255 for arg in args[1:]):
            return True
    return False


def _read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 is upright."""
    # Pillow rotates a TIFF itself, and decodes a whole PNG to find EXIF data at its end.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    try:
        number = image.getexif().get(Tag.Orientation, 1)
    except Exception:  # damaged EXIF data is ignored
        return 1
    return number if number in range(1, 9) else 1


def _refuse_mode(path: object, mode: str) -> None:
    if mode not in GREY | COLOUR:
        raise DataError(
            f"{path} is an image of Pillow's mode {mode}. Save it with 8 bits per "
            "channel, grey or RGB"
        )


def pixels_of(where: str, image: Image.Image) -> Image.Image:
    """Return an image in memory as its file is read: upright, over white, mode L or RGB.

    Raises DataError for a damaged one, and for a mode with more than 8 bits per channel.
    """
    _refuse_mode(where, image.mode)
    try:
        upright = ImageOps.exif_transpose(image) if _read_orientation(image) > 1 else image
        return _compose_over_white(upright)[0].convert("L" if image.mode in GREY else "RGB")
    except Exception as error:  # as in _read_header
        raise DataError(
            f"{where} cannot be read as an image: {error}. Replace or remove it"
        ) from None


def _choose_form(headers: Sequence[_ImageHeader], image_size: int | None) -> _ImageForm:
    for header in headers:
        _refuse_mode(header.path, header.mode)
        if image_size is None and header.size != headers[0].size:
            raise DataError(
                f"{header.path} is {header.size[0]}x{header.size[1]} pixels and {headers[0].path} "
                f"{headers[0].size[0]}x{headers[0].size[1]}. Set data.image_size to resize all"
            )
    mode = "L" if all(header.mode in GREY for header in headers) else "RGB"
    if image_size is None:
        return _ImageForm(mode, headers[0].size, resized=False)
    return _ImageForm(mode, (image_size, image_size), resized=True)


def _decode_images(
    pool: ThreadPoolExecutor, files: Sequence[Path], form: _ImageForm
) -> tuple[NDArray[np.uint8], int]:
    """Decode rows (N, C, H, W); also return how many were composed over white."""
    width, height = form.size
    channels = len(form.mode)  # "L" has one, "RGB" three
    images = np.empty((len(files), channels, height, width), dtype=np.uint8)

    def decode_image(row: int) -> bool:
        try:
            # From a stream: given a path, Pillow maps a plain TIFF into memory and rotates it
            # wrongly.
            with files[row].open("rb") as file, Image.open(file, formats=FORMATS) as image:
                image.load()  # a PNG may have its orientation after its pixels
                upright = ImageOps.exif_transpose(image) if _read_orientation(image) > 1 else image
                if upright.size != form.size and not form.resized:
                    raise ValueError(f"{upright.width}x{upright.height} pixels once it is upright")
                opaque, transparent = _compose_over_white(upright)
                converted = opaque.convert(form.mode)
        except Exception as error:  # as in _read_header
            raise _make_read_error(files[row], error) from None
        if converted.size != form.size:
            converted = converted.resize(form.size, Image.Resampling.BILINEAR)
        pixels = np.asarray(converted).reshape(height, width, channels)
        images[row] = pixels.transpose(2, 0, 1)
        return transparent

    return images, sum(pool.map(decode_image, range(len(files))))


def _compose_over_white(image: Image.Image) -> tuple[Image.Image, bool]:
    """Return the image without transparency, and whether any pixel was transparent."""
    if not image.has_transparency_data:
        return image, False
    rgba = image.convert("RGBA")
    lowest, _ = rgba.getchannel("A").getextrema()
    if lowest == 255:
        return image.convert("RGB" if image.mode in COLOUR else "L"), False
    white = Image.new("RGBA", rgba.size, "white")
    return Image.alpha_composite(white, rgba).convert("RGB"), True
