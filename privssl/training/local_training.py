"""Local training of all algorithms: batches, optimiser steps, Adam's moments, moving averages."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from privssl.core.agents import Memory
from privssl.core.messages import StateDict
from privssl.core.rows import network_input as network_input  # used by every step
from privssl.runtime import randomness
from privssl.training import device_transfer, optim
from privssl.training.batched import deferred

#: Elements of the rows whose views are computed at once: 512 rows of 3x32x32. Fewer increase
#: overhead per call, more exceed the caches.
SEEN_AT_ONCE = 3 * 2**19


def draw_rows(held: int, count: int, rng: torch.Generator) -> Tensor:
    """Sample ``count`` row numbers of ``held`` >= 1 rows: every row once before any twice."""
    passes = -(-count // held)
    return torch.cat([torch.randperm(held, generator=rng) for _ in range(passes)])[:count]


def epoch_batches(held: int, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield shuffled row numbers of one epoch in batches of ``size``; keep a short last one.

    ``held`` = 0 rows give no batch.
    """
    return iter(torch.split(torch.randperm(held, generator=rng), size)) if held else iter(())


def joint_batches(
    labelled: int, unlabelled: int, size: int, steps_of: Literal["labelled", "unlabelled"],
    rng: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Yield row numbers of the steps of one epoch in batches of ``size``: labelled (B,), unlabelled
    (B',).

    labelled: as many steps as FedAvg on the labelled rows; the unlabelled rows are divided among
    them, so that each row of both kinds is used once (FedMatch with labels at clients). unlabelled:
    batches of ``size`` of both kinds; labelled rows are reused. All batches of a kind without rows
    are empty.
    """
    empty = torch.empty(0, dtype=torch.int64)
    with_labels: Sequence[Tensor] = list(epoch_batches(labelled, size, rng))
    without: Sequence[Tensor] = list(epoch_batches(unlabelled, size, rng))
    if with_labels and without and steps_of == "labelled":
        without = torch.tensor_split(torch.cat(list(without)), len(with_labels))
    elif with_labels and without:
        with_labels = torch.split(draw_rows(labelled, size * len(without), rng), size)
    yield from zip(
        with_labels or [empty] * len(without), without or [empty] * len(with_labels), strict=True
    )


def in_blocks(
    batches: Iterable[Tensor], seen: Callable[[Tensor], Tensor], at_once: int = 512
) -> Iterator[Tensor]:
    """Yield views of batches of row numbers (B,), B >= 0, computed for many batches at once.

    RandAugment's cost is per call, not per row: batch by batch it took a quarter of FedSEAL's
    training. ``seen``: row numbers (N,) -> views (N, ...); called for whole batches, of about
    ``at_once`` rows.
    """
    waiting: list[Tensor] = []
    for batch in batches:
        waiting.append(batch)
        if sum(map(len, waiting)) >= at_once:
            yield from torch.split(seen(torch.cat(waiting)), list(map(len, waiting)))
            waiting = []
    if waiting:
        yield from torch.split(seen(torch.cat(waiting)), list(map(len, waiting)))


def views_of(
    stored: Tensor,
    batches: Iterable[Tensor],
    view: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield views of batches of stored rows (N, *shape), by :func:`in_blocks`.

    ``view``: network inputs (n, *shape) -> views (n, ...).
    """
    return in_blocks(
        batches, lambda rows: view(network_input(stored[rows], device)), rows_per_pass(stored)
    )


def rows_per_pass(stored: Tensor) -> int:
    """Return the number of rows (N, *shape) whose views are computed at once, >= 1."""
    return max(1, SEEN_AT_ONCE // math.prod(stored.shape[1:]))


@dataclass(frozen=True, eq=False)
class OptimizerStep:
    """One optimiser step that minimises a loss."""

    optimisers: tuple[torch.optim.Optimizer, ...]  # of disjoint parameters
    loss: Tensor  # scalar
    clip_norm: float | None  # largest norm of the joint gradient

    def parameters(self) -> list[Tensor]:
        """Return the parameters of its optimisers."""
        groups = [group for optimiser in self.optimisers for group in optimiser.param_groups]
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def run_single(self) -> None:
        for group in (group for optimiser in self.optimisers for group in optimiser.param_groups):
            for parameter in group["params"]:  # frozen ones too: an old gradient would move them
                parameter.grad = None
        parameters = self.parameters()
        self.loss.backward(inputs=parameters)  # type: ignore[no-untyped-call]
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        for optimiser in self.optimisers:
            optimiser.step()


def minimise(
    optimiser: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss: Tensor,
    *,
    clip_norm: float | None = None,
) -> Tensor:
    """Take one step of one or several optimisers on a scalar loss; return the loss, detached.

    ``clip_norm``: largest norm of the joint gradient; None: unlimited. Only the optimisers'
    parameters get gradients; parameters that the loss does not depend on stay. All training uses
    this function, so that an engine can batch several agents' steps (``deferred.submit``).
    """
    optimisers = (optimiser,) if isinstance(optimiser, torch.optim.Optimizer) else tuple(optimiser)
    deferred.submit(OptimizerStep(optimisers, loss, clip_norm))
    return loss.detach()


@dataclass(frozen=True)
class AdamGroup:
    """One network under Adam, whose moments an agent keeps between its steps."""

    network: nn.Module
    learning_rate: float
    betas: tuple[float, float]


@dataclass(frozen=True)
class SGDGroup:
    """One network under SGD; momentum starts at zero in every local step."""

    network: nn.Module
    learning_rate: float
    momentum: float


Group = AdamGroup | SGDGroup
ADAM = ("step", "exp_avg", "exp_avg_sq")  # Adam's state of a parameter


class LocalOptimiser:
    """Adam or SGD for each of several networks, with the state that an agent keeps.

    Keeping Adam's moments assumes cross-silo training; with sampled agents they are older.
    """

    def __init__(self, groups: Mapping[str, Group], memory: Memory, prefix: str) -> None:
        """Load the state. ``prefix`` separates this optimiser's memory from others of the same
        agent."""
        self._optimisers: list[torch.optim.Optimizer] = [
            optim.SGD(group.network.parameters(), lr=group.learning_rate, momentum=group.momentum)
            for group in groups.values()
            if isinstance(group, SGDGroup)
        ]
        adam_groups = {net: group for net, group in groups.items() if isinstance(group, AdamGroup)}
        self._kept = {
            f"{prefix}/{net}/{name}": parameter
            for net, group in adam_groups.items()
            for name, parameter in group.network.named_parameters()
        }
        self._moments: Mapping[Tensor, dict[str, Tensor]] = {}
        if adam_groups:
            self._add_adam(list(adam_groups.values()), memory)

    def _add_adam(self, groups: Sequence[AdamGroup], memory: Memory) -> None:
        adam = optim.Adam(
            [
                {
                    "params": list(group.network.parameters()),
                    "lr": group.learning_rate,
                    "betas": group.betas,
                }
                for group in groups
            ],
            fused=True,
        )
        self._optimisers.append(adam)
        self._moments = adam.state
        restored: dict[str, Tensor] = {}
        for key, parameter in self._kept.items():
            if f"{key}#step" in memory:
                # The fused kernel ignores strides, so moments must have the parameter's.
                step = torch.empty_like(memory[f"{key}#step"], device=parameter.device)
                moments = (torch.empty_like(parameter, requires_grad=False) for _ in range(2))
                adam.state[parameter] = dict(zip(ADAM, (step, *moments), strict=True))
                restored |= {f"{key}#{slot}": v for slot, v in adam.state[parameter].items()}
        device_transfer.put(restored, {name: memory[name] for name in restored})

    def minimise(self, loss: Tensor) -> None:
        """Take one step on a scalar loss. Parameters that the loss does not depend on stay."""
        minimise(self._optimisers, loss)

    def remember(self) -> dict[str, Tensor]:
        """Return Adam's moments, for the agent's memory."""
        moments = {
            f"{key}#{slot}": value
            for key, parameter in self._kept.items()
            for slot, value in self._moments.get(parameter, {}).items()
        }
        return device_transfer.move_to(moments, torch.device("cpu"))


def moving_average(kept: StateDict, new: StateDict, decay: float) -> StateDict:
    """Return decay * kept + (1 - decay) * new for each tensor (mean teacher, Tarvainen 2017).

    Integer tensors (batch norm's counts) are taken from ``new``.
    """
    return {
        key: torch.lerp(value, kept[key], decay) if value.is_floating_point() else value
        for key, value in new.items()
    }


def load_weights(
    network: nn.Module, weights: StateDict, device: torch.device | None = None
) -> nn.Module:
    """Copy weights into a network and set it to training mode.

    ``device``: to move the network to; None: leave it.
    """
    state = network.state_dict()
    if device is not None and any(tensor.device != device for tensor in state.values()):
        state = network.to(device).state_dict()
    if {n: t.shape for n, t in state.items()} != {n: w.shape for n, w in weights.items()}:
        network.load_state_dict(dict(weights))  # raises if they do not fit
    device_transfer.put(state, weights)
    return network.train()


def fresh_weights(build: Callable[[], nn.Module], rng: torch.Generator) -> dict[str, Tensor]:
    """Return random initial weights. A network is built for it, because resetting one would keep a
    spectral norm's vectors."""
    with randomness.seeded(rng):
        return weights_of(build())


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a network's state dict, on the CPU."""
    return device_transfer.copy_tensors(network.state_dict())


_copied_at_once: ContextVar[bool] = ContextVar("copied_at_once", default=False)


@contextmanager
def copy_once() -> Iterator[None]:
    """Let :func:`to_send` share memory on this thread, because the caller copies the reply."""
    token = _copied_at_once.set(True)
    try:
        yield
    finally:
        _copied_at_once.reset(token)


def to_send(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors on the CPU for the reply of a step; copied, except under ``copy_once``."""
    if _copied_at_once.get():
        return device_transfer.move_to(tensors, torch.device("cpu"))
    return device_transfer.copy_tensors(tensors)


def batches(fields: Mapping[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    """Split tensors of equal first dimension into batches of ``size`` rows, in order."""
    length = len(next(iter(fields.values())))
    for start in range(0, length, size):
        yield {name: value[start : start + size] for name, value in fields.items()}


def fit(
    optimiser: LocalOptimiser,
    fields: Mapping[str, Tensor],
    size: int,
    loss: Callable[[dict[str, Tensor]], Tensor],
) -> float:
    """Train one pass over rows, a step for each batch of ``size``; return the mean loss."""
    losses = []
    for batch in batches(fields, size):
        batch_loss = loss(batch)
        optimiser.minimise(batch_loss)
        losses.append(batch_loss.detach())
    return mean_of(losses)


def mean_of(values: list[Tensor]) -> float:
    """Return the mean of scalar tensors, 0.0 if none; synchronises the device once."""
    return float(torch.stack(values).mean()) if values else 0.0
