"""The content of a row, independent of its file: equal contents are one row to an account.

An image as PNG or NPZ, uint8 or float, grey or RGB with three equal channels has one content: its
8-bit levels, rounded if floats lie between (digits of 17 shades, divided by 16). The content of
vectors and sequences is the flat float32 network input, so a time series has the same content as a
sequence and as a vector.

Registries of version 0.1 have fingerprints of rows as loaded (``as_loaded``); both are checked.
"""

import html
import unicodedata
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from privssl.core.agents import LabelledRows, Origin, UnlabelledRows
from privssl.core.rows import network_input

CHUNK = 1024  # rows at a time, to bound the memory
# In levels of 1/255. Half-precision floats are off by up to 0.06; other floats are further from
# integer levels in some pixel.
TOLERANCE = 1 / 8
#: Least range of levels for which floats are rounded to 8 bits: rows of few shades, such as bytes
#: divided by 255 twice, would become equal.
CONTRAST = 16


def contents_of(rows: LabelledRows | UnlabelledRows) -> Iterator[bytes]:
    """Yield the content of each row of an agent, and the name of each person whose rows they are;
    for an encoded row, that before the encoder."""
    yield from canonical(rows.x if rows.origin is None else rows.origin)
    yield from (b"person " + name.encode() for name in dict.fromkeys(rows.persons or ()))


def as_loaded_of(rows: LabelledRows | UnlabelledRows) -> Iterator[bytes]:
    """Yield the content by version 0.1, which had no encoders."""
    yield from as_loaded(rows.x) if rows.origin is None else contents_of(rows)


def canonical(x: Origin) -> Iterator[bytes]:
    """Yield the content of each row.

    Rows with the same nearest levels share it: an account then refuses one of them, which is sound.
    Rows between levels that span fewer than ``CONTRAST`` keep their float32 bits.

    Args:
        x: texts, or (N, *shape). Images: uint8 in 0..255, or floats in [0, 1]; a row with a
            negative value is read as one in [-1, 1].
    """
    if not isinstance(x, Tensor):
        for text in x:  # normalise typing and spaces
            while (unescaped := html.unescape(text)) != text:  # tweets are read likewise
                text = unescaped
            yield b"text " + " ".join(unicodedata.normalize("NFC", text).split()).encode()
        return
    for start in range(0, len(x) if x.dim() < 4 else 0, CHUNK):
        for row in (network_input(x[start : start + CHUNK].cpu()) + 0.0).numpy():  # no -0.0
            yield _as_bytes(row.reshape(-1))
    for start in range(0, len(x) if x.dim() == 4 else 0, CHUNK):
        for row in _convert_to_levels(x[start : start + CHUNK].cpu().numpy()):
            yield _as_bytes(row[:1] if (row == row[:1]).all() else row)


def as_loaded(x: Tensor) -> Iterator[bytes]:
    """Yield the content of each row by version 0.1: type, shape and bytes as loaded."""
    return (_as_bytes(row) for row in x.cpu().numpy())


def _as_bytes(row: NDArray[Any]) -> bytes:
    return f"torch.{row.dtype} {row.shape} ".encode() + row.tobytes()


def _convert_to_levels(x: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield each row (channels, height, width) as uint8 levels if it is close to them or has enough
    contrast, else as float32."""
    if x.dtype == np.uint8:
        yield from x
        return
    values = x.astype(np.float32)
    negative = (values < 0).any(axis=(1, 2, 3))
    values[negative] = (values[negative] + 1) / 2
    scaled = values * 255
    levels = scaled.round()
    near_integer = np.all(abs(scaled - levels) <= TOLERANCE, axis=(1, 2, 3))
    clear = np.ptp(scaled, axis=(1, 2, 3)) >= CONTRAST
    for row, level, as_levels in zip(values, levels, (near_integer | clear).tolist(), strict=True):
        yield level.astype(np.uint8) if as_levels else row
