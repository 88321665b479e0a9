"""Opacus' optimiser with noise that no seed repeats: the noisy step of ``privacy.py``.

A file of its own because importing Opacus takes as long as importing torch, and only a visit
under DP-SGD needs it.
"""

import math

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor

from privssl import privacy

GRID = 2.0**-16  # at most, of the noise's deviation: what is released lies so far apart


class SecureNoise(DPOptimizer):  # type: ignore[misc]  # opacus carries no types
    """Opacus' optimiser, with the noise drawn by :func:`privssl.privacy.secure_normal`."""

    def add_noise(self) -> None:
        # In float64, on the CPU (not every device has it): what is released is rounded after the
        # noise. All parameters at once: there are dozens, most of a few numbers.
        sums = torch.cat([parameter.summed_grad.reshape(-1) for parameter in self.params])
        deviation = self.noise_multiplier * self.max_grad_norm
        noise = torch.from_numpy(privacy.secure_normal(len(sums))) * deviation
        noisy = on_grid(sums.to("cpu", torch.float64).add_(noise), deviation)
        sizes = [parameter.numel() for parameter in self.params]
        for parameter, own in zip(self.params, torch.split(noisy, sizes), strict=True):
            # it lies in memory as its parameter does
            parameter.grad = torch.empty_like(parameter).copy_(own.view(parameter.shape))


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
    return sums.div_(step).round_().mul_(step)
