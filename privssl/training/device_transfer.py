"""Transfer of many tensors to a device and back at once.

Networks here are a dozen small tensors each; a GPU takes as long for one as for all.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def move_to(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move tensors to a device, detached, with their values, types and strides.

    Tensors that are on the device keep their memory. Copies share memory with each other, except on
    the CPU.
    """
    arrived = {name: tensor.detach() for name, tensor in tensors.items()}
    for (_, place), names in _by_kind(tensors).items():
        if place == device:
            continue
        sent = [_dense(arrived[name]) for name in names]
        flat = torch.cat([one.as_strided((one.numel(),), (1,)) for one in sent]).to(device)
        at = 0
        for name, one in zip(names, sent, strict=True):
            there = flat.as_strided(one.shape, one.stride(), at)
            arrived[name] = there.clone() if device.type == "cpu" else there
            at += one.numel()
    return arrived


@torch.no_grad()
def put(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write values into tensors of one device, which keep their strides.

    ``values``: from any device, under the same names.
    """
    if into:
        there = move_to(values, next(iter(into.values())).device)
        torch._foreach_copy_(list(into.values()), [there[name] for name in into])


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return CPU copies, each with its own memory and the original strides."""
    here = move_to(tensors, torch.device("cpu"))
    return {
        name: one.clone() if tensors[name].device.type == "cpu" else one
        for name, one in here.items()
    }


def _by_kind(tensors: Mapping[str, Tensor]) -> dict[tuple[torch.dtype, torch.device], list[str]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, one in tensors.items():
        kinds.setdefault((one.dtype, one.device), []).append(name)
    return kinds


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy, without gaps in memory."""
    whole = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor if whole else tensor.contiguous()
