"""Classifiers: shapes, sizes, and that no row of a batch can be seen from another."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.testing import assert_close

from privssl.errors import DataError
from privssl.models import CLASSIFIERS, build_classifier
from privssl.privacy import call, frozen
from privssl.seeds import seeded, stream
from privssl.settings import ModelSettings

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]
every_classifier = pytest.mark.parametrize("name", CLASSIFIERS)


def classifier(
    name: str, shape: tuple[int, int, int] = (1, 8, 8), *, width: int = 4, norm: str = "group"
) -> nn.Module:
    settings: Any = {"name": name, "width": width, "norm": norm}
    with seeded(stream(0, 0, "world", "model")):
        return build_classifier(ModelSettings(**settings), shape, 10)


def rows(count: int, shape: tuple[int, int, int] = (1, 8, 8)) -> Tensor:
    return 2 * torch.rand(count, *shape, generator=stream(0, 0, "world", "rows")) - 1


def size(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def moved(x: Tensor, row: int) -> Tensor:
    """The batch with one row turned upside down and dimmed."""
    other = x.clone()
    other[row] = -0.5 * other[row].flip(-1) + 0.1
    return other


# Shapes and sizes ---------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
@pytest.mark.parametrize("shape", SHAPES)
@every_classifier
def test_a_classifier_gives_a_number_per_row_and_class(
    name: str, shape: tuple[int, int, int], norm: str
) -> None:
    logits = classifier(name, shape, norm=norm)(rows(3, shape))
    assert logits.shape == (3, 10)
    assert bool(logits.isfinite().all())


@every_classifier
def test_rows_too_small_to_be_halved_three_times_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"7x8 pixels, and {name} needs at least 8x8"):
        classifier(name, (1, 7, 8))


def test_the_small_cnn_has_the_size_that_the_specification_counts() -> None:
    # convolutions (5*5*1+1)*16, (3*3*16+1)*32, (3*3*32+1)*64; norms 2*(16+32+64); head
    # (64*3*3+1)*10: 28 pixels are halved to 14, 7, 3
    assert 26 * 16 + 145 * 32 + 289 * 64 + 224 + 577 * 10 == 29_546
    assert size(classifier("small_cnn", (1, 28, 28), width=16)) == 29_546


def test_lenet_has_the_size_of_lenet_5_where_nothing_is_normalised() -> None:
    # LeCun et al. 1998 with full connections: 156 + 2,416 + 48,120 + 10,164 + 850
    assert size(classifier("lenet", (1, 28, 28), width=16, norm="none")) == 61_706


# Rows are strangers -------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["group", "none"])
@every_classifier
def test_a_row_does_not_change_what_is_said_of_another(name: str, norm: str) -> None:
    network, x = classifier(name, norm=norm).train(), rows(4)
    before, after = network(x), network(moved(x, 2))
    others = torch.tensor([0, 1, 3])
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[2], after[2])  # the control: the row itself was seen


@every_classifier
def test_batch_norm_couples_rows_and_would_be_noticed(name: str) -> None:
    network, x = classifier(name, norm="batch").train(), rows(4)
    before, after = network(x), network(moved(x, 2))
    assert float((before - after)[0].abs().max().detach()) > 1e-4


@every_classifier
def test_a_batch_is_its_rows_one_at_a_time(name: str) -> None:
    network, x = classifier(name), rows(4)
    batch = network(x)
    assert_close(torch.cat([network(row[None]) for row in x]), batch)
    parameters: dict[str, Tensor] = dict(network.named_parameters())
    one = vmap(lambda row: functional_call(network, parameters, (row[None],))[0])
    assert_close(one(x), batch)


# Networks as functions ----------------------------------------------------------------------


def test_a_network_can_be_called_with_other_parameters_than_its_own() -> None:
    network = nn.Linear(2, 1)
    other = {"weight": torch.tensor([[2.0, 3.0]]), "bias": torch.tensor([1.0])}
    assert call(network, other)(torch.tensor([[1.0, 1.0]])).item() == 6.0  # 2 + 3 + 1


def test_through_a_frozen_network_gradients_flow_but_not_into_it() -> None:
    network, x = nn.Linear(2, 1), torch.ones(1, 2, requires_grad=True)
    frozen(network)(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and torch.equal(x.grad, network.weight.detach())
    weight: Tensor = network.weight
    assert weight.grad is None
    network(x).sum().backward()  # the control: the network itself gets one
    assert weight.grad is not None
