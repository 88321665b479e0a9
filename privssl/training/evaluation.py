"""Metrics on held-out rows, and quality of pseudo-labels.

Only this module holds true labels of unlabelled rows: steps report their pseudo-labels to the
meter, which returns nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from privssl.core.agents import natural_order
from privssl.core.messages import StateDict
from privssl.training.local_training import load_weights, network_input

CHUNK = 256  # rows of one forward pass, whose activations fit the caches
BINS = 15  # of the calibration error; Guo et al. 2017
MOST_AGENTS = 20  # limit for a curve of each agent's accuracy
MOST_RECALLS = 20  # limit of classes for a curve of each recall


@dataclass(frozen=True, eq=False)
class Scores:
    """Metrics of a classifier's outputs on labelled rows.

    A row is not finite if one of its outputs is NaN or infinite. It counts as wrong, and is
    excluded from loss and calibration error, which are None if there is no other row.
    """

    confusion: NDArray[np.int64]  # (C, C + 1): true class, predicted class; last: not finite
    loss: float | None  # mean cross-entropy, >= 0
    calibration_error: float | None  # in [0, 1]

    @property
    def rows(self) -> int:
        return int(self.confusion.sum())

    @property
    def not_finite(self) -> int:
        """The number of rows whose outputs are not finite."""
        return int(self.confusion[:, -1].sum())

    @property
    def accuracy(self) -> float:
        """The share of rows whose most likely class is the true one."""
        return int(np.trace(self.confusion)) / self.rows

    @property
    def recall(self) -> list[float | None]:
        """The recall of each class; None for a class without rows."""
        pairs = zip(self.confusion.diagonal().tolist(), self.confusion.sum(1).tolist(), strict=True)
        return [correct / rows if rows else None for correct, rows in pairs]

    @property
    def macro_f1(self) -> float:
        """The mean over classes with rows of 2 TP / (2 TP + FP + FN)."""
        correct, actual = self.confusion.diagonal(), self.confusion.sum(axis=1)
        predicted = self.confusion[:, :-1].sum(axis=0)
        present = actual > 0
        return float(np.mean(2 * correct[present] / (actual + predicted)[present]))

    def as_json(self, names: Sequence[str]) -> dict[str, Any]:
        """Return values for results.json; ``names`` of the C classes."""
        return {
            "loss": self.loss,
            "macro_f1": self.macro_f1,
            "recall": dict(zip(names, self.recall, strict=True)),
            "calibration_error": self.calibration_error,
        }

    def as_curves(self, names: Sequence[str]) -> dict[str, float]:
        """Return existing values by name; recalls up to ``MOST_RECALLS`` classes."""
        values = self.as_json(names)
        recall = values.pop("recall")
        if len(names) <= MOST_RECALLS:
            values |= {f"recall/{name}": value for name, value in recall.items()}
        return {name: value for name, value in values.items() if value is not None}


@torch.no_grad()
def score(
    network: nn.Module,
    weights: StateDict,
    x: Tensor,
    y: Tensor,
    *,
    device: torch.device,
    chunk: int = CHUNK,
) -> Scores:
    """Evaluate a classifier, with these weights in ``network``, in one pass.

    x: rows (N, *shape) as stored. y: classes (N,).
    """
    load_weights(network, weights).eval()
    parts: list[tuple[Tensor, ...]] = []
    for rows, classes in zip(torch.split(x, chunk), torch.split(y, chunk), strict=True):
        logits = network(network_input(rows, device)).cpu()
        predicted = logits.argmax(dim=1)
        # float64: the difference of two float32 logits may not be representable in float32.
        log_probs = logits.double().log_softmax(dim=1)
        picked = log_probs.gather(1, torch.stack([classes, predicted], dim=1))
        parts.append((predicted, logits.isfinite().all(dim=1), -picked[:, 0], picked[:, 1].exp()))
    predicted, finite, losses, confidence = (
        torch.cat(part).numpy() for part in zip(*parts, strict=True)
    )
    outputs = logits.shape[1]
    true, width = y.numpy(), outputs + 1
    cells = true * width + np.where(finite, predicted, outputs)
    confusion = np.bincount(cells, minlength=outputs * width).reshape(outputs, width)
    if not finite.any():
        return Scores(confusion, None, None)
    error = calibration_error(confidence[finite], (predicted == true)[finite])
    return Scores(confusion, float(losses[finite].mean()), error)


def calibration_error(confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """Compute the expected calibration error (Guo et al. 2017, Eq. 3), with ``BINS`` equal bins.
    The difference between accuracy and mean confidence in each bin, weighted by its rows. For each
    row (N,): its largest predicted probability, in (0, 1], and whether its class is the true
    one."""
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    gaps = np.bincount(bins, weights=right - confidence, minlength=BINS)
    return float(np.abs(gaps).sum() / len(confidence))


class Evaluator:
    """Scores of classifiers on held-out rows. The same object is evaluated once, because states are
    immutable."""

    def __init__(
        self, network: nn.Module, sets: Mapping[str, tuple[Tensor, Tensor]], device: torch.device
    ) -> None:
        """Set the data. ``sets``: rows and classes as in ``score``, by name."""
        self._network = network.to(device)
        self._sets, self._device = sets, device
        self._last: list[tuple[StateDict, dict[str, Scores]]] = []

    def _score(self, weights: StateDict, name: str) -> Scores:
        x, y = self._sets[name]
        return score(self._network, weights, x, y, device=self._device)

    def scores(self, weights: StateDict) -> Mapping[str, Scores]:
        """Return scores by name of the set."""
        cached = next((scores for state, scores in self._last if state is weights), None)
        if cached is None:
            cached = {name: self._score(weights, name) for name in self._sets}
            self._last.append((weights, cached))
        return cached

    def validation_loss(self, weights: StateDict) -> float | None:
        """Return mean cross-entropy on the set of that name; None without the set or finite
        outputs."""
        return self._score(weights, "validation").loss if "validation" in self._sets else None

    def of_agents(self, own: Mapping[str, StateDict]) -> dict[str, float]:
        """Return accuracy of agents' own networks on the test rows: the mean, and each of a few."""
        accuracies = {
            agent: self._score(own[agent], "test").accuracy
            for agent in sorted(own, key=natural_order)
        }
        if not accuracies:
            return {}
        curves = {f"test/accuracy_own/{agent}": value for agent, value in accuracies.items()}
        mean = {"test/accuracy_own": sum(accuracies.values()) / len(accuracies)}
        return mean | (curves if len(curves) <= MOST_AGENTS else {})

    def accuracies(self, classifiers: Mapping[str, StateDict]) -> dict[str, float]:
        """Return accuracies by ``<set>/<name of the classifier>``; only these stay cached."""
        result = {
            f"{rows}/{name}": scores.accuracy
            for name, weights in classifiers.items()
            for rows, scores in self.scores(weights).items()
        }
        self._last = [
            (state, scores)
            for state, scores in self._last
            if any(state is w for w in classifiers.values())
        ]
        return result

    @torch.no_grad()
    def classes_of(self, weights: StateDict, x: Tensor) -> Tensor:
        """Return the most likely classes (N,) of rows (N, *shape) in [-1, 1], on the CPU."""
        network = load_weights(self._network, weights).eval()
        parts = [
            network(rows.to(self._device)).argmax(dim=1).cpu() for rows in torch.split(x, CHUNK)
        ]
        return torch.cat(parts)


@dataclass
class HiddenLabelMeter:
    """True labels of all training rows, by row id, for metrics only."""

    true_labels: Tensor  # (N,), below 0 if unknown
    _seen: int = field(default=0, init=False)
    _kept: int = field(default=0, init=False)
    _known: int = field(default=0, init=False)  # kept ones with a known label
    _right: int = field(default=0, init=False)

    def observe(self, ids: Tensor, labels: Tensor, kept: Tensor) -> None:
        """Count pseudo-labels: ids (B,), classes (B,), which were used for training (B,)."""
        self._seen += len(ids)
        self._kept += int(kept.sum())
        true = self.true_labels[ids[kept]]
        self._known += int((true >= 0).sum())
        self._right += int((true == labels[kept]).sum())

    def report(self) -> dict[str, float]:
        """Return coverage, and accuracy if labels are known, of pseudo-labels since the last
        report. Empty if there were none."""
        seen, kept, known, correct = self._seen, self._kept, self._known, self._right
        self._seen = self._kept = self._known = self._right = 0
        if not seen:
            return {}
        return {"pseudo/coverage": kept / seen} | (
            {"pseudo/accuracy": correct / known} if known else {}
        )
