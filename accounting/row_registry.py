"""Registry of rows and the accounts that pay for them, if accounts outlive a run.

The same row under two agents would have two budgets, and a row that one run protects may be used
unprotected by another. So ``registry/`` next to the journals contains:

    key          32 random bytes, made once; never leaves the folder
    AGENT.rows   a fingerprint of every row that was ever under this account, one per line
    unprotected  fingerprints of every row that a run ever used without protection
    lock         one process at a time

A fingerprint is HMAC-SHA256 under the key, cut to 128 bits; without a key anybody could test
whether a candidate row is in the data. The registry stays with the rows; auditors need the journals
only. New rows of an account count as charged with all that it ever spent. POSIX systems only.
"""

import fcntl
import hashlib
import hmac
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

from accounting.account_plan import check_agent_id
from accounting.errors import LedgerError
from accounting.journal import make_directory, sync_directory

_KEY_BYTES = 32
_FINGERPRINT_BYTES = 16
_UNPROTECTED = "unprotected"
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_ADVICE = (
    "Give every run the same split (data.split: RUN/split.json of the first), remove doubled rows "
    "from the data, or use another privacy.ledger for other rows."
)


def shared_rows(holdings: Mapping[str, Iterable[bytes]]) -> Iterator[tuple[str, str, int]]:
    """Yield every two agents that hold the same row, and the number of such rows; store nothing.

    holdings: agent id -> content of each of its labelled rows, without the label.
    """
    key = os.urandom(_KEY_BYTES)
    fingerprints = {agent: _compute_fingerprints(key, rows) for agent, rows in holdings.items()}
    for (agent, rows), (other, other_rows) in combinations(fingerprints.items(), 2):
        if count := len(rows & other_rows):
            yield agent, other, count


def find_double_use(
    holdings: Mapping[str, Iterable[bytes]], unprotected: Iterable[bytes]
) -> Iterator[tuple[str, int]]:
    """Yield every agent with rows that are also used without protection, and their number.

    holdings: as in :func:`shared_rows`. unprotected: as in :func:`claim`.
    """
    key = os.urandom(_KEY_BYTES)
    unprotected_rows = _compute_fingerprints(key, unprotected)
    for agent, rows in holdings.items():
        if count := len(_compute_fingerprints(key, rows) & unprotected_rows):
            yield agent, count


def claim(
    folder: Path, holdings: Mapping[str, Iterable[bytes]], *, unprotected: Iterable[bytes] = (),
    only_check: bool = False,
) -> None:  # fmt: skip
    """Register rows permanently under the accounts of their agents; all of them, or none.

    Also record the rows that the run uses without protection: no row is ever both.

    Args:
        folder: of the journals; ``registry`` is made in it.
        holdings: agent id -> content of each of its labelled rows, without the label.
        unprotected: content of each row that the run uses without protection: unlabelled rows of
            every agent, and validation rows. Test rows are not among them: no agent trains on them.
        only_check: raise as usual, and store nothing.

    Raises:
        LedgerError: nothing was registered: a row is under another account, or is used without
            protection, or the rows of a journal are missing, or the registry cannot be read or
            written.
    """
    registry = folder / "registry"
    for agent in holdings:
        check_agent_id(agent)
    try:
        make_directory(registry)
        with _lock_registry(registry):
            registered = {
                path.stem: _read_fingerprints(path) for path in sorted(registry.glob("*.rows"))
            }
            _refuse_lost_rows(folder, registered)
            key = _read_or_create_key(registry)
            stored_unprotected = _read_unprotected(registry, has_rows=bool(registered))
            all_unprotected = (stored_unprotected or set()) | _compute_fingerprints(
                key, unprotected
            )
            claimed = {agent: _compute_fingerprints(key, rows) for agent, rows in holdings.items()}
            merged = {
                a: registered.get(a, set()) | claimed.get(a, set()) for a in {*registered, *claimed}
            }
            _refuse_overlap(folder, merged)
            _refuse_unprotected(folder, merged, all_unprotected)
            # First, and even if empty: rows without this file show that it was lost.
            if not only_check and all_unprotected != stored_unprotected:
                _write_durably(registry / _UNPROTECTED, _format_lines(all_unprotected))
            for agent in () if only_check else claimed:
                if merged[agent] != registered.get(agent):
                    _write_durably(registry / f"{agent}.rows", _format_lines(merged[agent]))
    except OSError as error:
        raise LedgerError(
            f"{registry}: cannot be read or written ({error.strerror}). It says which rows have "
            "an account: correct its path and rights, or free space."
        ) from error


def refuse_partial_account(folder: Path, agent: str) -> None:
    """Raise LedgerError if an account has a journal but no rows, or rows but no journal.

    A partly copied folder looks so. For accounts that outlive a run.
    """
    journal, rows = folder / f"{agent}.jsonl", folder / "registry" / f"{agent}.rows"
    if rows.exists() and not journal.exists():
        raise LedgerError(
            f"{journal}: missing, though rows have been put under it. Without it nobody knows "
            f"what was spent. Put it back. (If no run ever began with this folder, remove {rows}.)"
        )
    if journal.exists() and not rows.exists():
        raise _make_lost_rows_error(folder, agent)


def _refuse_lost_rows(folder: Path, registered: Iterable[str]) -> None:
    """Refuse journals without rows. Rows are always stored before their journal is made."""
    agents = {path.stem for path in folder.glob("*.jsonl")}
    for agent in sorted(agents - set(registered)):
        raise _make_lost_rows_error(folder, agent)


def _make_lost_rows_error(folder: Path, agent: str) -> LedgerError:
    return LedgerError(
        f"{folder / 'registry' / agent}.rows: missing, though {agent}.jsonl is there. Without it "
        "nobody knows which rows have an account, or were used without protection: copy the whole "
        "folder"
    )


def _refuse_overlap(folder: Path, holdings: Mapping[str, set[bytes]]) -> None:
    for (agent, rows), (other, other_rows) in combinations(sorted(holdings.items()), 2):
        if count := len(rows & other_rows):
            raise LedgerError(
                f"{folder}: {count} rows would be in the accounts of {agent} and of {other}, and "
                f"have two budgets. {_ADVICE}"
            )


def _refuse_unprotected(
    folder: Path, holdings: Mapping[str, set[bytes]], unprotected: set[bytes]
) -> None:
    for agent, rows in sorted(holdings.items()):
        if count := len(rows & unprotected):
            raise LedgerError(
                f"{folder}: {count} rows in the account of {agent} would be used without "
                f"protection, or have been, by this run or another, as unlabelled or validation "
                f"rows, and its budget would promise nothing for them. {_ADVICE}"
            )


def _compute_fingerprints(key: bytes, rows: Iterable[bytes]) -> set[bytes]:
    return {hmac.digest(key, row, hashlib.sha256)[:_FINGERPRINT_BYTES] for row in rows}


def _read_or_create_key(registry: Path) -> bytes:
    path = registry / "key"
    if not path.exists():
        if any(registry.glob("*.rows")) or (registry / _UNPROTECTED).exists():
            # With another key no registered row would be recognised.
            raise LedgerError(f"{path}: missing; put the true key back")
        _write_durably(path, os.urandom(_KEY_BYTES))
    key = _read_content(path)
    if len(key) != _KEY_BYTES:
        raise LedgerError(f"{path}: damaged; put the true key back")
    return key


def _read_unprotected(registry: Path, *, has_rows: bool) -> set[bytes] | None:
    """Return the rows used without protection; None if no row was ever registered."""
    path = registry / _UNPROTECTED
    if path.exists():
        return _read_fingerprints(path)
    if has_rows:
        raise LedgerError(
            f"{path}: missing, though rows have been put under accounts. Without it nobody knows "
            f"which rows were used without protection; put the true file back"
        )
    return None


def _read_fingerprints(path: Path) -> set[bytes]:
    try:
        fingerprints = {bytes.fromhex(line.decode("ascii")) for line in _read_content(path).split()}
    except ValueError:
        fingerprints = {b""}
    if any(len(fingerprint) != _FINGERPRINT_BYTES for fingerprint in fingerprints):
        raise LedgerError(f"{path}: damaged; put the true file back")
    return fingerprints


def _format_lines(fingerprints: set[bytes]) -> bytes:
    # Sorted, so that the file does not show the order of the rows.
    return b"".join(fingerprint.hex().encode() + b"\n" for fingerprint in sorted(fingerprints))


def _read_content(path: Path) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | _OPEN), "rb") as file:
        return file.read()


def _write_durably(path: Path, content: bytes) -> None:
    """Write the file atomically and durably."""
    new_path = path.with_suffix(".new")
    new_path.unlink(missing_ok=True)
    descriptor = os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new_path, path)
    sync_directory(path.parent)


@contextmanager
def _lock_registry(registry: Path) -> Iterator[None]:
    descriptor = os.open(registry / "lock", os.O_RDWR | os.O_CREAT | _OPEN, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits: a claim takes milliseconds
        yield
    finally:
        os.close(descriptor)
