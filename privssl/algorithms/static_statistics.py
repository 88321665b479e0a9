"""Statistics of static batch norm, gathered over agents before a model is used (HeteroFL, SemiFL).

Each agent sends means and variances of its own rows; their mean over agents, by rows, goes into the
model. The next round distributes the same weights, so the papers' two gatherings are one. The layer
itself: ``models/static_norm.py``.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from privssl.core.aggregation import WeightedMean
from privssl.core.federation import Federation, Roster
from privssl.core.messages import Message, StateDict
from privssl.core.task import Context
from privssl.models.static_norm import collect, statistics_of
from privssl.runtime import randomness
from privssl.training import local_training

BIG_BATCH = 250  # rows at most in a pass; SemiFL's code


@dataclass(frozen=True)
class Statistics(Message):
    """Up from an agent: its rows' mean and variance at every static norm; weight: its rows."""

    statistics: StateDict


def compute_bn_statistics(F: nn.Module, x: Tensor, ctx: Context) -> Statistics:
    """Mean of the statistics of batches that differ by at most a row; not augmented.

    Args:
        F: with the global weights, on the device of the step.
        x: the agent's rows (N, *shape) as stored.
    """
    rng = randomness.stream(ctx.seed, 0, ctx.agent, "statistics")  # one order for all rounds
    x = x[torch.randperm(len(x), generator=rng)]  # batches of one class would vary too little
    batches = torch.tensor_split(x, -(-len(x) // BIG_BATCH))
    ctx.weight = float(len(x))
    collect(F, (local_training.network_input(batch, ctx.device) for batch in batches))
    return Statistics(statistics_of(F))


def aggregate_bn_statistics(
    F: StateDict, network: nn.Module, federation: Federation, request: Message,
    steps_by_roster: Iterable[tuple[Roster, Callable[..., Any]]],
) -> StateDict:  # fmt: skip
    """F with statistics gathered over agents; as it is where its network has no static norm.

    Args:
        steps_by_roster: rosters and the step of each, which returns ``Statistics``.
    """
    if not statistics_of(network):
        return F
    mean = WeightedMean("statistics")
    for roster, step in steps_by_roster:
        federation.call_all(roster, step, request, aggregator=mean)
    return {**F, **mean.value_or({})}
