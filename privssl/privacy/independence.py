"""Refuse networks and losses in which one row of a batch affects another row's loss.

``privacy/row_bits.py`` tests rounding.
"""

from collections import deque
from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import Tensor, nn

from privssl.errors import PrivacyError

_COUPLING = (nn.modules.batchnorm._BatchNorm,)


def refuse_coupling_layers(networks: Mapping[str, nn.Module]) -> None:
    """Raise PrivacyError naming every layer that does not permit per-example gradients.

    These mix rows of a batch, use randomness (dropout), or have no per-example gradients (torch's
    recurrent layers). Frozen networks are checked too, because gradients of protected networks pass
    through them.
    """
    mixing, drawing, recurrent = list[str](), list[str](), list[str]()
    for net, network in networks.items():
        for name, layer in network.named_modules():
            description = f"{net}.{name} ({type(layer).__name__})"
            if isinstance(layer, _COUPLING) or getattr(layer, "track_running_stats", False):
                mixing.append(description)
            elif isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p:
                drawing.append(description)
            elif isinstance(layer, nn.RNNBase):
                recurrent.append(description)
    if recurrent:
        raise PrivacyError(
            f"torch computes {', '.join(recurrent)} for all rows at once, and gradients of single "
            "rows are unknown. Set model.name: gru, or make the layer of nn.Linear"
        )
    if mixing:
        raise PrivacyError(
            f"rows of a batch are mixed by {', '.join(mixing)}, so clipping bounds nothing. Set "
            "model.norm: group"
        )
    if drawing:
        raise PrivacyError(
            f"random numbers are drawn by a row's place in the batch in {', '.join(drawing)}: one "
            "row more would change other rows' gradients. Use a network without dropout"
        )


def refuse_memory(network: nn.Module, shape: tuple[int, ...]) -> None:
    """Refuse a network that keeps state of a row: it would affect other rows' gradients despite
    clipping.

    Args:
        network: in any mode. shape: of a row.

    Raises:
        PrivacyError: a call changes later outputs of the same rows, in training or in evaluation,
            or an attribute of a layer.
    """
    batch = torch.linspace(-1, 1, 3 * prod(shape)).view(3, *shape)
    with torch.no_grad():
        eval_output = network.eval()(batch)
    for with_gradients in (False, True):  # some keep state in training alone
        with torch.set_grad_enabled(with_gradients):
            _refuse_memory(network.train(), batch)
    # Running statistics may be in any object, and be used only in evaluation.
    with torch.no_grad():
        if not torch.equal(network.eval()(batch), eval_output):
            raise PrivacyError(
                "the network keeps something of the rows that it is trained on, and uses it in "
                "evaluation (running statistics?): it would be released without noise. Use one "
                "whose output depends on its weights and its input alone"
            )
    network.train()


def _refuse_memory(network: nn.Module, batch: Tensor) -> None:
    before = _collect_attributes(network)
    values = {n: v.detach().clone() for n, v in before.items() if isinstance(v, torch.Tensor)}
    output = network(batch)
    network(batch.flip(-1) * 0.5 + 0.1)
    changed = [
        name for name, value in _collect_attributes(network).items()
        if before.get(name) is not value
        or (isinstance(value, torch.Tensor) and not torch.equal(value, values[name]))
    ]  # fmt: skip
    if changed or not torch.equal(network(batch), output):
        names = f" ({', '.join(sorted(changed)[:3])})" if changed else ""
        raise PrivacyError(
            f"the network keeps something from one call to the next{names}, or draws random "
            "numbers: rows would reach other rows' gradients. Use one without dropout whose output "
            "depends on its weights and its input alone"
        )


def _collect_attributes(network: nn.Module) -> dict[str, object]:
    """Return attributes of layers other than parameters and layers; items of containers."""
    attributes: dict[str, object] = {}
    for name, layer in network.named_modules():
        for key, value in (*vars(layer).items(), *layer.named_buffers(recurse=False)):
            if key not in ("_parameters", "_modules", "_buffers"):
                attributes[f"{name}.{key}".lstrip(".")] = value
                attributes |= {f"{name}.{key}[{index}]": item for index, item in _items_of(value)}
    return attributes


def _items_of(value: object) -> list[tuple[object, object]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | deque) else []


def check_rows_independent(
    losses: Callable[[Mapping[str, Tensor]], Tensor], fields: Mapping[str, Tensor]
) -> None:
    """Perturb one row at a time; every other row's loss must keep its bits.

    Args:
        losses: batch fields (B, ...) -> per-row losses (B,), as used in training.
        fields: a batch of at least 2 rows with floating-point tensors.

    Raises:
        PrivacyError: names the row that affects others; or the losses are random.
    """
    with torch.no_grad():
        before = losses(fields)
        if not torch.equal(losses(fields), before):
            raise PrivacyError(
                "the same rows have other losses each time: a network or a loss draws random "
                "numbers, or a network changes its buffers or attributes. Use one without dropout, "
                "whose output depends on its weights and its input alone"
            )
        for row in range(len(before)):
            perturbed = {k: v.clone() for k, v in fields.items()}
            for value in perturbed.values():
                if value.is_floating_point():
                    value[row] = value[row].flip(-1) * 0.5 + 0.1
            after = losses(perturbed)
            others = torch.arange(len(before)) != row
            shift = (after - before)[others].abs()
            if not torch.equal(after[others], before[others]):
                raise PrivacyError(
                    f"row {row} changed the loss of other rows by up to {float(shift.max()):.3g}. "
                    "Private training needs independent rows. Use group norm, and no loss that "
                    "compares rows of a batch"
                )
