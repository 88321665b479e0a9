"""The privacy account of one agent's labelled rows: it charges before it reads.

    account = Account.open(folder / "s0.jsonl", plan, resume=False)
    with account.spend(event, visit="round 3"):
        ...                          # only here may labelled rows be read

The account belongs to the owner of the rows. Its journal is not restored from checkpoints, so a
resumed run still counts all that it spent. A visit is charged in full once its line is on disk; a
crash, a kill or an exception refunds nothing. Runs may draw from one account after each other, each
within a limit of its own.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, final

from accounting.account_plan import AccountPlan, plan_to_json, refuse_change
from accounting.accountants import ZERO_COST
from accounting.canonical_json import Json, real
from accounting.errors import BudgetExhausted, LedgerError, PlanError
from accounting.events import Event, event_to_json
from accounting.journal import JournalFile, read_content, split_lines
from accounting.journal_reader import (
    ACCOUNTANT,
    SCHEMA,
    Journal,
    check_run_id,
    check_visit_key,
    read_journal,
    replay,
)

__all__ = ["Account", "AccountPlan", "Balance", "Journal", "read_journal"]


class Balance(NamedTuple):
    """The charges of an account, and the problems that forbid a guarantee."""

    journal: Journal
    problems: tuple[str, ...]  # empty if the journal on disk is the one that this account wrote


@final
class Account:
    """One agent's budget and journal, created by :meth:`open`; one process at a time."""

    def __init__(self, file: JournalFile, journal: Journal, run: str, limit: float) -> None:
        self._file = file
        self._journal = journal
        self.run = run  # id of the run that spends now
        self._limit = limit  # the part of the account's epsilon that this run may spend

    @classmethod
    def open(
        cls,
        path: Path,
        plan: AccountPlan,
        *,
        resume: bool,
        minimum_seq: int = 0,
        minimum_head: str = "",
        run: str = "",
        run_epsilon: float = math.inf,
    ) -> "Account":
        """Start or resume an account.

        Args:
            path: the journal, ``AGENT.jsonl``; its directory is made when absent.
            plan: the budget. On resume it may differ as :func:`account_plan.refuse_change` permits.
                resume: False refuses an existing journal; True needs one and keeps its charges.
            minimum_seq, minimum_head: on resume, number and hash of the line that a checkpoint
                recorded. A journal without that line was rolled back, and is refused.
            run: id of the run that spends: at most 32 lower-case letters and digits, kept on
                resume.
            run_epsilon: the part of the budget that this run may spend, over all its sessions.

        Raises:
            LedgerError: missing, damaged, rolled back, locked or unwritable journal.
            PlanError: the plan may not replace the journal's.
        """
        if path.name != f"{plan.agent}.jsonl":
            raise LedgerError(f"{path}: the journal of {plan.agent} is named {plan.agent}.jsonl")
        check_run_id(run)
        file = JournalFile(path)
        try:
            journal = _resume_journal(file, minimum_seq, minimum_head) if resume else Journal()
            account = cls(file, journal, run, run_epsilon)
            if not journal.plans:
                file.create(_build_plan_line(plan, run))
            elif (journal.plan, journal.runs[-1]) != (plan, run):
                refuse_change(journal.plan, plan)
                file.append(_build_plan_line(plan, run))
            if file.seq > journal.seq:
                journal.begin(plan, run)
                journal.hashes.append(file.head)
        except BaseException:
            file.close()
            raise
        return account

    @property
    def agent(self) -> str:
        return self.plan.agent

    @property
    def plan(self) -> AccountPlan:
        """The plan in force."""
        return self._journal.plan

    @property
    def head(self) -> str:
        """SHA-256 of the last line: for the card and for checkpoints."""
        return self._file.head

    @property
    def seq(self) -> int:
        """Number of the last line, from 0: for checkpoints."""
        return self._file.seq

    @property
    def events(self) -> tuple[Event, ...]:
        """Every charge, in order."""
        return tuple(self._journal.events)

    def balance(self) -> Balance:
        """Return the charges that a guarantee must count.

        After damage to the file: the larger of the charges in the file and in memory, with the
        problems.
        """
        problems = [damage] if (damage := self._file.damage()) else []
        try:
            journal = read_journal(self._file.path)
            problems += map(str, journal.problems)
        except LedgerError as error:
            journal = Journal()
            problems.append(str(error))
        if problems and not (journal.plans and journal.epsilon > self.spent()):
            journal = self._journal
        return Balance(journal, tuple(problems))

    def visits(self) -> int:
        """Number of charged visits, unfinished ones included."""
        return len(self._journal.events)

    def paid_visits(self) -> int:
        """Number of visits whose charge is on disk: only these may read rows."""
        return len(self._journal.visits)

    def is_charged(self, visit: str) -> bool:
        """Return whether a visit of this name was charged, finished or not."""
        return visit in self._journal.visits

    def spent(self) -> float:
        """Epsilon so far, recomputed from the events. Only nominal in scope as_published."""
        return self._journal.epsilon

    def left(self) -> float:
        """Budget minus epsilon spent, >= 0. Epsilons do not add up."""
        return max(0.0, self.plan.budget.epsilon - self.spent())

    @contextmanager
    def spend(self, event: Event, visit: str) -> Iterator[None]:
        """Charge one visit, then enter the block in which its rows may be read.

        Args:
            event: the releases of the visit; at most the event of the plan.
            visit: names the visit, for example "round 3"; each name is charged once.

        Raises:
            BudgetExhausted: the budget does not cover it. Nothing was written or read.
            LedgerError: the visit is charged already or costs more than planned, or the journal
                could not be made durable. The block was not entered.
        """
        epsilon_after = self._check_admissible(event, visit)
        self._file.refuse_damage()
        try:
            fields = {"event": event_to_json(event), "eps_after": real(epsilon_after)}
            reserve = self._file.append({"type": "reserve", "visit": visit, **fields})
        finally:  # after any exception: the line may be on disk, so it counts
            self._journal.charge(event)
        self._journal.visits[visit] = reserve
        self._journal.hashes.append(self._file.head)
        yield  # an exception in the block leaves the charge as it is: rows may have been read
        with suppress(LedgerError):  # the charge stands either way; the next visit is refused
            self._file.append({"type": "settle", "reserve": reserve})
            self._journal.hashes.append(self._file.head)

    def close(self) -> None:
        """Release the lock. Twice is harmless."""
        self._file.close()

    def _check_admissible(self, event: Event, visit: str) -> float:
        """Return the epsilon after the visit, or raise the reason to refuse it."""
        try:
            check_visit_key(visit)
            epsilon, run_epsilon = self._compute_epsilon_with(event)
        except PlanError as error:
            raise LedgerError(f"{self.agent}: {error}. Nothing was read.") from error
        if visit in self._journal.visits:
            raise LedgerError(f"{self.agent}: already spent for visit {visit!r}; nothing was read.")
        if not self._is_within_budget(epsilon):
            budget, delta = self.plan.budget.epsilon, self.plan.delta_of(self._journal.cost)
            raise BudgetExhausted(
                f"{self.agent} has spent epsilon {self.spent():.4f} of {budget:g} (delta "
                f"{delta:g}). This visit would bring it to {epsilon:.4f}. Nothing was read. Plan "
                "fewer visits, or more noise, or a larger budget."
            )
        if not (self._limit > 0 and run_epsilon <= self._limit):
            raise BudgetExhausted(
                f"{self.agent}: this visit would bring what this run spent to {run_epsilon:.4f}, "
                f"above its own limit {self._limit:g}. Nothing was read."
            )
        return epsilon

    def _compute_epsilon_with(self, event: Event) -> tuple[float, float]:
        """Return epsilon after one more event: of the account, and of this run alone."""
        cost = self.plan.charge(event)
        if not cost.at_most(self.plan.visit_cost):
            raise PlanError("the visit costs more than the plan says one visit costs at most")
        account_cost = self._journal.cost + cost
        run_cost = self._journal.by_run.get(self.run, ZERO_COST) + cost
        return self._journal.epsilon_at(account_cost), self._journal.epsilon_at(run_cost)

    def _is_within_budget(self, epsilon: float) -> bool:
        # With a budget of 0 refuse even tiny events whose epsilon rounds to 0.
        budget = self.plan.budget.epsilon
        return math.isfinite(epsilon) and budget > 0 and epsilon <= budget


def _resume_journal(file: JournalFile, minimum_seq: int, minimum_head: str) -> Journal:
    """Verify the journal of a file, convert its torn tail to a line, and open it for appending."""
    refuse_missing(file.path)
    file.hold()
    journal = read_journal(file.path)
    refuse_problems(file.path, journal, minimum_seq, minimum_head)
    if journal.torn_tail:
        file.replace_torn_tail(journal.lines, {"type": "torn"})
        journal = replay(split_lines(read_content(file.path))[0])
    file.extend(journal.head, journal.seq)
    return journal


def refuse_missing(path: Path) -> None:
    """Raise LedgerError for a journal that is not there."""
    if not path.exists():
        raise LedgerError(
            f"{path}: missing, though the checkpoint (at a site: ledger.mark) says that it "
            f"existed. Without it nobody knows what was spent. Put it back, or start a new run."
        )


def refuse_problems(
    path: Path, journal: Journal, minimum_seq: int = 0, minimum_head: str = ""
) -> None:
    """Raise LedgerError for a damaged journal, or one without the line of :meth:`Account.open`."""
    if journal.problems:
        raise LedgerError(f"{path}: {journal.problems[0]}. Put the true journal back.")
    if journal.seq < minimum_seq:
        raise LedgerError(
            f"{path}: ends at entry {journal.seq}, but the checkpoint (at a site: ledger.mark) "
            f"records entry {minimum_seq}: it was cut or rolled back. Put the true journal back."
        )
    if minimum_head and journal.hashes[minimum_seq] != minimum_head:
        raise LedgerError(
            f"{path}: entry {minimum_seq} is not the one that the checkpoint (at a site: "
            f"ledger.mark) records: the journal was cut and written on. Put the true journal back."
        )


def _build_plan_line(plan: AccountPlan, run: str) -> Json:
    header = {"type": "plan", "schema": SCHEMA, "accountant": ACCOUNTANT, "run": run}
    return {**header, **plan_to_json(plan)}
