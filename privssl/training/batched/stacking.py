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
        self._parameters = _list_tensors(network, "_parameters")
        self._buffers = _list_tensors(network, "_buffers")
        self._by_mode = [layer for layer in _list_layers(network) if _class_of(layer) not in BY_ROW]
        self.names = [name for name, *_ in (*self._parameters, *self._buffers)]
        has_hooks = any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
        all_known = all(isinstance(layer, BY_MODE) for layer in self._by_mode)
        self.never = not all_known or has_hooks or precision_of(network) != "float32"

    def is_single(self) -> bool:
        """Return whether it cannot be stacked in its present mode."""
        return self.never or any(map(_is_unstackable, self._by_mode))

    def couples(self) -> bool:
        """Return whether a row's output depends on other rows."""
        return any(isinstance(layer, nn.BatchNorm2d) and layer.training for layer in self._by_mode)

    def modes(self) -> tuple[bool, ...]:
        return tuple(layer.training for layer in self._by_mode)

    def parameters(self) -> list[Tensor]:
        """Return its current parameters; ``functional_call`` may have replaced them."""
        return [store[key] for _, store, key in self._parameters]

    def buffers(self) -> list[Tensor]:
        return [store[key] for _, store, key in self._buffers]


def _list_layers(network: nn.Module) -> list[nn.Module]:
    """Return modules without children, and those with parametrized weights."""
    parametrized = [layer for layer in network.modules() if parametrize.is_parametrized(layer)]
    return [*parametrized, *(layer for layer in network.modules() if not any(layer.children()))]


def _class_of(layer: nn.Module) -> type:
    """Return its class before parametrization."""
    return parametrize.type_before_parametrizations(layer)


def _is_unstackable(layer: nn.Module) -> bool:
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
    keys = [item.kind() for item in passes]
    return _run_by_kind(passes, keys, lambda item: len(item.inputs[0]), _run_stacked)


def _run_by_kind(
    items: Sequence[StackedT], keys: Sequence[Hashable], rows_of: Callable[[StackedT], int],
    run: Callable[[Sequence[StackedT]], Sequence[Any]],
) -> list[Any]:  # fmt: skip
    """Apply ``run`` to items of equal kind, as many as memory permits; return results in order."""
    results: dict[int, Any] = {}
    for key in dict.fromkeys(keys):
        indices = [index for index, k in enumerate(keys) if k == key]
        at_once = max(1, ROWS_AT_ONCE // max(1, *(rows_of(items[index]) for index in indices)))
        for start in range(0, len(indices), at_once):
            chunk = indices[start : start + at_once]
            with torch.set_grad_enabled(items[chunk[0]].derivatives):
                results |= zip(chunk, run([items[index] for index in chunk]), strict=True)
    return [results[index] for index in range(len(items))]


def _run_stacked(passes: Sequence[Pass]) -> Sequence[Any]:
    """Return outputs of passes with the same key."""
    first = passes[0]
    if len(passes) == 1:
        return [first.run_single()]
    copies = [item.copy for item in passes]
    tensors, buffers = _stack(copies)
    rows = [len(item.inputs[0]) for item in passes]
    inputs = _stack_agents([pad_to(x, max(rows)) for x in item.inputs] for item in passes)

    def forward_one(tensors: Any, *inputs: Tensor) -> Any:
        return functional_call(first.copy.network, tensors, inputs)

    stacked: Tensor = vmap(forward_one)(tensors, *inputs)
    _unstack(copies, buffers)
    return [
        out if len(out) == count else out[:count]
        for out, count in zip(stacked.unbind(0), rows, strict=True)
    ]


def _stack(copies: Sequence[Stackable]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Stack parameters and buffers of a network by name, (agents, ...) each; also return the
    buffers."""
    parameters = _stack_agents(copy.parameters() for copy in copies)
    buffers = _stack_agents(copy.buffers() for copy in copies)
    return dict(zip(copies[0].names, [*parameters, *buffers], strict=True)), buffers


def _stack_agents(tensors: Any) -> list[Tensor]:
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

    def count_rows(call: BatchedCall) -> int:
        return max((len(x) for x in tree_flatten(call.fields)[0] if x.dim()), default=1)

    return _run_by_kind(wanted, [_batch_key_of(call) for call in wanted], count_rows, _run_calls)


def can_compute(one: BatchedCall) -> bool:
    """Return whether a call can be computed for several agents at once."""
    copies = [vars(network).get(COPY) for network in one.networks.values()]
    return all(copy is not None and not copy.is_single() for copy in copies)


def _batch_key_of(call: BatchedCall) -> Hashable:
    """Return a key; calls with the same key can be stacked."""
    copies: list[Stackable] = [vars(network)[COPY] for network in call.networks.values()]
    modes = tuple((copy.modes(), *(p.requires_grad for p in copy.parameters())) for copy in copies)
    leaves, tree = tree_flatten(call.fields)
    forms = repr(tree), *((x.shape, x.dtype, x.requires_grad) for x in leaves)
    return call.function, tuple(call.networks), modes, forms, call.settings, call.derivatives


def _run_calls(calls: Sequence[BatchedCall]) -> Sequence[Any]:
    """Return results of calls with the same key."""
    first = calls[0]
    if len(calls) == 1:
        return [first.run_single()]
    copies = {name: [vars(call.networks[name])[COPY] for call in calls] for name in first.networks}
    stacked = {name: _stack(group) for name, group in copies.items()}
    stacks = _stack_agents(tree_flatten(call.fields)[0] for call in calls)
    fields = tree_unflatten(stacks, tree_flatten(first.fields)[1])

    def call_one(tensors: Any, fields: Any) -> Any:
        networks = {n: FunctionalModule(net, tensors[n]) for n, net in first.networks.items()}
        return first.of(fields, networks)

    outputs = vmap(call_one)({name: tensors for name, (tensors, _) in stacked.items()}, fields)
    for name, group in copies.items():
        _unstack(group, stacked[name][1])
    leaves, tree = tree_flatten(outputs)
    by_agent = zip(*(leaf.unbind(0) for leaf in leaves), strict=True)
    return [tree_unflatten(list(leaves), tree) for leaves in by_agent]


def _unstack(copies: Sequence[Stackable], buffers: Sequence[Tensor]) -> None:
    """Copy back the buffers that a pass has changed (batch norm, spectral norm)."""
    targets = [buffer for copy in copies for buffer in copy.buffers()]
    if targets:
        updated = zip(*(buffer.unbind(0) for buffer in buffers), strict=True)
        torch._foreach_copy_(targets, [buffer for of_agent in updated for buffer in of_agent])


class JointSteps:
    """Joint steps of several agents' optimisers; caches the joint optimisers."""

    def __init__(self) -> None:
        self._joint: list[torch.optim.Optimizer] = []
        self._own: list[torch.optim.Optimizer] = []  # optimisers that they were made of
        self._settings: list[dict[str, Any]] = []

    def take(self, steps: Sequence[OptimizerStep]) -> None:
        """Run ``local_training.minimise`` for all of them."""
        self._join([optimiser for step in steps for optimiser in step.optimisers])
        for optimiser in self._joint:
            optimiser.zero_grad(set_to_none=True)
        losses, parameters = [step.loss for step in steps], [step.parameters() for step in steps]
        total = torch.stack(losses).sum()  # one backward pass; gradients stay separate
        torch.autograd.backward([total], inputs=[p for group in parameters for p in group])
        for step, group in zip(steps, parameters, strict=True):
            if step.clip_norm is not None:
                nn.utils.clip_grad_norm_(group, step.clip_norm)
        for optimiser in self._joint:
            optimiser.step()

    def down(self, own: Sequence[torch.optim.Optimizer]) -> None:
        """Step along the parameters' gradients."""
        self._join(own)
        for optimiser in self._joint:
            optimiser.step()

    def _join(self, optimisers: Sequence[torch.optim.Optimizer]) -> None:
        """Create one optimiser of each kind, over all parameters and moments."""
        settings = [_settings_of(group) for o in optimisers for group in o.param_groups]
        same = list(map(id, optimisers)) == list(map(id, self._own)) and settings == self._settings
        if not same:
            kinds = dict.fromkeys(map(type, optimisers))
            self._joint = [
                _merge_settings(kind, [o for o in optimisers if type(o) is kind]) for kind in kinds
            ]
            self._own, self._settings = list(optimisers), settings


def _merge_settings(
    kind: type[torch.optim.Optimizer], optimisers: Sequence[torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """Create one optimiser over all parameters, those of equal settings in one group.

    State is shared: either optimiser continues the other.
    """
    groups: dict[Hashable, dict[str, Any]] = {}
    for group in (group for optimiser in optimisers for group in optimiser.param_groups):
        settings = _settings_of(group)
        merged = groups.setdefault(tuple(settings.items()), {**settings, "params": []})
        merged["params"] = [*merged["params"], *group["params"]]
    joint = kind(list(groups.values()))  # type: ignore[call-arg]
    for optimiser in optimisers:
        for parameter in (p for group in optimiser.param_groups for p in group["params"]):
            joint.state[parameter] = optimiser.state[parameter]
    return joint


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sorted(group.items()) if name != "params"}


def _list_tensors(network: nn.Module, kind: str) -> list[tuple[str, dict[str, Tensor], str]]:
    """List parameters or buffers of a network: full name, holder's dict, name in it."""
    return [
        (f"{prefix}.{key}" if prefix else key, store, key)
        for prefix, module in network.named_modules()
        for store in [getattr(module, kind)]
        for key, value in store.items()
        if value is not None
    ]
