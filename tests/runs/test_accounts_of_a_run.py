"""The accounts of a whole run, through the command: refused, tampered with, rolled back, full disk.

One account is tests/accounting/test_ledger.py; here is what a run makes of it, with real processes.
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
from tests.support.transports import beside


@pytest.fixture
def library() -> None:
    """For tests of the second library; all others do without it, which takes seconds a run."""
    if not verify.available():
        pytest.skip("dp-accounting is not installed")


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "library" not in request.fixturenames:
            patch.setattr(verify, "available", lambda: False)
        yield


#: A private run of two rounds, with one visit of each support agent in each.
SHORT = PRIVATE.replace("rounds: 4", "rounds: 2")


@pytest.fixture
def seal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of the command is sealed."""
    real_prepare = prepare.prepare
    monkeypatch.setattr(prepare, "prepare", lambda config: sealed(real_prepare(config)))


# Numbers from which no promise follows ----------------------------------------------------------


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan", "-1.0", "-1.0e-300"])
@pytest.mark.parametrize("acknowledged", ["true", "false"])
def test_a_budget_that_is_no_number_from_zero_up_is_refused_even_when_acknowledged(
    tmp_path: Path, number: str, acknowledged: str
) -> None:
    # A run without a budget is one without a privacy section, so that nothing looks like a promise.
    at = place(tmp_path, PRIVATE.replace("epsilon: 4.0", f"epsilon: {number}"))
    outcome = command(at.config, at.output, f"privacy.acknowledge_unsound={acknowledged}")

    assert_refused(outcome, "privacy.epsilon", "leave the privacy section out")

    assert not at.run.exists()


def memory_of(action: Callable[[], object]) -> int:
    """Bytes that an action held at most."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("noise", ["0.0", "-1.0", ".nan", ".inf", "1.0e-9", "1e-3", "true"])
def test_noise_from_which_no_bound_follows_is_refused_in_no_time_and_no_memory(
    tmp_path: Path, noise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_far(*_: object, **__: object) -> NoReturn:
        raise AssertionError("an accountant ran, or data was read")

    at = place(tmp_path, PRIVATE)
    command(at.config, "--dry-run", "privacy.noise_multiplier=-2.0")  # everything is imported
    monkeypatch.setattr(rdp, "compute_rdp", too_far)
    monkeypatch.setattr(prepare, "prepare", too_far)
    outcomes: list[Outcome] = []
    given = (at.config, at.output, f"privacy.noise_multiplier={noise}")

    started = time.process_time()
    outcomes.append(command(*given))
    assert time.process_time() - started < 5  # an accountant of such noise would take minutes
    assert memory_of(lambda: outcomes.append(command(*given))) < 50 * 2**20

    for outcome in outcomes:
        assert_refused(outcome, "privacy.noise_multiplier")
    assert not at.run.exists()


def test_the_check_of_memory_notices_sixty_megabytes() -> None:
    assert memory_of(lambda: np.ones(60 * 2**17)) > 50 * 2**20


@pytest.mark.usefixtures("library")
def test_a_delta_beyond_numeric_composition_makes_a_run_without_bounds_not_an_infinite_claim(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = place(tmp_path, PRIVATE.replace("1.0e-3", "1.0e-15"))

    assert command(at.config, at.output, "algorithm.rounds=1").status == 0

    text = (at.run / "privacy.json").read_text()
    assert "Infinity" not in text and "NaN" not in text
    for entry in json.loads(text)["agents"]:
        numbers = entry["epsilon"]
        assert 0 < numbers["value"] <= 4.0
        assert (numbers["pld_lower"], numbers["pld_upper"]) == (None, None)
        assert "delta 1e-15 is below 1e-12" in numbers["why_no_bounds"]
        assert "Use the RDP value" in numbers["why_no_bounds"]
    assert audit.main([str(at.run)]) == 0
    capsys.readouterr()


# Runs of the command, for all below ----------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A private run, interrupted after the visits of round 2 of 4: its checkpoint is of round 1."""
    at = place(tmp_path_factory.mktemp("stopped"), PRIVATE.replace("every: 2", "every: 1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "available", lambda: False)
        with signals_at_call(
            LocalEngine, "deliver", 3 + 3, signal.SIGINT
        ):  # s0, s1, then the others
            assert command(at.config, at.output).status == 130
    assert {len(read_journal(path).events) for path in ledgers(at).values()} == {2}
    return at


@pytest.fixture(scope="module")
def ended(stopped: RunPaths, tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """The same run at its end."""
    at = RunPaths(stopped.config, tmp_path_factory.mktemp("ended") / "run")
    shutil.copytree(stopped.run, at.run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "available", lambda: False)
        assert command(at.config, "--resume", at.run).status == 0
    return at


@pytest.fixture
def copy(stopped: RunPaths, tmp_path: Path) -> RunPaths:
    at = RunPaths(stopped.config, tmp_path / "run")
    shutil.copytree(stopped.run, at.run)
    return at


def changed(at: RunPaths, before: dict[str, tuple[bytes, int]]) -> set[str]:
    after = tree(at.run)
    return {name for name in before | after if before.get(name) != after.get(name)}


# Tampering, told by the commands ----------------------------------------------------------------


def flipped(lines: list[bytes]) -> list[bytes]:
    middle = bytearray(lines[1])
    middle[len(middle) // 2] ^= 1
    return [lines[0], bytes(middle), *lines[2:]]


def forged(lines: list[bytes]) -> list[bytes]:
    records = [json.loads(line) for line in lines]
    told = float.fromhex(records[3]["eps_after"]["hex"])
    records[3]["eps_after"] = real(0.99 * told)
    return rebuilt(records).splitlines()


def not_a_number(lines: list[bytes]) -> list[bytes]:
    assert b'"steps":2' in lines[1]
    return [lines[0], lines[1].replace(b'"steps":2', b'"steps":NaN', 1), *lines[2:]]


#: The lines of the ledger: a plan, then reserve and settle of two visits. More ways to tamper with
#: one are in tests/accounting/test_ledger.py; here is what the commands say.
TAMPERING: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "a byte is flipped": (flipped, "line "),  # 2 or 3: not JSON any more, or another hash
    "a line is deleted": (lambda lines: [*lines[:2], *lines[3:]], "line 3: does not continue"),
    "a number is NaN": (not_a_number, "line 2: NaN"),
    "the tail is cut off": (lambda lines: lines[:3], "it was cut or rolled back"),
    "the sum is forged and the chain rebuilt": (forged, "line 4: says epsilon"),
}


@pytest.mark.parametrize("how", TAMPERING)
def test_no_run_goes_on_and_no_audit_passes_on_a_ledger_that_was_tampered_with(
    copy: RunPaths, capsys: pytest.CaptureFixture[str], seal: None, how: str
) -> None:
    path = ledgers(copy)["s1"]
    tamper, told = TAMPERING[how]
    lines = path.read_bytes().splitlines()
    assert len(lines) == 5
    tampered = tamper(lines)
    assert tampered != lines
    path.write_bytes(b"".join(line + b"\n" for line in tampered))
    before = tree(copy.run)

    outcome = command(copy.config, "--resume", copy.run)

    assert_refused(outcome, str(path), told, "Put the true journal back")
    assert changed(copy, before) <= {"train.log"}  # which tells of the attempt
    assert audit.main([str(copy.run)]) == 1
    capsys.readouterr()


def test_the_same_ledger_written_anew_is_accepted(
    copy: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    # The control: what is refused above is not refused for having been touched.
    path = ledgers(copy)["s1"]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(rebuilt([json.loads(line) for line in content.splitlines()]))
    assert path.read_bytes() == content

    assert audit.main([str(copy.run)]) == 3  # as of any interrupted run; a tampered one has 1
    assert command(copy.config, "--resume", copy.run).status == 0
    assert audit.main([str(copy.run)]) == 0
    capsys.readouterr()


# Rollback in both directions --------------------------------------------------------------------


def put(name: str, source: RunPaths, target: RunPaths) -> None:
    """Put the folder ``name`` of one run in the place of another's."""
    shutil.rmtree(target.run / name)
    shutil.copytree(source.run / name, target.run / name)


def test_an_old_checkpoint_with_the_new_ledger_keeps_every_charge(
    copy: RunPaths, ended: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    put("ledger", ended, copy)
    paid = {name: path.read_bytes() for name, path in ledgers(copy).items()}
    spent = {name: read_journal(path).epsilon for name, path in ledgers(copy).items()}

    assert command(copy.config, "--resume", copy.run).status == 0

    for name, path in ledgers(copy).items():
        assert path.read_bytes().startswith(paid[name])
        assert spent[name] <= read_journal(path).epsilon <= 4.0
    # The rounds were made again, and the budget had been used up by those that came before.
    assert copy.results()["status"] == "budget_exhausted"
    assert copy.results()["privacy"]["guarantee"]["epsilon"] >= max(spent.values())
    assert audit.main([str(copy.run)]) == 0
    capsys.readouterr()


def test_a_new_checkpoint_with_an_old_ledger_is_refused_before_anything_is_read(
    copy: RunPaths, ended: RunPaths, seal: None
) -> None:
    put("checkpoints", ended, copy)
    before = tree(copy.run)

    outcome = command(copy.config, "--resume", copy.run)

    assert_refused(outcome, str(copy.run / "ledger"), "cut or rolled back", "Put the true journal")
    assert changed(copy, before) <= {"train.log"}

    put("ledger", ended, copy)  # the control: with the ledger that belongs to it, it is not
    assert command(copy.config, "--resume", copy.run).status == 0


# Two processes ----------------------------------------------------------------------------------


@pytest.fixture
def in_use(tmp_path: Path) -> Iterator[tuple[RunPaths, Callable[[], None]]]:
    """A run in which another process is training, and what kills that process."""
    at = place(tmp_path, SHORT)

    def train_slowly(is_inside: Callable[[], None]) -> None:
        """The command, which stays for ever in the visit of s0 in round 1."""
        deliver = LocalEngine.deliver

        def deliver_and_stay(self: LocalEngine, calls: Any) -> NoReturn:
            list(deliver(self, calls))
            is_inside()
            time.sleep(600)
            raise AssertionError

        LocalEngine.deliver = deliver_and_stay  # type: ignore[method-assign]
        train.main([str(at.config), at.output, "--quiet", "run.workers=1"])

    with beside(train_slowly) as kill:
        yield at, kill


def test_of_two_processes_in_one_run_folder_the_second_fails_until_the_first_is_gone(
    in_use: tuple[RunPaths, Callable[[], None]], seal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, kill = in_use
    before = tree(at.run)

    for second in (
        [at.config, "--resume", at.run],
        [at.config, at.output, "run.overwrite=true"],
    ):
        assert_refused(command(*second), str(at.run), "another process")
    assert_refused(command(at.config, at.output), str(at.run), "exists and holds a run")
    # Nor does the account let anybody in who comes by another way.
    promise = read_journal(ledgers(at)["s0"]).plan
    with pytest.raises(LedgerError, match="another process is using this account"):
        Account.open(ledgers(at)["s0"], promise, resume=True)
    assert tree(at.run) == before

    # The locks are the operating system's: nobody has to remove one after a crash.
    kill()
    monkeypatch.undo()
    assert command(at.config, "--resume", at.run).status == 0
    assert len(read_journal(ledgers(at)["s0"]).events) == 2  # with the visit that was killed


# A disk that does not take the charge -----------------------------------------------------------


@contextlib.contextmanager
def failing_reserve(call: str, number: int) -> Iterator[None]:
    """Inside, the system fails when the line that pays for a visit is written, or made durable."""
    write, fsync = os.write, os.fsync
    reserved = False

    def writes(descriptor: int, data: bytes) -> int:
        nonlocal reserved
        if b'"type":"reserve"' in data:
            if call == "write":
                raise OSError(number, os.strerror(number))
            reserved = True
            if call == "full":  # for good: the file takes forty bytes more
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
def test_where_a_charge_cannot_be_written_the_run_ends_in_one_message_and_reads_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seal: None, call: str, number: int
) -> None:
    at = place(tmp_path, SHORT)

    with failing_reserve(call, number):
        outcome = command(at.config, at.output)

    assert_refused(
        outcome, str(ledgers(at)["s0"]), f"could not be written ({os.strerror(number)})",
        "Its rows were not read", "Free space or repair the disk, then resume",
    )  # fmt: skip
    assert outcome.err.count("\n") == 1
    # With the disk mended the run goes on, and never charges less than what may be on it.
    left = {name: len(read_journal(path).events) for name, path in ledgers(at).items()}
    assert left == {"s0": 0 if call == "write" else 1, "s1": 0}
    monkeypatch.undo()
    assert command(at.config, "--resume", at.run).status == 0
    assert len(read_journal(ledgers(at)["s0"]).events) == 2  # the budget's two, that one included


def test_the_check_of_a_failing_disk_notices_rows_that_are_read(tmp_path: Path, seal: None) -> None:
    # The control: without the failure the seal is broken.
    at = place(tmp_path, SHORT)
    with pytest.raises(AssertionError, match="a labelled row was read"):
        command(at.config, at.output)
