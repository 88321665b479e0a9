"""Worker processes: results of one process, and no process, file or lock left behind.

The steps report the process that they ran in, or end it. Each property has a control.
"""

import contextlib
import errno
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import privssl.train as train
from privssl.algorithms.fedssl.algorithm import FedSSL
from privssl.core import messages
from privssl.core.agents import Agent, UnlabelledRows
from privssl.core.engine import Call
from privssl.core.messages import Message, Reply
from privssl.engines import local as local_engine
from privssl.engines.local import LocalEngine
from privssl.engines.process_pool import WorkerEngine, resolve_worker_count, unsupported_reason
from privssl.engines.worker_process import SharedBuffer, WorkerError
from privssl.errors import ConfigError, DataError
from privssl.experiment import config, prepare
from privssl.runs import engine_factory
from privssl.storage.tensor_files import PackedTensors
from tests.support.command_line import assert_refused
from tests.support.forked_command import ForkedCommand, wait_for
from tests.support.resume import PRIVATE, RunPaths, command, place, same_results
from tests.support.toy_worlds import unopened_account
from tests.support.transports import fork, open_files

CPU = torch.device("cpu")
HERE = os.getpid()

pytestmark = pytest.mark.skipif(
    unsupported_reason(CPU) is not None,
    reason=f"no worker processes here: {unsupported_reason(CPU)}",
)


@dataclass(frozen=True)
class Payload(Message):
    """The content of every request and of every reply."""

    pid: int = 0
    text: str = ""
    number: float = 0.0
    t: Tensor = field(default_factory=lambda: torch.zeros(3))


class Meter:
    """A meter with true labels that records its observations in order."""

    def __init__(self) -> None:
        self.true_labels = torch.arange(4)
        self.observed: list[list[int]] = []

    def observe(self, ids: Tensor, labels: Tensor, kept: Tensor) -> None:
        self.observed.append([*ids.tolist(), *labels.tolist(), *kept.int().tolist()])


class NotRebuildableError(Exception):
    """An exception that its ``args`` cannot rebuild."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class UnprintableError(Exception):
    """An exception whose ``str`` fails."""

    def __str__(self) -> str:
        raise RuntimeError


class Steps:
    """A minimal algorithm. Steps that need a file get its path as ``message.text``."""

    def report_process(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        return Payload(os.getpid(), agent.id, torch.get_num_threads())

    def draw(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        ctx.weight = len(agent.unlabelled)
        ctx.log_metric("loss", message.number / 3)
        for batch in (0, 1):
            seen = agent.unlabelled.ids[:2] + batch
            ctx.pseudo_labels(seen, torch.eye(4)[:2], torch.tensor([True, batch == 1]))
        return Payload(text=agent.id, t=torch.rand(3, generator=ctx.rng("z")) + torch.rand(3))

    def count(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        seen = agent.memory.get("n", torch.zeros(())) + 1
        # Keys out of alphabetical order, two equal values, and one that is not finite.
        agent.memory = {"z": torch.tensor(float("inf")), "n": seen, "a": seen}
        return Payload(os.getpid(), " ".join(agent.memory), float(seen))

    def report_true_labels(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        """Report whether the step can read true labels."""
        return Payload(os.getpid(), str(hasattr(ctx.meter, "true_labels")))

    def record_turn(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        """Append the agent's id to a file. q0 waits until all four have done so."""
        turns, waited = Path(message.text), time.monotonic()
        with turns.open("a") as file:
            file.write(agent.id + "\n")
        while agent.id == "q0" and len(turns.read_text().split()) < 4:
            assert time.monotonic() - waited < 300, "nobody else has a turn"
            time.sleep(0.01)
        return Payload(text=agent.id)

    def fail(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        """Fail at q0, late, and at q1, at once."""
        if agent.id == "q0":
            time.sleep(0.2)
            raise DataError("q0 has no such file")
        if agent.id == "q1":
            raise KeyError("of q1")
        return Payload(text=agent.id)

    def raise_not_rebuildable(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        raise NotRebuildableError(1, 2)

    def exit(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        raise SystemExit(3)

    def die_once(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        if agent.id == "q1" and not os.path.exists(message.text):
            Path(message.text).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.draw(agent, message, ctx)

    def die(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        if agent.id == "q1":
            os.kill(os.getpid(), signal.SIGKILL)
        return Payload(text=agent.id)

    def end_process(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        os.kill(os.getpid(), int(message.number))
        return Payload()

    def send_unserialisable_weight(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        ctx.weight = np.int64(3)
        return Payload()

    def raise_unprintable(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        raise UnprintableError

    def sleep(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        Path(message.text, f"{agent.id}-{os.getpid()}").touch()
        time.sleep(600)
        return Payload()

    def fail_or_sleep(self, agent: Agent, message: Payload, ctx: Any) -> Payload:
        """Fail at q1; at q0, work longer than the test."""
        if agent.id == "q1":
            raise KeyError("of q1")
        time.sleep(30)
        return Payload(text="late")


STEPS: Any = Steps()


def agents(count: int = 3, *, rows: Sequence[int] = (), **own: Any) -> list[Agent]:
    """Agents q0, q1 and so on, with 4 rows each by default."""
    sizes = rows or [4] * count
    held = [
        UnlabelledRows(torch.zeros(n, 1, 8, 8), torch.arange(n) + 100 * i)
        for i, n in enumerate(sizes)
    ]
    return [Agent(id=f"q{i}", held_unlabelled=x, **own) for i, x in enumerate(held)]


@contextlib.contextmanager
def worker_engine(
    parties: Sequence[Agent] = (), workers: int = 2, kind: type[WorkerEngine] = WorkerEngine,
    **how: Any,
) -> Iterator[WorkerEngine]:  # fmt: skip
    made = kind(parties or agents(), algorithm=STEPS, workers=workers, seed=3, device=CPU, **how)
    with contextlib.closing(made):
        yield made


def local_reference(parties: Sequence[Agent] = (), **how: Any) -> LocalEngine:
    return LocalEngine(parties or agents(), seed=3, device=CPU, **how)


def run_step(
    pool: LocalEngine, step: Any, message: Message | None = None, whom: str = "", number: int = 1
) -> list[Reply[Any]]:
    """All agents, or those named, do one step with the same message."""
    roster = {agent.id: agent for agent in pool.roster()}
    names, what = whom.split() or list(roster), message or Payload()
    return list(pool.deliver([Call(roster[name], step, what, number) for name in names]))


def contents(replies: Sequence[Reply[Any]]) -> list[dict[str, Any]]:
    return [
        {name: v.tolist() if isinstance(v, Tensor) else v for name, v in vars(r.content).items()}
        | {"weight": r.weight, "notes": dict(r.metrics), "sender": r.sender}
        for r in replies
    ]  # fmt: skip


def processes_of(pool: WorkerEngine) -> list[int]:
    return [worker.process for worker in pool._workers if worker is not None]


def all_ended(pool: WorkerEngine) -> bool:
    """Whether no worker has its pipe open; a zombie may have it open for a moment."""
    return all(worker.pipe.poll() for worker in pool._workers if worker is not None)


def has_ended(process: int) -> bool:
    """Whether a process has ended; it may still be a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def becomes_true(true: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Wait until a condition is true; whether it became true."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


# Which process runs a visit -----------------------------------------------------------------


def test_parallel_visits_run_in_workers_and_a_single_visit_runs_in_this_process() -> None:
    with worker_engine() as pool:
        everywhere = {reply.payload.pid for reply in run_step(pool, STEPS.report_process)}
        alone = {reply.payload.pid for reply in run_step(pool, STEPS.report_process, whom="q1")}
        assert everywhere <= set(processes_of(pool)) and HERE not in everywhere
    assert alone == {HERE}


def test_an_agent_with_an_account_is_visited_in_this_process_and_reports_no_metrics() -> None:
    unlabelled = agents()[0].unlabelled
    parties = [*agents(2), Agent(id="s0", held_unlabelled=unlabelled, account=unopened_account())]
    meter = Meter()
    with worker_engine(parties, meter=meter) as pool:
        where = {
            reply.sender.id: reply.payload.pid for reply in run_step(pool, STEPS.report_process)
        }
        metrics = {reply.sender.id: dict(reply.metrics) for reply in run_step(pool, STEPS.draw)}
    assert where["s0"] == HERE
    assert HERE not in (
        where["q0"],
        where["q1"],
    )  # the control: agents without an account are visited in workers
    assert metrics == {"q0": {"loss": 0.0}, "q1": {"loss": 0.0}, "s0": {}}
    assert len(meter.observed) == 2 * 2  # two batches of q0 and q1 each, none of s0


def test_a_function_that_is_no_step_of_the_algorithm_runs_in_this_process() -> None:
    def where(agent: Agent, message: Payload, ctx: Any) -> Payload:
        return Payload(os.getpid())

    with worker_engine() as pool:
        assert {reply.payload.pid for reply in run_step(pool, where)} == {HERE}


def test_a_closed_engine_runs_visits_in_this_process() -> None:
    with worker_engine() as pool:
        pass
    assert {reply.payload.pid for reply in run_step(pool, STEPS.report_process)} == {HERE}


def test_a_worker_has_one_thread_even_if_this_process_has_two() -> None:
    with worker_engine() as pool:
        torch.set_num_threads(
            2
        )  # the first workers were forked earlier, their replacements are forked after this
        try:
            for process in processes_of(pool):
                os.kill(process, signal.SIGKILL)
            assert {reply.payload.number for reply in run_step(pool, STEPS.report_process)} == {1.0}
            assert (
                run_step(pool, STEPS.report_process, whom="q0")[0].payload.number == 2.0
            )  # the control
        finally:
            torch.set_num_threads(1)


@pytest.fixture
def two_cores() -> Iterator[tuple[int, int]]:
    """Restrict this process and its children to two cores for the test."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core, and workers cannot be spread")
    one, other, *_ = sorted(before)
    os.sched_setaffinity(0, {one, other})
    yield one, other
    os.sched_setaffinity(0, before)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("workers", "places"),
    [(1, ["either"]), (2, ["one", "other"]), (3, ["either"] * 3), (4, ["one", "other"] * 2)],
)
def test_workers_are_pinned_to_cores_only_if_every_core_gets_equally_many(
    workers: int, places: list[str], two_cores: tuple[int, int]
) -> None:
    one, other = two_cores
    kept = {"one": {one}, "other": {other}, "either": {one, other}}
    meant = [kept[place] for place in places]
    with worker_engine(agents(workers + 1), workers=workers) as pool:
        for _ in range(2):  # the second time one worker is a replacement, perhaps without a visit
            run_step(pool, STEPS.report_process)
            assert becomes_true(
                lambda: list(map(os.sched_getaffinity, processes_of(pool))) == meant
            )
            os.kill(processes_of(pool)[-1], signal.SIGKILL)
    assert os.sched_getaffinity(0) == {one, other}  # of this process


def test_a_refused_core_affinity_ends_no_worker(
    two_cores: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(process: int, cores: set[int]) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    with worker_engine() as pool:
        run_step(pool, STEPS.report_process)
        assert [os.sched_getaffinity(p) for p in processes_of(pool)] == [set(two_cores)] * 2


def test_agents_with_more_rows_start_first_and_ties_keep_the_order_of_calls(tmp_path: Path) -> None:
    with worker_engine(agents(rows=[2, 9, 4, 9]), workers=1) as pool:
        replies = run_step(
            pool, STEPS.record_turn, Payload(text=str(tmp_path / "turns")), "q0 q2 q3 q1"
        )
    assert (tmp_path / "turns").read_text().split() == ["q3", "q1", "q2", "q0"]
    assert [reply.sender.id for reply in replies] == ["q0", "q2", "q3", "q1"]


def test_replies_come_in_the_order_of_calls_and_not_of_completion(tmp_path: Path) -> None:
    with worker_engine(agents(4)) as pool:
        replies = run_step(pool, STEPS.record_turn, Payload(text=str(tmp_path / "turns")))
    assert [reply.payload.text for reply in replies] == ["q0", "q1", "q2", "q3"]
    # The control: q0's worker was busy until the other worker had done all other visits.
    turns = (tmp_path / "turns").read_text().split()
    assert [turn for turn in turns if turn != "q0"] == ["q1", "q2", "q3"]


# Equal to one process -----------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_replies_metrics_weights_and_meter_observations_equal_those_of_one_process(
    workers: int,
) -> None:
    expected_meter, meter = Meter(), Meter()
    sizes = [4, 7, 5, 7]
    with worker_engine(agents(rows=sizes), workers, meter=meter) as pool:
        for number in (1, 2):
            reference = local_reference(agents(rows=sizes), meter=expected_meter)
            request = Payload(number=float(number))
            expected = contents(run_step(reference, STEPS.draw, request, number=number))
            assert contents(run_step(pool, STEPS.draw, request, number=number)) == expected
            assert expected[1]["weight"] == 7 and expected[1]["notes"] == {"loss": number / 3}
    assert meter.observed == expected_meter.observed and len(expected_meter.observed) == 2 * 4 * 2


def test_steps_cannot_read_true_labels_in_this_process_or_in_a_worker() -> None:
    with worker_engine(meter=Meter()) as pool:
        assert {reply.payload.text for reply in run_step(pool, STEPS.report_true_labels)} == {
            "False"
        }
        assert (
            run_step(pool, STEPS.report_true_labels, whom="q0")[0].payload.text == "False"
        )  # in this process
    assert hasattr(Meter(), "true_labels")  # the control


def test_an_agent_keeps_its_memory_in_every_worker() -> None:
    with worker_engine(agents(rows=[4, 4, 8])) as pool:
        [first, _] = run_step(pool, STEPS.count, whom="q0 q1")
        before = pool.memories()
        [_, second] = run_step(
            pool, STEPS.count, whom="q2 q0"
        )  # q2 has more rows, so it starts first
        [third] = run_step(pool, STEPS.count, whom="q0")
        assert [r.payload.number for r in (first, second, third)] == [1.0, 2.0, 3.0]
        assert len({first.payload.pid, second.payload.pid, HERE}) == 3
        assert {r.payload.text for r in (first, second)} == {"z n a"}
        assert list(pool.memories()["q0"]) == ["z", "n", "a"]
        assert float(before["q0"]["n"]) == 1.0  # saved memories do not change
        assert float(before["q0"]["z"]) == float("inf")
        assert before["q2"] == {}


def test_a_step_that_sets_no_memory_keeps_the_same_mapping_object() -> None:
    with worker_engine() as pool:
        run_step(pool, STEPS.count)
        before = pool.memories()["q0"]
        run_step(pool, STEPS.report_process)
        assert pool.memories()["q0"] is before
        run_step(pool, STEPS.count)
        assert pool.memories()["q0"] is not before  # the control


# Errors -------------------------------------------------------------------------------------


def test_a_workers_error_keeps_its_type_and_the_first_in_call_order_is_raised() -> None:
    with worker_engine() as pool:
        with pytest.raises(DataError) as error:  # although q1 failed earlier in time
            run_step(pool, STEPS.fail)
        assert str(error.value) == "q0 has no such file"
        assert "in fail" in str(error.value.__cause__)  # the worker's traceback
        with pytest.raises(KeyError) as other:
            run_step(pool, STEPS.fail, whom="q2 q1 q0")
        assert other.value.args == ("of q1",)
        assert [reply.payload.text for reply in run_step(pool, STEPS.fail, whom="q2")] == ["q2"]


@pytest.mark.parametrize(
    ("step", "text"),
    [(STEPS.raise_not_rebuildable, "NotRebuildableError: 1 and 2"), (STEPS.exit, "SystemExit: 3")],
)
def test_an_error_that_cannot_be_rebuilt_becomes_a_runtime_error_with_name_and_text(
    step: Any, text: str
) -> None:
    with worker_engine() as pool, pytest.raises(RuntimeError) as error:
        run_step(pool, step)
    assert str(error.value) == text


def test_a_late_reply_is_not_returned_by_the_next_delivery() -> None:
    with worker_engine(agents(2)) as pool:
        before = processes_of(pool)
        with pytest.raises(KeyError):  # q0 is still working
            run_step(pool, STEPS.fail_or_sleep, whom="q1 q0")
        replies = run_step(pool, STEPS.report_process)
        assert [reply.payload.text for reply in replies] == ["q0", "q1"]
        assert len(set(before) & set(processes_of(pool))) == 1  # the other one was replaced


def test_ctrl_c_ends_the_visits_of_a_delivery_and_the_next_delivery_works(tmp_path: Path) -> None:
    def press_when_both_are_at_it(*_: object) -> None:
        if len(list(tmp_path.iterdir())) == 2:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.raise_signal(signal.SIGINT)

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with worker_engine(agents(2)) as pool:
            before = processes_of(pool)
            signal.signal(signal.SIGALRM, press_when_both_are_at_it)
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
                run_step(pool, STEPS.sleep, Payload(text=str(tmp_path)))
            assert all(map(has_ended, before))
            assert [reply.payload.text for reply in run_step(pool, STEPS.report_process)] == [
                "q0",
                "q1",
            ]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, former)


# Workers that die ---------------------------------------------------------------------------


def test_a_killed_worker_is_replaced_and_its_visit_repeated_with_the_same_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected_meter, meter, request = Meter(), Meter(), Payload(text=str(tmp_path / "died"))
    with worker_engine(meter=meter) as pool:
        before = processes_of(pool)
        replies = contents(run_step(pool, STEPS.die_once, request))
        after = processes_of(pool)
    assert (tmp_path / "died").exists() and len(set(before) & set(after)) == 1
    # The marker exists, so no process dies here.
    assert replies == contents(
        run_step(local_reference(meter=expected_meter), STEPS.die_once, request)
    )
    assert meter.observed == expected_meter.observed
    [record] = caplog.records
    assert record.getMessage() == (
        "A worker process was ended by SIGKILL during die_once of q1, which is run again."
    )


@pytest.mark.slow
def test_workers_killed_between_visits_are_replaced_with_a_warning_that_names_no_visit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parties = agents(6)
    with worker_engine(parties, workers=4) as pool:
        for process in processes_of(pool):
            os.kill(process, signal.SIGKILL)
        assert becomes_true(lambda: all_ended(pool))
        replies = run_step(pool, STEPS.report_process)
    assert [reply.payload.text for reply in replies] == [agent.id for agent in parties]
    expected_message = "A worker process was ended by SIGKILL between steps."
    assert [record.getMessage() for record in caplog.records] == [expected_message] * 4


@pytest.mark.ci
def test_workers_that_end_before_their_first_visit_end_the_delivery() -> None:
    class EndingWorkers(WorkerEngine):
        def _serve_calls(self, place: int, pipe: Any, buffer: SharedBuffer) -> None:
            return

        def _assign_calls(self, now: Any) -> None:
            assert becomes_true(lambda: all_ended(self))
            super()._assign_calls(now)

    with worker_engine(kind=EndingWorkers) as pool, pytest.raises(WorkerError) as error:
        run_step(pool, STEPS.report_process)
    assert str(error.value) == (
        "6 worker processes ended before they had a call: the last ended with status 0. "
        "Set run.workers=1, so that all agents work in one process"
    )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("number", "name"), [(signal.SIGUSR1, "SIGUSR1"), (40, "signal 40")])
def test_the_error_names_the_signal_that_ended_a_worker(
    number: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with worker_engine() as pool, pytest.raises(WorkerError) as error:
        run_step(pool, STEPS.end_process, Payload(number=number))
    assert str(error.value) == (
        "2 worker processes in turn did not survive end_process of q0: the last was ended by "
        f"{name}. Set run.workers=1, so that all agents work in one process"
    )
    assert f"was ended by {name} during end_process of q" in caplog.records[0].getMessage()


def test_a_reply_that_is_not_json_is_an_error_of_the_step_and_ends_no_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with worker_engine() as pool:
        with pytest.raises(TypeError, match="int64 is not JSON serializable"):
            run_step(pool, STEPS.send_unserialisable_weight)
        with pytest.raises(RuntimeError, match="UnprintableError"):
            run_step(pool, STEPS.raise_unprintable)
    assert not caplog.records


def test_a_worker_maps_its_own_buffer_and_the_shared_buffer() -> None:
    def mapped(process: int) -> int:
        return Path(f"/proc/{process}/maps").read_text().count("memfd:privssl")

    with worker_engine() as pool:
        run_step(pool, STEPS.report_process)
        first, _ = processes_of(pool)
        assert mapped(os.getpid()) == 3  # one buffer per worker and the shared one
        os.kill(
            first, signal.SIGKILL
        )  # its replacement is forked from a process that has mapped all buffers
        for _ in range(2):
            run_step(pool, STEPS.report_process)
        assert [mapped(process) for process in processes_of(pool)] == [2, 2]


def test_a_visit_that_kills_two_workers_is_an_error_with_advice() -> None:
    with worker_engine() as pool:
        with pytest.raises(WorkerError) as error:
            run_step(pool, STEPS.die)
        assert str(error.value) == (
            "2 worker processes in turn did not survive die of q1: the last was ended by SIGKILL. "
            "SIGKILL is how the system takes memory back. Set run.workers=1, so that all agents "
            "work in one process, or give the run more memory"
        )
        assert [reply.payload.text for reply in run_step(pool, STEPS.report_process)] == [
            "q0",
            "q1",
            "q2",
        ]


def test_an_engine_that_cannot_fork_raises_worker_error_and_leaves_no_file_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)
    before = open_files()
    expected_message = r"no worker process: Resource temp.*run\.workers=1"
    with pytest.raises(WorkerError, match=expected_message), worker_engine():
        pass
    assert open_files() == before


# Nothing is left behind ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_closed_engine_leaves_no_process_and_no_open_file() -> None:
    before = open_files()
    with worker_engine() as pool:
        run_step(pool, STEPS.count)
        workers = processes_of(pool)
        assert not any(map(has_ended, workers))
        assert open_files() != before
        pool.close()
        for worker in workers:
            with pytest.raises(ProcessLookupError):  # not even a zombie
                os.kill(worker, 0)
    assert open_files() == before  # also after a second close


def test_a_worker_has_none_of_this_processs_files_open(tmp_path: Path) -> None:
    def held_by(process: int | str) -> list[str]:
        folder, held = Path(f"/proc/{process}/fd"), []
        for name in os.listdir(folder):
            with contextlib.suppress(
                FileNotFoundError
            ):  # closed in the meantime: a worker closes inherited files at its start
                held += [os.readlink(folder / name)] if int(name) > 2 else []
        return held

    def settled(process: int) -> bool:  # pipe to the engine, two buffers
        return len(held_by(process)) == 3

    with open(tmp_path / "journal", "w"), worker_engine() as pool:
        assert str(tmp_path / "journal") in [os.readlink(f"/proc/self/fd/{n}") for n in open_now()]
        for process in processes_of(pool):
            assert becomes_true(lambda process=process: settled(process)), held_by(process)  # type: ignore[misc]
            assert str(tmp_path / "journal") not in held_by(process)


def open_now() -> list[str]:
    """File descriptors of this process, without that of the listing."""
    return [n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]


def test_workers_end_when_their_parent_process_is_killed(tmp_path: Path) -> None:
    child = fork()
    if child == 0:
        try:
            with worker_engine(agents(2)) as pool:
                run_step(pool, STEPS.sleep, Payload(text=str(tmp_path)))
        finally:
            os._exit(1)
    assert becomes_true(lambda: len(list(tmp_path.iterdir())) == 2)
    workers = [int(path.name.partition("-")[2]) for path in tmp_path.iterdir()]
    assert not any(map(has_ended, workers))  # each would sleep for ten minutes

    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

    assert becomes_true(lambda: all(map(has_ended, workers)))


# Replies one by one -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda parties: contextlib.closing(local_reference(parties)), worker_engine]
)
def test_replies_taken_one_by_one_leave_at_most_two_in_memory(make: Any) -> None:
    parties = agents(12)
    with make(parties) as pool:
        calls = [Call(agent, STEPS.draw, Payload(), 1) for agent in pool.roster()]
        seen, most = list[weakref.ref[Tensor]](), 0
        for reply in pool.deliver(calls):
            seen.append(weakref.ref(reply.payload.t))
            most = max(most, sum(one() is not None for one in seen))
        assert len(seen) == 12
        assert most <= 2
        kept = list(pool.deliver(calls))  # the control
        seen = [weakref.ref(reply.payload.t) for reply in kept]
        assert sum(one() is not None for one in seen) == 12


@pytest.mark.slow
def test_an_unfinished_delivery_does_not_change_the_next_one() -> None:
    parties = agents(6)
    with worker_engine(parties) as pool:
        for _ in range(3):
            first = next(
                iter(pool.deliver([Call(a, STEPS.draw, Payload(), 1) for a in pool.roster()]))
            )
            assert first.sender.id == "q0"
            del first
            assert contents(run_step(pool, STEPS.draw, number=2)) == contents(
                run_step(local_reference(agents(6)), STEPS.draw, number=2)
            )


def test_with_check_wire_messages_to_and_from_workers_are_serialised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed: list[str] = []

    def pack(message: Message) -> bytes:
        packed.append(str(message.text) if isinstance(message, Payload) else "")
        return messages.serialize(message)

    monkeypatch.setattr(local_engine, "serialize", pack)
    for check in (False, True):
        with worker_engine(check_wire=check) as pool:
            found = contents(run_step(pool, STEPS.draw, number=2))
        assert found == contents(run_step(local_reference(agents()), STEPS.draw, number=2))
        # The request to all three, once, and each reply.
        assert sorted(packed) == (["", "q0", "q1", "q2"] if check else [])


# Shared buffers -----------------------------------------------------------------------------


KINDS = st.sampled_from([torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64])


@given(st.lists(st.lists(st.lists(KINDS, max_size=4), max_size=3), max_size=3))
def test_a_buffer_returns_the_tensors_that_were_written_last(
    pages: list[list[list[torch.dtype]]],
) -> None:
    with contextlib.closing(SharedBuffer()) as buffer:
        for kinds in pages:
            parts = [  # of 0, 3, 6 and 9 numbers, so most would be unaligned without padding
                {str(n): torch.arange(3 * n).to(kind) for n, kind in enumerate(each)}
                for each in kinds
            ]
            forms = json.loads(json.dumps(buffer.write(*parts)))  # they go through a pipe
            for part, back in zip(parts, buffer.read(forms), strict=True):
                assert list(back) == list(part)
                assert [back[name].dtype for name in part] == [t.dtype for t in part.values()]
                assert all(torch.equal(back[name], part[name]) for name in part)


def test_tensors_read_from_a_buffer_do_not_change_with_the_next_write() -> None:
    with contextlib.closing(SharedBuffer()) as buffer:
        [[read]] = [part.values() for part in buffer.read(buffer.write({"w": torch.ones(3, 2)}))]
        buffer.write({"w": torch.zeros(3, 2)})
        assert torch.equal(read, torch.ones(3, 2))


def test_a_buffer_keeps_tensors_of_any_stride_and_alignment() -> None:
    kernel = torch.arange(36.0).reshape(2, 2, 3, 3).to(memory_format=torch.channels_last)
    step = torch.tensor(7.0)
    odd = torch.tensor([True])  # the next tensor would start at an odd byte
    with contextlib.closing(SharedBuffer()) as buffer:
        every_other = torch.arange(12.0)[::2]
        tensors = {"odd": odd, "kernel": kernel, "step": step, "every other": every_other}
        [back] = buffer.read(buffer.write(tensors))
    assert back["every other"].tolist() == [0, 2, 4, 6, 8, 10]
    assert torch.equal(back["kernel"], kernel) and back["kernel"].is_contiguous()
    assert back["step"].shape == () and back["step"] == 7
    assert back["odd"].dtype == torch.bool


def test_a_buffer_detaches_tensors_and_refuses_dtypes_that_messages_lack() -> None:
    weight = torch.ones(3, requires_grad=True)
    with contextlib.closing(SharedBuffer()) as buffer:
        [back] = buffer.read(buffer.write({"w": weight * 2}))
        assert torch.equal(back["w"], torch.full((3,), 2.0)) and not back["w"].requires_grad
        with pytest.raises(TypeError, match=r"z is a tensor of torch\.complex64"):
            buffer.write({"z": torch.ones(2, dtype=torch.complex64)})


def test_a_buffer_that_cannot_grow_raises_worker_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(file: int, size: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    with worker_engine() as pool:
        monkeypatch.setattr(os, "ftruncate", refused)
        with pytest.raises(WorkerError, match=r"no 16384 bytes to share: File too.*run\.workers=1"):
            run_step(pool, STEPS.report_process, Payload(t=torch.zeros(4096)))


def test_a_buffer_that_grows_keeps_its_tensors_and_another_process_reads_all() -> None:
    first = torch.arange(20, dtype=torch.uint8)
    others = [torch.full((size,), 7, dtype=torch.uint8) for size in (1, 5000, 100_000)]
    with contextlib.closing(SharedBuffer()) as buffer, contextlib.closing(SharedBuffer()) as answer:
        [small] = buffer.write({"seen before the fork": first})
        rest = {str(len(other)): other for other in others}
        forms = [small, PackedTensors(rest).form()]
        pipe = os.pipe()
        child = fork()
        if child == 0:
            try:
                os.close(pipe[1])
                os.read(pipe[0], 1)  # the rest is written after the fork, on new pages
                answer.write(*buffer.read(forms))
                os._exit(0)
            finally:
                os._exit(1)
        assert buffer.write({"seen before the fork": first}, rest) == forms
        os.write(pipe[1], b".")
        assert os.waitpid(child, 0)[1] == 0
        before, after = answer.read(forms)
        assert torch.equal(before["seen before the fork"], first)
        assert all(torch.equal(after[name], rest[name]) for name in rest)
        for file in pipe:
            os.close(file)


@pytest.mark.slow
def test_a_buffer_opens_one_file_and_closes_it() -> None:
    before = open_files()
    buffer = SharedBuffer()
    buffer.write({"x": torch.zeros(100_000)})
    assert len(open_files() - before) == 1
    buffer.close()
    assert open_files() == before


# The number of workers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "cores", "parties", "expected"),
    [
        ("auto", 4, 6, 4),
        ("auto", 4, 3, 3),  # only three agents can work in parallel
        ("auto", 1, 6, 1),
        (2, 8, 6, 2),
        (8, 2, 6, 6),
        (1, 8, 6, 1),
    ],
)
def test_the_worker_count_is_at_most_the_agents_and_auto_is_the_cores(
    monkeypatch: pytest.MonkeyPatch, asked: Any, cores: int, parties: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert resolve_worker_count(asked, agents(parties), CPU) == expected


def test_agents_with_accounts_are_not_counted_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    account: Any = SimpleNamespace()
    assert resolve_worker_count("auto", agents(3, account=account) + agents(2), CPU) == 2
    assert resolve_worker_count("auto", agents(3, account=account), CPU) == 1


def test_auto_is_one_worker_on_a_gpu_or_with_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert resolve_worker_count("auto", agents(4), torch.device("cuda")) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert resolve_worker_count("auto", agents(4), CPU) == 1
    assert resolve_worker_count(2, agents(4), CPU) == 2


def test_a_number_of_workers_is_refused_beside_a_gpu_or_with_several_threads(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(workers: str) -> Any:
        return prepare.prepare(config.load_config(paths.config, ["run.device=cpu", workers]))

    assert prepared("run.workers=2").config.run.workers == 2  # the control
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(ConfigError) as error:
        prepared("run.workers=2")
    assert str(error.value) == (
        "run.workers is 2, but torch sees a GPU, and beside one it cannot train in worker "
        "processes (hide it: CUDA_VISIBLE_DEVICES= before the command). Give 1, or auto"
    )
    for allowed in ("run.workers=1", "run.workers=auto"):
        prepared(allowed)
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # sums in two threads have other bits
    with pytest.raises(ConfigError, match=r"torch has 2 threads here .* Give 1, or auto"):
        prepared("run.workers=2")
    for allowed in ("run.workers=1", "run.workers=auto"):
        prepared(allowed)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert unsupported_reason(CPU) == "worker processes need Linux, and this is darwin"


AFTER_COMPILE = """
import torch
from privssl.engines.process_pool import unsupported_reason
torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2)).sum().backward()
print(unsupported_reason(torch.device("cpu")))
"""


def test_auto_is_one_worker_if_autograd_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    named, over = threading.Event(), threading.Event()

    def like_autograds() -> None:
        comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        comm.write_text("pt_autograd_0")
        named.set()
        over.wait()
        comm.write_text("python")  # the kernel may list the thread for a moment after join()

    thread = threading.Thread(target=like_autograds)
    thread.start()
    named.wait()
    assert resolve_worker_count("auto", agents(4), CPU) == 1
    over.set()
    thread.join()
    assert resolve_worker_count("auto", agents(4), CPU) == 4  # the control


@pytest.mark.slow
def test_after_torch_compile_autograd_has_threads() -> None:
    done = subprocess.run([sys.executable, "-c", AFTER_COMPILE], capture_output=True, text=True)
    assert done.stdout.startswith("autograd has threads in this process"), done.stderr


@pytest.mark.parametrize(
    ("value", "shown"), [("0", "0"), ("1.5", "1.5"), ("two", "'two'"), ("true", "true")]
)
def test_an_invalid_number_of_workers_is_refused(paths: RunPaths, value: str, shown: str) -> None:
    outcome = command(paths.config, paths.output, f"run.workers={value}")
    assert_refused(outcome, "run.workers", f"needs a whole number >= 1 or auto, got {shown}")


# Runs ---------------------------------------------------------------------------------------


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return place(tmp_path)


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    reference = place(tmp_path_factory.mktemp("in_one_process"))
    assert command(reference.config, reference.output, "run.workers=1").status == 0
    return reference


@contextlib.contextmanager
def step_replaced(step: str, new: Callable[..., Any]) -> Iterator[None]:
    """Replace a step of FedSSL by ``new(step, agent, message, ctx)``."""
    old = getattr(FedSSL, step)

    @functools.wraps(old)  # requests name the step
    def wrapped(self: Any, agent: Any, message: Any, ctx: Any) -> Any:
        return new(functools.partial(old, self), agent, message, ctx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedSSL, step, wrapped)
        yield


@pytest.mark.parametrize(
    "workers", ["2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("4", "auto"))]
)
def test_a_run_has_the_same_weights_and_metrics_with_any_number_of_workers(
    paths: RunPaths, reference_run: RunPaths, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_factory, "resolve_worker_count", resolve_worker_count)
    assert command(paths.config, paths.output, f"run.workers={workers}").status == 0
    assert same_results(paths, reference_run)
    assert "pseudo/" in paths.metrics().decode()  # the meter observed pseudo-labels


@pytest.mark.slow
def test_a_run_may_be_resumed_with_another_number_of_workers(
    paths: RunPaths, reference_run: RunPaths
) -> None:
    def interrupted(step: Any, agent: Any, message: Any, ctx: Any) -> Any:
        if ctx.round == 3:
            os.kill(HERE, signal.SIGINT)
        return step(agent, message, ctx)

    with step_replaced("query_pass", interrupted):
        assert command(paths.config, paths.output, "run.workers=2").status == 130
    assert paths.results()["rounds"] == 2

    assert command(paths.config, "--resume", paths.run, "run.workers=1").status == 0

    assert same_results(paths, reference_run)


@pytest.mark.slow
def test_a_run_survives_a_killed_worker_and_warns(paths: RunPaths, reference_run: RunPaths) -> None:
    marker = paths.run.parent / "died"

    def killed_once(step: Any, agent: Any, message: Any, ctx: Any) -> Any:
        if ctx.round == 2 and agent.id == "q1" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(agent, message, ctx)

    with step_replaced("query_pass", killed_once):
        outcome = command(paths.config, paths.output, "run.workers=2")

    assert outcome.status == 0 and marker.exists()
    assert "was ended by SIGKILL during query_pass of q1, which is run again." in outcome.err
    assert same_results(paths, reference_run)


@pytest.mark.ci
def test_a_run_whose_workers_always_die_stops_after_a_checkpoint_and_can_be_resumed(
    paths: RunPaths, reference_run: RunPaths
) -> None:
    def killed(step: Any, agent: Any, message: Any, ctx: Any) -> Any:
        if ctx.round == 2 and agent.id == "q1":
            os.kill(os.getpid(), signal.SIGKILL)
        return step(agent, message, ctx)

    with step_replaced("query_pass", killed):
        outcome = command(paths.config, paths.output, "run.workers=2", "run.checkpoint_every=100")

    assert_refused(
        outcome, "did not survive query_pass of q1", "run.workers=1",
        f"The checkpoint is of round 1: continue with --resume {paths.run}",
    )  # fmt: skip
    assert command(paths.config, "--resume", paths.run, "run.workers=1").status == 0
    assert same_results(paths, reference_run)


def test_labelled_rows_with_an_account_are_read_only_in_the_process_of_the_run(
    tmp_path: Path,
) -> None:
    private = place(tmp_path, PRIVATE)
    notes = tmp_path / "notes"

    def record_process(step: Any, agent: Any, message: Any, ctx: Any) -> Any:
        with notes.open("a") as file:
            file.write(json.dumps([agent.role, os.getpid() == HERE]) + "\n")
        return step(agent, message, ctx)

    with step_replaced("support_pass", record_process), step_replaced("query_pass", record_process):
        assert command(private.config, private.output, "run.workers=2").status == 0

    found = [json.loads(line) for line in notes.read_text().splitlines()]
    assert {at_home for role, at_home in found if role == "support"} == {True}
    assert {at_home for role, at_home in found if role == "query"} == {False}  # the control


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_ends_all_processes_and_the_run_can_be_resumed(
    paths: RunPaths, reference_run: RunPaths
) -> None:
    arguments = [str(paths.config), paths.output, "run.checkpoint_every=100", "run.workers=2"]
    arguments.append("--quiet")
    began = paths.run.parent / "began"

    def stay(step: Any, agent: Any, message: Any, ctx: Any) -> Any:
        if ctx.round == 3:
            began.touch()
            time.sleep(600)
        return step(agent, message, ctx)

    with step_replaced("query_pass", stay):
        process = ForkedCommand(train.main, arguments, paths.config.parent, own_session=True)
    wait_for(began, process)
    group = processes_of_group(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the whole process group
    _, err = process.communicate(timeout=300)

    assert len(group) == 3, "the control: there were two workers"
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert processes_of_group(process.pid) == []
    assert command(paths.config, "--resume", paths.run, "run.workers=1").status == 0
    assert same_results(paths, reference_run)


def processes_of_group(group: int) -> list[int]:
    """The running processes of a process group."""
    numbers = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [n for n in numbers if not has_ended(n) and _group(n) == group]


def _group(process: int) -> int | None:
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return None
