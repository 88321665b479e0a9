"""Gradients of a convolution's weights, of each row: ``csrc/correlation.cpp``. When:
``privacy/layer_gradients.py``."""

import ctypes

import torch
from torch import Tensor

from privssl.ops import dispatch


class _Correlation(ctypes.Structure):
    """As ``csrc/correlation.cpp`` has it."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("images", "together", "height", "width", "channels", "above", "left"),
            *("tall", "broad", "makes", "high", "wide", "down", "right"),
        )
    )


_SUMS = dispatch.function("correlation_sums", ctypes.POINTER(_Correlation), *[ctypes.c_void_p] * 3)


def sums(
    seen: Tensor,
    met: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> Tensor:
    """Over images and places where the kernel meets what is seen: this times what is met there.

    Args:
        seen: (B, T, channels, height, width), T images of each row, where ``kernels.do``.
        met: (B, T, made, tall, broad), of as many places as the kernel meets or fewer.
        kernel: (height, width).
        stride: (down, right), of the kernel over what is seen.
        padding: (above and below, left and right) zeros around what is seen.

    Returns:
        (B, height, width of the kernel, channels, made).
    """
    (rows, together, channels, *sides), (made, *places) = seen.shape, met.shape[2:]
    for side, taps, step, zeros, many in zip(sides, kernel, stride, padding, places, strict=True):
        if (many - 1) * step + taps > side + 2 * zeros:
            raise ValueError(f"a kernel of {kernel} meets fewer places of {sides} than {places}")
    x, g = (t.flatten(0, 1).contiguous(memory_format=torch.channels_last) for t in (seen, met))
    of = _Correlation(
        rows * together, together, *sides, channels, *padding, *places, made, *kernel, *stride
    )
    found = torch.empty((rows, *kernel, channels, made), dtype=x.dtype, device=x.device)
    _SUMS(dispatch.instruction_set())(of, x.data_ptr(), g.data_ptr(), found.data_ptr())
    return found
