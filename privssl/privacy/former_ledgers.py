"""What replaced runs of an output folder spent: their ledgers, kept beside the folder.

A run's card speaks of that run. Whoever knows that an earlier run used the same rows needs the
numbers of both, so the card names these ledgers, and the audit reads them again.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accounting.budget import round_up
from accounting.errors import LedgerError
from accounting.journal_reader import Journal, read_journal
from privssl.errors import RunFolderError


def former_ledgers(folder: Path, known: Mapping[str, Journal]) -> list[dict[str, Any]]:
    """The ledgers that were kept when runs in this folder were replaced, one entry an agent.

    Args:
        known: agent -> journal of the run that is here. A former ledger that it goes on with is
            counted in it, and left out.

    Returns:
        ``ledger`` (name of its folder), ``agent``, ``kind`` ("guaranteed" or "nominal"), and
        ``epsilon`` and ``delta``, both None where the ledger is damaged.

    Raises:
        RunFolderError: the folder above cannot be read.
    """
    own = folder.resolve()
    try:
        beside = sorted(os.listdir(own.parent))
    except OSError as error:
        raise RunFolderError(
            f"{own.parent}: cannot be read: {error.strerror}. Ledgers of replaced runs are there"
        ) from error
    found = []
    for name in beside:
        if re.fullmatch(re.escape(own.name) + r"\.ledger-[0-9]{3,}", name):
            for path in sorted((own.parent / name).glob("*.jsonl")):
                entry = _entry(path, known.get(path.stem, Journal()))
                found += [{"ledger": name, "agent": path.stem, **entry}] if entry else []
    return found


def former_sentences(card: Mapping[str, Any] | None) -> list[str]:
    """One sentence for each ledger of a run that this one replaced: its spending is not in here."""
    told: dict[str, list[str]] = {}
    for entry in () if card is None else card.get("former_ledgers", ()):
        spent = "damaged, so nobody knows what it spent"
        if entry["epsilon"] is not None:
            nominal = "nominal " if entry["kind"] == "nominal" else ""
            spent = f"{nominal}epsilon {round_up(entry['epsilon'])} at delta {entry['delta']:g}"
        told.setdefault(entry["ledger"], []).append(f"{entry['agent']} {spent}")
    return [
        f"Not counted: a run that this one replaced, whose ledger is in {ledger}: "
        f"{', '.join(spent)}. For a row that both runs used, epsilons and deltas add up."
        for ledger, spent in told.items()
    ]


def _entry(path: Path, goes_on: Journal) -> dict[str, Any] | None:
    """What one ledger spent; None where that is nothing, or is counted already."""
    try:
        journal = read_journal(path)
    except LedgerError:
        journal = Journal()
    if journal.problems or not journal.plans:
        return {"kind": "guaranteed", "epsilon": None, "delta": None}
    if not journal.events or journal.head in goes_on.hashes:
        return None
    kind = "guaranteed" if journal.plan.scope == "sound" else "nominal"
    delta = journal.plan.delta_of(journal.cost)
    return {"kind": kind, "epsilon": journal.epsilon, "delta": delta}
