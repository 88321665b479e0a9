"""The ledger: it refuses and writes before rows are read, keeps every charge, and checks every
line.

A "reader" in these tests is what a run does inside ``spend``: it must never run when the account
cannot pay. Processes and kills are real.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accounting.accountants import epsilon
from accounting.budget import Budget
from accounting.canonical_json import real
from accounting.errors import BudgetExhausted, LedgerError, PlanError
from accounting.events import (
    ComposedEvent,
    Event,
    NonPrivateEvent,
    PoissonSampledGaussianEvent,
    PureDpEvent,
)
from accounting.journal import JournalFile
from accounting.ledger import Account, read_journal
from tests.support.ledger import VISIT, plan, rebuilt, spend_all
from tests.support.transports import process_at_work


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger" / "s0.jsonl"


@pytest.fixture
def account(path: Path) -> Iterator[Account]:
    account = Account.open(path, plan(), resume=False)
    yield account
    account.close()


def visit(account: Account, number: int, event: Event = VISIT) -> None:
    with account.spend(event, visit=f"round {number}"):
        pass


def spend_three_visits(path: Path, **changes: Any) -> None:
    account = Account.open(path, plan(**changes), resume=False)
    for number in range(3):
        visit(account, number)
    account.close()


def reopened(path: Path, **arguments: Any) -> Account:
    return Account.open(path, plan(), resume=True, **arguments)


# --- charges and refusals --------------------------------------------------------------------


def test_an_account_pays_for_exactly_the_visits_that_fit_and_refuses_the_next(
    account: Account,
) -> None:
    # T visits of 5 steps at sigma 8 cost the closed form at 5 T steps.
    fitting = max(t for t in range(1, 50) if epsilon([replace(VISIT, steps=5 * t)], 1e-5) <= 4.0)
    for number in range(fitting):
        visit(account, number)
    assert account.spent() == pytest.approx(epsilon([replace(VISIT, steps=5 * fitting)], 1e-5))
    assert account.spent() <= 4.0
    before = account.seq, account.head
    with pytest.raises(
        BudgetExhausted, match=r"s0 has spent epsilon 3\.\d+ of 4.*Nothing was read"
    ):
        visit(account, fitting)
    assert (account.seq, account.head) == before
    assert account.visits() == fitting
    assert account.left() == pytest.approx(4.0 - account.spent())


def test_an_account_knows_which_visits_were_charged_even_if_they_failed(tmp_path: Path) -> None:
    account = Account.open(tmp_path / "s0.jsonl", plan(), resume=False)
    visit(account, 0)
    with pytest.raises(ValueError), account.spend(VISIT, visit="round 1"):
        raise ValueError("broke off")
    dear = replace(VISIT, steps=VISIT.steps + 1)
    with pytest.raises(LedgerError), account.spend(dear, visit="round 2"):
        pass  # more expensive than planned: refused, so never charged
    known = [account.is_charged(f"round {number}") for number in range(4)]
    account.close()
    again = reopened(tmp_path / "s0.jsonl")
    assert known == [again.is_charged(f"round {n}") for n in range(4)] == [True, True, False, False]
    again.close()


def test_an_audit_detects_a_ledger_written_under_the_stop_rule_of_the_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The control of every "exactly T visits": Alg. 2 compares the total of earlier visits only.
    def rule_of_the_paper(self: Account, after: float) -> bool:
        return self.spent() <= self.plan.budget.epsilon

    fitting = spend_all(tmp_path / "ours", plan())
    monkeypatch.setattr(Account, "_is_within_budget", rule_of_the_paper)

    assert spend_all(tmp_path / "papers", plan()) == fitting + 1

    assert read_journal(tmp_path / "ours/s0.jsonl").problems == []
    [problem] = read_journal(tmp_path / "papers/s0.jsonl").problems
    assert "is above the budget" in problem.text


def test_a_budget_of_zero_reads_no_row(path: Path) -> None:
    account = Account.open(path, plan(budget=Budget(0.0, 0.02)), resume=False)
    # At this delta the epsilon of one step with noise 1000 rounds to 0, and is refused
    # nevertheless.
    tiny = PoissonSampledGaussianEvent(1000.0, 1.0, 1)
    assert epsilon([tiny], 0.02) == 0
    with pytest.raises(BudgetExhausted):
        visit(account, 0, tiny)
    account.close()


@pytest.mark.parametrize(
    "event",
    [
        PoissonSampledGaussianEvent(8.0, 1.0, 6),  # more steps than the plan's visit
        PoissonSampledGaussianEvent(7.9, 1.0, 5),  # less noise
        NonPrivateEvent("F without noise"),
        ComposedEvent((VISIT, PureDpEvent(0.001, 1))),
    ],
)
def test_a_visit_that_costs_more_than_planned_is_refused(account: Account, event: Any) -> None:
    with pytest.raises(LedgerError, match="costs more than the plan says"):
        visit(account, 0, event)
    assert account.visits() == 0


def test_a_smaller_visit_than_planned_is_charged_at_its_own_cost(account: Account) -> None:
    visit(account, 0, replace(VISIT, steps=2))
    assert account.spent() == pytest.approx(epsilon([replace(VISIT, steps=2)], 1e-5))


def test_a_visit_key_is_charged_once_even_after_a_restart(path: Path) -> None:
    spend_three_visits(path)
    account = reopened(path)
    with pytest.raises(LedgerError, match="already spent"):
        visit(account, 1)
    assert account.visits() == 3
    account.close()


@pytest.mark.parametrize("key", ["", "a\nb", "x" * 201, "\x00", 7])
def test_a_visit_key_is_a_short_printable_text(account: Account, key: Any) -> None:
    with pytest.raises(LedgerError, match="visit key"), account.spend(VISIT, visit=key):
        pytest.fail("entered")


def test_the_charge_is_on_disk_before_the_block_is_entered(account: Account, path: Path) -> None:
    with account.spend(VISIT, visit="round 0"):
        on_disk = read_journal(path)
        assert on_disk.problems == []
        assert on_disk.events == [VISIT]
        assert on_disk.unsettled == {1}
    assert read_journal(path).unsettled == set()


def test_an_exception_inside_the_block_refunds_nothing(account: Account, path: Path) -> None:
    with pytest.raises(ZeroDivisionError), account.spend(VISIT, visit="round 0"):
        raise ZeroDivisionError
    assert account.visits() == 1
    assert read_journal(path).epsilon == pytest.approx(epsilon([VISIT], 1e-5))


def test_unprotected_reads_are_recorded_and_make_the_sum_nominal(path: Path) -> None:
    visit_event = ComposedEvent((VISIT, NonPrivateEvent("F and D are trained without noise")))
    as_published = plan(
        scope="as_published", update=("F", "D", "G"), protect=("G",), event=visit_event
    )
    account = Account.open(path, as_published, resume=False)
    visit(account, 0, visit_event)
    account.close()
    journal = read_journal(path)
    assert journal.problems == []
    assert journal.events == [visit_event]
    assert journal.epsilon == pytest.approx(epsilon([VISIT], 1e-5))
    assert epsilon(journal.events, 1e-5) == float("inf")  # the true cost of everything


# --- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"agent": "../s0"}, "agent id"),
        ({"agent": "/etc/passwd"}, "agent id"),
        ({"agent": "a..b"}, "agent id"),
        ({"agent": "s0."}, "agent id"),
        ({"agent": ".hidden"}, "agent id"),
        ({"agent": "NUL.txt"}, "agent id"),
        ({"agent": "s\x000"}, "agent id"),
        ({"agent": "s" * 300}, "agent id"),
        ({"agent": 5}, "agent id"),
        ({"protect": ("G",)}, "it is as_published"),
        ({"scope": "as_published"}, "it is sound"),
        ({"scope": "partial"}, "it is sound"),
        ({"update": ("F", "F")}, "once"),
        ({"update": ["F"]}, "once"),
        ({"event": NonPrivateEvent("F")}, "unprotected read"),
        ({"unit": "household"}, "unit is 'household'; use record or person"),
        ({"adjacency": "replace_one"}, "about twice"),
        ({"adjacency": "add_remove"}, "record_counts: private"),
        ({"record_counts": "private"}, "leave it out"),
        ({"record_counts": "secret"}, "public or private"),
        ({"n_public": -1}, "number of rows"),
        ({"budget": Budget(4.0, 0.03)}, r"1 / 34 rows"),
    ],
)
def test_an_invalid_plan_is_refused(changes: Any, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        plan(**changes)


@pytest.mark.parametrize(
    "numbers", [(-1.0, 1e-5), (float("nan"), 1e-5), (float("inf"), 1e-5), (1.0, 0.0), ("8", 1e-5)]
)
def test_an_invalid_budget_is_refused(numbers: Any) -> None:
    with pytest.raises(PlanError):
        Budget(*numbers)


def test_a_new_plan_keeps_the_old_charges(path: Path) -> None:
    spend_three_visits(path)
    quieter = replace(VISIT, noise_multiplier=16.0)
    account = Account.open(path, plan(event=quieter, budget=Budget(3.9, 1e-5)), resume=True)
    visit(account, 10, quieter)
    expected = epsilon([VISIT, VISIT, VISIT, quieter], 1e-5)
    assert account.spent() == pytest.approx(expected)
    account.close()
    journal = read_journal(path)
    assert journal.problems == []
    assert len(journal.plans) == 2
    assert journal.epsilon == pytest.approx(expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": Budget(4.0, 1e-6)},
        {"adjacency": "add_remove", "record_counts": "private", "n_public": None},
        {"scope": "as_published", "protect": ("G",)},
    ],
)
def test_a_new_plan_that_would_reinterpret_old_charges_is_refused(path: Path, changes: Any) -> None:
    spend_three_visits(path)
    with pytest.raises(PlanError, match="while an account runs"):
        Account.open(path, plan(**changes), resume=True)
    reopened(path).close()  # and does not change the journal


def test_a_budget_never_rises_even_by_the_smallest_float(path: Path) -> None:
    spend_three_visits(path)
    more = math.nextafter(plan().budget.epsilon, math.inf)
    with pytest.raises(PlanError, match="the budget cannot rise"):
        Account.open(path, plan(budget=Budget(more, plan().budget.delta)), resume=True)


# --- the file ----------------------------------------------------------------------------------


def test_files_are_readable_by_their_owner_only(account: Account, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.with_suffix(".lock").stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_every_line_contains_the_hash_of_the_previous_line(account: Account, path: Path) -> None:
    visit(account, 0)
    previous = "0" * 64
    for number, line in enumerate(path.read_bytes().splitlines()):
        record = json.loads(line)
        assert (record["seq"], record["prev"]) == (number, previous)
        previous = hashlib.sha256(line).hexdigest()
    assert account.head == previous
    assert account.seq == 2


def test_starting_refuses_an_existing_journal_and_resuming_needs_one(path: Path) -> None:
    with pytest.raises(LedgerError, match="missing"):
        reopened(path)
    Account.open(path, plan(), resume=False).close()
    with pytest.raises(LedgerError, match="its charges still count"):
        Account.open(path, plan(), resume=False)


def test_a_journal_is_named_after_its_agent(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"named s0\.jsonl"):
        Account.open(tmp_path / "s1.jsonl", plan(), resume=False)


def test_a_symbolic_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    spend_three_visits(path)
    elsewhere = tmp_path / "elsewhere.jsonl"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(LedgerError, match="cannot be read"):
        reopened(path)


def test_resume_continues_from_the_same_epsilon_and_hash_chain(path: Path) -> None:
    spend_three_visits(path)
    account = reopened(path)
    assert account.spent() == pytest.approx(epsilon([VISIT] * 3, 1e-5))
    visit(account, 3)
    account.close()
    journal = read_journal(path)
    assert journal.problems == []
    assert len(journal.events) == 4


def test_a_journal_older_than_the_checkpoint_is_refused(path: Path) -> None:
    spend_three_visits(path)
    remembered = read_journal(path).seq
    whole = path.read_bytes()
    reopened(path, minimum_seq=remembered).close()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-2]))  # the last visit is cut off
    assert read_journal(path).problems == []  # the hash chain alone does not show it
    with pytest.raises(LedgerError, match="rolled back"):
        reopened(path, minimum_seq=remembered)


def test_a_journal_that_was_cut_and_continued_is_refused_by_the_hash_in_the_checkpoint(
    path: Path,
) -> None:
    spend_three_visits(path)
    journal = read_journal(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]))  # the last visit is cut off ...
    account = reopened(path)
    visit(account, 9, replace(VISIT, steps=1))  # ... and replaced by a cheaper one
    account.close()
    reopened(path, minimum_seq=journal.seq).close()  # the same length: the length does not show it
    with pytest.raises(LedgerError, match="cut and written on"):
        reopened(path, minimum_seq=journal.seq, minimum_head=journal.head)


def change(line: int, **fields: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda lines: [
        {**record, **fields} if number == line else record for number, record in enumerate(lines)
    ]


def with_event(sigma: float = 8.0, steps: Any = 5) -> dict[str, Any]:
    return {
        "kind": "sampled_gaussian",
        "noise_multiplier": real(sigma),
        "sample_rate": real(1.0),
        "steps": steps,
    }


def edit(line: int, old: bytes, new: bytes) -> Callable[[list[bytes]], list[bytes]]:
    return lambda lines: [*lines[:line], lines[line].replace(old, new), *lines[line + 1 :]]


#: name -> (change of the bytes, the line that the error must name, counted from 1)
BYTE_TAMPERING: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "a byte is flipped": (edit(1, b"round 0", b"round 9"), 3),
    "a middle line is deleted": (lambda ls: ls[:3] + ls[4:], 4),
    "a line is duplicated": (lambda ls: [*ls[:2], ls[1], *ls[2:]], 3),
    "two lines are swapped": (lambda ls: [*ls[:3], ls[4], ls[3], *ls[5:]], 4),
    "the plan is replaced": (edit(0, b'"n_public":34', b'"n_public":35'), 2),
    "the plan is removed": (lambda ls: ls[1:], 1),
    "a number becomes NaN": (edit(1, b'"steps":5', b'"steps":NaN'), 2),
    "a number becomes huge": (edit(1, b'"steps":5', b'"steps":' + b"9" * 400), 2),
    "spaces are added": (edit(1, b":", b": "), 2),
    "a line is emptied": (lambda ls: [*ls[:2], b"", *ls[3:]], 3),
}


@pytest.mark.parametrize("how", BYTE_TAMPERING)
def test_a_tampered_journal_is_refused_with_its_line_number(path: Path, how: str) -> None:
    spend_three_visits(path)
    tamper, line = BYTE_TAMPERING[how]
    lines = path.read_bytes().splitlines()
    tampered = tamper(list(lines))
    assert tampered != lines
    path.write_bytes(b"".join(text + b"\n" for text in tampered))
    assert [problem.line for problem in read_journal(path).problems] == [line]
    with pytest.raises(LedgerError, match=f"line {line}: "):
        reopened(path)


#: The same with a rebuilt hash chain, so that only the content can show it.
REBUILT_TAMPERING: dict[str, tuple[Any, int, str]] = {
    "noise is one percent smaller": (change(1, event=with_event(7.92)), 2, "costs more"),
    "noise is one percent larger": (change(1, event=with_event(8.08)), 2, "its events cost"),
    "plan and visit claim other noise": (
        lambda ls: change(1, event=with_event(7.92))(change(0, event=with_event(7.92))(ls)),
        2,
        "its events cost",
    ),
    "steps are negative": (change(1, event=with_event(steps=-5)), 2, "steps"),
    "a visit is left out": (lambda ls: ls[:1] + ls[3:], 2, "its events cost"),
    "a visit is counted twice": (lambda ls: [*ls[:2], ls[1], *ls[2:]], 3, "second time"),
    "the budget is below what was spent": (
        change(0, epsilon_budget=real(1.0)),
        2,
        "above the budget",
    ),
    "the schema is of another version": (change(0, schema=2), 1, "another version"),
    "a line is of unknown type": (change(2, type="refund"), 3, "unknown type"),
    "a settle names no visit": (change(2, reserve=5), 3, "no open visit"),
    "the adjacency is unknown": (change(0, adjacency=["zero_out"]), 1, "adjacency"),
    "a key is added": (change(1, note="x"), 2, "has keys"),
}


@pytest.mark.parametrize("how", REBUILT_TAMPERING)
def test_a_tampered_journal_with_a_rebuilt_hash_chain_is_refused_by_its_content(
    path: Path, how: str
) -> None:
    spend_three_visits(path)
    tamper, line, why = REBUILT_TAMPERING[how]
    lines = [json.loads(text) for text in path.read_bytes().splitlines()]
    path.write_bytes(rebuilt(lines))
    # control: rebuilding an honest journal gives the same journal
    assert read_journal(path).problems == []
    path.write_bytes(rebuilt(tamper(lines)))
    [problem] = read_journal(path).problems
    assert problem.line == line
    assert why in problem.text


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_changed_byte_is_a_problem_and_never_a_crash(tmp_path: Path, data: Any) -> None:
    path = tmp_path / "s0.jsonl"
    if not path.exists():
        spend_three_visits(path)
        (tmp_path / "honest").write_bytes(path.read_bytes())
    honest = (tmp_path / "honest").read_bytes()
    end = honest.rstrip(b"\n").rfind(b"\n")  # no later line contains the hash of the last line
    at = data.draw(st.integers(0, end))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != honest[at]))
    path.write_bytes(honest[:at] + bytes([other]) + honest[at + 1 :])
    assert read_journal(path).problems != []
    path.write_bytes(honest)


# --- crashes, disks, other processes -----------------------------------------------------------


def test_a_torn_last_line_stays_charged_as_a_whole_visit(path: Path) -> None:
    spend_three_visits(path)
    four = epsilon([VISIT] * 4, 1e-5)
    with path.open("ab") as file:
        file.write(b'{"eps_after":{"deci')
    journal = read_journal(path)
    assert (journal.problems, journal.torn_tail) == ([], True)
    assert journal.epsilon == pytest.approx(four)
    account = reopened(path)
    assert account.spent() == pytest.approx(four)
    account.close()
    journal = read_journal(path)  # repaired: the torn line became an entry of its own
    assert (journal.problems, journal.torn_tail) == ([], False)
    assert journal.epsilon == pytest.approx(four)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_crash_while_repairing_a_torn_line_loses_no_charge(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spend_three_visits(path)
    with path.open("ab") as file:
        file.write(b"{")

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(LedgerError, match="cannot be mended"):
        reopened(path)
    monkeypatch.undo()
    assert reopened(path).visits() == 4


def test_a_journal_without_a_complete_plan_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"accountant":{"enf')
    with pytest.raises(LedgerError, match="no complete plan line"):
        reopened(path)


@pytest.mark.parametrize(
    ("call", "number"),
    [("fsync", errno.EIO), ("write", errno.ENOSPC), ("write", errno.EROFS)],
)
def test_no_row_is_read_if_the_charge_cannot_be_made_durable(
    account: Account, path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    visit(account, 0)

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(LedgerError, match="were not read"), account.spend(VISIT, visit="round 1"):
        pytest.fail("the block was entered without a charge")
    monkeypatch.undo()
    # The content of the disk is unknown: this writer stops, and a new read decides.
    with pytest.raises(LedgerError, match="an earlier write failed"):
        visit(account, 2)
    account.close()
    after = reopened(path)
    assert after.visits() in (1, 2)  # the line may be on disk; then it is charged
    after.close()


def test_half_a_line_on_a_full_disk_is_charged_after_a_restart(
    account: Account, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = os.write, [40]

    def fill(descriptor: int, data: bytes) -> int:
        if not calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: calls.pop()])

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(LedgerError, match="No space left"), account.spend(VISIT, visit="round 0"):
        pytest.fail("entered")
    monkeypatch.undo()
    account.close()
    assert reopened(path).visits() == 1


@pytest.mark.parametrize("written", [True, False])
def test_ctrl_c_while_a_charge_is_written_never_leaves_the_account_below_its_file(
    account: Account, path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    visit(account, 0)
    write = os.write

    def interrupt(descriptor: int, data: bytes) -> int:
        if written:
            write(descriptor, data)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupt)
    with pytest.raises(KeyboardInterrupt), account.spend(VISIT, visit="round 1"):
        pytest.fail("the block was entered without a charge")
    monkeypatch.undo()
    # A card written at this point must not claim less than the file contains.
    assert account.visits() == 2
    assert account.spent() >= read_journal(path).epsilon
    assert len(read_journal(path).events) == (2 if written else 1)
    # Another line would not continue the hash chain on disk.
    with pytest.raises(LedgerError, match="an earlier write failed"):
        visit(account, 2)
    assert read_journal(path).problems == []


def test_a_disk_failure_after_the_visit_loses_neither_its_result_nor_its_charge(
    account: Account, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with account.spend(VISIT, visit="round 0"):
        monkeypatch.setattr(os, "write", fail)
    monkeypatch.undo()
    assert account.visits() == len(read_journal(path).events) == 1
    with pytest.raises(LedgerError, match="an earlier write failed"):
        visit(account, 1)


def test_a_first_line_that_cannot_be_written_does_not_block_a_second_try(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(LedgerError, match="No space left"):
        Account.open(path, plan(), resume=False)
    monkeypatch.undo()
    Account.open(path, plan(), resume=False).close()


def test_a_read_only_folder_is_refused_with_a_clear_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(LedgerError, match="cannot be written"):
        Account.open(blocked / "ledger" / "s0.jsonl", plan(), resume=False)


def test_a_second_process_fails_on_the_lock_and_killing_the_first_keeps_its_charge(
    path: Path,
) -> None:
    def hold(is_inside: Callable[[], None]) -> None:
        with Account.open(path, plan(), resume=False).spend(VISIT, visit="round 0"):
            is_inside()
            time.sleep(600)

    # The child holds the account inside a visit, between reserve and settle, and is killed there.
    with process_at_work(hold) as kill:
        with pytest.raises(LedgerError, match="another process is using this account"):
            reopened(path)
        assert read_journal(path).problems == []  # an audit needs no lock
        kill()
    account = reopened(path)  # the lock is released when its process ends
    assert account.visits() == 1
    assert account.spent() == pytest.approx(epsilon([VISIT], 1e-5))
    with pytest.raises(LedgerError, match="already spent"):
        visit(account, 0)
    account.close()


def test_two_accounts_of_one_agent_cannot_be_open_in_one_process(
    account: Account, path: Path
) -> None:
    with pytest.raises(LedgerError, match="another process is using"):
        reopened(path)


def test_a_forked_worker_cannot_write_to_its_parents_account(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(LedgerError, match="opened by another process"):
        visit(account, 0)


def test_a_closed_account_pays_for_nothing(account: Account) -> None:
    account.close()
    account.close()
    with pytest.raises(LedgerError, match="closed"):
        visit(account, 0)


# Two writers ---------------------------------------------------------------------------------


def hard_link(path: Path) -> Path:
    """The same journal in another folder, without a lock file."""
    other = path.parents[1] / "elsewhere" / path.name
    other.parent.mkdir()
    os.link(path, other)
    return other


def test_removing_the_lock_file_admits_no_second_writer(account: Account, path: Path) -> None:
    path.with_suffix(".lock").unlink()
    with pytest.raises(LedgerError, match="another process is using this account"):
        reopened(path)
    visit(account, 0)  # the first writer continues


def test_a_hard_link_admits_no_second_writer(account: Account, path: Path) -> None:
    visit(account, 0)
    other = hard_link(path)
    with pytest.raises(LedgerError, match="another process is using this account"):
        Account.open(other, plan(), resume=True)
    visit(account, 1)  # a link does not change the file
    account.close()
    assert reopened(path).visits() == 2


@pytest.mark.parametrize("way", ["no lock file", "hard link"])
def test_control_without_a_lock_on_the_journal_itself_a_second_writer_is_admitted(
    account: Account, path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    lock, journal = JournalFile._lock_exclusively, account._file._file
    assert journal is not None
    inode = os.fstat(journal).st_ino

    def lock_only_the_lock_file(self: JournalFile, descriptor: int) -> None:
        if os.fstat(descriptor).st_ino != inode:
            lock(self, descriptor)

    monkeypatch.setattr(JournalFile, "_lock_exclusively", lock_only_the_lock_file)
    fcntl.flock(journal, fcntl.LOCK_UN)
    if way == "no lock file":
        path.with_suffix(".lock").unlink()
    second = Account.open(hard_link(path) if way == "hard link" else path, plan(), resume=True)
    visit(second, 0)
    second.close()
    # The check before the next line detects the second writer.
    with pytest.raises(LedgerError, match="added by another writer"):
        visit(account, 1)


def test_a_journal_with_a_repaired_torn_tail_is_locked_too(path: Path) -> None:
    spend_three_visits(path)
    with path.open("ab") as file:
        file.write(b'{"type":"res')
    mended = reopened(path)
    path.with_suffix(".lock").unlink()
    with pytest.raises(LedgerError, match="another process is using this account"):
        reopened(path)
    visit(mended, 9)
    mended.close()
    assert read_journal(path).problems == []


def swap(path: Path) -> None:
    """Replace the file by a copy of the same bytes."""
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    os.replace(copy, path)


def flip_in_place(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    time.sleep(0.02)  # longer than the resolution of file times
    with path.open("r+b") as file:
        file.write(content)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "another file": (swap, "another file lies in its place"),
    "no file": (Path.unlink, "cannot be read"),
    "shorter": (lambda path: os.truncate(path, path.stat().st_size - 1), "1 bytes were cut"),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 1), "1 bytes were added"),
    "other bytes": (flip_in_place, "its bytes were changed"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_journal_that_changed_on_disk_pays_for_nothing(
    account: Account, path: Path, how: str
) -> None:
    strike, words = DAMAGES[how]
    visit(account, 0)
    strike(path)
    charged = account.visits()
    with pytest.raises(LedgerError, match=words), account.spend(VISIT, visit="round 1"):
        pytest.fail("the block was entered")
    assert account.visits() == charged
    journal, problems = account.balance()
    assert words in problems[0] and journal.epsilon >= epsilon([VISIT], 1e-5)


@pytest.mark.parametrize("how", DAMAGES)
def test_control_without_the_comparison_rows_are_read_under_a_damaged_journal(
    account: Account, path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(JournalFile, "refuse_damage", lambda self: None)
    visit(account, 0)
    DAMAGES[how][0](path)
    visit(account, 1)
    assert account.balance().problems  # the final check detects it as well
