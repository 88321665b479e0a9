"""Steps of plain SGD that large linear layers keep as rows: the weights are those of arithmetic."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from privssl.models import optimize_layout
from privssl.ops import linear
from privssl.ops.linear import LARGE, Linear, onednn_is_faster
from privssl.ops.precision import in_precision
from privssl.runtime.randomness import stream
from privssl.training import local_training, optim
from privssl.training.batched import deferred
from privssl.training.lazy_linear_sgd import ROOM, LazySGDBuffer, plain_sgd
from tests.support.resume import Place, command

WIDE, NARROW = LARGE // 256, 256  # features in and out of a layer that is just large enough
RATE = 0.01


@pytest.fixture(autouse=True, params=[True, False], ids=["oneDNN", "MKL"])
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param and not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: request.param)
    yield
    onednn_is_faster.cache_clear()


class Net(nn.Module):
    """A large layer between two small ones."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDE)
        self.large = nn.Linear(WIDE, NARROW, bias=bias)
        self.last = nn.Linear(NARROW, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.large(torch.tanh(self.first(x)))))
        return out


class OnlyLarge(nn.Module):
    """A large layer without bias that reads the rows themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(WIDE, NARROW, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.large(x)
        return out


def drawn(*shape: int, name: str = "rows") -> Tensor:
    return torch.randn(*shape, generator=stream(0, 0, "world", f"{name} {shape}"))


def made(kind: Callable[[], nn.Module] = Net) -> nn.Module:
    network = optimize_layout(kind())
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(scale * drawn(*parameter.shape, name=name))
    return network


def mean_square(network: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = network(x).square().mean()
    return loss


def exact(network: nn.Module, losses: list[Callable[[nn.Module], Tensor]]) -> dict[str, Tensor]:
    """Plain gradient descent written out, in float64, by torch's own layers."""
    wide = optimize_layout(type(network)())
    for module in wide.modules():
        if isinstance(module, Linear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
    wide = wide.double()
    wide.load_state_dict(network.state_dict())
    for loss in losses:
        parameters = list(wide.parameters())
        gradients = torch.autograd.grad(loss(wide), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(RATE * gradient)
    return {name: value.detach() for name, value in wide.named_parameters()}


def descended(network: nn.Module, losses: list[Callable[[nn.Module], Tensor]]) -> nn.Module:
    with plain_sgd(network, RATE) as sgd:
        for loss in losses:
            local_training.minimise(sgd, loss(network))
    return network


def on(x: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda network: mean_square(network, x.to(next(network.parameters()).dtype))


def assert_exact(network: nn.Module, expected: dict[str, Tensor], start: dict[str, Tensor]) -> None:
    """Each tensor went as far as it should, to a thousandth of the way."""
    for name, value in network.named_parameters():
        way = expected[name] - start[name]
        assert float(way.abs().max()) > 0, name
        off = value.detach() - expected[name]
        assert float(off.norm()) < 1e-3 * float(way.norm()), name


@pytest.mark.parametrize(
    "counts",
    [[10] * 5, [10] * 20, [1, 7, 8, 64, 3], [ROOM + 9, 10, ROOM + 1], [ROOM, 1, ROOM]],
    ids=["a short visit", "more than are kept", "uneven", "batches above it", "just full"],
)
def test_weights_after_a_visit_are_those_of_arithmetic(counts: list[int]) -> None:
    network = made()
    start = local_training.weights_of(network)
    losses = [on(drawn(count, 5, name=f"{n}")) for n, count in enumerate(counts)]
    expected = exact(network, losses)
    assert_exact(descended(network, losses), expected, start)


def test_a_layer_that_reads_the_rows_themselves_learns_too() -> None:
    network = made(OnlyLarge)
    start = local_training.weights_of(network)
    losses = [on(drawn(9, WIDE, name=f"{n}")) for n in range(3)]
    expected = exact(network, losses)
    assert_exact(descended(network, losses), expected, start)


def test_a_loss_may_need_the_network_twice() -> None:
    network = made()
    start = local_training.weights_of(network)
    losses: list[Callable[[nn.Module], Tensor]] = [
        lambda F: on(drawn(9, 5, name="a"))(F) + 2 * on(drawn(4, 5, name="b"))(F)
    ] * 12  # 156 rows
    expected = exact(network, losses)
    assert_exact(descended(network, losses), expected, start)


def test_a_control_one_step_less_is_noticed() -> None:
    network = made()
    start = local_training.weights_of(network)
    losses = [on(drawn(10, 5, name=f"{n}")) for n in range(20)]
    expected = exact(network, losses[:-1])
    with pytest.raises(AssertionError):
        assert_exact(descended(network, losses), expected, start)


def test_inside_the_network_knows_its_steps_and_its_weights_do_not() -> None:
    network, x = made(), drawn(10, 5)
    large: Any = network.large
    losses = [on(drawn(10, 5, name=f"{n}")) for n in range(3)]
    after = made()
    after.load_state_dict(exact(network, losses))
    before = large.weight.detach().clone()
    with plain_sgd(network, RATE) as sgd:
        for loss in losses:
            local_training.minimise(sgd, loss(network))
        assert torch.equal(large.weight, before)
        assert large.weight.grad is None
        with torch.no_grad():
            found = network(x)
    assert_close(found, after(x).detach(), rtol=1e-4, atol=1e-5)
    assert not torch.equal(large.weight, before)
    assert large.kept is None


@pytest.mark.parametrize("steps", [5, 20])  # fewer rows than are kept, and more
def test_in_bfloat16_they_come_nearer_to_arithmetic_than_steps_that_are_written_out(
    steps: int,
) -> None:
    losses = [on(drawn(10, 5, name=f"{n}")) for n in range(steps)]
    start = made()
    began = local_training.weights_of(start)["large.weight"]
    expected = exact(start, losses)["large.weight"]
    errors = []
    for keep in (True, False):
        network = made(in_precision(Net, "bfloat16"))
        if keep:
            descended(network, losses)
        else:
            sgd = optim.SGD(network.parameters(), lr=RATE)
            for loss in losses:
                local_training.minimise(sgd, loss(network))
        errors.append(float((local_training.weights_of(network)["large.weight"] - expected).norm()))
    assert errors[0] < errors[1] < 0.1 * float((expected - began).norm())


def test_in_bfloat16_layers_multiply_in_it_and_know_steps_that_were_added() -> None:
    losses = [on(drawn(16, 5, name=f"{n}")) for n in range(9)]  # more than are kept, twice
    before, after = made(), made()
    after.load_state_dict(exact(before, losses))
    network: Any = made(in_precision(Net, "bfloat16"))
    x = drawn(10, WIDE)
    with plain_sgd(network, RATE) as sgd, torch.no_grad():
        with torch.enable_grad():
            for loss in losses:
                local_training.minimise(sgd, loss(network))
        found = network.large(x)
        start = before.get_submodule("large")(x)
        way = after.get_submodule("large")(x) - start
    assert found.dtype == torch.bfloat16
    went = float(((found - start) * way).sum() / way.square().sum())  # rounding goes all ways
    assert went == pytest.approx(1, abs=0.05)


def test_more_dimensions_than_two_are_rows_as_well() -> None:
    network = made(OnlyLarge)
    start = local_training.weights_of(network)
    losses = [on(drawn(3, 4, WIDE)), on(drawn(WIDE)), on(drawn(9, WIDE))]
    expected = exact(network, losses)
    assert_exact(descended(network, losses), expected, start)


def test_a_visit_leaves_nothing_behind_and_its_steps_remember_no_graph() -> None:
    network = made()
    large: Any = network.large
    with plain_sgd(network, RATE) as sgd:
        for n in range(9):
            local_training.minimise(sgd, on(drawn(10, 5, name=f"{n}"))(network))
        kept: LazySGDBuffer = large.kept
        assert not (kept._X.requires_grad or kept._G.requires_grad)
        copy.deepcopy(network)
        left = weakref.ref(kept)
    assert large.weight.is_leaf
    del sgd, kept
    gc.collect()
    assert left() is None


def test_second_derivatives_are_refused() -> None:
    network, x = made(), drawn(9, 5).requires_grad_()
    with plain_sgd(network, RATE):
        (slope,) = torch.autograd.grad(network(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.square().sum().backward()  # type: ignore[no-untyped-call]


def test_what_fails_inside_loses_no_step() -> None:
    network = made()
    start = local_training.weights_of(network)
    losses = [on(drawn(10, 5, name=f"{n}")) for n in range(2)]
    expected = exact(network, losses)
    large: Any = network.large
    with pytest.raises(RuntimeError, match="no more"), plain_sgd(network, RATE) as sgd:
        for loss in losses:
            local_training.minimise(sgd, loss(network))
        raise RuntimeError("no more")
    assert large.kept is None
    assert_exact(network, expected, start)


# Who keeps ----------------------------------------------------------------------------------


def keepers(network: nn.Module) -> list[str]:
    with plain_sgd(network, RATE):
        return [name for name, m in network.named_modules() if getattr(m, "kept", None)]


def test_large_layers_keep_and_small_ones_do_not() -> None:
    assert keepers(made()) == ["large"]


def test_a_frozen_layer_keeps_nothing_and_stays() -> None:
    network = made()
    network.get_parameter("large.weight").requires_grad_(False)
    assert keepers(network) == []
    before = network.get_parameter("large.weight").clone()
    descended(network, [on(drawn(9, 5))])
    assert torch.equal(network.get_parameter("large.weight"), before)


def test_layers_that_share_their_weights_keep_nothing() -> None:
    network = optimize_layout(
        nn.Sequential(nn.Linear(NARROW * 4, NARROW * 4), nn.Linear(NARROW * 4, 9))
    )
    assert keepers(network) == ["0"]
    twin = optimize_layout(
        nn.Sequential(nn.Linear(NARROW * 4, NARROW * 4), nn.Linear(NARROW * 4, 1024))
    )
    twin[1].weight = twin[0].weight
    assert keepers(twin) == []


def test_a_layer_elsewhere_than_on_the_cpu_keeps_nothing() -> None:
    with torch.device("meta"):
        assert keepers(optimize_layout(Net())) == []


def test_a_layer_of_wider_numbers_keeps_nothing() -> None:
    assert keepers(made().double()) == []


def test_where_steps_of_several_agents_are_taken_as_one_nothing_is_kept() -> None:
    with deferred.request_handler(lambda step: None):
        assert keepers(made()) == []
    assert keepers(made()) == ["large"]


#: As few rows and agents as take steps.
SHORT = (
    *("data.name=toy", "data.labelled=20", "model.width=4"),
    *("algorithm.rounds=1", "algorithm.local_epochs=1"),
)


@pytest.mark.parametrize(
    ("faster", "config", "changes", "keep"),
    [
        (True, "fedavg", ["agents.mixed=3", "algorithm.momentum=0.0"], True),
        (False, "fixmatch", ["agents.query=3", "algorithm.momentum=0.0"], True),
        (False, "fedavg", ["agents.mixed=3", "algorithm.momentum=0.5"], False),
        (
            True,
            "fedavg",
            ["agents.mixed=3", "algorithm.momentum=0.0", "algorithm.weight_decay=0.01"],
            False,
        ),
        (True, "fedprox", ["agents.mixed=3", "algorithm.momentum=0.0"], False),
    ],
    indirect=["faster"],
)
def test_runs_keep_steps_of_plain_sgd_alone_and_workers_come_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, changes: list[str], keep: bool
) -> None:
    monkeypatch.setattr("privssl.models.LARGE", 0)
    steps: list[int] = []
    real = LazySGDBuffer.step

    def step(self: LazySGDBuffer) -> None:
        steps.append(1)
        real(self)

    monkeypatch.setattr(LazySGDBuffer, "step", step)
    weights = []
    for workers in (1, 2) if keep else (1,):
        place = Place(Path(f"configs/{config}.yaml"), tmp_path / f"{workers}")
        outcome = command(place.config, place.output, f"run.workers={workers}", *SHORT, *changes)
        assert outcome.status == 0, outcome.err
        weights.append(place.weights())
    assert bool(steps) is keep
    first, last = weights[0], weights[-1]
    assert all(torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("faster", [True], indirect=True)
def test_agents_side_by_side_take_plain_steps(tmp_path: Path) -> None:
    changes = [*SHORT, "agents.mixed=4", "algorithm.momentum=0.0"]
    weights = []
    for side_by_side in (1, 4):
        place = Place(Path("configs/fedavg.yaml"), tmp_path / f"{side_by_side}")
        outcome = command(
            place.config, place.output, f"run.batched_agents={side_by_side}", *changes
        )
        assert outcome.status == 0, outcome.err
        weights.append(place.weights())
    for name, value in weights[0].items():
        assert_close(weights[1][name], value, rtol=1e-3, atol=1e-5)
