"""The claim of a run held against its ledgers: chain, budget, recomputed epsilon, privacy card.

Reads only, takes no lock, and trusts no number that it can recompute. A card speaks of the ledger
as it was when the card was written, up to the line whose hash it names; what was charged later is
a problem of a run that ended, and to be expected of one that was stopped on the way. The card is
made a second time (``audit/card_recomputation.py``) and must come out the same; what other files of
the run remember is in ``audit/cross_checks.py``.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accounting import verify
from accounting.accountants import rdp_epsilon
from accounting.canonical_json import decode_strictly
from accounting.errors import AccountingError
from accounting.events import PoissonSampledGaussianEvent, is_protected
from accounting.journal_reader import Journal, journal_until, read_journal
from privssl.audit import card_recomputation, cross_checks, witnesses
from privssl.errors import RunFolderError
from privssl.experiment.config import Config
from privssl.privacy.card_numbers import BRACKET_LIMIT
from privssl.privacy.privacy_card import SCHEMA, guarantee_sentence, headline_sentence
from privssl.runs.accounts import check_metrics

_TOLERANCE = 1e-6  # relative: a claim this far below its recomputation is still rounding
_BELOW_LOWER_BOUND = 1e-3  # below it by more than the arithmetic of both libraries can explain
_MAX_CARD_BYTES = 1 << 24
_RUN_FILES = ("results.json", "config.yaml", "metrics.csv")

Card = dict[str, Any]


@dataclass
class AgentReport:
    """One agent's row: what its ledger says, recomputed, beside what the card claims.

    ``recomputed`` is of the ledger as the card knew it, ``spent`` of all that is in it;
    ``open`` says that the second is more because the run has not ended.
    """

    agent: str
    budget: float | None = None
    claimed: float | None = None
    recomputed: float | None = None
    spent: float | None = None
    method: str = ""
    pld_lower: float | None = None
    pld_upper: float | None = None
    visits: int = 0
    head: str = ""
    open: bool = False
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Findings:
    """What was found in a run folder. ``problems``, ``doubts`` (why a claim that nothing refutes is
    INCONCLUSIVE) and ``notes`` are about the run as a whole."""

    card: Card | None
    journals: dict[str, Journal]
    agents: list[AgentReport]
    problems: list[str]
    doubts: list[str]
    notes: list[str]


def check_claim(run: Path) -> Findings:
    """Hold a run's claim against its ledgers. Without both there is nothing to find.

    Raises:
        RunFolderError: it is not a run folder, or its privacy card cannot be read.
        LedgerError: a ledger file cannot be read.
    """
    card, config = _read_card(run), cross_checks.config_of(run)
    paths, lost, notes = _ledgers(run, config)
    journals = {path.stem: read_journal(path) for path in paths}
    cut, remembered = cross_checks.check_memories(run, config, journals, card)
    problems = [*lost, *cut, *cross_checks.check_results_against_claim(run, card)]
    notes += remembered
    doubts = cross_checks.unreadable_files(run)
    if journals or card is not None:
        asked, unasked = cross_checks.check_config(run, config, journals, card)
        problems += [*asked, *check_metrics(run, journals)]
        doubts += unasked
    seen = witnesses.check(run, config, card, journals)
    problems, doubts, notes = problems + seen.problems, doubts + seen.doubts, notes + seen.notes
    if card is None and not paths:
        if not any((run / name).exists() for name in _RUN_FILES):
            raise RunFolderError(
                f"{run}: not the folder of a run (no privacy.json, no ledger, no results). Give "
                f"the folder that privssl.train wrote, for example runs/fedssl_dp-0."
            )
        if config is not None and config.privacy is not None:
            notes.append("config.yaml asks for privacy: the run never came to its first visit")
        return Findings(None, {}, [], problems, doubts, notes)
    entries = {entry["agent"]: entry for entry in card["agents"]} if card else {}
    known = {
        path.stem: _as_known(path, journals[path.stem], entries.get(path.stem)) for path in paths
    }
    ended = cross_checks.has_ended(run)
    agents = [
        _check_agent(name, journals.get(name), known.get(name), entries.get(name), card, ended)
        for name in sorted(set(journals) | set(entries))
    ]
    if card is not None:
        notes += _absent_former_ledgers(run, card)
        problems += [
            *_card_problems(card, agents),
            *card_recomputation.card_problems(run, config, card, known),
        ]
    if not verify.available():
        notes.append("dp-accounting is not installed: no second library")
    if card is None:
        notes.append("there is no privacy.json: the run has not ended, or never wrote its claim")
    return Findings(card, journals, agents, problems, doubts, notes)


def _absent_former_ledgers(run: Path, card: Card) -> Iterator[str]:
    for name in sorted({entry["ledger"] for entry in card["former_ledgers"]}):
        if not (run.resolve().parent / name).is_dir():
            yield f"{name}, the ledger of a replaced run, is not beside this folder: not checked"


def _ledgers(run: Path, config: Config | None) -> tuple[list[Path], list[str], list[str]]:
    """The journals of a run; problems of accounts that outlive it; and where they are."""
    own = _journals_in(run / "ledger")
    named = cross_checks.shared_accounts(run, config)
    if named is None:
        return own, [], []
    if not named.is_dir():
        return own, [], [f"the accounts in {named} are not here; checked is the copy made then"]
    if not own:
        return sorted(named.glob("*.jsonl")), [], [f"no copy was made yet; checked is {named}"]
    checked, problems, notes = [], [], []
    for path in own:
        account = named / path.name
        now, copy = read_journal(account) if account.exists() else Journal(), read_journal(path)
        checked.append(path)
        if copy.head not in now.hashes:
            problems.append(
                f"{account} is not the continuation of the copy in this folder: it was cut, rolled "
                "back or replaced, and has forgotten what this run spent"
            )
        elif now.epsilon_of(copy.runs[-1]) > copy.epsilon_of(copy.runs[-1]):
            checked[-1] = account  # this run itself has spent more since the copy was made
        elif now.head != copy.head:
            notes.append(
                f"{path.stem}: the account has gone on in other runs, and has spent epsilon "
                f"{now.epsilon:.4f} of {now.plan.budget.epsilon:g}, this run's included"
            )
    return checked, problems, notes


def _journals_in(folder: Path) -> list[Path]:
    """The journals of a folder, none where there is none. A glob would not tell one that may not
    be read from one that is empty."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".jsonl")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunFolderError(
            f"{folder}: cannot be read: {error.strerror}. Ask its owner, for whom alone it is"
        ) from error


def _as_known(path: Path, journal: Journal, entry: Card | None) -> Journal:
    """The journal as the card knew it; all of it where no card names one of its lines."""
    if entry is None or entry["ledger_head"] not in journal.hashes:
        return journal
    return journal_until(path, entry["ledger_head"])


def _read_card(run: Path) -> Card | None:
    """privacy.json with the shape that this module relies on; None when there is none."""
    path = run / "privacy.json"
    try:
        if not path.exists():
            return None
        if path.stat().st_size > _MAX_CARD_BYTES:
            raise RunFolderError(f"{path}: too large to be a privacy card")
        card = decode_strictly(path.read_bytes())
    except (OSError, AccountingError) as error:
        raise RunFolderError(f"{path}: cannot be read as a privacy card ({error})") from error
    if (schema := card.get("schema")) not in (None, SCHEMA):
        by = (card.get("versions") or {}).get("privssl", "another version")
        raise RunFolderError(
            f"{path}: schema {schema!r:.20} of privssl {by!s:.40}; this version reads {SCHEMA}. "
            "Audit it with that version"
        )
    try:
        _check_shape(card)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunFolderError(f"{path}: not a privacy card ({error!r})") from error
    return card


def _check_shape(card: Card) -> None:
    """Raise KeyError or TypeError unless every field that is read below is there."""
    if card["scope"] not in ("sound", "as_published") or not isinstance(card["sentence"], str):
        raise TypeError("scope or sentence")
    guarantee_sentence(card)  # reads the rest of what the claim is made of
    numbers = [card["delta"], card["epsilon"]["overall"]]
    if (headline := card.get("headline")) is not None:
        headline_sentence(card)
        numbers.append(headline["epsilon"])
    if card["guarantee"] is not None:
        numbers += [card["guarantee"]["epsilon"], card["guarantee"]["delta"]]
    for entry in card["agents"]:
        if not isinstance(entry["agent"], str) or not isinstance(entry["ledger_head"], str):
            raise TypeError("agent or ledger_head")
        numbers.append(entry["epsilon"]["value"])
    numbers += (card.get("this_run") or {}).values()
    for former in card["former_ledgers"]:
        if not isinstance(former["ledger"], str) or "/" in former["ledger"]:
            raise TypeError("former_ledgers")
        numbers += [former[key] for key in ("epsilon", "delta") if former[key] is not None]
    if not all(isinstance(problem, str) for problem in card["ledger_problems"]):
        raise TypeError("ledger_problems")
    for release in card["releases"]:
        if not all(isinstance(release[key], str) for key in ("name", "status", "why")):
            raise TypeError("releases")
    if type(card.get("planned_visits")) not in (int, type(None)):
        raise TypeError("planned_visits")
    if card.get("task") is not None:  # cards of earlier versions have none
        classes, shape = card["task"]["classes"], card["task"]["shape"]
        sizes = [classes, *shape]
        if len(shape) != 3 or not all(type(n) is int and 0 < n < 1 << 16 for n in sizes):
            raise TypeError("task")
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise TypeError("an epsilon or delta is not a number")


def _check_agent(
    name: str,
    journal: Journal | None,
    then: Journal | None,
    entry: Card | None,
    card: Card | None,
    ended: bool,
) -> AgentReport:
    """Hold one ledger against itself, its budget, a second library, and the card.

    ``then`` is the journal as the card knew it.
    """
    report = AgentReport(name)
    if entry is not None:
        report.claimed = float(entry["epsilon"]["value"])
    if journal is None or then is None:
        report.problems.append("the card names it, but its ledger is missing")
        return report
    report.problems += [f"ledger, {problem}" for problem in journal.problems]
    report.visits, report.head = len(journal.events), journal.head
    if not journal.plans:
        return report
    if journal.plan.agent != name:
        report.problems.append(f"the ledger is of agent {journal.plan.agent}")
    report.budget, report.spent = journal.plan.budget.epsilon, journal.epsilon
    if report.spent > report.budget:
        report.notes.append("an unfinished line, charged as a whole visit, exceeds the budget")
    elif journal.torn_tail:
        report.notes.append("the last line is unfinished; it is charged as a whole visit")
    _check_what_followed(report, journal, then, ended)
    report.recomputed = then.epsilon
    simple = is_protected(then.events)
    full = all(
        isinstance(leaf, PoissonSampledGaussianEvent) and leaf.sample_rate == 1 for leaf in simple
    )
    report.method = "exact" if simple and full else "RDP"
    if simple and then.plan.delta_of(then.cost) == 0:
        report.method = "sum"
    _check_second_library(report, then)
    if card is not None:
        report.problems += _claim_problems(report, then, entry, card)
    return report


def _check_what_followed(report: AgentReport, journal: Journal, then: Journal, ended: bool) -> None:
    """What was charged after the card was written."""
    more = len(journal.events) - len(then.events)
    if not more:
        return
    text = (
        f"{more} visits were charged after the card was written; all of them cost epsilon "
        f"{journal.epsilon:.6f}"
    )
    if ended:
        report.problems.append(text)
    else:
        report.open = True
        report.notes.append(f"{text}. Resume the run: it writes a new card")


def _check_second_library(report: AgentReport, journal: Journal) -> None:
    """Recompute with dp-accounting: equal on integer orders, and a certified bracket."""
    if not verify.available() or (report.recomputed or 0.0) > BRACKET_LIMIT:
        return
    delta, counted = journal.plan.budget.delta, is_protected(journal.events)
    theirs = verify.rdp_epsilon(counted, delta)
    ours = rdp_epsilon(counted, delta, verify.INTEGER_ORDERS)
    if theirs is not None and abs(ours - theirs) > _TOLERANCE * max(1.0, theirs):
        report.problems.append(f"RDP is {ours:.6f} by Opacus but {theirs:.6f} by dp-accounting")
    try:
        report.pld_lower, report.pld_upper = verify.pld_bracket(counted, delta)
    except AccountingError as error:
        report.notes.append(str(error))


def _claim_problems(
    report: AgentReport, journal: Journal, entry: Card | None, card: Card
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
            f"{report.recomputed:.6f}"
        )
    this_run = card.get("this_run")
    if this_run is not None:
        own = journal.epsilon_of(journal.runs[-1])  # the run that spent last wrote the card
        said = float(this_run.get(report.agent, 0.0))
        if not math.isclose(said, own, rel_tol=_TOLERANCE, abs_tol=1e-12):
            yield f"the card says that this run alone spent {said:.6f}; the ledger says {own:.6f}"
    elif len(set(journal.runs)) > 1:
        yield "the ledger has paid for several runs, but the card does not say for what this one"
    if report.pld_lower is not None and report.claimed < report.pld_lower - _BELOW_LOWER_BOUND:
        yield f"the claim is below {report.pld_lower:.6f}, a certified lower bound"


def _card_problems(card: Card, agents: Sequence[AgentReport]) -> Iterator[str]:
    """What is wrong with the claim about the run as a whole."""
    guarantee, sound = card["guarantee"], card["scope"] == "sound"
    if (guarantee is not None) != (sound and not card["ledger_problems"]):
        yield f"scope {card['scope']} and guarantee {guarantee} contradict each other"
    if not card["agents"]:
        yield "the card names no agent"
    largest = max((agent.recomputed or 0.0 for agent in agents), default=0.0)
    claimed = min(card["epsilon"]["overall"], (guarantee or {}).get("epsilon", float("inf")))
    if claimed < largest - _TOLERANCE * max(1.0, largest):
        yield f"the card claims epsilon {claimed:.6f} for all, but one agent spent {largest:.6f}"
    certain = max((agent.pld_lower or 0.0 for agent in agents), default=0.0)
    headline = card.get("headline")
    if headline is not None and headline["epsilon"] < certain - _BELOW_LOWER_BOUND:
        yield f"the headline is below {certain:.6f}, a certified lower bound"
    if card["sentence"] != guarantee_sentence(card):
        yield "the card's sentence is not what its numbers say"
    stated = {"unit": card["unit"], "neighbours": card["adjacency"]}
    if sound and guarantee is not None:
        # Whether delta 0 follows from the ledgers is asked when the card is made again.
        same = guarantee["delta"] in (0, card["delta"]) and stated.items() <= guarantee.items()
        if not same:
            yield "the guarantee's delta, unit or neighbours are not the card's"
    names, this_run = [entry["agent"] for entry in card["agents"]], card.get("this_run")
    if this_run is not None and list(this_run) != names:
        yield "this_run names other agents than the card"
