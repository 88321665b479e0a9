"""Check the guarantee of a run against its ledgers: chain, budget, recomputed epsilon, privacy
card.

Only reads, takes no lock, and recomputes every number that it can. A card covers the ledger up to
the line whose hash it names. A later charge is a problem in a run that ended, and normal in one
that was stopped. The card is recomputed (``audit/card_recomputation.py``) and must be equal;
``audit/cross_checks.py`` and ``audit/witnesses.py`` compare the other files.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accounting import verify
from accounting.accountants import rdp_epsilon
from accounting.errors import AccountingError
from accounting.events import PoissonSampledGaussianEvent, is_protected
from accounting.journal_reader import Journal, journal_until
from privssl.audit import card_recomputation, cross_checks, witnesses
from privssl.audit.run_files import Findings, RunFiles, read_run
from privssl.errors import RunFolderError
from privssl.privacy.card_numbers import BRACKET_LIMIT, fixed_beforehand
from privssl.privacy.card_schema import AgentEntry, PrivacyCard
from privssl.privacy.card_text import guarantee_sentence
from privssl.runs.accounts import check_metrics

_TOLERANCE = 1e-6  # relative rounding
_BELOW_LOWER_BOUND = 1e-3  # a larger gap is not explained by the arithmetic of both libraries
_RUN_FILES = ("results.json", "config.yaml", "metrics.csv")


@dataclass
class AgentReport:
    """One agent's line of the report: recomputed from its ledger, and stated by the card.

    ``recomputed`` covers the ledger up to the card, ``spent`` the whole ledger; ``open`` means that
    the second is larger because the run has not ended.
    """

    agent: str
    budget: float | None = None
    claimed: float | None = None
    recomputed: float | None = None
    spent: float | None = None
    method: str = ""
    pld_lower: float | None = None
    pld_upper: float | None = None  # only for visits that were fixed beforehand
    fixed: bool = False  # whether exactly the planned visits ran
    visits: int = 0
    head: str = ""
    open: bool = False
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class ClaimCheck(Findings):
    """The findings in a run folder; those of ``Findings`` are about the whole run."""

    files: RunFiles = field(kw_only=True)
    journals: dict[str, Journal] = field(kw_only=True)
    agents: list[AgentReport] = field(default_factory=list)


def check_claim(run: Path) -> ClaimCheck:
    """Check a run's guarantee against its ledgers. Without either, return no findings.

    Raises:
        RunFolderError: it is not a run folder, or its privacy card cannot be read.
        LedgerError: a ledger file cannot be read.
    """
    files = read_run(run)
    card = files.card
    check = ClaimCheck(files=files, journals={})
    journals = check.journals = _choose_journals(files, check)
    cross_checks.check_records(files, journals, check)
    cross_checks.check_results(files, check)
    cross_checks.check_former_ledgers(files, journals, check)
    if journals or card is not None:
        cross_checks.check_config(files, journals, check)
        check.problems += check_metrics(files.metrics, journals)
    witnesses.check(files, journals, check)
    if card is None and not journals:
        if not any((run / name).exists() for name in _RUN_FILES):
            raise RunFolderError(
                f"{run}: not the folder of a run (no privacy.json, no ledger, no results). Give "
                f"the folder that privssl.train wrote, for example runs/fedssl_dp-0."
            )
        if files.config is not None and files.config.privacy is not None:
            check.notes.append(
                "config.yaml asks for privacy: the run never came to its first visit"
            )
        return check
    entries = {entry["agent"]: entry for entry in card["agents"]} if card else {}
    at_card = {
        name: _truncate_at_card(journal, entries.get(name)) for name, journal in journals.items()
    }
    check.agents = [
        _check_agent(name, journals.get(name), at_card.get(name), entries.get(name), files)
        for name in sorted(set(journals) | set(entries))
    ]
    if card is None:
        check.notes.append("there is no privacy.json: the run has not ended, or wrote no claim")
    else:
        check.notes += [
            f"{name}, the ledger of a replaced run, is not beside this folder: not checked"
            for name in sorted({entry["ledger"] for entry in card["former_ledgers"]})
            if not (run.resolve().parent / name).is_dir()
        ]
        check.problems += _find_card_problems(card, check.agents)
        check.problems += card_recomputation.card_problems(files, card, at_card)
    if not verify.available():
        check.notes.append("dp-accounting is not installed: no second library")
    return check


def _choose_journals(files: RunFiles, findings: Findings) -> dict[str, Journal]:
    """Choose the journals to check.

    If accounts outlive the run, the copy in its folder unless this run has spent more since.
    """
    if files.accounts is None:
        return files.own
    if files.shared is None:
        findings.notes.append(
            f"the accounts in {files.accounts} are not here; checked is the copy made then"
        )
        return files.own
    if not files.own:
        findings.notes.append(f"no copy was made yet; checked is {files.accounts}")
        return files.shared
    chosen = dict(files.own)
    for name, copy in files.own.items():
        account = files.shared.get(name, Journal())
        if copy.head not in account.hashes:
            findings.problems.append(
                f"{files.accounts / f'{name}.jsonl'} is not the continuation of the copy in this "
                "folder: it was cut, rolled back or replaced, and lacks what this run spent"
            )
        elif account.epsilon_of(copy.runs[-1]) > copy.epsilon_of(copy.runs[-1]):
            chosen[name] = account
        elif account.head != copy.head:
            findings.notes.append(
                f"{name}: other runs used the account since, and it has spent epsilon "
                f"{account.epsilon:.4f} of {account.plan.budget.epsilon:g}, this run's included"
            )
    return chosen


def _truncate_at_card(journal: Journal, entry: AgentEntry | None) -> Journal:
    """Return the journal at the time of the card; all of it if no card names one of its lines."""
    if entry is None or entry["ledger_head"] not in journal.hashes:
        return journal
    return journal_until(journal, entry["ledger_head"])


def _check_agent(
    name: str, journal: Journal | None, at_card: Journal | None, entry: AgentEntry | None,
    files: RunFiles,
) -> AgentReport:  # fmt: skip
    """Check one ledger: itself, its budget, a second library, and the card.

    ``at_card`` is the journal when the card was written.
    """
    report = AgentReport(name)
    if entry is not None:
        report.claimed = float(entry["epsilon"]["value"])
    if journal is None or at_card is None:
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
    if late := len(journal.events) - len(at_card.events):
        text = (
            f"{late} visits were charged after the card was written; all of them cost epsilon "
            f"{journal.epsilon:.6f}"
        )
        report.open = not files.ended
        if files.ended:
            report.problems.append(text)
        else:
            report.notes.append(f"{text}. Resume the run: it writes a new card")
    report.recomputed = at_card.epsilon
    events = is_protected(at_card.events)
    exact = all(isinstance(e, PoissonSampledGaussianEvent) and e.sample_rate == 1 for e in events)
    report.method = "exact" if events and exact else "RDP"
    if events and at_card.plan.delta_of(at_card.cost) == 0:
        report.method = "sum"
    card, spending = files.card, [(at_card.plan, at_card.events)]
    planned = None if card is None else card["planned_visits"]
    shared = card is not None and card["this_run"] is not None
    report.fixed = fixed_beforehand(spending, planned, shared=shared)
    _check_second_library(report, at_card)
    if files.card is not None:
        report.problems += _find_claim_problems(report, at_card, entry, files.card)
    return report


def _check_second_library(report: AgentReport, journal: Journal) -> None:
    """Recompute with dp-accounting: equal on integer orders, and a certified bracket.

    Both treat visits as fixed beforehand. No guarantee may be below that lower bound; the upper
    bound is valid only if visits were fixed.
    """
    if not verify.available() or (report.recomputed or 0.0) > BRACKET_LIMIT:
        return
    delta, events = journal.plan.budget.delta, is_protected(journal.events)
    library = verify.rdp_epsilon(events, delta)
    opacus = rdp_epsilon(events, delta, verify.INTEGER_ORDERS)
    if library is not None and abs(opacus - library) > _TOLERANCE * max(1.0, library):
        report.problems.append(f"RDP is {opacus:.6f} by Opacus but {library:.6f} by dp-accounting")
    try:
        report.pld_lower, upper = verify.pld_bracket(events, delta)
        report.pld_upper = upper if report.fixed else None
    except AccountingError as error:
        report.notes.append(str(error))


def _find_claim_problems(
    report: AgentReport, journal: Journal, entry: AgentEntry | None, card: PrivacyCard
) -> Iterator[str]:
    """Yield statements of the card about this agent that its ledger contradicts."""
    if entry is None or report.claimed is None or report.recomputed is None:
        yield "it has a ledger, but the card does not name it"
        return
    if entry["ledger_head"] not in journal.hashes:
        yield "the card was written for another ledger: its head is not in this one"
    plan = journal.plan
    for name, stated, expected in (
        ("scope", card["scope"], plan.scope),
        ("delta", card["delta"], plan.budget.delta),
        ("unit", card["unit"], plan.unit),
        ("adjacency", card["adjacency"], plan.adjacency),
        ("update", card["update"], list(plan.update)),
        ("protect", card["protect"], list(plan.protect)),
    ):
        if stated != expected:
            yield f"the card says {name} {stated}, the ledger's plan {expected}"
    if report.claimed < report.recomputed - _TOLERANCE * max(1.0, report.recomputed):
        yield (
            f"the card claims epsilon {report.claimed:.6f}; the ledger has spent "
            f"{report.recomputed:.6f}"
        )
    if card["this_run"] is not None:
        spent = journal.epsilon_of(journal.runs[-1])  # the last run to spend wrote the card
        claimed = card["this_run"].get(report.agent, 0.0)
        if not math.isclose(claimed, spent, rel_tol=_TOLERANCE, abs_tol=1e-12):
            text = f"this run alone spent {claimed:.6f}; the ledger says {spent:.6f}"
            yield f"the card says that {text}"
    elif len(set(journal.runs)) > 1:
        yield "the ledger has paid for several runs, but the card does not say for what this one"
    if report.pld_lower is not None and report.claimed < report.pld_lower - _BELOW_LOWER_BOUND:
        yield f"the claim is below {report.pld_lower:.6f}, a certified lower bound"


def _find_card_problems(card: PrivacyCard, agents: Sequence[AgentReport]) -> Iterator[str]:
    """Yield problems of the guarantee of the whole run."""
    guarantee, sound = card["guarantee"], card["scope"] == "sound"
    if (guarantee is not None) != (sound and not card["ledger_problems"]):
        yield f"scope {card['scope']} and guarantee {guarantee} contradict each other"
    if not card["agents"]:
        yield "the card names no agent"
    largest = max((agent.recomputed or 0.0 for agent in agents), default=0.0)
    claimed = card["epsilon"]["overall"]
    if guarantee is not None:
        claimed = min(claimed, guarantee["epsilon"])
    if claimed < largest - _TOLERANCE * max(1.0, largest):
        yield f"the card claims epsilon {claimed:.6f} for all, but one agent spent {largest:.6f}"
    lower_bound = max((agent.pld_lower or 0.0 for agent in agents), default=0.0)
    headline = card["headline"]
    if headline is not None and headline["epsilon"] < lower_bound - _BELOW_LOWER_BOUND:
        yield f"the headline is below {lower_bound:.6f}, a certified lower bound"
    if card["sentence"] != guarantee_sentence(card):
        yield "the card's sentence is not what its numbers say"
    if sound and guarantee is not None:
        # Card recomputation checks whether delta 0 follows from the ledgers.
        stated = (guarantee["unit"], guarantee["neighbours"])
        delta_matches = guarantee["delta"] in (0, card["delta"])
        if not delta_matches or stated != (card["unit"], card["adjacency"]):
            yield "the guarantee's delta, unit or neighbours are not the card's"
    names = [entry["agent"] for entry in card["agents"]]
    if card["this_run"] is not None and list(card["this_run"]) != names:
        yield "this_run names other agents than the card"
