"""Opacus' optimiser with secure noise: the noisy step of ``privacy/dp_sgd.py``.

Only visits under DP-SGD import it, because importing Opacus takes as long as torch.
"""

import math
from collections.abc import Sequence

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor

from privssl.ops import dispatch
from privssl.ops import gaussian_noise as kernel
from privssl.privacy import secure_noise

GRID = 2.0**-16  # largest rounding grid, as a share of the noise's deviation


class SecureNoiseOptimizer(DPOptimizer):  # type: ignore[misc]  # opacus carries no types
    """Opacus' optimiser with noise from :func:`privssl.privacy.secure_noise.secure_normal`."""

    def add_noise(self) -> None:
        add_noise([self])


def add_noise(optimisers: Sequence[SecureNoiseOptimizer]) -> None:
    """Add noise to the sums of one or several agents, and set them as parameters' gradients.

    Computed in float64 on the CPU (not every device has it), and rounded after the noise.
    """
    parameters = [parameter for optimiser in optimisers for parameter in optimiser.params]
    if all(dispatch.available_for(p) and p.summed_grad.is_cpu for p in parameters):
        for optimiser in optimisers:
            _add_by_kernel(optimiser)
    else:
        _add_by_torch(optimisers)


def _add_by_kernel(optimiser: SecureNoiseOptimizer) -> None:
    sums, gradients = list[Tensor](), list[Tensor]()
    for parameter in optimiser.params:
        gradient = torch.empty_like(parameter)
        summed = torch.empty_like(gradient, dtype=torch.float64)  # same strides
        total = parameter.summed_grad
        same_layout = (total.dtype, total.stride()) == (summed.dtype, summed.stride())
        sums.append(total if same_layout else summed.copy_(total))
        gradients.append(gradient)
    deviation = _stddev(optimiser)
    noise = secure_noise.secure_normal(sum(tensor.numel() for tensor in sums))
    kernel.add(sums, noise, deviation, rounding_grid(deviation), gradients)
    for parameter, gradient in zip(optimiser.params, gradients, strict=True):
        parameter.grad = gradient  # only after noise is added


def _add_by_torch(optimisers: Sequence[SecureNoiseOptimizer]) -> None:
    """Add noise to all parameters at once: there are dozens of small ones."""
    parameters = [parameter for optimiser in optimisers for parameter in optimiser.params]
    noisy = torch.cat([parameter.summed_grad.reshape(-1) for parameter in parameters])
    device, dtype = parameters[0].device, parameters[0].dtype
    noisy = noisy.to("cpu", torch.float64)
    sizes = [sum(parameter.numel() for parameter in optimiser.params) for optimiser in optimisers]
    for optimiser, sums in zip(optimisers, torch.split(noisy, sizes), strict=True):
        deviation = _stddev(optimiser)
        sums.add_(torch.from_numpy(secure_noise.secure_normal(len(sums))), alpha=deviation)
        if step := rounding_grid(deviation):
            sums.mul_(1 / step).round_().mul_(step)  # exact: powers of two within range
    if device.type != "cpu":
        noisy = noisy.to(dtype).to(device)
    chunks = torch.split(noisy, [parameter.numel() for parameter in parameters])
    gradients = [torch.empty_like(parameter) for parameter in parameters]  # same strides
    torch._foreach_copy_(
        gradients, [chunk.view_as(g) for chunk, g in zip(chunks, gradients, strict=True)]
    )
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _stddev(optimiser: SecureNoiseOptimizer) -> float:
    return float(optimiser.noise_multiplier * optimiser.max_grad_norm)


def rounding_grid(deviation: float) -> float:
    """Return the power of two to whose multiples sums with noise of this deviation are rounded.

    The gaps of floating-point noise depend on the sum that it is added to, so the set of possible
    outputs would reveal rows (Mironov 2012). The grid is wider than the gaps, so the same outputs
    are possible for every sum (up to a probability that docs/dp_sgd.md states). Rounding costs no
    privacy and moves a sum by at most 2^-17 of the deviation.

    Args:
        deviation: >= 1e-300; or 0: no rounding, the result is 0.
    """
    return GRID * 2.0 ** (math.frexp(deviation)[1] - 1) if deviation else 0.0
