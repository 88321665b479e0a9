"""Per-example gradients of a layer's parameters, from recorded inputs and output gradients.

``per_example_gradients`` records them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from privssl.errors import PrivacyError
from privssl.ops import dispatch, per_example_conv
from privssl.ops.fused_conv import FusedPass
from privssl.privacy.clipping import DenseGradients, OuterProductGradients, PerExampleGradients

Key = tuple[str, str]  # network, parameter name

#: A weight stays factored if it has this many times more elements than its factors have pairs of
#: positions. With 2, small_cnn's steps took a quarter longer.
MANY = 8


@dataclass(frozen=True, kw_only=True)
class Call(ABC):
    """A layer, or fused layers, called with recorded parameters for all rows."""

    ends: tuple[Key, Key]  # first and last weight: at the input, and at the output
    input: Tensor  # (B, ...), or (A, B, ...)
    output: Tensor  # of the graph; rows, or agents and rows, are at ``rows_at``
    rows_at: tuple[int, ...]
    versions: tuple[int, int]  # of input and output, after the call

    @abstractmethod
    def of_parameters(self, gradient: Tensor) -> list[tuple[Key, PerExampleGradients]]:
        """Return gradients of its parameters from the gradient of the output."""

    def check_untouched(self) -> None:
        versions = {"input": self.input._version, "output": self.output._version}
        for (role, version), before, key in zip(
            versions.items(), self.versions, self.ends, strict=True
        ):
            if version != before:
                raise PrivacyError(
                    f"the {role} of {'.'.join(key)} is changed in place, so per-row gradients "
                    "are unknown. Use a network without inplace=True"
                )

    def rows_first(self, gradient: Tensor) -> Tensor:
        return gradient.movedim(self.rows_at, tuple(range(len(self.rows_at))))


@dataclass(frozen=True, kw_only=True)
class LayerCall(Call):
    """A call of one of torch's layers."""

    layer: Callable[..., Any]
    given: Mapping[str, Any]  # its arguments by name
    shape: torch.Size  # of its weight
    bias: Key | None

    def of_parameters(self, gradient: Tensor) -> list[tuple[Key, PerExampleGradients]]:
        key, x, g = self.ends[0], self.input, self.rows_first(gradient)
        if len(self.rows_at) > 1:  # rows of any agent: weights are not needed
            x, g = x.flatten(0, 1), g.flatten(0, 1)
        # (B, T, channels, ...), linear: (B, ..., features)
        if self.layer is functional.linear:
            left, right = (t.reshape(len(t), -1, t.shape[-1]) for t in (g, x))
            return [(key, _product(left, right)), *self._gradients_of_bias(left.sum(dim=1))]
        dims = (1, *range(3, g.dim()))
        if self.layer is functional.group_norm:
            groups, eps = self.given["num_groups"], self.given["eps"]
            normed = functional.group_norm(x.flatten(0, 1), groups, eps=eps)
            weight: PerExampleGradients = DenseGradients((g * normed.view_as(g)).sum(dim=dims))
        else:
            weight = _compute_kernel_gradients(self.layer, self.given, x, g, self.shape)
        return [(key, weight), *self._gradients_of_bias(g.sum(dim=dims))]

    def _gradients_of_bias(self, gradients: Tensor) -> list[tuple[Key, PerExampleGradients]]:
        return [] if self.bias is None else [(self.bias, DenseGradients(gradients))]


@dataclass(frozen=True, kw_only=True)
class PooledCall(Call):
    """Layers fused by ``ops/fused_conv.py``, whose kernels sum each row separately."""

    keys: Sequence[Key | None]  # of its parameters, as in the visit
    visit: FusedPass

    def of_parameters(self, gradient: Tensor) -> list[tuple[Key, PerExampleGradients]]:
        _, sums = self.visit.back(self.rows_first(gradient), inputs=False, parameters=True)
        return [
            # Weights are channels last in memory.
            (
                key,
                DenseGradients(g.permute(0, 1, 3, 4, 2), (0, 3, 1, 2))
                if g.dim() > 2
                else DenseGradients(g),
            )
            for key, g in zip(self.keys, sums, strict=True)
            if key is not None and g is not None
        ]


def add_parts(parts: list[PerExampleGradients]) -> PerExampleGradients:
    """Sum the gradients of one parameter that was used several times."""
    if len(parts) == 1:
        return parts[0]
    outer = [part for part in parts if isinstance(part, OuterProductGradients)]
    if len(outer) == len(parts):
        left, right = (torch.cat([getattr(o, s) for o in outer], 1) for s in ("left", "right"))
        return _product(left, right, outer[0].kernel)
    total = _materialize(parts[0])
    for part in parts[1:]:
        total = total + _materialize(part)
    return DenseGradients(total)


def _materialize(part: PerExampleGradients) -> Tensor:
    """Return (B, *shape of the parameter)."""
    if isinstance(part, OuterProductGradients):
        return part.reshape_like(part.left.mT @ part.right)
    assert isinstance(part, DenseGradients)
    return part.each if part.axes is None else part.each.permute(0, *(a + 1 for a in part.axes))


def _product(
    left: Tensor, right: Tensor, kernel: tuple[int, int, int] | None = None
) -> PerExampleGradients:
    """Multiply (B, T, p) and (B, T, d) if that is less work (Bu et al. 2022), else keep the
    factors.

    ``kernel``: as in :class:`clipping.OuterProductGradients`.
    """
    if _is_less_work(left.shape[1], left.shape[2] * right.shape[2]):
        gradients = left.mT @ right
        if kernel is None:
            return DenseGradients(gradients)
        return DenseGradients(gradients.view(*gradients.shape[:2], *kernel), (0, 3, 1, 2))
    return OuterProductGradients(left, right, kernel)


def _is_less_work(positions: int, elements: int) -> bool:
    """Return whether multiplying out a weight of this many elements is less work."""
    return MANY * positions**2 > elements


def _compute_kernel_gradients(
    layer: Callable[..., Any], arguments: Mapping[str, Any], x: Tensor, g: Tensor, shape: torch.Size
) -> PerExampleGradients:
    """Return gradients of a convolution's weight, of ``shape`` (first, second, height, width).

    Computed from inputs and output gradients (B, T, channels, h, w). The kernel slides over the
    larger of the two images, once per position of the smaller one.
    """
    larger, smaller = (x, g) if layer is functional.conv2d else (g, x)
    kernel, stride = in_pair(tuple(shape[2:])), in_pair(arguments.get("stride", 1))
    padding = in_pair(arguments.get("padding", 0))
    positions = math.prod((smaller.shape[1], *smaller.shape[3:]))
    if dispatch.available_for(larger) and _is_less_work(positions, shape.numel()):
        return DenseGradients(
            per_example_conv.sums(larger, smaller, kernel, stride, padding), (3, 2, 0, 1)
        )
    windows = _extract_windows(larger.flatten(0, 1), kernel, stride, padding)
    outputs = smaller.flatten(0, 1).flatten(2).mT  # (B T, positions, first)
    left, right = (t.reshape(len(x), -1, t.shape[-1]) for t in (outputs, windows))
    return _product(left, right, (*kernel, shape[1]))


def _extract_windows(
    x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """Return a kernel's windows: (N, channels, h, w) -> (N, positions, kernel channels). Same as
    ``functional.unfold``, 5 times as fast."""
    x = functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    nhwc = x.shape[1] >= 4
    x = x.contiguous(memory_format=torch.channels_last if nhwc else torch.contiguous_format)
    (height, width), (stride_y, stride_x) = kernel, stride
    output_size = ((x.shape[2] - height) // stride_y + 1, (x.shape[3] - width) // stride_x + 1)
    n, c, h, w = x.stride()
    if nhwc:  # channels are adjacent in memory
        size = (len(x), *output_size, height, width, x.shape[1])
        return x.as_strided(size, (n, h * stride_y, w * stride_x, h, w, c)).reshape(
            len(x), output_size[0] * output_size[1], -1
        )
    size = (len(x), height, width, x.shape[1], *output_size)
    return x.as_strided(size, (n, h, w, c, h * stride_y, w * stride_x)).reshape(
        len(x), -1, output_size[0] * output_size[1]
    ).mT  # fmt: skip


def in_pair(value: Any) -> tuple[int, int]:
    """Return (down, right) of a value that torch also accepts as one number."""
    first, *rest = (value,) if isinstance(value, int) else value
    return (first, *rest) if rest else (first, first)
