"""Atomic file writes: a file is either complete or absent after a crash.

Data is written to a temporary file beside its target, synchronised to disk, and renamed to the
target. The folder is synchronised too, because a power cut could lose the name. Sources: POSIX
rename(2) and fsync(2); Pillai et al., "All File Systems Are Not Created Equal" (2014).
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from accounting.journal import sync_directory
from privssl.errors import RunFolderError

TEMPORARY = ".tmp-"  # prefix of leftovers of a killed write


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError to a RunFolderError that names the file."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        raise RunFolderError(
            f"{path}: cannot be written: {error.strerror}. Name a file in a folder that exists"
        ) from error
    except OSError as error:
        raise RunFolderError(
            f"{path}: cannot be written: {error.strerror or error}. Free disk space or change the "
            "permissions, then start the command again (train: with --resume; before the first "
            "checkpoint with run.overwrite=true)"
        ) from error


def write(path: Path, data: bytes | str, *, parents: bool = False) -> None:
    """Write or replace a file atomically; ``parents``: make its folder. Raises RunFolderError."""
    with writing(path):
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, data.encode() if isinstance(data, str) else data)


def write_new(path: Path, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a new file that only its owner can read, and synchronise it to disk.

    ``data``: all of it, or an iterable of its pieces.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        for piece in [data] if isinstance(data, bytes) else data:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Write or replace a file atomically. Raises OSError."""
    temporary = path.with_name(TEMPORARY + path.name)
    temporary.unlink(missing_ok=True)
    try:
        write_new(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
