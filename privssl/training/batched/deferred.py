"""Requests by which an engine can batch several agents' work.

On a GPU a small network's loss costs dozens of kernel launches per agent. Functions of parameters
and rows (``training/batched/stacking.py``) and DP-SGD steps (``privacy/batched_dp_sgd.py``) can be
launched once for all agents. In other engines a request is a plain call.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class FunctionalModule:
    """A network as a function of rows, with its own parameters or replacements."""

    network: nn.Module
    tensors: Mapping[str, Tensor] | None = None  # parameters and buffers; None: its own

    def __call__(self, *rows: Tensor) -> Any:
        if self.tensors is None:
            return self.network(*rows)
        with _replace_tensors(self.network, self.tensors):
            return self.network(*rows)

    def frozen(self, *, leaves_no_trace: bool = False) -> "FunctionalModule":
        """Return the same with constant parameters: gradients flow through it, not into them.

        Args:
            leaves_no_trace: also leave its buffers unchanged (a batch norm's statistics in
                training).
        """
        buffers = dict(self.network.named_buffers()) if leaves_no_trace else {}
        defaults = {**buffers, **dict(self.network.named_parameters())}
        tensors = defaults if self.tensors is None else self.tensors
        return FunctionalModule(
            self.network, {n: t.clone() if n in buffers else t.detach() for n, t in tensors.items()}
        )


@contextmanager
def _replace_tensors(network: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace a network's parameters and buffers.

    ``torch.func.functional_call`` searches for shared tensors at each call, which is five times
    slower.
    """
    names = _names_of_shared(network)
    targets = [
        (*_locate_tensor(network, name), tensor)
        for key, tensor in tensors.items()
        for name in names.get(key, (key,))
    ]
    originals = [store[name] for store, name, _ in targets]
    try:
        for store, name, tensor in targets:
            store[name] = tensor
        yield
    finally:
        for (store, name, _), original in zip(targets, originals, strict=True):
            store[name] = original


def _locate_tensor(network: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    """Return the dict with the parameter or buffer, and its name in it."""
    *path, last = name.split(".")
    module: nn.Module | None = network
    for part in path:
        assert module is not None
        module = module._modules[part]
    assert module is not None
    store: Any = module._parameters if last in module._parameters else module._buffers
    return store, last


def _names_of_shared(network: nn.Module) -> Mapping[str, Sequence[str]]:
    """Map each name of a shared tensor to all its names.

    Cached: sharing must not change after a network's first call.
    """
    if network not in _SHARED:
        names: dict[int, list[str]] = {}
        for path, module in network.named_modules(remove_duplicate=False):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    names.setdefault(id(tensor), []).append(f"{path}.{name}" if path else name)
        shared = [aliases for aliases in names.values() if len(aliases) > 1]
        _SHARED[network] = {name: aliases for aliases in shared for name in aliases}
    return _SHARED[network]


_SHARED = WeakKeyDictionary[nn.Module, Mapping[str, Sequence[str]]]()


class BatchRequest(Protocol):
    """Work that can be batched with other agents'."""

    def run_single(self) -> Any:
        """Run it for this agent alone."""


def submit(request: BatchRequest) -> Any:
    """Run work, batched or alone (``request_handler``)."""
    return _answer.get()(request)


_answer: ContextVar[Callable[[BatchRequest], Any]] = ContextVar(
    "answer", default=lambda request: request.run_single()
)


@contextmanager
def request_handler(answer: Callable[[BatchRequest], Any]) -> Iterator[None]:
    """Let ``answer`` run the work submitted on this thread."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


def run_unbatched() -> AbstractContextManager[None]:
    """Compute what a block submits for this agent alone: a batch has one backward pass for all."""
    return request_handler(lambda request: request.run_single())


@dataclass(frozen=True, eq=False)
class BatchedCall:
    """A call of a function that all agents share."""

    function: Callable[..., Any]
    fields: Mapping[Any, Any]
    settings: tuple[Hashable, ...]
    networks: Mapping[str, nn.Module]
    derivatives: bool = field(default_factory=torch.is_grad_enabled)  # whether gradients are needed

    def run_single(self) -> Any:
        return self.of(
            self.fields, {name: FunctionalModule(net) for name, net in self.networks.items()}
        )

    def of(self, fields: Mapping[Any, Any], networks: Mapping[str, FunctionalModule]) -> Any:
        """Call the function with other tensors."""
        return self.function(fields, *self.settings, **networks)


def batched_call(
    function: Callable[..., Any],
    fields: Mapping[Any, Any],
    *settings: Hashable,
    **networks: nn.Module,
) -> Any:
    """Call ``function(fields, *settings, **networks)``, each network as :class:`FunctionalModule`.

    An engine may compute it for several agents at once.

    Args:
        function: deterministic, without branches on values. Returns tensors, alone, in tuples or
            mappings.
        fields: tensors of this agent, or mappings of tensors.
        settings: everything else that the result depends on.
    """
    return submit(BatchedCall(function, fields, settings, networks))


@dataclass(frozen=True, eq=False)
class ExampleLoss:
    """A ``per_example_gradients.RowLoss`` by a function that all agents share."""

    function: Callable[..., Tensor]  # like that of ``batched_call``, for one row's fields
    settings: tuple[Hashable, ...]
    networks: Mapping[str, nn.Module]

    def __call__(
        self, parameters: Mapping[str, Mapping[str, Tensor]], fields: Mapping[str, Tensor]
    ) -> Tensor:
        modules = {n: FunctionalModule(net, parameters.get(n)) for n, net in self.networks.items()}
        return self.function(fields, *self.settings, **modules)
