"""A data set, and a rule that divides rows among agents."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import privssl
from privssl.data.partition import Ints, Partition


def stripes(root: Path) -> privssl.Dataset:
    """Images of 8x8 pixels with stripes in three directions; another data set reads ``root``."""
    rng = np.random.default_rng(0)
    y = np.arange(600) % 3
    across, down = np.meshgrid(np.arange(8), np.arange(8))
    waves = np.stack([np.sin(across), np.sin(down), np.sin(across + down)])  # (3, 8, 8)
    x = 0.5 + 0.3 * waves[y] + rng.normal(0, 0.15, (600, 8, 8))
    x = x.clip(0, 1)
    names = ["upright", "flat", "slanted"]
    return privssl.Dataset.from_arrays(x[:480], y[:480], x[480:], y[480:], class_names=names)


@dataclass(frozen=True)
class Sizes(Partition):
    """Agent a gets about ``alpha`` times as many rows as agent a-1, of any class."""

    alpha: float = 1.5

    def divide(self, labels: Ints, agents: int, rng: np.random.Generator) -> list[Ints]:
        """Row numbers of each agent; labels (N,)."""
        shares = self.alpha ** np.arange(agents)
        ends = np.round(np.cumsum(shares)[:-1] / shares.sum() * len(labels)).astype(np.int64)
        return list(np.split(rng.permutation(len(labels)), ends))
