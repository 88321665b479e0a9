"""Flattening whose gradient is channels last, as rows are: otherwise every layer before it writes
its gradient in the plain order, until a convolution copies it. Results are the same."""

from typing import Any

import torch
from torch import Tensor, nn

LARGE = 2**16  # elements; below, the saved copy costs less than this


class Flatten(nn.Flatten):
    """``torch.nn.Flatten()`` of rows (B, Ch, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        plain = not torch._C._are_functorch_transforms_active()  # vmap has its own layouts
        if plain and x.numel() >= LARGE and x.is_contiguous(memory_format=torch.channels_last):
            flat: Tensor = _Flattened.apply(x)
            return flat
        return super().forward(x)


class _Flattened(torch.autograd.Function):
    # Without setup_context, which transforms alone need and which costs as much as flattening.
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        plain = gradients[0].reshape(ctx.shape)
        return plain.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
