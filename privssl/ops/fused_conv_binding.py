"""Convolution, pooling, norm and ReLU: binding of ``csrc/pooled.cpp`` for ``ops/fused_conv.py``."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from privssl.ops import dispatch


class Layers(ctypes.Structure):
    """The C struct of ``csrc/layers.hpp``, which explains the fields."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("rows", "height", "width", "channels", "kernels", "high", "wide", "down"),
                *("right", "groups", "rectified"),
            )
        ),
        ("eps", ctypes.c_double),
    )


_POINTER, _COUNTED = ctypes.c_void_p, (ctypes.c_int64, ctypes.POINTER(Layers))
_LEFT = dispatch.function("pooled_left", *_COUNTED, result=ctypes.c_int64)
_FORWARD = dispatch.function("pooled_forward", *_COUNTED, *[_POINTER] * 4)
_BACKWARD = dispatch.function(
    "pooled_backward", *_COUNTED, *[_POINTER] * 4, ctypes.c_int64, *[_POINTER] * 2
)


class Form(NamedTuple):
    """The layers after a convolution: padding, 2x2 pooling, a norm, a ReLU."""

    padding: tuple[int, int]  # (down, right)
    groups: int  # of the norm; 0: no norm
    eps: float  # of the norm
    rectified: bool

    def pooled(self, sides: Sequence[int], kernel: Sequence[int]) -> tuple[int, int]:
        """Return height and width of the output, from those of the input and of the kernel."""
        high, wide = (
            (side + 2 * zeros - taps + 1) // 2
            for side, zeros, taps in zip(sides, self.padding, kernel, strict=True)
        )
        return high, wide


class Parameters(NamedTuple):
    """Parameters of a convolution and its norm, or their gradients; None if a layer has none."""

    weight: Tensor  # (kernels, channels, high, wide)
    bias: Tensor | None  # (kernels,), like the next two
    gamma: Tensor | None
    beta: Tensor | None


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """State of a forward pass for :func:`backward`."""

    plan: "Plan"
    x: Tensor  # (rows, channels, height, width), channels last in memory
    own: Sequence[Tensor | None]  # parameters, weights channels last: addresses point here
    addresses: "ctypes.Array[ctypes.c_void_p]"
    left: Tensor  # bytes for the backward pass, see ``csrc/layers.hpp``


def forward(
    x: Tensor, own: Sequence[Parameters], forms: tuple[Form, ...]
) -> tuple[Tensor, ForwardContext]:
    """Compute consecutive layers; return the output and the state for :func:`backward`.

    The output is (rows, kernels, height, width after pooling) float32, channels last in memory.

    Args:
        x: (rows, channels, height, width) float32 on the CPU, at least one row.
        own: float32 on the CPU.
        forms: one for each; each leaves at least one pooled position.
    """
    dense = [
        p if p is None else dispatch.channels_last(p) for parameters in own for p in parameters
    ]
    shapes = tuple(p if p is None else p.shape for p in dense)
    plan = _compute_plan(dispatch.instruction_set(), x.shape, shapes, forms)
    y = torch.empty(plan.output, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    left = torch.empty(plan.left, dtype=torch.uint8, device=x.device)
    addresses = plan.addresses(*map(_address_of, dense))
    ctx = ForwardContext(plan, dispatch.channels_last(x), dense, addresses, left)
    _FORWARD(plan.instruction_set)(
        len(forms), plan.layers, addresses, ctx.x.data_ptr(), y.data_ptr(), ctx.left.data_ptr()
    )
    return y, ctx


def backward(
    gradient: Tensor, done: ForwardContext, *, inputs: bool, together: int | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Compute gradients of inputs and of parameters, the latter (sums, elements) by
    ``Plan.parameters``.

    Args:
        gradient: of the output.
        done: from :func:`forward`; parameters are unchanged since.
        inputs: whether to compute those of inputs.
        together: consecutive rows whose gradients of parameters are one sum; None: skip them.
    """
    plan = done.plan
    dx = torch.empty_like(done.x) if inputs else None
    size = (-(-len(done.x) // together), plan.numbers) if together else (0, 0)
    sums = torch.empty(size, dtype=done.x.dtype, device=done.x.device) if together else None
    gradient = dispatch.channels_last(gradient)
    _BACKWARD(plan.instruction_set)(
        len(plan.layers), plan.layers, done.addresses, done.x.data_ptr(), gradient.data_ptr(),
        done.left.data_ptr(), together or 1, _address_of(dx), _address_of(sums),
    )  # fmt: skip
    return dx, sums


def _address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class KernelLayout(NamedTuple):
    """Position of a parameter's gradient in the sums."""

    size: tuple[int, ...]  # shape of the parameter
    strides: tuple[int, ...]
    first: int

    def from_layers(self, sums: Tensor) -> Tensor:
        """Return (*size), from the first of sums (sums, elements)."""
        return sums.as_strided(self.size, self.strides, self.first)

    def for_each_agent(self, sums: Tensor) -> Tensor:
        """Return (sums, *size)."""
        count, size, strides = len(sums), self.size, self.strides
        return sums.as_strided((count, *size), (sums.stride(0), *strides), self.first)


@dataclass(frozen=True, eq=False)
class Plan:
    """The constants that follow from shapes."""

    instruction_set: str | None
    layers: "ctypes.Array[Layers]"
    addresses: type["ctypes.Array[ctypes.c_void_p]"]  # of parameters, four for each layer
    output: tuple[int, int, int, int]
    left: int  # bytes
    parameters: tuple[KernelLayout | None, ...]  # like addresses; None for a missing parameter
    numbers: int  # elements of all parameters


@lru_cache(maxsize=256)
def _compute_plan(
    instruction_set: str | None,
    input_shape: torch.Size,
    shapes: tuple[torch.Size | None, ...],
    forms: tuple[Form, ...],
) -> Plan:
    """Compute the plan. ``shapes``: of parameters, as in ``Plan.addresses``."""
    (count, _, *sides), structs = input_shape, []
    weights = [weight for weight in shapes[:: len(Parameters._fields)] if weight is not None]
    for (kernels, channels, *kernel), form in zip(weights, forms, strict=True):
        structs.append(
            Layers(
                count, *sides, channels, kernels, *kernel, *form.padding, form.groups,
                form.rectified, form.eps,
            )
        )  # fmt: skip
        sides = list(form.pooled(sides, kernel))
    layouts, elements = list[KernelLayout | None](), 0
    for shape in shapes:
        if shape is None:
            layouts.append(None)
            continue
        strides: tuple[int, ...] = (1,)
        if len(shape) == 4:
            _, channels, height, width = shape
            strides = (channels * height * width, 1, width * channels, channels)
        layouts.append(KernelLayout(shape, strides, elements))
        elements += shape.numel()
    layers = (Layers * len(structs))(*structs)
    return Plan(
        instruction_set,
        layers,
        ctypes.c_void_p * len(shapes),
        (count, weights[-1][0], sides[0], sides[1]),
        _LEFT(instruction_set)(len(structs), layers),
        tuple(layouts),
        elements,
    )
