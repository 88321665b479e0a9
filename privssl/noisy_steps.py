"""Opacus' optimiser with noise that no seed repeats: the noisy step of ``privacy.py``.

A file of its own because importing Opacus takes as long as importing torch, and only a visit
under DP-SGD needs it.
"""

import math
from collections.abc import Sequence

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor

from privssl import privacy

GRID = 2.0**-16  # at most, of the noise's deviation: what is released lies so far apart


class SecureNoise(DPOptimizer):  # type: ignore[misc]  # opacus carries no types
    """Opacus' optimiser, with the noise drawn by :func:`privssl.privacy.secure_normal`."""

    def add_noise(self) -> None:
        add_noise([self])


def add_noise(optimisers: Sequence[SecureNoise]) -> None:
    """Noise on the sums of one agent or of several, each with its own, as gradients of parameters.

    In float64, on the CPU (not every device has it): what is released is rounded after the noise.
    All parameters at once: there are dozens, most of a few numbers, and a device is waited for.
    """
    parameters = [parameter for one in optimisers for parameter in one.params]
    noisy = torch.cat([parameter.summed_grad.reshape(-1) for parameter in parameters])
    device, kind = noisy.device, noisy.dtype
    noisy = noisy.to("cpu", torch.float64)
    sizes = [sum(parameter.numel() for parameter in one.params) for one in optimisers]
    for one, sums in zip(optimisers, torch.split(noisy, sizes), strict=True):
        deviation = one.noise_multiplier * one.max_grad_norm
        noise = torch.from_numpy(privacy.secure_normal(len(sums)))
        on_grid(sums.add_(noise, alpha=deviation), deviation)
    if device.type != "cpu":  # in one go
        noisy = noisy.to(kind).to(device)
    each = torch.split(noisy, [parameter.numel() for parameter in parameters])
    gradients = [torch.empty_like(parameter) for parameter in parameters]  # lie in memory alike
    torch._foreach_copy_(
        gradients, [own.view_as(g) for own, g in zip(each, gradients, strict=True)]
    )
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def on_grid(sums: Tensor, deviation: float) -> Tensor:
    """Sums with noise, rounded in place to whole multiples of a power of two.

    Floating-point noise has gaps, and what it is added to shifts them: which numbers can come out
    at all would tell of the rows (Mironov 2012). The grid is wider than these gaps, so that the
    same numbers can come out whatever was summed (but for a chance that docs/privacy.md states). It
    is public: rounding costs no privacy. It moves a sum by at most 2^-17 of the deviation.

    Args:
        sums: float64.
        deviation: of the noise, from 1e-300; or 0, then nothing is rounded.
    """
    if not deviation:
        return sums
    step = GRID * 2.0 ** (math.frexp(deviation)[1] - 1)  # of the power of two below the deviation
    return sums.mul_(1 / step).round_().mul_(step)  # exact: powers of two, none out of range
