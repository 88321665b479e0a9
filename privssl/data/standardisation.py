"""Detect rows scaled by their own mean and deviation: then one private row changed all others."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEW_ROWS = 20  # fewer rows may have any mean and deviation by chance
NEARLY = 1e-3  # tolerance of mean 0 and deviation 1: rows may be float16


def are_standardised(*parts: NDArray[Any]) -> bool:
    """Return whether most columns of vectors (N, F) have mean 0 and deviation 1 over all parts.

    Then they were scaled by statistics of these rows. Columns of only 1 and -1 do not count.
    Sequences (N, length, F) are tested by column for each number, and by feature over all
    positions.
    """
    if parts and parts[0].ndim == 3:
        by_number = are_standardised(*(x.reshape(len(x), -1) for x in parts))
        by_feature = are_standardised(*(x.reshape(-1, x.shape[2]) for x in parts))
        return by_number or (by_feature and not all(map(_is_each_row_standardised, parts)))
    rows = sum(map(len, parts))
    if rows < FEW_ROWS or any(x.ndim != 2 or x.dtype.kind != "f" for x in parts):
        return False
    total: Any = 0.0  # of each column
    square, binary = total, np.array(True)
    for x in parts:
        for start in range(0, len(x), 4096):
            chunk = x[start : start + 4096].astype(np.float64)
            total, square = total + chunk.sum(axis=0), square + np.square(chunk).sum(axis=0)
            binary = binary & (np.square(chunk) == 1).all(axis=0)
    mean = total / rows
    deviation = np.sqrt(np.maximum(square / rows - np.square(mean), 0))
    near = [abs(deviation * factor - 1) < NEARLY for factor in (1, math.sqrt(rows / (rows - 1)))]
    counted = (deviation > 0) & ~binary
    scaled = counted & (abs(mean) < NEARLY) & (near[0] | near[1])
    return bool(2 * scaled.sum() > counted.sum())


def _is_each_row_standardised(x: NDArray[Any]) -> bool:
    """Return whether in each sequence (length, F) each feature has mean 0, and deviation 1 or 0.

    Then each row was scaled by its own numbers, and no row changed another.
    """
    mean, length = x.mean(axis=1, dtype=np.float64), x.shape[1]
    deviation = x.std(axis=1, dtype=np.float64)
    unbiased = deviation * math.sqrt(length / max(length - 1, 1))
    scaled = (abs(deviation - 1) < NEARLY) | (abs(unbiased - 1) < NEARLY) | (deviation < NEARLY)
    return bool((scaled & (abs(mean) < NEARLY)).all())
