"""Test the kernels for clipping and noise, once in each process that trains under DP.

The guarantee depends on them, and other processors run other code than the one that ran the tests.
Plain arithmetic is the reference; it takes one or two milliseconds. tests/ops test independence of
rows.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from privssl.errors import PrivacyError
from privssl.ops import clipping, dispatch, gaussian_noise

CLIP_NORM = 0.5
NUMBERS = (3, 37, 2063)  # elements of each parameter: full vectors and blocks, and remainders
PAIRS = 515  # of random words


def refuse_wrong_kernels() -> None:
    """Raise PrivacyError if a loaded kernel computes a wrong result."""
    instruction_set = dispatch.instruction_set()
    if instruction_set is None or (failed_task := _find_wrong_kernel(instruction_set)) is None:
        return
    raise PrivacyError(
        f"privssl's kernel that {failed_task} computes a wrong result on this processor "
        f"({instruction_set}). Set PRIVSSL_KERNELS=torch in the environment to use torch instead, "
        "and please report the processor"
    )


@cache
def _find_wrong_kernel(instruction_set: str) -> str | None:
    """Name the first wrong kernel by its task."""
    for task, passes in (
        ("clips rows", _is_clipping_correct),
        ("draws noise", _is_normal_correct),
        ("adds noise to sums", _is_noise_correct),
    ):
        if not passes():
            return task
    return None


def _is_clipping_correct() -> bool:
    """Test clipping: short and long rows, one not sampled, one not finite, one long only by
    ``norms``."""
    sizes = _make_tensor([1e-3, 1.0, 1e-2, 3.0, 1e3, 1e-2, 1e-3])
    gradients = [_draw_normal(len(sizes), n, seed=n) * sizes[:, None] for n in NUMBERS]
    left = _draw_normal(len(sizes), 1, 5, seed=5) * sizes[:, None, None]
    right = _draw_normal(len(sizes), 1, 19, seed=19)
    gradients[-1][5, -1] = math.inf
    other_norms = _make_tensor([0.01, 0.0, 0.0, 1.0, 0.0, 0.0, 7.0])
    sampled = _make_tensor([1, 0, 1, 1, 1, 1, 1]) > 0
    inputs: list[clipping.KernelInput] = [*((g, None) for g in gradients), (left, right)]
    factors = clipping.factors(inputs, other_norms, sampled, CLIP_NORM)
    totals = clipping.totals(inputs, factors)

    products = left.double().mT @ right.double()
    rows = torch.cat([*(g.double() for g in gradients), products.flatten(1)], dim=1)
    norms = torch.hypot(rows.norm(dim=1), other_norms.double())
    weights = (CLIP_NORM / (norms + 1e-6)).clamp(max=1.0).where(sampled & norms.isfinite(), 0.0)
    sums = weights @ rows.nan_to_num(posinf=0.0)
    return _are_close(factors, weights, 1e-9 * weights) and _are_close(
        totals, sums, 1e-9 * CLIP_NORM
    )


def _is_normal_correct() -> bool:
    """Test Box-Muller from the smallest to the largest random words."""
    words = np.random.default_rng(0).integers(0, 2**64, (2, PAIRS), dtype=np.uint64)
    words[:, :3] = [[0, 0, 2**64 - 1], [0, 2**64 - 1, 0]]
    tail = (words[0].astype(np.longdouble) + 1) * 2.0**-64  # in (0, 1]
    radius = np.sqrt(-2 * np.log(tail)).astype(np.float64)
    angle = 2 * math.pi * ((words[1] >> np.uint64(11)).astype(np.float64) / 2**53)
    normal = np.concatenate([np.cos(angle) * radius, np.sin(angle) * radius])
    return bool(np.abs(gaussian_noise.normal(words[0], words[1]) - normal).max() < 1e-12)


def _is_noise_correct() -> bool:
    """Test noise with and without rounding."""
    sums, deviation = [_draw_normal(n, seed=n).double() for n in NUMBERS], 0.7
    noise = _draw_normal(sum(NUMBERS), seed=0).double()
    expected = torch.cat(sums) + deviation * noise
    for step in (2.0**-17, 0.0):
        noisy = [torch.empty_like(s, dtype=torch.float32) for s in sums]
        gaussian_noise.add(sums, noise.numpy(), deviation, step, noisy)
        result = torch.cat(noisy)
        on_grid = not step or bool((result / step == (result / step).round()).all())
        # The nearest multiple, up to the last bit before rounding; otherwise float32's.
        if not (on_grid and _are_close(result, expected, 0.5 * step + 1e-6)):
            return False
    return True


def _draw_normal(*shape: int, seed: int) -> Tensor:
    """Return reproducible normal numbers."""
    samples = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(samples)


def _make_tensor(values: Sequence[float]) -> Tensor:
    """Return float32 on the CPU, whatever torch's defaults."""
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _are_close(actual: Tensor, expected: Tensor, tolerance: Tensor | float) -> bool:
    """Return whether all numbers are close; false for NaN."""
    return bool(((actual.double() - expected).abs() <= tolerance).all())
