"""Rows of given classes from a generator alone: mixes at lambda 0, which look at no row."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from generators.base import ConditionalGenerator

AT_ONCE = 250  # rows of one forward pass


@torch.no_grad()
def draw_samples(
    generator: ConditionalGenerator,
    labels: Tensor,
    classes: int,
    shape: Sequence[int],
    rng: torch.Generator,
) -> Tensor:
    """One row of each label: (N, *shape) in [-1, 1], on the generator's device.

    Args:
        generator: its mode is not changed; call ``eval()`` first.
        labels: classes (N,) in 0..classes - 1.
        shape: of a row.
        rng: a CPU generator; row i's noise is row i of one draw (N, noise_size).
    """
    device = next(generator.parameters()).device
    noise = torch.rand(len(labels), generator.noise_size, generator=rng)
    samples = [torch.empty(0, *shape, device=device)]
    for target, z in zip(torch.split(labels, AT_ONCE), torch.split(noise, AT_ONCE), strict=True):
        p = one_hot(target.cpu(), classes).float().to(device)
        blank = torch.zeros(len(p), *shape, device=device)
        lam = torch.zeros(len(p), 1, device=device)
        samples.append(generator(blank, p, p, z.to(device), lam)[:, 0])
    return torch.cat(samples)
