"""Clipping factors, clipped sums: binding of ``csrc/clipping.cpp`` for ``privacy/clipping.py``."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from privssl.ops import dispatch

_GRADIENTS = (ctypes.c_int64, ctypes.c_int64, dispatch.INT64_PTR)  # rows, parameters, where
_POINTER = ctypes.c_void_p
_FACTORS = dispatch.function(
    "clipping_factors", *_GRADIENTS, _POINTER, _POINTER, ctypes.c_double, _POINTER
)
_TOTALS = dispatch.function("clipping_totals", *_GRADIENTS, _POINTER, _POINTER)

#: Gradients of a parameter (B, ...), float32 on the CPU; or two non-empty factors of their outer
#: product. Valid only if ``dispatch.available_for``.
KernelInput = tuple[Tensor, Tensor | None]


def factors(
    gradients: Sequence[KernelInput], norms: Tensor | None, drawn: Tensor, clip_norm: float
) -> Tensor:
    """Return the clipping factors of ``clipping.clipped_sums``: (B,) float64.

    Args:
        gradients: of each parameter.
        norms: (B,), of the gradients of other parameters.
        drawn: (B,) whether a row counts.
    """
    rows = _check_rows(gradients)
    if drawn.shape != (rows,) or not (norms is None or norms.shape == (rows,)):
        raise ValueError(f"gradients of {rows} rows, where {drawn.numel()} were looked at")
    drawn = drawn.to("cpu", torch.bool).contiguous()
    norms = None if norms is None else norms.to("cpu", torch.float64).contiguous()
    dense, result = [_pack_input(gradient) for gradient in gradients], _make_empty(rows)
    _FACTORS(dispatch.instruction_set())(
        *_as_array(dense), None if norms is None else norms.data_ptr(), drawn.data_ptr(), clip_norm,
        result.data_ptr(),
    )  # fmt: skip
    return result


def totals(gradients: Sequence[KernelInput], factors: Tensor) -> Tensor:
    """Sum factor times gradient over rows: (parameters' elements,) float64.

    Non-finite numbers count as 0.

    Args:
        gradients: of each parameter.
        factors: (B,), as :func:`factors` returns them.
    """
    if factors.shape != (_check_rows(gradients),) or factors.dtype != torch.float64:
        raise ValueError(f"{len(factors)} factors for another number of rows")
    factors, dense = factors.contiguous(), [_pack_input(gradient) for gradient in gradients]
    result = _make_empty(sum(numbers(gradient) for gradient in gradients))
    _TOTALS(dispatch.instruction_set())(*_as_array(dense), factors.data_ptr(), result.data_ptr())
    return result


def _check_rows(gradients: Sequence[KernelInput]) -> int:
    """Return B. Refuse inputs that a kernel would misread: other dtypes, devices or row counts."""
    tensors = [tensor for gradient in gradients for tensor in gradient if tensor is not None]
    rows = len(tensors[0])
    kinds = ((tensor.is_cpu, tensor.dtype, tensor.shape[0]) for tensor in tensors)
    if any(kind != (True, torch.float32, rows) for kind in kinds):
        raise ValueError("gradients are of different numbers of rows, or not float32 on the CPU")
    return rows


def _make_empty(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.float64, device="cpu")


def numbers(of: KernelInput) -> int:
    """Return the number of elements of the parameter."""
    first, second = of
    return first.numel() // len(first) * (1 if second is None else second.numel() // len(second))


def _pack_input(gradient: KernelInput) -> KernelInput:
    """Return contiguous rows; one row may represent all (stride 0)."""
    first, second = gradient
    return _pack_tensor(first), None if second is None else _pack_tensor(second)


def _pack_tensor(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_neg()
    if tensor.is_contiguous() or tensor.stride()[1:] == strides(tensor.shape[1:]):
        return tensor
    return tensor.contiguous()


@lru_cache(maxsize=1024)
def strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(shape[axis + 1 :].numel() for axis in range(len(shape)))


def _as_array(gradients: Sequence[KernelInput]) -> "tuple[int, int, ctypes.Array[ctypes.c_int64]]":
    """Return all gradients in the form of ``_GRADIENTS``."""
    fields = [
        field for first, second in gradients for field in (*_fields_of(first), *_fields_of(second))
    ]
    return len(gradients[0][0]), len(gradients), dispatch.int64_array(fields)


def _fields_of(tensor: Tensor | None) -> tuple[int, int, int]:
    """Return elements of a row, stride between rows, address."""
    if tensor is None:
        return 0, 0, 0
    return tensor.numel() // len(tensor), tensor.stride(0), tensor.data_ptr()
