"""Uniform and normal numbers from the system's secure source: never seeded, never stored."""

import math

import numpy as np
import torch

from accounting.secure_random import random_uint64
from privssl.ops import dispatch, gaussian_noise


def secure_uniform(count: int) -> np.ndarray:
    """``count`` float64 numbers in [0, 1), 53 bits each, that nobody can foretell."""
    return _as_uniform(random_uint64(count))


def secure_normal(count: int) -> np.ndarray:
    """``count`` standard normal float64 numbers that nobody can foretell."""
    half = (count + 1) // 2
    return box_muller(random_uint64(half), random_uint64(half))[:count]


def box_muller(radii: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Two standard normal float64 numbers of each pair of words (Box and Muller 1958).

    A radius is made of all 64 bits of a word: of 53 the largest would lie so far apart that two
    numbers of one radius could tell what was added to them. None is larger than 9.42. Of an angle
    53 bits count.

    Args:
        radii, angles: uint64 (pairs,).

    Returns:
        (2 pairs,): all cosines, then all sines.
    """
    if dispatch.instruction_set() is not None:
        return gaussian_noise.normal(radii, angles)
    tail = torch.from_numpy(_as_floats(radii)).add_(1.0).mul_(2.0**-64)  # in (0, 1]
    radius = tail.log_().mul_(-2.0).sqrt_()
    angle = torch.from_numpy(_as_uniform(angles)).mul_(2.0 * math.pi)  # torch is faster than numpy
    normal: np.ndarray = torch.cat([angle.cos().mul_(radius), angle.sin().mul_(radius)]).numpy()
    return normal


def _as_uniform(words: np.ndarray) -> np.ndarray:
    """Their highest 53 bits, as float64 in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _as_floats(words: np.ndarray) -> np.ndarray:
    """Words as the float64 numbers that are nearest to them: what ``astype`` says, in a third of
    the time. It branches on a word's highest bit, which no processor can guess of coins."""
    floats: np.ndarray = (words >> np.uint64(11)).astype(np.float64) * 2.0**11
    floats += (words & np.uint64(2**11 - 1)).astype(np.float64)
    return floats
