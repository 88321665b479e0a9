"""Check on synthetic rows that the bits of a row's clipped gradient do not depend on other rows.

Clipping bounds the effect of one row only if every other row's gradient keeps its bits: a server
can choose weights for which products cancel, so that a gradient consists of rounding errors, which
clipping scales to the clip norm. Microbatches of one size, in one thread, are rounded equally in
all networks here (tests/privacy/test_private_counts.py). This may be false on other processors,
devices or torch releases, so each process checks before it trains.
"""

import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from privssl.errors import PrivacyError
from privssl.ops import dispatch
from privssl.privacy import own_code
from privssl.privacy.clipping import (
    DenseGradients,
    OuterProductGradients,
    PerExampleGradients,
    factors_and_inputs,
)
from privssl.privacy.per_example_gradients import Parameters, RowLoss, factored_gradients
from privssl.runtime.process import single_threaded
from privssl.training.batched.deferred import ExampleLoss

SCALES = (1.0, 1e8, 1e-8)  # of the weights
SHIFTS = 15  # rows shift by 1 to this many positions: each changes the alignment in memory
TRIES = 15  # random weights per test of positions: rounding differs in few numbers
STACK_TRIES = 4  # random weights per test of a stack of agents
SECONDS = 2.0  # time limit: by then large networks have been compared in enough numbers

_passed = set[Hashable]()


def refuse_batch_dependent_rounding(
    networks: Mapping[str, nn.Module], row_loss: RowLoss, fields: Mapping[str, Tensor],
    *, by_position: bool = True,
) -> None:  # fmt: skip
    """Refuse networks whose rounding of a row depends on its position or other rows.

    Cached by kind and size. Every row is compared with other rows beside it, and at several
    positions.

    Args:
        networks: the protected ones.
        fields: of synthetic rows, as many as a microbatch has (B, ...). Their values
            should be random: products of round numbers are exact.
        by_position: whether a row's position may change (:meth:`PrivatePlan.fixes_positions`).

    Raises:
        PrivacyError: some row's gradient depends on other rows or on its position.
    """
    key = by_position, _key_of_operations(networks, row_loss, fields)
    if key in _passed:
        return
    rows = len(next(iter(fields.values())))
    idx = torch.arange(rows)
    parameters = {net: dict(network.named_parameters()) for net, network in networks.items()}
    for number, scale, scaled in _scale_weights(parameters, TRIES * by_position):

        def compute_bits(inputs: Mapping[str, Tensor], scaled: Parameters = scaled) -> list[Tensor]:
            return gradient_bits(scaled, row_loss, inputs)

        before = compute_bits(fields)
        shifts = (1 + (4 * number + step) % SHIFTS for step in range(4))
        orders = [idx.flip(0), *(idx.roll(shift) for shift in shifts)] if by_position else []
        equal = [
            _are_equal(
                compute_bits({n: f[order.to(f.device)] for n, f in fields.items()}),
                before,
                idx,
                order,
            )
            for order in orders
        ]
        for subset in (idx[::2], idx[1::2]):
            mixed = {name: _replace_others(field, subset) for name, field in fields.items()}
            equal.append(_are_equal(compute_bits(mixed), before, subset, subset))
        if not all(equal):
            raise PrivacyError(
                f"the rounding of a row's gradient depends on the other {rows - 1} rows or on its "
                f"place (weights times {scale:g}, on this device), so no guarantee holds. Use "
                "another network, another device (run.device) or another release of torch"
            )
    _passed.add(key)


def gradient_bits(
    parameters: Parameters, row_loss: RowLoss, fields: Mapping[str, Tensor]
) -> list[Tensor]:
    """Return all tensors that determine each row's clipped contribution. ``fields``: of rows (B,
    ...)."""
    with single_threaded():
        gradients = factored_gradients(row_loss, parameters, fields)
        return _collect_bits(gradients, len(next(iter(fields.values()))))


def stack_keeps_bits(
    row_loss: RowLoss, parameters: Parameters, fields: Mapping[str, Tensor]
) -> bool:
    """Return whether rounding in stacked agents is independent of positions and other rows.

    Rows of the first and of the last agent change in turn; those of the others must keep their
    bits.

    Args:
        parameters: of A agents, as for ``factored_gradients``.
        fields: of synthetic rows (A, B, ...).
    """
    agents, rows = next(iter(fields.values())).shape[:2]
    idx = torch.arange(rows)
    for number, _, scaled in _scale_weights(parameters, STACK_TRIES):
        agent = (number % 2) * (agents - 1)

        def compute_bits(
            new: Mapping[str, Tensor], agent: int = agent, scaled: Parameters = scaled
        ) -> Any:
            inputs = {name: field.clone() for name, field in fields.items()}
            for name, value in new.items():
                inputs[name][agent] = value
            with single_threaded():
                gradients = factored_gradients(row_loss, scaled, inputs, agents=True)
                return [
                    part.reshape(agents, rows, -1)
                    for part in _collect_bits(gradients, agents, rows)
                ]

        before, others = compute_bits({}), torch.arange(agents) != agent
        changes = [
            ({n: f[agent, order] for n, f in fields.items()}, idx, order)
            for order in (idx.flip(0), idx.roll(1 + number))
        ] + [
            ({n: _replace_others(f[agent], subset) for n, f in fields.items()}, subset, subset)
            for subset in (idx[::2], idx[1::2])
        ]
        for new, dst, src in changes:
            after = compute_bits(new)
            equal = _are_equal([a[agent] for a in after], [b[agent] for b in before], dst, src)
            if not (equal and _are_equal(after, before, others, others)):
                return False
    return True


def _scale_weights(parameters: Parameters, tries: int) -> Iterator[tuple[int, float, Parameters]]:
    """Yield number, scale and weights: by each of ``SCALES``, then by random factors, within
    ``SECONDS``."""
    start, generator = time.monotonic(), torch.Generator().manual_seed(0)

    def draw_factors(p: Tensor) -> Tensor:
        return (1 + 0.5 * torch.randn(p.shape, generator=generator, dtype=p.dtype)).to(p.device)

    for number, scale in enumerate((*SCALES, *[1.0] * tries)):
        random = number >= len(SCALES)
        if random and time.monotonic() - start > SECONDS:
            return
        scaled = {
            net: {
                n: (p.detach() * scale * (draw_factors(p) if random else 1.0)).requires_grad_()
                for n, p in params.items()
            }
            for net, params in parameters.items()
        }
        yield number, scale, scaled


def _replace_others(field: Tensor, subset: Tensor) -> Tensor:
    """Keep the given rows at their positions, and put other rows at the other positions."""
    changed = field.flip(0)
    if field.is_floating_point():
        changed = changed.mul(0.5).add(0.1)
    subset = subset.to(field.device)
    changed[subset] = field[subset]
    return changed


def _collect_bits(
    gradients: Mapping[tuple[str, str], PerExampleGradients], *rows: int
) -> list[Tensor]:
    """Return the tensors that determine each row's contribution: factors, and gradients (rows,
    ...).

    ``rows``: their number, or those of agents and of rows per agent.
    """
    items = list(gradients.values())
    if not items:
        return []
    factors, _ = factors_and_inputs(items, torch.ones(*rows, dtype=torch.bool), clip_norm=1.0)
    tensors = [factors]
    for g in items:
        assert isinstance(g, DenseGradients | OuterProductGradients)
        tensors += [g.each] if isinstance(g, DenseGradients) else [g.left, g.right]
    return [tensor.nan_to_num() for tensor in tensors]


def _are_equal(
    left: list[Tensor], right: list[Tensor], left_rows: Tensor, right_rows: Tensor
) -> bool:
    """Return whether ``left_rows`` of ``left`` equal ``right_rows`` of ``right``."""
    return all(
        torch.equal(a[left_rows.to(a.device)], b[right_rows.to(b.device)])
        for a, b in zip(left, right, strict=True)
    )


def _key_of_operations(
    networks: Mapping[str, nn.Module], row_loss: RowLoss, fields: Mapping[str, Tensor]
) -> Hashable:
    """Return a key of the operations that run, and their sizes."""
    shapes = tuple((name, x.shape, x.dtype, str(x.device)) for name, x in fields.items())
    layouts = tuple(
        (
            net,
            identity(network),
            *((n, p.shape, p.stride()) for n, p in network.named_parameters()),
        )
        for net, network in networks.items()
    )
    return shapes, layouts, _key_of_loss(row_loss), dispatch.instruction_set()


def identity(network: nn.Module) -> Hashable:
    """Return a key of a network's computation: the form of ours, the object itself of others."""
    return repr(network) if own_code.has_known_layers(network) else weakref.ref(network)


def is_ours(networks: Mapping[str, nn.Module], row_loss: RowLoss, draw: Callable[..., Any]) -> bool:
    """Return whether all code of a private loss is privssl's: functions with what they hold, and
    networks without hooks, frozen ones included."""
    parts: tuple[object, ...] = (networks, row_loss, draw)
    if isinstance(row_loss, ExampleLoss):
        parts += (row_loss.function, row_loss.settings, row_loss.networks)
    return own_code.is_ours(parts)


def _key_of_loss(row_loss: RowLoss) -> Hashable:
    if isinstance(row_loss, ExampleLoss):
        return row_loss.function, row_loss.settings
    captured = [cell.cell_contents for cell in getattr(row_loss, "__closure__", None) or ()]
    simple = tuple(repr(v) for v in captured if isinstance(v, bool | int | float | str | tuple))
    return getattr(row_loss, "__code__", type(row_loss)), simple
