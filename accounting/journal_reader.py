"""Read a journal and check every line against its events.

The lines, beside ``seq`` and ``prev``:

    plan      the budget (``account_plan.py``) and the run that spends from here on; a later plan
              replaces it, old charges stay
    reserve   a visit was charged: its key, its event, and the epsilon afterwards
    settle    the visit of an earlier reserve ended normally; changes no charge
    torn      an unfinished last line was found on resume; charged as a whole visit

Epsilon is recomputed from the events. A line with another epsilon is a problem, and so is every
line that this program would not have written.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from accounting.account_plan import PLAN_KEYS, AccountPlan, plan_from_json, refuse_change
from accounting.accountants import ZERO_COST, Cost
from accounting.canonical_json import Json, decode, only_keys, read_real
from accounting.errors import PlanError
from accounting.events import Event, event_from_json
from accounting.journal import FIRST_PREV, line_hash, read_content, split_lines

SCHEMA = 1
ACCOUNTANT = {"enforce": "rdp", "orders": "v1"}

MAX_VISIT_KEY = 200
_RUN_ID = re.compile(r"[0-9a-z]{0,32}")
_EPSILON_TOLERANCE = 1e-6  # relative: versions of numeric libraries may round differently


class Problem(NamedTuple):
    """A part of a journal that this program would not have written."""

    line: int  # counted from 1; 0: the whole file
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" if self.line else self.text


@dataclass
class Journal:
    """The verified contents of a journal file.

    Args:
        plans: in order; the last one is in force. Empty only when there are problems.
        runs: the run that opened the account under each plan; "" if not given.
        by_run: what each run spent.
        events: one per charged visit, torn lines included as the plan's largest visit.
        visits: key of each reserved visit -> number (``seq``) of its line.
        unsettled: numbers of reserve lines whose visit did not end normally.
        cost: of all events, as the plan's scope counts. reserved: of all but torn lines.
        torn_tail: whether the last line is unfinished.
        hashes: of each complete line, in order. lines: all complete lines of the file, where it
            was read from one. problems: empty when the journal is sound.
    """

    plans: list[AccountPlan] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    by_run: dict[str, Cost] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    visits: dict[str, int] = field(default_factory=dict)
    unsettled: set[int] = field(default_factory=set)
    cost: Cost = ZERO_COST
    reserved: Cost = ZERO_COST
    torn_tail: bool = False
    hashes: list[str] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list, repr=False)
    problems: list[Problem] = field(default_factory=list)

    @property
    def plan(self) -> AccountPlan:
        """The plan in force."""
        return self.plans[-1]

    @property
    def head(self) -> str:
        """Hash of the last complete line."""
        return self.hashes[-1] if self.hashes else FIRST_PREV

    @property
    def seq(self) -> int:
        """Number of the last complete line, counted from 0; -1 when there is none."""
        return len(self.hashes) - 1

    @property
    def epsilon(self) -> float:
        """Epsilon recomputed from the events at the current plan's delta (0 if all are pure)."""
        return self.epsilon_at(self.cost)

    @property
    def promised(self) -> float:
        """The initial budget: the guarantee whatever noise was chosen later."""
        return self.plans[0].budget.epsilon

    def epsilon_at(self, cost: Cost) -> float:
        """Return the epsilon of a cost under this account."""
        return self.plan.epsilon(cost, self.promised)

    def epsilon_of(self, run: str) -> float:
        """Return the epsilon that one run spent, at the same delta; 0 for an unknown run."""
        return self.epsilon_at(self.by_run.get(run, ZERO_COST))

    def charge(self, event: Event) -> None:
        """Count one visit."""
        self.events.append(event)
        cost, run = self.plan.charge(event), self.runs[-1]
        self.cost = self.cost + cost
        self.by_run[run] = self.by_run.get(run, ZERO_COST) + cost

    def begin(self, plan: AccountPlan, run: str) -> None:
        """Put this plan into force and charge this run from here on."""
        self.plans.append(plan)
        self.runs.append(run)


def read_journal(path: Path) -> Journal:
    """Read and check a journal without taking its lock.

    Raises:
        LedgerError: the file cannot be read. Faults of its content are in ``problems``.
    """
    lines, torn = split_lines(read_content(path))
    journal = replay(lines)
    journal.lines = lines
    if torn and journal.plans:
        journal.torn_tail = True
        journal.charge(journal.plan.event)
    if not journal.plans and not journal.problems:
        journal.problems.append(Problem(0, "there is no complete plan line; nothing was spent yet"))
    return journal


def journal_until(journal: Journal, head: str) -> Journal:
    """Return the journal up to the line with this hash, which must exist."""
    return replay(journal.lines[: journal.hashes.index(head) + 1])


def replay(lines: Iterable[bytes]) -> Journal:
    """Check complete lines in order; stop at the first that breaks the chain or cannot be read."""
    journal = Journal()
    for number, line in enumerate(lines, start=1):
        try:
            _replay_line(journal, decode(line))
        except PlanError as error:
            journal.problems.append(Problem(number, str(error)))
            break
        journal.hashes.append(line_hash(line))
    return journal


def check_visit_key(visit: object) -> str:
    """Return the key; raise PlanError unless it has 1 to 200 printable characters."""
    if not isinstance(visit, str) or not 0 < len(visit) <= MAX_VISIT_KEY or not visit.isprintable():
        raise PlanError(f"a visit key is 1 to {MAX_VISIT_KEY} printable characters")
    return visit


def check_run_id(run: object) -> str:
    """Return the run id; raise PlanError unless it is at most 32 lower-case letters and digits."""
    if not isinstance(run, str) or not _RUN_ID.fullmatch(run):
        raise PlanError("a run's id is at most 32 small letters and digits")
    return run


def _replay_line(journal: Journal, record: Json) -> None:
    if record.pop("prev", None) != journal.head:
        raise PlanError("does not continue the line before it: changed, removed or reordered")
    if record.pop("seq", None) != journal.seq + 1:
        raise PlanError(f"its number is not {journal.seq + 1}")
    kind = record.pop("type", None)
    if not journal.plans and kind != "plan":
        raise PlanError("the first line is not a plan")
    match kind:
        case "plan":
            _replay_plan(journal, record)
        case "reserve":
            _replay_reserve(journal, record)
        case "settle":
            _replay_settle(journal, record)
        case "torn":
            only_keys(record, set(), "torn")
            journal.charge(journal.plan.event)
        case _:
            raise PlanError(f"unknown type of line: {str(kind)[:40]!r}")


def _replay_plan(journal: Journal, record: Json) -> None:
    only_keys(record, {*PLAN_KEYS, "schema", "accountant", "run"}, "plan")
    if record.pop("schema") != SCHEMA or record.pop("accountant") != ACCOUNTANT:
        raise PlanError("written by another version of privssl; read it with that version")
    run = check_run_id(record.pop("run"))
    plan = plan_from_json(record)
    if journal.plans:
        refuse_change(journal.plan, plan)
    journal.begin(plan, run)


def _replay_reserve(journal: Journal, record: Json) -> None:
    only_keys(record, {"visit", "event", "eps_after"}, "reserve")
    visit = check_visit_key(record["visit"])
    if visit in journal.visits:
        raise PlanError(f"visit {visit!r} is reserved a second time")
    event = event_from_json(record["event"])
    plan = journal.plan
    if not plan.charge(event).at_most(plan.visit_cost):
        raise PlanError("the visit costs more than the plan says one visit costs at most")
    journal.visits[visit] = journal.seq + 1
    journal.unsettled.add(journal.seq + 1)
    journal.charge(event)
    journal.reserved = journal.reserved + plan.charge(event)
    recorded, actual = read_real(record["eps_after"], "eps_after"), journal.epsilon
    # Former versions counted several kinds of visits as if all were fixed beforehand.
    former = journal.cost.epsilon(plan.delta_of(journal.cost))
    if not any(abs(recorded - e) <= _EPSILON_TOLERANCE * max(1.0, e) for e in (actual, former)):
        raise PlanError(f"says epsilon {recorded:.6f}, but its events cost {actual:.6f}")
    # A torn line is charged, but may never have been a visit: it cannot exceed the budget.
    reserved = journal.reserved.epsilon(plan.delta_of(journal.reserved))
    if reserved > plan.budget.epsilon:
        raise PlanError(f"epsilon {reserved:.6f} is above the budget {plan.budget.epsilon:g}")


def _replay_settle(journal: Journal, record: Json) -> None:
    only_keys(record, {"reserve"}, "settle")
    reserve = record["reserve"]
    if not isinstance(reserve, int) or reserve not in journal.unsettled:
        raise PlanError("settles no open visit")
    journal.unsettled.remove(reserve)
