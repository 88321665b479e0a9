"""The ledgers of replaced runs of an output folder, kept beside the folder.

A run's card is about that run. An earlier run may have used the same rows, so the card names the
ledgers of replaced runs with their epsilon, and the audit reads them again.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accounting.budget import delta_up, round_up
from accounting.errors import LedgerError
from accounting.journal_reader import Journal, read_journal
from privssl.errors import RunFolderError
from privssl.privacy.card_schema import FormerLedger


def former_ledgers(folder: Path, known: Mapping[str, Journal]) -> list[FormerLedger]:
    """The ledgers that were kept when runs in this folder were replaced, one entry an agent.

    Args:
        known: agent -> journal of the run that is here. A former ledger that it continues is
            counted in it, and left out, as is one without a visit.

    Raises:
        RunFolderError: the folder above cannot be read.
    """
    own = folder.resolve()
    try:
        names = sorted(os.listdir(own.parent))
    except OSError as error:
        raise RunFolderError(
            f"{own.parent}: cannot be read: {error.strerror}. Ledgers of replaced runs are there"
        ) from error
    found: list[FormerLedger] = []
    for name in names:
        if not re.fullmatch(re.escape(own.name) + r"\.ledger-[0-9]{3,}", name):
            continue
        for path in sorted((own.parent / name).glob("*.jsonl")):
            try:
                journal = read_journal(path)
            except LedgerError:
                journal = Journal()
            entry: FormerLedger = {
                "ledger": name, "agent": path.stem,
                "kind": "guaranteed", "epsilon": None, "delta": None, "budget": None,
            }  # fmt: skip
            if journal.plans and not journal.problems:
                if not journal.events or journal.head in known.get(path.stem, Journal()).hashes:
                    continue
                entry["kind"] = "guaranteed" if journal.plan.scope == "sound" else "nominal"
                entry["epsilon"], entry["budget"] = journal.epsilon, journal.promised
                entry["delta"] = journal.plan.delta_of(journal.cost)
            found.append(entry)
    return found


def former_sentences(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """One sentence for each ledger of a replaced run: the card does not count its spending."""
    spending: dict[str, list[str]] = {}
    for entry in entries:
        spent = "damaged, so what it spent is unknown"
        if entry["epsilon"] is not None:
            nominal = "nominal " if entry["kind"] == "nominal" else ""
            budget = "" if entry.get("budget") is None else f" of {entry['budget']:g}"
            at = delta_up(entry["delta"])
            spent = f"{nominal}epsilon {round_up(entry['epsilon'])}{budget} at delta {at}"
        spending.setdefault(entry["ledger"], []).append(f"{entry['agent']} {spent}")
    return [
        f"Not counted: a run that this one replaced, whose ledger is in {ledger}: "
        f"{', '.join(spent)}. For a row that both runs used, epsilons and deltas add up; of a run "
        "that was stopped, its budget counts."
        for ledger, spent in spending.items()
    ]
