"""Convolution, 2x2 max pooling, group norm and ReLU by one native kernel, for small networks.

For these layers overhead exceeds arithmetic, and three quarters of the factors of a convolution's
backward pass are zeros from pooling, which ``csrc`` skips. Results are torch's up to rounding.

:func:`fuse` replaces the forward pass of a ``Sequential`` without changing layers or parameter
names. If the kernels do not apply (GPU, float64, several threads, vmap), torch computes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import _add_batch_dim, get_unwrapped, maybe_current_level, maybe_get_bdim
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_variadic

from privssl.ops import dispatch
from privssl.ops import fused_conv_binding as kernel
from privssl.ops.fused_conv_binding import Form, ForwardContext, Parameters
from privssl.ops.group_norm import group_norm
from privssl.ops.precision import upcast

MAX_WEIGHTS = 2**17  # of one convolution; above this torch is as fast
MAX_ELEMENTS = 2**24  # of a row's input or output

# Which layers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers of a Sequential that one kernel computes."""

    convolution: int
    norm: int | None
    end: int  # index after its last layer
    form: Form


class FusedSequential(nn.Sequential):
    """A Sequential that computes some of its layers by the kernels, if they apply."""

    runs: dict[int, LayerRun]  # by index of the first layer

    def forward(self, x: Tensor) -> Tensor:
        layers, index = list(self), 0
        while index < len(layers):
            own, forms, end = _find_fusible(x, layers, self.runs, index)
            if own:
                x, index = fused_conv(x, own, forms), end
            else:
                x, index = layers[index](x), index + 1
        return x


def fuse(layers: nn.Sequential) -> None:
    """Convert to a ``FusedSequential``, if any layers can be fused."""
    candidates = [_find_run(list(layers), index) for index in range(len(layers))]
    runs = {run.convolution: run for run in candidates if run is not None}
    if runs:
        layers.__class__ = FusedSequential
        cast(FusedSequential, layers).runs = runs


def _find_run(layers: Sequence[nn.Module], first: int) -> LayerRun | None:
    """Return the longest run that begins here."""
    if not _is_plain_convolution(layers[first]):
        return None
    pooling = _find_next_layer(layers, first)
    if pooling is None or not _is_max_pooling(layers[pooling]):
        return None
    norm, last, groups, eps = None, pooling, 0, 0.0
    after = _find_next_layer(layers, pooling)
    if after is not None and isinstance(layer := layers[after], nn.GroupNorm) and layer.affine:
        norm, last, groups, eps = after, after, layer.num_groups, layer.eps
    rectifier = _find_next_layer(layers, last)
    rectified = rectifier is not None and type(layers[rectifier]) is nn.ReLU
    padding = cast(tuple[int, int], cast(nn.Conv2d, layers[first]).padding)
    form = Form(padding, groups, eps, rectified)
    return LayerRun(first, norm, (rectifier if rectified and rectifier else last) + 1, form)


def _find_next_layer(layers: Sequence[nn.Module], index: int) -> int | None:
    """Return the index of the next layer that is not an identity."""
    later = range(index + 1, len(layers))
    return next((i for i in later if type(layers[i]) is not nn.Identity), None)


def _is_plain_convolution(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Conv2d
        and (layer.stride, layer.dilation, layer.groups) == ((1, 1), (1, 1), 1)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _is_max_pooling(layer: nn.Module) -> bool:
    """Return whether it is max pooling over disjoint 2x2 windows."""
    return (
        type(layer) is nn.MaxPool2d
        and all(size in (2, (2, 2)) for size in (layer.kernel_size, layer.stride))
        and layer.padding in (0, (0, 0))
        and layer.dilation in (1, (1, 1))
        and not (layer.ceil_mode or layer.return_indices)
    )


def _find_fusible(
    x: Tensor, layers: Sequence[nn.Module], runs: Mapping[int, LayerRun], index: int
) -> tuple[tuple[Parameters, ...], tuple[Form, ...], int]:
    """Return parameters and forms of the consecutive runs that the kernels can compute, and the
    index after them.

    Empty if torch must compute.
    """
    is_applicable = (
        index in runs
        and dispatch.instruction_set() is not None
        and torch.get_num_threads() == 1
        and type(x) is Tensor  # no subclass
        and x.device.type == "cpu"
        and x.dim() == 4
        and _can_use_float32(x)
    )
    own, forms, ends = list[Parameters](), list[Form](), list[int]()
    while is_applicable and index in runs and _can_fuse(layers, runs[index]):
        run = runs[index]
        # Access by attribute would be slower.
        convolution = layers[run.convolution]._parameters
        norm = {} if run.norm is None else layers[run.norm]._parameters
        weight, bias = cast(Tensor, convolution["weight"]), convolution["bias"]
        own.append(Parameters(weight, bias, norm.get("weight"), norm.get("bias")))
        forms.append(run.form)
        ends.append(index := run.end)
    if not own:
        return (), (), index
    count = _count_fitting(
        x.shape, tuple(parameters.weight.shape for parameters in own), tuple(forms)
    )
    return tuple(own[:count]), tuple(forms[:count]), ends[count - 1]


def _can_fuse(layers: Sequence[nn.Module], run: LayerRun) -> bool:
    weight = cast(Tensor, layers[run.convolution]._parameters.get("weight"))  # or set by a hook
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and not any(map(_has_hooks, layers[run.convolution : run.end]))
    )


def _can_use_float32(x: Tensor) -> bool:
    """Return whether layers work in float32, or in bfloat16, for which the kernels' float32 is as
    fast."""
    if not torch.is_autocast_enabled("cpu"):
        return x.dtype == torch.float32
    dtype = torch.get_autocast_dtype("cpu")
    return dtype == torch.bfloat16 and x.dtype in (torch.float32, torch.bfloat16)


def _has_hooks(layer: nn.Module) -> bool:
    """Return whether a hook reads this layer's input or output."""
    pre_hooks = layer._forward_pre_hooks
    return bool(
        (pre_hooks and any(hook is not upcast for hook in pre_hooks.values()))
        or layer._forward_hooks
        or layer._backward_hooks
    )


@lru_cache(maxsize=256)
def _count_fitting(shape: torch.Size, weights: Sequence[torch.Size], forms: Sequence[Form]) -> int:
    """Return how many runs fit these rows and are small enough."""
    (count, channels, *sides), fit = shape, 0
    for weight, form in zip(weights, forms, strict=True):
        padded = [side + 2 * zeros for side, zeros in zip(sides, form.padding, strict=True)]
        output = form.pooled(sides, weight[2:])
        elements = max(channels * math.prod(padded), weight[0] * math.prod(output))
        fits = count > 0 and min(output) > 0 and channels == weight[1]  # else torch raises
        if not fits or elements > MAX_ELEMENTS or weight.numel() > MAX_WEIGHTS:
            break
        channels, sides, fit = weight[0], list(output), fit + 1
    return fit


# What they compute ------------------------------------------------------------------------------


def fused_conv(x: Tensor, own: Sequence[Parameters], forms: tuple[Form, ...]) -> Tensor:
    """Apply convolution, 2x2 max pooling, group norm and ReLU, repeatedly.

    Returns (B, kernels, height, width after pooling), float32.

    Args:
        x: (B, channels, height, width); float32, or a bfloat16 layer's output.
        own: parameters of each run; gamma and beta of the norm, (kernels,), or None.
        forms: one for each, which fit the rows.
    """
    weights = [parameters.weight for parameters in own]
    if has_torch_function_variadic(x, *weights):
        output: Tensor = handle_torch_function(fused_conv, (x, *weights), x, own, forms)
        return output
    if torch._C._are_functorch_transforms_active():
        return plain(x, own, forms)
    output = _FusedConv.apply(x, *flat(own), FusedPass(forms), None)
    return output


def plain(x: Tensor, own: Sequence[Parameters], forms: Sequence[Form]) -> Tensor:
    """Compute :func:`fused_conv` by torch's layers."""
    for parameters, form in zip(own, forms, strict=True):
        x = functional.conv2d(x.float(), parameters.weight, parameters.bias, padding=form.padding)
        x = functional.max_pool2d(x, 2)
        if form.groups:
            x = group_norm(x.float(), form.groups, parameters.gamma, parameters.beta, form.eps)
        x = functional.relu(x) if form.rectified else x
    return x


def flat(own: Sequence[Parameters]) -> list[Tensor | None]:
    """Return all parameters as a list; :func:`unflat` is the inverse."""
    return [parameter for parameters in own for parameter in parameters]


def unflat(items: Sequence[Any]) -> list[Parameters]:
    """Invert :func:`flat`."""
    size = len(Parameters._fields)
    return [Parameters(*items[start : start + size]) for start in range(0, len(items), size)]


class FusedPass:
    """One forward pass through the kernels, and its backward pass."""

    def __init__(self, forms: tuple[Form, ...], per_row: int | None = None) -> None:
        """Set the forms. ``per_row``: images of one row, for per-example gradients."""
        self.forms, self._per_row = forms, per_row
        self._done: ForwardContext | None = None

    def forward(self, x: Tensor, own: Sequence[Parameters]) -> Tensor:
        """Return (B, ...); or, per row, (rows, images, ...) of (rows times images, ...)."""
        y, self._done = kernel.forward(x.float(), own, self.forms)
        if self._per_row is None:
            return y
        # Not a view: torch's error for in-place changes would replace ours.
        size = (len(y) // self._per_row, self._per_row, *y.shape[1:])
        stride = (self._per_row * y.stride(0), *y.stride())
        return y.new_empty(0).set_(y.untyped_storage(), 0, size, stride)

    def back(
        self, gradient: Tensor, *, inputs: bool, parameters: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return gradients of inputs and of parameters, as far as requested. Those of parameters
        are (*shape), or (rows, *shape) per row."""
        assert self._done is not None
        per_row = self._per_row is not None
        gradient = gradient.flatten(0, 1) if per_row else gradient
        together = (self._per_row or len(gradient)) if parameters else None
        dx, sums = kernel.backward(gradient, self._done, inputs=inputs, together=together)
        if sums is None:
            return dx, []
        layouts = self._done.plan.parameters
        if per_row:
            return dx, [
                None if layout is None else layout.for_each_agent(sums) for layout in layouts
            ]
        return dx, [None if layout is None else layout.from_layers(sums) for layout in layouts]


class _FusedConv(torch.autograd.Function):
    # Without setup_context, which only transforms need and which is slow.
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        """Run the forward pass. ``arguments``: fields of ``Parameters``, a FusedPass, an anchor for
        the graph."""
        *own, ctx.fused, _ = arguments
        # Saved without copies, so that torch detects changes before the backward pass.
        ctx.save_for_backward(x, *own)
        y: Tensor = ctx.fused.forward(x, unflat(own))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, *own), needed = ctx.saved_tensors, ctx.needs_input_grad[:-2]
        if torch.is_grad_enabled():  # torch computes second derivatives
            inputs = [t for t, need in zip((x, *own), needed, strict=True) if need]
            y = plain(x, unflat(own), ctx.fused.forms)
            results = iter(torch.autograd.grad(y, inputs, gradients, create_graph=True))
            return *(next(results) if need else None for need in needed), None, None
        dx, sums = ctx.fused.back(gradients[0], inputs=needed[0], parameters=any(needed[1:]))
        dx = dx if dx is None else dx.to(x.dtype)
        return dx, *(sums or (None,) * len(own)), None, None


def of_rows(
    x: Tensor, own: Sequence[Parameters], forms: tuple[Form, ...]
) -> tuple[Tensor, FusedPass]:
    """Apply :func:`fused_conv` inside one vmap over rows; return its backward pass too.

    Args:
        x: of one row, (images, channels, height, width).
        own: shared by all rows. The FusedPass computes their gradients; the output always requires
            a gradient.
    """
    fused, level, dim = FusedPass(forms, per_row=len(x)), maybe_current_level(), maybe_get_bdim(x)
    assert level is not None
    with temporarily_pop_interpreter_stack():  # faster than passing through vmap
        anchor = torch.zeros((), requires_grad=True)
        images = get_unwrapped(x).movedim(dim, 0).flatten(0, 1)
        detached = (p if p is None else p.detach() for p in flat(own))
        output = _FusedConv.apply(images, *detached, fused, anchor)
    return _add_batch_dim(output, 0, level), fused
