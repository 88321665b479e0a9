"""Check on synthetic rows that the bits of a row's clipped gradient do not depend on other rows.

Clipping bounds the effect of one row only if every other row's gradient keeps its bits: a server
can choose weights for which products cancel, so that a gradient consists of rounding errors, which
clipping scales to the clip norm. Parts of one size, in one thread, are rounded equally in all
networks here (tests/privacy/test_private_counts.py). This may be false on other processors, devices
or torch releases, so each process checks before it trains.
"""

import time
import weakref
from collections.abc import Callable, Hashable, Mapping
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
    *, by_place: bool = True,
) -> None:  # fmt: skip
    """Refuse networks whose rounding of a row depends on its position or other rows.

    Cached by kind and size. Every row is compared with other rows beside it, and at several
    positions.

    Args:
        networks: the protected ones.
        fields: of synthetic rows, as many as a part of a private step has (B, ...). Their values
            should be random: products of round numbers are exact.
        by_place: whether a row's position may change (:meth:`PrivatePlan.keeps_places`).

    Raises:
        PrivacyError: some row's gradient depends on other rows or on its position.
    """
    key = by_place, _kind(networks, row_loss, fields)
    if key in _passed:
        return
    rows = len(next(iter(fields.values())))
    same, start = torch.arange(rows), time.monotonic()
    chance = torch.Generator().manual_seed(0)
    for number in range(len(SCALES) + TRIES * by_place):
        if number >= len(SCALES) and time.monotonic() - start > SECONDS:
            break
        scale = SCALES[number] if number < len(SCALES) else 1.0
        spread = 0.0 if number < len(SCALES) else 0.5
        scaled: Parameters = {
            net: {
                n: (p.detach() * scale * _about_one(p, spread, chance)).requires_grad_()
                for n, p in network.named_parameters()
            }
            for net, network in networks.items()
        }

        def bits(given: Mapping[str, Tensor], scaled: Parameters = scaled) -> list[Tensor]:
            return gradient_bits(scaled, row_loss, given)

        before = bits(fields)
        shifts = (1 + (4 * number + further) % SHIFTS for further in range(4))
        orders = [same.flip(0), *(same.roll(shift) for shift in shifts)] if by_place else []
        alike = [
            _equal(bits({n: f[order.to(f.device)] for n, f in fields.items()}), before, same, order)
            for order in orders
        ]
        for kept in (same[::2], same[1::2]):
            others = {name: _with_others(field, kept) for name, field in fields.items()}
            alike.append(_equal(bits(others), before, kept, kept))
        if not all(alike):
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
        return _bits(gradients, len(next(iter(fields.values()))))


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
    same, start = torch.arange(rows), time.monotonic()
    chance = torch.Generator().manual_seed(0)
    for number in range(len(SCALES) + STACK_TRIES):
        if number >= len(SCALES) and time.monotonic() - start > SECONDS:
            break
        scale = SCALES[number] if number < len(SCALES) else 1.0
        spread, who = 0.5 * (number >= len(SCALES)), (number % 2) * (agents - 1)
        scaled: Parameters = {
            net: {
                n: (p.detach() * scale * _about_one(p, spread, chance)).requires_grad_()
                for n, p in named.items()
            }
            for net, named in parameters.items()
        }

        def bits(own: Mapping[str, Tensor], who: int = who, scaled: Parameters = scaled) -> Any:
            given = {name: field.clone() for name, field in fields.items()}
            for name, value in own.items():
                given[name][who] = value
            with single_threaded():
                found = factored_gradients(row_loss, scaled, given, agents=True)
                return [part.reshape(agents, rows, -1) for part in _bits(found, agents, rows)]

        before, others = bits({}), torch.arange(agents) != who
        changes = [
            ({n: f[who, order] for n, f in fields.items()}, same, order)
            for order in (same.flip(0), same.roll(1 + number))
        ] + [
            ({n: _with_others(f[who], kept) for n, f in fields.items()}, kept, kept)
            for kept in (same[::2], same[1::2])
        ]
        for own, here, there in changes:
            after = bits(own)
            alike = _equal([a[who] for a in after], [b[who] for b in before], here, there)
            if not (alike and _equal(after, before, others, others)):
                return False
    return True


def _about_one(like: Tensor, spread: float, chance: torch.Generator) -> Tensor:
    """Return random factors in the shape of a parameter."""
    drawn = torch.randn(like.shape, generator=chance, dtype=like.dtype) if spread else 0.0
    return (torch.ones(like.shape, dtype=like.dtype) + spread * drawn).to(like.device)


def _with_others(field: Tensor, kept: Tensor) -> Tensor:
    """Keep the given rows at their positions, and put other rows at the other positions."""
    changed = field.flip(0)
    if field.is_floating_point():
        changed = changed.mul(0.5).add(0.1)
    kept = kept.to(field.device)
    changed[kept] = field[kept]
    return changed


def _bits(gradients: Mapping[tuple[str, str], PerExampleGradients], *rows: int) -> list[Tensor]:
    """Return the tensors that determine each row's contribution: factors, and gradients (rows,
    ...).

    ``rows``: their number, or those of agents and of rows per agent.
    """
    every = list(gradients.values())
    if not every:
        return []
    factors, _ = factors_and_inputs(every, torch.ones(*rows, dtype=torch.bool), clip_norm=1.0)
    parts = [factors]
    for one in every:
        assert isinstance(one, DenseGradients | OuterProductGradients)
        parts += [one.each] if isinstance(one, DenseGradients) else [one.left, one.right]
    return [part.nan_to_num() for part in parts]


def _equal(one: list[Tensor], other: list[Tensor], here: Tensor, there: Tensor) -> bool:
    """Return whether the rows at ``here`` of ``one`` equal those at ``there`` of ``other``."""
    return all(
        torch.equal(a[here.to(a.device)], b[there.to(b.device)])
        for a, b in zip(one, other, strict=True)
    )


def _kind(
    networks: Mapping[str, nn.Module], row_loss: RowLoss, fields: Mapping[str, Tensor]
) -> Hashable:
    """Return a key of the operations that run, and their sizes."""
    forms = tuple((name, x.shape, x.dtype, str(x.device)) for name, x in fields.items())
    made = tuple(
        (
            net,
            identity(network),
            *((n, p.shape, p.stride()) for n, p in network.named_parameters()),
        )
        for net, network in networks.items()
    )
    return forms, made, _of_loss(row_loss), dispatch.instruction_set()


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


def _of_loss(row_loss: RowLoss) -> Hashable:
    if isinstance(row_loss, ExampleLoss):
        return row_loss.function, row_loss.settings
    held = [cell.cell_contents for cell in getattr(row_loss, "__closure__", None) or ()]
    plain = tuple(repr(one) for one in held if isinstance(one, bool | int | float | str | tuple))
    return getattr(row_loss, "__code__", type(row_loss)), plain
