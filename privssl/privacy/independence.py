"""What lets one row of a batch into another's loss, looked for before a run under DP-SGD.

Rounding is looked for in ``privacy/row_bits.py``."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from privssl.errors import PrivacyError

_COUPLING = (nn.modules.batchnorm._BatchNorm,)


def refuse_coupling_layers(networks: Mapping[str, nn.Module]) -> None:
    """Raises PrivacyError naming every layer that mixes rows of a batch, frozen ones included, or
    that draws chance of its own (dropout).

    A batch norm in a network that is not itself trained couples rows just as well: the
    gradient of a protected network flows through it (measured: 18%, docs/privacy.md).
    """
    found = [
        f"{net}.{name} ({type(layer).__name__})"
        for net, network in networks.items()
        for name, layer in network.named_modules()
        if isinstance(layer, _COUPLING) or getattr(layer, "track_running_stats", False)
    ]
    if found:
        raise PrivacyError(
            f"rows of a batch are mixed by {', '.join(found)}. Private training clips row by "
            "row, which bounds nothing if rows depend on each other. Set model.norm: group"
        )
    drawing = [
        f"{net}.{name} ({type(layer).__name__})"
        for net, network in networks.items()
        for name, layer in network.named_modules()
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p
    ]
    if drawing:
        raise PrivacyError(
            f"chance that no visit owns is drawn by {', '.join(drawing)}, by a row's place in the "
            "batch: one row more would change what others contribute. Use a network without dropout"
        )


def check_rows_independent(
    losses: Callable[[Mapping[str, Tensor]], Tensor], fields: Mapping[str, Tensor]
) -> None:
    """Perturbs one row at a time; every other row's loss must stay bit-equal.

    Args:
        losses: batch fields (B, ...) -> per-row losses (B,), as used in training.
        fields: a batch of at least 2 rows with floating-point tensors.

    Raises:
        PrivacyError: names the rows; the layers are named by refuse_coupling_layers. Or the losses
            draw chance of their own.
    """
    with torch.no_grad():
        before = losses(fields)
        if not torch.equal(losses(fields), before):
            raise PrivacyError(
                "the same rows have other losses each time: a network or a loss draws chance of "
                "its own, for all rows at once. Use a network without dropout"
            )
        for row in range(len(before)):
            moved = {k: v.clone() for k, v in fields.items()}
            for value in moved.values():
                if value.is_floating_point():
                    value[row] = value[row].flip(-1) * 0.5 + 0.1
            after = losses(moved)
            others = torch.arange(len(before)) != row
            shift = (after - before)[others].abs()
            if not torch.equal(after[others], before[others]):
                raise PrivacyError(
                    f"row {row} changed the loss of other rows by up to {float(shift.max()):.3g}. "
                    "Private training needs independent rows. Use group norm, and no loss that "
                    "compares rows of a batch"
                )
