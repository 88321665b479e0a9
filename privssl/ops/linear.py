"""Large linear layers by oneDNN on AMD processors: Intel's MKL, torch's default, reached 104 of 230
GFLOP/s on the AMD EPYC measured. The sums have another order, so last bits differ between makers of
processors."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LARGE = 2**18  # weights; in layers a few times smaller the gain is lost in a step's other work
FEWEST = 8  # rows; for one, MKL takes half the time
CPUINFO = Path("/proc/cpuinfo")


class Linear(nn.Linear):
    """``torch.nn.Linear`` of LARGE weights or more."""

    def forward(self, x: Tensor) -> Tensor:
        if onednn_is_faster() and _is_plain(x, self.weight):
            # Contiguous, else the order of sums would depend on the memory layout.
            y: Tensor = _Linear.apply(x.contiguous(), self.weight, self.bias)
            return y
        return super().forward(x)


@cache
def onednn_is_faster() -> bool:
    """Whether torch would use MKL on an AMD processor and has oneDNN."""
    try:
        maker = CPUINFO.read_text().partition("vendor_id")[2].partition("\n")[0].strip(" \t:")
    except OSError:
        return False
    backends = torch.backends.mkl, torch.backends.mkldnn
    both = all(backend.is_available() for backend in backends)
    return both and maker == "AuthenticAMD" and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether this is a plain float32 matrix product on the CPU."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.dim() == 2
        and len(x) >= FEWEST
        and x.shape[1] == weight.shape[1]  # else torch raises the error
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight) = gradients, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        # oneDNN's product has no derivative.
        times = torch.matmul if torch.is_grad_enabled() else lambda a, b: _product(a, b.t())
        return (
            times(g, weight) if of_x else None,
            times(g.t(), x) if of_weight else None,
            g.sum(dim=0) if of_bias else None,
        )


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left @ right.T + bias by oneDNN; torch has no public name for it."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product
