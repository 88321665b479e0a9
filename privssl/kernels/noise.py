"""Normal numbers from random words: ``noise.cpp``. When: ``privacy.box_muller``."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from privssl import kernels

_NORMAL = kernels.function("noise_normal", ctypes.c_int64, *[ctypes.c_void_p] * 3)


def normal(radii: NDArray[np.uint64], angles: NDArray[np.uint64]) -> NDArray[np.float64]:
    """What ``privacy.box_muller`` says, within 8e-15; where there is a kernel.

    Args:
        radii, angles: words (pairs,).

    Returns:
        (2 pairs,).
    """
    radii, angles = (np.ascontiguousarray(words, dtype=np.uint64) for words in (radii, angles))
    if radii.shape != angles.shape or radii.ndim != 1:
        raise ValueError(f"radii {radii.shape} and angles {angles.shape} are not (pairs,) both")
    made = np.empty(2 * len(radii))
    _NORMAL(kernels.generation())(len(radii), *(a.ctypes.data for a in (radii, angles, made)))
    return made
