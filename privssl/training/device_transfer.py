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
    moved = {name: tensor.detach() for name, tensor in tensors.items()}
    for (_, source), names in _group_by_kind(tensors).items():
        if source == device:
            continue
        dense = [_make_dense(moved[name]) for name in names]
        flat = torch.cat([t.as_strided((t.numel(),), (1,)) for t in dense]).to(device)
        offset = 0
        for name, t in zip(names, dense, strict=True):
            view = flat.as_strided(t.shape, t.stride(), offset)
            moved[name] = view.clone() if device.type == "cpu" else view
            offset += t.numel()
    return moved


@torch.no_grad()
def put(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write values into tensors of one device, which keep their strides.

    ``values``: from any device, under the same names.
    """
    if into:
        moved = move_to(values, next(iter(into.values())).device)
        torch._foreach_copy_(list(into.values()), [moved[name] for name in into])


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return CPU copies, each with its own memory and the original strides."""
    on_cpu = move_to(tensors, torch.device("cpu"))
    return {
        name: tensor.clone() if tensors[name].device.type == "cpu" else tensor
        for name, tensor in on_cpu.items()
    }


def _group_by_kind(
    tensors: Mapping[str, Tensor],
) -> dict[tuple[torch.dtype, torch.device], list[str]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.dtype, tensor.device), []).append(name)
    return kinds


def _make_dense(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy, without gaps in memory."""
    is_dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor if is_dense else tensor.contiguous()
