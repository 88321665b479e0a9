"""The command that checks a run's claim against its ledgers: ``python -m privssl.audit RUN_DIR``.

For every support agent it verifies the journal's chain, recomputes epsilon from its events (our
Renyi accountant, the exact formula where every batch was full, and dp-accounting where it is
installed) and holds the result against the budget and against ``privacy.json``. It reads only,
takes no lock, and trusts no number that it can recompute. Exit status:

    0  consistent        1  violated       2  the user's mistake
    3  inconclusive      4  there is no guarantee to check
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from accounting import verify
from accounting.accountants import rdp_epsilon
from accounting.budget import rounded_up
from accounting.canonical import decode_strictly
from accounting.errors import AccountingError
from accounting.events import SampledGaussian, Unprotected, leaves
from accounting.replay import Journal, read_journal
from privssl.card import guarantee_sentence
from privssl.errors import RunFolderError, UserError

_TOLERANCE = 1e-6  # relative: a claim this far below its recomputation is still rounding
_BELOW_LOWER_BOUND = 1e-3  # below it by more than the arithmetic of both libraries can explain
_BRACKET_LIMIT = 40.0  # above this epsilon numeric composition takes many seconds
_MAX_CARD_BYTES = 1 << 24
_RUN_FILES = ("results.json", "config.yaml", "metrics.csv")


class Verdict(IntEnum):
    """The exit status, and what it is called."""

    CONSISTENT = 0
    VIOLATED = 1
    INCONCLUSIVE = 3
    NO_GUARANTEE = 4


@dataclass
class AgentReport:
    """One agent's row: what its ledger says, recomputed, beside what the card claims."""

    agent: str
    budget: float | None = None
    claimed: float | None = None
    recomputed: float | None = None
    method: str = ""
    pld_lower: float | None = None
    pld_upper: float | None = None
    visits: int = 0
    head: str = ""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Report:
    """The whole audit. ``problems`` and ``notes`` are about the run, not about one agent."""

    run: str
    verdict: Verdict
    claim: str
    agents: list[AgentReport]
    problems: list[str]
    notes: list[str]


def audit(run: Path) -> Report:
    """Check a run folder.

    Raises:
        RunFolderError: it is not a run folder, or its privacy card cannot be read.
        LedgerError: a ledger file cannot be read.
    """
    card = _read_card(run)
    ledgers = sorted((run / "ledger").glob("*.jsonl"))
    if card is None and not ledgers:
        if not any((run / name).exists() for name in _RUN_FILES):
            raise RunFolderError(
                f"{run}: not the folder of a run (no privacy.json, no ledger, no results). Give "
                f"the folder that privssl.train wrote, for example runs/fedssl_dp-0."
            )
        return Report(str(run), Verdict.NO_GUARANTEE, guarantee_sentence(None), [], [], [])
    journals = {path.stem: read_journal(path) for path in ledgers}
    entries = {entry["agent"]: entry for entry in card["agents"]} if card else {}
    agents = [
        _check_agent(name, journals.get(name), entries.get(name), card)
        for name in sorted(set(journals) | set(entries))
    ]
    problems = list(_card_problems(card, agents)) if card else []
    notes = [] if verify.available() else ["dp-accounting is not installed: no second library"]
    if card is None:
        notes.append("there is no privacy.json: the run has not ended, or never wrote its claim")
    claim = card["sentence"] if card else "no claim was written"
    verdict = _verdict(card, agents, problems)
    return Report(str(run), verdict, claim, agents, problems, notes)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m privssl.audit",
        description="Check the ledgers and the privacy claim of a run.",
    )
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="a folder that train wrote")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(argv)
    try:
        report = audit(options.run)
    except (UserError, AccountingError) as error:
        print(error, file=sys.stderr)
        return error.exit_status
    if options.json:
        print(json.dumps(asdict(report) | {"verdict": report.verdict.name.lower()}, indent=2))
    else:
        _print(report)
    return int(report.verdict)


def _read_card(run: Path) -> dict[str, Any] | None:
    """privacy.json with the shape that this module relies on; None when there is none."""
    path = run / "privacy.json"
    if not path.exists():
        return None
    try:
        if path.stat().st_size > _MAX_CARD_BYTES:
            raise RunFolderError(f"{path}: too large to be a privacy card")
        card = decode_strictly(path.read_bytes())
    except (OSError, AccountingError) as error:
        raise RunFolderError(f"{path}: cannot be read as a privacy card ({error})") from error
    try:
        _check_shape(card)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{path}: not a privacy card ({error!r})") from error
    return card


def _check_shape(card: dict[str, Any]) -> None:
    """Raise KeyError or TypeError unless every field that is read below is there."""
    if card["scope"] not in ("sound", "as_published") or not isinstance(card["sentence"], str):
        raise TypeError("scope or sentence")
    guarantee_sentence(card)  # reads the rest of what the claim is made of
    numbers = [card["delta"], card["epsilon"]["overall"]]
    if card["guarantee"] is not None:
        numbers += [card["guarantee"]["epsilon"], card["guarantee"]["delta"]]
    for entry in card["agents"]:
        if not isinstance(entry["agent"], str) or not isinstance(entry["ledger_head"], str):
            raise TypeError("agent or ledger_head")
        numbers.append(entry["epsilon"]["value"])
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise TypeError("an epsilon or delta is not a number")


def _check_agent(
    name: str, journal: Journal | None, entry: dict[str, Any] | None, card: dict[str, Any] | None
) -> AgentReport:
    """Hold one ledger against itself, its budget, a second library, and the card."""
    report = AgentReport(name)
    if entry is not None:
        report.claimed = float(entry["epsilon"]["value"])
    if journal is None:
        report.problems.append("the card names it, but its ledger is missing")
        return report
    report.problems += [f"ledger, {problem}" for problem in journal.problems]
    report.visits, report.head = len(journal.events), journal.head
    if not journal.plans:
        return report
    report.budget, report.recomputed = journal.plan.budget.epsilon, journal.epsilon
    simple = [leaf for event in journal.events for leaf in leaves(event)]
    full = all(isinstance(leaf, SampledGaussian) and leaf.sample_rate == 1 for leaf in simple)
    report.method = "exact" if simple and full else "RDP"
    if journal.plan.agent != name:
        report.problems.append(f"the ledger is of agent {journal.plan.agent}")
    if report.recomputed > report.budget:
        report.notes.append("an unfinished line, charged as a whole visit, exceeds the budget")
    elif journal.torn_tail:
        report.notes.append("the last line is unfinished; it is charged as a whole visit")
    _check_second_library(report, journal)
    if card is not None:
        report.problems += _claim_problems(report, journal, entry, card)
    return report


def _check_second_library(report: AgentReport, journal: Journal) -> None:
    """Recompute with dp-accounting: equal on integer orders, and a certified bracket."""
    if not verify.available() or (report.recomputed or 0.0) > _BRACKET_LIMIT:
        return
    delta = journal.plan.budget.delta
    counted = [
        leaf
        for event in journal.events
        for leaf in leaves(event)
        if not isinstance(leaf, Unprotected)
    ]
    theirs = verify.rdp_epsilon(counted, delta)
    ours = rdp_epsilon(counted, delta, verify.INTEGER_ORDERS)
    if theirs is not None and abs(ours - theirs) > _TOLERANCE * max(1.0, theirs):
        report.problems.append(f"RDP is {ours:.6f} by Opacus but {theirs:.6f} by dp-accounting")
    try:
        report.pld_lower, report.pld_upper = verify.pld_bracket(counted, delta)
    except AccountingError as error:
        report.notes.append(str(error))


def _claim_problems(
    report: AgentReport, journal: Journal, entry: dict[str, Any] | None, card: dict[str, Any]
) -> Iterator[str]:
    """What the card says of this agent that its ledger does not bear out."""
    if entry is None or report.claimed is None or report.recomputed is None:
        yield "it has a ledger, but the card does not name it"
        return
    if entry["ledger_head"] not in journal.hashes:
        yield "the card was written for another ledger: its head is not in this one"
    plan = journal.plan
    for name, said, true in (
        ("scope", card["scope"], plan.scope),
        ("delta", card["delta"], plan.budget.delta),
        ("unit", card["unit"], plan.unit),
        ("adjacency", card["adjacency"], plan.adjacency),
        ("update", card["update"], list(plan.update)),
        ("protect", card["protect"], list(plan.protect)),
    ):
        if said != true:
            yield f"the card says {name} {said}, the ledger's plan {true}"
    if report.claimed < report.recomputed - _TOLERANCE * max(1.0, report.recomputed):
        yield (
            f"the card claims epsilon {report.claimed:.6f}; the ledger has spent "
            f"{report.recomputed:.6f}. If the run was interrupted, resume it: it writes a new card"
        )
    if report.pld_lower is not None and report.claimed < report.pld_lower - _BELOW_LOWER_BOUND:
        yield f"the claim is below {report.pld_lower:.6f}, a certified lower bound"


def _card_problems(card: dict[str, Any], agents: Sequence[AgentReport]) -> Iterator[str]:
    """What is wrong with the claim about the run as a whole."""
    guarantee, sound = card["guarantee"], card["scope"] == "sound"
    if (guarantee is not None) != sound:
        yield f"scope {card['scope']} and guarantee {guarantee} contradict each other"
    if not card["agents"]:
        yield "the card names no agent"
    largest = max((agent.recomputed or 0.0 for agent in agents), default=0.0)
    claimed = min(card["epsilon"]["overall"], (guarantee or {}).get("epsilon", float("inf")))
    if claimed < largest - _TOLERANCE * max(1.0, largest):
        yield f"the card claims epsilon {claimed:.6f} for all, but one agent spent {largest:.6f}"
    if card["sentence"] != guarantee_sentence(card):
        yield "the card's sentence is not what its numbers say"
    stated = {"delta": card["delta"], "unit": card["unit"], "neighbours": card["adjacency"]}
    if sound and guarantee is not None and not stated.items() <= guarantee.items():
        yield "the guarantee's delta, unit or neighbours are not the card's"


def _verdict(
    card: dict[str, Any] | None, agents: Sequence[AgentReport], problems: Sequence[str]
) -> Verdict:
    if problems or any(agent.problems for agent in agents):
        return Verdict.VIOLATED
    if card is not None and card["scope"] == "as_published":
        return Verdict.NO_GUARANTEE
    overdrawn = any((agent.recomputed or 0.0) > (agent.budget or 0.0) for agent in agents)
    return Verdict.INCONCLUSIVE if card is None or overdrawn else Verdict.CONSISTENT


def _print(report: Report) -> None:
    """The report as a table for people."""
    console = Console(soft_wrap=True)
    table = Table(title=f"audit of {escape(report.run)}")
    for column in ("agent", "budget", "claimed", "recomputed", "by", "PLD bounds", "visits"):
        table.add_column(column)
    for agent in report.agents:
        bounds = "-" if agent.pld_lower is None else f"{agent.pld_lower:.4f}..{agent.pld_upper:.4f}"
        numbers = [
            "-" if number is None else rounded_up(number)
            for number in (agent.budget, agent.claimed, agent.recomputed)
        ]
        table.add_row(escape(agent.agent), *numbers, agent.method, bounds, str(agent.visits))
    if report.agents:
        console.print(table)
    console.print("claim: " + escape(report.claim))
    for problem in report.problems:
        console.print("[red]violated:[/red] " + escape(problem))
    for agent in report.agents:
        for problem in agent.problems:
            console.print(f"[red]violated:[/red] {escape(agent.agent)}: {escape(problem)}")
        for note in agent.notes:
            console.print(f"note: {escape(agent.agent)}: {escape(note)}")
    for note in report.notes:
        console.print("note: " + escape(note))
    console.print(f"verdict: [bold]{report.verdict.name}[/bold] ({_MEANING[report.verdict]})")


_MEANING = {
    Verdict.CONSISTENT: "the ledgers bear out the claim",
    Verdict.VIOLATED: "do not rely on the claim",
    Verdict.INCONCLUSIVE: "the ledgers are whole, but the claim cannot be checked against them",
    Verdict.NO_GUARANTEE: "there is no guarantee to check",
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
