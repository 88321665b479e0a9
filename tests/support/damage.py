"""Damage to a journal while an account has it open, at chosen moments.

Not a test itself. Each kind of damage changes the file without taking its locks.
"""

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from accounting.accountants import epsilon
from accounting.canonical_json import encode
from accounting.events import Event
from accounting.journal import JournalFile
from accounting.ledger import Account, Balance, read_journal


def flip(path: Path, older_copy: bytes, rng: random.Random) -> None:
    """Flip one bit of the file in place."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    with path.open("r+b") as file:
        file.write(content)


def cut(path: Path, older_copy: bytes, rng: random.Random) -> None:
    """Truncate the file so that the last charge is lost."""
    before = path.read_bytes().rindex(b'"type":"reserve"')
    os.truncate(path, rng.randrange(path.read_bytes()[:before].rindex(b"\n") + 1))


def delete(path: Path, older_copy: bytes, rng: random.Random) -> None:
    path.unlink()


def replace(path: Path, older_copy: bytes, rng: random.Random) -> None:
    """Restore an older copy, as a new file or into the same file."""
    if rng.random() < 0.5:
        path.write_bytes(older_copy)
    else:
        (path.parent / "copy").write_bytes(older_copy)
        os.replace(path.parent / "copy", path)


def two_writers(path: Path, older_copy: bytes, rng: random.Random) -> None:
    """Remove the lock file, be refused all the same, and append a line without a lock."""
    path.with_suffix(".lock").unlink()
    journal = read_journal(path)
    with pytest.raises(Exception, match="another process is using this account"):
        Account.open(path, journal.plan, resume=True)
    record = {"type": "settle", "reserve": max(journal.unsettled, default=journal.seq)}
    line = encode({**record, "seq": journal.seq + 1, "prev": journal.head})
    with path.open("ab") as file:
        file.write(line + b"\n")


KINDS: dict[str, Callable[[Path, bytes, random.Random], None]] = {
    "flip": flip, "cut": cut, "delete": delete, "replace": replace, "two writers": two_writers,
}  # fmt: skip


@dataclass
class ChargeRecord:
    """What accounts were really charged, independent of their journals."""

    entered: list[Event] = field(default_factory=list)  # charges of visits that could read rows
    at_damage: int = 0  # visits until the damage

    def spent(self, delta: float) -> float:
        return epsilon(self.entered, delta)


@contextlib.contextmanager
def damaged(kind: str, visit: int, when: str, seed: int = 0) -> Iterator[ChargeRecord]:
    """Damage the journal of the account that is charged for the ``visit``-th visit.

    Args:
        kind: one of ``KINDS``, or "" for none.
        when: "in" the visit, or "after" it.
    """
    rng, real, record = random.Random(seed), Account.spend, ChargeRecord()
    copies: list[bytes] = []

    def damage_now(account: Account) -> None:
        if kind and len(record.entered) == visit and not record.at_damage:
            record.at_damage = visit
            KINDS[kind](account._file.path, rng.choice(copies), rng)

    @contextlib.contextmanager
    def spend(self: Account, event: Event, visit: str) -> Iterator[None]:
        if self._file.path.exists():
            copies.append(self._file.path.read_bytes())
        with real(self, event, visit):
            record.entered.append(event)
            if when == "in":
                damage_now(self)
            yield
        damage_now(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Account, "spend", spend)
        patch.setattr(os, "fsync", lambda _: None)  # durability is not tested here
        yield record


@contextlib.contextmanager
def damage_checks_disabled() -> Iterator[None]:
    """Disable the checks that notice a damaged journal (for controls)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JournalFile, "refuse_damage", lambda self: None)
        patch.setattr(JournalFile, "damage", lambda self: "")

        def balance(self: Account) -> Any:
            return Balance(read_journal(self._file.path), ())

        patch.setattr(Account, "balance", balance)
        yield
