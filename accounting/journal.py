"""The file under a privacy account: append-only, hash-chained, one writer, durable first.

    line       canonical JSON (see ``canonical.py``) and a newline
    "seq"      0, 1, 2, ...
    "prev"     SHA-256 of the line before (64 zeros for the first)

A line is on disk, with its directory entry, before :meth:`JournalFile.append` returns: the
rows that it pays for are read only afterwards. The chain detects damage and casual edits;
whoever can write the file can also rebuild it, so the head (hash of the last line) and its
number belong in a second place too: the checkpoint and the privacy card.

One writer: an advisory lock on ``AGENT.lock`` beside the journal, which the operating system
drops when its process dies. Files are readable by their owner only. POSIX systems only.
"""

import fcntl
import hashlib
import os
import stat
from pathlib import Path
from typing import Any

from accounting.canonical import encode
from accounting.errors import LedgerError

FIRST_PREV = "0" * 64
MAX_FILE_BYTES = 1 << 28

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


def line_hash(line: bytes) -> str:
    """SHA-256 of a line without its newline, in hex."""
    return hashlib.sha256(line).hexdigest()


def split_lines(content: bytes) -> tuple[list[bytes], bytes]:
    """Complete lines without their newlines, and what follows the last newline (often empty)."""
    *lines, torn = content.split(b"\n")
    return lines, torn


def read_content(path: Path) -> bytes:
    """The bytes of a journal. Raises LedgerError when it is absent, a link, huge or unreadable."""
    try:
        # A pipe in the place of a journal would block for ever without O_NONBLOCK.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _OPEN)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise LedgerError(f"{path}: not a regular file, so no journal")
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read ({error.strerror})") from error
    if len(content) > MAX_FILE_BYTES:
        raise LedgerError(f"{path}: larger than {MAX_FILE_BYTES} bytes; not a journal")
    return content


class JournalFile:
    """The one open writer of a journal. Knows the chain, not what the lines mean."""

    def __init__(self, path: Path) -> None:
        """Take the lock; nothing is created but the directory and the lock file.

        Raises:
            LedgerError: another process holds the lock, or the directory cannot be written.
        """
        self.path = path
        self.head = FIRST_PREV
        self.seq = -1
        self._file: int | None = None
        self._broken = ""
        self._process = os.getpid()
        try:
            make_directory(path.parent)
            self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | _OPEN, 0o600)
        except OSError as error:
            raise LedgerError(f"{path.parent}: cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise LedgerError(
                f"{path}: another process is using this account. Wait for it to end, or stop it; "
                f"the lock goes with its process."
            ) from error

    def create(self, first: dict[str, Any]) -> None:
        """Make the file with its first record. Raises LedgerError if it exists."""
        try:
            self._file = os.open(
                self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | _OPEN, 0o600
            )
        except FileExistsError as error:
            raise LedgerError(
                f"{self.path}: exists already; its charges must not be forgotten. Resume that "
                f"run, or choose another run folder."
            ) from error
        except OSError as error:
            raise LedgerError(f"{self.path}: cannot be created ({error.strerror})") from error
        try:
            self.append(first)
        except LedgerError:
            self.path.unlink(missing_ok=True)  # nothing was spent yet: do not block a second try
            raise

    def extend(self, head: str, seq: int) -> None:
        """Open an existing, verified file whose last line has this hash and number."""
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | _OPEN)
        except OSError as error:
            raise LedgerError(f"{self.path}: cannot be written ({error.strerror})") from error
        self.head, self.seq = head, seq

    def append(self, record: dict[str, Any]) -> int:
        """Add one record; returns its number once it is on disk.

        Raises:
            LedgerError: it could not be made durable, or an earlier record could not. The
                writer then refuses everything: what is on disk is known only to a fresh read.
        """
        if self._file is None or self._process != os.getpid():
            raise LedgerError(
                f"{self.path}: closed, or opened by another process. Open the account in the "
                f"process that reads the rows."
            )
        if self._broken:
            raise LedgerError(f"{self.path}: an earlier write failed ({self._broken}); resume")
        line = encode({**record, "seq": self.seq + 1, "prev": self.head})
        try:
            _write_all(self._file, line + b"\n")
            os.fsync(self._file)
            sync_directory(self.path.parent)
        except OSError as error:
            self._broken = error.strerror or str(error)
            raise LedgerError(
                f"{self.path}: line {self.seq + 2} could not be written ({self._broken}). "
                f"What it pays for was not read. Free space or mend the disk, then resume."
            ) from error
        except BaseException:  # Ctrl-C: whether the line is on disk, only a fresh read can tell
            self._broken = "interrupted"
            raise
        self.seq, self.head = self.seq + 1, line_hash(line)
        return self.seq

    def replace_torn_tail(self, lines: list[bytes], record: dict[str, Any]) -> None:
        """Rewrite the file as its complete lines and one more record, in one atomic step.

        A crash before the rename leaves the torn tail in place, where it counts as well.
        """
        line = encode({**record, "seq": len(lines), "prev": line_hash(lines[-1])})
        fresh = self.path.with_suffix(".new")
        try:
            fresh.unlink(missing_ok=True)
            file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600)
            try:
                _write_all(file, b"".join(part + b"\n" for part in (*lines, line)))
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(fresh, self.path)
            sync_directory(self.path.parent)
        except OSError as error:
            raise LedgerError(f"{self.path}: cannot be mended ({error.strerror})") from error

    def close(self) -> None:
        """Release the file and the lock. Twice is harmless."""
        for descriptor in (self._file, self._lock):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._file, self._lock = None, -1


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def make_directory(path: Path) -> None:
    """Make a directory and those above it, if they are not there: for their owner alone, and on
    disk, each with its entry."""
    for folder in reversed((path, *path.parents)):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_directory(folder.parent)


def sync_directory(path: Path) -> None:
    """Make new and renamed entries of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
