"""Sparse weights: the entries that a receiver lacks, and their positions.

The N entries of a mapping of tensors are numbered end to end, in the order of its names. A sparse
form of k of them is an ordinary mapping of tensors in a message:

    values     (k,), in the type of the weights
    indices    (k,) int32, ascending      where k <= N / 32
    bits       (ceil(N / 8),) uint8       one bit an entry, lowest first, where that is smaller
    (neither)                             all N entries

So a message of k float32 entries has 4k + min(4k, ceil(N / 8)) bytes, and 4N if k is N.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from privssl.core.messages import MessageError, StateDict


def to_sparse(weights: StateDict, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sparse form of the entries of ``weights`` where ``masks`` (bool, same shapes) is
    true.

    >>> to_sparse({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([False, True])})
    {'values': tensor([2.]), 'bits': tensor([2], dtype=torch.uint8)}
    """
    if not weights:
        return {}
    mask = torch.cat([masks[name].reshape(-1) for name in weights]).cpu().numpy()
    flat = torch.cat([weight.reshape(-1) for weight in weights.values()])
    positions = torch.from_numpy(np.flatnonzero(mask))  # three times as fast as torch's own
    sparse = {"values": flat.index_select(0, positions.to(flat.device))}
    entries, count = len(mask), len(positions)
    if count == entries:
        return sparse
    if 4 * count <= -(-entries // 8):
        return {**sparse, "indices": positions.to(torch.int32)}
    return {**sparse, "bits": torch.from_numpy(np.packbits(mask, bitorder="little"))}


def from_sparse(held: StateDict, sparse: StateDict) -> dict[str, Tensor]:
    """Insert the entries of a sparse form into ``held``.

    Raises MessageError if it is not a sparse form of these weights. Senders are untrusted.
    """
    if not held and not sparse:
        return {}
    flat = torch.cat([weight.reshape(-1) for weight in held.values()] or [torch.empty(0)])  # (N,)
    values = sparse.get("values")
    if values is None or values.dim() != 1 or values.dtype != flat.dtype:
        raise MessageError(f"sparse weights lack values of {flat.dtype}. {ADVICE}")
    if sparse.keys() == {"values"}:
        positions = torch.arange(len(flat))
    elif sparse.keys() == {"values", "indices"}:
        positions = _check_indices(sparse["indices"], len(flat))
    elif sparse.keys() == {"values", "bits"}:
        positions = _read_bits(sparse["bits"], len(flat))
    else:
        raise MessageError(f"sparse weights have {', '.join(sparse)}. {ADVICE}")
    if len(positions) != len(values):
        raise MessageError(f"{len(values)} values for {len(positions)} places. {ADVICE}")
    flat.index_copy_(0, positions.to(flat.device), values)
    parts = torch.split(flat, [weight.numel() for weight in held.values()])
    return {
        name: part.view(weight.shape)
        for (name, weight), part in zip(held.items(), parts, strict=True)
    }


ADVICE = "Its sender has other weights than the receiver, or is malicious (leave it out)"


def _check_indices(indices: Tensor, entries: int) -> Tensor:
    positions = indices.long()
    if indices.dtype != torch.int32 or indices.dim() != 1 or (positions.diff() <= 0).any():
        raise MessageError(f"indices of sparse weights are not ascending int32. {ADVICE}")
    if len(positions) and not 0 <= int(positions[0]) <= int(positions[-1]) < entries:
        raise MessageError(f"an index of sparse weights is outside of {entries}. {ADVICE}")
    return positions


def _read_bits(bits: Tensor, entries: int) -> Tensor:
    if bits.dtype != torch.uint8 or bits.shape != (-(-entries // 8),):
        raise MessageError(f"bits of sparse weights do not fit {entries} entries. {ADVICE}")
    unpacked = np.unpackbits(bits.cpu().numpy(), bitorder="little")
    if unpacked[entries:].any():
        raise MessageError(f"bits of sparse weights lie beyond {entries} entries. {ADVICE}")
    return torch.from_numpy(np.flatnonzero(unpacked.view(bool)[:entries]))
