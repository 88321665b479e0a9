"""Flattening whose gradient lies in memory as the rows do.

Rows go through a network channels last. A linear layer behind them sends back a gradient in the
plain order, and every layer before it then writes its own in that order too, until a convolution
copies it: after pooling four times as many numbers as the linear layer sent. Here the gradient is
put in order where it is smallest. No number changes.
"""

from typing import Any

import torch
from torch import Tensor, nn

LARGE = 2**16  # numbers; of fewer, the copy that is saved costs less than this costs


class Flatten(nn.Flatten):
    """``torch.nn.Flatten()`` of rows (B, Ch, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        alone = not torch._C._are_functorch_transforms_active()  # vmap has its own layouts
        if alone and x.numel() >= LARGE and x.is_contiguous(memory_format=torch.channels_last):
            flat: Tensor = _Flattened.apply(x)
            return flat
        return super().forward(x)


class _Flattened(torch.autograd.Function):
    # Without setup_context, as only a transform would need it: torch looks up the signature of
    # every call that has one, which takes as long as flattening.
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        plain = gradients[0].reshape(ctx.shape)
        return plain.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
