"""The ledgers of replaced runs of an output folder, kept beside the folder.

A run's card is about that run. An earlier run may have used the same rows, so the card names the
ledgers of replaced runs with their epsilon, and the audit reads them again.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accounting.budget import Unit, delta_up, round_up
from accounting.errors import LedgerError
from accounting.journal_reader import Journal, read_journal
from privssl.errors import RunFolderError
from privssl.privacy.card_schema import FormerLedger


def former_ledgers(folder: Path, known: Mapping[str, Journal]) -> list[FormerLedger]:
    """Return the ledgers of replaced runs of this folder, one entry per agent.

    Args:
        known: agent -> journal of the current run. Former ledgers that it continues are omitted,
            and so are ledgers without a visit.

    Raises:
        RunFolderError: the folder above cannot be read.
    """
    entries: list[FormerLedger] = []
    for name, agent, journal in _find_journals(folder):
        entry: FormerLedger = {
            "ledger": name, "agent": agent,
            "kind": "guaranteed", "epsilon": None, "delta": None, "budget": None,
        }  # fmt: skip
        if head := _head_of(journal):
            if not journal.events or head in known.get(agent, Journal()).hashes:
                continue
            entry["kind"] = "guaranteed" if journal.plan.scope == "sound" else "nominal"
            entry["epsilon"], entry["budget"] = journal.epsilon, journal.promised
            entry["delta"] = journal.plan.delta_of(journal.cost)
        entries.append(entry)
    return entries


def former_heads(folder: Path) -> dict[str, dict[str, str]]:
    """Map ledgers of replaced runs to agents and the hash of the last line; empty if damaged.

    Checkpoints record it. Ledgers without a visit are omitted. Raises RunFolderError.
    """
    heads: dict[str, dict[str, str]] = {}
    for name, agent, journal in _find_journals(folder):
        head = _head_of(journal)
        if journal.events or not head:
            heads.setdefault(name, {})[agent] = head
    return heads


def recorded_heads(text: object) -> Iterator[tuple[str, str, str]]:
    """Yield ledger, agent and hash of its last line of a checkpoint's record; in former versions
    the ledger alone."""
    try:
        recorded = json.loads(str(text))
    except (ValueError, RecursionError):
        return
    if isinstance(recorded, list):
        yield from ((str(ledger), "", "") for ledger in recorded)
    for ledger, heads in recorded.items() if isinstance(recorded, dict) else ():
        for agent, head in heads.items() if isinstance(heads, dict) else ():
            yield str(ledger), str(agent), str(head)


def _find_journals(folder: Path) -> Iterator[tuple[str, str, Journal]]:
    """Yield ledger, agent and journal of each replaced run; the journal is empty if unreadable."""
    resolved = folder.resolve()
    try:
        names = sorted(os.listdir(resolved.parent))
    except OSError as error:
        raise RunFolderError(
            f"{resolved.parent}: cannot be read: {error.strerror}. "
            "Ledgers of replaced runs are there"
        ) from error
    for name in names:
        if not re.fullmatch(re.escape(resolved.name) + r"\.ledger-[0-9]{3,}", name):
            continue
        for path in sorted((resolved.parent / name).glob("*.jsonl")):
            try:
                yield name, path.stem, read_journal(path)
            except LedgerError:
                yield name, path.stem, Journal()


def _head_of(journal: Journal) -> str:
    """Return the hash of the last line; empty for a damaged journal."""
    return journal.head if journal.plans and not journal.problems else ""


_BOTH: Mapping[Unit, str] = {
    "record": "For a row with its label in both runs, epsilons and deltas add up; of a run that "
    "was stopped, its budget counts. A labelled row of this run that the other used without its "
    "label had no noise there.",
    "person": "For a person with labelled rows in both runs, epsilons and deltas add up, if that "
    "run was for persons, too; of a run that was stopped, its budget counts. A row of a person "
    "that the other run used without its label had no noise there.",
}
_NOTHING = (
    "That run guarantees nothing for any row, so for a row that both runs used no sum is a bound."
)


def former_sentences(entries: Iterable[Mapping[str, Any]], unit: Unit) -> list[str]:
    """Return one sentence per ledger of a replaced run: the card does not count its spending."""
    spending: dict[str, list[str]] = {}
    nominal_ledgers = set[str]()  # ledgers of runs without a guarantee
    for entry in entries:
        spent = "damaged, so what it spent is unknown"
        if entry["epsilon"] is not None:
            nominal = "nominal " if entry["kind"] == "nominal" else ""
            nominal_ledgers |= {entry["ledger"]} if nominal else set()
            budget = "" if entry["budget"] is None else f" of {entry['budget']:g}"
            delta = delta_up(entry["delta"])
            spent = f"{nominal}epsilon {round_up(entry['epsilon'])}{budget} at delta {delta}"
        spending.setdefault(entry["ledger"], []).append(f"{entry['agent']} {spent}")
    return [
        f"Not counted: a run that this one replaced, whose ledger is in {ledger}: "
        f"{', '.join(spent)}. {_NOTHING if ledger in nominal_ledgers else _BOTH[unit]}"
        for ledger, spent in spending.items()
    ]
