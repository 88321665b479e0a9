"""Tries, on made-up rows, that a row's clipped gradient has the same bits in any company.

Clipping bounds what one row adds to a sum. That it moves nothing else stands on every other row's
gradient staying as it is, to the bit: with weights that a server picks, products can cancel until
rounding is all that is left of a gradient, and clipping makes a whole clip norm of it. Parts of
one size, in one thread, are rounded alike in all networks of ours
(tests/privacy/test_private_counts.py); another processor, device or release of torch may be unlike,
so each process looks before it trains.
"""

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor, nn

from privssl.errors import PrivacyError
from privssl.ops import dispatch
from privssl.privacy.clipping import (
    DenseGradients,
    OuterProductGradients,
    PerExampleGradients,
    factors_and_lines,
)
from privssl.privacy.dp_sgd import in_one_thread
from privssl.privacy.per_example_gradients import Parameters, RowLoss, factored_gradients
from privssl.training.batched.deferred import ExampleLoss

SCALES = (1.0, 1e8, 1e-8)  # of the weights
WATCHED = 8  # rows, from the first to the last

_passed = set[Hashable]()


def refuse_company(
    networks: Mapping[str, nn.Module], row_loss: RowLoss, fields: Mapping[str, Tensor]
) -> None:
    """Once for each kind of network and each size.

    Args:
        networks: the protected ones.
        fields: of made-up rows, as many as a part of a private step has (B, ...).

    Raises:
        PrivacyError: with other rows beside it, or at another place, some row has another gradient.
    """
    key = _kind(networks, row_loss, fields)
    if key in _passed:
        return
    rows = len(next(iter(fields.values())))
    watched = torch.linspace(0, rows - 1, min(rows, WATCHED)).round().long()
    others = {name: _with_others(field, watched) for name, field in fields.items()}
    for scale in SCALES:
        scaled: Parameters = {
            net: {n: (p.detach() * scale).requires_grad_() for n, p in network.named_parameters()}
            for net, network in networks.items()
        }
        with in_one_thread():
            before = _bits(factored_gradients(row_loss, scaled, fields), rows, watched)
            after = _bits(factored_gradients(row_loss, scaled, others), rows, rows - 1 - watched)
        if not all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
            raise PrivacyError(
                "a row's gradient is rounded otherwise when other rows are beside it, or at "
                f"another place among {rows} rows (weights times {scale:g}, on this device). Where "
                "weights are picked for it, such a rounding is as much as a whole row, and nothing "
                "could be claimed. Take another network, another device (run.device) or another "
                "release of torch"
            )
    _passed.add(key)


def _with_others(field: Tensor, watched: Tensor) -> Tensor:
    """The rows in reverse; those that are not watched are others."""
    changed = field.flip(0)
    if field.is_floating_point():
        changed = changed.roll(1, 0).mul(0.5).add(0.1)
        places = (len(field) - 1 - watched).to(field.device)
        changed[places] = field[watched.to(field.device)]
    return changed


def _bits(
    gradients: Mapping[tuple[str, str], PerExampleGradients], rows: int, places: Tensor
) -> list[Tensor]:
    """What decides what the rows at these places add: factors, and gradients."""
    every = list(gradients.values())
    if not every:
        return []
    factors, _ = factors_and_lines(every, torch.ones(rows, dtype=torch.bool), clip_norm=1.0)
    parts = [factors]
    for one in every:
        assert isinstance(one, DenseGradients | OuterProductGradients)
        parts += [one.each] if isinstance(one, DenseGradients) else [one.left, one.right]
    return [part[places.to(part.device)].nan_to_num() for part in parts]


def _kind(
    networks: Mapping[str, nn.Module], row_loss: RowLoss, fields: Mapping[str, Tensor]
) -> Hashable:
    """What decides which operations are done, and on how many numbers."""
    forms = tuple((name, x.shape, x.dtype, str(x.device)) for name, x in fields.items())
    made = tuple(
        (net, repr(network), *((n, p.shape, p.stride()) for n, p in network.named_parameters()))
        for net, network in networks.items()
    )
    return forms, made, _of_loss(row_loss), dispatch.instruction_set()


def _of_loss(row_loss: RowLoss) -> Hashable:
    if isinstance(row_loss, ExampleLoss):
        return row_loss.function, row_loss.settings
    held = [cell.cell_contents for cell in getattr(row_loss, "__closure__", None) or ()]
    plain = tuple(repr(one) for one in held if isinstance(one, bool | int | float | str | tuple))
    return getattr(row_loss, "__code__", type(row_loss)), plain
