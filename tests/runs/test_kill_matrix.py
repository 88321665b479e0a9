"""Runs that are killed with SIGKILL at each of twelve points, in processes of their own.

Whatever the moment, the ledgers that are left charge at least what reading rows so often can
have released, and the run that goes on charges no less and draws other noise. Each process
writes down whose rows it reads, and the noise it draws, before either can be released.

One kill at each point is part of every test run; fifty, with the visit and with it the agent
varied, are marked slow. The controls break the promise and are found out.
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
from privssl.privacy.noisy_optimizer import SecureNoise
from privssl.runs import checkpoint, round_loop
from privssl.storage import atomic_files
from tests.support.private_fedssl import FULL_BATCHES

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL")

CONFIG = FULL_BATCHES  # the budget is never used up
ROUNDS = 2
VISITS = 2  # paid ones of a round: s0, then s1
STEPS = 2  # of a visit
WRITES = 4  # of a checkpoint: three files and the name of the latest
POINTS = (
    "before the reserve", "within the reserve", "after the reserve", "before the first gradient",
    "between two steps", "after the noise", "before the settle", "after the settle",
    "before the checkpoint", "within the checkpoint", "after the checkpoint", "before the results",
)  # fmt: skip
REPETITIONS = 50
IN_A_ROW = 5  # kills of one run before it may go on to its end


@dataclass(frozen=True)
class Kill:
    """Where a process dies.

    Args:
        point: one of POINTS.
        visit: of this process, from 1: odd ones are of s0, even ones of s1. A point of a
            checkpoint is that of this visit's round.
        write: which of a checkpoint's writes, 1 to 4, "within the checkpoint".
    """

    point: str
    visit: int = ROUNDS * VISITS  # s1 in round 2, so that a checkpoint of round 1 exists
    write: int = 2


# The life of a process ----------------------------------------------------------------------


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def nth(number: int, action: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """``real``, but the call of this number goes to ``action``."""
    calls = iter(range(1, 10**9))
    return lambda *given, **named: (action if next(calls) == number else real)(*given, **named)


def and_then_die(real: Callable[..., Any]) -> Callable[..., Any]:
    def act(*given: Any, **named: Any) -> None:
        real(*given, **named)
        die()

    return act


def plant(kill: Kill, *, resumed: bool) -> None:
    """Arrange for this process to die at a point of a visit, or soon after it."""

    def on_append(kind: str, action: Callable[..., Any]) -> None:
        real = journals.JournalFile.append
        special = nth(kill.visit, action, real)

        def append(self: Any, record: Any) -> Any:
            return (special if record["type"] == kind else real)(self, record)

        journals.JournalFile.append = append  # type: ignore[method-assign]

    def half_a_line(self: Any, record: Any) -> None:
        os.write(self._file, b'{"type": "res')
        die()

    append, save, write = (
        journals.JournalFile.append,
        checkpoint.save_snapshot,
        atomic_files.write_new,
    )
    gradients, noise = per_example_gradients.factored_gradients, SecureNoise.add_noise
    first_step = STEPS * (kill.visit - 1) + 1
    # A run that begins saves its state before round 1 as well.
    saves = (kill.visit + 1) // VISITS + (not resumed)
    match kill.point:
        case "before the reserve":
            on_append("reserve", die)
        case "within the reserve":
            on_append("reserve", half_a_line)
        case "after the reserve":
            on_append("reserve", and_then_die(append))
        case "before the first gradient":
            vars(dp_sgd)["factored_gradients"] = nth(first_step, die, gradients)
        case "between two steps":
            vars(dp_sgd)["factored_gradients"] = nth(first_step + 1, die, gradients)
        case "after the noise":
            dies = nth(first_step, and_then_die(noise), noise)
            SecureNoise.add_noise = dies  # type: ignore[method-assign]
        case "before the settle":
            on_append("settle", die)
        case "after the settle":
            on_append("settle", and_then_die(append))
        case "before the checkpoint":
            checkpoint.save_snapshot = nth(saves, die, save)
        case "within the checkpoint":
            number = WRITES * (saves - 1) + kill.write
            atomic_files.write_new = nth(number, and_then_die(write), write)
        case "after the checkpoint":
            checkpoint.save_snapshot = nth(saves, and_then_die(save), save)
        case "before the results":
            round_loop.RoundLoop.write_results = die  # type: ignore[method-assign]


def observe(path: Path) -> None:
    """Write down, before it can be released, whose rows are read and what noise is drawn."""
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
    """The bug that the ledger exists to prevent: rows are read first and paid for afterwards."""
    real = Account.spend

    @contextlib.contextmanager
    def spend(self: Account, event: Any, visit: str) -> Iterator[None]:
        yield
        with real(self, event, visit):
            pass

    Account.spend = spend  # type: ignore[method-assign]
    vars(step_runner)["ChargedRows"] = lambda rows, paid, *_, **__: (
        rows
    )  # which alone would refuse it


def refund_open_visits() -> None:
    """The bug of a resume that takes a visit without its end for one that never was."""
    real = read_journal

    def forgetful(path: Path) -> Journal:
        found = real(path)
        if found.unsettled:
            path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
            found = real(path)
        return found

    from accounting import ledger

    ledger.read_journal = forgetful


def seed_the_noise() -> None:
    """The bug of noise that is resumed with the run: each process draws the same."""
    generator = np.random.default_rng(0)

    def draws(count: int) -> np.ndarray:
        return generator.standard_normal(count)

    secure_noise.secure_normal = draws


BUGS = {"late": charge_late, "refund": refund_open_visits, "seeded": seed_the_noise}


def drive(folder: Path, path: Path, kill: Kill | None, bug: str) -> None:
    """The life of one process: begin a run or continue it, to the end or until it is killed."""
    if bug:
        BUGS[bug]()
    observe(folder / "observed.txt")
    chosen = config.load_config(path)
    snapshot = None
    if (folder / "checkpoints").exists():
        snapshot = checkpoint.load_snapshot(folder / "checkpoints", config.config_hash(chosen))
    if kill is not None:
        plant(kill, resumed=snapshot is not None)
    round_loop.train(prepare(chosen), folder, list, snapshot)


def bear(calls: Connection, warm_up: Path, path: Path) -> None:
    """In a process of its own: for each call make another one, which drives and may die.

    What torch does only once was done here, so that a life takes half the time.
    """
    torch.set_num_threads(1)
    # The second opinion on epsilon takes longer than the run, and is not at stake here.
    verify.available = lambda: False
    round_loop.train(prepare(config.load_config(path)), warm_up, list, None)
    while True:
        folder, kill, bug = calls.recv()
        child = os.fork()
        if child == 0:
            try:
                drive(folder, path, kill, bug)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        calls.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


Life = Callable[..., int | None]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    """``live(folder, kill, bug)``: ``drive`` in a process of its own; returns its exit code."""
    # A fork: a process that starts anew would take seconds to import what is here already.
    maker = multiprocessing.get_context("fork")
    place = tmp_path_factory.mktemp("killed")
    path, warm_up = place / "tiny.yaml", place / "warm_up"
    path.write_text(CONFIG)
    warm_up.mkdir()
    here, there = maker.Pipe()
    mother = maker.Process(target=bear, args=(there, warm_up, path), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork
        mother.start()
    there.close()  # so that its end is noticed here

    def live(folder: Path, kill: Kill | None = None, bug: str = "") -> int | None:
        folder.mkdir(exist_ok=True)
        here.send((folder, kill, bug))
        assert here.poll(600), "the process neither ended nor died"
        exit_code: int = here.recv()
        return exit_code

    yield live
    mother.kill()
    mother.join()


# What is left of a run ----------------------------------------------------------------------


def observed(folder: Path, kind: str) -> list[str]:
    lines = (folder / "observed.txt").read_text().splitlines()
    return [line.split()[1] for line in lines if line.startswith(kind)]


def ledgers(folder: Path) -> dict[str, Journal]:
    return {path.stem: read_journal(path) for path in (folder / "ledger").glob("*.jsonl")}


def charges(folder: Path) -> Counter[str]:
    """Visits that each agent's ledger charges."""
    return Counter({agent: len(journal.events) for agent, journal in ledgers(folder).items()})


def everything_is_paid_for(folder: Path) -> bool:
    """Whether the ledgers charge at least what reading rows that often can have released."""
    found = ledgers(folder)
    for agent, times in Counter(observed(folder, "read")).items():
        journal = found[agent]
        one = journal.plan.event
        charged = epsilon(journal.events, 1e-5) if journal.events else 0.0
        if journal.problems or charged < epsilon([one] * times, 1e-5):
            return False
    return True


def no_noise_is_drawn_twice(folder: Path) -> bool:
    """Whether a visit that is made again draws other noise."""
    noise = observed(folder, "noise")
    return len(set(noise)) == len(noise)


def assert_ended_well(folder: Path, before: Counter[str]) -> None:
    """The run came to its end, paid for everything, and charged no less than ``before``."""
    assert json.loads((folder / "results.json").read_text())["status"] == "finished"
    assert everything_is_paid_for(folder)
    after = charges(folder)
    # A run that is never killed charges each agent once in a round.
    assert all(after[agent] >= max(ROUNDS, before[agent]) for agent in ("s0", "s1"))
    assert no_noise_is_drawn_twice(folder)


def visits_left(folder: Path) -> int:
    """Visits after the latest checkpoint."""
    latest = folder / "checkpoints" / "latest"
    done = int(latest.read_text().strip().removeprefix("round_")) if latest.exists() else 0
    return VISITS * (ROUNDS - done)


# Twelve points ------------------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_was_killed_has_charged_for_all_it_may_have_released(
    point: str, live: Life, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert live(folder, Kill(point)) == -signal.SIGKILL
    assert everything_is_paid_for(folder)
    after_the_kill = charges(folder)
    assert live(folder) == 0
    assert_ended_well(folder, after_the_kill)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_fifty_kills_at_each_point_of_any_visit_leave_everything_paid_for(
    point: str, live: Life, tmp_path: Path
) -> None:
    # Up to five kills in a row, so that a run goes on from what other kills have left.
    killed: list[Kill] = []
    while len(killed) < REPETITIONS:
        folder, before = tmp_path / str(len(killed)), Counter[str]()
        for _ in range(min(IN_A_ROW, REPETITIONS - len(killed))):
            if not (left := visits_left(folder)):
                break
            number = len(killed)
            kill = Kill(point, visit=1 + number % left, write=1 + number % WRITES)
            killed.append(kill)
            assert live(folder, kill) == -signal.SIGKILL, killed
            assert everything_is_paid_for(folder), killed
            after = charges(folder)
            assert all(after[agent] >= before[agent] for agent in before), killed
            before = after
        assert live(folder) == 0, killed
        assert_ended_well(folder, before)
    assert {kill.visit % VISITS for kill in killed} == {0, 1}  # of both agents


# Controls -----------------------------------------------------------------------------------


def test_the_check_of_killed_runs_notices_a_charge_that_comes_too_late(
    live: Life, tmp_path: Path
) -> None:
    assert live(tmp_path / "run", Kill("after the noise"), "late") == -signal.SIGKILL
    assert not everything_is_paid_for(tmp_path / "run")


def test_the_check_of_killed_runs_notices_a_resume_that_refunds_open_visits(
    live: Life, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert live(folder, Kill("before the settle", visit=2)) == -signal.SIGKILL
    assert everything_is_paid_for(folder)
    assert live(folder, bug="refund") == 0
    assert not everything_is_paid_for(folder)


def test_the_check_of_noise_notices_a_resume_that_draws_it_again(
    live: Life, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert live(folder, Kill("after the noise", visit=1), "seeded") == -signal.SIGKILL
    assert live(folder, bug="seeded") == 0
    assert not no_noise_is_drawn_twice(folder)
