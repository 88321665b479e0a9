"""Runs killed with SIGKILL at each of twelve points.

At every point the ledgers must charge at least for all rows that were read. The resumed run must
not charge less, and must draw other noise. Each process records the rows it reads and the noise it
draws before either can be released.

One kill at each point is part of every test run; fifty, at varying visits and agents, are slow
tests. The controls plant a bug that the checks must notice.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accounting import journal as journals
from accounting import verify
from accounting.accountants import epsilon
from accounting.ledger import Account, Journal, read_journal
from privssl.algorithms.fedssl.algorithm import FedSSL
from privssl.core import step_runner
from privssl.experiment import config
from privssl.experiment.prepare import prepare
from privssl.privacy import dp_sgd, per_example_gradients, secure_noise
from privssl.privacy.noisy_optimizer import SecureNoiseOptimizer
from privssl.runs import checkpoint, round_loop
from privssl.storage import atomic_files
from tests.support.private_fedssl import FULL_BATCHES

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL")

CONFIG = FULL_BATCHES  # its budget is larger than the run needs
ROUNDS = 2
VISITS = 2  # charged visits per round: s0, then s1
STEPS = 2  # per visit
WRITES = 4  # per checkpoint: three files and the pointer to the latest
POINTS = (
    "before the reserve", "within the reserve", "after the reserve", "before the first gradient",
    "between two steps", "after the noise", "before the settle", "after the settle",
    "before the checkpoint", "within the checkpoint", "after the checkpoint", "before the results",
)  # fmt: skip
REPETITIONS = 50
IN_A_ROW = 5  # kills of one run before it is resumed to its end


@dataclass(frozen=True)
class Kill:
    """The point at which a process is killed.

    Args:
        point: one of POINTS.
        visit: of this process, from 1: odd ones are of s0, even ones of s1. A point of a
            checkpoint is that of this visit's round.
        write: which of a checkpoint's writes, 1 to 4, "within the checkpoint".
    """

    point: str
    visit: int = ROUNDS * VISITS  # s1 in round 2, so that a checkpoint of round 1 exists
    write: int = 2


# Processes that are killed -----------------------------------------------------------------


def kill_this_process(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(
    number: int, action: Callable[..., Any], real: Callable[..., Any]
) -> Callable[..., Any]:
    """``real``, except that call number ``number`` goes to ``action``."""
    calls = iter(range(1, 10**9))
    return lambda *given, **named: (action if next(calls) == number else real)(*given, **named)


def then_kill(real: Callable[..., Any]) -> Callable[..., Any]:
    def act(*given: Any, **named: Any) -> None:
        real(*given, **named)
        kill_this_process()

    return act


def install_kill(kill: Kill, *, resumed: bool) -> None:
    """Make this process kill itself at a point of a visit, or soon after it."""

    def at_journal_line(kind: str, action: Callable[..., Any]) -> None:
        real = journals.JournalFile.append
        special = on_call(kill.visit, action, real)

        def append(self: Any, record: Any) -> Any:
            return (special if record["type"] == kind else real)(self, record)

        journals.JournalFile.append = append  # type: ignore[method-assign]

    def write_half_a_line(self: Any, record: Any) -> None:
        os.write(self._file, b'{"type": "res')
        kill_this_process()

    append, save, write = (
        journals.JournalFile.append,
        checkpoint.save_snapshot,
        atomic_files.write_new,
    )
    gradients, noise = per_example_gradients.factored_gradients, SecureNoiseOptimizer.add_noise
    first_step = STEPS * (kill.visit - 1) + 1
    # A new run also saves a checkpoint before round 1.
    saves = (kill.visit + 1) // VISITS + (not resumed)
    match kill.point:
        case "before the reserve":
            at_journal_line("reserve", kill_this_process)
        case "within the reserve":
            at_journal_line("reserve", write_half_a_line)
        case "after the reserve":
            at_journal_line("reserve", then_kill(append))
        case "before the first gradient":
            vars(dp_sgd)["factored_gradients"] = on_call(first_step, kill_this_process, gradients)
        case "between two steps":
            vars(dp_sgd)["factored_gradients"] = on_call(
                first_step + 1, kill_this_process, gradients
            )
        case "after the noise":
            dies = on_call(first_step, then_kill(noise), noise)
            SecureNoiseOptimizer.add_noise = dies  # type: ignore[method-assign]
        case "before the settle":
            at_journal_line("settle", kill_this_process)
        case "after the settle":
            at_journal_line("settle", then_kill(append))
        case "before the checkpoint":
            checkpoint.save_snapshot = on_call(saves, kill_this_process, save)
        case "within the checkpoint":
            number = WRITES * (saves - 1) + kill.write
            atomic_files.write_new = on_call(number, then_kill(write), write)
        case "after the checkpoint":
            checkpoint.save_snapshot = on_call(saves, then_kill(save), save)
        case "before the results":
            round_loop.RoundLoop.write_results = kill_this_process  # type: ignore[method-assign]


def record_reads_and_noise(path: Path) -> None:
    """Record reads of rows and drawn noise in a file, before either can be released."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    read, normal = FedSSL._train_privately, secure_noise.secure_normal

    def reads(self: Any, agent: Any, *given: Any) -> Any:
        os.write(log, f"read {agent.id}\n".encode())
        return read(self, agent, *given)

    def draws(count: int) -> np.ndarray:
        numbers = normal(count)
        os.write(log, f"noise {numbers[0].hex()}\n".encode())
        return numbers

    FedSSL._train_privately = reads  # type: ignore[method-assign, assignment]
    secure_noise.secure_normal = draws


def charge_late() -> None:
    """Plant a bug: rows are read first and charged afterwards."""
    real = Account.spend

    @contextlib.contextmanager
    def spend(self: Account, event: Any, visit: str) -> Iterator[None]:
        yield
        with real(self, event, visit):
            pass

    Account.spend = spend  # type: ignore[method-assign]
    vars(step_runner)["ChargedRows"] = lambda rows, paid, *_, **__: (
        rows
    )  # which would refuse the read


def refund_open_visits() -> None:
    """Plant a bug: a resume deletes the charge of an unfinished visit."""
    real = read_journal

    def read_and_refund(path: Path) -> Journal:
        found = real(path)
        if found.unsettled:
            path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
            found = real(path)
        return found

    from accounting import ledger

    ledger.read_journal = read_and_refund


def seed_the_noise() -> None:
    """Plant a bug: every process draws the same noise."""
    generator = np.random.default_rng(0)

    def draws(count: int) -> np.ndarray:
        return generator.standard_normal(count)

    secure_noise.secure_normal = draws


BUGS = {"late": charge_late, "refund": refund_open_visits, "seeded": seed_the_noise}


def run_or_resume(folder: Path, path: Path, kill: Kill | None, bug: str) -> None:
    """Start or resume a run, to its end or until it is killed."""
    if bug:
        BUGS[bug]()
    record_reads_and_noise(folder / "observed.txt")
    chosen = config.load_config(path)
    snapshot = None
    if (folder / "checkpoints").exists():
        snapshot = checkpoint.load_snapshot(folder / "checkpoints", config.config_hash(chosen))
    if kill is not None:
        install_kill(kill, resumed=snapshot is not None)
    round_loop.train(prepare(chosen), folder, list, snapshot)


def fork_server(calls: Connection, warm_up: Path, path: Path) -> None:
    """Fork a process for each received call, which runs and may be killed.

    This process has trained a run already, so the initialisation of torch is not repeated.
    """
    torch.set_num_threads(1)
    # The second accounting library takes longer than the run, and is not tested here.
    verify.available = lambda: False
    round_loop.train(prepare(config.load_config(path)), warm_up, list, None)
    while True:
        folder, kill, bug = calls.recv()
        child = os.fork()
        if child == 0:
            try:
                run_or_resume(folder, path, kill, bug)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        calls.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


RunProcess = Callable[..., int | None]


@pytest.fixture(scope="module")
def run_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunProcess]:
    """A function that calls ``run_or_resume`` in a new process and returns its exit code."""
    # A fork, because a new process would take seconds for imports.
    context = multiprocessing.get_context("fork")
    folder_of_server = tmp_path_factory.mktemp("killed")
    path, warm_up = folder_of_server / "tiny.yaml", folder_of_server / "warm_up"
    path.write_text(CONFIG)
    warm_up.mkdir()
    connection, server_end = context.Pipe()
    server = context.Process(target=fork_server, args=(server_end, warm_up, path), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork
        server.start()
    server_end.close()  # so that this process notices its end

    def run_process(folder: Path, kill: Kill | None = None, bug: str = "") -> int | None:
        folder.mkdir(exist_ok=True)
        connection.send((folder, kill, bug))
        assert connection.poll(600), "the process neither ended nor died"
        exit_code: int = connection.recv()
        return exit_code

    yield run_process
    server.kill()
    server.join()


# State of a killed run ----------------------------------------------------------------------


def recorded(folder: Path, kind: str) -> list[str]:
    lines = (folder / "observed.txt").read_text().splitlines()
    return [line.split()[1] for line in lines if line.startswith(kind)]


def ledgers(folder: Path) -> dict[str, Journal]:
    return {path.stem: read_journal(path) for path in (folder / "ledger").glob("*.jsonl")}


def charges(folder: Path) -> Counter[str]:
    """The number of charged visits per agent."""
    return Counter({agent: len(journal.events) for agent, journal in ledgers(folder).items()})


def all_reads_are_charged(folder: Path) -> bool:
    """Whether the ledgers charge at least for all recorded reads of rows."""
    found = ledgers(folder)
    for agent, times in Counter(recorded(folder, "read")).items():
        journal = found[agent]
        one = journal.plan.event
        charged = epsilon(journal.events, 1e-5) if journal.events else 0.0
        if journal.problems or charged < epsilon([one] * times, 1e-5):
            return False
    return True


def all_noise_differs(folder: Path) -> bool:
    """Whether repeated visits drew other noise."""
    noise = recorded(folder, "noise")
    return len(set(noise)) == len(noise)


def assert_finished(folder: Path, before: Counter[str]) -> None:
    """Assert that the run finished, charged all reads, and charged no less than ``before``."""
    assert json.loads((folder / "results.json").read_text())["status"] == "finished"
    assert all_reads_are_charged(folder)
    after = charges(folder)
    # A run without kills charges each agent once per round.
    assert all(after[agent] >= max(ROUNDS, before[agent]) for agent in ("s0", "s1"))
    assert all_noise_differs(folder)


def visits_left(folder: Path) -> int:
    """The number of visits after the latest checkpoint."""
    latest = folder / "checkpoints" / "latest"
    done = int(latest.read_text().strip().removeprefix("round_")) if latest.exists() else 0
    return VISITS * (ROUNDS - done)


# Twelve points ------------------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_run_has_charged_for_everything_it_may_have_released(
    point: str, run_process: RunProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert run_process(folder, Kill(point)) == -signal.SIGKILL
    assert all_reads_are_charged(folder)
    after_the_kill = charges(folder)
    assert run_process(folder) == 0
    assert_finished(folder, after_the_kill)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_fifty_kills_at_each_point_leave_all_reads_charged(
    point: str, run_process: RunProcess, tmp_path: Path
) -> None:
    # Up to five kills in a row, so a run is resumed from the state after other kills.
    killed: list[Kill] = []
    while len(killed) < REPETITIONS:
        folder, before = tmp_path / str(len(killed)), Counter[str]()
        for _ in range(min(IN_A_ROW, REPETITIONS - len(killed))):
            if not (left := visits_left(folder)):
                break
            number = len(killed)
            kill = Kill(point, visit=1 + number % left, write=1 + number % WRITES)
            killed.append(kill)
            assert run_process(folder, kill) == -signal.SIGKILL, killed
            assert all_reads_are_charged(folder), killed
            after = charges(folder)
            assert all(after[agent] >= before[agent] for agent in before), killed
            before = after
        assert run_process(folder) == 0, killed
        assert_finished(folder, before)
    assert {kill.visit % VISITS for kill in killed} == {0, 1}  # visits of both agents


# Controls -----------------------------------------------------------------------------------


def test_control_the_kill_test_notices_a_charge_after_the_read(
    run_process: RunProcess, tmp_path: Path
) -> None:
    assert run_process(tmp_path / "run", Kill("after the noise"), "late") == -signal.SIGKILL
    assert not all_reads_are_charged(tmp_path / "run")


def test_control_the_kill_test_notices_a_resume_that_refunds_open_visits(
    run_process: RunProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert run_process(folder, Kill("before the settle", visit=2)) == -signal.SIGKILL
    assert all_reads_are_charged(folder)
    assert run_process(folder, bug="refund") == 0
    assert not all_reads_are_charged(folder)


def test_control_the_noise_check_notices_a_resume_with_the_same_noise(
    run_process: RunProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert run_process(folder, Kill("after the noise", visit=1), "seeded") == -signal.SIGKILL
    assert run_process(folder, bug="seeded") == 0
    assert not all_noise_differs(folder)
