"""Computations that several agents may have done as one.

On a GPU a small network's loss costs what it takes to ask for its dozens of small operations, once
for each agent. What is a function of parameters and rows alone can be asked for once for all of
them (``stacked.py``). Outside of an engine that does so it is a plain call.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


class Own(Mapping[str, Tensor]):
    """The parameters that a network has, by name; looked up when one is asked for."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    @cached_property
    def _named(self) -> dict[str, Tensor]:
        return dict(self._network.named_parameters())

    def __getitem__(self, name: str) -> Tensor:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)


def with_parameters(network: nn.Module, parameters: Mapping[str, Tensor]) -> Callable[..., Tensor]:
    """The network as a function, with these in place of its parameters."""
    if isinstance(parameters, Own):
        return network  # functional_call takes as long as a small layer
    return lambda *rows: functional_call(network, dict(parameters), rows)


@dataclass(frozen=True, eq=False)
class Computation:
    """Something that an agent computes from rows by a function that all agents share."""

    function: Callable[..., Any]
    networks: Mapping[str, nn.Module]
    fields: Mapping[str, Tensor]
    settings: tuple[Hashable, ...]

    def alone(self) -> Any:
        """The function's result, computed here."""
        own = {name: Own(network) for name, network in self.networks.items()}
        return self.function(self.networks, own, self.fields, *self.settings)


def compute(
    function: Callable[..., Any], networks: Mapping[str, nn.Module], fields: Mapping[str, Tensor],
    *settings: Hashable,
) -> Any:  # fmt: skip
    """``function(networks, parameters, fields, *settings)``, with the networks' own parameters.

    What goes through here an engine may compute for several agents as one (``computing``).

    Args:
        function: of parameters (network -> name -> tensor) and fields; the networks lend their
            form. It draws nothing, and no number decides what it does. Returns tensors, in
            mappings or tuples or alone.
        fields: tensors (B, ...) of one B.
        settings: what else it is given.
    """
    return _by.get()(Computation(function, networks, fields, settings))


_by: ContextVar[Callable[[Computation], Any]] = ContextVar("by", default=Computation.alone)


@contextmanager
def computing(by: Callable[[Computation], Any]) -> Iterator[None]:
    """Inside, on this thread, ``by`` does what ``compute`` is asked for."""
    before = _by.set(by)
    try:
        yield
    finally:
        _by.reset(before)
