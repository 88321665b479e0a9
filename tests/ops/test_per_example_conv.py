"""Per-example gradients of convolution weights by our kernel: those of torch's autograd for each
row alone, independent of other rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from generators import ImageDiscriminator
from privssl.models import optimize_layout
from privssl.ops import dispatch, per_example_conv
from privssl.privacy.clipping import clipped_sums
from privssl.privacy.per_example_gradients import factored_gradients
from privssl.runtime.randomness import seeded, stream
from privssl.training.batched.deferred import FunctionalModule
from tests.support.kernel_generations import HERE
from tests.support.privacy import parameters_of

if not HERE:
    pytest.skip("no kernels were compiled", allow_module_level=True)


class Case:
    """Integer inputs and output gradients of a convolution, so that sums are exact."""

    def __init__(
        self, rows: int, images: int, channels: int, made: int, sides: tuple[int, int],
        kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int],
    ) -> None:  # fmt: skip
        rng = torch.Generator().manual_seed(0)
        self.kernel, self.stride, self.padding = kernel, stride, padding
        self.seen = torch.randint(-4, 5, (rows, images, channels, *sides), generator=rng).float()
        places = (
            (side + 2 * zeros - taps) // step + 1
            for side, zeros, taps, step in zip(sides, padding, kernel, stride, strict=True)
        )
        self.met = torch.randint(-4, 5, (rows, images, made, *places), generator=rng).float()

    def sums(self) -> Tensor:
        """(rows, made, channels, *kernel)"""
        found = per_example_conv.sums(self.seen, self.met, self.kernel, self.stride, self.padding)
        return found.permute(0, 4, 3, 1, 2)

    def by_torch(self) -> Tensor:
        """The same by autograd through torch's convolution, one row at a time."""
        found: list[Tensor] = []
        for x, g in zip(self.seen.double(), self.met.double(), strict=True):
            weight = torch.zeros(g.shape[1], x.shape[1], *self.kernel, dtype=x.dtype)
            made = functional.conv2d(
                x, weight.requires_grad_(), stride=self.stride, padding=self.padding
            )
            found += torch.autograd.grad(made, weight, g)
        return torch.stack(found)


few, side = st.integers(1, 3), st.integers(1, 9)
PAIR = st.tuples(few, few)


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    sides, padding = draw(st.tuples(side, side)), draw(st.tuples(*[st.integers(0, 2)] * 2))
    kernel = tuple(
        draw(st.integers(1, min(5, side + 2 * zeros)))
        for side, zeros in zip(sides, padding, strict=True)
    )
    channels, made = draw(st.integers(1, 20)), draw(st.integers(1, 70))
    return Case(draw(few), draw(few), channels, made, sides, kernel, draw(PAIR), padding)


@given(cases(), st.sampled_from(HERE))
@example(Case(2, 1, 16, 32, (14, 14), (4, 4), (2, 2), (1, 1)), HERE[0])  # D's second
@example(Case(2, 3, 1, 16, (28, 28), (4, 4), (2, 2), (1, 1)), HERE[0])  # and first, of mixes
@example(Case(1, 2, 3, 8, (32, 32), (3, 3), (1, 1), (1, 1)), HERE[-1])
def test_each_row_has_the_gradient_that_torch_computes_for_it_alone(case: Case, name: str) -> None:
    with patch.object(dispatch, "_find_latest", lambda: name):
        assert torch.equal(case.sums().double(), case.by_torch())


@pytest.mark.usefixtures("each_generation")
def test_a_row_does_not_change_the_gradient_of_another() -> None:
    case = Case(4, 2, 5, 11, (9, 7), (3, 3), (1, 2), (1, 0))
    before = case.sums()
    for changed in (case.seen, case.met):
        changed[2] = float("nan")
        after = case.sums()
        assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])
        assert after[2].isnan().all()


@pytest.mark.usefixtures("each_generation")
def test_inputs_may_have_any_memory_layout() -> None:
    case = Case(3, 2, 4, 6, (8, 9), (3, 2), (1, 1), (0, 1))
    expected = case.sums()
    case.seen = case.seen.transpose(0, 3).contiguous().transpose(0, 3)
    case.met = torch.stack([case.met, case.met], dim=-1)[..., 0]
    assert torch.equal(case.sums(), expected)


def test_more_positions_than_the_kernel_supports_are_refused() -> None:
    case = Case(1, 1, 1, 1, (5, 5), (3, 3), (1, 1), (0, 0))
    case.padding = (0, 1)  # by as many columns as it supports
    assert case.sums().shape == (1, 1, 1, 3, 3)
    case.stride = (1, 3)
    with pytest.raises(ValueError, match="meets fewer places"):
        case.sums()


def gradients_asked(network: nn.Module, x: Tensor) -> list[tuple[int, ...]]:
    """The shapes of a network's weight gradients that the kernel computes."""
    with patch.object(per_example_conv, "sums", wraps=per_example_conv.sums) as asked:
        factored_gradients(
            lambda p, row: FunctionalModule(network, p["N"])(row["x"][None]).square().sum(),
            parameters_of({"N": network}),
            {"x": x},
        )
    return [
        (call.args[1].shape[2], call.args[0].shape[2], *call.args[2]) for call in asked.mock_calls
    ]


def test_private_steps_use_the_kernel_for_dense_convolution_gradients() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 6, (3, 2), stride=2, padding=1), nn.Tanh(),
        nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1), nn.Tanh(),
        # one position, many weights: kept as two factors
        nn.AdaptiveAvgPool2d(2), nn.Conv2d(4, 90, 2),
    )  # fmt: skip
    x = torch.zeros(2, 3, 8, 8)
    assert gradients_asked(network, x) == [(6, 3, 3, 2), (6, 4, 4, 4)]
    assert gradients_asked(network.double(), x.double()) == []
    with dispatch.disabled():
        assert gradients_asked(network.float(), x) == []


def neighbours_sums(*given: Any, real: Any = per_example_conv.sums) -> Tensor:
    """A fault: every row's sum includes its neighbour's."""
    found: Tensor = real(*given)
    return found + found.roll(1, 0)


def test_in_a_private_step_a_row_moves_the_sum_by_the_clip_norm_and_no_other_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with seeded(stream(0, 0, "world", "D")):
        network, clip = optimize_layout(ImageDiscriminator((1, 8, 8), 3, spectral=False)), 1e-3
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def gradients(x: Tensor) -> dict[Any, Any]:
        return factored_gradients(
            lambda p, row: FunctionalModule(network, p["D"])(row["x"][None], row["p"][None]).sum(),
            parameters_of({"D": network}),
            {"x": x, "p": torch.full((4, 3), 1 / 3)},
        )

    def total(drawn: Tensor) -> Tensor:
        sums = clipped_sums(list(gradients(x).values()), drawn, clip)
        return torch.cat([one.flatten() for one in sums])

    def others_change() -> bool:
        """Whether a row's gradient changes with the row before it."""
        changed, last = x.clone(), torch.tensor([0.0, 0.0, 0.0, 1.0]).double()
        changed[2] = 0
        before, after = gradients(x), gradients(changed)
        return any(not torch.equal(before[k].total(last), after[k].total(last)) for k in before)

    everyone, without = torch.ones(4, dtype=torch.bool), torch.arange(4) != 2
    assert 0.99 * clip < float((total(everyone) - total(without)).norm()) <= clip
    assert not others_change()
    monkeypatch.setattr(per_example_conv, "sums", neighbours_sums)
    assert others_change()  # the control


def test_with_several_threads_torch_computes_the_gradients() -> None:
    asked = partial(gradients_asked, nn.Conv2d(3, 6, 3), torch.zeros(2, 3, 8, 8))
    assert asked() == [(6, 3, 3, 3)]
    torch.set_num_threads(2)
    try:
        assert asked() == []
    finally:
        torch.set_num_threads(1)
