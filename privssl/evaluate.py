"""Measuring: accuracy on held-out rows, and how good the pseudo-labels are.

The true labels of unlabelled rows live here and nowhere else. Steps can tell the meter what
they guessed; nothing tells a step what was true.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from privssl.learn import load, network_input
from privssl.messages import StateDict


@torch.no_grad()
def accuracy(
    network: nn.Module,
    weights: StateDict,
    x: Tensor,
    y: Tensor,
    *,
    device: torch.device,
    chunk: int = 1000,
) -> float:
    """Share of rows whose most likely class is the true one, in [0, 1].

    Args:
        network: of the right architecture; its weights are replaced.
        x: rows (N, *shape) as stored: uint8 or float32 in [0, 1].
        y: classes (N,).
    """
    load(network, weights).eval()
    right = 0
    for rows, classes in zip(torch.split(x, chunk), torch.split(y, chunk), strict=True):
        right += int((network(network_input(rows, device)).argmax(dim=1).cpu() == classes).sum())
    return right / len(y)


@dataclass
class Oracle:
    """True labels of all training rows, by row id. Feeds metrics only."""

    true_labels: Tensor  # (N,)
    _seen: int = field(default=0, init=False)
    _kept: int = field(default=0, init=False)
    _right: int = field(default=0, init=False)

    def observe(self, ids: Tensor, labels: Tensor, kept: Tensor) -> None:
        """Count guesses: ids (B,), guessed classes (B,), which were used for training (B,)."""
        self._seen += len(ids)
        self._kept += int(kept.sum())
        self._right += int((self.true_labels[ids[kept]] == labels[kept]).sum())

    def report(self) -> dict[str, float]:
        """Coverage and accuracy of the guesses since the last report; empty when none came."""
        seen, kept, right = self._seen, self._kept, self._right
        self._seen = self._kept = self._right = 0
        if not seen:
            return {}
        return {"pseudo/coverage": kept / seen} | (
            {"pseudo/accuracy": right / kept} if kept else {}
        )
