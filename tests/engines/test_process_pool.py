"""Worker processes: the bits of one process, and nothing left behind, whatever ends a visit.

Steps here tell where they ran, or end their process. Every promise of the engine has a control
beside it: a worker that is really another process, an engine that forgets, a lock that is held.
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
from tests.support.resume import PRIVATE, Place, command, place, same
from tests.support.transports import fork, open_files

CPU = torch.device("cpu")
HERE = os.getpid()

pytestmark = pytest.mark.skipif(
    unsupported_reason(CPU) is not None,
    reason=f"no worker processes here: {unsupported_reason(CPU)}",
)


@dataclass(frozen=True)
class Told(Message):
    """What a step found, and what it is told."""

    pid: int = 0
    text: str = ""
    number: float = 0.0
    t: Tensor = field(default_factory=lambda: torch.zeros(3))


class Meter:
    """Knows the true labels, and keeps what it is told in order."""

    def __init__(self) -> None:
        self.true_labels = torch.arange(4)
        self.told: list[list[int]] = []

    def observe(self, ids: Tensor, labels: Tensor, kept: Tensor) -> None:
        self.told.append([*ids.tolist(), *labels.tolist(), *kept.int().tolist()])


class Odd(Exception):  # noqa: N818
    """Cannot be made from its arguments."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class Speechless(Exception):  # noqa: N818
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError


class Steps:
    """Stands for an algorithm. ``message.text`` is a file, where a step needs one."""

    def where(self, agent: Agent, message: Told, ctx: Any) -> Told:
        return Told(os.getpid(), agent.id, torch.get_num_threads())

    def draw(self, agent: Agent, message: Told, ctx: Any) -> Told:
        ctx.weight = len(agent.unlabelled)
        ctx.log_metric("loss", message.number / 3)
        for batch in (0, 1):
            seen = agent.unlabelled.ids[:2] + batch
            ctx.pseudo_labels(seen, torch.eye(4)[:2], torch.tensor([True, batch == 1]))
        return Told(text=agent.id, t=torch.rand(3, generator=ctx.rng("z")) + torch.rand(3))

    def count(self, agent: Agent, message: Told, ctx: Any) -> Told:
        seen = agent.memory.get("n", torch.zeros(())) + 1
        # Not in the order of the alphabet, of equal content, and with a number that is none.
        agent.memory = {"z": torch.tensor(float("inf")), "n": seen, "a": seen}
        return Told(os.getpid(), " ".join(agent.memory), float(seen))

    def look(self, agent: Agent, message: Told, ctx: Any) -> Told:
        """Whether true labels are in reach."""
        return Told(os.getpid(), str(hasattr(ctx.meter, "true_labels")))

    def queue(self, agent: Agent, message: Told, ctx: Any) -> Told:
        """Says that its turn has come. q0 is ready when everybody's has come."""
        turns, waited = Path(message.text), time.monotonic()
        with turns.open("a") as file:
            file.write(agent.id + "\n")
        while agent.id == "q0" and len(turns.read_text().split()) < 4:
            assert time.monotonic() - waited < 300, "nobody else has a turn"
            time.sleep(0.01)
        return Told(text=agent.id)

    def fail(self, agent: Agent, message: Told, ctx: Any) -> Told:
        """q0 is the slowest, and the first of the calls."""
        if agent.id == "q0":
            time.sleep(0.2)
            raise DataError("q0 has no such file")
        if agent.id == "q1":
            raise KeyError("of q1")
        return Told(text=agent.id)

    def odd(self, agent: Agent, message: Told, ctx: Any) -> Told:
        raise Odd(1, 2)

    def leave(self, agent: Agent, message: Told, ctx: Any) -> Told:
        raise SystemExit(3)

    def die_once(self, agent: Agent, message: Told, ctx: Any) -> Told:
        if agent.id == "q1" and not os.path.exists(message.text):
            Path(message.text).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.draw(agent, message, ctx)

    def die(self, agent: Agent, message: Told, ctx: Any) -> Told:
        if agent.id == "q1":
            os.kill(os.getpid(), signal.SIGKILL)
        return Told(text=agent.id)

    def end(self, agent: Agent, message: Told, ctx: Any) -> Told:
        os.kill(os.getpid(), int(message.number))
        return Told()

    def no_json(self, agent: Agent, message: Told, ctx: Any) -> Told:
        ctx.weight = np.int64(3)
        return Told()

    def speechless(self, agent: Agent, message: Told, ctx: Any) -> Told:
        raise Speechless

    def sleep(self, agent: Agent, message: Told, ctx: Any) -> Told:
        Path(message.text, f"{agent.id}-{os.getpid()}").touch()
        time.sleep(600)
        return Told()

    def fail_or_stay(self, agent: Agent, message: Told, ctx: Any) -> Told:
        """q1 fails; q0 is at it for as long as anybody looks."""
        if agent.id == "q1":
            raise KeyError("of q1")
        time.sleep(30)
        return Told(text="late")


STEPS: Any = Steps()


def agents(count: int = 3, *, rows: Sequence[int] = (), **own: Any) -> list[Agent]:
    """q0, q1 and so on, of 4 rows each unless told otherwise."""
    sizes = rows or [4] * count
    held = [
        UnlabelledRows(torch.zeros(n, 1, 8, 8), torch.arange(n) + 100 * i)
        for i, n in enumerate(sizes)
    ]
    return [Agent(id=f"q{i}", held_unlabelled=x, **own) for i, x in enumerate(held)]


@contextlib.contextmanager
def engine(
    parties: Sequence[Agent] = (), workers: int = 2, kind: type[WorkerEngine] = WorkerEngine,
    **how: Any,
) -> Iterator[WorkerEngine]:  # fmt: skip
    made = kind(parties or agents(), algorithm=STEPS, workers=workers, seed=3, device=CPU, **how)
    with contextlib.closing(made):
        yield made


def local(parties: Sequence[Agent] = (), **how: Any) -> LocalEngine:
    return LocalEngine(parties or agents(), seed=3, device=CPU, **how)


def ask(
    there: LocalEngine, step: Any, message: Message | None = None, whom: str = "", number: int = 1
) -> list[Reply[Any]]:
    """All agents, or those named, do one step with the same message."""
    roster = {agent.id: agent for agent in there.roster()}
    names, what = whom.split() or list(roster), message or Told()
    return list(there.deliver([Call(roster[name], step, what, number) for name in names]))


def contents(replies: Sequence[Reply[Any]]) -> list[dict[str, Any]]:
    return [
        {name: v.tolist() if isinstance(v, Tensor) else v for name, v in vars(r.content).items()}
        | {"weight": r.weight, "notes": dict(r.metrics), "sender": r.sender}
        for r in replies
    ]  # fmt: skip


def processes_of(there: WorkerEngine) -> list[int]:
    return [worker.process for worker in there._workers if worker is not None]


def all_ended(there: WorkerEngine) -> bool:
    """Whether nothing can be sent to any of its workers; a zombie may hold a pipe for a moment."""
    return all(worker.pipe.poll() for worker in there._workers if worker is not None)


def gone(process: int) -> bool:
    """Whether nothing but, perhaps, a zombie that its new parent has yet to bury is left."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def soon(true: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether something becomes true."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


# Who works where ----------------------------------------------------------------------------


def test_agents_of_a_parallel_step_work_in_workers_and_one_alone_works_in_this_process() -> None:
    with engine() as there:
        everywhere = {reply.payload.pid for reply in ask(there, STEPS.where)}
        alone = {reply.payload.pid for reply in ask(there, STEPS.where, whom="q1")}
        assert everywhere <= set(processes_of(there)) and HERE not in everywhere
    assert alone == {HERE}


def test_an_agent_with_an_account_is_visited_in_this_process_alone() -> None:
    account: Any = SimpleNamespace(close=lambda: None, visits=lambda: 0, events=())
    parties = [*agents(2), Agent(id="s0", held_unlabelled=agents()[0].unlabelled, account=account)]
    meter = Meter()
    with engine(parties, meter=meter) as there:
        where = {reply.sender.id: reply.payload.pid for reply in ask(there, STEPS.where)}
        told = {reply.sender.id: dict(reply.metrics) for reply in ask(there, STEPS.draw)}
    assert where["s0"] == HERE
    assert HERE not in (where["q0"], where["q1"])  # the control: rows without one go elsewhere
    assert told == {"q0": {"loss": 0.0}, "q1": {"loss": 0.0}, "s0": {}}
    assert len(meter.told) == 2 * 2  # two batches of q0 and q1 each, none of s0


def test_a_step_that_is_none_of_the_algorithms_is_done_in_this_process() -> None:
    def where(agent: Agent, message: Told, ctx: Any) -> Told:
        return Told(os.getpid())

    with engine() as there:
        assert {reply.payload.pid for reply in ask(there, where)} == {HERE}


def test_a_closed_engine_still_answers_from_this_process() -> None:
    with engine() as there:
        pass
    assert {reply.payload.pid for reply in ask(there, STEPS.where)} == {HERE}


def test_a_worker_has_one_thread_whatever_this_process_has() -> None:
    with engine() as there:
        torch.set_num_threads(2)  # workers were forked before, those that replace them are not
        try:
            for process in processes_of(there):
                os.kill(process, signal.SIGKILL)
            assert {reply.payload.number for reply in ask(there, STEPS.where)} == {1.0}
            assert ask(there, STEPS.where, whom="q0")[0].payload.number == 2.0  # the control
        finally:
            torch.set_num_threads(1)


@pytest.fixture
def two_cores() -> Iterator[tuple[int, int]]:
    """The cores that this process, and what it forks, may use for the length of a test."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core, and workers cannot be spread")
    one, other, *_ = sorted(before)
    os.sched_setaffinity(0, {one, other})
    yield one, other
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("workers", "places"),
    [(1, ["either"]), (2, ["one", "other"]), (3, ["either"] * 3), (4, ["one", "other"] * 2)],
)
def test_workers_that_are_as_many_on_each_core_keep_to_it_and_no_others_do(
    workers: int, places: list[str], two_cores: tuple[int, int]
) -> None:
    one, other = two_cores
    kept = {"one": {one}, "other": {other}, "either": {one, other}}
    meant = [kept[place] for place in places]
    with engine(agents(workers + 1), workers=workers) as there:
        for _ in range(2):  # the second time one has been replaced, and need not have had a visit
            ask(there, STEPS.where)
            assert soon(lambda: list(map(os.sched_getaffinity, processes_of(there))) == meant)
            os.kill(processes_of(there)[-1], signal.SIGKILL)
    assert os.sched_getaffinity(0) == {one, other}  # of this process


def test_a_core_that_is_taken_away_ends_no_worker(
    two_cores: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(process: int, cores: set[int]) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    with engine() as there:
        ask(there, STEPS.where)
        assert [os.sched_getaffinity(p) for p in processes_of(there)] == [set(two_cores)] * 2


def test_the_longest_agent_is_first_and_equals_go_in_the_order_of_calls(tmp_path: Path) -> None:
    with engine(agents(rows=[2, 9, 4, 9]), workers=1) as there:
        replies = ask(there, STEPS.queue, Told(text=str(tmp_path / "turns")), "q0 q2 q3 q1")
    assert (tmp_path / "turns").read_text().split() == ["q3", "q1", "q2", "q0"]
    assert [reply.sender.id for reply in replies] == ["q0", "q2", "q3", "q1"]


def test_replies_come_in_the_order_of_calls_whoever_is_ready_first(tmp_path: Path) -> None:
    with engine(agents(4)) as there:
        replies = ask(there, STEPS.queue, Told(text=str(tmp_path / "turns")))
    assert [reply.payload.text for reply in replies] == ["q0", "q1", "q2", "q3"]
    # The control: q0 held its worker up until the other one had taken all that was left.
    turns = (tmp_path / "turns").read_text().split()
    assert [turn for turn in turns if turn != "q0"] == ["q1", "q2", "q3"]


# The same as in one process -----------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_replies_notes_weights_and_what_the_meter_is_told_are_those_of_one_process(
    workers: int,
) -> None:
    mine, theirs = Meter(), Meter()
    sizes = [4, 7, 5, 7]
    with engine(agents(rows=sizes), workers, meter=theirs) as there:
        for number in (1, 2):
            here = local(agents(rows=sizes), meter=mine)
            told = Told(number=float(number))
            expected = contents(ask(here, STEPS.draw, told, number=number))
            assert contents(ask(there, STEPS.draw, told, number=number)) == expected
            assert expected[1]["weight"] == 7 and expected[1]["notes"] == {"loss": number / 3}
    assert theirs.told == mine.told and len(mine.told) == 2 * 4 * 2


def test_true_labels_are_out_of_reach_of_steps_here_and_in_a_worker() -> None:
    with engine(meter=Meter()) as there:
        assert {reply.payload.text for reply in ask(there, STEPS.look)} == {"False"}
        assert ask(there, STEPS.look, whom="q0")[0].payload.text == "False"  # in this process
    assert hasattr(Meter(), "true_labels")  # the control


def test_an_agent_keeps_its_memory_whichever_worker_it_comes_to() -> None:
    with engine(agents(rows=[4, 4, 8])) as there:
        [first, _] = ask(there, STEPS.count, whom="q0 q1")
        before = there.memories()
        [_, second] = ask(there, STEPS.count, whom="q2 q0")  # q2 is longer, and goes first
        [third] = ask(there, STEPS.count, whom="q0")
        assert [r.payload.number for r in (first, second, third)] == [1.0, 2.0, 3.0]
        assert len({first.payload.pid, second.payload.pid, HERE}) == 3
        assert {r.payload.text for r in (first, second)} == {"z n a"}
        assert list(there.memories()["q0"]) == ["z", "n", "a"]
        assert float(before["q0"]["n"]) == 1.0  # what was asked for earlier stays as it was
        assert float(before["q0"]["z"]) == float("inf")
        assert before["q2"] == {}


def test_a_step_that_leaves_memory_alone_leaves_the_very_same_mapping() -> None:
    with engine() as there:
        ask(there, STEPS.count)
        before = there.memories()["q0"]
        ask(there, STEPS.where)
        assert there.memories()["q0"] is before
        ask(there, STEPS.count)
        assert there.memories()["q0"] is not before  # the control


# Errors -------------------------------------------------------------------------------------


def test_an_error_arrives_as_itself_and_of_several_the_first_by_the_order_of_calls() -> None:
    with engine() as there:
        with pytest.raises(DataError) as error:  # though q1 has failed earlier
            ask(there, STEPS.fail)
        assert str(error.value) == "q0 has no such file"
        assert "in fail" in str(error.value.__cause__)  # where in the worker
        with pytest.raises(KeyError) as other:
            ask(there, STEPS.fail, whom="q2 q1 q0")
        assert other.value.args == ("of q1",)
        assert [reply.payload.text for reply in ask(there, STEPS.fail, whom="q2")] == ["q2"]


@pytest.mark.parametrize(
    ("step", "text"), [(STEPS.odd, "Odd: 1 and 2"), (STEPS.leave, "SystemExit: 3")]
)
def test_an_error_that_cannot_be_made_again_keeps_its_name_and_text(step: Any, text: str) -> None:
    with engine() as there, pytest.raises(RuntimeError) as error:
        ask(there, step)
    assert str(error.value) == text


def test_no_late_reply_is_taken_for_one_of_the_next_delivery() -> None:
    with engine(agents(2)) as there:
        before = processes_of(there)
        with pytest.raises(KeyError):  # q0 is still at it
            ask(there, STEPS.fail_or_stay, whom="q1 q0")
        replies = ask(there, STEPS.where)
        assert [reply.payload.text for reply in replies] == ["q0", "q1"]
        assert len(set(before) & set(processes_of(there))) == 1  # the other one was replaced


def test_ctrl_c_in_a_delivery_ends_what_is_under_way_and_the_next_is_whole(tmp_path: Path) -> None:
    def press_when_both_are_at_it(*_: object) -> None:
        if len(list(tmp_path.iterdir())) == 2:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.raise_signal(signal.SIGINT)

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with engine(agents(2)) as there:
            before = processes_of(there)
            signal.signal(signal.SIGALRM, press_when_both_are_at_it)
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
                ask(there, STEPS.sleep, Told(text=str(tmp_path)))
            assert all(map(gone, before))
            assert [reply.payload.text for reply in ask(there, STEPS.where)] == ["q0", "q1"]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, former)


# Workers that die ---------------------------------------------------------------------------


def test_a_worker_that_dies_is_replaced_and_its_visit_done_again_to_the_same_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs, told = Meter(), Meter(), Told(text=str(tmp_path / "died"))
    with engine(meter=theirs) as there:
        before = processes_of(there)
        replies = contents(ask(there, STEPS.die_once, told))
        after = processes_of(there)
    assert (tmp_path / "died").exists() and len(set(before) & set(after)) == 1
    # The marker is there now, so that no process dies here.
    assert replies == contents(ask(local(meter=mine), STEPS.die_once, told))
    assert theirs.told == mine.told
    [record] = caplog.records
    assert record.getMessage() == (
        "A worker process was ended by SIGKILL during die_once of q1, which is run again."
    )


def test_workers_that_ended_between_visits_are_replaced_and_no_visit_is_blamed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parties = agents(6)
    with engine(parties, workers=4) as there:
        for process in processes_of(there):
            os.kill(process, signal.SIGKILL)
        assert soon(lambda: all_ended(there))
        replies = ask(there, STEPS.where)
    assert [reply.payload.text for reply in replies] == [agent.id for agent in parties]
    said = "A worker process was ended by SIGKILL between steps."
    assert [record.getMessage() for record in caplog.records] == [said] * 4


def test_workers_that_end_before_they_do_anything_end_the_delivery() -> None:
    class Short(WorkerEngine):
        def _serve(self, place: int, pipe: Any, sheet: SharedBuffer) -> None:
            return

        def _hand_out(self, now: Any) -> None:
            assert soon(lambda: all_ended(self))
            super()._hand_out(now)

    with engine(kind=Short) as there, pytest.raises(WorkerError) as error:
        ask(there, STEPS.where)
    assert str(error.value) == (
        "6 worker processes ended before they had a call: the last ended with status 0. "
        "Set run.workers=1, so that all agents work in one process"
    )


@pytest.mark.parametrize(("number", "name"), [(signal.SIGUSR1, "SIGUSR1"), (40, "signal 40")])
def test_a_worker_may_be_ended_by_any_signal(
    number: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with engine() as there, pytest.raises(WorkerError) as error:
        ask(there, STEPS.end, Told(number=number))
    assert str(error.value) == (
        f"2 worker processes in turn did not survive end of q0: the last was ended by {name}. "
        "Set run.workers=1, so that all agents work in one process"
    )
    assert f"was ended by {name} during end of q" in caplog.records[0].getMessage()


def test_an_answer_that_is_no_json_is_an_error_of_the_step_and_no_workers_death(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engine() as there:
        with pytest.raises(TypeError, match="int64 is not JSON serializable"):
            ask(there, STEPS.no_json)
        with pytest.raises(RuntimeError, match="Speechless"):
            ask(there, STEPS.speechless)
    assert not caplog.records


def test_a_worker_maps_its_own_sheet_and_the_one_that_is_for_all() -> None:
    def mapped(process: int) -> int:
        return Path(f"/proc/{process}/maps").read_text().count("memfd:privssl")

    with engine() as there:
        ask(there, STEPS.where)
        first, _ = processes_of(there)
        assert mapped(os.getpid()) == 3  # two workers' and the one for all
        os.kill(first, signal.SIGKILL)  # the next is forked from a process that has mapped them all
        for _ in range(2):
            ask(there, STEPS.where)
        assert [mapped(process) for process in processes_of(there)] == [2, 2]


def test_a_visit_that_no_worker_survives_is_an_error_that_says_what_to_do() -> None:
    with engine() as there:
        with pytest.raises(WorkerError) as error:
            ask(there, STEPS.die)
        assert str(error.value) == (
            "2 worker processes in turn did not survive die of q1: the last was ended by SIGKILL. "
            "SIGKILL is how the system takes memory back. Set run.workers=1, so that all agents "
            "work in one process, or give the run more memory"
        )
        assert [reply.payload.text for reply in ask(there, STEPS.where)] == ["q0", "q1", "q2"]


def test_a_system_that_starts_no_process_is_told_of_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)
    before = open_files()
    said = r"no worker process: Resource temp.*run\.workers=1"
    with pytest.raises(WorkerError, match=said), engine():
        pass
    assert open_files() == before


# Nothing is left behind ---------------------------------------------------------------------


def test_a_closed_engine_leaves_no_process_and_no_file() -> None:
    before = open_files()
    with engine() as there:
        ask(there, STEPS.count)
        workers = processes_of(there)
        assert not any(map(gone, workers))
        assert open_files() != before
        there.close()
        for worker in workers:
            with pytest.raises(ProcessLookupError):  # not even a zombie
                os.kill(worker, 0)
    assert open_files() == before  # and a second close harms nothing


def test_a_worker_holds_no_file_of_this_process_so_no_lock_outlives_it(tmp_path: Path) -> None:
    def held_by(process: int | str) -> list[str]:
        folder, held = Path(f"/proc/{process}/fd"), []
        for name in os.listdir(folder):
            with contextlib.suppress(
                FileNotFoundError
            ):  # closed since: a worker lets go when it begins
                held += [os.readlink(folder / name)] if int(name) > 2 else []
        return held

    def settled(process: int) -> bool:  # pipe to the engine, two buffers
        return len(held_by(process)) == 3

    with open(tmp_path / "journal", "w"), engine() as there:
        assert str(tmp_path / "journal") in [os.readlink(f"/proc/self/fd/{n}") for n in open_now()]
        for process in processes_of(there):
            assert soon(lambda process=process: settled(process)), held_by(process)  # type: ignore[misc]
            assert str(tmp_path / "journal") not in held_by(process)


def open_now() -> list[str]:
    """Files of this process, without the listing's own."""
    return [n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]


def test_workers_in_the_middle_of_a_visit_end_when_their_process_is_killed(tmp_path: Path) -> None:
    child = fork()
    if child == 0:
        try:
            with engine(agents(2)) as there:
                ask(there, STEPS.sleep, Told(text=str(tmp_path)))
        finally:
            os._exit(1)
    assert soon(lambda: len(list(tmp_path.iterdir())) == 2)
    workers = [int(path.name.partition("-")[2]) for path in tmp_path.iterdir()]
    assert not any(map(gone, workers))  # each would sleep for ten minutes

    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

    assert soon(lambda: all(map(gone, workers)))


# Replies as they come -----------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda parties: contextlib.closing(local(parties)), engine])
def test_who_takes_replies_one_by_one_has_few_in_memory(make: Any) -> None:
    parties = agents(12)
    with make(parties) as there:
        calls = [Call(agent, STEPS.draw, Told(), 1) for agent in there.roster()]
        seen, most = list[weakref.ref[Tensor]](), 0
        for reply in there.deliver(calls):
            seen.append(weakref.ref(reply.payload.t))
            most = max(most, sum(one() is not None for one in seen))
        assert len(seen) == 12
        assert most <= 2
        kept = list(there.deliver(calls))  # the control
        seen = [weakref.ref(reply.payload.t) for reply in kept]
        assert sum(one() is not None for one in seen) == 12


def test_a_delivery_that_is_left_unfinished_says_nothing_in_the_next() -> None:
    parties = agents(6)
    with engine(parties) as there:
        for _ in range(3):
            first = next(
                iter(there.deliver([Call(a, STEPS.draw, Told(), 1) for a in there.roster()]))
            )
            assert first.sender.id == "q0"
            del first
            assert contents(ask(there, STEPS.draw, number=2)) == contents(
                ask(local(agents(6)), STEPS.draw, number=2)
            )


def test_with_check_wire_messages_to_and_from_workers_become_bytes_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed: list[str] = []

    def pack(message: Message) -> bytes:
        packed.append(str(message.text) if isinstance(message, Told) else "")
        return messages.serialize(message)

    monkeypatch.setattr(local_engine, "serialize", pack)
    for check in (False, True):
        with engine(check_wire=check) as there:
            found = contents(ask(there, STEPS.draw, number=2))
        assert found == contents(ask(local(agents()), STEPS.draw, number=2))
        # What all three are sent, once; what each answers.
        assert sorted(packed) == (["", "q0", "q1", "q2"] if check else [])


# Bytes --------------------------------------------------------------------------------------


KINDS = st.sampled_from([torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64])


@given(st.lists(st.lists(st.lists(KINDS, max_size=4), max_size=3), max_size=3))
def test_a_sheet_gives_back_what_was_written_last(pages: list[list[list[torch.dtype]]]) -> None:
    with contextlib.closing(SharedBuffer()) as sheet:
        for kinds in pages:
            parts = [  # of 0, 3, 6 and 9 numbers: most begin where no number of their type may
                {str(n): torch.arange(3 * n).to(kind) for n, kind in enumerate(each)}
                for each in kinds
            ]
            forms = json.loads(json.dumps(sheet.write(*parts)))  # they go through a pipe
            for part, back in zip(parts, sheet.read(forms), strict=True):
                assert list(back) == list(part)
                assert [back[name].dtype for name in part] == [t.dtype for t in part.values()]
                assert all(torch.equal(back[name], part[name]) for name in part)


def test_what_was_read_from_a_sheet_stays_when_others_write_on_it() -> None:
    with contextlib.closing(SharedBuffer()) as sheet:
        [[read]] = [part.values() for part in sheet.read(sheet.write({"w": torch.ones(3, 2)}))]
        sheet.write({"w": torch.zeros(3, 2)})
        assert torch.equal(read, torch.ones(3, 2))


def test_numbers_survive_a_sheet_however_they_lie_in_memory() -> None:
    kernel = torch.arange(36.0).reshape(2, 2, 3, 3).to(memory_format=torch.channels_last)
    step = torch.tensor(7.0)
    odd = torch.tensor([True])  # what follows it begins at an odd byte
    with contextlib.closing(SharedBuffer()) as sheet:
        every_other = torch.arange(12.0)[::2]
        tensors = {"odd": odd, "kernel": kernel, "step": step, "every other": every_other}
        [back] = sheet.read(sheet.write(tensors))
    assert back["every other"].tolist() == [0, 2, 4, 6, 8, 10]
    assert torch.equal(back["kernel"], kernel) and back["kernel"].is_contiguous()
    assert back["step"].shape == () and back["step"] == 7
    assert back["odd"].dtype == torch.bool


def test_a_sheet_takes_numbers_without_their_graph_and_no_type_that_messages_lack() -> None:
    weight = torch.ones(3, requires_grad=True)
    with contextlib.closing(SharedBuffer()) as sheet:
        [back] = sheet.read(sheet.write({"w": weight * 2}))
        assert torch.equal(back["w"], torch.full((3,), 2.0)) and not back["w"].requires_grad
        with pytest.raises(TypeError, match=r"z is a tensor of torch\.complex64"):
            sheet.write({"z": torch.ones(2, dtype=torch.complex64)})


def test_a_system_that_has_no_memory_to_share_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(file: int, size: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    with engine() as there:
        monkeypatch.setattr(os, "ftruncate", refused)
        with pytest.raises(WorkerError, match=r"no 16384 bytes to share: File too.*run\.workers=1"):
            ask(there, STEPS.where, Told(t=torch.zeros(4096)))


def test_a_sheet_that_grows_keeps_what_is_on_it_and_another_process_sees_it_all() -> None:
    first = torch.arange(20, dtype=torch.uint8)
    others = [torch.full((size,), 7, dtype=torch.uint8) for size in (1, 5000, 100_000)]
    with contextlib.closing(SharedBuffer()) as sheet, contextlib.closing(SharedBuffer()) as answer:
        [small] = sheet.write({"seen before the fork": first})
        rest = {str(len(other)): other for other in others}
        forms = [small, PackedTensors(rest).form()]
        pipe = os.pipe()
        child = fork()
        if child == 0:
            try:
                os.close(pipe[1])
                os.read(pipe[0], 1)  # what follows was written after the fork, on pages new to it
                answer.write(*sheet.read(forms))
                os._exit(0)
            finally:
                os._exit(1)
        assert sheet.write({"seen before the fork": first}, rest) == forms
        os.write(pipe[1], b".")
        assert os.waitpid(child, 0)[1] == 0
        before, after = answer.read(forms)
        assert torch.equal(before["seen before the fork"], first)
        assert all(torch.equal(after[name], rest[name]) for name in rest)
        for file in pipe:
            os.close(file)


def test_a_sheet_opens_one_file_and_closes_it() -> None:
    before = open_files()
    sheet = SharedBuffer()
    sheet.write({"x": torch.zeros(100_000)})
    assert len(open_files() - before) == 1
    sheet.close()
    assert open_files() == before


# How many -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "cores", "parties", "expected"),
    [
        ("auto", 4, 6, 4),
        ("auto", 4, 3, 3),  # more could never work side by side
        ("auto", 1, 6, 1),
        (2, 8, 6, 2),
        (8, 2, 6, 6),
        (1, 8, 6, 1),
    ],
)
def test_auto_is_the_cores_and_no_number_is_above_the_agents(
    monkeypatch: pytest.MonkeyPatch, asked: Any, cores: int, parties: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert resolve_worker_count(asked, agents(parties), CPU) == expected


def test_agents_with_accounts_need_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    account: Any = SimpleNamespace()
    assert resolve_worker_count("auto", agents(3, account=account) + agents(2), CPU) == 2
    assert resolve_worker_count("auto", agents(3, account=account), CPU) == 1


def test_auto_is_one_where_the_cores_have_work_or_workers_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert resolve_worker_count("auto", agents(4), torch.device("cuda")) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert resolve_worker_count("auto", agents(4), CPU) == 1
    assert resolve_worker_count(2, agents(4), CPU) == 2


def test_a_number_of_workers_is_refused_where_there_can_be_none(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(workers: str) -> Any:
        return prepare.prepare(config.load_config(here.config, ["run.device=cpu", workers]))

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
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # results would not be those of one
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


def test_where_autograd_has_threads_one_process_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    named, over = threading.Event(), threading.Event()

    def like_autograds() -> None:
        comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        comm.write_text("pt_autograd_0")
        named.set()
        over.wait()
        comm.write_text("python")  # after join() the kernel may list the thread for a moment

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
def test_other_values_are_refused_in_words(here: Place, value: str, shown: str) -> None:
    outcome = command(here.config, here.output, f"run.workers={value}")
    assert_refused(outcome, "run.workers", f"needs a whole number >= 1 or auto, got {shown}")


# Runs ---------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return place(tmp_path)


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> Place:
    reference = place(tmp_path_factory.mktemp("in_one_process"))
    assert command(reference.config, reference.output, "run.workers=1").status == 0
    return reference


@contextlib.contextmanager
def instead(step: str, new: Callable[..., Any]) -> Iterator[None]:
    """Inside, a step of FedSSL is ``new(the step, agent, message, ctx)``."""
    old = getattr(FedSSL, step)

    @functools.wraps(old)  # its name is what travels
    def wrapped(self: Any, agent: Any, message: Any, ctx: Any) -> Any:
        return new(functools.partial(old, self), agent, message, ctx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedSSL, step, wrapped)
        yield


@pytest.mark.parametrize(
    "workers", ["2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("4", "auto"))]
)
def test_a_run_ends_with_the_same_weights_and_metrics_whatever_the_workers(
    here: Place, in_one_process: Place, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_factory, "resolve_worker_count", resolve_worker_count)
    assert command(here.config, here.output, f"run.workers={workers}").status == 0
    assert same(here, in_one_process)
    assert "pseudo/" in here.metrics().decode()  # guesses came to the meter


def test_a_run_may_go_on_with_another_number_of_workers(here: Place, in_one_process: Place) -> None:
    def interrupted(step: Any, agent: Any, message: Any, ctx: Any) -> Any:
        if ctx.round == 3:
            os.kill(HERE, signal.SIGINT)
        return step(agent, message, ctx)

    with instead("query_pass", interrupted):
        assert command(here.config, here.output, "run.workers=2").status == 130
    assert here.results()["rounds"] == 2

    assert command(here.config, "--resume", here.run, "run.workers=1").status == 0

    assert same(here, in_one_process)


def test_a_run_survives_a_worker_and_tells_of_it(here: Place, in_one_process: Place) -> None:
    marker = here.run.parent / "died"

    def killed_once(step: Any, agent: Any, message: Any, ctx: Any) -> Any:
        if ctx.round == 2 and agent.id == "q1" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(agent, message, ctx)

    with instead("query_pass", killed_once):
        outcome = command(here.config, here.output, "run.workers=2")

    assert outcome.status == 0 and marker.exists()
    assert "was ended by SIGKILL during query_pass of q1, which is run again." in outcome.err
    assert same(here, in_one_process)


def test_a_run_whose_workers_die_every_time_stops_after_a_checkpoint_and_can_go_on(
    here: Place, in_one_process: Place
) -> None:
    def killed(step: Any, agent: Any, message: Any, ctx: Any) -> Any:
        if ctx.round == 2 and agent.id == "q1":
            os.kill(os.getpid(), signal.SIGKILL)
        return step(agent, message, ctx)

    with instead("query_pass", killed):
        outcome = command(here.config, here.output, "run.workers=2", "run.checkpoint_every=100")

    assert_refused(
        outcome, "did not survive query_pass of q1", "run.workers=1",
        f"The checkpoint is of round 1: continue with --resume {here.run}",
    )  # fmt: skip
    assert command(here.config, "--resume", here.run, "run.workers=1").status == 0
    assert same(here, in_one_process)


def test_labelled_rows_under_an_account_are_read_in_the_process_of_the_run_alone(
    tmp_path: Path,
) -> None:
    private = place(tmp_path, PRIVATE)
    notes = tmp_path / "notes"

    def told(step: Any, agent: Any, message: Any, ctx: Any) -> Any:
        with notes.open("a") as file:
            file.write(json.dumps([agent.role, os.getpid() == HERE]) + "\n")
        return step(agent, message, ctx)

    with instead("support_pass", told), instead("query_pass", told):
        assert command(private.config, private.output, "run.workers=2").status == 0

    found = [json.loads(line) for line in notes.read_text().splitlines()]
    assert {at_home for role, at_home in found if role == "support"} == {True}
    assert {at_home for role, at_home in found if role == "query"} == {False}  # the control


def test_ctrl_c_in_a_terminal_ends_every_process_and_leaves_a_run_that_can_go_on(
    here: Place, in_one_process: Place
) -> None:
    arguments = [str(here.config), here.output, "run.checkpoint_every=100", "run.workers=2"]
    arguments.append("--quiet")
    began = here.run.parent / "began"

    def stay(step: Any, agent: Any, message: Any, ctx: Any) -> Any:
        if ctx.round == 3:
            began.touch()
            time.sleep(600)
        return step(agent, message, ctx)

    with instead("query_pass", stay):
        process = ForkedCommand(train.main, arguments, here.config.parent, own_session=True)
    wait_for(began, process)
    group = members(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, err = process.communicate(timeout=300)

    assert len(group) == 3, "the control: there were two workers"
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert members(process.pid) == []
    assert command(here.config, "--resume", here.run, "run.workers=1").status == 0
    assert same(here, in_one_process)


def members(group: int) -> list[int]:
    """The processes of a process group that have not ended."""
    numbers = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [n for n in numbers if not gone(n) and _group(n) == group]


def _group(process: int) -> int | None:
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return None
