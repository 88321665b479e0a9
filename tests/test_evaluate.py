"""Accuracy on held-out rows, and how good the pseudo-labels were."""

import pytest
import torch
from torch import Tensor, nn

from privssl.evaluate import Oracle, accuracy

CPU = torch.device("cpu")


class Brightest(nn.Module):
    """Says that the class is the brightest of three pixels, each times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.dropout = nn.Dropout(0.99)  # of no effect if networks are judged in evaluation mode

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.dropout(x.flatten(1) * self.weight)
        return logits


def pictures(*brightest: int) -> Tensor:
    return (255 * torch.eye(3)[list(brightest)]).to(torch.uint8).view(-1, 1, 1, 3)


@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_accuracy_is_the_share_of_rows_called_by_their_name(chunk: int) -> None:
    x, y = pictures(0, 1, 2, 2), torch.tensor([0, 1, 2, 1])
    net, upright = Brightest(), {"weight": torch.ones(3)}
    assert accuracy(net, upright, x, y, device=CPU, chunk=chunk) == 0.75
    # the control: with the weights turned round the brightest pixel is called last
    upside_down = {"weight": -torch.ones(3)}
    assert accuracy(net, upside_down, x, y, device=CPU, chunk=chunk) == 0.0


def test_the_meter_counts_what_was_kept_and_what_of_it_was_right() -> None:
    oracle = Oracle(torch.tensor([5, 6, 7, 8]))
    kept = torch.tensor([True, True, False])
    oracle.observe(torch.tensor([3, 1, 0]), torch.tensor([8, 0, 5]), kept)  # right, wrong, not kept
    oracle.observe(torch.tensor([2]), torch.tensor([7]), torch.tensor([True]))  # right
    assert oracle.report() == {"pseudo/coverage": 3 / 4, "pseudo/accuracy": 2 / 3}


def test_a_report_begins_a_new_count_and_nothing_seen_gives_nothing() -> None:
    oracle = Oracle(torch.tensor([5]))
    oracle.observe(torch.tensor([0]), torch.tensor([5]), torch.tensor([True]))
    assert oracle.report() == {"pseudo/coverage": 1.0, "pseudo/accuracy": 1.0}
    assert oracle.report() == {}


def test_if_nothing_is_kept_there_is_no_accuracy_to_speak_of() -> None:
    oracle = Oracle(torch.tensor([5]))
    oracle.observe(torch.tensor([0]), torch.tensor([5]), torch.tensor([False]))
    assert oracle.report() == {"pseudo/coverage": 0.0}
