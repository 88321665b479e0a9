"""Opacus' optimiser with noise that no seed repeats: the noisy step of ``privacy.py``.

A file of its own because importing Opacus takes as long as importing torch, and only a visit
under DP-SGD needs it.
"""

import torch
from opacus.optimizers import DPOptimizer

from privssl import privacy


class SecureNoise(DPOptimizer):  # type: ignore[misc]  # opacus carries no types
    """Opacus' optimiser, with the noise drawn by :func:`privssl.privacy.secure_normal`."""

    def add_noise(self) -> None:
        sizes = [parameter.numel() for parameter in self.params]
        noise = torch.from_numpy(privacy.secure_normal(sum(sizes)))
        noise *= self.noise_multiplier * self.max_grad_norm
        for parameter, own in zip(self.params, torch.split(noise, sizes), strict=True):
            # The sum is taken in float64, on the CPU (not every device has it): what is released
            # is rounded after the noise.
            noisy = parameter.summed_grad.cpu().double().add_(own.view(parameter.shape))
            parameter.grad = noisy.to(parameter.device, parameter.dtype)
