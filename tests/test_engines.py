"""The local engine: what crosses the border is a copy, and a visit depends on its key alone."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from privssl.agents import Agent, UnlabelledRows
from privssl.engines import Call
from privssl.engines.local import LocalEngine
from privssl.messages import Message, Reply, StateDict

ROWS = UnlabelledRows(torch.zeros(4, 1, 8, 8), torch.arange(4))


@dataclass(frozen=True)
class Weights(Message):
    w: StateDict
    t: Tensor


def weights() -> Weights:
    return Weights({"a": torch.ones(2)}, torch.zeros(3))


def engine(*names: str, **how: Any) -> LocalEngine:
    agents = [Agent(id=name, held_unlabelled=ROWS) for name in names or ("q0",)]
    return LocalEngine(agents, seed=3, device=torch.device("cpu"), **how)


def ask(there: LocalEngine, step: Any, message: Message, round_number: int = 1) -> Reply[Any]:
    return there.deliver([Call(there.roster()[0], step, message, round_number)])[0]


# The border ---------------------------------------------------------------------------------


def scribble(agent: Agent, message: Weights, ctx: Any) -> Weights:
    """Writes into what it was given, keeps it, and sends it back."""
    message.w["a"].fill_(9.0)
    message.t.fill_(9.0)
    agent.memory = {"a": message.w["a"], "t": message.t}
    return message


@pytest.mark.parametrize("check_wire", [False, True])
def test_an_agent_cannot_write_into_the_servers_state(check_wire: bool) -> None:
    sent = weights()
    there = engine(check_wire=check_wire)
    reply = ask(there, scribble, sent)
    assert torch.equal(sent.w["a"], torch.ones(2)) and torch.equal(sent.t, torch.zeros(3))
    assert torch.equal(reply.said.w["a"], torch.full((2,), 9.0))  # the control: it did write


@pytest.mark.parametrize("check_wire", [False, True])
def test_the_server_cannot_write_into_an_agents_memory(check_wire: bool) -> None:
    there = engine(check_wire=check_wire)
    said = ask(there, scribble, weights()).said
    said.w["a"].fill_(0.0)
    said.t.fill_(0.0)
    memory = there.memories()["q0"]
    assert torch.equal(memory["a"], torch.full((2,), 9.0))
    assert torch.equal(memory["t"], torch.full((3,), 9.0))


def smuggle(agent: Agent, message: Weights, ctx: Any) -> Weights:
    object.__setattr__(message, "rows", ROWS.x)
    return message


def test_what_is_no_declared_field_does_not_get_out() -> None:
    with pytest.raises(TypeError, match="rows"):
        ask(engine(), smuggle, weights())
    said = ask(engine(check_wire=True), smuggle, weights()).said
    assert list(vars(said)) == [field.name for field in dataclasses.fields(Weights)]


# Visits -------------------------------------------------------------------------------------


def draw(agent: Agent, message: Weights, ctx: Any) -> Weights:
    ctx.weight = 5.0
    ctx.note("loss", 0.5)
    ctx.pseudo_labels(ROWS.ids, torch.eye(4))
    return Weights({"receipt": torch.zeros(0)}, torch.rand(4, generator=ctx.rng("z")))


def test_randomness_follows_from_seed_round_agent_step_and_visit() -> None:
    there = engine("q0", "q1")
    first, second = there.roster()
    calls = [
        Call(first, draw, weights(), 1),
        Call(first, draw, weights(), 1),  # the same key: a repeated delivery
        Call(first, draw, weights(), 1, visit=2),
        Call(first, draw, weights(), 2),
        Call(second, draw, weights(), 1),
    ]
    drawn = [tuple(reply.said.t.tolist()) for reply in there.deliver(calls)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 4
    assert tuple(ask(engine(), draw, weights()).said.t.tolist()) == drawn[0]  # alone as in company


def receipts(agent: Agent, message: Weights, ctx: Any) -> Weights:
    agent.memory = {**agent.memory, ctx.receipt: torch.zeros(0)}
    return message


def test_a_visit_that_is_run_again_by_another_process_is_charged_anew() -> None:
    names = set()
    for _ in range(2):
        there = engine()
        ask(there, receipts, weights())
        names |= set(there.memories()["q0"])
    assert len(names) == 2
    assert {name.split("@")[0] for name in names} == {"1/q0/receipts/1"}


def test_replies_come_in_the_order_of_calls_and_the_roster_in_natural_order() -> None:
    there = engine("q10", "q9", "q2")
    roster = there.roster()
    assert [agent.id for agent in roster] == ["q2", "q9", "q10"]
    replies = there.deliver([Call(agent, draw, weights(), 1) for agent in roster[::-1]])
    assert [reply.sender.id for reply in replies] == ["q10", "q9", "q2"]
    assert [reply.weight for reply in replies] == [5.0] * 3


# Telemetry ----------------------------------------------------------------------------------


class Meter:
    def __init__(self) -> None:
        self.seen = 0

    def observe(self, ids: Tensor, labels: Tensor, kept: Tensor) -> None:
        self.seen += len(ids)


def test_steps_can_report_losses_and_guesses() -> None:
    meter = Meter()
    assert ask(engine(meter=meter), draw, weights()).notes == {"loss": 0.5}
    assert meter.seen == 4


def test_no_curve_leaves_an_agent_whose_rows_are_under_a_claim() -> None:
    meter, closed = Meter(), []
    account: Any = SimpleNamespace(close=lambda: closed.append(1))
    agent = Agent(id="s0", held_unlabelled=ROWS, account=account)
    there = LocalEngine([agent], seed=3, device=torch.device("cpu"), meter=meter)
    assert ask(there, draw, weights()).notes == {}
    assert meter.seen == 0
    there.close()
    assert closed == [1]


# Memories -----------------------------------------------------------------------------------


def count(agent: Agent, message: Weights, ctx: Any) -> Weights:
    agent.memory = {"n": agent.memory.get("n", torch.zeros(())) + 1}
    return message


def test_remembered_values_stay_as_they_were_when_asked_for() -> None:
    there = engine("q0", "q1")
    ask(there, count, weights())
    before = there.memories()
    ask(there, count, weights(), 2)
    assert (float(before["q0"]["n"]), float(there.memories()["q0"]["n"])) == (1.0, 2.0)
    assert before["q1"] == {}


def test_restored_agents_go_on_where_they_were_and_others_start_anew() -> None:
    there, other = engine("q0", "q1"), engine("q0", "q1")
    ask(there, count, weights())
    other.deliver([Call(other.roster()[1], count, weights(), 1)])
    other.restore({"q0": there.memories()["q0"]})
    ask(other, count, weights(), 2)
    assert float(other.memories()["q0"]["n"]) == 2.0
    assert other.memories()["q1"] == {}
