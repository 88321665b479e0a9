"""Settings of local training and of averages, the same for every baseline that trains by SGD."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated, Literal

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor

from privssl.algorithms.local_ssl import Amount, Share, select_stream_slice
from privssl.core.task import Context
from privssl.data.augmentations import view
from privssl.settings.schema import Positive, Problem, Rate, strict


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class LocalTrainingSettings:
    """Training on a party's own rows, the same for every baseline. Numbers are ours; the
    published ones are in docs/baselines.md."""

    rounds: Positive = 100
    local_epochs: Positive = 5  # of every visit, the server's included; FedMatch: 1
    batch_size: Positive = 32  # a last short batch is kept
    learning_rate: Rate = 0.01  # SGD, fresh at every visit; in round 1
    learning_rate_decay: Annotated[float, Field(gt=0, le=1)] = 1.0  # factor per round
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Share = 0.0
    # View of rows with given labels
    weak: Literal["none", "crop", "weak", "mid", "fedtrinet"] = "weak"
    flip: bool = False  # mirror images left to right: objects yes, digits no
    # of the rate: a factor per round, or half a cosine over all rounds (SemiFL)
    schedule: Literal["factor", "cosine"] = "factor"
    nesterov: bool = False  # SemiFL: true
    clip_gradients: Rate | None = None  # norm of a whole gradient at most; SemiFL's code: 1

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if self.schedule == "cosine" and self.learning_rate_decay != 1:
            text = f"{self.learning_rate_decay:g} has no effect with schedule cosine. Leave it out"
            yield Problem("learning_rate_decay", text)
        if self.nesterov and not self.momentum:
            yield Problem("nesterov", "true, but momentum is 0. Give momentum, or set false")

    def rate(self, round_number: int) -> float:
        """Learning rate in a round, counted from 1."""
        rounds_done = max(0, round_number - 1)  # what trains before round 1 has its rate
        if self.schedule == "cosine":
            return self.learning_rate * (1 + math.cos(math.pi * rounds_done / self.rounds)) / 2
        return self.learning_rate * self.learning_rate_decay**rounds_done

    def weak_view(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """A weak view of rows (B, *shape) in [-1, 1]."""
        return view(self.weak, x, rng, flip=self.flip)


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FederatedSettings(LocalTrainingSettings):
    """Training at several agents, and the average of what they send."""

    agents_per_round: Positive | None = None  # drawn from the agents averaged; null: all
    weights: Literal["rows", "equal"] = "rows"  # in the average; FedMatch: rows, FedProx equal

    def weigh(self, rows: int, ctx: Context) -> None:
        """Weigh the reply by its rows; no count leaves the agent under "equal"."""
        if self.weights == "rows":
            ctx.weight = float(rows)


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class ProximalSettings(FederatedSettings):
    """A method that may be federated as FedProx: ``weights: equal``, ``proximal: 0.01``."""

    proximal: Amount = 0.0  # mu; FedMatch's FedProx rows: 0.01. 0: FedAvg


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class StreamSettings(FederatedSettings):
    """A method of which an agent may be alone, or see its rows as a stream (FedMatch's Table 2)."""

    aggregation: Literal["mean", "none"] = "mean"  # none: each agent alone (FedMatch's Local-SL)
    stream_slices: Positive = 1  # above 1: agents see one slice of their rows after the other

    def select_current_slice(self, row_count: int, ctx: Context) -> Tensor:
        """Numbers of the rows of this round, out of ``row_count``, as stored."""
        return select_stream_slice(row_count, self.stream_slices, ctx.round, self.rounds)

    def problems(self) -> Iterator[Problem]:
        """Rows that are never used, and what an agent alone has no use for."""
        yield from super().problems()
        if self.aggregation == "none":
            default = {spec.name: spec.default for spec in dataclasses.fields(self)}["weights"]
            if self.weights != default:
                text = f"{self.weights}, but with aggregation none there is no average. Leave it"
                yield Problem("weights", f"{text} out, or set {default}")
            if mu := getattr(self, "proximal", 0.0):
                text = f"{mu:g}, but with aggregation none an agent has nothing to be pulled to"
                yield Problem("proximal", f"{text}. Set 0")
        if self.stream_slices > self.rounds:
            yield Problem(
                "stream_slices",
                f"{self.stream_slices}, but there are {self.rounds} rounds: some rows would never "
                "be used. Give at most that many",
            )

    def weigh(self, rows: int, ctx: Context) -> None:
        if self.aggregation == "mean":
            super().weigh(rows, ctx)
