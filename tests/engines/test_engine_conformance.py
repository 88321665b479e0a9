"""What every engine owes to a run, stated once and asked of each.

An engine under test is an ``Under``: how it is made for some agents, and what ends one of its
agents' visits from outside. The reference is the plain local engine, whose own promises that no
other has (copies instead of bytes, the meter) are in test_local_engine.py, as those of worker
processes alone are in test_process_pool.py. An engine that breaks a promise on purpose stands
beside each promise, and is found out.
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
    Told,
    agents,
    all_same,
    ask,
    made,
)
from tests.support.toy_worlds import Simulation, at_server, federated_data, same_bits, simulate


def _marks(name: str) -> list[pytest.MarkDecorator]:
    no_forks = pytest.mark.skipif(
        unsupported_reason(CPU) is not None, reason=f"no processes: {unsupported_reason(CPU)}"
    )
    forks = "worker" in name or "processes" in name
    return [no_forks] * forks + [pytest.mark.slow] * ENGINES[name].rare


NAMES = {name: pytest.param(name, marks=_marks(name)) for name in ENGINES}
#: A fork for each request takes most of the time, and finds what one process finds, except what
#: memories and killed processes become.
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
    with made(name, parties) as there:
        assert [(a.id, a.role) for a in there.roster()] == [
            ("q2", "query"), ("q9", "query"), ("q10", "query"),
        ]  # fmt: skip


@every_engine
@pytest.mark.parametrize("whom", ["q0 q1 q2", "q2 q0", "q1", "q1 q0 q1 q2 q1"])
def test_there_is_one_reply_to_each_call_in_the_order_of_the_calls(name: str, whom: str) -> None:
    with made(name) as there:
        replies = ask(there, STEPS.draw, whom=whom)
        assert " ".join(reply.sender.id for reply in replies) == whom
        assert " ".join(reply.payload.text for reply in replies) == whom
        assert list(there.deliver([])) == []


class ReverseOrderEngine(LocalEngine):
    """Breaks the promise: replies come in another order."""

    def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        return list(super().deliver(calls))[::-1]


def test_an_engine_that_mixes_up_replies_would_be_noticed() -> None:
    replies = ask(ReverseOrderEngine(agents(), seed=3, device=CPU), STEPS.draw)
    assert [reply.sender.id for reply in replies] != ["q0", "q1", "q2"]


# Equal bits --------------------------------------------------------------------------------


@every_engine
def test_replies_are_those_of_one_process(name: str) -> None:
    with made(name) as there, made("local") as reference:
        for number in (1, 2):
            told = Told(number=float(number))
            expected = ask(reference, STEPS.draw, told, number=number)
            assert all_same(ask(there, STEPS.draw, told, number=number), expected)
            # The control of the comparison: each part of a reply is in it.
            assert [reply.weight for reply in expected] == [4.0, 7.0, 5.0]
            assert expected[1].metrics == {"train/loss": number / 3}
            assert expected[1].payload.w["a"].dtype == torch.bfloat16


@every_engine
def test_each_agent_gets_its_own_message_where_they_differ(name: str) -> None:
    with made(name) as there:
        sent = [Told(number=n) for n in (1.0, 2.0, 3.0)]
        calls = [Call(a, STEPS.draw, m, 1) for a, m in zip(there.roster(), sent, strict=True)]
        assert [reply.payload.number for reply in there.deliver(calls)] == [1.0, 2.0, 3.0]


@every_engine_also_in_processes
def test_randomness_follows_from_seed_round_agent_step_and_visit(name: str) -> None:
    with made(name) as there:
        q0, q1, _ = there.roster()
        calls = [
            Call(q0, STEPS.draw, Told(), 1),
            Call(q0, STEPS.draw, Told(), 1, visit=2),
            Call(q0, STEPS.draw, Told(), 2),
            Call(q1, STEPS.draw, Told(), 1),
        ]
        drawn = [tuple(reply.payload.t.tolist()) for reply in there.deliver(calls)]
        alone = [
            tuple(next(iter(there.deliver([call]))).payload.t.tolist()) for call in calls[::-1]
        ]
    assert len(set(drawn)) == 4
    assert alone == drawn[::-1]  # whatever came before, and in whatever company


@functools.cache
def alone(case: str) -> Simulation:
    """Rounds of an algorithm in one process."""
    return simulate(algorithm(case), federated_data(dataset=rows_of(case)))


def among(name: str, case: str, parties: Any = None) -> tuple[Any, Mapping[str, Any]]:
    """State and memories after the same rounds on another engine."""
    recipe = algorithm(case)
    with tempfile.TemporaryDirectory() as folder:
        how: Any = lambda a, *, seed, device, check_wire: ENGINES[name].make(  # noqa: E731
            a, recipe, seed, Path(folder)
        )
        after = simulate(recipe, parties or federated_data(dataset=rows_of(case)), engine=how)
        with contextlib.closing(after.engine):
            return after.state, after.engine.memories()


def tensors_kept(name: str) -> bool:
    """Whether an engine's memories are what agents remember, and no names for it."""
    return not name.startswith("sites")


#: Those that use most of what a site has, on sites in processes; the contract tests ask every
#: algorithm on workers and on sites in one process. Sparse messages on workers.
QUICK = {("sites in processes", case) for case in ("fedssl", "semifl")} | {
    ("2 workers", "fedmatch, as printed")
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(n, c, marks=[*_marks(n), *[pytest.mark.slow] * ((n, c) not in QUICK)])
        for n in NAMES
        for c in CASES
        if not n.startswith("local")
    ],
)
def test_every_algorithm_comes_to_the_same_weights(name: str, case: str) -> None:
    state, memories = among(name, case)
    assert same_bits(alone(case).state, state)
    assert not tensors_kept(name) or same_bits(alone(case).engine.memories(), memories)


class Forgetful(LocalEngine):
    """Breaks a promise: agents remember nothing."""

    def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        replies = list(super().deliver(calls))
        self.restore({})
        return replies


def test_an_engine_that_loses_memories_would_be_noticed() -> None:
    after = simulate(algorithm("fedssl"), federated_data(), engine=Forgetful)
    assert not same_bits(alone("fedssl").state, after.state)


# The border --------------------------------------------------------------------------------


@every_engine
@pytest.mark.parametrize("whom", ["q0", "q0 q1"])
def test_an_agent_cannot_write_into_the_servers_state(name: str, whom: str) -> None:
    sent = Told()
    with made(name) as there:
        reply = ask(there, STEPS.scribble, sent, whom)[0]
    assert torch.equal(sent.w["a"], torch.ones(2)) and torch.equal(sent.t, torch.zeros(3))
    assert torch.equal(reply.payload.w["a"], torch.full((2,), 9.0))  # the control: it did write


class Sharing(LocalEngine):
    """Hands every agent the very same message, and the server what agents still have."""

    def _copy_message(self, message: Message) -> Message:
        return message


@every_engine
def test_an_agent_gets_what_was_sent_whatever_the_one_before_it_wrote_there(name: str) -> None:
    with made(name) as there:
        for reply in [*ask(there, STEPS.add_one), *ask(there, STEPS.add_one, number=2)]:
            assert torch.equal(reply.payload.t, torch.ones(3))
            assert torch.equal(reply.payload.w["a"], torch.tensor([2.0, 1.0]))


@every_engine
def test_a_reply_stays_as_it_was_returned_whatever_the_next_visit_writes_there(name: str) -> None:
    with made(name) as there:
        replies = ask(there, STEPS.fill)
    assert [reply.payload.t.tolist() for reply in replies] == [[n] * 3 for n in (4, 7, 5)]
    assert [reply.payload.w["a"].tolist() for reply in replies] == [[n] * 2 for n in (4, 7, 5)]


def test_an_engine_whose_agents_share_memory_would_be_noticed() -> None:
    shared = Sharing(agents(), seed=3, device=CPU)
    assert [reply.payload.t[0] for reply in ask(shared, STEPS.add_one)] == [3, 3, 3]
    assert [reply.payload.t[0] for reply in ask(shared, STEPS.fill)] == [5, 5, 5]


@every_engine_also_in_processes
def test_the_server_cannot_write_into_an_agents_memory(name: str) -> None:
    with made(name) as there:
        said = ask(there, STEPS.scribble, whom="q0")[0].payload
        said.w["a"].fill_(0.0)
        said.t.fill_(0.0)
        kept = ask(there, STEPS.recall, whom="q0", number=2)[0].payload.w
        assert torch.equal(kept["a"], torch.full((2,), 9.0))
        assert torch.equal(kept["t"], torch.full((3,), 9.0))


# Declining and errors ------------------------------------------------------------------------


@every_engine
def test_declining_stays_in_its_place(name: str) -> None:
    with made(name) as there:
        replies = ask(there, STEPS.hush)
    assert [reply.declined for reply in replies] == [True, False, True]
    assert replies[0].content == Declined("q0 has nothing to say")


@every_engine
def test_of_several_errors_the_first_by_the_order_of_calls_is_raised(name: str) -> None:
    first, second, _ = ENGINES[name].errors
    with made(name) as there:
        with pytest.raises(first, match="q0"):
            ask(there, STEPS.fail)
        with pytest.raises(second, match="q1"):
            ask(there, STEPS.fail, whom="q2 q1 q0", number=2)
        # The next delivery is whole: nothing of the one that broke off is taken for its own.
        assert [r.payload.text for r in ask(there, STEPS.draw, number=3)] == ["q0", "q1", "q2"]


@every_engine
def test_numbers_that_are_not_finite_come_over_the_border_in_neither_direction(name: str) -> None:
    with made(name) as there:
        with pytest.raises(ENGINES[name].errors[2]):
            ask(there, STEPS.diverge)
        with pytest.raises(MessageError, match=r"Told\.t has numbers that are not finite"):
            ask(there, STEPS.draw, Told(t=torch.full((3,), float("inf"))))
        own = [Told(), Told(), Told(w={"a": torch.full((2,), float("nan"))})]
        calls = [Call(a, STEPS.draw, m, 1) for a, m in zip(there.roster(), own, strict=True)]
        with pytest.raises(MessageError, match=r"Told\.w has numbers that are not finite"):
            list(there.deliver(calls))
        assert not ask(there, STEPS.draw, number=2)[0].declined  # the control


# Replay and loss ---------------------------------------------------------------------------


@every_engine
def test_a_visit_that_is_delivered_again_has_the_same_reply(name: str) -> None:
    with made(name) as there:
        first = ask(there, STEPS.draw, Told(number=2.0))
        ask(there, STEPS.draw, Told(number=2.0), number=2)
        assert all_same(ask(there, STEPS.draw, Told(number=2.0)), first)


@pytest.mark.parametrize("name", [mark for n, mark in NAMES.items() if ENGINES[n].survives])
def test_a_visit_whose_process_is_killed_is_done_to_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    marker = tmp_path / "died"
    with made(name) as there:
        replies = ask(there, STEPS.die_once, Told(text=str(marker)))
    assert marker.exists()
    with made("local") as reference:  # the marker is there now, so that no process dies here
        assert all_same(replies, ask(reference, STEPS.die_once, Told(text=str(marker))))


# Memories ----------------------------------------------------------------------------------


@every_engine
def test_calls_of_one_agent_are_done_one_after_the_other_and_each_sees_the_last(
    name: str,
) -> None:
    with made(name) as there:
        roster = {agent.id: agent for agent in there.roster()}
        calls = [
            Call(roster[n], STEPS.count, Told(), 1, v)
            for n, v in (("q0", 1), ("q1", 1), ("q0", 2), ("q0", 3), ("q1", 2))
        ]
        replies = list(there.deliver(calls))
    assert [reply.payload.number for reply in replies] == [1.0, 1.0, 2.0, 3.0, 2.0]
    assert {reply.payload.text for reply in replies} == {"z n a"}


@every_engine_also_in_processes
def test_what_was_remembered_stays_as_it_was_when_asked_for_and_can_be_put_back(
    name: str,
) -> None:
    with made(name) as there:
        ask(there, STEPS.count, whom="q0 q1")
        before = there.memories()
        assert [r.payload.number for r in ask(there, STEPS.count, number=2)] == [2.0, 2.0, 1.0]
        there.restore(before)
        # As after a resume: the same visit again, from the same memory.
        assert [r.payload.number for r in ask(there, STEPS.count, number=2)] == [2.0, 2.0, 1.0]
        there.restore({"q1": before["q1"]})  # the others start anew
        assert [r.payload.number for r in ask(there, STEPS.count, number=3)] == [1.0, 2.0, 1.0]


@every_engine_also_in_processes
def test_a_step_that_remembers_nothing_new_leaves_what_was_remembered(name: str) -> None:
    with made(name) as there:
        ask(there, STEPS.count)
        assert {r.payload.text for r in ask(there, STEPS.look, number=2)} == {"z n a"}
        assert [r.payload.number for r in ask(there, STEPS.count, number=3)] == [2.0] * 3


# The end -----------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no list of open files")
@every_engine
def test_an_engine_can_be_closed_twice_and_leaves_no_file_open(name: str) -> None:
    before = transports.open_files()
    with made(name) as there:
        ask(there, STEPS.draw)
        there.close()
    assert transports.open_files() == before


@every_engine
def test_a_labelled_server_is_an_agent_like_any_other(name: str) -> None:
    parties = at_server()
    state, _ = among(name, "fedssl", parties)
    assert same_bits(simulate(algorithm("fedssl"), at_server()).state, state)


# Kept for engines that hold labelled rows: a role decides what a step may read.
@every_engine
def test_a_step_gets_the_rows_of_its_role(name: str) -> None:
    rows = LabelledRows(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long), torch.arange(2))
    both = dataclasses.replace(agents(4)[0], held_labelled=rows)
    with made(name, [both, *agents()[1:]]) as there:
        assert [a.role for a in there.roster()] == ["mixed", "query", "query"]
