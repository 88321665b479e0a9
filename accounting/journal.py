"""The file of a privacy account: append-only, hash-chained, one writer, durable before use.

    line       canonical JSON (see ``canonical_json.py``) and a newline
    "seq"      0, 1, 2, ...
    "prev"     SHA-256 of the line before (64 zeros for the first)

A line and its directory entry are on disk before :meth:`JournalFile.append` returns. The chain
shows damage and casual edits. A writer of the file could rebuild it, so checkpoint and card also
record number and hash of the last line.

Advisory locks on ``AGENT.lock`` beside the journal and on the journal itself keep out a second
writer, even if the lock file was removed or a hard link is used. Before each line the file must be
unchanged (same inode, length, time of change). POSIX systems only.
"""

import fcntl
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from accounting.canonical_json import encode
from accounting.errors import LedgerError

FIRST_PREV = "0" * 64
MAX_FILE_BYTES = 1 << 28

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_APPEND = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | _OPEN
_PUT_BACK = "Stop what else writes there, put the true journal back, then resume"


def line_hash(line: bytes) -> str:
    """Return the SHA-256 of a line without its newline, in hex."""
    return hashlib.sha256(line).hexdigest()


def split_lines(content: bytes) -> tuple[list[bytes], bytes]:
    """Return complete lines without their newlines, and the bytes after the last newline."""
    *lines, torn = content.split(b"\n")
    return lines, torn


def read_content(path: Path) -> bytes:
    """Read the bytes of a journal. Raises LedgerError if absent, a link, huge or not readable."""
    try:
        # Without O_NONBLOCK a pipe in the journal's place would block for ever.
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
    """The one open writer of a journal. It checks the chain, not the meaning of lines."""

    def __init__(self, path: Path) -> None:
        """Take the lock; create only the directory and the lock file.

        Raises:
            LedgerError: another process holds the lock, or the directory cannot be written.
        """
        self.path = path
        self.head = FIRST_PREV
        self.seq = -1
        self._file: int | None = None
        self._size = 0  # bytes that are durable
        self._digest = hashlib.sha256()  # of them
        self._unsure = b""  # a line whose write failed: all, part or none of it may be on disk
        self._changed = 0  # when this writer last changed the file, in ns
        self._broken = ""
        self._process = os.getpid()
        try:
            make_directory(path.parent)
            self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | _OPEN, 0o600)
        except OSError as error:
            raise LedgerError(f"{path.parent}: cannot be written ({error.strerror})") from error
        try:
            self._lock_exclusively(self._lock)
        except LedgerError:
            os.close(self._lock)
            raise

    def _lock_exclusively(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LedgerError(
                f"{self.path}: another process is using this account. Wait for it, or stop it"
            ) from error

    def create(self, first: dict[str, Any]) -> None:
        """Create the file with its first record. Raises LedgerError if it exists."""
        try:
            self._file = os.open(self.path, _APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise LedgerError(
                f"{self.path}: exists already; its charges still count. Resume that run, or "
                "choose another run folder."
            ) from error
        except OSError as error:
            raise LedgerError(f"{self.path}: cannot be created ({error.strerror})") from error
        self._lock_exclusively(self._file)
        self._changed = os.fstat(self._file).st_ctime_ns
        try:
            self.append(first)
        except LedgerError:
            with suppress(OSError):
                if self._is_at_path():  # nothing was spent yet: a second attempt must be possible
                    self.path.unlink()
            raise

    def hold(self) -> None:
        """Lock an existing file, before it is read for :meth:`extend`."""
        try:
            self._file = os.open(self.path, _APPEND)
        except OSError as error:
            text = f"{self.path}: cannot be read and written ({error.strerror})"
            raise LedgerError(text) from error
        self._lock_exclusively(self._file)

    def extend(self, head: str, seq: int) -> None:
        """Continue the locked file, whose last line has this hash and number."""
        assert self._file is not None
        self._changed = os.fstat(self._file).st_ctime_ns
        content = self._read_content()
        lines, torn = split_lines(content)
        if torn or len(lines) != seq + 1 or line_hash(lines[-1]) != head:
            raise LedgerError(f"{self.path}: was changed while it was read. {_PUT_BACK}.")
        self.head, self.seq = head, seq
        self._size, self._digest = len(content), hashlib.sha256(content)

    def damage(self) -> str:
        """Describe changes to the file that this writer did not make; "" if there are none.

        An unfinished line of this writer is not damage.
        """
        if self._file is None:
            return ""
        try:
            if not self._is_at_path():
                return "another file lies in its place"
            content = self._read_content()
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        if len(content) < self._size:
            return f"{self._size - len(content)} bytes were cut from its end"
        if hashlib.sha256(content[: self._size]).digest() != self._digest.digest():
            return "its bytes were changed"
        if not self._unsure.startswith(content[self._size :]):
            return f"{len(content) - self._size} bytes were added by another writer"
        return ""

    def refuse_damage(self) -> None:
        """Raise LedgerError if another writer changed the file.

        It is read only if its length or time of change differ.
        """
        if self._file is None:
            return
        now = os.fstat(self._file)
        with suppress(OSError):
            if self._is_at_path() and (now.st_size, now.st_ctime_ns) == (self._size, self._changed):
                return
        if damage := self.damage():
            self._broken = damage
            raise LedgerError(
                f"{self.path}: {damage} while this process used it. Nothing was read. {_PUT_BACK}."
            )
        self._changed = now.st_ctime_ns

    def _is_at_path(self) -> bool:
        """Return whether the open file is the one at the path."""
        assert self._file is not None
        path_stat = os.stat(self.path, follow_symlinks=False)
        return os.path.samestat(path_stat, os.fstat(self._file))

    def _read_content(self) -> bytes:
        assert self._file is not None
        chunks, offset = [], 0
        while chunk := os.pread(self._file, 1 << 20, offset):
            chunks.append(chunk)
            offset += len(chunk)
        return b"".join(chunks)

    def append(self, record: dict[str, Any]) -> int:
        """Append one record; return its number once it is on disk.

        Raises:
            LedgerError: this record or an earlier one could not be made durable. The state on disk
                is then unknown, and the writer refuses every further record.
        """
        if self._file is None or self._process != os.getpid():
            raise LedgerError(
                f"{self.path}: closed, or opened by another process. Open the account in the "
                "process that reads the rows."
            )
        if self._broken:
            raise LedgerError(f"{self.path}: an earlier write failed ({self._broken}); resume")
        self.refuse_damage()
        line = encode({**record, "seq": self.seq + 1, "prev": self.head})
        self._unsure = line + b"\n"
        try:
            _write_all(self._file, self._unsure)
            os.fsync(self._file)
            sync_directory(self.path.parent)
            self._changed = os.fstat(self._file).st_ctime_ns
        except OSError as error:
            self._broken = error.strerror or str(error)
            raise LedgerError(
                f"{self.path}: line {self.seq + 2} could not be written ({self._broken}). "
                f"Its rows were not read. Free space or repair the disk, then resume."
            ) from error
        except BaseException:  # e.g. Ctrl-C: the line may or may not be on disk
            self._broken = "interrupted"
            raise
        self._digest.update(self._unsure)
        self._size += len(self._unsure)
        self.seq, self.head, self._unsure = self.seq + 1, line_hash(line), b""
        self.refuse_damage()  # another writer may have appended between check and write
        return self.seq

    def replace_torn_tail(self, lines: list[bytes], record: dict[str, Any]) -> None:
        """Rewrite the file as its complete lines and one more record, atomically.

        A crash before the rename leaves the torn tail in place, which is charged too.
        """
        line = encode({**record, "seq": len(lines), "prev": line_hash(lines[-1])})
        new_path = self.path.with_suffix(".new")
        try:
            new_path.unlink(missing_ok=True)
            file = os.open(new_path, _APPEND | os.O_CREAT | os.O_EXCL, 0o600)
            old_file, self._file = self._file, file
            if old_file is not None:
                os.close(old_file)
            self._lock_exclusively(file)  # before it has the journal's name
            _write_all(file, b"".join(part + b"\n" for part in (*lines, line)))
            os.fsync(file)
            os.replace(new_path, self.path)
            sync_directory(self.path.parent)
        except OSError as error:
            raise LedgerError(f"{self.path}: cannot be mended ({error.strerror})") from error

    def close(self) -> None:
        """Release the file and the lock. May be called twice."""
        for descriptor in (self._file, self._lock):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._file, self._lock = None, -1


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def make_directory(path: Path) -> None:
    """Make a directory and its parents durably, with mode 0700, if absent."""
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
