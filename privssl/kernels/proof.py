"""Kernels that a guarantee rests on, held against plain arithmetic where the claim is made.

Tests do so at length, on the machine of whoever ran them, and a processor of another generation
runs other code. So each process that trains with noise clips some rows, adds them up, draws noise
and puts it on sums, once, before its first private step. It takes a millisecond or two.
"""

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from privssl import kernels
from privssl.errors import PrivacyError
from privssl.kernels import clipping, noise

CLIP_NORM = 0.5
NUMBERS = (3, 37, 2063)  # of a row, in each parameter: whole vectors and blocks, and what is left
PAIRS = 515  # of words that noise is made of


def refuse_wrong_kernels() -> None:
    """Raises PrivacyError where a kernel that this process would use does not follow its rule."""
    generation = kernels.generation()
    if generation is None or (wrong := _wrong(generation)) is None:
        return
    raise PrivacyError(
        f"privssl's kernel that {wrong} does not do so on this processor ({generation}), so that "
        "no guarantee could rest on it. Set PRIVSSL_KERNELS=torch in the environment, and torch's "
        "kernels do the work; and please tell us of the processor"
    )


@cache
def _wrong(generation: str) -> str | None:
    """What the first of them that is wrong should do."""
    for what, does in (
        ("clips rows", _clips),
        ("draws noise", _draws),
        ("adds noise to sums", _adds_noise),
    ):
        if not does():
            return what
    return None


def _clips() -> bool:
    """Rows short and long, one that is not drawn, and one that is beyond numbers."""
    chance = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-4, 1.0, 1e-2, 3.0, 1e3, 1e-2, 1.0])
    written = [torch.randn(len(sizes), n, generator=chance) * sizes[:, None] for n in NUMBERS]
    left, right = (torch.randn(len(sizes), 1, n, generator=chance) for n in (5, 19))
    written[-1][5, -1] = math.inf
    drawn = torch.tensor([True, False, True, True, True, True, True])
    lines: list[clipping.Lines] = [*((each, None) for each in written), (left, right)]
    factors = clipping.factors(lines, None, drawn, CLIP_NORM)
    totals = clipping.totals(lines, factors)

    products = left.double().mT @ right.double()
    rows = torch.cat([*(each.double() for each in written), products.flatten(1)], dim=1)
    norms = rows.norm(dim=1)
    weights = (CLIP_NORM / (norms + 1e-6)).clamp(max=1.0).where(drawn & norms.isfinite(), 0.0)
    sums = weights @ rows.nan_to_num(posinf=0.0)
    return _near(factors, weights, 1e-5 * weights) and _near(totals, sums, 1e-5 * CLIP_NORM)


def _draws() -> bool:
    """Words from the smallest to the largest."""
    words = np.random.default_rng(0).integers(0, 2**64, (2, PAIRS), dtype=np.uint64)
    words[:, :2] = [0, 2**64 - 1]
    tail = (words[0].astype(np.longdouble) + 1) / 2**64  # in (0, 1]
    radius = np.sqrt(-2 * np.log(tail)).astype(np.float64)
    angle = 2 * math.pi * ((words[1] >> np.uint64(11)).astype(np.float64) / 2**53)
    normal = np.concatenate([np.cos(angle) * radius, np.sin(angle) * radius])
    return bool(np.abs(noise.normal(words[0], words[1]) - normal).max() < 1e-12)


def _adds_noise() -> bool:
    """On a grid, and without one."""
    chance, deviation = torch.Generator().manual_seed(0), 0.7
    sums = [torch.randn(n, generator=chance) for n in NUMBERS]
    drawn = torch.randn(sum(NUMBERS), dtype=torch.float64, generator=chance)
    wanted = torch.cat(sums).double() + deviation * drawn
    for step in (2.0**-17, 0.0):
        noisy = [torch.empty_like(one) for one in sums]
        noise.add(sums, drawn.numpy(), deviation, step, noisy)
        found = torch.cat(noisy)
        on_grid = not step or bool((found / step == (found / step).round()).all())
        # The nearest multiple, give or take the last bit of what is rounded; else float32's.
        if not (on_grid and _near(found, wanted, 0.5 * step + 1e-6)):
            return False
    return True


def _near(found: Tensor, wanted: Tensor, by: Tensor | float) -> bool:
    """NaN is near nothing."""
    return bool(((found.double() - wanted).abs() <= by).all())
