"""Linear layers that multiply at full speed on AMD's processors too.

torch multiplies float32 matrices by Intel's MKL, which on the AMD EPYC that we measured is half as
fast as it could be (104 GFLOP/s of 230). oneDNN, by which torch convolves, is
in torch as well and uses the instructions that it finds. The two add up in another order: last bits
differ between machines by other makers, as they do between many machines anyway.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: Weights. FedAvg's and pfl-research's CNNs have 1.6 million in one layer. In layers a few times
#: smaller than this limit the gain is lost in a step's other work: those stay as they were.
LARGE = 2**18
FEWEST = 8  # rows; of one, MKL's product takes half the time
CPUINFO = Path("/proc/cpuinfo")


class Linear(nn.Linear):
    """``torch.nn.Linear`` of LARGE weights or more."""

    def forward(self, x: Tensor) -> Tensor:
        if onednn_is_faster() and _is_plain(x, self.weight):
            # Contiguous: in which order sums are taken would depend on how rows lie in memory.
            y: Tensor = _Linear.apply(x.contiguous(), self.weight, self.bias)
            return y
        return super().forward(x)


@cache
def onednn_is_faster() -> bool:
    """Whether torch would multiply float32 by MKL on a processor by AMD, and has the other way."""
    try:
        maker = CPUINFO.read_text().partition("vendor_id")[2].partition("\n")[0].strip(" \t:")
    except OSError:
        return False
    backends = torch.backends.mkl, torch.backends.mkldnn
    both = all(backend.is_available() for backend in backends)
    return both and maker == "AuthenticAMD" and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether this is a product of matrices, and nothing changes what a product means."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.dim() == 2
        and len(x) >= FEWEST
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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight) = gradients, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        # oneDNN's product has no derivative: where one is wanted, torch's own is taken.
        times = torch.matmul if torch.is_grad_enabled() else _times
        return (
            times(g, weight) if of_x else None,
            times(g.t(), x) if of_weight else None,
            g.sum(dim=0) if of_bias else None,
        )


def _times(left: Tensor, right: Tensor) -> Tensor:
    return _product(left, right.t())


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left @ right.T + bias by oneDNN. torch has no public name for it; its compiler calls this."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product
