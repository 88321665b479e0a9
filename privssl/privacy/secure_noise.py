"""Uniform and normal numbers from the system's secure source: never seeded, never stored."""

import math

import numpy as np
import torch

from accounting.secure_random import random_uint64
from privssl.ops import dispatch, gaussian_noise

#: Smaller words give radii beyond 8.1, once in 3 x 10^14 pairs, which need more than 64 bits.
FAR = np.uint64(2**16)


def secure_uniform(count: int) -> np.ndarray:
    """Return ``count`` unpredictable float64 numbers in [0, 1), 53 bits each."""
    return _as_uniform(random_uint64(count))


def round_rate_down(chance: float) -> float:
    """Return a threshold that :func:`secure_uniform` is below with this probability, or up to 2^-53
    less.

    >>> round_rate_down(0.25), round_rate_down(2.0**-54)
    (0.25, 0.0)
    """
    return math.floor(chance * 2.0**53) * 2.0**-53


def secure_normal(count: int) -> np.ndarray:
    """Return ``count`` unpredictable standard normal float64 numbers."""
    half = (count + 1) // 2
    radii, angles = random_uint64(half), random_uint64(half)
    normal = box_muller(radii, angles)
    tail = np.flatnonzero(radii < FAR)
    if len(tail):
        normal[tail], normal[tail + half] = box_muller_tail(
            radii[tail], random_uint64(len(tail)), angles[tail]
        )
    return normal[:count]


def box_muller_tail(
    radii: np.ndarray, more: np.ndarray, angles: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Compute cosines and sines of :func:`box_muller`, each (N,), with 64 more bits of each radius.

    The largest radii from 64 bits have gaps wider than the grid of
    ``noisy_optimizer.rounding_grid``, and end at 9.42. These end at 13.3.

    Args:
        radii, more, angles: random uint64 (N,); radii below ``FAR``.
    """
    uniform = (_as_floats(radii) + (_as_floats(more) + 1.0) * 2.0**-64) * 2.0**-64
    radius, angle = np.sqrt(-2.0 * np.log(uniform)), _as_uniform(angles) * (2.0 * math.pi)
    return np.cos(angle) * radius, np.sin(angle) * radius


def box_muller(radii: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Compute two standard normal float64 numbers for each pair (Box and Muller 1958).

    A radius uses all 64 bits, and the largest, up to 9.42, need more (:func:`box_muller_tail`):
    gaps would reveal the sums that noise is added to. An angle uses 53 bits.

    Args:
        radii, angles: random uint64 (pairs,).

    Returns:
        (2 pairs,): all cosines, then all sines.
    """
    if dispatch.instruction_set() is not None:
        return gaussian_noise.normal(radii, angles)
    uniform = torch.from_numpy(_as_floats(radii)).add_(1.0).mul_(2.0**-64)  # in (0, 1]
    radius = uniform.log_().mul_(-2.0).sqrt_()
    angle = torch.from_numpy(_as_uniform(angles)).mul_(2.0 * math.pi)  # torch is faster than numpy
    normal: np.ndarray = torch.cat([angle.cos().mul_(radius), angle.sin().mul_(radius)]).numpy()
    return normal


def _as_uniform(words: np.ndarray) -> np.ndarray:
    """Return the highest 53 bits, as float64 in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _as_floats(words: np.ndarray) -> np.ndarray:
    """Convert to float64: same result as ``astype(float64)``, three times faster: ``astype``
    branches on the top bit, which is random here."""
    floats: np.ndarray = (words >> np.uint64(11)).astype(np.float64) * 2.0**11
    floats += (words & np.uint64(2**11 - 1)).astype(np.float64)
    return floats
