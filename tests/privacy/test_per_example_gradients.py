"""Gradients of rows that are kept as factors equal those of one row at a time.

``per_example_gradients`` recognises layers while a loss runs and computes their gradients itself.
The tests compare them with ``torch.func``, for the shipped networks and losses and for other uses
of a weight. The norm used for clipping is never smaller than that of the summed contribution.
"""

import math
from collections.abc import Callable, Mapping
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from privssl.errors import PrivacyError
from privssl.models.convnets import LeNet, SmallCNN
from privssl.ops import dispatch
from privssl.privacy import clipping
from privssl.privacy.clipping import (
    DenseGradients,
    OuterProductGradients,
    PerExampleGradients,
    clipped_sums,
)
from privssl.privacy.per_example_gradients import (
    Parameters,
    RowLoss,
    factored_gradients,
    per_example_gradients,
)
from privssl.training.batched.deferred import FunctionalModule
from tests.support.kernel_generations import HERE
from tests.support.privacy import SHIPPED, joint_loss, mixing, networks, parameters_of

ROWS = 4


def expand(gradients: PerExampleGradients) -> Tensor:
    """(B, *shape): the sum over rows with a factor of 1 for one row and 0 for all others."""
    return torch.stack([gradients.total(one) for one in torch.eye(ROWS, dtype=torch.float64)])


def check_equal(loss: RowLoss, nets: Mapping[str, nn.Module], fields: Mapping[str, Tensor]) -> None:
    """Compare all gradients, their norms, and a sum with arbitrary factors."""
    parameters = parameters_of({name: net.double() for name, net in nets.items()})
    expected = per_example_gradients(loss, parameters, fields)
    found = factored_gradients(loss, parameters, fields)
    factors = torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    largest = max(float(g.abs().max()) for named in expected.values() for g in named.values())
    tiny = 1e-9 * largest
    for net, named in expected.items():
        for name, reference in named.items():
            if (net, name) not in found:
                assert not reference.any(), f"{net}.{name} has no gradient"
                continue
            mine = found[net, name]
            torch.testing.assert_close(expand(mine), reference, rtol=1e-6, atol=tiny)
            total = torch.einsum("i,i...", factors, reference)
            torch.testing.assert_close(mine.total(factors), total, rtol=1e-6, atol=tiny)
            norms = reference.flatten(1).norm(dim=1)
            torch.testing.assert_close(mine.norms(), norms, rtol=2e-3, atol=tiny)
    check_batched(loss, parameters, fields)


def check_batched(
    loss: RowLoss, parameters: Parameters, fields: Mapping[str, Tensor], rtol: float = 1e-6
) -> None:
    """Norms and sums of three agents with different weights and rows equal those of each agent
    alone.
    """
    weights: list[Parameters] = [
        {
            net: {name: (p.detach() * (1 + 0.1 * n)).requires_grad_() for name, p in named.items()}
            for net, named in parameters.items()
        }
        for n in range(3)
    ]
    rows = [{name: value.roll(n, 0) for name, value in fields.items()} for n in range(3)]
    stacked = {
        net: {
            name: torch.stack([own[net][name].detach() for own in weights]).requires_grad_()
            for name in named
        }
        for net, named in parameters.items()
    }
    together = {name: torch.stack([own[name] for own in rows]) for name in fields}
    found = factored_gradients(loss, stacked, together, agents=True)
    factors = torch.tensor([[0.5, 0, 2, 1], [1, 1, 0, 3], [0, 1, 1, 1]], dtype=torch.float64)
    for n in range(3):
        alone = factored_gradients(loss, weights[n], rows[n])
        assert list(found) == list(alone)
        totals = {key: own.total(factors[n]) for key, own in alone.items()}
        tiny = 1e-9 * max(float(total.abs().max()) for total in totals.values())
        for key, own in alone.items():
            total, mine = totals[key], found[key].total(factors)[n]
            torch.testing.assert_close(mine, total, rtol=rtol, atol=tiny)
            norms = found[key].norms()[ROWS * n : ROWS * (n + 1)]
            torch.testing.assert_close(norms, own.norms(), rtol=2e-3, atol=tiny)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    "protect", [("F",), ("G",), ("D",), ("F", "G"), ("D", "G"), ("F", "G", "D")]
)
@pytest.mark.parametrize("views", [1, 2])
def test_gradients_of_the_joint_loss_of_fedssl_equal_those_of_one_row_at_a_time(
    protect: tuple[str, ...], views: int
) -> None:
    nets = {name: net.double() for name, net in networks().items()}
    fields = mixing(ROWS, views, dtype=torch.float64)
    check_equal(joint_loss(nets, protect), {name: nets[name] for name in protect}, fields)


@pytest.mark.parametrize("which", SHIPPED)
def test_gradients_of_every_shipped_network_equal_those_of_one_row_at_a_time(which: str) -> None:
    build, rows_of = SHIPPED[which]
    network = build().double()

    def loss(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        return rows_of(
            FunctionalModule(network, parameters["N"]), {k: v[None] for k, v in row.items()}
        )[0]

    fields = {key: field[:, 0] for key, field in mixing(ROWS, 1, torch.float64).items()}
    check_equal(loss, {"N": network}, fields)


class Any2d(nn.Module):
    """A layer between two others."""

    def __init__(self, layer: nn.Module, channels: int) -> None:
        super().__init__()
        self.before, self.layer = nn.Conv2d(5, 6, 3, stride=2, padding=1), layer
        self.after = nn.Conv2d(channels, 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.layer(self.before(x).tanh()).tanh())
        return out


def twice(channels: int, first: nn.Module, between: nn.Module) -> nn.Module:
    """A convolution applied twice to each row."""
    shared = nn.Conv2d(channels, channels, 3, padding=1)
    return nn.Sequential(first, shared, between, shared)


LAYERS: dict[str, Callable[[], Any2d]] = {
    "stride": lambda: Any2d(nn.Conv2d(6, 4, (3, 2), stride=(2, 1), padding=(0, 1)), 4),
    "stride that leaves a border": lambda: Any2d(nn.Conv2d(6, 4, 2, stride=3), 4),
    "few channels": lambda: Any2d(nn.Sequential(nn.Conv2d(6, 2, 1), nn.Conv2d(2, 3, 3)), 3),
    "no bias": lambda: Any2d(nn.Conv2d(6, 4, 3, bias=False), 4),
    "dilation": lambda: Any2d(nn.Conv2d(6, 4, 2, dilation=2), 4),
    "groups": lambda: Any2d(nn.Conv2d(6, 4, 3, groups=2), 4),
    "padding by name": lambda: Any2d(nn.Conv2d(6, 4, 3, padding="same"), 4),
    "padding that reflects": lambda: Any2d(
        nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"), 4
    ),
    "transposed": lambda: Any2d(nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1), 4),
    "transposed with a border": lambda: Any2d(
        nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1), 4
    ),
    "transposed in groups": lambda: Any2d(nn.ConvTranspose2d(6, 4, 2, groups=2), 4),
    "few places": lambda: Any2d(
        nn.Sequential(nn.Conv2d(6, 40, (4, 3)), nn.ConvTranspose2d(40, 30, (2, 3))), 30
    ),
    # 12 positions of each row, and then 12 more
    "few places, twice": lambda: Any2d(twice(30, nn.Conv2d(6, 30, 3), nn.Tanh()), 30),
    "places that are few in one use, and many in two": lambda: Any2d(
        twice(20, nn.Conv2d(6, 20, 3), nn.Tanh()), 20
    ),
    "places that are many in one use, and few in the other": lambda: Any2d(
        twice(20, nn.Conv2d(6, 20, 1), nn.AdaptiveMaxPool2d(1)), 20
    ),
    "group norm": lambda: Any2d(nn.GroupNorm(3, 6), 6),
    "group norm without weights": lambda: Any2d(nn.GroupNorm(3, 6, affine=False), 6),
    "layer norm": lambda: Any2d(nn.LayerNorm([6, 4, 4]), 6),
    "slopes": lambda: Any2d(nn.PReLU(6), 6),
}


@pytest.mark.parametrize("which", LAYERS)
def test_layers_of_every_kind_have_the_gradients_of_one_row_at_a_time(which: str) -> None:
    network = LAYERS[which]().double()

    def loss(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = FunctionalModule(network, parameters["N"])(row["x"])
        return out.square().sum()

    x = torch.randn(ROWS, 3, 5, 7, 8, generator=torch.Generator().manual_seed(0)).double()
    check_equal(loss, {"N": network}, {"x": x})


@pytest.mark.parametrize(
    ("layer", "factors"),
    [
        (nn.Conv2d(6, 40, 3), True),  # 3 images with 2 by 2 positions
        (nn.Conv2d(6, 4, 3), False),  # the same positions, fewer weights
        (nn.Conv2d(6, 40, 1), False),  # 16 positions in each image
        # a transposed kernel has the positions of its input
        (nn.ConvTranspose2d(6, 40, 4, padding=3), False),
    ],
)
def test_convolutions_with_many_weights_and_few_positions_keep_their_gradients_as_factors(
    layer: nn.Conv2d | nn.ConvTranspose2d, factors: bool
) -> None:
    network = Any2d(layer, layer.out_channels)
    found = factored_gradients(
        lambda p, row: FunctionalModule(network, p["N"])(row["x"]).square().sum(),
        parameters_of({"N": network}),
        {"x": torch.randn(ROWS, 3, 5, 7, 8)},
    )
    assert isinstance(
        found["N", "layer.weight"], OuterProductGradients if factors else DenseGradients
    )


def weight_norm(p: Parameters, x: Tensor) -> Tensor:
    """Weight decay in addition to the usual use."""
    decay: Tensor = p["N"]["weight"].norm()
    return functional.linear(x, p["N"]["weight"], p["N"]["bias"]).sum() + decay


def weight_twice(p: Parameters, x: Tensor) -> Tensor:
    w = p["N"]["weight"]
    once = functional.linear(x, w, p["N"]["bias"]).tanh()
    return functional.linear(functional.linear(once, w.mT), w).square().sum()


def weight_partly_detached(p: Parameters, x: Tensor) -> Tensor:
    w = p["N"]["weight"]
    return functional.linear(functional.linear(x, w.detach()).cos() @ w, w, p["N"]["bias"]).sum()


def bias_alone(p: Parameters, x: Tensor) -> Tensor:
    return functional.linear(x, p["N"]["weight"].detach(), p["N"]["bias"]).square().sum()


def by_matrix_product(p: Parameters, x: Tensor) -> Tensor:
    out: Tensor = x @ p["N"]["weight"].mT + p["N"]["bias"]
    return out.square().sum()


def on_constants(p: Parameters, x: Tensor) -> Tensor:
    constant = torch.ones(2, 3, dtype=x.dtype)
    return functional.linear(constant, p["N"]["weight"], p["N"]["bias"]).square().sum() * x.mean()


def under_its_own_vmap(p: Parameters, x: Tensor) -> Tensor:
    def one(place: Tensor) -> Tensor:
        return functional.linear(place, p["N"]["weight"], p["N"]["bias"]).square().sum()

    return vmap(one)(x).sum()


@pytest.mark.parametrize(
    "use",
    [weight_norm, weight_twice, weight_partly_detached, bias_alone, by_matrix_product, on_constants,
     under_its_own_vmap],
)  # fmt: skip
@pytest.mark.parametrize("places", [1, 2, 9])
def test_every_use_of_a_weight_in_a_loss_has_the_right_gradient(
    use: Callable[[Parameters, Tensor], Tensor], places: int
) -> None:
    torch.manual_seed(1)
    x = torch.randn(ROWS, places, 3, dtype=torch.float64)
    check_equal(lambda p, row: use(p, row["x"]), {"N": nn.Linear(3, 5)}, {"x": x})


def test_a_weight_that_no_loss_uses_has_no_gradient() -> None:
    network = nn.Linear(3, 2)
    found = factored_gradients(
        lambda p, row: (row["x"] * p["N"]["bias"]).sum(),
        parameters_of({"N": network}),
        {"x": torch.ones(ROWS, 2)},
    )
    assert list(found) == [("N", "bias")]


def test_an_output_that_is_changed_in_place_is_refused_by_layer_name() -> None:
    network = nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True), nn.Linear(2, 1))
    with pytest.raises(PrivacyError, match=r"output of N\.0\.weight is changed in place"):
        factored_gradients(
            lambda p, row: FunctionalModule(network, p["N"])(row["x"][None]).sum(),
            parameters_of({"N": network}),
            {"x": torch.ones(ROWS, 3)},
        )


@pytest.mark.parametrize("build", [SmallCNN, LeNet])
@pytest.mark.parametrize("value", [0.5, 1e30, math.nan])
def test_changing_another_row_leaves_the_gradient_of_a_row_bit_equal(
    build: type[nn.Module], value: float
) -> None:
    network = build((1, 8, 8), 3, width=4)
    x = torch.randn(ROWS, 1, 1, 8, 8, generator=torch.Generator().manual_seed(2))

    def each(x: Tensor) -> list[Tensor]:
        found = factored_gradients(
            lambda p, row: FunctionalModule(network, p["N"])(row["x"]).square().sum(),
            parameters_of({"N": network}),
            {"x": x},
        ).values()
        whole = [part.each for part in found if isinstance(part, DenseGradients)]
        halves = [
            h
            for part in found
            if isinstance(part, OuterProductGradients)
            for h in (part.left, part.right)
        ]
        return whole + halves

    before, changed = each(x), x.clone()
    changed[2] = value
    after, others = each(changed), torch.tensor([0, 1, 3])
    assert all(torch.equal(a[others], b[others]) for a, b in zip(after, before, strict=True))
    assert any(not torch.equal(a[2], b[2]) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "further",
    [
        {},
        {"ignore_index": 1},  # all views of some rows, one view of others
        {"label_smoothing": 0.1},  # computed by vmap, as is the next
        {"weight": torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)},
    ],
)
def test_gradients_of_cross_entropy_equal_those_of_one_row_at_a_time(
    reduction: str, further: dict[str, object]
) -> None:
    network = nn.Linear(5, 3)
    y = torch.tensor([[0, 2], [2, 0], [0, 1], [2, 2] if reduction == "mean" else [1, 1]])
    fields = {"x": torch.randn(ROWS, 2, 5, dtype=torch.float64), "y": y}

    def loss(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        logits = FunctionalModule(network, parameters["N"])(row["x"])
        found: Tensor = functional.cross_entropy(
            logits,
            row["y"],
            reduction=reduction,
            **further,  # type: ignore[arg-type]
        )
        return found

    check_equal(loss, {"N": network}, fields)


@pytest.mark.parametrize("value", [1e30, math.inf, math.nan])
def test_changing_other_logits_leaves_the_cross_entropy_gradient_of_a_row_bit_equal(
    value: float,
) -> None:
    network, x = nn.Linear(5, 3), torch.randn(ROWS, 2, 5)
    y = torch.tensor([[0, 2], [2, 0], [0, 1], [2, 2]])

    def loss(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(
            FunctionalModule(network, parameters["N"])(row["x"]), row["y"]
        )

    def bias(x: Tensor) -> Tensor:
        found = factored_gradients(loss, parameters_of({"N": network}), {"x": x, "y": y})
        mine = found["N", "bias"]
        assert isinstance(mine, DenseGradients)
        return mine.each

    moved = x.clone()
    moved[2] = value
    before, after = bias(x), bias(moved)
    assert torch.equal(before[[0, 1, 3]], after[[0, 1, 3]])
    assert not torch.equal(before[2], after[2])


def test_cross_entropy_per_view_and_with_shared_classes_has_the_right_gradient() -> None:
    network = nn.Linear(5, 3)
    fields = {"x": torch.randn(ROWS, 2, 5, dtype=torch.float64)}

    def each(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        logits = FunctionalModule(network, parameters["N"])(row["x"])
        y = row["x"][:, 0].gt(0).long()
        return functional.cross_entropy(logits, y, reduction="none").square().sum()

    def shared(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        logits = FunctionalModule(network, parameters["N"])(row["x"])
        return functional.cross_entropy(logits, torch.tensor([2, 0]))

    for loss in (each, shared):
        check_equal(loss, {"N": network}, fields)


# Measured norms are never smaller than the norms of summed contributions ----------------------


def longest(gradients: PerExampleGradients, clip: float) -> float:
    """The longest contribution of a row to a clipped sum, in clipping norms."""
    row = clipped_sums([gradients], torch.tensor([True]), clip)[0]
    return float(row.double().norm()) / clip


@given(
    places=st.sampled_from([1, 2, 3, 4, 16, 64]),
    apart=st.sampled_from([0.0, 1e-7, 1e-4, 1e-2, 1.0]),
    scale=st.sampled_from([1e-3, 1.0, 1e4]), seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=60)
def test_factors_whose_products_cancel_weigh_no_more_than_the_clip_norm(
    places: int, apart: float, scale: float, seed: int
) -> None:
    drawing = torch.Generator().manual_seed(seed)
    left, right = torch.randn(1, 1, 40, generator=drawing), torch.randn(1, 1, 30, generator=drawing)
    signs = torch.tensor([(-1.0) ** t for t in range(places)])[None, :, None]
    noise = torch.randn(1, places, 30, generator=drawing)
    gradients = OuterProductGradients(scale * left * signs, scale * (right + apart * noise))
    assert longest(gradients, clip=0.1) <= 1 + 1e-4


def test_the_check_of_cancelling_factors_detects_a_norm_in_single_precision() -> None:
    class SinglePrecision(OuterProductGradients):
        def norms(self) -> Tensor:
            squares = (self.left @ self.left.mT) * (self.right @ self.right.mT)
            return squares.sum(dim=(1, 2)).clamp(min=0.0).sqrt()

    worst = 0.0
    for seed in range(20):
        drawing = torch.Generator().manual_seed(seed)
        left = torch.randn(1, 1, 40, generator=drawing).expand(1, 2, 40)
        right = torch.randn(1, 1, 30, generator=drawing) * torch.tensor([1.0, -1.0])[None, :, None]
        right = right + 1e-4 * torch.randn(1, 2, 30, generator=drawing)
        worst = max(worst, longest(SinglePrecision(1e4 * left, 1e4 * right), clip=0.1))
    assert worst > 1 + 1e-4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_with_a_non_finite_factor_adds_nothing(bad: float, places: int, side: str) -> None:
    both = {"left": torch.ones(2, places, 2), "right": torch.ones(2, places, 3)}
    both[side][1, 0, 1] = bad
    if bad == 1e30:  # finite, but the product of two of them has no finite norm
        both["left"][1], both["right"][1] = bad, bad
    [total] = clipped_sums(
        [OuterProductGradients(both["left"], both["right"])], torch.tensor([True, True]), 1e6
    )
    expected = torch.full((2, 3), float(places), dtype=torch.float64)
    torch.testing.assert_close(total, expected)


# Losses that use torch.func or no_grad ----------------------------------------------------------


def vmap_over_constants(count: int) -> Callable[[Parameters, Tensor], Tensor]:
    """A vmap over constants: no position belongs to a row, but positions look like rows."""
    places = torch.randn(count, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def use(p: Parameters, x: Tensor) -> Tensor:
        def one(place: Tensor) -> Tensor:
            return functional.linear(place, p["N"]["weight"], p["N"]["bias"]).square().sum()

        return vmap(one)(places).sum() * x.mean()

    return use


def gradient_of_a_scale(p: Parameters, x: Tensor) -> Tensor:
    def scaled(by: Tensor) -> Tensor:
        return (by * functional.linear(x, p["N"]["weight"], p["N"]["bias"])).tanh().sum()

    slope: Tensor = grad(scaled)(torch.ones((), dtype=x.dtype))
    return slope.square()


def target_without_gradient(p: Parameters, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = functional.linear(x, p["N"]["weight"], p["N"]["bias"]).cos()
    return (functional.linear(x, p["N"]["weight"], p["N"]["bias"]) - target).square().sum()


def no_parameter(p: Parameters, x: Tensor) -> Tensor:
    return x.sum()


@pytest.mark.parametrize(
    "use",
    [vmap_over_constants(1), vmap_over_constants(ROWS), vmap_over_constants(7), gradient_of_a_scale,
     target_without_gradient],
)  # fmt: skip
def test_a_loss_that_uses_torch_func_has_the_right_gradient(
    use: Callable[[Parameters, Tensor], Tensor],
) -> None:
    torch.manual_seed(1)
    x = torch.randn(ROWS, 2, 3, dtype=torch.float64)
    check_equal(lambda p, row: use(p, row["x"]), {"N": nn.Linear(3, 5)}, {"x": x})


def test_a_loss_without_parameters_has_no_gradients() -> None:
    rows = {"x": torch.ones(ROWS, 3)}
    parameters = parameters_of({"N": nn.Linear(3, 2)})
    assert not factored_gradients(lambda p, row: no_parameter(p, row["x"]), parameters, rows)


@pytest.mark.parametrize("layer", [functional.conv2d, functional.conv_transpose2d])
def test_a_convolution_called_with_defaults_has_the_gradients_of_one_row_at_a_time(
    layer: Callable[..., Tensor],
) -> None:
    def loss(p: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        return layer(row["x"], p["N"]["weight"], p["N"]["bias"], (2,)).square().sum()

    x = torch.randn(ROWS, 2, 4, 7, 8, dtype=torch.float64)
    check_equal(loss, {"N": nn.Conv2d(4, 4, 3)}, {"x": x})


def test_an_input_that_is_changed_after_its_layer_is_refused() -> None:
    def loss(p: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        x = row["x"] + 1
        out = functional.linear(x, p["N"]["weight"], p["N"]["bias"])
        return out.square().sum() + x.mul_(2).sum()

    rows = {"x": torch.ones(ROWS, 3)}
    with pytest.raises(PrivacyError, match=r"input of N\.weight is changed in place"):
        factored_gradients(loss, parameters_of({"N": nn.Linear(3, 2)}), rows)


@pytest.mark.parametrize("clip", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("small", [1e-30, 2.6e-23, 1e-22, 1e-19])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("places", [1, 2, 9])
def test_the_norm_of_a_factor_is_measured_even_if_its_squares_underflow(
    small: float, clip: float, swapped: bool, places: int
) -> None:
    sides = torch.full((1, places, 512), small), torch.full((1, places, 512), 7e17)
    assert (
        longest(OuterProductGradients(*(reversed(sides) if swapped else sides)), clip) <= 1 + 1e-4
    )


def tiny_and_huge_factor(places: int) -> tuple[Tensor, Tensor]:
    """Factors whose product is nearly as long as a row may be. When the first is clipped to 1e-3 it
    becomes 2.55 times the smallest positive number, and is rounded to 3 times that number.
    """
    left, right = torch.zeros(1, places, 10**6), torch.full((1, places, 1), 2.8e38)
    left[:, 0] = 6e-23
    return left, right


@pytest.mark.parametrize("way", [None, *HERE], ids=str)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("places", [1, 2])
def test_a_clipped_factor_in_the_denormal_range_weighs_no_more_than_the_clip_norm(
    way: str | None, swapped: bool, places: int
) -> None:
    sides = tiny_and_huge_factor(places)
    with patch.object(dispatch, "_find_latest", lambda: way):
        assert (
            longest(OuterProductGradients(*(reversed(sides) if swapped else sides)), 1e-3)
            <= 1 + 1e-5
        )


class InFloat32(OuterProductGradients):
    """Totals in float32: a fault."""

    def total(self, factors: Tensor) -> Tensor:
        left = self.left * factors.float().reshape(-1, 1, 1)
        return left.flatten(0, 1).mT @ self.right.flatten(0, 1)


@pytest.mark.parametrize("places", [1, 2])
def test_the_check_of_denormal_factors_detects_totals_in_float32(places: int) -> None:
    with (
        patch.object(dispatch, "_find_latest", lambda: None),
        patch.object(clipping, "_replace_overlong", lambda norms, *_: norms),
    ):
        assert longest(InFloat32(*tiny_and_huge_factor(places)), 1e-3) > 1.1


@pytest.mark.parametrize("generation", [dispatch.instruction_set(), None])
def test_more_gradients_than_rows_in_the_mask_are_refused(
    generation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_find_latest", lambda: generation)
    with pytest.raises(ValueError, match="gradients of 7 rows, where 1 were looked at"):
        clipped_sums([DenseGradients(torch.ones(7, 2))], torch.tensor([True]), 1.0)


@pytest.mark.parametrize("value", [1.0, 1e30, math.nan])
def test_changing_a_row_of_another_agent_leaves_the_sum_of_an_agent_bit_equal(value: float) -> None:
    network = SmallCNN(shape=(1, 8, 8), classes=3, norm="group", width=4)
    own = dict(network.named_parameters())
    parameters = {"F": {n: torch.stack([p.detach()] * 2).requires_grad_() for n, p in own.items()}}

    def loss(p: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        total: Tensor = FunctionalModule(network, p["F"])(row["x"][None]).square().sum()
        return total

    def sums(x: Tensor) -> list[Tensor]:
        found = factored_gradients(loss, parameters, {"x": x}, agents=True)
        return clipped_sums(list(found.values()), torch.ones(x.shape[:2], dtype=torch.bool), 1.0)

    x = torch.randn(2, ROWS, 1, 8, 8)
    moved = x.clone()
    moved[1, 2] = value
    before, after = sums(x), sums(moved)
    for was, now in zip(before, after, strict=True):
        assert torch.equal(was[0], now[0])
        assert now.isfinite().all()
    assert any(not torch.equal(was[1], now[1]) for was, now in zip(before, after, strict=True))


@pytest.mark.parametrize("lengths", [(6, 1), (1, 6), (6, 3)])
def test_fields_with_fewer_rows_are_refused_because_broadcasting_would_couple_rows(
    lengths: tuple[int, int],
) -> None:
    network = nn.Linear(2, 1)

    def loss(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        answer: Tensor = FunctionalModule(network, parameters["N"])(row["x"])
        return (answer - row["y"]).square().sum()

    fields = {"x": torch.randn(lengths[0], 2), "y": torch.randn(lengths[1], 1)}
    with pytest.raises(PrivacyError, match="different numbers of rows"):
        factored_gradients(loss, parameters_of({"N": network}), fields)


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8])
def test_class_labels_of_other_integer_types_are_left_to_torch(kind: torch.dtype) -> None:
    network = nn.Linear(5, 3)
    fields = {"x": torch.randn(ROWS, 2, 5), "y": torch.ones(ROWS, 2).to(kind)}

    def loss(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(
            FunctionalModule(network, parameters["N"])(row["x"]), row["y"]
        )

    def error_of(work: Callable[[RowLoss, Parameters, Mapping[str, Tensor]], object]) -> str:
        try:
            work(loss, parameters_of({"N": network}), fields)
        except (RuntimeError, ValueError) as error:
            return type(error).__name__
        return ""

    assert error_of(factored_gradients) == error_of(per_example_gradients)
