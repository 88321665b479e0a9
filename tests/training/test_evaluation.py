"""Accuracy on held-out rows, and how good the pseudo-labels were."""

import pytest
import torch
from torch import Tensor, nn

from privssl.training.evaluation import Evaluator, HiddenLabelMeter, score

CPU = torch.device("cpu")


class Brightest(nn.Module):
    """Predict the brightest of three pixels, each times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        # without effect if networks are evaluated in evaluation mode
        self.dropout = nn.Dropout(0.99)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.dropout(x.flatten(1) * self.weight)
        return logits


def pictures(*brightest: int) -> Tensor:
    return (255 * torch.eye(3)[list(brightest)]).to(torch.uint8).view(-1, 1, 1, 3)


@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_accuracy_is_the_share_of_correctly_classified_rows(chunk: int) -> None:
    x, y = pictures(0, 1, 2, 2), torch.tensor([0, 1, 2, 1])
    net, upright = Brightest(), {"weight": torch.ones(3)}
    assert score(net, upright, x, y, device=CPU, chunk=chunk).accuracy == 0.75
    # the control: with inverted weights the brightest pixel is predicted last
    upside_down = {"weight": -torch.ones(3)}
    assert score(net, upside_down, x, y, device=CPU, chunk=chunk).accuracy == 0.0


class Counting(Brightest):
    """Count its calls."""

    asked = 0

    def forward(self, x: Tensor) -> Tensor:
        self.asked += 1
        return super().forward(x)


def test_an_evaluator_names_sets_and_classifiers_and_evaluates_equal_weights_once() -> None:
    sets = {
        "test": (pictures(0, 1, 2, 2), torch.tensor([0, 1, 2, 1])),
        "validation": (pictures(0, 1), torch.tensor([0, 1])),
    }
    net = Counting()
    judge = Evaluator(net, sets, CPU)
    upright, upside_down = {"weight": torch.ones(3)}, {"weight": -torch.ones(3)}
    told = judge.accuracies({"accuracy": upright, "accuracy_other": upright})
    right = {"test/accuracy": 0.75, "validation/accuracy": 1.0}
    assert told == right | {"test/accuracy_other": 0.75, "validation/accuracy_other": 1.0}
    assert net.asked == 2  # one pass for each set
    assert judge.accuracies({"accuracy": upright}) == right
    assert net.asked == 2
    # the control: other weights are evaluated, and then the first ones again
    wrong = {"test/accuracy": 0.0, "validation/accuracy": 0.0}
    assert judge.accuracies({"accuracy": upside_down}) == wrong
    assert judge.accuracies({"accuracy": upright}) == right
    assert net.asked == 6


def test_the_meter_measures_coverage_and_accuracy_of_pseudo_labels() -> None:
    oracle = HiddenLabelMeter(torch.tensor([5, 6, 7, 8]))
    kept = torch.tensor([True, True, False])
    oracle.observe(torch.tensor([3, 1, 0]), torch.tensor([8, 0, 5]), kept)  # right, wrong, not kept
    oracle.observe(torch.tensor([2]), torch.tensor([7]), torch.tensor([True]))  # right
    assert oracle.report() == {"pseudo/coverage": 3 / 4, "pseudo/accuracy": 2 / 3}


def test_a_report_resets_the_counts_and_is_empty_without_observations() -> None:
    oracle = HiddenLabelMeter(torch.tensor([5]))
    oracle.observe(torch.tensor([0]), torch.tensor([5]), torch.tensor([True]))
    assert oracle.report() == {"pseudo/coverage": 1.0, "pseudo/accuracy": 1.0}
    assert oracle.report() == {}


def test_without_kept_pseudo_labels_there_is_no_accuracy() -> None:
    oracle = HiddenLabelMeter(torch.tensor([5]))
    oracle.observe(torch.tensor([0]), torch.tensor([5]), torch.tensor([False]))
    assert oracle.report() == {"pseudo/coverage": 0.0}
