"""MNIST, Fashion-MNIST, CIFAR-10 and SVHN: from disk, or downloaded by torchvision.

Files have torchvision's paths. torchvision is imported only to download a set and to read CIFAR-10,
whose pickles could run code: torchvision compares each file's MD5 with the published one before it
opens it.
"""

import contextlib
import json
import logging
import math
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from privssl.data.image_folder import read_folder
from privssl.data.npz import Arrays
from privssl.errors import DataError

SOCKET_TIMEOUT = 10.0  # seconds

DIGITS = tuple(map(str, range(10)))
GARMENTS = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

log = logging.getLogger("privssl")


def default_root() -> Path:
    """Return the folder of data sets: $PRIVSSL_DATA, else ``~/.cache/privssl/data``. Raises
    DataError."""
    folder = os.environ.get("PRIVSSL_DATA") or "~/.cache/privssl/data"
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise DataError(
            f"{folder}: the home folder is unknown. Set PRIVSSL_DATA to a full path"
        ) from None


class _PublishedSet(NamedTuple):
    """One published data set."""

    torchvision_name: str
    files: tuple[str, ...]  # below the root; the set is absent if one is missing
    shape: tuple[int, int, int]  # channels, height, width
    read: Callable[[Path], Arrays]
    test_part: str  # second argument of torchvision for the test part; "": not needed


def read_published(name: str, root: Path) -> Arrays:
    """Load one of the four, from ``root`` or from the network.

    Raises DataError if it cannot be downloaded, or its files are damaged.

    Args:
        root: the folder of all data sets, created if absent; or a folder of the set's images,
            train/CLASS/* and test/CLASS/*.
    """
    published = PUBLISHED[name]
    if not all((root / file).is_file() for file in published.files):
        if all((root / part).is_dir() for part in ("train", "test")):
            return _read_images(name, published, root)
        _download(name, published, root)
    try:
        arrays = published.read(root)
        for x, y in ((arrays.x_train, arrays.y_train), (arrays.x_test, arrays.y_test)):
            _check_rows(x, y, published.shape)
    except Exception as error:  # readers raise many types on damaged files
        raise DataError(
            f"{name}: a file in {root} is damaged ({error}). Remove "
            f"{', '.join(published.files)} there, and get them again:\n  "
            f"{download_command(name, root)}"
        ) from None
    return arrays


def _read_images(name: str, published: _PublishedSet, root: Path) -> Arrays:
    """Read the set as a folder of images, whose pixels may differ from the published ones."""
    arrays = read_folder(root, None)
    if arrays.x_train.shape[1:] != published.shape or len(arrays.class_names) != 10:
        raise DataError(
            f"{root} has {len(arrays.class_names)} classes of images {arrays.x_train.shape[1:]} "
            f"(channels, height, width), and {name} ten of {published.shape}. Give the folder of "
            f"{name}, or data.name=image_folder"
        )
    log.warning("%s: a folder of images is read as %s; its pixels may differ.", root, name)
    return arrays


def _check_rows(x: NDArray[Any], y: NDArray[Any], shape: tuple[int, int, int]) -> None:
    if x.shape != (len(y), *shape) or x.dtype != np.uint8 or not len(y):
        raise ValueError(f"images {x.shape} of {x.dtype} with {len(y)} labels")
    if y.min() < 0 or y.max() > 9:
        raise ValueError(f"labels from {y.min()} to {y.max()}, not from 0 to 9")


# Getting ------------------------------------------------------------------------------------


def _download(name: str, published: _PublishedSet, root: Path) -> None:
    import torchvision

    log.info("%s is not in %s: downloading it", name, root)
    get = getattr(torchvision.datasets, published.torchvision_name)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _limit_socket_time(), contextlib.redirect_stdout(sys.stderr):
            get(str(root), download=True)
            if published.test_part:
                get(str(root), published.test_part, download=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())  # one line, for all mirrors
        raise DataError(
            f"{name} is not in {root} and could not be downloaded ({reason}). It needs "
            f"{', '.join(published.files)} there. With a network:\n  "
            f"{download_command(name, root)}\nor set data.root or PRIVSSL_DATA to the folder that "
            "has them; data.name=digits needs no download"
        ) from None


def download_command(name: str, root: Path) -> str:
    """Return a shell command that downloads the files."""
    published = PUBLISHED[name]
    folder = json.dumps(str(root))  # in double quotes, because the shell's are single
    calls = [f"get({folder}, download=True)"]
    if published.test_part:
        calls.append(f'get({folder}, "{published.test_part}", download=True)')
    get = f"get = torchvision.datasets.{published.torchvision_name}"
    return f"python -c {shlex.quote('; '.join(['import torchvision', get, *calls]))}"


@contextlib.contextmanager
def _limit_socket_time() -> Iterator[None]:
    """Set a timeout for sockets; torchvision has no option for it."""
    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SOCKET_TIMEOUT)
    try:
        yield
    finally:
        socket.setdefaulttimeout(previous)


# Reading ------------------------------------------------------------------------------------


def _read_idx_set(folder: str, class_names: tuple[str, ...], root: Path) -> Arrays:
    """Read MNIST's four files below ``folder``."""
    train, train_labels, test, test_labels = (root / file for file in _list_idx_files(folder))
    x_train, x_test = (_read_idx_file(path, axes=3)[:, None] for path in (train, test))
    y_train, y_test = (
        _read_idx_file(path, axes=1).astype(np.int64) for path in (train_labels, test_labels)
    )
    return Arrays(x_train, y_train, x_test, y_test, class_names)


def _read_idx_file(path: Path, axes: int) -> NDArray[np.uint8]:
    """Read the IDX format of MNIST's page: 0, 0, 8 (unsigned bytes), the number of axes; the length
    of each as big-endian uint32; the bytes. torchvision is not used, because importing it is
    slow."""
    content = np.frombuffer(bytearray(path.read_bytes()), np.uint8)
    offset = 4 + 4 * axes
    if content[:4].tolist() != [0, 0, 8, axes] or len(content) < offset:
        raise ValueError(f"{path.name} does not begin as an IDX file of bytes with {axes} axes")
    lengths = content[4:offset].view(">u4").tolist()
    if len(content) - offset != math.prod(lengths):
        raise ValueError(
            f"{path.name} has {len(content) - offset} bytes for {' x '.join(map(str, lengths))}"
        )
    return content[offset:].reshape(lengths)


def _read_cifar10(root: Path) -> Arrays:
    from torchvision.datasets import CIFAR10

    train, test = (CIFAR10(str(root), train=part) for part in (True, False))
    (x_train, y_train), (x_test, y_test) = (
        (np.ascontiguousarray(part.data.transpose(0, 3, 1, 2)), np.array(part.targets, np.int64))
        for part in (train, test)
    )
    return Arrays(x_train, y_train, x_test, y_test, tuple(train.classes))


def _read_svhn(root: Path) -> Arrays:
    from scipy.io import loadmat

    arrays = []
    for part in ("train", "test"):
        matrices = loadmat(root / f"{part}_32x32.mat", variable_names=("X", "y"))
        arrays.append(np.ascontiguousarray(matrices["X"].transpose(3, 2, 0, 1)))
        labels = matrices["y"].reshape(-1).astype(np.int64)
        arrays.append(np.where(labels == 10, 0, labels))  # SVHN writes the digit 0 as 10
    x_train, y_train, x_test, y_test = arrays
    return Arrays(x_train, y_train, x_test, y_test, DIGITS)


def _list_idx_files(folder: str) -> tuple[str, ...]:
    kinds = ("images-idx3", "labels-idx1")
    return tuple(f"{folder}/{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in kinds)


_CIFAR_FILES = tuple(
    f"cifar-10-batches-py/{file}"
    for file in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")
)


def _make_idx_set(name: str, class_names: tuple[str, ...]) -> _PublishedSet:
    folder = f"{name}/raw"
    read = partial(_read_idx_set, folder, class_names)
    return _PublishedSet(name, _list_idx_files(folder), (1, 28, 28), read, "")


PUBLISHED = {
    "mnist": _make_idx_set("MNIST", DIGITS),
    "fashion_mnist": _make_idx_set("FashionMNIST", GARMENTS),
    "cifar10": _PublishedSet("CIFAR10", _CIFAR_FILES, (3, 32, 32), _read_cifar10, ""),
    "svhn": _PublishedSet(
        "SVHN", ("train_32x32.mat", "test_32x32.mat"), (3, 32, 32), _read_svhn, "test"
    ),
}
