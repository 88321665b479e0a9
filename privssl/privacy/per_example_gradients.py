"""Per-example gradients for DP-SGD: as independent as row by row, nearly as fast as a batch.

``per_example_gradients`` is the definition, one line of ``torch.func``, with slow kernels.
``factored_gradients`` computes the same numbers in factored form:

* Forward, the loss runs under vmap, so rows cannot mix; operations that are slow there
  (cross-entropy, fused layers) are computed separately per row. Each row has its own parameters
  (one tensor, expanded), so any use of them has the right gradient.
* Most of the time goes to linear layers, convolutions and group norms: they are recognised,
  computed with the shared weight, and their inputs and outputs recorded.
* Backward is one autograd pass down to these outputs. The gradient of a linear layer's weight, or
  of a large convolution's, stays a pair of factors (``clipping.OuterProductGradients``); others are
  products of gradient and windows, several times faster than vmap's grouped convolutions.

With ``agents``, another vmap of the forward pass runs over agents and their weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    _add_batch_dim,
    _remove_batch_dim,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    maybe_get_bdim,
)
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]
from torch.func import grad, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from privssl.errors import PrivacyError
from privssl.ops import fused_conv_binding as kernel
from privssl.ops.fused_conv import flat, fused_conv, of_rows, plain, unflat
from privssl.privacy.clipping import DenseGradients, PerExampleGradients
from privssl.privacy.layer_gradients import Call, Key, LayerCall, PooledCall, add_parts, in_pair

Parameters = Mapping[str, Mapping[str, Tensor]]  # network -> parameter name -> tensor
#: (parameters of the protected networks, one row's fields without batch dimension) -> scalar
RowLoss = Callable[[Parameters, Mapping[str, Tensor]], Tensor]


def per_example_gradients(
    row_loss: RowLoss, parameters: Parameters, fields: Mapping[str, Tensor]
) -> Parameters:
    """Return the gradient of every row's loss: network -> name -> (B, *parameter shape).

    Args:
        row_loss: the loss of one row.
        parameters: of the networks to differentiate; detached here.
        fields: tensors (B, ...).
    """
    detached = {
        net: {name: p.detach() for name, p in params.items()} for net, params in parameters.items()
    }
    gradients: Parameters = vmap(grad(row_loss), in_dims=(None, 0), randomness="error")(
        detached, dict(fields)
    )
    return gradients


def factored_gradients(
    row_loss: RowLoss, parameters: Parameters, fields: Mapping[str, Tensor], *, agents: bool = False
) -> dict[Key, PerExampleGradients]:
    """Compute :func:`per_example_gradients` in factored form: (network, name) -> gradients.

    Parameters that no row's loss depends on are left out.

    Args:
        row_loss, parameters, fields: as in that function. Parameters need gradients.
        agents: whether parameters (A, *shape) and fields (A, B, ...) are those of A agents.
            Gradients are then of A times B rows, the first agent's first.

    Raises:
        PrivacyError: a layer's input or output is changed in place, or the loss is random.
    """
    depth = 2 if agents else 1  # of vmaps
    rows = next(iter(fields.values())).shape[depth - 1]
    shared = {(net, name): p for net, params in parameters.items() for name, p in params.items()}
    expanded = {key: _expand_rows(p.detach(), rows, depth - 1) for key, p in shared.items()}
    recorder = _LayerRecorder({key for key, p in shared.items() if p.requires_grad}, depth)

    def record_loss(expanded: Mapping[Key, Tensor], row: Mapping[str, Tensor]) -> Tensor:
        recorder.trace(expanded)
        with recorder:
            return row_loss(
                {net: {n: expanded[net, n] for n in params} for net, params in parameters.items()},
                row,
            )

    def compute_losses(
        shared: Mapping[Key, Tensor], expanded: Mapping[Key, Tensor], rows: Mapping[str, Tensor]
    ) -> Tensor:
        recorder.shared = shared
        return _map_over_rows(record_loss, expanded, rows)  # (B,)

    compute = vmap(compute_losses, randomness="error") if agents else compute_losses
    with _refuse_randomness():
        losses = compute(shared, expanded, dict(fields))
    for call in recorder.calls:
        call.check_untouched()
    if not losses.requires_grad:
        return {}
    gradients = torch.autograd.grad(
        losses, [*expanded.values(), *(call.output for call in recorder.calls)],
        torch.ones_like(losses), allow_unused=True,
    )  # fmt: skip
    parts: dict[Key, list[PerExampleGradients]] = {key: [] for key in shared}
    for key, gradient in zip(expanded, gradients, strict=False):
        if gradient is not None:
            parts[key].append(DenseGradients(gradient.flatten(0, 1) if agents else gradient))
    for call, gradient in zip(recorder.calls, gradients[len(expanded) :], strict=True):
        if gradient is not None:
            for key, part in call.of_parameters(gradient):
                parts[key].append(part)
    return {key: add_parts(terms) for key, terms in parts.items() if terms}


@contextmanager
def _refuse_randomness() -> Iterator[None]:
    """Raise a PrivacyError for vmap's refusal of random numbers.

    They would depend on a row's position in the batch.
    """
    try:
        yield
    except RuntimeError as error:
        if "random operation" not in str(error):
            raise
        raise PrivacyError(
            "the loss of a row, or a network in it, draws random numbers (dropout?): one row more "
            "would change those of others. Draw them with the row's other fields"
        ) from error


def _expand_rows(parameter: Tensor, rows: int, dim: int) -> Tensor:
    """Expand a tensor by a dimension of rows."""
    size = (*parameter.shape[:dim], rows, *parameter.shape[dim:])
    unsqueezed = parameter.unsqueeze(dim) if dim else parameter  # expand adds leading dimensions
    return unsqueezed.expand(size).requires_grad_()


def _map_over_rows(
    loss: Callable[[Mapping[Key, Tensor], Mapping[str, Tensor]], Tensor],
    expanded: Mapping[Key, Tensor],
    fields: Mapping[str, Tensor],
) -> Tensor:
    """Compute ``vmap(loss, randomness="error")(expanded, fields)``: (B,).

    vmap's own tree traversal takes a quarter of a millisecond, as long as a layer of a small
    network.
    """
    lazy_load_decompositions()
    rows = len(next(iter(fields.values())))
    if any(len(tensor) != rows for tensor in (*expanded.values(), *fields.values())):
        lengths = {name: len(tensor) for name, tensor in fields.items()}
        raise PrivacyError(
            f"fields have different numbers of rows, {lengths}: one row's would reach all others. "
            "Give every row its own"
        )
    level = _vmap_increment_nesting(rows, "error")
    try:
        batched = loss(
            {key: _add_batch_dim(tensor, 0, level) for key, tensor in expanded.items()},
            {name: _add_batch_dim(tensor, 0, level) for name, tensor in fields.items()},
        )
        losses: Tensor = _remove_batch_dim(batched, level, rows, 0)
    finally:
        _vmap_decrement_nesting()
    return losses


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


class _LayerRecorder(TorchFunctionMode):
    """Compute known calls of a loss with the shared weight, and record them."""

    shared: Mapping[Key, Tensor]  # the shared weight of all rows, by its name

    def __init__(self, trainable: Set[Key], depth: int) -> None:
        """Set up a recorder. ``trainable``: parameters that need gradients. ``depth``: number of
        vmaps around the loss, over rows, or over agents and rows."""
        super().__init__()
        self.calls: list[Call] = []
        self._trainable, self._depth = trainable, depth
        self._key_of: dict[int, Key] = {}
        self._level: int | None = None

    def trace(self, expanded: Mapping[Key, Tensor]) -> None:
        """Start recording. ``expanded``: the rows' parameters, as passed to the loss."""
        self._key_of = {id(tensor): key for key, tensor in expanded.items()}
        self._level = maybe_current_level()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.detach and id(args[0]) in self._key_of:  # use of a frozen copy
            return self.shared[self._key_of[id(args[0])]].detach()
        if func in _ARGUMENTS:
            arguments = {**dict(zip(_ARGUMENTS[func], args, strict=False)), **kwargs}
            if self._can_record(func, arguments):
                return self._compute_and_record(func, arguments)
            if func is functional.linear:
                return _aligned_linear(**arguments)
        if func is fused_conv:
            return self._compute_fused(*args)
        if func is functional.cross_entropy and self._is_supported_loss(*args, **kwargs):
            logits, y = args
            return _cross_entropy_of_rows(logits, y, kwargs["ignore_index"], kwargs["reduction"])
        return func(*args, **kwargs)

    def _is_supported_loss(
        self, logits: Tensor, y: Tensor, *, weight: Tensor | None, size_average: bool | None,
        ignore_index: int, reduce: bool | None, reduction: str, label_smoothing: float,
        **unknown: Any,
    ) -> bool:  # fmt: skip
        """Return whether it is a cross-entropy that :func:`_cross_entropy_of_rows` can compute."""
        basic = weight is None and size_average is None and reduce is None and not label_smoothing
        basic = basic and reduction in ("none", "mean", "sum") and y.dtype == torch.long
        basic = basic and not unknown  # arguments of a later torch
        mapped = self._depth == 1 and maybe_current_level() == self._level
        shapes = logits.dim() == 2 and y.dim() == 1
        return basic and mapped and shapes and all(len(_unwrap(t, 1)[1]) == 1 for t in (logits, y))

    def _compute_fused(
        self, x: Tensor, layers: Sequence[kernel.Parameters], forms: tuple[kernel.Form, ...]
    ) -> Tensor:
        """Compute layers by the fused kernels; not with ``agents``."""
        supported = all(
            self._can_record(fused_conv, {"input": x, "weight": layer.weight, "bias": layer.bias})
            and all(p is None or self._key_of.get(id(p)) in self._trainable for p in layer)
            for layer in layers
        )
        if self._depth > 1 or not supported:
            with self:  # single layers may be recognised
                return plain(x, layers, forms)
        keys = [None if p is None else self._key_of[id(p)] for p in flat(layers)]
        parameters = unflat([None if key is None else self.shared[key] for key in keys])
        out, visit = of_rows(x, parameters, forms)
        ends = self._key_of[id(layers[0].weight)], self._key_of[id(layers[-1].weight)]
        self._record_call(x, out, partial(PooledCall, ends=ends, keys=keys, visit=visit))
        return out

    def _can_record(self, layer: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
        """Return whether gradients of this call follow from its input and its output's gradient."""
        weight, bias, x = arguments.get("weight"), arguments.get("bias"), arguments["input"]
        if id(weight) not in self._key_of or not (bias is None or id(bias) in self._key_of):
            return False
        # In a vmap or grad inside the loss, the mapped dimension may not be rows.
        if maybe_current_level() != self._level:
            return False
        if len(_unwrap(x, self._depth)[1]) < self._depth:
            return False
        keys = {self._key_of[id(t)] for t in (weight, bias) if t is not None}
        if not (torch.is_grad_enabled() and keys <= self._trainable):
            return False
        if layer is functional.linear:
            shape = self.shared[self._key_of[id(weight)]].shape
            return len(shape) == 2 and (bias is None or bias.shape == shape[:1])
        if layer is functional.group_norm:
            return bool(x.dim() >= 2)
        dense = arguments.get("groups", 1) == 1 and in_pair(arguments.get("dilation", 1)) == (1, 1)
        numeric_padding = not isinstance(arguments.get("padding", 0), str)
        return dense and numeric_padding and x.dim() == 4 and len(x) > 0

    def _compute_and_record(self, layer: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
        key = self._key_of[id(arguments["weight"])]
        bias = None if arguments.get("bias") is None else self._key_of[id(arguments["bias"])]
        x = arguments["input"]
        weights = {"weight": self.shared[key], "bias": None if bias is None else self.shared[bias]}
        # vmap over weights refuses (2,) in place of (2, 2)
        pairs = {name: in_pair(arguments[name]) for name in _IN_PAIRS if name in arguments}
        function = _aligned_linear if layer is functional.linear else layer
        out: Tensor = function(**{**arguments, **pairs, **weights})
        shape = self.shared[key].shape
        make = partial(
            LayerCall, ends=(key, key), layer=layer, given=arguments, shape=shape, bias=bias
        )
        self._record_call(x, out, make)
        return out

    def _record_call(self, x: Tensor, out: Tensor, make: Callable[..., Call]) -> None:
        output, rows_at = _unwrap(out, self._depth)
        inputs, dims = _unwrap(x, self._depth)
        inputs = inputs.movedim(dims, tuple(range(self._depth))).detach()
        versions = (inputs._version, output._version)
        self.calls.append(make(input=inputs, output=output, rows_at=rows_at, versions=versions))


def _aligned_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``functional.linear`` with inputs padded with zeros to a multiple of 4.

    Otherwise MKL's rounding depends on a row's alignment in memory, and so on its position in the
    batch (``row_bits.py``).
    """
    if missing := -weight.shape[-1] % 4:
        input, weight = (functional.pad(t, (0, missing)) for t in (input, weight))
    return functional.linear(input, weight, bias)


def _cross_entropy_of_rows(logits: Tensor, y: Tensor, ignored: int, reduction: str) -> Tensor:
    """Compute cross-entropy inside one vmap over rows, faster than vmap's decomposition. Rows stay
    independent: each loss depends only on its own row's logits."""
    level = maybe_current_level()
    assert level is not None
    (x, x_dims), (classes, class_dims) = _unwrap(logits, 1), _unwrap(y, 1)
    with temporarily_pop_interpreter_stack():
        x, classes = x.movedim(x_dims, (0,)), classes.movedim(class_dims, (0,))  # (B, n, C), (B, n)
        losses = functional.cross_entropy(
            x.flatten(0, 1), classes.flatten(), ignore_index=ignored, reduction="none"
        ).view(classes.shape)
        if reduction != "none":
            losses = losses.sum(dim=1)
        if reduction == "mean":
            losses = losses / (classes != ignored).sum(dim=1)
    return _add_batch_dim(losses, 0, level)


def _unwrap(tensor: Tensor, depth: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return the tensor beneath vmaps, and the mapped dimensions, the outermost's first. Fewer than
    ``depth`` if it is the same for all rows, or wrapped by the loss."""
    dims: list[int] = []
    for _ in range(depth):
        dim = maybe_get_bdim(tensor)
        if dim < 0:
            return tensor, ()
        tensor = get_unwrapped(tensor)
        dims.append(dim)
    if is_functorch_wrapped_tensor(tensor):
        return tensor, ()
    if depth == 1:
        return tensor, (dims[0],)
    rows, agents = dims  # rows: counted without the dimension of agents
    return tensor, (agents, rows + (rows >= agents))
