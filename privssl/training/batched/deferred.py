"""What several agents may have done as one.

On a GPU a small network's loss costs what it takes to ask for its dozens of small operations, once
for each agent. What is a function of parameters and rows alone can be asked for once for all of
them (``training/batched/stacking.py``), and so can a step of DP-SGD
(``privacy/batched_dp_sgd.py``). Outside of an engine that does so it is a plain call.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class FunctionalModule:
    """A network as a function of rows, with its own parameters or others in place of them."""

    network: nn.Module
    tensors: Mapping[str, Tensor] | None = None  # parameters and buffers; None: its own

    def __call__(self, *rows: Tensor) -> Any:
        if self.tensors is None:
            return self.network(*rows)
        with _in_place(self.network, self.tensors):
            return self.network(*rows)

    def frozen(self, *, leaves_no_trace: bool = False) -> "FunctionalModule":
        """The same, through which gradients flow, but not into its parameters.

        Args:
            leaves_no_trace: whether its buffers stay as they are, too: in training mode rows that
                pass would go into the statistics of a batch norm.
        """
        buffers = dict(self.network.named_buffers()) if leaves_no_trace else {}
        own = {**buffers, **dict(self.network.named_parameters())}
        tensors = own if self.tensors is None else self.tensors
        return FunctionalModule(
            self.network,
            {n: t.clone() if n in buffers else t.detach() for n, t in tensors.items()},
        )


@contextmanager
def _in_place(network: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, these are its parameters and buffers. ``torch.func.functional_call`` looks for
    tensors that have several names at each call, which takes five times as long."""
    names = _names_of_shared(network)
    moved = [
        (*_place(network, name), tensor)
        for first, tensor in tensors.items()
        for name in names.get(first, (first,))
    ]
    before = [held[name] for held, name, _ in moved]
    try:
        for held, name, tensor in moved:
            held[name] = tensor
        yield
    finally:
        for (held, name, _), own in zip(moved, before, strict=True):
            held[name] = own


def _place(network: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    """The parameters or buffers of the module that has it, and its name there."""
    *path, last = name.split(".")
    module: nn.Module | None = network
    for part in path:
        assert module is not None
        module = module._modules[part]
    assert module is not None
    held: Any = module._parameters if last in module._parameters else module._buffers
    return held, last


def _names_of_shared(network: nn.Module) -> Mapping[str, Sequence[str]]:
    """All names of a tensor by each of them, where it has several. Looked for once: tensors are
    not to be shared after a network's first call, nor no longer shared."""
    if network not in _SHARED:
        names: dict[int, list[str]] = {}
        for path, module in network.named_modules(remove_duplicate=False):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    names.setdefault(id(tensor), []).append(f"{path}.{name}" if path else name)
        several = [own for own in names.values() if len(own) > 1]
        _SHARED[network] = {name: own for own in several for name in own}
    return _SHARED[network]


_SHARED = WeakKeyDictionary[nn.Module, Mapping[str, Sequence[str]]]()


class BatchRequest(Protocol):
    """What an agent wants to have done."""

    def run_single(self) -> Any:
        """It is done here, for this agent."""


def submit(question: BatchRequest) -> Any:
    """Have something done, with others or alone (``request_handler``)."""
    return _answer.get()(question)


def _run_single(question: BatchRequest) -> Any:
    return question.run_single()


_answer: ContextVar[Callable[[BatchRequest], Any]] = ContextVar("answer", default=_run_single)


def is_unbatched() -> bool:
    """Whether all that is asked for on this thread is done alone."""
    return _answer.get() is _run_single


@contextmanager
def request_handler(answer: Callable[[BatchRequest], Any]) -> Iterator[None]:
    """Inside, on this thread, ``answer`` does what is asked for."""
    before = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(before)


@dataclass(frozen=True, eq=False)
class BatchedCall:
    """What an agent wants to have computed, by a function that all agents share."""

    function: Callable[..., Any]
    fields: Mapping[Any, Any]
    settings: tuple[Hashable, ...]
    networks: Mapping[str, nn.Module]
    derivatives: bool = field(default_factory=torch.is_grad_enabled)  # whether any are wanted

    def run_single(self) -> Any:
        """The function's result, computed here."""
        return self.of(
            self.fields, {name: FunctionalModule(net) for name, net in self.networks.items()}
        )

    def of(self, fields: Mapping[Any, Any], networks: Mapping[str, FunctionalModule]) -> Any:
        """The function of others' tensors."""
        return self.function(fields, *self.settings, **networks)


def batched_call(
    function: Callable[..., Any],
    fields: Mapping[Any, Any],
    *settings: Hashable,
    **networks: nn.Module,
) -> Any:
    """``function(fields, *settings, **networks)``, each network as :class:`FunctionalModule`.

    What goes through here an engine may compute for several agents as one.

    Args:
        function: draws nothing, and no number decides what it does. Returns tensors, in mappings
            or tuples or alone.
        fields: tensors of this agent, or mappings of tensors.
        settings: what else decides about the result.
        networks: of this agent.
    """
    return submit(BatchedCall(function, fields, settings, networks))


@dataclass(frozen=True, eq=False)
class ExampleLoss:
    """The loss of one row, by a function that all agents share:
    ``per_example_gradients.RowLoss``."""

    function: Callable[..., Tensor]  # as that of ``batched_call``, of one row's fields
    settings: tuple[Hashable, ...]
    networks: Mapping[str, nn.Module]

    def __call__(
        self, parameters: Mapping[str, Mapping[str, Tensor]], fields: Mapping[str, Tensor]
    ) -> Tensor:
        called = {n: FunctionalModule(net, parameters.get(n)) for n, net in self.networks.items()}
        return self.function(fields, *self.settings, **called)
