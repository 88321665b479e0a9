"""Batched DP-SGD steps of several agents.

Rows, noise and budgets stay separate by agent, as in ``privacy/dp_sgd.py``. Passes, norms and sums
(``per_example_gradients.factored_gradients``), noise and steps run once for all agents. Sums have
another order; no agent's rows enter another's sum. If the rounding of rows would depend on their
position or neighbours in a stack, agents are computed one by one.

Not batched: losses that are not a ``deferred.ExampleLoss`` of the trained networks, and layers that
``training/batched/stacking.py`` does not list.
"""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from privssl.ops import dispatch
from privssl.privacy import row_bits
from privssl.privacy.dp_sgd import ClippedSum, NoisyOptimizerStep, pad_rows
from privssl.privacy.layer_gradients import Key
from privssl.privacy.per_example_gradients import Parameters, factored_gradients
from privssl.runtime.process import single_threaded
from privssl.training.batched.deferred import ExampleLoss
from privssl.training.batched.stacking import COPY, JointSteps

NUMBERS_AT_ONCE = 2**28  # rows times parameters of one stack, to bound the memory


def can_sum(one: ClippedSum) -> bool:
    """Return whether these sums can be batched with other agents'."""
    loss = one.row_loss
    if not one.joint:
        return False
    if not isinstance(loss, ExampleLoss) or loss.networks.keys() != one.parameters.keys():
        return False
    copies = [vars(network).get(COPY) for network in loss.networks.values()]
    return all(copy is not None and not copy.is_single() and not copy.buffers() for copy in copies)


def clipped_sums_batched(wanted: Sequence[ClippedSum]) -> list[dict[Key, Tensor]]:
    """Compute the sums, in the order of ``wanted``; ``can_sum`` holds for each."""
    groups: dict[Hashable, list[int]] = {}
    for index, request in enumerate(wanted):
        groups.setdefault(_batch_key_of(request), []).append(index)
    sums: dict[int, dict[Key, Tensor]] = {}
    for indices in groups.values():
        rows = max(len(wanted[index].drawn) for index in indices)
        elements = rows * sum(p.numel() for p in _parameters_of(wanted[indices[0]]).values())
        chunk_size = max(1, NUMBERS_AT_ONCE // elements)
        for first in range(0, len(indices), chunk_size):
            chunk = indices[first : first + chunk_size]
            sums |= zip(chunk, _sum_batched([wanted[index] for index in chunk]), strict=True)
    return [sums[index] for index in range(len(wanted))]


def _batch_key_of(request: ClippedSum) -> Hashable:
    """Return a key; sums with the same key can be batched. Numbers of rows may differ."""
    loss = request.row_loss
    assert isinstance(loss, ExampleLoss)
    modes = tuple(vars(network)[COPY].modes() for network in loss.networks.values())
    fields = tuple((name, x.shape[1:], x.dtype) for name, x in request.fields.items())
    parameters = tuple((key, p.shape, p.dtype) for key, p in _parameters_of(request).items())
    return loss.function, loss.settings, modes, fields, parameters, request.clip_norm


def _parameters_of(request: ClippedSum) -> dict[Key, Tensor]:
    return {(net, n): p for net, params in request.parameters.items() for n, p in params.items()}


def _sum_batched(requests: Sequence[ClippedSum]) -> Sequence[dict[Key, Tensor]]:
    """Compute sums of agents with the same key."""
    first = requests[0]
    if len(requests) == 1:
        return [first.run_single()]
    rows = max(len(request.drawn) for request in requests)
    fields = {
        name: torch.stack([pad_rows(request.fields[name], rows) for request in requests])
        for name in first.fields
    }
    parameters = {
        net: {
            name: torch.stack([request.parameters[net][name].detach() for request in requests])
            .requires_grad_()
            for name in params
        }
        for net, params in first.parameters.items()
    }  # fmt: skip
    if not _keeps_bits(first, parameters, fields):
        return [request.run_single() for request in requests]
    mask = torch.stack([pad_rows(request.drawn, rows) for request in requests])
    with single_threaded():
        gradients = factored_gradients(first.row_loss, parameters, fields, agents=True)
        sums = {
            key: total.unbind(0) for key, total in first.add_clipped_sum(gradients, mask).items()
        }
    return [{key: tensors[n] for key, tensors in sums.items()} for n in range(len(requests))]


def _keeps_bits(request: ClippedSum, parameters: Parameters, fields: Mapping[str, Tensor]) -> bool:
    """Return whether the bits of a row in such a stack are independent of the other rows.

    Tested on synthetic rows, once for each kind and size, because other kernels run than for one
    agent.
    """
    assert isinstance(request.row_loss, ExampleLoss)
    networks = tuple(map(row_bits.identity, request.row_loss.networks.values()))
    sizes = tuple(x.shape[:2] for x in fields.values())
    key = _batch_key_of(request), networks, sizes, dispatch.instruction_set()
    if key not in _TRIED:
        generator = torch.Generator().manual_seed(0)
        synthetic = {
            name: torch.rand(x.shape, generator=generator, dtype=x.dtype) * 2 - 1
            if x.is_floating_point()
            else (torch.arange(x.numel()) % 2).view(x.shape).to(x.dtype)
            for name, x in fields.items()
        }
        _TRIED[key] = row_bits.stack_keeps_bits(request.row_loss, parameters, synthetic)
    return _TRIED[key]


_TRIED: dict[Hashable, bool] = {}


def noisy_steps_batched(steps: Sequence[NoisyOptimizerStep], joint: JointSteps) -> None:
    """Run ``NoisyOptimizerStep.run_single`` for all of them."""
    from privssl.privacy.noisy_optimizer import add_noise  # imports Opacus, as in privacy/dp_sgd.py

    add_noise([step.optimiser for step in steps])
    for step in steps:
        step.average()
    joint.down([step.optimiser.original_optimizer for step in steps])
    for step in steps:
        step.forget()
