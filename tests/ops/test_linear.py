"""Linear layers by oneDNN: the same numbers as torch's, and only where that is what is meant."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import is_parametrized
from torch.testing import assert_close

from privssl.models import optimize_layout
from privssl.ops import linear
from privssl.ops.linear import FEWEST, LARGE, Linear, onednn_is_faster
from privssl.runtime.randomness import stream
from privssl.training.batched.stacking import Stackable
from tests.support.resume import PLAIN, Place, command

WIDE, NARROW = 600, 450  # features in and out: more weights than LARGE

HAS_ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where oneDNN is the faster one."""
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: True)


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    onednn_is_faster.cache_clear()
    yield
    onednn_is_faster.cache_clear()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=stream(0, 0, "world", f"{shape}"))


def layer(bias: bool = True, features: int = WIDE) -> Linear:
    made = Linear(features, NARROW, bias=bias)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(drawn(*parameter.shape))
    return made


def by_onednn(made: nn.Module, x: Tensor) -> bool:
    return "_Linear" in type(made(x).grad_fn).__name__


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [8, 11, 64])
def test_outputs_and_gradients_are_those_of_arithmetic(count: int, bias: bool) -> None:
    made, x, g = layer(bias), drawn(count, WIDE).requires_grad_(), drawn(count, NARROW)
    assert made.weight.numel() > LARGE and by_onednn(made, x)
    made(x).backward(g)
    w, wide = made.weight.detach().double(), x.detach().double()
    expected = wide @ w.T + (made.bias.detach().double() if bias else 0)
    close = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    assert_close(made(x).detach(), expected, **close)  # type: ignore[arg-type]
    assert_close(x.grad, g.double() @ w, **close)  # type: ignore[arg-type]
    assert_close(made.weight.grad, g.double().T @ wide, **close)  # type: ignore[arg-type]
    if bias:
        assert_close(made.bias.grad, g.double().sum(dim=0), **close)  # type: ignore[arg-type]


@needs_onednn
@pytest.mark.parametrize("what", ["input", "weight", "bias"])
def test_what_needs_no_gradient_gets_none(what: str) -> None:
    made, x = layer(), drawn(9, WIDE).requires_grad_()
    given = {"input": x, "weight": made.weight, "bias": made.bias}
    given[what].requires_grad_(False)
    made(x).sum().backward()
    assert [name for name, tensor in given.items() if tensor.grad is None] == [what]


@needs_onednn
@pytest.mark.parametrize(
    "laid",
    [
        lambda x: torch.zeros(WIDE, 2 * len(x)).T[::2].copy_(x),  # columns first, with gaps
        lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
        lambda x: x[:1].expand(len(x), -1),
        lambda x: x.flatten().as_strided(x.shape, (1, 1)),  # rows that overlap
    ],
    ids=["columns", "gaps", "one row", "overlap"],
)
def test_how_rows_lie_in_memory_changes_no_bit(laid: Callable[[Tensor], Tensor]) -> None:
    made, g = layer(), drawn(9, NARROW)
    apart = laid(drawn(9, WIDE))
    assert apart.shape == (9, WIDE) and not apart.is_contiguous() and by_onednn(made, apart)
    found = []
    for x in (apart, apart.contiguous()):
        made.zero_grad()
        y = made(x)
        y.backward(g)
        assert made.weight.grad is not None
        found.append((y.detach(), made.weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("made", "x"),
    [
        (lambda: layer().double(), lambda: drawn(9, WIDE).double()),
        (layer, lambda: drawn(9, 3, WIDE)),
        (layer, lambda: drawn(WIDE)),
        (layer, lambda: drawn(FEWEST - 1, WIDE)),
        (layer, lambda: drawn(0, WIDE)),
    ],
    ids=["wide numbers", "more dimensions", "one row", "few rows", "no rows"],
)
def test_all_else_is_torchs_own_to_the_bit(
    made: Callable[[], nn.Linear], x: Callable[[], Tensor]
) -> None:
    ours, rows = made(), x()
    assert not by_onednn(ours, rows)
    assert torch.equal(ours(rows), nn.functional.linear(rows, ours.weight, ours.bias))


def test_in_bfloat16_it_is_torchs_own() -> None:
    made, x = layer(), drawn(9, WIDE)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made(x), nn.functional.linear(x, made.weight, made.bias))


def test_row_by_row_it_is_torchs_own() -> None:
    made, plain, x = layer(), nn.Linear(WIDE, NARROW), drawn(2, 9, WIDE)
    plain.load_state_dict(made.state_dict())

    def gradients(of: nn.Module) -> Tensor:
        found: Tensor = vmap(grad(lambda row: of(row).square().sum()))(x)
        return found

    assert torch.equal(gradients(made), gradients(plain))


def test_rows_of_another_width_get_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer()(drawn(9, WIDE + 1))


@needs_onednn
def test_second_derivatives_are_torchs_own() -> None:
    made, x = layer(), drawn(9, WIDE)
    plain = nn.Linear(WIDE, NARROW)
    plain.load_state_dict(made.state_dict())
    assert by_onednn(made, x) and not by_onednn(plain, x)
    found = []
    for network in (made, plain):
        rows = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(network(rows).square().sum(), rows, create_graph=True)
        slope.square().sum().backward()  # type: ignore[no-untyped-call]
        assert network.weight.grad is not None and rows.grad is not None
        found.append((network.weight.grad, rows.grad))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_the_batched_engine_knows_it() -> None:
    large = nn.Sequential(nn.Flatten(), nn.Linear(LARGE // 256, 256))
    assert not Stackable("F", optimize_layout(large)).never


def test_networks_are_built_with_it_where_they_are_large_and_keep_their_parameters() -> None:
    first = nn.Linear(LARGE // 256, 256)
    weight = first.weight
    network = optimize_layout(nn.Sequential(first, nn.Tanh(), nn.Sequential(nn.Linear(256, 1))))
    kinds = [type(module) for module in network.modules() if isinstance(module, nn.Linear)]
    assert kinds == [Linear, nn.Linear]
    assert network[0].weight is weight
    spectral = optimize_layout(nn.Sequential(spectral_norm(nn.Linear(LARGE // 256, 256))))[0]
    assert is_parametrized(spectral)  # it keeps what makes its weights


@needs_onednn
def test_workers_come_to_the_same_weights_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privssl.models.LARGE", 0)
    taken: list[int] = []
    real = linear._product

    def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        taken.append(len(left))
        return real(left, right, bias)

    monkeypatch.setattr(linear, "_product", product)
    (tmp_path / "config.yaml").write_text(PLAIN)
    weights = []
    for workers in (1, 2):
        place = Place(tmp_path / "config.yaml", tmp_path / f"{workers}")
        outcome = command(place.config, place.output, f"run.workers={workers}")
        assert outcome.status == 0, outcome.err
        weights.append(place.weights())
    assert taken  # in this process, by the run without workers
    first, second = weights
    assert all(torch.equal(first[name], second[name]) for name in first)


# Where it is faster -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\n", True),
        ("processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\n", False),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", False),  # as on ARM
        (None, False),  # as elsewhere than on Linux
    ],
    ids=["AMD", "Intel", "ARM", "no Linux"],
)
def test_it_is_faster_on_processors_by_amd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: bool
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(linear, "CPUINFO", tmp_path / "cpuinfo")
    for backend in (torch.backends.mkl, torch.backends.mkldnn):
        monkeypatch.setattr(backend, "is_available", lambda: True)
    assert onednn_is_faster() is expected


def test_without_the_operator_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text("vendor_id\t: AuthenticAMD\n")
    monkeypatch.setattr(linear, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not onednn_is_faster()


@pytest.mark.parametrize("missing", ["mkl", "mkldnn"])
def test_without_either_library_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    (tmp_path / "cpuinfo").write_text("vendor_id\t: AuthenticAMD\n")
    monkeypatch.setattr(linear, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(getattr(torch.backends, missing), "is_available", lambda: False)
    assert not onednn_is_faster()
