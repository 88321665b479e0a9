"""Kernels of our own, compiled when privssl is installed, where there is a C++ compiler.

``pooled.cpp`` is made for several generations of x86-64 processors (``setup.py``), and the latest
that this one understands is loaded. Without a compiler, or on other processors, there is none, and
torch's kernels do all work: results are the same but for rounding. ``PRIVSSL_KERNELS=torch`` in the
environment asks for that.

Here tensors become addresses; which layers go through this, and when, says ``models/pooled.py``.
"""

import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("privssl")

VERSION = 1  # of what is called, as pooled.cpp has it
#: Names of what setup.py compiles, the latest first, and whether this processor understands it.
GENERATIONS: dict[str, Callable[[], bool]] = {
    "avx512": lambda: torch.cpu._is_avx512_supported(),
    "avx2": lambda: torch.cpu._is_avx2_supported(),
}


class Layers(ctypes.Structure):
    """What is asked for; the fields are explained in ``pooled.cpp``, which has the same."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("rows", "height", "width", "channels", "kernels", "high", "wide", "down"),
                *("right", "groups", "rectified", "together"),
            )
        ),
        ("eps", ctypes.c_double),
    )


class Form(NamedTuple):
    """What surrounds a convolution: zeros, pooling of two by two, a norm, a rectifier."""

    padding: tuple[int, int]  # (down, right)
    groups: int  # of the norm; 0: there is none
    eps: float  # of the norm
    rectified: bool


class Parameters(NamedTuple):
    """Of a convolution and its norm, or their gradients. None where a layer has none."""

    weight: Tensor  # (kernels, channels, high, wide)
    bias: Tensor | None  # (kernels,), as the next two
    gamma: Tensor | None
    beta: Tensor | None


@dataclass(frozen=True, eq=False)
class Done:
    """What a forward pass leaves for the way back; the last three as ``pooled.cpp`` has them."""

    library: ctypes.CDLL

    x: Tensor  # (rows, height, width, channels)
    weight: Tensor  # (kernels, high, wide, channels)
    largest: Tensor
    where: Tensor
    moments: Tensor


def generation() -> str | None:
    """Which of ``GENERATIONS`` does the work; None: torch's kernels do all of it."""
    return None if _torch_alone.get() else _latest()


@contextmanager
def torch_alone() -> Iterator[None]:
    """Inside, on this thread, torch's kernels do all work."""
    before = _torch_alone.set(True)
    try:
        yield
    finally:
        _torch_alone.reset(before)


def forward(x: Tensor, own: Parameters, form: Form) -> tuple[Tensor, Done]:
    """The layers' output, and what :func:`backward` needs.

    Args:
        x: (rows, channels, height, width) float32 on the CPU, one row at least.
        own: float32 on the CPU.
        form: of which at least one whole place of pooling is left.

    Returns:
        (rows, kernels, height, width after pooling) float32, channels last in memory.
    """
    library = _library()
    x, weight = _last(x), _last(own.weight)
    layers = _layers(x.shape, weight.shape, form, x.shape[0])
    down, right = form.padding
    high = (layers.height + 2 * down - layers.high + 1) // 2
    wide = (layers.width + 2 * right - layers.wide + 1) // 2
    size = (layers.rows, layers.kernels, high, wide)
    y = torch.empty(size, memory_format=torch.channels_last)
    filled_up = library.pooled_filled_up(layers.kernels)
    largest = torch.empty(layers.rows, high * wide, filled_up)
    where = torch.empty(largest.shape, dtype=torch.uint8)
    moments = torch.empty(layers.rows, layers.groups, 2)
    library.pooled_forward(
        layers, x.data_ptr(), weight.data_ptr(), _at(own.bias), _at(own.gamma), _at(own.beta),
        y.data_ptr(), largest.data_ptr(), where.data_ptr(), moments.data_ptr(),
    )  # fmt: skip
    return y, Done(library, x, weight, largest, where, moments)


def backward(
    gradient: Tensor, own: Parameters, form: Form, done: Done, *,
    inputs: bool, together: int | None = None,
) -> tuple[Tensor | None, Parameters | None]:  # fmt: skip
    """Gradients of inputs and of parameters.

    Args:
        gradient: of the output.
        own: as in the forward pass.
        done: what the forward pass left.
        inputs: whether those of inputs are wanted.
        together: rows, in order, whose gradients of parameters are one sum; None: no gradients of
            parameters.

    Returns:
        Gradients of inputs, as inputs; and of parameters, with a dimension more in front, of sums,
        and that of the weight channels last, (sums, kernels, high, wide, channels).
    """
    rows = len(done.x)
    layers = _layers(done.x.shape, done.weight.shape, form, together or rows)
    dx = torch.empty_like(done.x) if inputs else None
    sums = None
    if together:
        weight, *others = (_sums_of(p, rows // together) for p in (done.weight, *own[1:]))
        sums = Parameters(weight, *others)
    gradient = _last(gradient)
    done.library.pooled_backward(
        layers, gradient.data_ptr(), done.x.data_ptr(), done.weight.data_ptr(), _at(own.gamma),
        _at(own.beta), done.largest.data_ptr(), done.where.data_ptr(), done.moments.data_ptr(),
        _at(dx), *map(_at, sums or (None,) * 4),
    )  # fmt: skip
    return None if dx is None else dx.permute(0, 3, 1, 2), sums


def _last(tensor: Tensor) -> Tensor:
    """(N, height, width, channels) of (N, channels, height, width), copied if need be."""
    return tensor.permute(0, 2, 3, 1).contiguous()


def _sums_of(parameter: Any, count: int) -> Any:
    """Room for so many gradients of it, if there is one."""
    return None if parameter is None else parameter.new_empty(count, *parameter.shape)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@lru_cache(maxsize=256)
def _layers(x: torch.Size, weight: torch.Size, form: Form, together: int) -> Layers:
    rows, height, width, channels = x
    kernels, high, wide, _ = weight
    return Layers(
        rows, height, width, channels, kernels, high, wide, *form.padding, form.groups,
        form.rectified, together, form.eps,
    )  # fmt: skip


_torch_alone = ContextVar("torch_alone", default=os.environ.get("PRIVSSL_KERNELS") == "torch")


@cache
def _latest() -> str | None:
    """The latest generation that was compiled from this source and that this processor knows."""
    for name, known in GENERATIONS.items():
        library = _loaded(name) if known() else None
        if library is not None and library.pooled_version() == VERSION:
            return name
        if library is not None:
            log.warning(
                "privssl/kernels was compiled from another version, and torch's kernels do its "
                "work. To compile it anew: pip install --editable ."
            )
            return None
    return None


@cache
def _loaded(name: str) -> ctypes.CDLL | None:
    """None: it was not compiled."""
    file = next(Path(__file__).parent.glob(f"_pooled_{name}.*"), None)
    if file is None:
        return None
    library, pointer = ctypes.CDLL(str(file)), ctypes.c_void_p
    library.pooled_filled_up.argtypes = [ctypes.c_int64]
    library.pooled_filled_up.restype = ctypes.c_int64
    for function, tensors in ((library.pooled_forward, 9), (library.pooled_backward, 13)):
        function.argtypes = [ctypes.POINTER(Layers), *[pointer] * tensors]
        function.restype = None
    return library


def _library() -> ctypes.CDLL:
    library = _loaded(generation() or "")
    assert library is not None, "who calls has asked for generation()"
    return library
