"""Algorithms defined outside of privssl with one mistake each, which a run must report."""

import dataclasses
import random
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import pydantic.dataclasses
import torch
from torch import Tensor

from privssl.algorithms.base import Algorithm
from privssl.algorithms.local_ssl import ModelState
from privssl.core.agents import QueryAgent
from privssl.core.aggregation import WeightedMean
from privssl.core.federation import Federation
from privssl.core.messages import Declined, Message, StateDict
from privssl.core.task import Context, on_agent
from privssl.settings.schema import Positive, strict
from tests.testing.own_method import Own, Sent, shifted


@dataclasses.dataclass(frozen=True)
class Wide:
    """A state that may hold any value."""

    F: StateDict
    more: Any = None


class _Wide(Own):
    StateType = Wide  # type: ignore[assignment]
    more: ClassVar[Any] = None

    def start(self, federation: Federation) -> Any:
        return Wide(self.initial_classifier(federation), self.more)


# Mistakes of steps --------------------------------------------------------------------------------


class _Guess(Own):
    """Its query step calls ``first``."""

    def first(self, agent: Any, ctx: Context) -> Any:
        """Return the reply of the step, or None for the usual reply."""

    @on_agent
    def guess(self, agent: QueryAgent, msg: Sent, ctx: Context) -> Sent | Declined:
        instead: Any = self.first(agent, ctx)
        return super().guess(agent, msg, ctx) if instead is None else instead


class Raises(_Guess):
    def first(self, agent: Any, ctx: Context) -> Any:
        raise ValueError("shapes do not match")


class LabelsOfUnlabelled(_Guess):
    def first(self, agent: Any, ctx: Context) -> Any:
        return agent.unlabelled.y


class NoMessage(_Guess):
    def first(self, agent: Any, ctx: Context) -> Any:
        return {"F": 1}


@dataclasses.dataclass(frozen=True)
class Undeclared(Message):
    F: StateDict


class OtherMessage(_Guess):
    def first(self, agent: Any, ctx: Context) -> Any:
        return Undeclared(self._F.state_dict())


class ArraySent(_Guess):
    def first(self, agent: Any, ctx: Context) -> Any:
        return Sent(np.ones(3))  # type: ignore[arg-type]


class NumbersInStateDict(_Guess):
    def first(self, agent: Any, ctx: Context) -> Any:
        return Sent({}, {"loss": 1.0})  # type: ignore[dict-item]


class NotFinite(_Guess):
    def first(self, agent: Any, ctx: Context) -> Any:
        return Sent(shifted(self._F.state_dict(), float("nan")))


class RowsChanged(_Guess):
    def first(self, agent: Any, ctx: Context) -> Any:
        agent.unlabelled.x.fill_(0)


class SetOnAgent(_Guess):
    def first(self, agent: Any, ctx: Context) -> Any:
        agent.teacher = torch.ones(2)


class MemoryIsAList(_Guess):
    def first(self, agent: Any, ctx: Context) -> Any:
        agent.memory = [torch.ones(2)]
        return Declined("done")


class TextLogged(_Guess):
    def first(self, agent: Any, ctx: Context) -> Any:
        ctx.log_metric("train/loss", "low")  # type: ignore[arg-type]


class AccuracyLogged(_Guess):
    def first(self, agent: Any, ctx: Context) -> Any:
        ctx.log_metric("test/accuracy", 1.0)


# Mistakes of the server ---------------------------------------------------------------------------


class NoState(Own):
    def round(self, state: ModelState, federation: Federation) -> Any:
        super().round(state, federation)


class OtherState(Own):
    def round(self, state: ModelState, federation: Federation) -> Any:
        return Wide(super().round(state, federation).F)


class ListInState(_Wide):
    more: ClassVar[Any] = ([1.0],)


class ArrayInState(_Wide):
    more: ClassVar[Any] = {"p": np.ones(2)}


class NumberAsKey(_Wide):
    more: ClassVar[Any] = {0: torch.ones(2)}


class GradientInState(_Wide):
    def start(self, federation: Federation) -> Any:
        return Wide(self.initial_classifier(federation), torch.ones(2, requires_grad=True))


class RoundRaises(Own):
    def round(self, state: ModelState, federation: Federation) -> Any:
        return state.G  # type: ignore[attr-defined]


class ReadsAggregated(Own):
    def round(self, state: ModelState, federation: Federation) -> Any:
        F = WeightedMean("F")
        replies = federation.call_all(federation.query, self.guess, Sent(state.F), aggregator=F)
        return [reply.payload.more for reply in replies]


class PartOfClassifier(Own):
    def classifier(self, state: ModelState) -> StateDict:
        return {name: w for name, w in state.F.items() if "bias" not in name}


class NetworkAsClassifier(Own):
    def classifier(self, state: ModelState) -> Any:
        return self._F


class TextMetric(Own):
    def metrics(self, state: ModelState) -> Any:
        return {"train/teacher": "good"}


class OwnAccuracy(Own):
    def metrics(self, state: ModelState) -> Mapping[str, float]:
        return {"test/accuracy": 1.0}


class KeptOnItself(Own):
    rounds = 0

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        self.rounds += 1
        return super().round(state, federation)


class Drawing(Own):
    """Draws from all global generators, at the server and at agents."""

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        by = torch.rand(1) + random.random() + float(np.random.rand())
        return ModelState(shifted(super().round(state, federation).F, 1e-3 * by))

    @on_agent
    def guess(self, agent: QueryAgent, msg: Sent, ctx: Context) -> Sent | Declined:
        by = torch.rand(1) + random.random() + float(np.random.rand())
        return Sent(shifted(super().guess(agent, msg, ctx).F, 1e-3 * by))  # type: ignore[union-attr]


# Mistakes of classes and configs ------------------------------------------------------------------


class OtherInit(Own):
    def __init__(self, config: Any) -> None:
        self.cfg = config


class InitRaises(Own):
    def __init__(self, config: Any, task: Any, plan: Any = None) -> None:
        super().__init__(config, task, plan)
        task.generator()


class NoProblems(Own):
    @classmethod
    def problems(cls, config: Any) -> Any:
        return None


class ProblemsRaise(Own):
    @classmethod
    def problems(cls, config: Any) -> Iterator[Any]:
        yield config.algorithm.absent


class TextAsProblem(Own):
    @classmethod
    def problems(cls, config: Any) -> Iterator[Any]:
        yield "too many rounds"


class AnyTypes(Own):
    @dataclasses.dataclass(frozen=True)
    class Config:
        name: str = "own"
        rounds: int = 3


class Changeable(Own):
    @pydantic.dataclasses.dataclass(config=strict)
    class Config:
        name: str = "own"
        rounds: Positive = 3


class NoYaml(Own):
    @pydantic.dataclasses.dataclass(frozen=True, config=strict)
    class Config:
        name: str = "own"
        rounds: Positive = 3
        device: torch.device | None = None


class StateChangeable(Own):
    @dataclasses.dataclass
    class StateType:
        F: StateDict


@dataclasses.dataclass(frozen=True)
class DictOfTensors(Message):
    F: dict[str, Tensor]


class PlainMessage(Message):
    def __init__(self, F: StateDict) -> None:
        self.F = F


class MessageOfDict(Own):
    @on_agent
    def guess(self, agent: QueryAgent, msg: Sent, ctx: Context) -> DictOfTensors | Declined:  # type: ignore[override]
        return Declined("never")


class MessageWithoutFields(Own):
    @on_agent
    def guess(self, agent: QueryAgent, msg: Sent, ctx: Context) -> PlainMessage | Declined:  # type: ignore[override]
        return Declined("never")


class NeverPrivate(Own):
    can_be_private = False


class Unchecked(Own):
    check_private = Algorithm.check_private
