"""Damage to a journal while an account has it open, and the moments at which it is done.

Not a test itself. Each kind of damage changes the file; none asks for its locks.
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


def flip(path: Path, older: bytes, chance: random.Random) -> None:
    """One bit of the file changes in place."""
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    with path.open("r+b") as file:
        file.write(content)


def cut(path: Path, older: bytes, chance: random.Random) -> None:
    """The end of the file is lost, the last charge with it."""
    before = path.read_bytes().rindex(b'"type":"reserve"')
    os.truncate(path, chance.randrange(path.read_bytes()[:before].rindex(b"\n") + 1))


def delete(path: Path, older: bytes, chance: random.Random) -> None:
    path.unlink()


def replace(path: Path, older: bytes, chance: random.Random) -> None:
    """An older copy is put back: under the same name, or into the same file."""
    if chance.random() < 0.5:
        path.write_bytes(older)
    else:
        (path.parent / "copy").write_bytes(older)
        os.replace(path.parent / "copy", path)


def two_writers(path: Path, older: bytes, chance: random.Random) -> None:
    """Another process removes the lock file, is refused all the same, and writes without asking."""
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
class Watched:
    """What really happened to accounts, whatever their journals say."""

    entered: list[Event] = field(default_factory=list)  # visits in which rows could be read
    at_damage: int = 0  # visits until then

    def spent(self, delta: float) -> float:
        return epsilon(self.entered, delta)


@contextlib.contextmanager
def damaged(kind: str, visit: int, when: str, seed: int = 0) -> Iterator[Watched]:
    """Inside, the journal of the account that pays for the ``visit``-th visit is damaged.

    Args:
        kind: one of ``KINDS``, or "" for none.
        when: "in" the visit, or "after" it.
    """
    chance, real, watched = random.Random(seed), Account.spend, Watched()
    copies: list[bytes] = []

    def strike(account: Account) -> None:
        if kind and len(watched.entered) == visit and not watched.at_damage:
            watched.at_damage = visit
            KINDS[kind](account._file.path, chance.choice(copies), chance)

    @contextlib.contextmanager
    def spend(self: Account, event: Event, visit: str) -> Iterator[None]:
        if self._file.path.exists():
            copies.append(self._file.path.read_bytes())
        with real(self, event, visit):
            watched.entered.append(event)
            if when == "in":
                strike(self)
            yield
        strike(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Account, "spend", spend)
        patch.setattr(os, "fsync", lambda _: None)  # the disk is not what is tested
        yield watched


@contextlib.contextmanager
def believing() -> Iterator[None]:
    """The fault that is guarded against: the file is believed whatever happened to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JournalFile, "refuse_damage", lambda self: None)
        patch.setattr(JournalFile, "damage", lambda self: "")

        def balance(self: Account) -> Any:
            return Balance(read_journal(self._file.path), ())

        patch.setattr(Account, "balance", balance)
        yield
