"""Box-Muller and noisy sums: binding of ``csrc/noise.cpp``.

Used by ``privacy/secure_noise.py`` and ``privacy/noisy_optimizer.py``.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privssl.ops import dispatch

_NORMAL = dispatch.function("noise_normal", ctypes.c_int64, *[ctypes.c_void_p] * 3)
_ADD = dispatch.function(
    "noise_add", ctypes.c_int64, dispatch.INT64_PTR, ctypes.c_void_p, *[ctypes.c_double] * 2
)


def normal(radii: NDArray[np.uint64], angles: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Compute ``secure_noise.box_muller`` to within 8e-15: (2 pairs,).

    Args:
        radii, angles: random uint64 (pairs,).
    """
    radii, angles = (np.ascontiguousarray(words, dtype=np.uint64) for words in (radii, angles))
    if radii.shape != angles.shape or radii.ndim != 1:
        raise ValueError(f"radii {radii.shape} and angles {angles.shape} are not (pairs,) both")
    out = np.empty(2 * len(radii))
    _NORMAL(dispatch.instruction_set())(len(radii), *(a.ctypes.data for a in (radii, angles, out)))
    return out


def add(
    sums: Sequence[Tensor],
    noise: NDArray[np.float64],
    deviation: float,
    step: float,
    noisy: Sequence[Tensor],
) -> None:
    """Add deviation times noise to sums, in float64, rounded to multiples of ``step``.

    Args:
        sums: of each parameter, float64 on the CPU, without gaps in memory.
        noise: standard normal, one for each element of all sums.
        step: a power of two; 0: no rounding.
        noisy: output, float32, with the strides of its sums.
    """
    arguments = [
        argument for s, out in zip(sums, noisy, strict=True) for argument in _addresses_of(s, out)
    ]
    noise = np.ascontiguousarray(noise, dtype=np.float64)
    if noise.shape != (sum(arguments[::3]),):
        raise ValueError(f"noise {noise.shape} for {sum(arguments[::3])} sums")
    _ADD(dispatch.instruction_set())(
        len(sums), dispatch.int64_array(arguments), noise.ctypes.data, deviation, step
    )


def _addresses_of(sums: Tensor, noisy: Tensor) -> tuple[int, int, int]:
    if sums.shape != noisy.shape or sums.stride() != noisy.stride():
        raise ValueError("sums are to be written to where numbers lie in another order")
    dtypes = sums.dtype, noisy.dtype
    is_supported = sums.is_cpu and noisy.is_cpu and dtypes == (torch.float64, torch.float32)
    dense = noisy.is_contiguous() or torch.empty_like(noisy).stride() == noisy.stride()
    if not (is_supported and dense):
        raise ValueError("sums are float64, with noise float32, on the CPU, without gaps in memory")
    return sums.numel(), sums.data_ptr(), noisy.data_ptr()
