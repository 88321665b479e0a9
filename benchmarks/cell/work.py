"""The work that every framework of ``benchmarks.against_flower_and_pfl`` does.

pfl-research's CIFAR-10 benchmark (apple/pfl-research, benchmarks/image_classification, "simple_cnn"
with IID users): 1,000 agents with 50 images each, 50 of them sampled per round, one local epoch in
batches of 10 by plain SGD (0.1), the mean of their weights. Images are synthetic: one pattern for
each of ten classes, plus noise.

This module does not import privssl: frameworks have their own environments, with torch and numpy.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

AGENTS, ROWS_EACH, PER_ROUND, BATCH, RATE = 1000, 50, 50, 10, 0.1
SHAPE, CLASSES, TEST_ROWS = (3, 32, 32), 10, 1000
#: The constants of ``privssl.training.local_training.network_input``: levels 0..255 to [-1, 1].
MIDDLE, SCALE = 127.5, 127.5


class CellCNN(nn.Module):
    """The network: 1,626,442 parameters. (B, 3, 32, 32) in [-1, 1] -> (B, 10) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(),
            nn.Conv2d(32, 64, 3), nn.ReLU(),
            nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(),
            nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(128, CLASSES),
        )  # fmt: skip
        for layer in self.body:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)
        return logits


def begin() -> dict[str, Tensor]:
    """Return the initial weights of every framework."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CellCNN().state_dict()


def make_rows(folder: Path) -> None:
    """Write the images: x.npy (51000, 3, 32, 32) uint8 and y.npy (51000,) int64.

    The last 1,000 are for tests; agent k has rows 50 k to 50 k + 49.
    """
    rng = np.random.RandomState(0)
    patterns = rng.normal(0, 1, (CLASSES, 3, 8, 8)).repeat(4, axis=2).repeat(4, axis=3)
    count = AGENTS * ROWS_EACH + TEST_ROWS
    y = rng.randint(0, CLASSES, count).astype(np.int64)
    x = np.empty((count, *SHAPE), np.uint8)
    for part in np.array_split(np.arange(count), 51):  # noise needs eight times the memory
        levels = 128 + 25 * patterns[y[part]] + rng.normal(0, 60, (len(part), *SHAPE))
        x[part] = np.clip(levels, 0, 255).astype(np.uint8)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)


def rows(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Map the files of ``make_rows``: processes share unmodified pages."""
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="c") for name in "xy")
    return x, y


def judge(weights: dict[str, Tensor], x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return loss and accuracy on the test rows."""
    network = CellCNN()
    network.load_state_dict({name: value.float() for name, value in weights.items()})
    network.eval()
    with torch.no_grad():
        parts = torch.split(
            torch.from_numpy(x[-TEST_ROWS:]), 50
        )  # small, to not raise the peak of memory
        logits = torch.cat([network(part.float().sub(MIDDLE).div(SCALE)) for part in parts])
        truth = torch.from_numpy(y[-TEST_ROWS:])
        return {
            "loss": float(cross_entropy(logits, truth)),
            "accuracy": float((logits.argmax(dim=1) == truth).float().mean()),
        }


def given() -> tuple[Path, int, str, int]:
    """Parse the command line of a framework: folder, rounds, precision, processes."""
    folder, rounds, precision, processes = sys.argv[1:5]
    return Path(folder), int(rounds), precision, int(processes)
