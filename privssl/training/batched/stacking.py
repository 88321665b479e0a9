"""Batched forward passes, calls and optimiser steps of several agents.

*Pass*: agents' weights of one network and their rows are stacked, and ``torch.func.vmap`` runs the
network over agents. The output is split again, with its graph, so each agent computes its loss as
if alone. Nothing of one agent enters another's rows.

*Call* (``training/batched/deferred.py``): the same for a function of several networks and tensors
of equal shapes.

*Step*: one backward pass for all losses, then one optimiser over all parameters, each with its
agent's moments; the bits equal single steps. Passes and calls sum in another order, so last bits
differ.

Not stacked (``Stackable.never``, ``is_single``): layers not listed here, bfloat16, dropout in
training, static norms in evaluation. Where no layer couples rows, shorter batches are padded with
their last row, whose output is dropped; otherwise only batches of one length are stacked.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_unflatten

from generators.spectral import SpectralNorm
from privssl.models.static_norm import StaticNorm
from privssl.ops.group_norm import GroupNorm
from privssl.ops.pointwise_conv import PointwiseConv2d
from privssl.ops.precision import precision_of
from privssl.training.batched.deferred import BatchedCall, FunctionalModule
from privssl.training.local_training import OptimizerStep

ROWS_AT_ONCE = 4096  # rows of one stacked pass over all agents, to bound the memory

#: Layers that compute each row independently, and the same in training as in evaluation.
BY_ROW = (
    nn.Conv2d, PointwiseConv2d, nn.ConvTranspose2d, nn.Linear, nn.GroupNorm, GroupNorm,
    nn.MaxPool2d, nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Flatten, nn.Unflatten, nn.Identity,
)  # fmt: skip

#: Layers that differ in training (``is_single``, ``couples``).
BY_MODE = (_DropoutNd, nn.BatchNorm2d, SpectralNorm)


#: Attribute of a network with its ``Stackable``.
COPY = "_stackable"


class Stackable:
    """One agent's copy of a network, for stacking."""

    def __init__(self, name: str, network: nn.Module) -> None:
        """Wrap a copy. ``name``: shared by the copies of other agents."""
        self.name, self.network = name, network
        self._parameters = _places(network, "_parameters")
        self._buffers = _places(network, "_buffers")
        self._by_mode = [layer for layer in _layers(network) if _kind(layer) not in BY_ROW]
        self.names = [name for name, *_ in (*self._parameters, *self._buffers)]
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
        known = all(isinstance(layer, BY_MODE) for layer in self._by_mode)
        self.never = not known or hooked or precision_of(network) != "float32"

    def is_single(self) -> bool:
        """Return whether it cannot be stacked in its present mode."""
        return self.never or any(map(_unstacked, self._by_mode))

    def couples(self) -> bool:
        """Return whether a row's output depends on other rows."""
        return any(isinstance(n, nn.BatchNorm2d) and n.training for n in self._by_mode)

    def modes(self) -> tuple[bool, ...]:
        return tuple(layer.training for layer in self._by_mode)

    def parameters(self) -> list[Tensor]:
        """Return its current parameters; ``functional_call`` may have replaced them."""
        return [store[key] for _, store, key in self._parameters]

    def buffers(self) -> list[Tensor]:
        return [store[key] for _, store, key in self._buffers]


def _layers(network: nn.Module) -> list[nn.Module]:
    """Return modules without children, and those with parametrized weights."""
    made = [layer for layer in network.modules() if parametrize.is_parametrized(layer)]
    return [*made, *(layer for layer in network.modules() if not any(layer.children()))]


def _kind(layer: nn.Module) -> type:
    """Return its class before parametrization."""
    return parametrize.type_before_parametrizations(layer)


def _unstacked(layer: nn.Module) -> bool:
    if isinstance(layer, StaticNorm):
        return not layer.training  # it reads or writes its count
    return isinstance(layer, _DropoutNd) and layer.training and layer.p > 0


@dataclass(frozen=True, eq=False)
class Pass:
    """One agent's forward pass."""

    copy: Stackable
    forward: Callable[..., Any]  # forward method of the copy without stacking
    inputs: tuple[Tensor, ...]  # (B, ...) each, with the same B >= 1
    derivatives: bool  # whether the agent needs gradients

    def run_single(self) -> Any:
        return self.forward(*self.inputs)

    def kind(self) -> Hashable:
        """Return a key; passes with the same key can be stacked."""
        rows = len(self.inputs[0]) if self.copy.couples() else None
        forms = tuple((x.shape[1:], x.dtype) for x in self.inputs)
        return self.copy.name, self.copy.modes(), self.derivatives, forms, rows


StackedT = TypeVar("StackedT", Pass, BatchedCall)


def can_stack(copy: Stackable, inputs: Sequence[Any]) -> bool:
    """Return whether a call with these positional arguments can join a stacked pass."""
    if copy.is_single() or not all(isinstance(x, Tensor) and x.dim() for x in inputs):
        return False
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in inputs):
        return False  # inside a vmap or grad of the algorithm
    return len({len(x) for x in inputs}) == 1 and len(inputs[0]) > 0


def run_passes_batched(passes: Sequence[Pass]) -> list[Any]:
    """Return the outputs, in the order of the passes."""
    kinds = [one.kind() for one in passes]
    return _in_kinds(passes, kinds, lambda one: len(one.inputs[0]), _run_stacked)


def _in_kinds(
    wanted: Sequence[StackedT], kinds: Sequence[Hashable], rows: Callable[[StackedT], int],
    run: Callable[[Sequence[StackedT]], Sequence[Any]],
) -> list[Any]:  # fmt: skip
    """Apply ``run`` to items of equal kind, as many as memory permits; return results in order."""
    found: dict[int, Any] = {}
    for kind in dict.fromkeys(kinds):
        places = [place for place, of in enumerate(kinds) if of == kind]
        at_once = max(1, ROWS_AT_ONCE // max(1, *(rows(wanted[place]) for place in places)))
        for start in range(0, len(places), at_once):
            some = places[start : start + at_once]
            with torch.set_grad_enabled(wanted[some[0]].derivatives):
                found |= zip(some, run([wanted[place] for place in some]), strict=True)
    return [found[place] for place in range(len(wanted))]


def _run_stacked(passes: Sequence[Pass]) -> Sequence[Any]:
    """Return outputs of passes with the same key."""
    first = passes[0]
    if len(passes) == 1:
        return [first.run_single()]
    copies = [one.copy for one in passes]
    tensors, buffers = _stack(copies)
    rows = [len(one.inputs[0]) for one in passes]
    inputs = _by_agent([pad_to(x, max(rows)) for x in one.inputs] for one in passes)

    def of_one(tensors: Any, *inputs: Tensor) -> Any:
        return functional_call(first.copy.network, tensors, inputs)

    stacked: Tensor = vmap(of_one)(tensors, *inputs)
    _unstack(copies, buffers)
    return [
        out if len(out) == count else out[:count]
        for out, count in zip(stacked.unbind(0), rows, strict=True)
    ]


def _stack(copies: Sequence[Stackable]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Stack parameters and buffers of a network by name, (agents, ...) each; also return the
    buffers."""
    parameters = _by_agent(copy.parameters() for copy in copies)
    buffers = _by_agent(copy.buffers() for copy in copies)
    return dict(zip(copies[0].names, [*parameters, *buffers], strict=True)), buffers


def _by_agent(tensors: Any) -> list[Tensor]:
    """Convert each agent's list of tensors to one list of tensors (agents, ...)."""
    stacks = [torch.stack(same) for same in zip(*tensors, strict=True)]
    for stack in stacks:
        if stack.requires_grad:  # once, not once for each agent
            stack.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
    return stacks


def pad_to(x: Tensor, rows: int) -> Tensor:
    """Pad rows (B, ...) with copies of the last one to ``rows`` in total."""
    missing = rows - len(x)
    return torch.cat([x, x[-1:].expand(missing, *x.shape[1:])]) if missing else x


def run_calls_batched(wanted: Sequence[BatchedCall]) -> list[Any]:
    """Return results of calls, in order; ``can_compute`` holds for each."""

    def rows(one: BatchedCall) -> int:
        return max((len(x) for x in tree_flatten(one.fields)[0] if x.dim()), default=1)

    return _in_kinds(wanted, [_kind_of(one) for one in wanted], rows, _run_calls)


def can_compute(one: BatchedCall) -> bool:
    """Return whether a call can be computed for several agents at once."""
    copies = [vars(network).get(COPY) for network in one.networks.values()]
    return all(copy is not None and not copy.is_single() for copy in copies)


def _kind_of(one: BatchedCall) -> Hashable:
    """Return a key; calls with the same key can be stacked."""
    copies: list[Stackable] = [vars(network)[COPY] for network in one.networks.values()]
    modes = tuple((copy.modes(), *(p.requires_grad for p in copy.parameters())) for copy in copies)
    leaves, tree = tree_flatten(one.fields)
    forms = repr(tree), *((x.shape, x.dtype, x.requires_grad) for x in leaves)
    return one.function, tuple(one.networks), modes, forms, one.settings, one.derivatives


def _run_calls(wanted: Sequence[BatchedCall]) -> Sequence[Any]:
    """Return results of calls with the same key."""
    first = wanted[0]
    if len(wanted) == 1:
        return [first.run_single()]
    copies = {name: [vars(one.networks[name])[COPY] for one in wanted] for name in first.networks}
    stacked = {name: _stack(own) for name, own in copies.items()}
    stacks = _by_agent(tree_flatten(one.fields)[0] for one in wanted)
    fields = tree_unflatten(stacks, tree_flatten(first.fields)[1])

    def of_one(tensors: Any, fields: Any) -> Any:
        networks = {n: FunctionalModule(net, tensors[n]) for n, net in first.networks.items()}
        return first.of(fields, networks)

    found = vmap(of_one)({name: tensors for name, (tensors, _) in stacked.items()}, fields)
    for name, own in copies.items():
        _unstack(own, stacked[name][1])
    leaves, form = tree_flatten(found)
    by_agent = zip(*(leaf.unbind(0) for leaf in leaves), strict=True)
    return [tree_unflatten(list(leaves), form) for leaves in by_agent]


def _unstack(copies: Sequence[Stackable], buffers: Sequence[Tensor]) -> None:
    """Copy back the buffers that a pass has changed (batch norm, spectral norm)."""
    own = [buffer for copy in copies for buffer in copy.buffers()]
    if own:
        moved = zip(*(buffer.unbind(0) for buffer in buffers), strict=True)
        torch._foreach_copy_(own, [buffer for of_agent in moved for buffer in of_agent])


class JointSteps:
    """Joint steps of several agents' optimisers; caches the joint optimisers."""

    def __init__(self) -> None:
        self._joint: list[torch.optim.Optimizer] = []
        self._own: list[torch.optim.Optimizer] = []  # optimisers that they were made of
        self._settings: list[dict[str, Any]] = []

    def take(self, steps: Sequence[OptimizerStep]) -> None:
        """Run ``local_training.minimise`` for all of them."""
        self._join([one for step in steps for one in step.optimisers])
        for optimiser in self._joint:
            optimiser.zero_grad(set_to_none=True)
        losses, moved = [step.loss for step in steps], [step.parameters() for step in steps]
        total = torch.stack(losses).sum()  # one backward pass; gradients stay separate
        torch.autograd.backward([total], inputs=[p for own in moved for p in own])
        for step, own in zip(steps, moved, strict=True):
            if step.clip_norm is not None:
                nn.utils.clip_grad_norm_(own, step.clip_norm)
        for optimiser in self._joint:
            optimiser.step()

    def down(self, own: Sequence[torch.optim.Optimizer]) -> None:
        """Step along the parameters' gradients."""
        self._join(own)
        for optimiser in self._joint:
            optimiser.step()

    def _join(self, own: Sequence[torch.optim.Optimizer]) -> None:
        """Create one optimiser of each kind, over all parameters and moments."""
        settings = [_settings(group) for one in own for group in one.param_groups]
        known = list(map(id, own)) == list(map(id, self._own)) and settings == self._settings
        if not known:
            kinds = dict.fromkeys(map(type, own))
            self._joint = [
                _merge_settings(k, [one for one in own if type(one) is k]) for k in kinds
            ]
            self._own, self._settings = list(own), settings


def _merge_settings(
    kind: type[torch.optim.Optimizer], own: Sequence[torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """Create one optimiser over all parameters, those of equal settings in one group.

    State is shared: either optimiser continues the other.
    """
    groups: dict[Hashable, dict[str, Any]] = {}
    for group in (group for one in own for group in one.param_groups):
        settings = _settings(group)
        merged = groups.setdefault(tuple(settings.items()), {**settings, "params": []})
        merged["params"] = [*merged["params"], *group["params"]]
    joint = kind(list(groups.values()))  # type: ignore[call-arg]
    for one in own:
        for parameter in (p for group in one.param_groups for p in group["params"]):
            joint.state[parameter] = one.state[parameter]
    return joint


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sorted(group.items()) if name != "params"}


def _places(network: nn.Module, kind: str) -> list[tuple[str, dict[str, Tensor], str]]:
    """List parameters or buffers of a network: full name, holder's dict, name in it."""
    return [
        (f"{prefix}.{key}" if prefix else key, store, key)
        for prefix, module in network.named_modules()
        for store in [getattr(module, kind)]
        for key, value in store.items()
        if value is not None
    ]
