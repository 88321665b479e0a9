"""The local engine, in what no other engine has; test_engine_conformance.py has what all owe."""

import dataclasses
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from privssl.core.agents import Agent, UnlabelledRows
from privssl.core.engine import Call
from privssl.core.messages import Message, Reply, StateDict
from privssl.engines.local import LocalEngine
from privssl.training.evaluation import HiddenLabelMeter

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
    [reply] = there.deliver([Call(there.roster()[0], step, message, round_number)])
    return reply


# The border ---------------------------------------------------------------------------------


def smuggle(agent: Agent, message: Weights, ctx: Any) -> Weights:
    object.__setattr__(message, "rows", ROWS.x)
    return message


def test_what_is_no_declared_field_does_not_get_out() -> None:
    with pytest.raises(TypeError, match="rows"):
        ask(engine(), smuggle, weights())
    said = ask(engine(check_wire=True), smuggle, weights()).payload
    assert list(vars(said)) == [field.name for field in dataclasses.fields(Weights)]


# Visits -------------------------------------------------------------------------------------


def draw(agent: Agent, message: Weights, ctx: Any) -> Weights:
    ctx.weight = 5.0
    ctx.log_metric("loss", 0.5)
    ctx.pseudo_labels(ROWS.ids, torch.eye(4))
    return Weights({"receipt": torch.zeros(0)}, torch.rand(4, generator=ctx.rng("z")))


def receipts(agent: Agent, message: Weights, ctx: Any) -> Weights:
    agent.memory = {**agent.memory, ctx.charge_id: torch.zeros(0)}
    return message


def test_a_visit_that_is_run_again_by_another_process_is_charged_anew() -> None:
    names = set()
    for _ in range(2):
        there = engine()
        ask(there, receipts, weights())
        names |= set(there.memories()["q0"])
    assert len(names) == 2
    assert {name.split("@")[0] for name in names} == {"1/q0/receipts/1"}


# Telemetry ----------------------------------------------------------------------------------


class Meter:
    def __init__(self) -> None:
        self.seen = 0

    def observe(self, ids: Tensor, labels: Tensor, kept: Tensor) -> None:
        self.seen += len(ids)


def test_steps_can_report_losses_and_guesses() -> None:
    meter = Meter()
    assert ask(engine(meter=meter), draw, weights()).metrics == {"loss": 0.5}
    assert meter.seen == 4


def reachable(start: object) -> Iterator[object]:
    """All that can be got at from an object, but for classes and modules."""
    found, left = {id(start)}, [start]
    while left:
        one = left.pop()
        yield one
        if not isinstance(one, type | ModuleType | FunctionType):
            new = [other for other in gc.get_referents(one) if id(other) not in found]
            found |= set(map(id, new))
            left += new


def test_no_step_can_reach_what_the_meter_knows_to_be_true() -> None:
    oracle = HiddenLabelMeter(torch.zeros(4, dtype=torch.int64))
    reached: list[object] = []

    def look(agent: Agent, message: Weights, ctx: Any) -> Weights:
        reached.extend(reachable(ctx))
        return draw(agent, message, ctx)

    ask(engine(meter=oracle), look, weights())
    assert len(reached) > 5
    assert not any(one is oracle or one is oracle.true_labels for one in reached)
    assert oracle.report() == {"pseudo/coverage": 1.0, "pseudo/accuracy": 0.25}
    # The control: it would be found.
    assert any(one is oracle.true_labels for one in reachable(SimpleNamespace(meter=oracle)))


def test_no_curve_leaves_an_agent_whose_rows_are_under_a_claim() -> None:
    meter, closed = Meter(), []
    account: Any = SimpleNamespace(close=lambda: closed.append(1), visits=lambda: 0, events=())
    agent = Agent(id="s0", held_unlabelled=ROWS, account=account)
    there = LocalEngine([agent], seed=3, device=torch.device("cpu"), meter=meter)
    assert ask(there, draw, weights()).metrics == {}
    assert meter.seen == 0
    there.close()
    assert closed == [1]
