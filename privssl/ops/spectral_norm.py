"""Spectral normalisation by a kernel of ours, where it can do it.

Two dozen operations of a few numbers each take longer, in a step of a small discriminator, than one
of its convolutions. Which layers are normalised, names in a state dict and the vectors' first draws
are as ``generators/spectral.py`` has them; numbers are, but for rounding.
"""

from typing import Any

import torch
from torch import Tensor

from generators import spectral
from privssl.ops import dispatch
from privssl.ops import spectral_norm_binding as kernel


class SpectralNorm(spectral.SpectralNorm):
    """A weight divided by its largest singular value, as far as power iteration knows it."""

    _u: Tensor
    _v: Tensor

    def forward(self, weight: Tensor) -> Tensor:
        known = (
            type(weight) in (Tensor, torch.nn.Parameter)
            and weight.dim() in (2, 4)
            and weight.numel() > 0
            and self.dim == 0
            and dispatch.available_for(weight)
            and not torch._C._are_functorch_transforms_active()
        )
        if not known:
            found: Tensor = super().forward(weight)
            return found
        iterations = self.n_power_iterations if self.training else 0
        scaled: Tensor = _Scaled.apply(weight, self._u, self._v, iterations, self.eps)
        return scaled


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, u: Tensor, v: Tensor, more: int, eps: float) -> Tensor:
        scaled, *vectors, ctx.value = kernel.scale(weight, u, v, more, eps)
        ctx.save_for_backward(weight, scaled, *vectors)
        return scaled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        weight, scaled, left, right = ctx.saved_tensors
        if torch.is_grad_enabled():  # derivatives of derivatives, which the kernel does not have
            matrix = weight.movedim(1, -1).flatten(1)  # as the right vector has it
            again = weight / torch.vdot(left, matrix @ right)
            [found] = torch.autograd.grad(again, weight, gradients, create_graph=True)
        else:
            found = kernel.back(gradients[0], scaled, left, right, ctx.value)
        return found, None, None, None, None
