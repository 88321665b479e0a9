"""What only the local engine has; test_engine_conformance.py tests what all engines share."""

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
from tests.support.toy_worlds import unopened_account

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


def run_step(local: LocalEngine, step: Any, message: Message, round_number: int = 1) -> Reply[Any]:
    [reply] = local.deliver([Call(local.roster()[0], step, message, round_number)])
    return reply


# Messages -----------------------------------------------------------------------------------


def add_undeclared_field(agent: Agent, message: Weights, ctx: Any) -> Weights:
    object.__setattr__(message, "rows", ROWS.x)
    return message


def test_a_reply_with_an_undeclared_field_is_refused_or_stripped() -> None:
    with pytest.raises(TypeError, match="rows"):
        run_step(engine(), add_undeclared_field, weights())
    payload = run_step(engine(check_wire=True), add_undeclared_field, weights()).payload
    assert list(vars(payload)) == [field.name for field in dataclasses.fields(Weights)]


# Visits -------------------------------------------------------------------------------------


def draw(agent: Agent, message: Weights, ctx: Any) -> Weights:
    ctx.weight = 5.0
    ctx.log_metric("loss", 0.5)
    ctx.pseudo_labels(ROWS.ids, torch.eye(4))
    return Weights({"receipt": torch.zeros(0)}, torch.rand(4, generator=ctx.rng("z")))


def keep_charge_id(agent: Agent, message: Weights, ctx: Any) -> Weights:
    agent.memory = {**agent.memory, ctx.charge_id: torch.zeros(0)}
    return message


def test_a_visit_repeated_by_another_engine_has_another_charge_id() -> None:
    names = set()
    for _ in range(2):
        local = engine()
        run_step(local, keep_charge_id, weights())
        names |= set(local.memories()["q0"])
    assert len(names) == 2
    assert {name.split("@")[0] for name in names} == {"1/q0/keep_charge_id/1"}


# Telemetry ----------------------------------------------------------------------------------


class Meter:
    def __init__(self) -> None:
        self.seen = 0

    def observe(self, ids: Tensor, labels: Tensor, kept: Tensor) -> None:
        self.seen += len(ids)


def test_steps_report_metrics_and_pseudo_labels() -> None:
    meter = Meter()
    assert run_step(engine(meter=meter), draw, weights()).metrics == {"loss": 0.5}
    assert meter.seen == 4


def reachable(start: object) -> Iterator[object]:
    """All objects that an object refers to, directly or not, except through classes and modules."""
    found, left = {id(start)}, [start]
    while left:
        one = left.pop()
        yield one
        if not isinstance(one, type | ModuleType | FunctionType):
            new = [other for other in gc.get_referents(one) if id(other) not in found]
            found |= set(map(id, new))
            left += new


def test_no_step_can_reach_the_true_labels_of_the_meter() -> None:
    oracle = HiddenLabelMeter(torch.zeros(4, dtype=torch.int64))
    reached: list[object] = []

    def collect_reachable(agent: Agent, message: Weights, ctx: Any) -> Weights:
        reached.extend(reachable(ctx))
        return draw(agent, message, ctx)

    run_step(engine(meter=oracle), collect_reachable, weights())
    assert len(reached) > 5
    assert not any(one is oracle or one is oracle.true_labels for one in reached)
    assert oracle.report() == {"pseudo/coverage": 1.0, "pseudo/accuracy": 0.25}
    # The control: through a meter they are reachable.
    assert any(one is oracle.true_labels for one in reachable(SimpleNamespace(meter=oracle)))


def test_an_agent_with_an_account_reports_no_metrics() -> None:
    meter, closed = Meter(), []
    account = unopened_account(close=lambda: closed.append(1))
    agent = Agent(id="s0", held_unlabelled=ROWS, account=account)
    local = LocalEngine([agent], seed=3, device=torch.device("cpu"), meter=meter)
    assert run_step(local, draw, weights()).metrics == {}
    assert meter.seen == 0
    local.close()
    assert closed == [1]
