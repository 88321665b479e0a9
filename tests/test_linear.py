"""Linear layers by oneDNN: the same numbers as torch's, and only where that is what is meant."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.testing import assert_close

from privssl.models import laid_out, linear
from privssl.models.linear import LARGE, Linear, onednn_is_faster
from privssl.seeds import stream

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
@pytest.mark.parametrize("count", [1, 7, 64])
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
    made, x = layer(), drawn(3, WIDE).requires_grad_()
    given = {"input": x, "weight": made.weight, "bias": made.bias}
    given[what].requires_grad_(False)
    made(x).sum().backward()
    assert [name for name, tensor in given.items() if tensor.grad is None] == [what]


@needs_onednn
def test_rows_in_any_order_of_memory_have_the_same_products() -> None:
    made, x = layer(), drawn(6, WIDE)
    apart = torch.zeros(WIDE, 12).T[::2].copy_(x)
    assert not apart.is_contiguous() and by_onednn(made, apart)
    assert torch.equal(made(apart), made(x))


@pytest.mark.parametrize(
    ("made", "x"),
    [
        (lambda: layer().double(), lambda: drawn(3, WIDE).double()),
        (layer, lambda: drawn(2, 3, WIDE)),
        (layer, lambda: drawn(WIDE)),
        (layer, lambda: drawn(0, WIDE)),
    ],
    ids=["wide numbers", "more dimensions", "one row", "no rows"],
)
def test_all_else_is_torchs_own_to_the_bit(
    made: Callable[[], nn.Linear], x: Callable[[], Tensor]
) -> None:
    ours, rows = made(), x()
    assert not by_onednn(ours, rows)
    assert torch.equal(ours(rows), nn.functional.linear(rows, ours.weight, ours.bias))


def test_in_bfloat16_it_is_torchs_own() -> None:
    made, x = layer(), drawn(3, WIDE)
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype == torch.bfloat16


def test_row_by_row_it_is_torchs_own() -> None:
    made, plain, x = layer(), nn.Linear(WIDE, NARROW), drawn(3, WIDE)
    plain.load_state_dict(made.state_dict())

    def gradients(of: nn.Module) -> Tensor:
        found: Tensor = vmap(grad(lambda row: of(row[None]).square().sum()))(x)
        return found

    assert torch.equal(gradients(made), gradients(plain))


def test_rows_of_another_width_get_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer()(drawn(3, WIDE + 1))


@needs_onednn
def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    made, x = layer(), drawn(3, WIDE).requires_grad_()
    (first,) = torch.autograd.grad(made(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()  # type: ignore[no-untyped-call]


def test_networks_are_built_with_it_where_they_are_large_and_keep_their_parameters() -> None:
    first = nn.Linear(LARGE // 256, 256)
    weight = first.weight
    network = laid_out(nn.Sequential(first, nn.Tanh(), nn.Sequential(nn.Linear(256, 1))))
    kinds = [type(module) for module in network.modules() if isinstance(module, nn.Linear)]
    assert kinds == [Linear, nn.Linear]
    assert network[0].weight is weight


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


@pytest.mark.parametrize("missing", ["mkl", "mkldnn"])
def test_without_either_library_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    (tmp_path / "cpuinfo").write_text("vendor_id\t: AuthenticAMD\n")
    monkeypatch.setattr(linear, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(getattr(torch.backends, missing), "is_available", lambda: False)
    assert not onednn_is_faster()
