"""The contract of all engines: every test runs once per engine.

An ``EngineCase`` describes an engine under test: how to create it, its error types, and whether it
survives a killed process. The reference is the local engine. What only the local engine has (copies
instead of bytes, the meter) is in test_local_engine.py; what only worker processes have is in
test_process_pool.py. Controls are engines that violate the contract on purpose.
"""

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from privssl.core.agents import Agent, LabelledRows
from privssl.core.engine import Call
from privssl.core.messages import Declined, Message, MessageError, Reply
from privssl.engines.local import LocalEngine
from privssl.engines.process_pool import unsupported_reason
from tests.support import transports
from tests.support.algorithm_contract import CASES, algorithm, rows_of
from tests.support.engine_conformance import (
    CPU,
    ENGINES,
    STEPS,
    Payload,
    agents,
    run_step,
    running_engine,
    same_replies,
)
from tests.support.toy_worlds import Simulation, at_server, federated_data, same_bits, simulate


def _marks(name: str) -> list[pytest.MarkDecorator]:
    no_forks = pytest.mark.skipif(
        unsupported_reason(CPU) is not None, reason=f"no processes: {unsupported_reason(CPU)}"
    )
    forks = "worker" in name or "processes" in name
    return [no_forks] * forks + [pytest.mark.slow] * ENGINES[name].rare


NAMES = {name: pytest.param(name, marks=_marks(name)) for name in ENGINES}
#: A fork per request is slow, and differs from one process only for memories and killed processes:
#: all other tests of it are slow tests.
every_engine = pytest.mark.parametrize("name", [
    pytest.param(n, marks=[*_marks(n), *[pytest.mark.slow] * (n == "sites in processes")])
    for n in ENGINES
])  # fmt: skip
every_engine_also_in_processes = pytest.mark.parametrize("name", NAMES.values())


# Order and length --------------------------------------------------------------------------


@every_engine
def test_the_roster_is_in_natural_order(name: str) -> None:
    rows = agents()[0].unlabelled
    parties = [Agent(id=n, held_unlabelled=rows) for n in ("q10", "q9", "q2")]
    with running_engine(name, parties) as engine:
        assert [(a.id, a.role) for a in engine.roster()] == [
            ("q2", "query"), ("q9", "query"), ("q10", "query"),
        ]  # fmt: skip


@every_engine
@pytest.mark.parametrize("whom", ["q0 q1 q2", "q2 q0", "q1", "q1 q0 q1 q2 q1"])
def test_each_call_gets_one_reply_and_replies_come_in_the_order_of_calls(
    name: str, whom: str
) -> None:
    with running_engine(name) as engine:
        replies = run_step(engine, STEPS.draw, whom=whom)
        assert " ".join(reply.sender.id for reply in replies) == whom
        assert " ".join(reply.payload.text for reply in replies) == whom
        assert list(engine.deliver([])) == []


class ReverseOrderEngine(LocalEngine):
    """Violates the contract: replies come in another order."""

    def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        return list(super().deliver(calls))[::-1]


def test_control_an_engine_that_reverses_replies_fails_the_order_check() -> None:
    replies = run_step(ReverseOrderEngine(agents(), seed=3, device=CPU), STEPS.draw)
    assert [reply.sender.id for reply in replies] != ["q0", "q1", "q2"]


# Equal bits --------------------------------------------------------------------------------


@every_engine
def test_replies_equal_those_of_the_local_engine(name: str) -> None:
    with running_engine(name) as engine, running_engine("local") as reference:
        for number in (1, 2):
            told = Payload(number=float(number))
            expected = run_step(reference, STEPS.draw, told, number=number)
            assert same_replies(run_step(engine, STEPS.draw, told, number=number), expected)
            # The control: the reply has every part that is compared.
            assert [reply.weight for reply in expected] == [4.0, 7.0, 5.0]
            assert expected[1].metrics == {"train/loss": number / 3}
            assert expected[1].payload.w["a"].dtype == torch.bfloat16


@every_engine
def test_each_agent_gets_its_own_message(name: str) -> None:
    with running_engine(name) as engine:
        sent = [Payload(number=n) for n in (1.0, 2.0, 3.0)]
        calls = [Call(a, STEPS.draw, m, 1) for a, m in zip(engine.roster(), sent, strict=True)]
        assert [reply.payload.number for reply in engine.deliver(calls)] == [1.0, 2.0, 3.0]


@pytest.mark.fast_cases("local", "2 workers", "sites")
@every_engine_also_in_processes
def test_random_numbers_differ_by_round_agent_and_visit_and_not_by_other_calls(name: str) -> None:
    with running_engine(name) as engine:
        q0, q1, _ = engine.roster()
        calls = [
            Call(q0, STEPS.draw, Payload(), 1),
            Call(q0, STEPS.draw, Payload(), 1, visit=2),
            Call(q0, STEPS.draw, Payload(), 2),
            Call(q1, STEPS.draw, Payload(), 1),
        ]
        drawn = [tuple(reply.payload.t.tolist()) for reply in engine.deliver(calls)]
        run_in_one_process = [
            tuple(next(iter(engine.deliver([call]))).payload.t.tolist()) for call in calls[::-1]
        ]
    assert len(set(drawn)) == 4
    assert run_in_one_process == drawn[::-1]  # neither earlier calls nor other calls matter


@functools.cache
def run_in_one_process(case: str) -> Simulation:
    """A few rounds of an algorithm on the local engine."""
    return simulate(algorithm(case), federated_data(dataset=rows_of(case)))


def run_on_engine(name: str, case: str, parties: Any = None) -> tuple[Any, Mapping[str, Any]]:
    """State and memories after the same rounds on another engine."""
    recipe = algorithm(case)
    with tempfile.TemporaryDirectory() as folder:
        how: Any = lambda a, *, seed, device, check_wire: ENGINES[name].make(  # noqa: E731
            a, recipe, seed, Path(folder)
        )
        after = simulate(recipe, parties or federated_data(dataset=rows_of(case)), engine=how)
        with contextlib.closing(after.engine):
            return after.state, after.engine.memories()


def returns_memory_tensors(name: str) -> bool:
    """Whether an engine's memories are the agents' tensors, not names of stored ones."""
    return not name.startswith("sites")


#: Fast cases: two algorithms on sites in processes, and sparse messages on workers. The contract
#: tests run every algorithm on workers and on sites in one process.
QUICK = {("sites in processes", case) for case in ("fedssl", "semifl")} | {
    ("2 workers", "fedmatch, as printed")
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(n, c, marks=[*_marks(n), *[pytest.mark.slow] * ((n, c) not in QUICK)])
        for n in NAMES
        for c in CASES
        if not n.startswith("local")
    ],
)
def test_every_algorithm_ends_with_the_weights_of_the_local_engine(name: str, case: str) -> None:
    state, memories = run_on_engine(name, case)
    assert same_bits(run_in_one_process(case).state, state)
    assert not returns_memory_tensors(name) or same_bits(
        run_in_one_process(case).engine.memories(), memories
    )


class ForgettingEngine(LocalEngine):
    """Violates the contract: agents lose their memory."""

    def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        replies = list(super().deliver(calls))
        self.restore({})
        return replies


def test_control_an_engine_that_loses_memories_ends_with_other_weights() -> None:
    after = simulate(algorithm("fedssl"), federated_data(), engine=ForgettingEngine)
    assert not same_bits(run_in_one_process("fedssl").state, after.state)


# Isolation of server and agents --------------------------------------------------------------


@every_engine
@pytest.mark.parametrize("whom", ["q0", "q0 q1"])
def test_an_agent_cannot_write_into_the_servers_state(name: str, whom: str) -> None:
    sent = Payload()
    with running_engine(name) as engine:
        reply = run_step(engine, STEPS.overwrite_input, sent, whom)[0]
    assert torch.equal(sent.w["a"], torch.ones(2)) and torch.equal(sent.t, torch.zeros(3))
    assert torch.equal(
        reply.payload.w["a"], torch.full((2,), 9.0)
    )  # the control: the agent did write


class SharingEngine(LocalEngine):
    """Violates the contract: messages are not copied in either direction."""

    def _copy_message(self, message: Message) -> Message:
        return message


@every_engine
def test_an_agent_gets_the_request_unchanged_by_the_agent_before_it(name: str) -> None:
    with running_engine(name) as engine:
        for reply in [*run_step(engine, STEPS.add_one), *run_step(engine, STEPS.add_one, number=2)]:
            assert torch.equal(reply.payload.t, torch.ones(3))
            assert torch.equal(reply.payload.w["a"], torch.tensor([2.0, 1.0]))


@every_engine
def test_a_reply_is_not_changed_by_the_next_visit(name: str) -> None:
    with running_engine(name) as engine:
        replies = run_step(engine, STEPS.fill)
    assert [reply.payload.t.tolist() for reply in replies] == [[n] * 3 for n in (4, 7, 5)]
    assert [reply.payload.w["a"].tolist() for reply in replies] == [[n] * 2 for n in (4, 7, 5)]


def test_control_an_engine_that_copies_no_message_shares_memory() -> None:
    shared = SharingEngine(agents(), seed=3, device=CPU)
    assert [reply.payload.t[0] for reply in run_step(shared, STEPS.add_one)] == [3, 3, 3]
    assert [reply.payload.t[0] for reply in run_step(shared, STEPS.fill)] == [5, 5, 5]


@every_engine_also_in_processes
def test_the_server_cannot_write_into_an_agents_memory(name: str) -> None:
    with running_engine(name) as engine:
        reply = run_step(engine, STEPS.overwrite_input, whom="q0")[0].payload
        reply.w["a"].fill_(0.0)
        reply.t.fill_(0.0)
        kept = run_step(engine, STEPS.send_memory, whom="q0", number=2)[0].payload.w
        assert torch.equal(kept["a"], torch.full((2,), 9.0))
        assert torch.equal(kept["t"], torch.full((3,), 9.0))


# Declining and errors ------------------------------------------------------------------------


@every_engine
def test_a_declined_reply_keeps_its_place_in_the_order(name: str) -> None:
    with running_engine(name) as engine:
        replies = run_step(engine, STEPS.decline)
    assert [reply.declined for reply in replies] == [True, False, True]
    assert replies[0].content == Declined("q0 has nothing to say")


@every_engine
def test_of_several_errors_the_first_in_the_order_of_calls_is_raised(name: str) -> None:
    first, second, _ = ENGINES[name].errors
    with running_engine(name) as engine:
        with pytest.raises(first, match="q0"):
            run_step(engine, STEPS.fail)
        with pytest.raises(second, match="q1"):
            run_step(engine, STEPS.fail, whom="q2 q1 q0", number=2)
        # The next delivery has no reply of the failed one.
        assert [r.payload.text for r in run_step(engine, STEPS.draw, number=3)] == [
            "q0",
            "q1",
            "q2",
        ]


@every_engine
def test_numbers_that_are_not_finite_are_refused_in_requests_and_in_replies(name: str) -> None:
    with running_engine(name) as engine:
        with pytest.raises(ENGINES[name].errors[2]):
            run_step(engine, STEPS.diverge)
        with pytest.raises(MessageError, match=r"Payload\.t has numbers that are not finite"):
            run_step(engine, STEPS.draw, Payload(t=torch.full((3,), float("inf"))))
        own = [Payload(), Payload(), Payload(w={"a": torch.full((2,), float("nan"))})]
        calls = [Call(a, STEPS.draw, m, 1) for a, m in zip(engine.roster(), own, strict=True)]
        with pytest.raises(MessageError, match=r"Payload\.w has numbers that are not finite"):
            list(engine.deliver(calls))
        assert not run_step(engine, STEPS.draw, number=2)[0].declined  # the control


# Replay and loss ---------------------------------------------------------------------------


@every_engine
def test_a_repeated_visit_has_the_same_reply(name: str) -> None:
    with running_engine(name) as engine:
        first = run_step(engine, STEPS.draw, Payload(number=2.0))
        run_step(engine, STEPS.draw, Payload(number=2.0), number=2)
        assert same_replies(run_step(engine, STEPS.draw, Payload(number=2.0)), first)


@pytest.mark.parametrize("name", [mark for n, mark in NAMES.items() if ENGINES[n].survives])
def test_a_visit_whose_process_is_killed_is_repeated_with_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    marker = tmp_path / "died"
    with running_engine(name) as engine:
        replies = run_step(engine, STEPS.die_once, Payload(text=str(marker)))
    assert marker.exists()
    with running_engine("local") as reference:  # the marker exists, so no process dies here
        assert same_replies(replies, run_step(reference, STEPS.die_once, Payload(text=str(marker))))


# Memories ----------------------------------------------------------------------------------


@every_engine
def test_calls_of_one_agent_run_in_order_and_each_sees_the_memory_of_the_last(
    name: str,
) -> None:
    with running_engine(name) as engine:
        roster = {agent.id: agent for agent in engine.roster()}
        calls = [
            Call(roster[n], STEPS.count, Payload(), 1, v)
            for n, v in (("q0", 1), ("q1", 1), ("q0", 2), ("q0", 3), ("q1", 2))
        ]
        replies = list(engine.deliver(calls))
    assert [reply.payload.number for reply in replies] == [1.0, 1.0, 2.0, 3.0, 2.0]
    assert {reply.payload.text for reply in replies} == {"z n a"}


@pytest.mark.fast_cases("local", "2 workers", "sites")
@every_engine_also_in_processes
def test_saved_memories_do_not_change_later_and_can_be_restored(
    name: str,
) -> None:
    with running_engine(name) as engine:
        run_step(engine, STEPS.count, whom="q0 q1")
        before = engine.memories()
        assert [r.payload.number for r in run_step(engine, STEPS.count, number=2)] == [
            2.0,
            2.0,
            1.0,
        ]
        engine.restore(before)
        # As after a resume: the same visit from the same memory.
        assert [r.payload.number for r in run_step(engine, STEPS.count, number=2)] == [
            2.0,
            2.0,
            1.0,
        ]
        engine.restore({"q1": before["q1"]})  # the others start with empty memory
        assert [r.payload.number for r in run_step(engine, STEPS.count, number=3)] == [
            1.0,
            2.0,
            1.0,
        ]


@pytest.mark.fast_cases("local", "2 workers", "sites")
@every_engine_also_in_processes
def test_a_step_that_sets_no_memory_keeps_the_agents_memory(name: str) -> None:
    with running_engine(name) as engine:
        run_step(engine, STEPS.count)
        assert {r.payload.text for r in run_step(engine, STEPS.list_memory, number=2)} == {"z n a"}
        assert [r.payload.number for r in run_step(engine, STEPS.count, number=3)] == [2.0] * 3


# The end -----------------------------------------------------------------------------------


@pytest.mark.fast_cases(2)
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no list of open files")
@every_engine
def test_an_engine_can_be_closed_twice_and_leaves_no_file_open(name: str) -> None:
    before = transports.open_files()
    with running_engine(name) as engine:
        run_step(engine, STEPS.draw)
        engine.close()
    assert transports.open_files() == before


@pytest.mark.fast_cases(2)
@every_engine
def test_a_labelled_server_is_visited_like_any_other_agent(name: str) -> None:
    parties = at_server()
    state, _ = run_on_engine(name, "fedssl", parties)
    assert same_bits(simulate(algorithm("fedssl"), at_server()).state, state)


# The role decides which rows a step may read.
@every_engine
def test_a_step_gets_the_rows_of_its_role(name: str) -> None:
    rows = LabelledRows(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long), torch.arange(2))
    both = dataclasses.replace(agents(4)[0], held_labelled=rows)
    with running_engine(name, [both, *agents()[1:]]) as engine:
        assert [a.role for a in engine.roster()] == ["mixed", "query", "query"]
