"""Plain SGD on a large linear layer, its steps kept as the few rows that they are made of.

The gradient of a linear layer's weights W (out, in) is G^T X, of the batch's inputs X (B, in) and
the gradients G (B, out) of its outputs. Small agents take short visits of small batches: written
out, every step of ten rows on a million weights makes a million numbers from ten thousand, reads
and writes W, and the next reads it again. Without that a step of pfl-research's CIFAR-10 network
takes a tenth less time in bfloat16, and a little less in float32 (``benchmarks.hot_loop``). Kept as
rows,

    W_t = W_0 + G^T X              G: -rate times the rows so far, (rows, out); X: (rows, in)
    x W_t^T = x W_0^T + (x X^T) G          forward
    g W_t   = g W_0   + (g G^T) X          backward

a step reads W_0 twice and writes nothing of its size. When ``ROOM`` rows are kept, and at the end
of a visit, they are added to W, in float32. It is the same step, rounded elsewhere.

For SGD without momentum or weight decay, whose past is the weights alone, and on a CPU. The
networks that come with privssl have no layer so large on images of up to 32 by 32.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from privssl.ops.linear import Linear, product
from privssl.ops.precision import precision_of
from privssl.training import optim
from privssl.training.batched import deferred

#: Rows. More make each step read more, fewer write W more often: with 32 to 128 a step takes as
#: long, to 4% (pfl-research's network, visits of 5 and 20 steps).
ROOM = 64


class LazySGDBuffer:
    """The steps of one layer. As ``Linear.kept`` they take part in all that it computes."""

    def __init__(self, weight: Tensor, rate: float, kind: torch.dtype) -> None:
        """
        Args:
            weight: (out, in), float32 on the CPU, W_0; ``end`` writes to it.
            rate: of the steps, >= 0.
            kind: in which products are taken.
        """
        self._W, self._rate, self._kind = weight, rate, kind
        self._start = torch.empty(0)  # W_0 of that kind; empty until it is asked for
        self._G = torch.empty(ROOM, weight.shape[0])
        self._X = torch.empty(ROOM, weight.shape[1], dtype=kind)
        self._count = 0  # rows of both that are in use
        self._heard: list[tuple[Tensor, Tensor]] = []  # x and g of the step that is being taken

    def output(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W_t^T + bias for x (..., in), (..., out), of the kind of the products."""
        with torch.autocast("cpu", enabled=False):
            rows = x.to(self._kind).reshape(-1, x.shape[-1]).contiguous()
            bias = None if bias is None else bias.to(self._kind)
            y: Tensor = _Output.apply(rows, self._W, bias, self)
        return y.view(*x.shape[:-1], -1)

    @torch.no_grad()
    def step(self) -> None:
        """W_{t+1} from W_t: a step down what backward passes gave since the last one."""
        for x, g in self._heard:
            if self._count + len(x) > ROOM:
                self.end()
            if len(x) > ROOM:
                self._add(-self._rate * g.float(), x)
                continue
            there = slice(self._count, self._count + len(x))
            self._X[there] = x
            self._G[there] = -self._rate * g.float()
            self._count += len(x)
        self._heard.clear()

    @torch.no_grad()
    def end(self) -> None:
        """Add to W what is kept. Steps may go on after it."""
        if self._count:
            self._add(self._G[: self._count], self._X[: self._count])
        self._count = 0

    def _add(self, G: Tensor, X: Tensor) -> None:
        self._W.add_(product(G.t(), X.float().t()))
        self._start = torch.empty(0)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W_t^T + bias, (B, in) to (B, out)."""
        if not len(self._start):
            self._start = self._W.detach().to(self._kind)
        y = product(x, self._start, bias)
        G, X = self._rows()
        return y.addmm_(x @ X.t(), G) if len(X) else y

    def hear(self, x: Tensor, g: Tensor) -> None:
        """The next step goes down the gradient g^T x, too."""
        self._heard.append((x.detach(), g.detach()))

    def backward(self, g: Tensor) -> Tensor:
        """g W_t, (B, out) to (B, in)."""
        slope = product(g, self._start.t())
        G, X = self._rows()
        return slope.addmm_(g @ G.t(), X) if len(X) else slope

    def _rows(self) -> tuple[Tensor, Tensor]:
        return self._G[: self._count].to(self._kind), self._X[: self._count]


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, bias: Tensor | None, kept: LazySGDBuffer) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kept = kept
        return kept.forward(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x,) = gradients, ctx.saved_tensors
        of_x, _, of_bias, _ = ctx.needs_input_grad
        ctx.kept.hear(x, g)
        # None for the weights: the optimiser then has nothing to do with them.
        slope = ctx.kept.backward(g) if of_x else None
        return slope, None, g.sum(dim=0) if of_bias else None, None


class _KeepingSGD(optim.SGD):
    """SGD whose steps some layers keep."""

    def __init__(self, network: nn.Module, rate: float, kept: Sequence[LazySGDBuffer]) -> None:
        super().__init__(network.parameters(), lr=rate)
        self._kept = kept

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for layer in self._kept:
            layer.step()

    step.hooked = True  # type: ignore[attr-defined]  # see training/optim.py


@contextmanager
def plain_sgd(network: nn.Module, rate: float) -> Iterator[optim.SGD]:
    """SGD on all parameters of a network. Inside, weights of its large linear layers are those
    that it came with: its forward pass knows better, and nobody else (``functional_call``,
    ``state_dict``). Outside they are what they should be.

    Inside, every backward pass must be one of ``local_training.minimise``, with this optimiser and
    no ``clip_norm``: of the gradient of such a layer it would know nothing.

    Args:
        rate: learning rate, >= 0.
    """
    layers = _that_can_keep(network) if deferred.is_unbatched() else []
    if not layers:
        yield optim.SGD(network.parameters(), lr=rate)
        return
    kind = torch.bfloat16 if precision_of(network) == "bfloat16" else torch.float32
    kept = [LazySGDBuffer(layer.weight, rate, kind) for layer in layers]
    try:
        for layer, own in zip(layers, kept, strict=True):
            layer.kept = own
        yield _KeepingSGD(network, rate, kept)
    finally:
        for layer, own in zip(layers, kept, strict=True):
            layer.kept = None
            own.end()


def _that_can_keep(network: nn.Module) -> list[Linear]:
    """Large linear layers of float32 on the CPU that learn, and share their weights with nobody."""
    owners = Counter(
        id(p) for module in network.modules() for p in module.parameters(recurse=False)
    )
    return [
        layer for layer in network.modules()
        if isinstance(layer, Linear) and layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32 and layer.weight.requires_grad
        and owners[id(layer.weight)] == 1
    ]  # fmt: skip
