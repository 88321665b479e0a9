"""Gradients of every row's loss, for DP-SGD: as true as one row at a time, nearly as fast as all.

``per_row_gradients`` says what is meant, in one line of ``torch.func``: vmap over rows of the
gradient of one row's loss. It makes every row's gradient of every weight, with kernels that are
slow at it. ``factored_gradients`` has the same numbers in the form in which they arise:

* forward, the loss runs under vmap as well, so rows cannot mix; each row has parameters of its own
  (one tensor, seen B times), so that whatever a loss does with them has the right gradient.
* the calls that are nearly all of the time (linear, convolutions, group norm) are recognised while
  they run. They are done with the one weight; their inputs and outputs are kept.
* backward is plain autograd, once, down to these outputs; what it would do to their weights is done
  here: for a linear layer, or a convolution of many channels that meets few places, nothing at all
  (``clipping.Outer``); for others a product of gradient and windows, which is several times faster
  than the grouped convolutions of vmap.

Several agents' rows can be done so together (``agents``), for a GPU: forward one vmap more, over
agents and their weights; from there on rows are rows.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    maybe_get_bdim,
)
from torch.func import grad, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from privssl.clipping import Outer, RowGradients, Rows
from privssl.errors import PrivacyError

Parameters = Mapping[str, Mapping[str, Tensor]]  # network -> parameter name -> tensor
#: (parameters of the protected networks, one row's fields without batch dimension) -> scalar
RowLoss = Callable[[Parameters, Mapping[str, Tensor]], Tensor]
Key = tuple[str, str]  # network, parameter name

#: A weight is left as two factors, if it has so many times more numbers than these have pairs of
#: places. With 2 small_cnn's steps took a quarter longer, and a wide ResNet-9's gained nothing.
MANY = 8


def per_row_gradients(
    row_loss: RowLoss, parameters: Parameters, fields: Mapping[str, Tensor]
) -> Parameters:
    """Gradient of every row's loss: network -> name -> (B, *parameter shape).

    Args:
        row_loss: the loss of one row.
        parameters: of the networks to differentiate; detached here.
        fields: tensors (B, ...).
    """
    plain = {
        net: {name: p.detach() for name, p in named.items()} for net, named in parameters.items()
    }
    gradients: Parameters = vmap(grad(row_loss), in_dims=(None, 0), randomness="different")(
        plain, dict(fields)
    )
    return gradients


def factored_gradients(
    row_loss: RowLoss, parameters: Parameters, fields: Mapping[str, Tensor], *, agents: bool = False
) -> dict[Key, RowGradients]:
    """What :func:`per_row_gradients` returns, not multiplied out: (network, name) -> gradients.

    A parameter that no row's loss depends on is not among them.

    Args:
        row_loss, parameters, fields: as there. Parameters need gradients.
        agents: whether parameters (A, *shape) and fields (A, B, ...) are those of A agents.
            Gradients are then of A times B rows, the first agent's first.

    Raises:
        PrivacyError: a layer's input or output is changed in place after it, and its gradient
            cannot be known.
    """
    depth = 2 if agents else 1  # of vmaps
    rows = next(iter(fields.values())).shape[depth - 1]
    whole = {(net, name): p for net, named in parameters.items() for name, p in named.items()}
    own = {key: _seen_by_each(p.detach(), rows, depth - 1) for key, p in whole.items()}
    watch = _Watch({key for key, p in whole.items() if p.requires_grad}, depth)

    def watched(own: Mapping[Key, Tensor], row: Mapping[str, Tensor]) -> Tensor:
        watch.know(own)
        with watch:
            return row_loss(
                {net: {n: own[net, n] for n in named} for net, named in parameters.items()}, row
            )

    def of_agent(
        whole: Mapping[Key, Tensor], own: Mapping[Key, Tensor], rows: Mapping[str, Tensor]
    ) -> Tensor:
        watch.whole = whole
        return vmap(watched, randomness="different")(own, rows)  # (B,)

    compute = vmap(of_agent, randomness="different") if agents else of_agent
    losses = compute(whole, own, dict(fields))
    for seen in watch.calls:
        seen.check_untouched()
    if not losses.requires_grad:
        return {}
    found = torch.autograd.grad(
        losses, [*own.values(), *(seen.output for seen in watch.calls)],
        torch.ones_like(losses), allow_unused=True,
    )  # fmt: skip
    parts: dict[Key, list[RowGradients]] = {key: [] for key in whole}
    for key, gradient in zip(own, found, strict=False):
        if gradient is not None:
            parts[key].append(Rows(gradient.flatten(0, 1) if agents else gradient))
    for seen, gradient in zip(watch.calls, found[len(own) :], strict=True):
        if gradient is not None:
            for key, part in seen.of_parameters(gradient):
                parts[key].append(part)
    return {key: _added(each) for key, each in parts.items() if each}


def _seen_by_each(parameter: Tensor, rows: int, at: int) -> Tensor:
    """One tensor as if each row had its own, with a dimension more, of rows."""
    size = (*parameter.shape[:at], rows, *parameter.shape[at:])
    return parameter.unsqueeze(at).expand(size).requires_grad_()


@dataclass(frozen=True)
class _Call:
    """A layer that was called with watched parameters, for all rows."""

    layer: Callable[..., Any]
    given: Mapping[str, Any]  # its arguments by name
    weight: tuple[Key, torch.Size]  # and its shape
    bias: Key | None
    input: Tensor  # (B, ...), or (A, B, ...)
    output: Tensor  # of the graph; rows, or agents and rows, are along ``rows_at``
    rows_at: tuple[int, ...]
    versions: tuple[int, int]  # of input and output, when the layer was done

    def check_untouched(self) -> None:
        now = {"input": self.input._version, "output": self.output._version}
        for (which, version), before in zip(now.items(), self.versions, strict=True):
            if version != before:
                raise PrivacyError(
                    f"the {which} of {'.'.join(self.weight[0])} is changed in place, so that the "
                    "gradients of single rows cannot be known. Use a network without inplace=True"
                )

    def of_parameters(self, gradient: Tensor) -> list[tuple[Key, RowGradients]]:
        """Gradients of weight and bias from that of the output."""
        key, shape = self.weight
        x, g = self.input, gradient.movedim(self.rows_at, tuple(range(len(self.rows_at))))
        if len(self.rows_at) > 1:  # weights are not needed here, so rows are rows, whoever's
            x, g = x.flatten(0, 1), g.flatten(0, 1)
        # (B, T, channels, ...), linear: (B, ..., features)
        if self.layer is functional.linear:
            left, right = (t.reshape(len(t), -1, t.shape[-1]) for t in (g, x))
            return [(key, _product(left, right)), *self._of_bias(left.sum(dim=1))]
        places = (1, *range(3, g.dim()))
        if self.layer is functional.group_norm:
            groups, eps = self.given["num_groups"], self.given["eps"]
            normed = functional.group_norm(x.flatten(0, 1), groups, eps=eps)
            mine: RowGradients = Rows((g * normed.view_as(g)).sum(dim=places))
        else:
            mine = _of_kernels(self.layer, self.given, x, g, shape)
        return [(key, mine), *self._of_bias(g.sum(dim=places))]

    def _of_bias(self, each: Tensor) -> list[tuple[Key, RowGradients]]:
        return [] if self.bias is None else [(self.bias, Rows(each))]


_ARGUMENTS: dict[Callable[..., Any], tuple[str, ...]] = {
    functional.linear: ("input", "weight", "bias"),
    functional.conv2d: (
        "input", "weight", "bias", "stride", "padding", "dilation", "groups",
    ),
    functional.conv_transpose2d: (
        "input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation",
    ),
    functional.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
}  # fmt: skip

_IN_PAIRS = ("stride", "padding", "output_padding", "dilation")


class _Watch(TorchFunctionMode):
    """While a loss runs: does the calls that it knows with the one weight, and writes them down."""

    whole: Mapping[Key, Tensor]  # the one weight of all rows, by its name

    def __init__(self, moving: Set[Key], depth: int) -> None:
        """``moving``: what needs gradients. ``depth``: of vmaps around the loss, of agents and rows
        or of rows alone."""
        super().__init__()
        self.calls: list[_Call] = []
        self._moving, self._depth = moving, depth
        self._key_of: dict[int, Key] = {}
        self._level: int | None = None

    def know(self, own: Mapping[Key, Tensor]) -> None:
        """``own``: the rows' parameters, as the loss is given them."""
        self._key_of = {id(tensor): key for key, tensor in own.items()}
        self._level = maybe_current_level()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.detach and id(args[0]) in self._key_of:  # a frozen use: the one weight
            return self.whole[self._key_of[id(args[0])]].detach()
        if func in _ARGUMENTS:
            given = {**dict(zip(_ARGUMENTS[func], args, strict=False)), **kwargs}
            if self._knows(func, given):
                return self._done(func, given)
        return func(*args, **kwargs)

    def _knows(self, layer: Callable[..., Any], given: Mapping[str, Any]) -> bool:
        """Whether gradients of this call can be made from its input and its output's gradient."""
        weight, bias, x = given.get("weight"), given.get("bias"), given["input"]
        if id(weight) not in self._key_of or not (bias is None or id(bias) in self._key_of):
            return False
        # In a vmap or grad of the loss's own, what looks like rows may be something else.
        if maybe_current_level() != self._level:
            return False
        if len(_beneath(x, self._depth)[1]) < self._depth:
            return False
        used = {self._key_of[id(t)] for t in (weight, bias) if t is not None}
        if not (torch.is_grad_enabled() and used <= self._moving):
            return False
        if layer is functional.linear:
            shape = self.whole[self._key_of[id(weight)]].shape
            return len(shape) == 2 and (bias is None or bias.shape == shape[:1])
        if layer is functional.group_norm:
            return bool(x.dim() >= 2)
        dense = given.get("groups", 1) == 1 and _pair(given.get("dilation", 1)) == (1, 1)
        padded = not isinstance(given.get("padding", 0), str)
        return dense and padded and x.dim() == 4 and len(x) > 0

    def _done(self, layer: Callable[..., Any], given: dict[str, Any]) -> Tensor:
        key = self._key_of[id(given["weight"])]
        bias = None if given.get("bias") is None else self._key_of[id(given["bias"])]
        x = given["input"]
        one = {"weight": self.whole[key], "bias": None if bias is None else self.whole[bias]}
        # (2,) for (2, 2) is understood by layers, not by vmap over their weights
        pairs = {name: _pair(given[name]) for name in _IN_PAIRS if name in given}
        out: Tensor = layer(**{**given, **pairs, **one})
        inner, rows_at = _beneath(out, self._depth)
        read, places = _beneath(x, self._depth)
        read = read.movedim(places, tuple(range(self._depth))).detach()
        self.calls.append(
            _Call(
                layer=layer,
                given=given,
                weight=(key, self.whole[key].shape),
                bias=bias,
                input=read,
                output=inner,
                rows_at=rows_at,
                versions=(read._version, inner._version),
            )
        )
        return out


def _beneath(tensor: Tensor, depth: int) -> tuple[Tensor, tuple[int, ...]]:
    """What lies beneath vmaps, and which of its dimensions they run along, the outermost's first.

    Fewer of them than ``depth`` where it is not what the vmaps around a loss make: something is the
    same for all rows, or wrapped by what the loss does itself.
    """
    places: list[int] = []
    for _ in range(depth):
        place = maybe_get_bdim(tensor)
        if place < 0:
            return tensor, ()
        tensor = get_unwrapped(tensor)
        places.append(place)
    if is_functorch_wrapped_tensor(tensor):
        return tensor, ()
    if depth == 1:
        return tensor, (places[0],)
    rows, agents = places  # rows: counted without the dimension of agents
    return tensor, (agents, rows + (rows >= agents))


def _product(
    left: Tensor, right: Tensor, kernel: tuple[int, int, int] | None = None
) -> RowGradients:
    """(B, T, p) and (B, T, d): multiplied out where that is less work (Bu et al. 2022).

    ``kernel``: as in :class:`clipping.Outer`.
    """
    places, p, d = left.shape[1], left.shape[2], right.shape[2]
    no_float64 = left.device.type == "mps"
    if MANY * places**2 > p * d or (places > 1 and no_float64):
        each = left.mT @ right
        if kernel is None:
            return Rows(each)
        return Rows(each.view(*each.shape[:2], *kernel), (0, 3, 1, 2))
    return Outer(left, right, kernel)


def _of_kernels(
    layer: Callable[..., Any], given: Mapping[str, Any], x: Tensor, g: Tensor, shape: torch.Size
) -> RowGradients:
    """Gradients of a convolution's weight, of its ``shape`` (first, second, height, width), from
    inputs and output gradients (B, T, channels, h, w).

    A kernel slides over the larger of two images and meets a place of the smaller one.
    """
    larger, smaller = (x, g) if layer is functional.conv2d else (g, x)
    seen = _windows(
        larger.flatten(0, 1),
        shape[2:],
        _pair(given.get("stride", 1)),
        _pair(given.get("padding", 0)),
    )
    met = smaller.flatten(0, 1).flatten(2).mT  # (B T, places, first)
    left, right = (t.reshape(len(x), -1, t.shape[-1]) for t in (met, seen))
    return _product(left, right, (shape[2], shape[3], shape[1]))


def _windows(
    x: Tensor, kernel: torch.Size, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """What a kernel sees at every place: (N, channels, h, w) -> (N, places, kernel channels).

    ``functional.unfold``, in the order in which memory is copied fastest (5 times as fast).
    """
    x = functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    many = x.shape[1] >= 4
    x = x.contiguous(memory_format=torch.channels_last if many else torch.contiguous_format)
    (high, wide), (down, right) = kernel, stride
    places = ((x.shape[2] - high) // down + 1, (x.shape[3] - wide) // right + 1)
    n, c, h, w = x.stride()
    if many:  # channels lie side by side
        size = (len(x), *places, high, wide, x.shape[1])
        return x.as_strided(size, (n, h * down, w * right, h, w, c)).reshape(
            len(x), places[0] * places[1], -1
        )
    size = (len(x), high, wide, x.shape[1], *places)
    return x.as_strided(size, (n, h, w, c, h * down, w * right)).reshape(
        len(x), -1, places[0] * places[1]
    ).mT  # fmt: skip


def _added(parts: list[RowGradients]) -> RowGradients:
    """One of several gradients of one parameter, which came by several ways."""
    if len(parts) == 1:
        return parts[0]
    outer = [part for part in parts if isinstance(part, Outer)]
    if len(outer) == len(parts):
        left, right = (torch.cat([getattr(o, s) for o in outer], 1) for s in ("left", "right"))
        return _product(left, right, outer[0].kernel)
    total = _written_out(parts[0])
    for part in parts[1:]:
        total = total + _written_out(part)
    return Rows(total)


def _written_out(part: RowGradients) -> Tensor:
    """(B, *shape of the parameter)."""
    if isinstance(part, Outer):
        return part.shaped(part.left.mT @ part.right)
    assert isinstance(part, Rows)
    return part.each if part.axes is None else part.each.permute(0, *(a + 1 for a in part.axes))


def _pair(value: Any) -> tuple[int, int]:
    one, *other = (value,) if isinstance(value, int) else value
    return (one, *other) if other else (one, one)
