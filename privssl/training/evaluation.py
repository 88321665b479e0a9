"""Accuracy on held-out rows, and quality of pseudo-labels. Only this module holds true labels of
unlabelled rows: steps report their pseudo-labels to the meter and get nothing back."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from privssl.core.messages import StateDict
from privssl.training.local_training import load_weights, network_input

CHUNK = 256  # rows of one forward pass: their activations stay in the caches


@torch.no_grad()
def accuracy(
    network: nn.Module,
    weights: StateDict,
    x: Tensor,
    y: Tensor,
    *,
    device: torch.device,
    chunk: int = CHUNK,
) -> float:
    """Share of rows whose most likely class is the true one, in [0, 1].

    Args:
        network: of the right architecture; its weights are replaced.
        x: rows (N, *shape) as stored: uint8 or float32 in [0, 1].
        y: classes (N,).
    """
    load_weights(network, weights).eval()
    right = 0
    for rows, classes in zip(torch.split(x, chunk), torch.split(y, chunk), strict=True):
        right += int((network(network_input(rows, device)).argmax(dim=1).cpu() == classes).sum())
    return right / len(y)


class Evaluator:
    """Accuracies of classifiers on held-out rows. Unchanged classifiers (the same object) are
    evaluated once: a state is never written to."""

    def __init__(
        self,
        network: nn.Module,
        sets: Mapping[str, tuple[Tensor, Tensor]],
        device: torch.device,
    ) -> None:
        """``sets``: rows and classes as in ``accuracy``, by name."""
        self._network = network.to(device)
        self._sets, self._device = sets, device
        self._last: list[tuple[StateDict, dict[str, float]]] = []

    def accuracies(self, classifiers: Mapping[str, StateDict]) -> dict[str, float]:
        """By ``<set>/<name of the classifier>``."""
        seen, self._last = self._last, []
        found: dict[str, float] = {}
        for name, weights in classifiers.items():
            known = next((k for w, k in seen + self._last if w is weights), None)
            if known is None:
                known = {rows: self._share(weights, x, y) for rows, (x, y) in self._sets.items()}
            self._last.append((weights, known))
            found |= {f"{rows}/{name}": value for rows, value in known.items()}
        return found

    @torch.no_grad()
    def classes_of(self, weights: StateDict, x: Tensor) -> Tensor:
        """The most likely classes (N,) of rows (N, *shape) in [-1, 1], on the CPU."""
        network = load_weights(self._network, weights).eval()
        parts = [
            network(rows.to(self._device)).argmax(dim=1).cpu() for rows in torch.split(x, CHUNK)
        ]
        return torch.cat(parts)

    def _share(self, weights: StateDict, x: Tensor, y: Tensor) -> float:
        return accuracy(self._network, weights, x, y, device=self._device)


@dataclass
class HiddenLabelMeter:
    """True labels of all training rows, by row id. Feeds metrics only."""

    true_labels: Tensor  # (N,), below 0 where unknown
    _seen: int = field(default=0, init=False)
    _kept: int = field(default=0, init=False)
    _known: int = field(default=0, init=False)  # of those kept
    _right: int = field(default=0, init=False)

    def observe(self, ids: Tensor, labels: Tensor, kept: Tensor) -> None:
        """Count pseudo-labels: ids (B,), classes (B,), which were used for training (B,)."""
        self._seen += len(ids)
        self._kept += int(kept.sum())
        true = self.true_labels[ids[kept]]
        self._known += int((true >= 0).sum())
        self._right += int((true == labels[kept]).sum())

    def report(self) -> dict[str, float]:
        """Coverage, and accuracy where the truth is known, of the pseudo-labels since the last
        report; empty if there were none."""
        seen, kept, known, right = self._seen, self._kept, self._known, self._right
        self._seen = self._kept = self._known = self._right = 0
        if not seen:
            return {}
        return {"pseudo/coverage": kept / seen} | (
            {"pseudo/accuracy": right / known} if known else {}
        )
