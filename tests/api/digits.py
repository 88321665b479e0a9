"""Helpers for the tests of the Python interface: small arrays, a fast config, a network."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from privssl.api.datasets import Dataset

PLAIN = """\
agents: {support: 2, query: 2}
data: {name: toy, labelled: 40, unlabelled: 40}
algorithm: {name: fedssl, rounds: 2, local_steps: 1, batch_size: 8, generator_width: 4, warm_up: 1}
run: {workers: 1}
"""
PRIVATE = """\
agents: {support: 2}
data: {name: toy, labelled: 40}
algorithm: {name: fedavg, rounds: 2}
privacy: {epsilon: 8.0, sample_rate: 0.2, steps: 2}
run: {workers: 1}
"""


def config(folder: Path, text: str = PLAIN) -> Path:
    """A config file."""
    path = folder / "tiny.yaml"
    path.write_text(text)
    return path


def arrays(
    rows: int = 120, shape: tuple[int, ...] = (8, 8), classes: int = 3
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Training rows whose brightness is their class, and 30 test rows."""
    rng = np.random.default_rng(0)
    y = np.arange(rows + 30) % classes
    noise = rng.uniform(0, 0.2, (len(y), *shape))
    x = (noise + y.reshape(-1, *(1 for _ in shape)) / classes * 0.8).astype(np.float32)
    return x[:rows], y[:rows], x[rows:], y[rows:]


def dataset(**more: Any) -> Dataset:
    return Dataset.from_arrays(*arrays(**more))


class Net(nn.Module):
    """A user's network with parts that often cause problems in private runs and other layouts."""

    def __init__(self, shape: tuple[int, int, int], classes: int, hidden: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], hidden, 3, padding=1)
        self.norm = nn.BatchNorm2d(hidden)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(hidden * shape[1] * shape[2], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        logits: Tensor = self.head(x.view(len(x), -1))
        return logits


def plain(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A user's function."""
    return nn.Sequential(nn.Flatten(), nn.Linear(int(torch.Size(shape).numel()), classes))


class Frame:
    """A minimal data frame: the common interface of pandas and polars."""

    def __init__(self, **columns: Any) -> None:
        self._columns = {name.replace("__", " "): list(v) for name, v in columns.items()}
        self.columns = list(self._columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self._columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self._columns
