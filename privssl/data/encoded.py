"""Data sets with a frozen encoder, applied once before the first round (``data.encoder``).

Only rows of agents and test rows are encoded. The original rows are kept with the features, because
they identify the record to an account (``canonical.py``).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from privssl.core.agents import Origin
from privssl.encoders import Encoder, encode


@dataclass(frozen=True, eq=False)
class Unencoded:
    """Rows before an encoder, and the encoder."""

    encoder: Encoder
    train: Origin
    test: Origin
    folder: Path  # folder of data sets, with the cache of features
    shape: tuple[int, ...] | None = None  # of an image before the encoder

    def encode(self, rows: Origin) -> Tensor:
        """Return the features of some of the rows, float16."""
        return encode(self.encoder, rows, self.folder)


class HeldRows:
    """The training rows that agents hold, encoded together if there is an encoder."""

    def __init__(
        self, x: Tensor, raw: Unencoded | None, ids: Iterable[int],
        records: tuple[str, ...] | None = None, persons: tuple[str, ...] | None = None,
    ) -> None:  # fmt: skip
        """Set the rows. ``x``: all training rows, without encoder; ``records``: what identifies
        them; ``persons``: whose they are."""
        self._x, self._raw, self._records, self._persons = x, raw, records, persons
        if self._raw is not None:
            held_ids = torch.tensor(sorted(set(ids)), dtype=torch.int64)
            self._place = torch.full((len(self._raw.train),), -1)
            self._place[held_ids] = torch.arange(len(held_ids))
            self._x = self._raw.encode(select(self._raw.train, held_ids))

    def take(self, ids: Tensor) -> tuple[Tensor, Origin | None]:
        """Return copies of rows, and what identifies them to an account if it is not x.

        That is the row before an encoder, or the fields of a table.
        """
        if self._raw is None:  # ``x[ids]`` is ten times slower
            records = None if self._records is None else select(self._records, ids)
            return self._x.index_select(0, ids), records
        return self._x.index_select(0, self._place[ids]), select(self._raw.train, ids)

    def persons_of(self, ids: Tensor) -> tuple[str, ...] | None:
        """Return the person of each of some rows, if known."""
        return None if self._persons is None else tuple(self._persons[i] for i in ids.tolist())


def select(rows: Origin, ids: Tensor) -> Origin:
    """Select some of the rows."""
    return rows[ids] if isinstance(rows, Tensor) else tuple(rows[i] for i in ids.tolist())
