"""Views of images: binding of ``csrc/views.cpp``.

Used by ``data/affine_augment.py`` and ``data/rand_augment.py``.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from privssl.ops import dispatch

#: In the order of ``csrc/views.cpp``.
CHANGES = (
    *("identity", "autocontrast", "equalize", "invert", "posterize", "solarize", "brightness"),
    *("contrast", "color", "sharpness", "shear", "translate", "rotate", "cutout"),
)


class Kind(NamedTuple):
    """An operation."""

    change: str  # of ``CHANGES``
    axis: str = "x"  # axis of the shift: "x" rows, "y" columns
    pixels_used: int = 1  # input pixels of an output pixel of shear: 1, 2 or 4
    of_side: bool = False  # whether amounts of translate are fractions of the side, not pixels
    outside: float = 0.0  # level outside the image, for rotate


class _ImagesStruct(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("rows", "channels", "height", "width", "last")
    )


class _KindStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("change", "down", "used", "of_side")),
        ("outside", ctypes.c_float),
    )


_POINTER, _LIKE = ctypes.c_void_p, ctypes.POINTER(_ImagesStruct)
_MOVE = dispatch.function("views_move", _LIKE, *[_POINTER] * 4)
_CHANGE = dispatch.function(
    "views_change", _LIKE, ctypes.c_int64, ctypes.POINTER(_KindStruct), *[_POINTER] * 5
)


def available(x: Tensor) -> bool:
    """Return whether the kernels apply: float32 on the CPU, not under vmap."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch._C._are_functorch_transforms_active()
        and dispatch.instruction_set() is not None
    )


def shift_and_flip(x: Tensor, shift: Tensor, flipped: Tensor) -> Tensor:
    """Compute ``affine_augment.move_mirrored``, if :func:`available`.

    x (B, Ch, H, W), shift (B, 2) int64 and flipped (B,) bool; the result has the memory format of x
    if that is dense.
    """
    x, images = _make_dense(x)
    y, arguments = torch.empty_like(x), (shift.contiguous(), flipped.contiguous())
    _MOVE(dispatch.instruction_set())(images, *map(_address_of, (*arguments, x, y)))
    return y


def apply_change(
    x: Tensor, kinds: Sequence[Kind], which: Tensor, amount: Tensor, place: Tensor
) -> Tensor:
    """Apply several operations to each image in turn, if :func:`available`.

    The result has the memory format of x if that is dense.

    Args:
        x: (B, Ch, H, W) in [-1, 1].
        kinds: operations that ``which`` indexes.
        which: (B, count) int64 below len(kinds); below 0: none.
        amount: (B, count) float32.
        place: (B, count, 2) float32 in [0, 1).
    """
    x, images = _make_dense(x)
    y = torch.empty_like(x)
    table = (_KindStruct * len(kinds))(
        *(
            _KindStruct(CHANGES.index(k.change), k.axis == "y", k.pixels_used, k.of_side, k.outside)
            for k in kinds
        )
    )
    arguments = which.contiguous(), amount.contiguous(), place.contiguous()
    change = _CHANGE(dispatch.instruction_set())
    change(images, which.shape[1], table, *map(_address_of, (*arguments, x, y)))
    return y


def _make_dense(x: Tensor) -> tuple[Tensor, _ImagesStruct]:
    """Return the images without gaps, channels last or first in memory; copy if needed."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last)
    x = x if channels_last else x.contiguous()
    return x, _ImagesStruct(*x.shape, channels_last)


def _address_of(tensor: Tensor) -> int:
    return tensor.data_ptr()
