"""Local training at an agent, as far as every algorithm does the same.

Which rows make the batches, a step down a loss, an Adam whose moments stay with the agent between
visits, and the moving average that a server keeps. What is minimised is the algorithm's business.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from privssl.core.agents import Memory
from privssl.core.messages import StateDict
from privssl.runtime import randomness
from privssl.training import device_transfer, optim
from privssl.training.batched import deferred

#: Numbers of the rows whose views are made in one go: 512 rows of 3x32x32, 2,006 of 1x28x28. Fewer
#: bear what each go costs, more leave the caches.
SEEN_AT_ONCE = 3 * 2**19


def network_input(x: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Rows as stored to rows as networks take them, by a public constant.

    Args:
        x: (B, channels, height, width), uint8 in 0..255 or float32 in [0, 1].

    Returns:
        float32 in [-1, 1] on the device, channels last in memory (faster convolutions), to the
        stride of a single channel: by that a convolution chooses in which order it adds, and it
        differs between rows read from files and rows that were copied.
    """
    x = x.to(device)
    scaled = x.float() / 127.5 - 1 if x.dtype == torch.uint8 else 2 * x - 1
    scaled = scaled.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = x.shape
    return scaled.as_strided(x.shape, (height * width * channels, 1, width * channels, channels))


def draw_rows(held: int, count: int, rng: torch.Generator) -> Tensor:
    """Row numbers for one visit (count,): every row once before any row twice.

    Args:
        held: rows that the agent has, >= 1.
        count: rows that the visit uses, steps times batch size.
    """
    passes = -(-count // held)
    return torch.cat([torch.randperm(held, generator=rng) for _ in range(passes)])[:count]


def epoch_batches(held: int, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of one epoch, shuffled, in batches of ``size``; a short last one is kept.

    Args:
        held: rows that the agent has, >= 0; none give no batch.
    """
    return iter(torch.split(torch.randperm(held, generator=rng), size)) if held else iter(())


def in_blocks(
    batches: Iterable[Tensor], seen: Callable[[Tensor], Tensor], at_once: int = 512
) -> Iterator[Tensor]:
    """Views of batches, one after the other, made for many batches in one go.

    RandAugment is a few hundred small operations whatever the number of rows: batch by batch it
    took a quarter of FedSEAL's local training.

    Args:
        batches: row numbers, each (B,); B may be 0.
        seen: row numbers (N,) -> views (N, ...). Called for whole batches, of ``at_once`` rows
            together or little more.
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
    """Views of batches of stored rows (N, *shape), made :func:`in_blocks`.

    Args:
        batches: row numbers, each (B,); B may be 0.
        view: rows as networks take them (n, *shape) -> what is seen of them (n, ...).
    """
    return in_blocks(
        batches, lambda rows: view(network_input(stored[rows], device)), rows_per_pass(stored)
    )


def rows_per_pass(stored: Tensor) -> int:
    """Of how many of the rows (N, *shape) views are made in one go, >= 1."""
    return max(1, SEEN_AT_ONCE // math.prod(stored.shape[1:]))


@dataclass(frozen=True, eq=False)
class OptimizerStep:
    """One step that is to be taken down a loss."""

    optimisers: tuple[torch.optim.Optimizer, ...]  # of different parameters
    loss: Tensor  # scalar
    clip_norm: float | None  # the whole gradient is shortened to it, if it is longer

    def parameters(self) -> list[Tensor]:
        """What it may move."""
        groups = [group for one in self.optimisers for group in one.param_groups]
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def run_single(self) -> None:
        for group in (group for one in self.optimisers for group in one.param_groups):
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
    """One step of an optimiser, or of several, down a scalar loss; the loss without its graph.

    Gradients are those by the optimisers' own parameters; one that the loss does not reach stays
    put. All training goes through here, so that an engine can take a step of several agents as one
    (``together.ask``).

    Args:
        clip_norm: longest norm of the gradient of all parameters together; None: any.
    """
    several = (optimiser,) if isinstance(optimiser, torch.optim.Optimizer) else tuple(optimiser)
    deferred.submit(OptimizerStep(several, loss, clip_norm))
    return loss.detach()


@dataclass(frozen=True)
class AdamGroup:
    """One network and how it is stepped: an agent keeps its moments from visit to visit."""

    network: nn.Module
    learning_rate: float
    betas: tuple[float, float]


@dataclass(frozen=True)
class SGDGroup:
    """One network and how it is stepped: nothing is kept, momentum starts anew at every visit."""

    network: nn.Module
    learning_rate: float
    momentum: float


Group = AdamGroup | SGDGroup
ADAM = ("step", "exp_avg", "exp_avg_sq")  # what Adam remembers of a parameter


class LocalOptimiser:
    """Adam or SGD for each of several networks, with what an agent remembers of it.

    That agents keep Adam's moments is a cross-silo assumption (few agents, all taking part in
    every round); with sampled agents moments are merely older.
    """

    def __init__(self, groups: Mapping[str, Group], memory: Memory, prefix: str) -> None:
        """``prefix`` separates this optimiser's memory from others of the same agent."""
        self._optimisers: list[torch.optim.Optimizer] = [
            optim.SGD(group.network.parameters(), lr=group.learning_rate, momentum=group.momentum)
            for group in groups.values()
            if isinstance(group, SGDGroup)
        ]
        kept = {net: group for net, group in groups.items() if isinstance(group, AdamGroup)}
        self._kept = {
            f"{prefix}/{net}/{name}": parameter
            for net, group in kept.items()
            for name, parameter in group.network.named_parameters()
        }
        self._moments: Mapping[Tensor, dict[str, Tensor]] = {}
        if kept:
            self._adam(list(kept.values()), memory)

    def _adam(self, groups: Sequence[AdamGroup], memory: Memory) -> None:
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
        own: dict[str, Tensor] = {}
        for key, parameter in self._kept.items():
            if f"{key}#step" in memory:
                # The fused kernel walks through memory and asks nobody for strides: moments must
                # lie as the parameter lies, and a checkpoint brings them back in plain order.
                step = torch.empty_like(memory[f"{key}#step"], device=parameter.device)
                moments = (torch.empty_like(parameter, requires_grad=False) for _ in range(2))
                adam.state[parameter] = dict(zip(ADAM, (step, *moments), strict=True))
                own |= {f"{key}#{slot}": v for slot, v in adam.state[parameter].items()}
        device_transfer.put(own, {name: memory[name] for name in own})

    def minimise(self, loss: Tensor) -> None:
        """One step on a scalar loss. A parameter that the loss does not reach stays put."""
        minimise(self._optimisers, loss)

    def remember(self) -> dict[str, Tensor]:
        """Adam's moments, to be merged into the agent's memory."""
        moments = {
            f"{key}#{slot}": value
            for key, parameter in self._kept.items()
            for slot, value in self._moments.get(parameter, {}).items()
        }
        return device_transfer.move_to(moments, torch.device("cpu"))


def moving_average(kept: StateDict, new: StateDict, decay: float) -> StateDict:
    """decay * kept + (1 - decay) * new, tensor by tensor (mean teacher, Tarvainen 2017).

    Whole numbers (batch norm counts its batches) have no share in between: the new one is taken.
    """
    return {
        key: torch.lerp(value, kept[key], decay) if value.is_floating_point() else value
        for key, value in new.items()
    }


def load_weights(
    network: nn.Module, weights: StateDict, device: torch.device | None = None
) -> nn.Module:
    """Put weights into a network, by copying, and set it to training mode.

    Args:
        device: where it then is; None: where it was.
    """
    own = network.state_dict()
    if device is not None and any(tensor.device != device for tensor in own.values()):
        own = network.to(device).state_dict()
    if {n: t.shape for n, t in own.items()} != {n: w.shape for n, w in weights.items()}:
        network.load_state_dict(dict(weights))  # it says what does not fit
    device_transfer.put(own, weights)
    return network.train()


def fresh_weights(build: Callable[[], nn.Module], rng: torch.Generator) -> dict[str, Tensor]:
    """Initial weights drawn with a generator, by every layer's own rule.

    A network is built for it: resetting a built one would leave a spectral norm's weight and
    vectors as they were.
    """
    with randomness.seeded(rng):
        return weights_of(build())


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    """A network's state dict as plain CPU tensors of their own."""
    return device_transfer.copy_tensors(network.state_dict())


_copied_at_once: ContextVar[bool] = ContextVar("copied_at_once", default=False)


@contextmanager
def copy_once() -> Iterator[None]:
    """Inside, on this thread, whoever calls a step copies what it returns before anything else."""
    before = _copied_at_once.set(True)
    try:
        yield
    finally:
        _copied_at_once.reset(before)


def to_send(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A network's tensors as plain CPU tensors, for the reply of a step and for nothing else.

    They have memory of their own, but for an engine that says ``copy_once``.
    """
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
    """One pass over rows, a step for each batch of ``size``; the mean loss."""
    losses = []
    for batch in batches(fields, size):
        now = loss(batch)
        optimiser.minimise(now)
        losses.append(now.detach())
    return mean_of(losses)


def mean_of(values: list[Tensor]) -> float:
    """Mean of scalar tensors; 0.0 of none. One synchronisation, at the end of a visit."""
    return float(torch.stack(values).mean()) if values else 0.0
