"""Clipped sums by our kernel: every row contributes what float64 arithmetic gives for that row
alone, and no row affects the factor of another.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from privssl.ops import clipping as kernel
from privssl.ops import dispatch, gaussian_noise
from privssl.privacy.clipping import (
    DenseGradients,
    OuterProductGradients,
    PerExampleGradients,
    clipped_sums,
)
from tests.support.kernel_generations import HERE

if not HERE:
    pytest.skip("no kernels were compiled", allow_module_level=True)

#: Sizes of a parameter: whole SIMD vectors, whole blocks of the kernel, and remainders.
NUMBERS = [1, 3, 7, 8, 15, 16, 17, 31, 33, 100, 2047, 2048, 2049, 5000]


def written_out(gradients: PerExampleGradients) -> Tensor:
    """(B, *shape) float64."""
    if isinstance(gradients, DenseGradients):
        each = gradients.each.double()
        return each if gradients.axes is None else each.permute(0, *(a + 1 for a in gradients.axes))
    assert isinstance(gradients, OuterProductGradients)
    return gradients.reshape_like(gradients.left.double().mT @ gradients.right.double())


def by_hand(gradients: list[PerExampleGradients], drawn: Tensor, clip_norm: float) -> list[Tensor]:
    """Clipped sums, one row at a time. Rows without a finite norm are left out."""
    each = [written_out(one) for one in gradients]
    sums = [torch.zeros(one.shape[1:], dtype=torch.float64) for one in each]
    for row in range(len(drawn)):
        square = sum(float(one[row].square().sum()) for one in each)
        if drawn[row] and square < 3.4e38:
            factor = min(1.0, clip_norm / (math.sqrt(square) + 1e-6))
            for total, one in zip(sums, each, strict=True):
                total += factor * one[row]
    return sums


def rows(count: int, numbers: int, chance: torch.Generator) -> DenseGradients:
    return DenseGradients(torch.randn(count, numbers, generator=chance))


def product(count: int, high: int, wide: int, chance: torch.Generator) -> OuterProductGradients:
    left, right = (torch.randn(count, 1, n, generator=chance) for n in (high, wide))
    return OuterProductGradients(left, right)


@st.composite
def cases(draw: Callable[..., Any]) -> tuple[list[PerExampleGradients], Tensor]:
    """Gradients of several parameters, for rows of different sizes."""
    count, chance = draw(st.integers(1, 9)), torch.Generator().manual_seed(draw(st.integers(0, 99)))
    sizes = 10.0 ** torch.randint(-3, 4, (count, 1), generator=chance)
    made: list[PerExampleGradients] = []
    for kind in draw(st.lists(st.sampled_from(["rows", "product", "kernel"]), min_size=1)):
        if kind == "rows":
            made.append(
                DenseGradients(rows(count, draw(st.sampled_from(NUMBERS)), chance).each * sizes)
            )
        elif kind == "product":
            high, wide = draw(st.integers(1, 9)), draw(st.sampled_from(NUMBERS))
            one = product(count, high, wide, chance)
            made.append(OuterProductGradients(one.left * sizes[:, None], one.right))
        else:  # a convolution's weight as it lies in memory
            each = torch.randn(count, 3, 2, 2, 5, generator=chance)
            made.append(DenseGradients(each, (0, 3, 1, 2)))
    return made, torch.rand(count, generator=chance) < 0.8


@given(cases(), st.sampled_from([1e-3, 1.0, 100.0]), st.sampled_from(HERE))
def test_clipped_sums_equal_the_sum_over_rows_one_at_a_time(
    case: tuple[list[PerExampleGradients], Tensor], clip_norm: float, name: str
) -> None:
    gradients, drawn = case
    expected = by_hand(gradients, drawn, clip_norm)
    with patch.object(dispatch, "_find_latest", lambda: name):
        found = clipped_sums(gradients, drawn, clip_norm)
    for mine, total in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, total, rtol=1e-12, atol=1e-12 * clip_norm)


@pytest.mark.usefixtures("each_generation")
def test_outer_products_without_a_kernel_share_the_clip_norm_with_the_other_parameters() -> None:
    chance = torch.Generator().manual_seed(0)
    left, right = (torch.randn(5, 3, n, generator=chance) for n in (4, 6))  # of three places
    first, last = rows(5, 40, chance), product(5, 3, 7, chance)
    gradients: list[PerExampleGradients] = [first, OuterProductGradients(left, right), last]
    drawn = torch.tensor([True, False, True, True, True])
    found = clipped_sums(gradients, drawn, 0.5)
    for mine, total in zip(found, by_hand(gradients, drawn, 0.5), strict=True):
        torch.testing.assert_close(mine.double(), total, rtol=1e-3, atol=1e-6)
    # The control: a row would weigh more if the kernel ignored the other parameter.
    [alone, _] = clipped_sums([first, last], drawn, 0.5)
    assert float(alone.norm()) > 1.02 * float(found[0].norm())


@given(st.sampled_from(HERE), st.integers(1, 70), st.integers(1, 40), st.integers(1, 9))
@example(HERE[0], 64, 1568, 16)  # D's third layer
def test_products_of_whole_numbers_are_summed_exactly(
    name: str, high: int, wide: int, count: int
) -> None:
    chance = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-8, 9, (count, 1, n), generator=chance) for n in (high, wide))
    one, weights = (
        OuterProductGradients(left.float(), right.float()),
        torch.randint(0, 5, (count,)).double(),
    )
    lines = one.kernel_input()
    assert lines is not None
    with patch.object(dispatch, "_find_latest", lambda: name):
        found = one.from_totals(kernel.totals([lines], weights), 0)
    expected = torch.einsum("b,btp,btd->pd", weights.double(), left.double(), right.double())
    assert torch.equal(found.double(), expected)


@pytest.mark.usefixtures("each_generation")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, 0.0])
def test_a_row_with_a_non_finite_gradient_is_left_out_and_changes_no_other(bad: float) -> None:
    chance = torch.Generator().manual_seed(0)
    one, other, last = rows(6, 50, chance), product(6, 5, 19, chance), rows(6, 3, chance)
    gradients: list[PerExampleGradients] = [one, other, last]
    drawn = torch.ones(6, dtype=torch.bool)
    without = clipped_sums(gradients, drawn & (torch.arange(6) != 2), 0.5)
    if bad == 0.0:  # the control: a finite row counts
        assert not torch.equal(clipped_sums(gradients, drawn, 0.5)[0], without[0])
        return
    for part in (one.each[2, :9], one.each[2, 49:], other.left[2], other.right[2], last.each[2]):
        before = part.clone()
        part.view(-1)[-1] = bad
        found = clipped_sums(gradients, drawn, 0.5)
        assert all(torch.equal(a, b) for a, b in zip(found, without, strict=True))
        part.copy_(before)


@pytest.mark.usefixtures("each_generation")
def test_non_finite_entries_count_as_zero_in_a_total_and_change_no_other_entry() -> None:
    each = torch.tensor([[1.0, math.nan, math.inf, -2.0]] * 3)
    found = kernel.totals([(each, None)], torch.tensor([1.0, 0.0, 0.5]).double())
    assert found.tolist() == [1.5, 0.0, 0.0, -3.0]
    left, right = torch.tensor([[[2.0, math.inf]]]), torch.tensor([[[3.0, math.nan, 5.0]]])
    found = kernel.totals([(left, right)], torch.tensor([0.5]).double())
    assert found.tolist() == [3.0, 0.0, 5.0, 0.0, 0.0, 0.0]


@pytest.mark.usefixtures("each_generation")
def test_a_row_does_not_change_the_clipping_factors_of_other_rows() -> None:
    chance = torch.Generator().manual_seed(0)
    one, other = rows(4, 30, chance), product(4, 3, 5, chance)
    lines, drawn = [(one.each, None), (other.left, other.right)], torch.ones(4, dtype=torch.bool)
    factors = partial(kernel.factors, lines, None, drawn, 0.5)
    before = factors()
    for value in (1e9, math.nan):
        one.each[1] = value
        after = factors()
        assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
        assert after[1] != before[1]


@pytest.mark.usefixtures("each_generation")
def test_gradients_may_have_any_memory_layout() -> None:
    chance = torch.Generator().manual_seed(0)
    each, left, right = (torch.randn(4, *n, generator=chance) for n in ((6, 5), (1, 3), (1, 9)))
    drawn = torch.tensor([True, True, False, True])
    expected = clipped_sums(
        [DenseGradients(each.clone()), OuterProductGradients(left, right)], drawn, 1.0
    )
    wide = torch.randn(4, 100, generator=chance)
    wide[:, 40:70] = each.flatten(1)
    for form in (
        wide[:, 40:70].view(4, 6, 5),  # one of several parameters in each row
        each.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([each, each], dim=-1)[..., 0],
        each.flip(0).flip(0),
    ):
        found = clipped_sums([DenseGradients(form), OuterProductGradients(left, right)], drawn, 1.0)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    left, right = (torch.stack([side, side], dim=-1)[..., 0] for side in (left, right))
    found = clipped_sums([DenseGradients(each), OuterProductGradients(left, right)], drawn, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.usefixtures("each_generation")
def test_a_gradient_expanded_over_all_rows_counts_once_per_drawn_row() -> None:
    one = torch.tensor([[3.0, 4.0]])
    [found] = clipped_sums(
        [DenseGradients(one.expand(5, 2))], torch.tensor([True] * 4 + [False]), 1.0
    )
    assert found.tolist() == pytest.approx([2.4, 3.2], rel=1e-6)
    assert one.tolist() == [[3.0, 4.0]]  # and is not modified


def test_gradients_with_different_numbers_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="gradients of 2 rows, where 3 were looked at"):
        clipped_sums([DenseGradients(torch.ones(2, 4))], torch.tensor([True] * 3), 1.0)
    with pytest.raises(ValueError, match="3 factors for another number of rows"):
        kernel.totals([(torch.ones(2, 4), None)], torch.ones(3))
    drawn = torch.tensor([True] * 3)
    with pytest.raises(ValueError, match="different numbers of rows"):
        clipped_sums(
            [DenseGradients(torch.ones(3, 4)), DenseGradients(torch.ones(2, 4))], drawn, 1.0
        )
    with pytest.raises(ValueError, match="different numbers of rows"):
        clipped_sums([OuterProductGradients(torch.ones(3, 1, 4), torch.ones(2, 1, 4))], drawn, 1.0)


def test_inputs_that_the_kernel_does_not_support_are_left_to_torch_or_refused() -> None:
    wide = OuterProductGradients(torch.ones(3, 1, 4), torch.ones(3, 1, 5, dtype=torch.float64))
    assert wide.kernel_input() is None
    with pytest.raises(ValueError, match="not float32 on the CPU"):
        kernel.totals([(wide.left, wide.right)], torch.ones(3))
    # an empty factor
    assert OuterProductGradients(torch.ones(3, 1, 5), torch.ones(3, 1, 0)).kernel_input() is None


@pytest.mark.usefixtures("each_generation")
def test_tensors_with_a_lazy_negative_bit_are_read_with_their_sign() -> None:
    minus = torch.view_as_complex(torch.ones(3, 2)).conj().imag  # -1, as torch says
    [found] = clipped_sums([DenseGradients(minus[:, None])], torch.tensor([True] * 3), 100.0)
    assert found.tolist() == [-3.0]


@pytest.mark.usefixtures("each_generation")
def test_torch_default_device_and_dtype_do_not_change_clipped_sums() -> None:
    each, drawn = torch.full((3, 4), 100.0), torch.tensor([True] * 3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        [found] = clipped_sums([DenseGradients(each)], drawn, 100.0)
    finally:
        torch.set_default_dtype(before)
    assert found.tolist() == pytest.approx([150.0] * 4)


# Noise on sums --------------------------------------------------------------------------------


@pytest.mark.usefixtures("each_generation")
@pytest.mark.parametrize("step", [0.0, 2.0**-3])
def test_noise_is_added_in_float64_and_rounded_to_the_grid(step: float) -> None:
    chance = torch.Generator().manual_seed(0)
    sums = [torch.randn(n, generator=chance).double() for n in (1, 3, 8, 37)]
    drawn = torch.randn(49, generator=chance, dtype=torch.float64)
    noisy = [torch.empty_like(one, dtype=torch.float32) for one in sums]
    gaussian_noise.add(sums, drawn.numpy(), 0.7, step, noisy)
    exact = torch.cat(sums) + 0.7 * drawn
    found = torch.cat(noisy).double()
    if step:
        assert torch.equal(found / step, (found / step).round())
        assert float((found - exact).abs().max()) <= step / 2
        assert float((found - exact).abs().max()) > step / 4  # the control: it was rounded
    else:
        torch.testing.assert_close(found, exact, rtol=1e-7, atol=0)


def test_noise_of_another_length_than_the_parameters_is_refused() -> None:
    add = partial(gaussian_noise.add, deviation=1.0, step=0.0)
    with pytest.raises(ValueError, match=r"noise \(3,\) for 4 sums"):
        add([torch.ones(4).double()], torch.ones(3).double().numpy(), noisy=[torch.ones(4)])
    four = torch.ones(4).double().numpy()
    with pytest.raises(ValueError, match="lie in another order"):
        add([torch.ones(2, 2).double()], four, noisy=[torch.ones(2, 2).mT])
    gaps = torch.ones(8).double()[::2], torch.ones(8)[::2]
    same = torch.ones(4), torch.ones(4)
    for sums, noisy in ((torch.ones(4).bfloat16(), torch.ones(4)), gaps, same, same[::-1]):
        with pytest.raises(ValueError, match="on the CPU, without gaps"):
            add([sums], four, noisy=[noisy])
    turned = torch.ones(2, 3).mT
    add([turned.double()], torch.arange(6.0).double().numpy(), noisy=[turned])
    assert turned.tolist() == [[1, 4], [2, 5], [3, 6]]
