"""An algorithm defined outside of privssl, and for each promise one that breaks it."""

import os
from dataclasses import dataclass, field
from typing import Any

import pydantic.dataclasses
import torch
from torch import Tensor

from accounting.errors import BudgetExhausted
from privssl.algorithms.base import Algorithm
from privssl.algorithms.baselines import dp_classifier
from privssl.algorithms.local_ssl import ModelState, ModelUpdate, model_update
from privssl.core.agents import QueryAgent, SupportAgent
from privssl.core.aggregation import WeightedMean
from privssl.core.federation import Federation
from privssl.core.messages import BUDGET_EXHAUSTED, Declined, Message, StateDict
from privssl.core.task import Context, on_agent
from privssl.settings.schema import Positive, strict
from privssl.training import local_training, optim
from privssl.training.losses import hard_label_loss

HERE = os.getpid()  # the process that is not a worker
TRUE_LABELS: list[Tensor] = []  # the true labels, where a test leaks them


@dataclass(frozen=True)
class Sent(Message):
    """Weights, and further tensors that a promise-breaking algorithm sends."""

    F: StateDict
    more: StateDict = field(default_factory=dict)


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class OwnConfig:
    """Section ``algorithm``."""

    name: str = "own"
    rounds: Positive = 3


class Own(Algorithm[ModelState]):
    """Averages one step on labels with one on pseudo-labels; memory counts the latter steps."""

    Config, StateType, can_be_private = OwnConfig, ModelState, True

    def start(self, federation: Federation) -> ModelState:
        return ModelState(self.initial_classifier(federation))

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        F = WeightedMean("F")
        if self.plan is None or federation.round.number <= self.plan.visits:
            federation.call_all(federation.support, self.learn, Sent(state.F), aggregator=F)
        federation.call_all(federation.query, self.guess, Sent(state.F), aggregator=F)
        return ModelState(F.value_or(state.F))

    def classifier(self, state: ModelState) -> StateDict:
        return state.F

    def check_private(self) -> None:
        dp_classifier.check_classifier(self._F, self.task)

    @on_agent
    def learn(self, agent: SupportAgent, msg: Sent, ctx: Context) -> Sent | ModelUpdate | Declined:
        F = self.load_classifier(msg.F, ctx)
        if self.plan is None:
            return self.step(agent.labelled.x, agent.labelled.y, msg, ctx)
        try:
            dp_classifier.train_classifier(self.plan, F, agent, ctx, flip=False)
        except BudgetExhausted:
            return BUDGET_EXHAUSTED
        return model_update(F)  # under a plan only F may depend on labelled rows

    @on_agent
    def guess(self, agent: QueryAgent, msg: Sent, ctx: Context) -> Sent | Declined:
        x = agent.unlabelled.x
        seen = local_training.network_input(x, ctx.device)
        y = self.load_classifier(msg.F, ctx)(seen).argmax(dim=1)
        agent.memory = {"n": agent.memory.get("n", torch.zeros(())) + 1}
        return self.step(x, y, msg, ctx, rate=0.05 / float(agent.memory["n"]))

    def step(self, x: Tensor, y: Tensor, msg: Sent, ctx: Context, rate: float = 0.1) -> Sent:
        """One step on 8 of the rows."""
        F = self.load_classifier(msg.F, ctx)
        picked = local_training.draw_rows(len(x), 8, ctx.rng("rows"))
        seen = local_training.network_input(x[picked], ctx.device)
        loss = hard_label_loss({"x": seen, "y": y[picked]}, F=F)
        local_training.minimise(optim.SGD(F.parameters(), lr=rate), loss)
        ctx.log_metric("train/loss_F", local_training.mean_of([loss.detach()]))
        return Sent(local_training.to_send(F.state_dict()), self.also(x, ctx))

    def also(self, x: Tensor, ctx: Context) -> StateDict:
        """The tensors sent beside weights: none."""
        return {}


def shifted(weights: StateDict, by: float | Tensor) -> StateDict:
    return {name: tensor + by for name, tensor in weights.items()}


# Algorithms that break the promise of their name ----------------------------------------------


class Learns(Own):
    def round(self, state: ModelState, federation: Federation) -> ModelState:
        super().round(state, federation)
        return state


class NoReply(Own):
    def round(self, state: ModelState, federation: Federation) -> ModelState:
        return ModelState(shifted(super().round(state, federation).F, 1e-3))


class Momentum(Own):
    """Changes the weights without replies, except in the first round."""

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        F = super().round(state, federation).F
        return ModelState(shifted(F, 1e-3 * (federation.round.number - 1)))


class Metrics(Own):
    def also(self, x: Tensor, ctx: Context) -> StateDict:
        ctx.log_metric("Mean of my rows!", float(x.float().mean()))
        return {}


class Determinism(Own):
    """Draws from the global generator."""

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        return ModelState(shifted(super().round(state, federation).F, 1e-3 * torch.rand(1)))


class Kept(Own):
    """Counts its visits in an attribute of the algorithm object."""

    visits = 0

    @on_agent
    def guess(self, agent: QueryAgent, msg: Sent, ctx: Context) -> Sent | Declined:
        self.visits += 1
        x = agent.unlabelled.x
        return self.step(x, torch.zeros(len(x), dtype=torch.long), msg, ctx, 0.1 / self.visits)


class Unseeded(Own):
    """Ignores the seed of the run."""

    def initial_classifier(self, federation: Federation) -> StateDict:
        return shifted({n: torch.zeros_like(w) for n, w in self._F.state_dict().items()}, 0.01)

    def step(self, x: Tensor, y: Tensor, msg: Sent, ctx: Context, rate: float = 0.1) -> Sent:
        F = self.load_classifier(msg.F, ctx)
        seen = local_training.network_input(x[:8], ctx.device)
        loss = hard_label_loss({"x": seen, "y": y[:8]}, F=F)
        local_training.minimise(optim.SGD(F.parameters(), lr=rate), loss)
        return Sent(local_training.to_send(F.state_dict()))


class Order(Kept):
    """Its steps depend on a counter of the algorithm object."""


class Fields(Own):
    """Adds an undeclared attribute to a message."""

    def step(self, x: Tensor, y: Tensor, msg: Sent, ctx: Context, rate: float = 0.1) -> Sent:
        reply = super().step(x, y, msg, ctx, rate)
        object.__setattr__(reply, "beside", 1.0)
        return reply

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        request = Sent(state.F)
        object.__setattr__(request, "beside", 1.0)
        replies = federation.call_all(federation.support, self.learn, request)
        return ModelState(dict(vars(replies[0].payload)["F"]) if replies else state.F)


class Rows(Own):
    def also(self, x: Tensor, ctx: Context) -> StateDict:
        return {"seen": x[:2].float()}


class Resume(Own):
    """Keeps its momentum in an attribute of the algorithm object."""

    last: StateDict | None = None

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        new = super().round(state, federation).F
        if self.last is not None:
            new = {name: w + 0.5 * (w - self.last[name]) for name, w in new.items()}
        self.last = state.F
        return ModelState(new)


class Labels(Own):
    """Trains on labels that its agents do not have."""

    @on_agent
    def guess(self, agent: QueryAgent, msg: Sent, ctx: Context) -> Sent | Declined:
        rows = agent.unlabelled
        return self.step(rows.x, TRUE_LABELS[-1][rows.ids], msg, ctx)


class Blind(Own):
    """Uses no labels."""

    @on_agent
    def learn(self, agent: SupportAgent, msg: Sent, ctx: Context) -> Sent | Declined:
        y = torch.zeros(len(agent.labelled.y), dtype=torch.long)
        return self.step(agent.labelled.x, y, msg, ctx)


class Parties(Own):
    """Divides by the number of agents minus one."""

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        new, others = super().round(state, federation).F, len(federation.query) - 1
        return ModelState(
            {n: w + (1e-3 / others if others else float("nan")) for n, w in new.items()}
        )


class Workers(Own):
    """Depends on the process that runs a step."""

    def step(self, x: Tensor, y: Tensor, msg: Sent, ctx: Context, rate: float = 0.1) -> Sent:
        elsewhere = os.getpid() != HERE
        return super().step(x, y, msg, ctx, rate * (2.0 if elsewhere else 1.0))


class Sites(Own):
    """Its server reads what a step wrote to the algorithm object."""

    seen = 0

    def step(self, x: Tensor, y: Tensor, msg: Sent, ctx: Context, rate: float = 0.1) -> Sent:
        self.seen = 1
        return super().step(x, y, msg, ctx, rate)

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        return ModelState(shifted(super().round(state, federation).F, 1e-3 * self.seen))


class Privacy(Own):
    """Reads labelled rows without a charge."""

    @on_agent
    def learn(self, agent: SupportAgent, msg: Sent, ctx: Context) -> Sent | Declined:
        return self.step(agent.labelled.x, agent.labelled.y, msg, ctx)


class Unvisited(Own):
    """Visits no support agent in a private run."""

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        F = WeightedMean("F")
        federation.call_all(federation.query, self.guess, Sent(state.F), aggregator=F)
        return ModelState(F.value_or(state.F))


class OwnPlan(Own):
    """Defines the cost of a visit itself."""

    @classmethod
    def make_plan(cls, *given: Any, **named: Any) -> Any:
        return super().make_plan(*given, **named)


class FixedName(Own):
    """Has a Config without a free ``name``."""

    @pydantic.dataclasses.dataclass(frozen=True, config=strict)
    class Config:
        rounds: Positive = 3


# Steps whose annotations other processes cannot use -------------------------------------------


class Unannotated(Own):
    @on_agent
    def guess(self, agent, msg, ctx):  # type: ignore[no-untyped-def]
        return super().guess(agent, msg, ctx)


class NoAnswerNamed(Own):
    @on_agent
    def guess(self, agent: QueryAgent, msg: Sent, ctx: Context) -> Message:  # type: ignore[override]
        return super().guess(agent, msg, ctx)


class Unresolved(Own):
    @on_agent
    def guess(self, agent: QueryAgent, msg: "Absent", ctx: Context) -> Sent | Declined:  # type: ignore[name-defined] # noqa: F821
        return super().guess(agent, msg, ctx)


class ThreeArguments(Own):
    @on_agent
    def guess(self, agent: QueryAgent, msg: Sent) -> Sent | Declined:  # type: ignore[override]
        return Declined("no context")
