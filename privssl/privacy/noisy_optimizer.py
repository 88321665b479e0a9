"""Opacus' optimiser with noise that no seed repeats: the noisy step of ``privacy/dp_sgd.py``.

A file of its own because importing Opacus takes as long as importing torch, and only a visit
under DP-SGD needs it.
"""

import math
from collections.abc import Sequence

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor

from privssl.ops import dispatch
from privssl.ops import gaussian_noise as kernel
from privssl.privacy import secure_noise

GRID = 2.0**-16  # at most, of the noise's deviation: what is released lies so far apart


class SecureNoise(DPOptimizer):  # type: ignore[misc]  # opacus carries no types
    """Opacus' optimiser, with the noise drawn by
    :func:`privssl.privacy.secure_noise.secure_normal`."""

    def add_noise(self) -> None:
        add_noise([self])


def add_noise(optimisers: Sequence[SecureNoise]) -> None:
    """Noise on the sums of one agent or of several, each with its own, as gradients of parameters.

    In float64, on the CPU (not every device has it): what is released is rounded after the noise.
    """
    parameters = [parameter for one in optimisers for parameter in one.params]
    if all(dispatch.available_for(p) and p.summed_grad.is_cpu for p in parameters):
        for one in optimisers:
            _add_by_kernel(one)
    else:
        _add_by_torch(optimisers)


def _add_by_kernel(optimiser: SecureNoise) -> None:
    sums, gradients = list[Tensor](), list[Tensor]()
    for parameter in optimiser.params:
        gradient = torch.empty_like(parameter)
        summed = torch.empty_like(gradient, dtype=torch.float64)  # lie in memory alike
        own = parameter.summed_grad
        there = (own.dtype, own.stride()) == (summed.dtype, summed.stride())
        sums.append(own if there else summed.copy_(own))
        gradients.append(gradient)
    deviation = _stddev(optimiser)
    noise = secure_noise.secure_normal(sum(one.numel() for one in sums))
    kernel.add(sums, noise, deviation, rounding_grid(deviation), gradients)
    for parameter, gradient in zip(optimiser.params, gradients, strict=True):
        parameter.grad = gradient  # not before there is noise on it


def _add_by_torch(optimisers: Sequence[SecureNoise]) -> None:
    """All parameters at once: there are dozens, most of few numbers, and a device is waited for."""
    parameters = [parameter for one in optimisers for parameter in one.params]
    noisy = torch.cat([parameter.summed_grad.reshape(-1) for parameter in parameters])
    device, kind = parameters[0].device, parameters[0].dtype
    noisy = noisy.to("cpu", torch.float64)
    sizes = [sum(parameter.numel() for parameter in one.params) for one in optimisers]
    for one, sums in zip(optimisers, torch.split(noisy, sizes), strict=True):
        deviation = _stddev(one)
        sums.add_(torch.from_numpy(secure_noise.secure_normal(len(sums))), alpha=deviation)
        if step := rounding_grid(deviation):
            sums.mul_(1 / step).round_().mul_(step)  # exact: powers of two, none out of range
    if device.type != "cpu":  # in one go
        noisy = noisy.to(kind).to(device)
    each = torch.split(noisy, [parameter.numel() for parameter in parameters])
    gradients = [torch.empty_like(parameter) for parameter in parameters]  # lie in memory alike
    torch._foreach_copy_(
        gradients, [own.view_as(g) for own, g in zip(each, gradients, strict=True)]
    )
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _stddev(optimiser: SecureNoise) -> float:
    return float(optimiser.noise_multiplier * optimiser.max_grad_norm)


def rounding_grid(deviation: float) -> float:
    """Sums with noise of this deviation are rounded to whole multiples of it, a power of two.

    Floating-point noise has gaps, and what it is added to shifts them: which numbers can come out
    at all would tell of the rows (Mironov 2012). The grid is wider than these gaps, so that the
    same numbers can come out whatever was summed (but for a chance that docs/privacy.md states). It
    is public: rounding costs no privacy. It moves a sum by at most 2^-17 of the deviation.

    Args:
        deviation: from 1e-300; or 0: then nothing is rounded, and the result is 0.
    """
    return GRID * 2.0 ** (math.frexp(deviation)[1] - 1) if deviation else 0.0
