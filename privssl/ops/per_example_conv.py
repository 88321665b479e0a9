"""Per-example gradients of a convolution's weights: binding of ``csrc/correlation.cpp``.

Used by ``privacy/layer_gradients.py``.
"""

import ctypes

import torch
from torch import Tensor

from privssl.ops import dispatch


class _CorrelationStruct(ctypes.Structure):
    """The C struct of ``csrc/correlation.cpp``."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("images", "together", "height", "width", "channels", "above", "left"),
            *("tall", "broad", "makes", "high", "wide", "down", "right"),
        )
    )


_SUMS = dispatch.function(
    "correlation_sums", ctypes.POINTER(_CorrelationStruct), *[ctypes.c_void_p] * 3
)


def sums(
    larger: Tensor,
    smaller: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> Tensor:
    """Correlate two images and sum over the images of a row.

    Returns (B, height, width of the kernel, channels, kernels).

    Args:
        larger: (B, T, channels, height, width), T images of each row; ``dispatch.available_for``
            must hold.
        smaller: (B, T, kernels, tall, broad), at most as many positions as the kernel has on
            ``larger``.
        kernel: (height, width).
        stride: (down, right), of the kernel over ``larger``.
        padding: (vertical, horizontal) zeros around ``larger``.
    """
    (rows, together, channels, *sides), (kernels, *positions) = larger.shape, smaller.shape[2:]
    for side, taps, step, zeros, n in zip(sides, kernel, stride, padding, positions, strict=True):
        if (n - 1) * step + taps > side + 2 * zeros:
            raise ValueError(f"a kernel of {kernel} meets fewer places of {sides} than {positions}")
    x, g = (
        t.flatten(0, 1).contiguous(memory_format=torch.channels_last) for t in (larger, smaller)
    )
    struct = _CorrelationStruct(
        rows * together, together, *sides, channels, *padding, *positions, kernels, *kernel, *stride
    )
    result = torch.empty((rows, *kernel, channels, kernels), dtype=x.dtype, device=x.device)
    _SUMS(dispatch.instruction_set())(struct, x.data_ptr(), g.data_ptr(), result.data_ptr())
    return result
