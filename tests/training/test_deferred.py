"""A network as a function of its parameters: ``deferred.FunctionalModule``."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from privssl.training.batched import deferred
from privssl.training.batched.deferred import FunctionalModule


class Tied(nn.Module):
    """One weight under two names, one buffer, and a layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.again(self.second(self.first(x))) + self.shift
        return found


def others(network: nn.Module) -> dict[str, Tensor]:
    """Other parameters and buffers for it."""
    own = (*network.named_parameters(), *network.named_buffers())
    return {name: torch.randn_like(tensor) for name, tensor in own}


def by_torch(network: nn.Module, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """The result of a copy: torch 2.14 leaves two weights in a network whose names shared one."""
    found: Tensor = functional_call(copy.deepcopy(network), tensors, (x,))
    return found


def test_other_tensors_are_used_under_every_name_of_a_shared_parameter() -> None:
    network, x = Tied(), torch.randn(2, 3)
    tensors, own = others(network), network(x)
    assert sorted(tensors) == ["first.bias", "first.weight", "shift"]
    expected = by_torch(network, tensors, x)
    assert torch.equal(FunctionalModule(network, tensors)(x), expected)
    assert not torch.equal(own, expected)
    assert torch.equal(network(x), own)  # and are removed afterwards
    assert network.second.weight is network.first.weight
    # The same with another of its names.
    tensors["second.weight"] = tensors.pop("first.weight")
    assert torch.equal(FunctionalModule(network, tensors)(x), expected)


def test_tensors_that_are_not_given_stay_those_of_the_network() -> None:
    network, x = Tied(), torch.randn(2, 3)
    some = {"shift": torch.zeros(3)}
    assert torch.equal(FunctionalModule(network, some)(x), by_torch(network, some, x))


def test_a_network_has_its_own_tensors_again_after_an_error() -> None:
    network = Tied()
    own = {name: p.detach().clone() for name, p in network.named_parameters()}
    with pytest.raises(RuntimeError):
        # the layer takes three numbers
        FunctionalModule(network, others(network))(torch.randn(2, 4))
    assert all(torch.equal(p, own[name]) for name, p in network.named_parameters())


def test_an_unknown_name_is_an_error_and_changes_nothing() -> None:
    network, x = Tied(), torch.randn(2, 3)
    own = network(x)
    with pytest.raises(KeyError, match="third"):
        FunctionalModule(network, {**others(network), "third.weight": torch.ones(3)})(x)
    assert torch.equal(network(x), own)


def test_a_copied_network_has_its_own_entry_and_can_be_deleted() -> None:
    network, x = Tied(), torch.randn(2, 3)
    FunctionalModule(network, others(network))(x)
    other = copy.deepcopy(network)
    tensors = others(other)
    assert torch.equal(FunctionalModule(other, tensors)(x), by_torch(other, tensors, x))
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    assert network in deferred._SHARED


def test_a_frozen_network_gives_the_same_output_and_its_parameters_get_no_gradient() -> None:
    network, x = Tied(), torch.randn(2, 3, requires_grad=True)
    frozen = FunctionalModule(network).frozen()
    assert frozen.tensors is not None
    assert list(frozen.tensors) == [name for name, _ in network.named_parameters()]
    answer = frozen(x)
    assert torch.equal(answer, network(x))
    answer.sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in network.parameters())


def test_a_pass_without_a_trace_does_not_change_statistics() -> None:
    norm = nn.BatchNorm1d(3)
    network = nn.Sequential(nn.Linear(3, 3), norm)
    rows = torch.randn(5, 3)

    def moved(called: FunctionalModule) -> bool:
        before = {name: buffer.clone() for name, buffer in network.named_buffers()}
        assert torch.equal(called(rows), nn.functional.batch_norm(
            network[0](rows), None, None, norm.weight, norm.bias, training=True
        ))  # fmt: skip
        return any(not torch.equal(before[name], b) for name, b in network.named_buffers())

    assert not moved(FunctionalModule(network).frozen(leaves_no_trace=True))
    other = {n: t.detach().clone() for n, t in network.state_dict().items()}
    kept = {n: t.clone() for n, t in other.items()}
    FunctionalModule(network, other).frozen(leaves_no_trace=True)(rows)
    assert all(torch.equal(other[n], kept[n]) for n in kept)
    assert moved(FunctionalModule(network).frozen())  # the control


def test_a_replaced_submodule_is_called_instead_of_the_former_one() -> None:
    network, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.randn(2, 3)
    FunctionalModule(network, others(network))(x)
    network[1] = nn.Linear(3, 4)
    tensors = others(network)
    assert torch.equal(FunctionalModule(network, tensors)(x), by_torch(network, tensors, x))
