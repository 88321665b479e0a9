"""Linear layers that multiply at full speed on AMD's processors too.

torch multiplies float32 matrices by Intel's MKL, which on a processor by another maker is half as
fast as it could be (104 GFLOP/s of 230; docs/performance.md). oneDNN, by which torch convolves, is
in torch as well and uses the instructions that it finds. The two add up in another order. Which of
them multiplies depends on the machine and on the layer's size, and on nothing else.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: Weights. FedAvg's and pfl-research's CNNs have 1.6 million in one layer. In layers a few times
#: smaller than this limit the gain is lost in a step's other work: those stay as they were.
LARGE = 2**18
CPUINFO = Path("/proc/cpuinfo")


class Linear(nn.Linear):
    """``torch.nn.Linear`` of LARGE weights or more, with derivatives of the first order."""

    def forward(self, x: Tensor) -> Tensor:
        if onednn_is_faster() and _is_plain(x, self.weight):
            y: Tensor = _Linear.apply(x, self.weight, self.bias)
            return y
        return super().forward(x)


@cache
def onednn_is_faster() -> bool:
    """Whether torch would multiply float32 by MKL, on a processor by AMD."""
    try:
        maker = CPUINFO.read_text().partition("vendor_id")[2].partition("\n")[0].strip(" \t:")
    except OSError:
        return False
    backends = torch.backends.mkl, torch.backends.mkldnn
    return maker == "AuthenticAMD" and all(backend.is_available() for backend in backends)


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether this is a product of matrices, and nothing changes what a product means."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.dim() == 2
        and len(x) > 0
        and x.shape[1] == weight.shape[1]  # torch's own says it best when it is not
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight) = gradients, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _product(g, weight.t()) if of_x else None,
            _product(g.t().contiguous(), x.t()) if of_weight else None,
            g.sum(dim=0) if of_bias else None,
        )


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left @ right.T + bias by oneDNN. torch has no public name for it; its compiler calls this."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product
