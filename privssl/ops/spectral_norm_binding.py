"""A weight over its largest singular value: ``csrc/spectral.cpp``. When:
``ops/spectral_norm.py``."""

import ctypes

import torch
from torch import Tensor

from privssl.ops import dispatch

_POINTER = ctypes.c_void_p
_SCALE = dispatch.function(
    "spectral_scale", *[ctypes.c_int64] * 3, *[_POINTER] * 3, ctypes.c_int64, ctypes.c_double,
    *[_POINTER] * 2, result=ctypes.c_float,
)  # fmt: skip
_BACK = dispatch.function(
    "spectral_back", *[ctypes.c_int64] * 2, *[_POINTER] * 4, ctypes.c_float, _POINTER
)


def scale(
    weight: Tensor, u: Tensor, v: Tensor, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, float]:
    """``generators.spectral.SpectralNorm`` of a weight.

    Args:
        weight: (high, wide) or (high, channels, height, width), float32 on the CPU where
            ``kernels.do``.
        u, v: (high,) and (wide,), torch's vectors; moved so many times.
        eps: least norm that a vector is divided by.

    Returns:
        The weight over its singular value, channels last in memory; the left vector; the right one,
        as the weight lies in memory; the value.
    """
    high, channels = weight.shape[:2]
    for vector, numbers in ((u, high), (v, weight.numel() // high)):
        if vector.shape != (numbers,) or not (
            dispatch.available_for(vector) and vector.is_contiguous()
        ):
            raise ValueError(
                f"a spectral norm's vector of {numbers} numbers is not that long, not float32 on "
                "the CPU, or spread in memory"
            )
    dense = dispatch.channels_last(weight)
    right, scaled = torch.empty_like(v), torch.empty_like(dense)
    value = _SCALE(dispatch.instruction_set())(
        high, weight.numel() // (high * channels), channels, dense.data_ptr(), u.data_ptr(),
        v.data_ptr(), iterations, eps, right.data_ptr(), scaled.data_ptr(),
    )  # fmt: skip
    return scaled, u.clone(), right, value


def back(gradient: Tensor, scaled: Tensor, left: Tensor, right: Tensor, value: float) -> Tensor:
    """Gradient of the weight, from that of what it was scaled to, and what that gave."""
    dense, found = dispatch.channels_last(gradient), torch.empty_like(scaled)
    _BACK(dispatch.instruction_set())(
        len(dense), dense.numel() // len(dense), dense.data_ptr(), scaled.data_ptr(),
        left.data_ptr(), right.data_ptr(), value, found.data_ptr(),
    )  # fmt: skip
    return found
