"""Views of images: each transform by arithmetic, and independence of rows."""

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from privssl.data.affine_augment import (
    AUGMENTATIONS,
    BLANK,
    NONE,
    Augmentation,
    affine,
    cut_out,
    move_mirrored,
    warp,
)
from privssl.ops import dispatch, image_transforms

ALL = Augmentation(rotation=25, scale=0.2, shear=0.3, shift=0.1, cutout=0.3, crop=0.125, flip=True)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(rows: int = 6, channels: int = 1, height: int = 8, width: int = 8) -> Tensor:
    return torch.rand(rows, channels, height, width, generator=rng(1)) * 2 - 1


def moved(
    x: Tensor,
    *,
    angle: float = 0.0,
    zoom: float = 1.0,
    shear: float = 0.0,
    down: float = 0.0,
    right: float = 0.0,
) -> Tensor:
    """The same transform for every row; shifts in pixels."""
    height, width = x.shape[2:]
    every = torch.ones(len(x))
    shift = torch.tensor([down / height, right / width]).expand(len(x), 2)
    maps = affine(
        angle=every * angle,
        zoom=every * zoom,
        shear=every * shear,
        shift=shift,
        aspect=height / width,
    )
    return warp(x, maps)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


# The affine transform -----------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width"), [(8, 8), (5, 9), (12, 7)])
def test_zero_strength_is_the_identity(height: int, width: int) -> None:
    x = images(3, 3, height, width)
    close(moved(x), x)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_quarter_turns_of_a_square_equal_those_of_torch(turns: int) -> None:
    x = images(4, 3, 9, 9)
    close(moved(x, angle=90.0 * turns), torch.rot90(x, turns, dims=(2, 3)))


def test_half_a_turn_of_a_rectangle_reverses_both_axes() -> None:
    x = images(2, 1, 5, 8)
    close(moved(x, angle=180.0), x.flip(2, 3))


def test_a_quarter_turn_of_a_rectangle_keeps_the_proportions() -> None:
    # A bar of 3x1 pixels in the middle of 5x9 becomes one of 1x3: pixels stay square.
    x = torch.full((1, 1, 5, 9), BLANK)
    x[0, 0, 1:4, 4] = 1.0
    upright = torch.full((1, 1, 5, 9), BLANK)
    upright[0, 0, 2, 3:6] = 1.0
    close(moved(x, angle=90.0), upright)


@pytest.mark.parametrize(("down", "right"), [(2, 0), (0, 3), (-1, -2)])
def test_a_shift_by_whole_pixels_is_a_slice_and_fills_the_rest_with_blank(
    down: int, right: int
) -> None:
    x = images(3, 2, 6, 10)
    expected = torch.full_like(x, BLANK)
    expected[:, :, max(down, 0) : 6 + min(down, 0), max(right, 0) : 10 + min(right, 0)] = x[
        :, :, max(-down, 0) : 6 + min(-down, 0), max(-right, 0) : 10 + min(-right, 0)
    ]
    close(moved(x, down=down, right=right), expected)


def test_a_zoom_by_two_shows_the_middle_half() -> None:
    # Along an axis of 8 pixels, pixel i of the view reads the ramp at 3.5 + (i - 3.5) / 2.
    ramp = torch.arange(8.0) / 8
    x = ramp.expand(1, 1, 8, 8).contiguous()
    seen = moved(x, zoom=2.0)[0, 0, 4]
    close(seen, (3.5 + (torch.arange(8.0) - 3.5) / 2) / 8)


def test_shear_moves_each_row_by_its_distance_from_the_middle() -> None:
    # Five rows, -2..2 from the middle: with shear 1 they move by as many pixels to the right.
    x = torch.full((1, 1, 5, 9), BLANK)
    x[0, 0, :, 4] = 1.0
    expected = torch.full_like(x, BLANK)
    expected[0, 0, range(5), [2, 3, 4, 5, 6]] = 1.0
    close(moved(x, shear=1.0), expected)


@pytest.mark.parametrize(("height", "width"), [(9, 9), (8, 12)])
def test_a_point_is_sheared_and_zoomed_before_it_is_turned(height: int, width: int) -> None:
    x = images(2, 1, height, width)
    first = moved(x, shear=0.5, zoom=0.7)
    close(moved(x, shear=0.5, zoom=0.7, angle=180.0), first.flip(2, 3))
    if height == width:
        close(moved(x, shear=0.5, zoom=0.7, angle=90.0), torch.rot90(first, dims=(2, 3)))


def test_a_small_rotation_is_counter_clockwise() -> None:
    # A dot 3 pixels to the right of the middle goes up by 3 sin 30 = 1.5 pixels.
    x = torch.full((1, 1, 9, 9), BLANK)
    x[0, 0, 4, 7] = 1.0
    ink = moved(x, angle=30.0)[0, 0] - BLANK
    height = (ink.sum(dim=1) * torch.arange(9.0)).sum() / ink.sum()
    assert height.item() == pytest.approx(4 - 3 * math.sin(math.radians(30)), abs=0.15)


# Crop, mirror and cut -----------------------------------------------------------------------


def test_a_crop_is_a_window_on_the_image_with_reflection_padding() -> None:
    x = images(5, 3, 6, 7)
    shift = torch.tensor([[2, 0], [0, -3], [-2, 1], [0, 0], [-2, 1]])
    flipped = torch.tensor([False, False, False, True, True])  # before it is shifted
    mirrored = torch.where(flipped[:, None, None, None], x.flip(3), x)
    padded = torch.nn.functional.pad(mirrored, (3, 3, 3, 3), mode="reflect")
    windows = [
        padded[i, :, 3 - down : 9 - down, 3 - right : 10 - right]
        for i, (down, right) in enumerate(shift.tolist())
    ]
    with dispatch.disabled():
        assert torch.equal(move_mirrored(x, shift, flipped), torch.stack(windows))


@pytest.mark.usefixtures("each_generation")
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize(("height", "width"), [(6, 9), (1, 1), (28, 28), (2, 40)])
def test_our_kernels_shift_and_mirror_as_torch_does(
    height: int, width: int, channels: int, form: torch.memory_format
) -> None:
    x = torch.rand(40, channels, height, width, generator=rng(1)).contiguous(memory_format=form)
    shift = torch.stack(
        [torch.randint(1 - side, side, (40,), generator=rng(2)) for side in (height, width)], dim=1
    )
    flipped = torch.rand(40, generator=rng(3)) < 0.5
    with patch.object(
        image_transforms, "shift_and_flip", wraps=image_transforms.shift_and_flip
    ) as asked:
        ours = move_mirrored(x, shift, flipped)
    assert asked.call_count == 1
    with dispatch.disabled():
        assert torch.equal(ours, move_mirrored(x, shift, flipped))
    assert ours.is_contiguous(memory_format=form)
    assert torch.equal(move_mirrored(x[::2], shift[::2], flipped[::2]), ours[::2])


def test_a_random_crop_draws_all_whole_shifts_with_equal_probability() -> None:
    # A dot in the middle of 9 pixels; 0.25 of 9 is 2 whole pixels: 5 x 5 places.
    x = torch.full((2500, 1, 9, 9), BLANK)
    x[:, 0, 4, 4] = 1.0
    places = (Augmentation(crop=0.25)(x, rng())[:, 0] == 1.0).sum(dim=0)
    assert int(places[2:7, 2:7].sum()) == int(places.sum()) == 2500
    # 100 of each place are expected, give or take 6 standard deviations of 10
    assert 40 < int(places[2:7, 2:7].min()) <= int(places.max()) < 160


def test_half_of_the_rows_are_mirrored_and_the_others_are_unchanged() -> None:
    x = images(400)
    view = Augmentation(flip=True)(x, rng())
    same = (view == x).flatten(1).all(dim=1)
    mirrored = (view == x.flip(3)).flatten(1).all(dim=1)
    assert bool((same ^ mirrored).all())
    assert 140 < int(mirrored.sum()) < 260  # 200 +- 6 standard deviations of 10


@given(share=st.floats(0, 1), height=st.integers(1, 12), width=st.integers(1, 12))
def test_a_cutout_has_the_same_area_wherever_it_lies(share: float, height: int, width: int) -> None:
    place = torch.rand(20, 2, generator=rng(3))
    place[0], place[1] = 0.0, 1 - 2**-24  # the corners
    cut = cut_out(torch.ones(20, 2, height, width), share, place) == BLANK
    area = round(share * height) * round(share * width)
    assert cut.sum(dim=(2, 3)).tolist() == [[area, area]] * 20


def test_cutouts_reach_every_corner_and_change_nothing_else() -> None:
    x = torch.ones(1000, 1, 8, 8)
    view = Augmentation(cutout=0.5)(x, rng())
    assert set(view.flatten().tolist()) == {BLANK, 1.0}
    cut = (view == BLANK).any(dim=0)[0]
    assert bool(cut[[0, 0, 7, 7], [0, 7, 0, 7]].all())


# Randomness ---------------------------------------------------------------------------------


def test_the_same_generator_state_gives_the_same_views_and_another_gives_others() -> None:
    x = images(20)
    assert torch.equal(ALL(x, rng(5)), ALL(x, rng(5)))
    assert not torch.equal(ALL(x, rng(5)), ALL(x, rng(6)))


@pytest.mark.parametrize("changed", [0, 3, 5])
def test_no_view_depends_on_another_row(changed: int) -> None:
    x = images(6, 3)
    other = x.clone()
    other[changed] = 0.25
    before, after = ALL(x, rng()), ALL(other, rng())
    equal = (before == after).flatten(1).all(dim=1).tolist()
    assert equal == [row != changed for row in range(6)]


def test_the_strengths_are_the_largest_changes() -> None:
    # A dot 10 pixels right of the middle of 41: turned by at most 30 degrees, its height is at
    # most 10 sin 30 = 5 pixels from the middle, and over many rows it comes close to that.
    x = torch.full((500, 1, 41, 41), BLANK)
    x[:, 0, 20, 30] = 1.0
    ink = Augmentation(rotation=30)(x, rng())[:, 0] - BLANK
    heights = (ink.sum(dim=2) * torch.arange(41.0)).sum(dim=1) / ink.sum(dim=(1, 2)) - 20
    assert heights.abs().max() <= 5.3
    assert heights.max() > 4.5
    assert heights.min() < -4.5


@given(
    strengths=st.builds(
        Augmentation,
        rotation=st.floats(0, 180),
        scale=st.floats(0, 0.9),
        shear=st.floats(0, 1),
        shift=st.floats(0, 1),
        cutout=st.floats(0, 1),
        crop=st.floats(0, 0.9),
        flip=st.booleans(),
    ),
    height=st.integers(2, 9),
    width=st.integers(2, 9),
)
def test_views_keep_shape_and_range_and_do_not_modify_the_images(
    strengths: Augmentation, height: int, width: int
) -> None:
    x = images(4, 3, height, width)
    kept = x.clone()
    view = strengths(x, rng())
    assert view.shape == x.shape
    assert view.dtype == torch.float32
    assert view.min() >= -1 - 1e-5
    assert view.max() <= 1 + 1e-5
    assert torch.equal(x, kept)


def test_views_keep_the_memory_format() -> None:
    x = images(4, 3).contiguous(memory_format=torch.channels_last)
    assert ALL(x, rng()).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ALL(x, rng()), ALL(x.contiguous(), rng()))


def test_the_augmentation_none_draws_and_changes_nothing() -> None:
    x, generator = images(), rng()
    assert AUGMENTATIONS["none"](x, generator) is x
    assert torch.equal(generator.get_state(), rng().get_state())


def test_an_empty_batch_stays_empty() -> None:
    assert ALL(images()[:0], rng()).shape == (0, 1, 8, 8)


def test_the_table_contains_the_measured_strengths() -> None:
    assert dict(AUGMENTATIONS) == {
        "none": NONE,
        "weak": Augmentation(rotation=8, shift=2 / 28),
        "mid": Augmentation(rotation=12, shift=2 / 28),
        "strong": Augmentation(rotation=25, scale=0.2, shear=0.3, shift=3 / 28, cutout=8 / 28),
    }
    assert AUGMENTATIONS["mid"].flipping(True) == Augmentation(12, shift=2 / 28, flip=True)
