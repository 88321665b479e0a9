"""Convolution, pooling, norm and rectifier in one kernel: the results of torch's layers, row by
row.

The kernels are compared with torch in float64, and to the bit on whole numbers, whose sums are
exact. Every compiled instruction set that this processor supports is tested.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from privssl.errors import PrivacyError
from privssl.models import build_classifier, optimize_layout
from privssl.ops import dispatch, fused_conv, precision
from privssl.ops import fused_conv_binding as kernel
from privssl.ops.fused_conv import FusedSequential
from privssl.ops.fused_conv_binding import Form, Parameters
from privssl.privacy.clipping import clipped_sums
from privssl.privacy.per_example_gradients import Parameters as Networks
from privssl.privacy.per_example_gradients import RowLoss, factored_gradients, per_example_gradients
from privssl.runtime.randomness import seeded, stream
from privssl.settings.schema import ModelSettings
from privssl.training.batched.deferred import FunctionalModule
from tests.support.kernel_generations import HERE
from tests.support.privacy import parameters_of


def test_kernels_are_present_where_a_compiler_built_them() -> None:
    if not HERE:
        pytest.skip("nothing was compiled for this processor: no C++ compiler, or it is no x86-64")
    assert dispatch.instruction_set() == HERE[0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernel calls, in order."""
    if not HERE:
        pytest.skip("no kernels were compiled")
    seen: list[str] = []
    for name in ("forward", "backward"):
        real = getattr(kernel, name)

        def spy(*given: Any, name: str = name, real: Any = real, **k: Any) -> Any:
            seen.append(name)
            return real(*given, **k)

        monkeypatch.setattr(kernel, name, spy)
    return seen


# Results ----------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A convolution and the layers after it."""

    out: int
    kernel: tuple[int, int]
    padding: tuple[int, int] = (1, 1)
    groups: int = 0
    rectified: bool = True
    bias: bool = True


class Case:
    """Random rows, parameters and a gradient of the output."""

    def __init__(
        self, rows: int, channels: int, sides: tuple[int, int], *layers: Layer, whole: bool = False
    ) -> None:
        """``whole``: all numbers are integers, and there is no norm."""
        rng = stream(0, 0, "world", "pooled")

        def drawn(*size: int) -> Tensor:
            if whole:  # small ones, so that sums of sums stay exact
                most = 3 if len(layers) == 1 else 1
                return torch.randint(-most, most + 1, size, generator=rng).float()
            return torch.randn(*size, generator=rng)

        self.x = drawn(rows, channels, *sides)
        own, forms = [], []
        for out, taps, padding, groups, rectified, bias in layers:
            groups = 0 if whole else groups
            weight = drawn(out, channels, *taps)
            affine = (drawn(out), drawn(out)) if groups else (None, None)
            own.append(Parameters(weight, drawn(out) if bias else None, *affine))
            forms.append(Form(padding, groups, 1e-5, rectified))
            channels = out
        self.own, self.forms = tuple(own), tuple(forms)
        self.gradient = drawn(*self.by_torch(self.x, self.own).shape)

    def by_torch(self, x: Tensor, own: Sequence[Parameters]) -> Tensor:
        """The four layers, written out here; and their gradients."""
        for each, form in zip(own, self.forms, strict=True):
            x = functional.conv2d(x, each.weight, each.bias, padding=form.padding)
            x = functional.max_pool2d(x, 2)
            if form.groups:
                x = functional.group_norm(x, form.groups, each.gamma, each.beta, form.eps)
            x = functional.relu(x) if form.rectified else x
        return x

    def by_kernels(self, x: Tensor, own: Sequence[Parameters]) -> Tensor:
        return fused_conv.fused_conv(x, own, self.forms)

    def outcome(
        self,
        compute: Callable[[Tensor, Sequence[Parameters]], Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """Output and gradients of rows and of parameters."""
        x = self.x.to(dtype).requires_grad_()
        own = [
            Parameters(*(None if p is None else p.to(dtype).requires_grad_() for p in each))  # type: ignore[arg-type]
            for each in self.own
        ]
        y = compute(x, own)
        some = [x, *(p for each in own for p in each if p is not None)]
        return [y.detach(), *torch.autograd.grad(y, some, self.gradient.to(dtype))]


def of(rows: int, channels: int, sides: tuple[int, int], *layers: Layer) -> Callable[..., Case]:
    """A case whose rows can be changed later."""
    return lambda rows=rows, **whole: Case(rows, channels, sides, *layers, **whole)


SECOND, THIRD = Layer(32, (3, 3), groups=4), Layer(64, (3, 3), groups=4)
SHAPES: dict[str, Callable[..., Case]] = {
    # the three of small_cnn, LeNet's two, FedTriNet's, pfl's, ResNet-9's; and unused shapes
    "grey": of(3, 1, (28, 28), Layer(16, (5, 5), (2, 2), groups=4)),
    "second": of(2, 16, (14, 14), SECOND),
    "odd sides": of(2, 32, (7, 7), THIRD),
    "digits": of(2, 32, (2, 2), THIRD),
    "few kernels": of(2, 3, (32, 32), Layer(6, (5, 5), (2, 2))),
    "no padding": of(2, 6, (14, 14), Layer(16, (5, 5), (0, 0))),
    "ten channels": of(3, 10, (12, 12), Layer(20, (5, 5), (0, 0), 4, rectified=False)),
    "coloured": of(2, 3, (9, 13), Layer(5, (3, 3), groups=1, bias=False)),
    "wide": of(2, 64, (8, 8), Layer(128, (3, 3), bias=False)),
    "even kernel": of(2, 2, (6, 6), Layer(8, (4, 4), (2, 2))),
    "long row": of(2, 5, (5, 70), Layer(17, (1, 1), (0, 0))),
    "long row of three": of(2, 5, (6, 70), Layer(17, (3, 3), groups=1)),
    "no square": of(1, 40, (7, 9), Layer(24, (2, 7), (1, 3))),
    "many places": of(2, 16, (32, 40), Layer(24, (3, 3), groups=3)),
    "over 64": of(2, 7, (30, 30), Layer(70, (3, 3), (0, 0), 7)),
    "many lines": of(2, 200, (6, 6), Layer(24, (7, 2), (3, 1), 4)),
    "one place": of(4, 4, (2, 2), Layer(4, (1, 1), (0, 0))),
    # several at once
    "small_cnn": of(3, 1, (28, 28), Layer(16, (5, 5), (2, 2), 4), SECOND, THIRD),
    "small_cnn of digits": of(4, 1, (8, 8), Layer(16, (5, 5), (2, 2), 4), SECOND, THIRD),
    "LeNet": of(3, 3, (32, 32), Layer(6, (5, 5), (2, 2)), Layer(16, (5, 5), (0, 0))),
    "unlike": of(
        2, 2, (17, 40), Layer(17, (2, 3), (0, 1), 1), Layer(5, (3, 3), rectified=False, bias=False),
        Layer(9, (1, 4), (2, 2), 3, bias=False),
    ),
}  # fmt: skip
every_shape = pytest.mark.parametrize("shape", SHAPES)


@every_shape
@pytest.mark.usefixtures("each_generation")
def test_outputs_and_gradients_equal_those_of_torch(shape: str, calls: list[str]) -> None:
    case = SHAPES[shape]()
    expected = case.outcome(case.by_torch, torch.float64)
    # A bias before a norm with one channel per group has no effect: compare with the largest
    # gradient.
    largest = max(float(g.abs().max()) for g in expected[1:])
    for mine, reference in zip(case.outcome(case.by_kernels), expected, strict=True):
        assert_close(mine.double(), reference, rtol=1e-4, atol=2e-6 * largest)
    assert calls == ["forward", "backward"]


@every_shape
@pytest.mark.usefixtures("each_generation")
def test_on_whole_numbers_they_equal_torch_to_the_bit(shape: str) -> None:
    """Sums of whole numbers are exact in any order, and many positions tie for the largest."""
    case = SHAPES[shape](whole=True)
    for mine, reference in zip(
        case.outcome(case.by_kernels), case.outcome(case.by_torch, torch.float64), strict=True
    ):
        assert torch.equal(mine.double(), reference)


@settings(max_examples=40)
@given(st.data())
def test_they_equal_torch_for_layers_of_any_size(data: st.DataObject) -> None:
    if not HERE:
        pytest.skip("no kernels were compiled")

    def number(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    left = sides = [number(2, 18), number(2, 18)]
    layers = list[Layer]()
    while not layers or (len(layers) < 3 and min(left) > 1 and number(0, 1)):
        padding = number(0, 3), number(0, 3)
        padded = [side + 2 * zeros for side, zeros in zip(left, padding, strict=True)]
        kernel = number(1, min(6, padded[0] - 1)), number(1, min(6, padded[1] - 1))
        left = [(side - taps + 1) // 2 for side, taps in zip(padded, kernel, strict=True)]
        rectified, bias = data.draw(st.booleans()), data.draw(st.booleans())
        layers.append(Layer(number(1, 20), kernel, padding, 0, rectified, bias))
    case = Case(number(1, 3), number(1, 20), (sides[0], sides[1]), *layers, whole=True)
    name = data.draw(st.sampled_from(HERE))
    with patch.object(dispatch, "_find_latest", lambda: name):
        found = case.outcome(case.by_kernels)
    for mine, reference in zip(found, case.outcome(case.by_torch, torch.float64), strict=True):
        assert torch.equal(mine.double(), reference)


@pytest.mark.usefixtures("each_generation")
def test_nan_and_inf_occur_where_torch_has_them_and_in_no_other_row() -> None:
    case = SHAPES["second"]()
    clean = case.by_kernels(case.x, case.own)
    for value in (math.nan, math.inf):
        case.x[0, 3, 5, 6] = value  # of the row that is computed first
        mine, reference = case.by_kernels(case.x, case.own), case.by_torch(case.x, case.own)
        assert torch.equal(mine[0].isnan(), reference[0].isnan()) and mine[0].isnan().any()
        assert torch.equal(mine[1], clean[1])


@pytest.mark.parametrize("shape", ["second", "wide", "no padding"])
@pytest.mark.usefixtures("each_generation")
def test_a_non_finite_gradient_goes_where_torch_sends_it(shape: str) -> None:
    case = SHAPES[shape]()
    case.gradient[0, :, 1, 2] = math.nan
    for mine, reference in zip(
        case.outcome(case.by_kernels), case.outcome(case.by_torch, torch.float64), strict=True
    ):
        assert torch.equal(mine.isnan(), reference.isnan())
    assert case.outcome(case.by_kernels)[1][0].isnan().any()


@pytest.mark.usefixtures("each_generation")
def test_without_a_norm_the_maximum_of_four_is_nan_if_one_is_nan() -> None:
    case = SHAPES["few kernels"]()
    case.x[0, 0, 9, 9] = math.nan  # also in the second of two pooled positions
    mine, reference = case.by_kernels(case.x, case.own), case.by_torch(case.x, case.own)
    assert torch.equal(mine.isnan(), reference.isnan()) and 0 < mine.isnan().sum() < mine.numel()


@every_shape
@pytest.mark.usefixtures("each_generation")
def test_a_row_has_the_same_bits_beside_any_other_rows(shape: str) -> None:
    case = SHAPES[shape](rows=3)
    alone = [case.by_kernels(row[None], case.own) for row in case.x]
    assert torch.equal(case.by_kernels(case.x, case.own), torch.cat(alone))


@every_shape
@pytest.mark.usefixtures("each_generation")
def test_no_number_outside_the_outputs_is_written(shape: str) -> None:
    """All outputs have guard numbers before and after them, which must not change."""
    case, guard = SHAPES[shape](), 64
    held: list[tuple[Tensor, Tensor]] = []

    def guarded(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def empty(*size: Any, **kind: Any) -> Tensor:
            own = real(*size, **kind)
            room = torch.full((own.numel() + 2 * guard,), 7, dtype=own.dtype)
            held.append((room, own))
            return room[guard : guard + own.numel()].view(own.shape)

        return empty

    with (
        patch.object(torch, "empty", guarded(torch.empty)),
        patch.object(torch, "empty_like", guarded(torch.empty_like)),
    ):
        _, done = kernel.forward(case.x, case.own, case.forms)
        kernel.backward(case.gradient, done, inputs=True, together=1)
    assert len(held) == 4  # output and saved tensors; gradients of inputs and of parameters
    for room, own in held:
        assert (room[:guard] == 7).all() and (room[guard + own.numel() :] == 7).all()


@pytest.mark.parametrize("shape", ["second", "small_cnn of digits", "unlike"])
@pytest.mark.usefixtures("each_generation")
def test_gradients_of_single_rows_equal_those_of_each_row_alone(shape: str) -> None:
    case = SHAPES[shape](rows=6)
    _, done = kernel.forward(case.x, case.own, case.forms)
    for together in (1, 2, 3, 6):
        _, sums = kernel.backward(case.gradient, done, inputs=False, together=together)
        assert sums is not None and len(sums) == 6 // together
        mine = [place.for_each_agent(sums) for place in done.plan.parameters if place is not None]
        for part in range(len(sums)):
            some = slice(part * together, (part + 1) * together)
            alone = SHAPES[shape](rows=6)
            alone.x, alone.gradient = case.x[some], case.gradient[some]
            expected = alone.outcome(alone.by_kernels)[2:]
            for each, other in zip(mine, expected, strict=True):
                assert torch.equal(each[part], other)


@pytest.mark.usefixtures("each_generation")
def test_parameters_with_other_memory_layouts_are_read_correctly() -> None:
    case = SHAPES["second"]()
    expected = case.outcome(case.by_kernels)
    apart = (p if p is None else p.repeat_interleave(2, dim=0)[::2] for p in case.own[0])
    case.own = (Parameters(*apart),)  # type: ignore[arg-type]
    assert not any(p is None or p.is_contiguous() for p in case.own[0])
    for mine, reference in zip(case.outcome(case.by_kernels), expected, strict=True):
        assert torch.equal(mine, reference)


def test_second_derivatives_equal_those_of_torch(calls: list[str]) -> None:
    case = SHAPES["second"]()

    def penalty(
        compute: Callable[[Tensor, Sequence[Parameters]], Tensor], dtype: torch.dtype
    ) -> Tensor:
        x = case.x.to(dtype).requires_grad_()
        own = [Parameters(*(None if p is None else p.to(dtype) for p in case.own[0]))]  # type: ignore
        (of_x,) = torch.autograd.grad(
            compute(x, own), x, case.gradient.to(dtype), create_graph=True
        )
        found: Tensor = torch.autograd.grad(of_x.square().sum(), x)[0]
        return found

    mine = penalty(case.by_kernels, torch.float32)
    assert calls[0] == "forward"
    assert_close(mine.double(), penalty(case.by_torch, torch.float64), rtol=1e-3, atol=1e-3)


def test_changing_weights_before_the_backward_pass_is_an_error() -> None:
    if not HERE:
        pytest.skip("no kernels were compiled")
    case = SHAPES["second"]()
    weight = case.own[0].weight.requires_grad_()
    y = case.by_kernels(case.x, case.own)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), weight)


# In bfloat16 ------------------------------------------------------------------------------------


def test_a_bfloat16_network_is_fused_with_its_norm_and_has_float32_outputs(
    calls: list[str],
) -> None:
    with seeded(stream(0, 0, "world", "model")):
        network = build_classifier(ModelSettings("small_cnn"), (1, 28, 28), 10, "bfloat16")
    x = torch.randn(4, 1, 28, 28, generator=stream(0, 0, "world", "rows"))
    mine = network(x)
    assert calls == ["forward"] and mine.dtype == torch.float32
    with dispatch.disabled():
        reference = network(x)
    assert_close(mine, reference, rtol=0.05, atol=0.05)
    assert not torch.equal(mine, reference)


# Which layers -----------------------------------------------------------------------------------


def convolution(**other: Any) -> nn.Conv2d:
    return nn.Conv2d(**{"in_channels": 3, "out_channels": 4, "kernel_size": 3, **other})


def fused_in(*layers: nn.Module) -> list[tuple[int, int]]:
    """The positions from and to which layers are fused."""
    network = optimize_layout(nn.Sequential(*layers))
    runs = network.runs if isinstance(network, FusedSequential) else {}
    return [(run.convolution, run.end) for run in runs.values()]


def test_consecutive_layers_are_fused() -> None:
    assert fused_in(convolution(), nn.MaxPool2d(2)) == [(0, 2)]
    assert fused_in(convolution(), nn.ReLU(), nn.MaxPool2d(2)) == [(0, 3)]  # pooled first
    norm, relu = nn.GroupNorm(2, 4), nn.ReLU()
    assert fused_in(convolution(), nn.MaxPool2d(2), norm, relu, nn.Flatten()) == [(0, 4)]
    assert fused_in(convolution(), nn.MaxPool2d(2), nn.Identity(), nn.ReLU()) == [(0, 4)]
    assert fused_in(nn.ReLU(), convolution(), nn.MaxPool2d(2, 2), nn.Tanh(), relu) == [(1, 3)]
    dropout, pooling, same = nn.Dropout2d(), nn.MaxPool2d(2), nn.Identity()
    assert fused_in(convolution(), dropout, pooling, same, relu) == [(0, 4)]
    assert fused_in(convolution(), relu, dropout, pooling) == [(0, 3)]
    assert fused_in(convolution(), dropout, pooling, norm, relu) == [(0, 2)]  # normed after it


@pytest.mark.parametrize(
    "layers",
    [
        (convolution(stride=2), nn.MaxPool2d(2)),
        (convolution(dilation=2), nn.MaxPool2d(2)),
        (convolution(in_channels=4, groups=2), nn.MaxPool2d(2)),
        (convolution(padding="same"), nn.MaxPool2d(2)),
        (convolution(padding=1, padding_mode="reflect"), nn.MaxPool2d(2)),
        (convolution(), nn.MaxPool2d(3)),
        (convolution(), nn.MaxPool2d(2, stride=1)),
        (convolution(), nn.MaxPool2d(2, padding=1)),
        (convolution(), nn.MaxPool2d(2, ceil_mode=True)),
        (convolution(), nn.AvgPool2d(2)),
        (convolution(), nn.Dropout(), nn.MaxPool2d(2)),
        (convolution(), nn.Tanh(), nn.MaxPool2d(2)),
        (convolution(),),
    ],
)
def test_other_layers_are_left_to_torch(layers: tuple[nn.Module, ...]) -> None:
    assert fused_in(*layers) == []


def test_norms_without_weights_and_batch_norms_are_left_to_torch() -> None:
    for norm in (nn.GroupNorm(2, 4, affine=False), nn.BatchNorm2d(4)):
        assert fused_in(convolution(), nn.MaxPool2d(2), norm, nn.ReLU()) == [(0, 2)]


def small_cnn(dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    with seeded(stream(0, 0, "world", "model")):
        named = {"name": "small_cnn", "width": 4, **settings}
        return build_classifier(ModelSettings(**named), (1, 8, 8), 10).to(dtype)


ROWS = torch.randn(4, 1, 8, 8, generator=stream(0, 0, "world", "rows"))


def trunk_of(network: nn.Module) -> FusedSequential:
    trunk = network.get_submodule("trunk")
    assert isinstance(trunk, FusedSequential)
    return trunk


def test_fusing_changes_no_name_and_no_value_of_a_parameter() -> None:
    mine = small_cnn()
    plain = nn.Sequential(*trunk_of(mine))
    prefixed = {f"trunk.{name}": value for name, value in plain.state_dict().items()}
    for name, value in prefixed.items():
        assert mine.state_dict()[name] is not value and torch.equal(mine.state_dict()[name], value)
    assert [*prefixed, "head.weight", "head.bias"] == list(mine.state_dict())


@pytest.mark.parametrize("norm", ["group", "none", "batch"])
def test_a_fused_network_computes_the_same(norm: str, calls: list[str]) -> None:
    network = small_cnn(norm=norm)
    mine = network(ROWS)
    expected = ["forward"] * (3 if norm == "batch" else 1)  # batch norms are computed by torch
    assert calls == expected
    with dispatch.disabled():
        assert_close(network(ROWS), mine, rtol=1e-4, atol=1e-5)
    assert calls == expected


def test_torch_computes_float64_several_threads_autocast_and_hooked_layers(
    calls: list[str],
) -> None:
    small_cnn(torch.float64)(ROWS.double())
    with patch.object(torch, "get_num_threads", lambda: 2):
        small_cnn()(ROWS)
    with torch.autocast("cpu", torch.float16):
        small_cnn()(ROWS)
    seen: list[Tensor] = []
    network = small_cnn()
    for layer in (0, 4, 8):
        network.get_submodule(f"trunk.{layer}").register_forward_hook(lambda *a: seen.append(a[2]))
    network(ROWS)
    assert calls == [] and len(seen) == 3


def test_layers_around_a_hooked_layer_are_still_fused(calls: list[str]) -> None:
    network, seen = small_cnn(), list[Tensor]()
    expected = network(ROWS)
    network.get_submodule("trunk.5").register_forward_hook(lambda *given: seen.append(given[2]))
    assert_close(network(ROWS), expected, rtol=1e-4, atol=1e-5)
    # All three; then the first and the last, with torch's layers between them.
    assert calls == ["forward"] * 3 and len(seen) == 1


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_computed_by_a_hook_is_left_to_torch(calls: list[str]) -> None:
    layers = optimize_layout(nn.Sequential(convolution(), nn.MaxPool2d(2)))
    assert isinstance(layers, FusedSequential)
    nn.utils.weight_norm(layers[0])
    assert layers(torch.zeros(2, 3, 8, 8)).shape == (2, 4, 3, 3)
    assert calls == []


def test_fused_outputs_may_be_changed_in_place() -> None:
    with seeded(stream(0, 0, "world", "model")):
        layers = convolution(), nn.MaxPool2d(2), nn.LeakyReLU(0.2, inplace=True)
    x = torch.randn(2, 3, 8, 8, generator=stream(0, 0, "world", "rows"))
    network, weight = optimize_layout(nn.Sequential(*layers)), layers[0].weight
    (mine,) = torch.autograd.grad(network(x).square().sum(), weight)
    (reference,) = torch.autograd.grad(nn.Sequential(*layers)(x).square().sum(), weight)
    assert_close(mine, reference)


def test_rows_of_a_wrong_shape_are_refused_with_the_message_of_torch(calls: list[str]) -> None:
    network = small_cnn().get_submodule("trunk")
    with pytest.raises(RuntimeError, match="to have 1 channels, but got 2 channels instead"):
        network(torch.zeros(3, 2, 8, 8))
    with pytest.raises(RuntimeError, match=r"Output size is too small"):
        nn.Sequential(convolution(), nn.MaxPool2d(2))(torch.zeros(2, 3, 3, 3))
    with pytest.raises(RuntimeError, match=r"Output size is too small"):
        optimize_layout(nn.Sequential(convolution(), nn.MaxPool2d(2)))(torch.zeros(2, 3, 3, 3))
    nobody = optimize_layout(nn.Sequential(convolution(), nn.MaxPool2d(2)))(torch.zeros(0, 3, 8, 8))
    assert nobody.shape == (0, 4, 3, 3)
    assert calls == []


def test_a_convolution_with_many_weights_is_left_to_torch(calls: list[str]) -> None:
    network = optimize_layout(nn.Sequential(nn.Conv2d(256, 512, 3), nn.MaxPool2d(2)))
    assert fused_conv.MAX_WEIGHTS < 9 * 256 * 512
    network(torch.zeros(1, 256, 4, 4))
    assert calls == []


def test_kernels_of_another_version_are_not_used_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HERE:
        pytest.skip("no kernels were compiled")
    monkeypatch.setitem(dispatch.KERNEL_VERSIONS, "views", -1)
    monkeypatch.setattr(dispatch, "_find_latest", dispatch._find_latest.__wrapped__)
    monkeypatch.setattr(logging.getLogger("privssl"), "propagate", True)
    assert dispatch.instruction_set() is None
    assert [r.message for r in caplog.records] == [
        "privssl/csrc was compiled from another version, so torch computes instead. Compile it "
        "again: pip install --editable ."
    ]
    small_cnn()(ROWS)


def test_without_compiled_kernels_torch_computes_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "library", lambda kernel, generation: None)
    monkeypatch.setattr(dispatch, "_find_latest", dispatch._find_latest.__wrapped__)
    assert dispatch.instruction_set() is None
    assert small_cnn()(ROWS).shape == (4, 10)


def test_precision_auto_prefers_float32_for_a_small_cnn_where_kernels_compute_its_layers() -> None:
    if not HERE:
        pytest.skip("no kernels were compiled")
    with patch.object(torch.cpu, "_is_avx512_bf16_supported", lambda: True):
        with patch.object(dispatch, "_find_latest", lambda: "avx512"):
            assert precision.fastest_precision("small_cnn", "cpu") == "float32"
            assert precision.fastest_precision("resnet9", "cpu") == "bfloat16"
        with patch.object(dispatch, "_find_latest", lambda: None):
            assert precision.fastest_precision("small_cnn", "cpu") == "bfloat16"


# Per-example gradients, for DP-SGD --------------------------------------------------------------


def loss_of(network: nn.Module) -> RowLoss:
    """Cross-entropy of a row with two passes: two images, and one more."""

    def loss(parameters: Networks, row: Mapping[str, Tensor]) -> Tensor:
        F = FunctionalModule(network, parameters["F"])
        views = torch.stack([row["x"], row["x"].flip(-1)])
        of_views = functional.cross_entropy(F(views), row["y"].expand(2))
        made: Tensor = of_views + F(row["x"][None]).square().mean()
        return made

    return loss


FIELDS = {"x": ROWS, "y": torch.tensor([3, 1, 4, 1])}


def written_out(network: nn.Module, fields: Mapping[str, Tensor]) -> dict[Any, Tensor]:
    """(B, *shape of the parameter)."""
    found = factored_gradients(loss_of(network), parameters_of({"F": network}), fields)
    each = torch.eye(len(fields["y"]), dtype=torch.float64)
    return {key: torch.stack([own.total(row) for row in each]) for key, own in found.items()}


@pytest.mark.parametrize("settings", [{}, {"norm": "none"}, {"name": "lenet"}])
@pytest.mark.usefixtures("each_generation")
def test_per_example_gradients_equal_those_of_one_row_at_a_time(
    settings: dict[str, Any], calls: list[str]
) -> None:
    network = small_cnn(**settings)
    mine = written_out(network, FIELDS)
    assert calls == ["forward", "forward", "backward", "backward"]  # two passes of F
    wide = small_cnn(torch.float64, **settings)
    fields = {"x": ROWS.double(), "y": FIELDS["y"]}
    expected = per_example_gradients(loss_of(wide), parameters_of({"F": wide}), fields)["F"]
    assert {name for _, name in mine} == set(expected)
    for (_, name), found in mine.items():
        assert_close(found.double(), expected[name], rtol=1e-3, atol=1e-5)


def test_a_row_does_not_change_the_gradient_of_other_rows(calls: list[str]) -> None:
    network = small_cnn()
    before = written_out(network, FIELDS)
    for value in (0.0, 1e30, math.nan):
        x = ROWS.clone()
        x[2] = value
        after = written_out(network, {**FIELDS, "x": x})
        for key, own in after.items():
            assert torch.equal(own[[0, 1, 3]], before[key][[0, 1, 3]])
        assert any(not torch.equal(after[key][2], before[key][2]) for key in after)
    assert "backward" in calls


def neighbours_gradients(*given: Any, real: Any = kernel.backward, **k: Any) -> Any:
    """A fault: every row's sum includes its neighbour's."""
    of_x, sums = real(*given, **k)
    return of_x, None if sums is None else sums + sums.roll(1, 0)


def test_a_row_moves_the_clipped_sum_by_at_most_the_clip_norm(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    network, clip = small_cnn(), 0.1

    def moved() -> float:
        """How far removing a row moves the sum; its gradient is longer than the clipping norm."""

        def total(drawn: Tensor) -> Tensor:
            found = factored_gradients(loss_of(network), parameters_of({"F": network}), FIELDS)
            sums = clipped_sums(list(found.values()), drawn, clip)
            return torch.cat([one.flatten() for one in sums])

        everyone = torch.ones(4, dtype=torch.bool)
        return float((total(everyone) - total(everyone & (torch.arange(4) != 2))).norm())

    assert 0.99 * clip < moved() <= clip
    assert "backward" in calls
    # The control: with shared sums, nulling a row shows its share in others.
    monkeypatch.setattr(kernel, "backward", neighbours_gradients)
    changed = {**FIELDS, "x": ROWS.clone()}
    changed["x"][2] = 0
    before, after = written_out(network, FIELDS), written_out(network, changed)
    assert any(not torch.equal(after[key][3], before[key][3]) for key in after)


def test_a_frozen_network_has_no_gradients_and_passes_those_of_other_networks() -> None:
    """F is frozen behind a trained layer: the layer's gradients equal those of torch.func."""

    def loss(network: nn.Module, first: nn.Module) -> RowLoss:
        def of_row(parameters: Networks, row: Mapping[str, Tensor]) -> Tensor:
            x = FunctionalModule(first, parameters["A"])(row["x"][None])
            made: Tensor = FunctionalModule(network).frozen()(x).square().mean()
            return made

        return of_row

    with seeded(stream(0, 0, "world", "first")):
        first = nn.Conv2d(1, 1, 3, padding=1)
    network = small_cnn()
    found = factored_gradients(loss(network, first), parameters_of({"A": first}), FIELDS)
    network, first = network.double(), first.double()
    fields = {**FIELDS, "x": ROWS.double()}
    expected = per_example_gradients(loss(network, first), parameters_of({"A": first}), fields)["A"]
    for (_, name), own in found.items():
        total = own.total(torch.ones(4).double())
        assert_close(total.double(), expected[name].sum(0), rtol=1e-3, atol=1e-5)


def test_where_one_of_several_layers_is_frozen_the_others_have_their_per_example_gradients() -> (
    None
):
    def network_of(dtype: torch.dtype) -> nn.Module:
        network = small_cnn(dtype)
        network.get_parameter("trunk.4.weight").requires_grad_(False)
        return network

    mine = written_out(network_of(torch.float32), FIELDS)
    fields = {"x": ROWS.double(), "y": FIELDS["y"]}
    wide = network_of(torch.float64)
    expected = per_example_gradients(loss_of(wide), parameters_of({"F": wide}), fields)["F"]
    assert {name for _, name in mine} == set(expected)
    for (_, name), found in mine.items():
        assert_close(found.double(), expected[name], rtol=1e-3, atol=1e-5)


def test_changing_rows_in_place_after_a_fused_layer_is_refused(calls: list[str]) -> None:
    network = trunk_of(small_cnn())
    network[-1] = nn.Identity()  # without a copy

    def loss(parameters: Networks, row: Mapping[str, Tensor]) -> Tensor:
        made: Tensor = FunctionalModule(network, parameters["F"])(row["x"][None]).mul_(2).sum()
        return made

    with pytest.raises(PrivacyError, match=r"the output of F\.8\.weight is changed in place"):
        factored_gradients(loss, parameters_of({"F": network}), FIELDS)
    assert "forward" in calls
