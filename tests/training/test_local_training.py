"""Local training: batches, an Adam that continues over visits, initial weights, and averages."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.testing import assert_close

from privssl.runtime.randomness import stream
from privssl.training import local_training, optim
from tests.support.toy_worlds import same_bits


def rng(purpose: str = "test") -> torch.Generator:
    return stream(0, 0, "world", purpose)


# Rows ---------------------------------------------------------------------------------------


def test_stored_rows_become_network_input_by_a_public_constant() -> None:
    stored = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    expected = torch.tensor([-1.0, -0.6, 1.0]).view(1, 1, 1, 3)  # 51 / 127.5 - 1 = -0.6
    assert_close(local_training.network_input(stored), expected)
    assert_close(local_training.network_input(stored / 255), expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_rows_get_one_memory_layout_whatever_their_stored_layout(channels: int) -> None:
    height, width = 4, 5
    plain = torch.rand(2, channels, height, width)
    last = torch.empty_like(plain, memory_format=torch.channels_last).copy_(plain)
    assert last.stride() != plain.stride()
    # Strides from row to row, channel, line, pixel: by arithmetic.
    strides = (height * width * channels, 1, width * channels, channels)
    for stored in (plain, last, plain[:, :, :1].expand(plain.shape)):
        rows = local_training.network_input(stored)
        assert rows.stride() == strides
        assert torch.equal(rows, 2 * stored - 1)


@given(held=st.integers(1, 40), count=st.integers(1, 200))
def test_every_row_is_used_once_before_any_is_used_twice(held: int, count: int) -> None:
    picked = local_training.draw_rows(held, count, rng()).tolist()
    assert len(picked) == count
    for start in range(0, count, held):
        part = picked[start : start + held]
        assert len(set(part)) == len(part) and set(part) <= set(range(held))


def test_the_order_of_rows_depends_on_the_generator() -> None:
    assert torch.equal(
        local_training.draw_rows(50, 50, rng()), local_training.draw_rows(50, 50, rng())
    )
    assert not torch.equal(
        local_training.draw_rows(50, 50, rng()), local_training.draw_rows(50, 50, rng("other"))
    )
    twice = local_training.draw_rows(50, 100, rng())
    assert not torch.equal(twice[:50], twice[50:])


def test_batches_are_consecutive_and_the_last_may_be_shorter() -> None:
    fields = {"x": torch.arange(5), "y": -torch.arange(5)}
    found = [
        {k: v.tolist() for k, v in batch.items()} for batch in local_training.batches(fields, 2)
    ]
    assert found == [{"x": [0, 1], "y": [0, -1]}, {"x": [2, 3], "y": [-2, -3]},
                     {"x": [4], "y": [-4]}]  # fmt: skip


# Adam ---------------------------------------------------------------------------------------


def network() -> nn.Module:
    """Two convolutions, so that channels last differs from the default memory layout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3))


def losses(steps: range, net: nn.Module) -> list[Tensor]:
    return [
        net(torch.rand(2, 2, 6, 6, generator=rng(f"step {step}"))).square().mean() for step in steps
    ]


def visit(net: nn.Module, memory: Mapping[str, Tensor], steps: range) -> dict[str, Tensor]:
    """Some steps of a new optimiser that continues from a state. Returns its new state."""
    adam = local_training.LocalOptimiser(
        {"F": local_training.AdamGroup(net, 0.05, (0.9, 0.99))}, memory, "support"
    )
    for step in steps:
        adam.minimise(losses(range(step, step + 1), net)[0])
    return adam.remember()


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_visits_with_an_optimiser_state_equal_one_long_adam_to_the_bit(
    form: torch.memory_format,
) -> None:
    whole = network().to(memory_format=form)
    adam = torch.optim.Adam(whole.parameters(), lr=0.05, betas=(0.9, 0.99), fused=True)
    for step in range(6):
        adam.zero_grad()
        losses(range(step, step + 1), whole)[0].backward()  # type: ignore[no-untyped-call]
        adam.step()

    parted = network().to(memory_format=form)
    memory: dict[str, Tensor] = {}
    for steps in (range(0, 2), range(2, 3), range(3, 6)):
        memory = visit(parted, memory, steps)
        # As a checkpoint restores it: in the default memory layout.
        memory = {k: v.clone(memory_format=torch.contiguous_format) for k, v in memory.items()}
    assert same_bits(whole.state_dict(), parted.state_dict())

    forgetful = network().to(memory_format=form)  # the control: a new Adam for each visit
    for steps in (range(0, 2), range(2, 3), range(3, 6)):
        visit(forgetful, {}, steps)
    assert not same_bits(whole.state_dict(), forgetful.state_dict())


def test_a_visit_does_not_modify_the_optimiser_state_it_gets() -> None:
    net = network()
    memory = visit(net, {}, range(2))
    before = {key: value.clone() for key, value in memory.items()}
    after = visit(net, memory, range(2, 4))
    assert same_bits(memory, before)
    assert not same_bits(memory, after)


def test_optimisers_of_one_agent_have_separate_states() -> None:
    remembered = visit(network(), {}, range(1))
    assert all(key.startswith("support/F/") for key in remembered)
    fresh, other = network(), network()
    visit(fresh, {}, range(1))
    visit(other, {key.replace("support/", "query/"): v for key, v in remembered.items()}, range(1))
    assert same_bits(fresh.state_dict(), other.state_dict())


def test_parameters_without_a_gradient_do_not_change() -> None:
    reached, other = nn.Linear(2, 1), nn.Linear(2, 1)
    before, moving = local_training.weights_of(other), local_training.weights_of(reached)
    groups = {name: local_training.AdamGroup(net, 0.1, (0.9, 0.99)) for name, net in
              (("F", reached), ("G", other))}  # fmt: skip
    adam = local_training.LocalOptimiser(groups, {}, "support")
    adam.minimise(reached(torch.ones(1, 2)).square().sum())
    assert same_bits(local_training.weights_of(other), before)
    assert not same_bits(local_training.weights_of(reached), moving)
    assert not any("/G/" in key for key in adam.remember())


@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_frozen_or_unused_later_do_not_change_from_then_on(frozen: bool) -> None:
    """SGD alone would continue by momentum, weight decay and the former gradient."""
    reached, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    sgd = optim.SGD([reached, other], lr=0.1, momentum=0.9, weight_decay=0.1)
    local_training.minimise(sgd, reached.sum() + other.sum())
    moved = other.detach().clone()
    assert not torch.equal(moved, torch.ones(2))
    other.requires_grad_(not frozen)
    local_training.minimise(sgd, (reached + other).sum() if frozen else reached.sum())
    assert torch.equal(other, moved)


def test_one_step_uses_sgd_for_one_network_and_adam_for_another() -> None:
    F, G, alone_F, alone_G = network(), network(), network(), network()
    x = torch.rand(2, 2, 6, 6, generator=rng("rows"))

    def loss(F: nn.Module, G: nn.Module) -> Tensor:
        product: Tensor = F(x) * G(x)
        return product.square().mean()

    def visit(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        optimiser = local_training.LocalOptimiser(
            {"F": local_training.SGDGroup(F, 0.1, 0.9), "G": local_training.AdamGroup(G, 0.1, (0.5,
            0.99))},
            memory, "support",
        )  # fmt: skip
        for _ in range(2):
            optimiser.minimise(loss(F, G))
        return optimiser.remember()

    adam = torch.optim.Adam(alone_G.parameters(), lr=0.1, betas=(0.5, 0.99), fused=True)
    memory: dict[str, Tensor] = {}
    for _ in range(2):  # visits: SGD starts anew, Adam continues
        sgd = torch.optim.SGD(alone_F.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            sgd.zero_grad()
            adam.zero_grad()
            loss(alone_F, alone_G).backward()  # type: ignore[no-untyped-call]
            sgd.step()
            adam.step()
        memory = visit(memory)
    assert same_bits(F.state_dict(), alone_F.state_dict())
    assert same_bits(G.state_dict(), alone_G.state_dict())
    assert all(key.startswith("support/G/") for key in memory)


# Weights ------------------------------------------------------------------------------------


def test_the_moving_average_by_hand() -> None:
    kept, new = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([3.0, 10.0])}
    assert_close(local_training.moving_average(kept, new, 0.75)["w"], torch.tensor([1.5, 2.5]))


@given(st.floats(0, 1), st.floats(-1e6, 1e6, width=32))
def test_the_moving_average_of_a_constant_is_constant(decay: float, value: float) -> None:
    weights = {"w": torch.tensor([value])}
    assert torch.equal(local_training.moving_average(weights, weights, decay)["w"], weights["w"])


def test_the_moving_average_takes_the_latest_value_of_counters() -> None:
    count = {"batches": torch.tensor(3)}
    later = local_training.moving_average(count, {"batches": torch.tensor(8)}, 0.5)["batches"]
    assert torch.equal(later, torch.tensor(8))


class WithSpectralNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = spectral_norm(nn.Linear(4, 3))
        self.norm = nn.BatchNorm1d(3)


def test_initial_weights_and_buffers_depend_on_the_generator_only() -> None:
    drawn = []
    for state_of_torch, purpose in ((1, "init"), (2, "init"), (1, "other")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(state_of_torch)
            drawn.append(local_training.fresh_weights(WithSpectralNorm, rng(purpose)))
            assert torch.initial_seed() == state_of_torch
    assert same_bits(drawn[0], drawn[1])
    original = "inner.parametrizations.weight.original"
    assert not torch.equal(drawn[0][original], drawn[2][original])


def test_sent_tensors_are_copied_once_by_the_step_or_by_its_caller() -> None:
    own = {"w": torch.ones(3, requires_grad=True), "b": torch.zeros(2)}
    sent = local_training.to_send(own)
    with local_training.copy_once():
        lent = local_training.to_send(own)
        with torch.no_grad():
            own["w"].fill_(2.0)
    assert sent["w"].tolist() == [1, 1, 1] and lent["w"].tolist() == [2, 2, 2]
    assert not sent["w"].requires_grad and not lent["w"].requires_grad
    assert (
        local_training.to_send(own)["b"].data_ptr() != own["b"].data_ptr()
    )  # the context has ended


def test_weights_are_copied_when_read_from_and_loaded_into_a_network() -> None:
    net = nn.Linear(2, 1).eval()
    taken = local_training.weights_of(net)
    given_ = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
    assert local_training.load_weights(net, given_).training
    with torch.no_grad():
        net.weight.fill_(5.0)
    assert torch.equal(given_["weight"], torch.ones(1, 2))
    assert not torch.equal(taken["weight"], local_training.weights_of(net)["weight"])
    assert not any(value.requires_grad for value in taken.values())


def test_the_mean_of_losses_and_of_no_losses() -> None:
    assert local_training.mean_of([torch.tensor(1.0), torch.tensor(4.0)]) == 2.5
    assert local_training.mean_of([]) == 0.0


def test_views_of_stored_rows_get_network_input_of_the_requested_rows() -> None:
    stored = torch.arange(6, dtype=torch.uint8).reshape(6, 1, 1, 1) * 51
    batches = [torch.tensor([5, 0]), torch.tensor([], dtype=torch.long), torch.tensor([2])]
    calls = []

    def negative(x: Tensor) -> Tensor:
        calls.append(len(x))
        return -x

    views = list(local_training.views_of(stored, batches, negative, torch.device("cpu")))
    assert [v.flatten().tolist() for v in views] == [[-1.0, 1.0], [], pytest.approx([0.2])]
    assert calls == [3]  # in one call


def test_views_made_in_blocks_equal_those_of_single_batches() -> None:
    batches = [*torch.split(torch.arange(25), 4), torch.empty(0, dtype=torch.int64)]
    asked: list[int] = []

    def seen(picked: Tensor) -> Tensor:
        asked.append(len(picked))
        return 10 * picked

    views = list(local_training.in_blocks(batches, seen, at_once=10))
    assert [view.tolist() for view in views] == [(10 * batch).tolist() for batch in batches]
    assert asked == [12, 12, 1]
    assert list(local_training.in_blocks([], seen)) == []
