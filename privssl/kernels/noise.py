"""Normal numbers from random words: ``noise.cpp``. When: ``privacy.box_muller``."""

import ctypes
from functools import cache

import numpy as np
from numpy.typing import NDArray

from privssl import kernels


def normal(radii: NDArray[np.uint64], angles: NDArray[np.uint64]) -> NDArray[np.float64]:
    """What ``privacy.box_muller`` says, to 2e-15; who calls has asked for ``kernels.generation``.

    Args:
        radii, angles: words (pairs,).

    Returns:
        (2 pairs,).
    """
    radii, angles = (np.ascontiguousarray(words, dtype=np.uint64) for words in (radii, angles))
    if radii.shape != angles.shape or radii.ndim != 1:
        raise ValueError(f"radii {radii.shape} and angles {angles.shape} are not (pairs,) both")
    made = np.empty(2 * len(radii))
    library = _functions(kernels.generation() or "")
    assert library is not None
    library.noise_normal(len(radii), radii.ctypes.data, angles.ctypes.data, made.ctypes.data)
    return made


@cache
def _functions(generation: str) -> ctypes.CDLL | None:
    library = kernels.library("noise", generation)
    if library is not None:
        library.noise_normal.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 3]
        library.noise_normal.restype = None
    return library
