"""Accounts in runs of the training command: bad numbers, tampering, rollback, locks and full disks.

tests/accounting/test_ledger.py tests single accounts.
"""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from opacus.accountants.analysis import rdp

import privssl.train as train
from accounting import verify
from accounting.canonical_json import real
from accounting.errors import LedgerError
from accounting.ledger import Account, read_journal
from privssl.audit import __main__ as audit
from privssl.engines.local import LocalEngine
from privssl.experiment import prepare
from tests.support.command_line import Outcome, assert_refused, tree
from tests.support.ledger import rebuilt
from tests.support.private_fedssl import sealed
from tests.support.resume import PRIVATE, RunPaths, command, ledgers, place, signals_at_call
from tests.support.transports import process_at_work


@pytest.fixture
def library() -> None:
    """Use the second accounting library; it takes seconds a run, so other tests omit it."""
    if not verify.available():
        pytest.skip("dp-accounting is not installed")


@pytest.fixture(autouse=True)
def without_second_library(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "library" not in request.fixturenames:
            patch.setattr(verify, "available", lambda: False)
        yield


#: A private run of two rounds, with one visit of each support agent in each.
SHORT = PRIVATE.replace("rounds: 4", "rounds: 2")


@pytest.fixture
def sealed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make reading a labelled row raise AssertionError in every run of the command."""
    real_prepare = prepare.prepare
    monkeypatch.setattr(prepare, "prepare", lambda config: sealed(real_prepare(config)))


# Numbers without a privacy bound ----------------------------------------------------------------


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan", "-1.0", "-1.0e-300"])
@pytest.mark.parametrize("acknowledged", ["true", "false"])
def test_a_budget_that_is_negative_or_not_finite_is_refused_even_if_acknowledged(
    tmp_path: Path, number: str, acknowledged: str
) -> None:
    # A run without a budget has no privacy section, so nothing looks like a guarantee.
    paths = place(tmp_path, PRIVATE.replace("epsilon: 4.0", f"epsilon: {number}"))
    outcome = command(paths.config, paths.output, f"privacy.acknowledge_unsound={acknowledged}")

    assert_refused(outcome, "privacy.epsilon", "leave the privacy section out")

    assert not paths.run.exists()


def peak_memory_of(action: Callable[[], object]) -> int:
    """Peak memory of an action in bytes."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("noise", ["0.0", "-1.0", ".nan", ".inf", "1.0e-9", "1e-3", "true"])
def test_noise_without_a_privacy_bound_is_refused_in_little_time_and_memory(
    tmp_path: Path, noise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_if_called(*_: object, **__: object) -> NoReturn:
        raise AssertionError("an accountant ran, or data was read")

    paths = place(tmp_path, PRIVATE)
    command(paths.config, "--dry-run", "privacy.noise_multiplier=-2.0")  # imports everything
    monkeypatch.setattr(rdp, "compute_rdp", fail_if_called)
    monkeypatch.setattr(prepare, "prepare", fail_if_called)
    outcomes: list[Outcome] = []
    arguments = (paths.config, paths.output, f"privacy.noise_multiplier={noise}")

    started = time.process_time()
    outcomes.append(command(*arguments))
    assert time.process_time() - started < 5  # accounting of such noise would take minutes
    assert peak_memory_of(lambda: outcomes.append(command(*arguments))) < 50 * 2**20

    for outcome in outcomes:
        assert_refused(outcome, "privacy.noise_multiplier")
    assert not paths.run.exists()


def test_control_the_memory_check_notices_sixty_megabytes() -> None:
    assert peak_memory_of(lambda: np.ones(60 * 2**17)) > 50 * 2**20


@pytest.mark.usefixtures("library")
def test_a_delta_too_small_for_the_second_library_gives_a_card_without_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = place(tmp_path, PRIVATE.replace("1.0e-3", "1.0e-15"))

    assert command(paths.config, paths.output, "algorithm.rounds=1").status == 0

    text = (paths.run / "privacy.json").read_text()
    assert "Infinity" not in text and "NaN" not in text
    for entry in json.loads(text)["agents"]:
        numbers = entry["epsilon"]
        assert 0 < numbers["value"] <= 4.0
        assert (numbers["pld_lower"], numbers["pld_upper"]) == (None, None)
        assert "delta 1e-15 is below 1e-12" in numbers["why_no_bounds"]
        assert "Use the RDP value" in numbers["why_no_bounds"]
    assert audit.main([str(paths.run)]) == 0
    capsys.readouterr()


# Runs shared by the tests below --------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A private run, interrupted after the visits of round 2 of 4: its checkpoint is of round 1."""
    paths = place(tmp_path_factory.mktemp("stopped"), PRIVATE.replace("every: 2", "every: 1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "available", lambda: False)
        with signals_at_call(
            LocalEngine, "deliver", 3 + 3, signal.SIGINT
        ):  # s0, s1, then the query agents
            assert command(paths.config, paths.output).status == 130
    assert {len(read_journal(path).events) for path in ledgers(paths).values()} == {2}
    return paths


@pytest.fixture(scope="module")
def ended(stopped: RunPaths, tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """The same run, resumed to its end."""
    paths = RunPaths(stopped.config, tmp_path_factory.mktemp("ended") / "run")
    shutil.copytree(stopped.run, paths.run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "available", lambda: False)
        assert command(paths.config, "--resume", paths.run).status == 0
    return paths


@pytest.fixture
def copy(stopped: RunPaths, tmp_path: Path) -> RunPaths:
    paths = RunPaths(stopped.config, tmp_path / "run")
    shutil.copytree(stopped.run, paths.run)
    return paths


def changed_files(paths: RunPaths, before: dict[str, tuple[bytes, int]]) -> set[str]:
    after = tree(paths.run)
    return {name for name in before | after if before.get(name) != after.get(name)}


def test_a_run_that_replaced_another_is_resumed_beside_the_other_ones_ledger_only(
    tmp_path: Path,
) -> None:
    paths = place(tmp_path, SHORT.replace("every: 2", "every: 1"))
    assert command(paths.config, paths.output).status == 0
    with signals_at_call(LocalEngine, "deliver", 3 + 3, signal.SIGINT):
        assert command(paths.config, paths.output, "run.overwrite=true").status == 130
    moved = paths.run.with_name("moved")  # its card would forget what the replaced run spent
    paths.run.rename(moved)
    outcome = command(paths.config, "--resume", moved)
    assert_refused(outcome, "run.ledger-001", "ledger of a replaced run", "Put it back")
    moved.rename(paths.run)
    assert command(paths.config, "--resume", paths.run).status == 0
    card = json.loads((paths.run / "privacy.json").read_text())
    assert {entry["ledger"] for entry in card["former_ledgers"]} == {"run.ledger-001"}


# Tampering --------------------------------------------------------------------------------------


def flip_byte(lines: list[bytes]) -> list[bytes]:
    middle = bytearray(lines[1])
    middle[len(middle) // 2] ^= 1
    return [lines[0], bytes(middle), *lines[2:]]


def forge_sum(lines: list[bytes]) -> list[bytes]:
    records = [json.loads(line) for line in lines]
    error_text = float.fromhex(records[3]["eps_after"]["hex"])
    records[3]["eps_after"] = real(0.99 * error_text)
    return rebuilt(records).splitlines()


def write_nan(lines: list[bytes]) -> list[bytes]:
    assert b'"steps":2' in lines[1]
    return [lines[0], lines[1].replace(b'"steps":2', b'"steps":NaN', 1), *lines[2:]]


#: The lines of the ledger: a plan, then reserve and settle of two visits.
#: tests/accounting/test_ledger.py has more kinds of tampering.
TAMPERING: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "a byte is flipped": (flip_byte, "line "),  # 2 or 3: invalid JSON, or another hash
    "a line is deleted": (lambda lines: [*lines[:2], *lines[3:]], "line 3: does not continue"),
    "a number is NaN": (write_nan, "line 2: NaN"),
    "the tail is cut off": (lambda lines: lines[:3], "it was cut or rolled back"),
    "the sum is forged and the chain rebuilt": (forge_sum, "line 4: says epsilon"),
}


@pytest.mark.parametrize("how", TAMPERING)
def test_a_tampered_ledger_is_refused_by_resume_and_by_the_audit(
    copy: RunPaths, capsys: pytest.CaptureFixture[str], sealed_runs: None, how: str
) -> None:
    path = ledgers(copy)["s1"]
    tamper, error_text = TAMPERING[how]
    lines = path.read_bytes().splitlines()
    assert len(lines) == 5
    tampered = tamper(lines)
    assert tampered != lines
    path.write_bytes(b"".join(line + b"\n" for line in tampered))
    before = tree(copy.run)

    outcome = command(copy.config, "--resume", copy.run)

    assert_refused(outcome, str(path), error_text, "Put the true journal back")
    assert changed_files(copy, before) <= {"train.log"}  # which logs the attempt
    assert audit.main([str(copy.run)]) == 1
    capsys.readouterr()


def test_control_a_rewritten_ledger_with_the_same_content_is_accepted(
    copy: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    # The control: a file is not refused merely because it was written again.
    path = ledgers(copy)["s1"]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(rebuilt([json.loads(line) for line in content.splitlines()]))
    assert path.read_bytes() == content

    assert audit.main([str(copy.run)]) == 3  # as for any interrupted run; a tampered one gives 1
    assert command(copy.config, "--resume", copy.run).status == 0
    assert audit.main([str(copy.run)]) == 0
    capsys.readouterr()


# Rollback in both directions --------------------------------------------------------------------


def replace_folder(name: str, source: RunPaths, target: RunPaths) -> None:
    """Replace the folder ``name`` of a run by that of another run."""
    shutil.rmtree(target.run / name)
    shutil.copytree(source.run / name, target.run / name)


def test_an_old_checkpoint_with_a_new_ledger_keeps_every_charge(
    copy: RunPaths, ended: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_folder("ledger", ended, copy)
    charged = {name: path.read_bytes() for name, path in ledgers(copy).items()}
    spent = {name: read_journal(path).epsilon for name, path in ledgers(copy).items()}

    assert command(copy.config, "--resume", copy.run).status == 0

    for name, path in ledgers(copy).items():
        assert path.read_bytes().startswith(charged[name])
        assert spent[name] <= read_journal(path).epsilon <= 4.0
    # The rounds ran again, and the earlier visits had spent the budget.
    assert copy.results()["status"] == "budget_exhausted"
    assert copy.results()["privacy"]["guarantee"]["epsilon"] >= max(spent.values())
    assert audit.main([str(copy.run)]) == 0
    capsys.readouterr()


def test_a_new_checkpoint_with_an_old_ledger_is_refused_before_any_row_is_read(
    copy: RunPaths, ended: RunPaths, sealed_runs: None
) -> None:
    replace_folder("checkpoints", ended, copy)
    before = tree(copy.run)

    outcome = command(copy.config, "--resume", copy.run)

    assert_refused(outcome, str(copy.run / "ledger"), "cut or rolled back", "Put the true journal")
    assert changed_files(copy, before) <= {"train.log"}

    replace_folder("ledger", ended, copy)  # the control: its own ledger is accepted
    assert command(copy.config, "--resume", copy.run).status == 0


# Two processes ----------------------------------------------------------------------------------


@pytest.fixture
def run_in_use(tmp_path: Path) -> Iterator[tuple[RunPaths, Callable[[], None]]]:
    """A run that another process is training, and a function that kills the process."""
    paths = place(tmp_path, SHORT)

    def train_slowly(is_inside: Callable[[], None]) -> None:
        """Run the command, which blocks in the visit of s0 in round 1."""
        deliver = LocalEngine.deliver

        def deliver_and_stay(self: LocalEngine, calls: Any) -> NoReturn:
            list(deliver(self, calls))
            is_inside()
            time.sleep(600)
            raise AssertionError

        LocalEngine.deliver = deliver_and_stay  # type: ignore[method-assign]
        train.main([str(paths.config), paths.output, "--quiet", "run.workers=1"])

    with process_at_work(train_slowly) as kill:
        yield paths, kill


@pytest.mark.ci
def test_a_second_process_in_a_run_folder_is_refused_until_the_first_has_ended(
    run_in_use: tuple[RunPaths, Callable[[], None]],
    sealed_runs: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths, kill = run_in_use
    before = tree(paths.run)

    for second in (
        [paths.config, "--resume", paths.run],
        [paths.config, paths.output, "run.overwrite=true"],
    ):
        assert_refused(command(*second), str(paths.run), "another process")
    assert_refused(command(paths.config, paths.output), str(paths.run), "exists and holds a run")
    # The account itself is locked as well.
    promise = read_journal(ledgers(paths)["s0"]).plan
    with pytest.raises(LedgerError, match="another process is using this account"):
        Account.open(ledgers(paths)["s0"], promise, resume=True)
    assert tree(paths.run) == before

    # The operating system releases the locks of a killed process.
    kill()
    monkeypatch.undo()
    assert command(paths.config, "--resume", paths.run).status == 0
    assert len(read_journal(ledgers(paths)["s0"]).events) == 2  # including the killed visit


# Disks that fail at the charge ------------------------------------------------------------------


@contextlib.contextmanager
def failing_reserve(call: str, number: int) -> Iterator[None]:
    """Let ``write`` or ``fsync`` of the line that charges a visit fail."""
    write, fsync = os.write, os.fsync
    reserved = False

    def writes(descriptor: int, data: bytes) -> int:
        nonlocal reserved
        if b'"type":"reserve"' in data:
            if call == "write":
                raise OSError(number, os.strerror(number))
            reserved = True
            if call == "full":  # permanently: the file can grow by forty bytes
                size = os.fstat(descriptor).st_size + 40
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
        return write(descriptor, data)

    def fsyncs(descriptor: int) -> None:
        if reserved and call == "fsync":
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", writes)
        patch.setattr(os, "fsync", fsyncs)
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)


DISKS = [
    ("write", errno.ENOSPC), ("write", errno.EROFS), ("fsync", errno.EIO), ("full", errno.EFBIG),
]  # fmt: skip


@pytest.mark.parametrize(("call", "number"), DISKS)
def test_a_run_whose_charge_cannot_be_written_ends_with_one_error_and_reads_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed_runs: None, call: str, number: int
) -> None:
    paths = place(tmp_path, SHORT)

    with failing_reserve(call, number):
        outcome = command(paths.config, paths.output)

    assert_refused(
        outcome, str(ledgers(paths)["s0"]), f"could not be written ({os.strerror(number)})",
        "Its rows were not read", "Free space or repair the disk, then resume",
    )  # fmt: skip
    assert outcome.err.count("\n") == 1
    # With a repaired disk the run can be resumed; what may be on the disk stays charged.
    charges = {name: len(read_journal(path).events) for name, path in ledgers(paths).items()}
    assert charges == {"s0": 0 if call == "write" else 1, "s1": 0}
    monkeypatch.undo()
    assert command(paths.config, "--resume", paths.run).status == 0
    assert (
        len(read_journal(ledgers(paths)["s0"]).events) == 2
    )  # both visits of the budget, including that one


def test_control_the_same_run_on_a_working_disk_reads_rows(
    tmp_path: Path, sealed_runs: None
) -> None:
    # The control: without the failure, rows are read.
    paths = place(tmp_path, SHORT)
    with pytest.raises(AssertionError, match="a labelled row was read"):
        command(paths.config, paths.output)
