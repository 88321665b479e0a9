"""1x1 convolutions with a stride over few channels.

For channels-last rows oneDNN, which computes torch's convolutions on a CPU, writes the gradient of
these weights out of bounds: results are wrong, or the process crashes (oneDNN issue 6035; seen with
torch 2.14 and AVX2). Skipping pixels first gives the same result.
"""

from torch import Tensor, nn
from torch.nn.functional import conv2d

CHANNELS = 16  # per block of AVX-512; with AVX2 the fault ends at 8


class PointwiseConv2d(nn.Conv2d):
    """``nn.Conv2d`` with a 1x1 kernel and without padding."""

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.stride
        sampled = x[..., ::rows, ::columns]  # also of one image without a batch
        return conv2d(sampled, self.weight, self.bias, groups=self.groups)


def avoid_overrun(layer: nn.Module) -> None:
    """Convert a layer that oneDNN computes wrongly to a ``PointwiseConv2d``; parameters stay."""
    if (
        type(layer) is nn.Conv2d
        and (layer.kernel_size, layer.padding) in (((1, 1), (0, 0)), ((1, 1), "valid"))
        and layer.stride != (1, 1)
        and layer.in_channels // layer.groups < CHANNELS
    ):
        layer.__class__ = PointwiseConv2d
