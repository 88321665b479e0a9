"""Views of images: binding of ``csrc/views.cpp``; used by ``data/affine_augment.py`` and
``data/rand_augment.py``."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from privssl.ops import dispatch

#: As ``csrc/views.cpp`` numbers them.
CHANGES = (
    *("identity", "autocontrast", "equalize", "invert", "posterize", "solarize", "brightness"),
    *("contrast", "color", "sharpness", "shear", "translate", "rotate", "cutout"),
)


class Kind(NamedTuple):
    """An operation."""

    change: str  # of ``CHANGES``
    axis: str = "x"  # along which pixels slide: "x" rows, "y" columns
    pixels_used: int = 1  # that an output pixel of shear is made from: 1, 2 or 4
    of_side: bool = False  # whether amounts of translate are fractions of the side, not pixels
    outside: float = 0.0  # level of pixels from outside; of rotate


class _Images(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("rows", "channels", "height", "width", "last")
    )


class _Kind(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("change", "down", "used", "of_side")),
        ("outside", ctypes.c_float),
    )


_POINTER, _LIKE = ctypes.c_void_p, ctypes.POINTER(_Images)
_MOVE = dispatch.function("views_move", _LIKE, *[_POINTER] * 4)
_CHANGE = dispatch.function(
    "views_change", _LIKE, ctypes.c_int64, ctypes.POINTER(_Kind), *[_POINTER] * 5
)


def available(x: Tensor) -> bool:
    """Whether the kernels apply: float32 on the CPU, not under vmap."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch._C._are_functorch_transforms_active()
        and dispatch.instruction_set() is not None
    )


def shift_and_flip(x: Tensor, shift: Tensor, flipped: Tensor) -> Tensor:
    """``affine_augment.move_mirrored``, where :func:`available`, of x (B, Ch, H, W), shift (B, 2)
    int64 and flipped (B,) bool; in the memory format of x if that is dense."""
    x, images = _dense(x)
    y, drawn = torch.empty_like(x), (shift.contiguous(), flipped.contiguous())
    _MOVE(dispatch.instruction_set())(images, *map(_at, (*drawn, x, y)))
    return y


def apply_change(
    x: Tensor, kinds: Sequence[Kind], which: Tensor, amount: Tensor, place: Tensor
) -> Tensor:
    """Images, where :func:`available`, each changed by several operations in turn, in the memory
    format of x if that is dense.

    Args:
        x: (B, Ch, H, W) in [-1, 1].
        kinds: operations that ``which`` indexes.
        which: (B, count) int64 below len(kinds); below 0: none.
        amount: (B, count) float32.
        place: (B, count, 2) float32 in [0, 1).
    """
    x, images = _dense(x)
    y = torch.empty_like(x)
    table = (_Kind * len(kinds))(
        *(
            _Kind(CHANGES.index(k.change), k.axis == "y", k.pixels_used, k.of_side, k.outside)
            for k in kinds
        )
    )
    drawn = which.contiguous(), amount.contiguous(), place.contiguous()
    change = _CHANGE(dispatch.instruction_set())
    change(images, which.shape[1], table, *map(_at, (*drawn, x, y)))
    return y


def _dense(x: Tensor) -> tuple[Tensor, _Images]:
    """The images without gaps, channels last or first in memory; copied if need be."""
    last = x.is_contiguous(memory_format=torch.channels_last)
    x = x if last else x.contiguous()
    return x, _Images(*x.shape, last)


def _at(tensor: Tensor) -> int:
    return tensor.data_ptr()
