"""Check on synthetic rows that a row's clipped gradient has the same bits beside any other rows.

Clipping bounds what one row adds, if every other row's gradient keeps its bits: with weights that a
server chooses, products can cancel until rounding is all that is left of a gradient, and clipping
scales it to a whole clip norm. Parts of one size, in one thread, round alike in all networks here
(tests/privacy/test_private_counts.py); other processors, devices or torch releases may not, so each
process checks before it trains.
"""

import time
import weakref
from collections.abc import Hashable, Mapping

import torch
from torch import Tensor, nn

from privssl.errors import PrivacyError
from privssl.ops import dispatch
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
SHIFTS = 15  # places that rows move by are 1 to this: alignment in memory changes with each
TRIES = 15  # of other weights, for the places of rows: rounding shows in few numbers
SECONDS = 2.0  # after these, large networks have been compared at enough numbers

_passed = set[Hashable]()


def refuse_batch_dependent_rounding(
    networks: Mapping[str, nn.Module], row_loss: RowLoss, fields: Mapping[str, Tensor],
    *, by_place: bool = True,
) -> None:  # fmt: skip
    """Refuse networks that round a row by its place or its neighbours. Cached by kind and size.

    Every row is compared beside other rows, and at several places.

    Args:
        networks: the protected ones.
        fields: of made-up rows, as many as a part of a private step has (B, ...). Their values
            should be random: products of plain numbers are not rounded.
        by_place: whether a row's place may change (:meth:`PrivatePlan.keeps_places`).

    Raises:
        PrivacyError: some row's gradient depends on other rows or on its place.
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
            with single_threaded():
                return _bits(factored_gradients(row_loss, scaled, given), rows)

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


def _about_one(like: Tensor, spread: float, chance: torch.Generator) -> Tensor:
    """Random factors in the shape of a parameter."""
    drawn = torch.randn(like.shape, generator=chance, dtype=like.dtype) if spread else 0.0
    return (torch.ones(like.shape, dtype=like.dtype) + spread * drawn).to(like.device)


def _with_others(field: Tensor, kept: Tensor) -> Tensor:
    """The kept rows, each at its place, and others at the other places."""
    changed = field.flip(0)
    if field.is_floating_point():
        changed = changed.mul(0.5).add(0.1)
    kept = kept.to(field.device)
    changed[kept] = field[kept]
    return changed


def _bits(gradients: Mapping[tuple[str, str], PerExampleGradients], rows: int) -> list[Tensor]:
    """What decides what each row adds: factors, and gradients (rows, ...)."""
    every = list(gradients.values())
    if not every:
        return []
    factors, _ = factors_and_inputs(every, torch.ones(rows, dtype=torch.bool), clip_norm=1.0)
    parts = [factors]
    for one in every:
        assert isinstance(one, DenseGradients | OuterProductGradients)
        parts += [one.each] if isinstance(one, DenseGradients) else [one.left, one.right]
    return [part.nan_to_num() for part in parts]


def _equal(one: list[Tensor], other: list[Tensor], here: Tensor, there: Tensor) -> bool:
    """Whether rows at places ``here`` of ``one`` are those at places ``there`` of ``other``."""
    return all(
        torch.equal(a[here.to(a.device)], b[there.to(b.device)])
        for a, b in zip(one, other, strict=True)
    )


def _kind(
    networks: Mapping[str, nn.Module], row_loss: RowLoss, fields: Mapping[str, Tensor]
) -> Hashable:
    """What decides which operations run, and their sizes."""
    forms = tuple((name, x.shape, x.dtype, str(x.device)) for name, x in fields.items())
    made = tuple(
        (
            net,
            _identity(network),
            *((n, p.shape, p.stride()) for n, p in network.named_parameters()),
        )
        for net, network in networks.items()
    )
    return forms, made, _of_loss(row_loss), dispatch.instruction_set()


def _identity(network: nn.Module) -> Hashable:
    """What a network computes: of ours its form, of another itself, whose code may be anything."""
    known = ("privssl.", "generators.", "torch.nn.")
    ours = all(type(layer).__module__.startswith(known) for layer in network.modules())
    return repr(network) if ours else weakref.ref(network)


def _of_loss(row_loss: RowLoss) -> Hashable:
    if isinstance(row_loss, ExampleLoss):
        return row_loss.function, row_loss.settings
    held = [cell.cell_contents for cell in getattr(row_loss, "__closure__", None) or ()]
    plain = tuple(repr(one) for one in held if isinstance(one, bool | int | float | str | tuple))
    return getattr(row_loss, "__code__", type(row_loss)), plain
