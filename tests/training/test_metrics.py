"""Metrics beside accuracy, against scikit-learn and against arithmetic by hand."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix, f1_score, log_loss, recall_score
from torch import Tensor, nn

from privssl.training import evaluation
from privssl.training.evaluation import Scores, calibration_error, score

CPU = torch.device("cpu")


class Table(nn.Module):
    """Outputs by row number, which is the single pixel of the row."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[((x.flatten(1)[:, 0] + 1) * 127.5).round().long()]


def scores_of(logits: Tensor, y: Tensor, chunk: int = 256) -> Scores:
    net, x = Table(logits), torch.arange(len(y), dtype=torch.uint8).view(-1, 1, 1, 1)
    return score(net, {"logits": logits}, x, y, device=CPU, chunk=chunk)


def drawn(seed: int, classes: int, absent: int | None = None) -> tuple[Tensor, Tensor]:
    """Random outputs of 200 rows; no row has the class ``absent``."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (200,), generator=rng)
    y[y == absent] = 0
    return 2 * torch.randn(200, classes, generator=rng) + torch.eye(classes)[y], y


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize(("classes", "absent"), [(2, None), (5, None), (5, 3)])
def test_metrics_equal_those_of_scikit_learn(classes: int, absent: int | None, chunk: int) -> None:
    """Macro F1 and recall of the classes that have rows; other classes have no recall."""
    logits, y = drawn(classes, classes, absent)
    found = scores_of(logits, y, chunk)
    called, labels = logits.argmax(dim=1), list(range(classes))
    there = [c for c in labels if c != absent]
    assert (found.confusion[:, :-1] == confusion_matrix(y, called, labels=labels)).all()
    assert found.not_finite == 0
    assert found.accuracy == pytest.approx(float((called == y).float().mean()))
    probs = logits.double().softmax(dim=1)
    assert found.loss == pytest.approx(log_loss(y, probs, labels=labels))
    macro_f1 = f1_score(y, called, labels=there, average="macro", zero_division=0)
    assert found.macro_f1 == pytest.approx(macro_f1)
    recall = recall_score(y, called, labels=there, average=None, zero_division=0)
    assert [found.recall[c] for c in there] == pytest.approx(recall)
    assert absent is None or found.recall[absent] is None
    assert found.calibration_error == pytest.approx(
        plain_error(probs.max(dim=1).values.numpy(), (called == y).numpy())
    )


def plain_error(confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """Guo et al. 2017, Eq. 3, bin by bin: bin m is ((m - 1) / 15, m / 15]."""
    total = 0.0
    for m in range(1, 16):
        rows = [i for i, c in enumerate(confidence) if (m - 1) / 15 < c <= m / 15]
        if rows:
            gap = np.mean([right[i] for i in rows]) - np.mean([confidence[i] for i in rows])
            total += len(rows) / len(confidence) * abs(float(gap))
    return total


def test_calibration_error_by_hand_and_gaps_of_bins_do_not_cancel() -> None:
    """Two rows at 0.9, one right: gap 0.4. Two at 0.6, both right: gap 0.4 the other way."""
    confidence, right = np.array([0.9, 0.9, 0.6, 0.6]), np.array([True, False, True, True])
    assert calibration_error(confidence, right) == pytest.approx(0.4)
    assert abs(right.mean() - confidence.mean()) == pytest.approx(0.0)  # with a single bin
    assert calibration_error(np.ones(3), np.ones(3, dtype=bool)) == 0.0


def test_the_calibration_error_depends_on_the_number_of_bins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: the reference uses 15 bins, and not 10."""
    logits, y = drawn(1, 5)
    confidence = logits.double().softmax(dim=1).max(dim=1).values.numpy()
    right = (logits.argmax(dim=1) == y).numpy()
    assert calibration_error(confidence, right) == pytest.approx(plain_error(confidence, right))
    monkeypatch.setattr(evaluation, "BINS", 10)
    assert calibration_error(confidence, right) != pytest.approx(plain_error(confidence, right))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_with_non_finite_outputs_are_counted_and_wrong(bad: float) -> None:
    """The arg max of NaN is 0, and the rows are of class 0: they would count as right."""
    logits, y = torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 0, 1])
    whole = scores_of(logits, y)
    assert (whole.accuracy, whole.not_finite) == (1.0, 0)
    logits[0, 0] = bad
    found = scores_of(logits, y)
    assert found.confusion.tolist() == [[1, 0, 1], [0, 1, 0]]
    assert (found.accuracy, found.not_finite, found.recall) == (2 / 3, 1, [0.5, 1.0])
    # class 0: 2 * 1 / (2 rows + 1 called); class 1: 1
    assert found.macro_f1 == pytest.approx((2 / 3 + 1) / 2)
    # loss and calibration are those of the two other rows, which have equal outputs
    assert found.loss == pytest.approx(math.log(1 + math.exp(-3)))
    assert found.calibration_error == pytest.approx(1 - 1 / (1 + math.exp(-3)))


def test_without_a_finite_row_there_is_no_loss_and_the_json_is_strict() -> None:
    found = scores_of(torch.full((3, 2), math.nan), torch.tensor([0, 0, 1]))
    assert found.as_json(["a", "b"]) == {
        "loss": None, "macro_f1": 0.0, "recall": {"a": 0.0, "b": 0.0}, "calibration_error": None
    }  # fmt: skip
    assert found.as_curves(["a", "b"]) == {"macro_f1": 0.0, "recall/a": 0.0, "recall/b": 0.0}


def test_outputs_at_the_limits_of_float32_have_a_finite_loss() -> None:
    """Their difference overflows float32."""
    found = scores_of(torch.tensor([[3e38, -3e38], [3e38, -3e38]]), torch.tensor([0, 1]))
    assert found.loss == pytest.approx(3e38)
    assert found.not_finite == 0


@pytest.mark.parametrize(("classes", "curves"), [(20, True), (21, False)])
def test_recalls_are_logged_up_to_twenty_classes_and_always_in_the_results(
    classes: int, curves: bool
) -> None:
    logits, y = drawn(0, classes)
    names = [f"c{number}" for number in range(classes)]
    found = scores_of(logits, y)
    recalls = [name for name in found.as_curves(names) if name.startswith("recall/")]
    assert recalls == ([f"recall/{name}" for name in names] if curves else [])
    assert set(found.as_json(names)["recall"]) == set(names)
