"""RandAugment: every operation against PIL's, the strengths of the papers, and randomness."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from privssl.data.image_operations import (
    BLACK,
    Change,
    Rotate,
    Shear,
    Translate,
    autocontrast,
    brightness,
    color,
    contrast,
    cutout,
    equalize,
    identity,
    invert,
    posterize,
    sharpness,
    solarize,
)
from privssl.data.rand_augment import (
    COLUMNS,
    FEDMATCH,
    FEDSEAL,
    FIXMATCH,
    RANDAUGMENTS,
    Operation,
    RandAugment,
)
from privssl.ops import dispatch, image_transforms
from privssl.training.local_training import network_input

every_variant = pytest.mark.parametrize("name", RANDAUGMENTS)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photos(channels: int, height: int, width: int) -> Tensor:
    """Six 8-bit images: three of noise, a smooth one, a dark one with a bright spot, a constant
    one.
    """
    x = torch.randint(0, 256, (6, channels, height, width), generator=rng(1))
    x[1] = 60 + x[1] // 3
    x[3] = torch.linspace(10, 240, width).long() // (1 + torch.arange(channels)[:, None, None])
    x[4] = 0
    x[4, :, height // 3 : 2 * height // 3, width // 4 : width // 2] = 200 + x[0, :, :1, :1] // 5
    x[5] = 77
    return x.to(torch.uint8)


def images(rows: int = 6, channels: int = 1, height: int = 8, width: int = 8) -> Tensor:
    x = torch.randint(0, 256, (rows, channels, height, width), generator=rng(1))
    return network_input(x.to(torch.uint8)).contiguous()


def always(change: Change, amount: float = 0.0) -> RandAugment:
    """This operation alone, once on every image, with this amount."""
    return RandAugment((Operation(change, amount, amount),), 1, chance=1.0, strength="full")


def levels(view: Tensor) -> Tensor:
    """A view as an 8-bit image; its values are whole levels."""
    scaled = (view + 1) * 127.5
    assert (scaled - scaled.round()).abs().max() < 1e-3
    return scaled.round().long()


# PIL ----------------------------------------------------------------------------------------


def shifted(image: Image.Image, amount: float, axis: str, unit: str) -> Image.Image:
    pixels = amount * (image.size["xy".index(axis)] if unit == "side" else 1)
    along = (1, 0, pixels, 0, 1, 0) if axis == "x" else (1, 0, 0, 0, 1, pixels)
    return image.transform(image.size, Image.Transform.AFFINE, along)


def sheared(image: Image.Image, amount: float, axis: str, used: int) -> Image.Image:
    taken = Image.Resampling
    how = {1: taken.NEAREST, 2: taken.BILINEAR, 4: taken.BICUBIC}[used]
    along = (1, amount, 0, 0, 1, 0) if axis == "x" else (1, 0, 0, amount, 1, 0)
    return image.transform(image.size, Image.Transform.AFFINE, along, how)


def rotated_on_grey(image: Image.Image, degrees: float) -> Image.Image:
    """As FedMatch does it: rotated with transparent corners, laid over grey."""
    turned = image.convert("RGBA").rotate(degrees)
    grey = Image.new("RGBA", turned.size, (128,) * 4)
    return Image.composite(turned, grey, turned).convert(image.mode)


Reference = Callable[[Image.Image, float], Image.Image]
SIGNED = (-0.3, -0.17, 0.0, 0.1, 0.3)
AXES: tuple[Literal["x", "y"], ...] = ("x", "y")
TAPS: tuple[Literal[1, 2, 4], ...] = (1, 2, 4)
UNITS: tuple[Literal["side", "pixel"], ...] = ("side", "pixel")

#: (our operation, PIL's, amounts, largest share of pixels that may differ by more than a level)
OPERATIONS: dict[str, tuple[Change, Reference, tuple[float, ...], float]] = {
    "autocontrast": (autocontrast, lambda i, _: ImageOps.autocontrast(i), (0.0,), 0.0),
    "equalize": (equalize, lambda i, _: ImageOps.equalize(i), (0.0,), 0.0),
    "invert": (invert, lambda i, _: ImageOps.invert(i), (0.0,), 0.0),
    "posterize": (posterize, lambda i, v: ImageOps.posterize(i, int(v)), (4, 5, 6, 7, 8), 0.0),
    "solarize": (
        solarize,
        # PIL takes integer thresholds; a level is below 244.9 exactly if it is below 245
        lambda i, v: ImageOps.solarize(i, int(np.ceil(v))),
        (0, 1, 128, 244.9, 256),
        0.0,
    ),
    "brightness": (
        brightness,
        lambda i, v: ImageEnhance.Brightness(i).enhance(v),
        (0.05, 0.6, 1.0, 1.9),
        0.0,
    ),
    "contrast": (
        contrast,
        lambda i, v: ImageEnhance.Contrast(i).enhance(v),
        (0.05, 0.6, 1.0, 1.9),
        0.0,
    ),
    "color": (color, lambda i, v: ImageEnhance.Color(i).enhance(v), (0.05, 0.6, 1.0, 1.9), 0.0),
    "sharpness": (
        sharpness,
        lambda i, v: ImageEnhance.Sharpness(i).enhance(v),
        (0.05, 0.6, 1.0, 1.9),
        0.0,
    ),
    # Where the nearest pixel is a tie, or nearly, PIL's fixed-point arithmetic may choose
    # otherwise.
    "rotate": (Rotate(BLACK), lambda i, v: i.rotate(v), (-30, -7.3, 0, 12.5, 30), 0.005),
    "rotate on grey": (Rotate(128.0), rotated_on_grey, (0, 40, 80, 120, 160), 0.005),
    **{
        f"shear {axis}, {used} pixels": (
            Shear(axis, used),
            partial(sheared, axis=axis, used=used),
            SIGNED,
            0.005 if used == 1 else 0.0,
        )
        for axis in AXES
        for used in TAPS
    },
    **{
        f"translate {axis}, {unit}": (
            Translate(axis, unit),
            partial(shifted, axis=axis, unit=unit),
            SIGNED if unit == "side" else (-100, -3, 0, 2, 100),
            0.0,
        )
        for axis in AXES
        for unit in UNITS
    },
}
# Of an odd height, half of a row's pixels would be ties at 120 degrees.
OBLONG, GREY, COLOURED = (3, 8, 13), (1, 28, 28), (3, 32, 32)


def by_pil(x: Tensor, change: Reference, amount: float) -> Tensor:
    """PIL's operation on every 8-bit image (B, Ch, H, W), one at a time."""
    grey = x.shape[1] == 1
    done = []
    for image in x.permute(0, 2, 3, 1).numpy():
        array = np.asarray(change(Image.fromarray(image[..., 0] if grey else image), amount))
        done.append(torch.from_numpy(array.copy()).reshape(*image.shape))
    return torch.stack(done).permute(0, 3, 1, 2).long()


def share_beyond_one_level(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).abs() > 1).double().mean())


@pytest.mark.parametrize("shape", [GREY, COLOURED, OBLONG])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_equals_that_of_pil_to_one_level(
    name: str, shape: tuple[int, int, int]
) -> None:
    # By torch; our kernels give the same bits (below).
    change, reference, amounts, ties = OPERATIONS[name]
    x = photos(*shape)
    for amount in amounts:
        with dispatch.disabled():
            ours = levels(always(change, amount)(network_input(x).contiguous(), rng()))
        assert share_beyond_one_level(ours, by_pil(x, reference, amount)) <= ties, amount


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("brightness", 0.65), ("contrast", 0.65), ("color", 0.65), ("sharpness", 0.7)),
        *(("posterize", 6), ("solarize", 120), ("rotate", 14.5), ("rotate on grey", 42)),
        *((f"shear {axis}, {used} pixels", 0.13) for axis in "xy" for used in (1, 2, 4)),
        *(("translate x, side", 0.15), ("translate y, side", 0.15)),
        *(("translate x, pixel", 3), ("translate y, pixel", 3)),
    ],
)
def test_the_comparison_with_pil_detects_a_slightly_wrong_amount(name: str, wrong: float) -> None:
    change, reference, amounts, ties = OPERATIONS[name]
    x = photos(*COLOURED)
    right = {"rotate": 12.5, "rotate on grey": 40, "solarize": 128, "posterize": 5}.get(
        name, amounts[1] if name in ("brightness", "contrast", "color", "sharpness") else amounts[3]
    )
    ours = levels(always(change, wrong)(network_input(x).contiguous(), rng()))
    assert share_beyond_one_level(ours, by_pil(x, reference, right)) > max(ties, 0.005)


@pytest.mark.parametrize(("name", "instead"), [("autocontrast", invert), ("equalize", invert)])
def test_the_comparison_with_pil_detects_another_operation(name: str, instead: Change) -> None:
    x = photos(*COLOURED)
    ours = levels(always(instead)(network_input(x).contiguous(), rng()))
    assert share_beyond_one_level(ours, by_pil(x, OPERATIONS[name][1], 0.0)) > 0.1


@pytest.mark.parametrize("factor", [0.05, 1.9])
def test_colour_does_not_change_images_without_three_channels(factor: float) -> None:
    for channels in (1, 2, 4):
        assert torch.equal(always(color, factor)(images(3, channels), rng()), images(3, channels))
    coloured = images(3, 3)  # the control
    assert not torch.equal(always(color, factor)(coloured, rng()), coloured)


def test_contrast_of_two_channel_images_is_around_the_mean_of_both() -> None:
    x = torch.zeros(1, 2, 2, 2)
    x[0, 1] = 100  # mean grey of every pixel 50; a contrast of one half halves all distances
    assert (
        contrast(x, torch.tensor([0.5]), torch.zeros(1, 2)).flatten().tolist()
        == [25] * 4 + [75] * 4
    )


def test_sharpness_does_not_change_the_smallest_images() -> None:
    x = images(4, 1, 2, 5)
    assert torch.equal(always(sharpness, 0.1)(x, rng()), x)


def test_a_cutout_starts_half_a_side_before_its_place_and_runs_to_the_far_edges() -> None:
    # A side of 40 in 32 pixels: from max(0, 32 u - 20) to the edge, down and to the right.
    x = torch.zeros(3, 1, 32, 32)
    place = torch.tensor([[0.0, 0.62], [0.65, 0.75], [0.99, 0.9]])
    expected = torch.zeros(3, 1, 32, 32)
    # 0 and 19.84 - 20 -> 0; 20.8 - 20 -> 0 and 24 - 20 = 4; 31.68 - 20 -> 11 and 28.8 - 20 -> 8
    for row, (top, left) in enumerate([(0, 0), (0, 4), (11, 8)]):
        expected[row, :, top:, left:] = 127
    assert torch.equal(cutout(x, torch.full((3,), 40.0), place), expected)


def test_a_cutout_in_a_larger_image_has_its_side() -> None:
    cut = cutout(torch.zeros(1, 1, 100, 90), torch.tensor([40.0]), torch.tensor([[0.5, 0.3]]))
    assert (cut[0, 0] == 127).nonzero().aminmax(dim=0).min.tolist() == [30, 7]
    assert int((cut == 127).sum()) == 40 * 40


# Our kernels -------------------------------------------------------------------------------

FORMATS = (torch.contiguous_format, torch.channels_last)
SHAPES = (GREY, COLOURED, OBLONG, (2, 9, 7), (4, 5, 2), (1, 1, 1), (1, 2, 3), (3, 64, 40))


def by_both(variant: RandAugment, x: Tensor, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Views by our kernel, and by torch."""
    assert dispatch.instruction_set() is not None
    with patch.object(
        image_transforms, "apply_change", wraps=image_transforms.apply_change
    ) as asked:
        ours = variant(x, rng(seed))
    assert asked.call_count == 1
    with (
        dispatch.disabled(),
        patch.object(image_transforms, "apply_change", side_effect=AssertionError),
    ):
        return ours, variant(x, rng(seed))


@pytest.mark.fast_cases(12)
@pytest.mark.usefixtures("each_generation")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
@every_variant
def test_our_kernels_give_the_same_bits_in_the_same_memory_format(
    name: str, form: torch.memory_format, shape: tuple[int, int, int]
) -> None:
    x = network_input(photos(*shape).repeat(50, 1, 1, 1)).contiguous(memory_format=form)
    ours, reference = by_both(RANDAUGMENTS[name], x)
    assert torch.equal(ours, reference)
    assert ours.is_contiguous(memory_format=form) and reference.is_contiguous(memory_format=form)


@pytest.mark.fast_cases(22)
@pytest.mark.usefixtures("each_generation")
@pytest.mark.parametrize("shape", [GREY, COLOURED, OBLONG])
@pytest.mark.parametrize("name", [*OPERATIONS, "cutout"])
def test_our_kernels_give_the_bits_of_every_operation_for_any_amount(
    name: str, shape: tuple[int, int, int]
) -> None:
    change, _, amounts, _ = {**OPERATIONS, "cutout": (cutout, None, (0, 20), None)}[name]
    reach = max(amounts) - min(amounts)
    # Larger amounts than any variant uses; posterize would keep a negative number of bits.
    wide = (min(amounts) - reach, max(amounts) + reach) if name != "posterize" else (0, 8)
    any_amount = RandAugment((Operation(change, *wide),), 2, 1.0, "uniform")
    ours, reference = by_both(any_amount, network_input(photos(*shape).repeat(40, 1, 1, 1)))
    assert torch.equal(ours, reference)


@pytest.mark.usefixtures("each_generation")
def test_our_kernels_accept_non_contiguous_and_empty_batches() -> None:
    x = torch.rand(9, 8, 10, 3, generator=rng(1)).permute(0, 3, 2, 1)[::2, :, 1:] * 2 - 1
    ours, reference = by_both(FEDSEAL, x)
    assert torch.equal(ours, reference)
    ours, reference = by_both(FEDSEAL, images(0, 3))
    assert ours.shape == reference.shape == (0, 3, 8, 8)


@pytest.mark.usefixtures("each_generation")
@every_variant
def test_an_image_with_nan_or_inf_changes_no_other_image(name: str) -> None:
    x = images(60, 3)
    clean = RANDAUGMENTS[name](x, rng())
    x[::2] = float("nan")
    x[2] = float("inf")
    assert torch.equal(RANDAUGMENTS[name](x, rng())[1::2], clean[1::2])


def test_operations_without_a_kernel_are_computed_by_torch() -> None:
    with patch.object(image_transforms, "apply_change", side_effect=AssertionError):
        always(Recorder())(images(), rng())
        RandAugment((Operation(invert), Operation(Recorder())), 2, 1.0, "full")(images(), rng())
        always(invert)(images().double(), rng())


# The variants -------------------------------------------------------------------------------


class Recorder:
    """An operation that records its amounts and changes nothing."""

    def __init__(self) -> None:
        self.amounts: list[float] = []

    def __call__(self, x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
        self.amounts += amount.tolist()
        return x


def amounts_of(variant: RandAugment, change: Change, rows: int = 400) -> set[float]:
    """All amounts of one of a variant's operations, to five decimals."""
    [operation] = [o for o in variant.operations if o.change == change]
    recorder = Recorder()
    alone = Operation(recorder, operation.weakest, operation.strongest, operation.either_way)
    RandAugment((alone,), variant.count, variant.chance, variant.strength)(images(rows), rng())
    return {round(amount, 5) for amount in recorder.amounts}


def around(middle: float, *steps: float) -> set[float]:
    return {round(middle + sign * step, 5) for step in steps for sign in (-1, 1)}


def test_the_pools_have_the_sizes_of_the_papers_code() -> None:
    sizes = {name: (len(v.operations), v.count) for name, v in RANDAUGMENTS.items()}
    assert sizes == {"fixmatch": (15, 2), "fedmatch": (13, 6), "fedseal": (14, 2)}


def test_fedmatch_has_equalize_as_the_identity_and_neither_invert_nor_cutout() -> None:
    changes = [operation.change for operation in FEDMATCH.operations]
    assert changes.count(identity) == 1
    assert not {equalize, invert, cutout} & set(changes)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (Shear("x", 4), around(0, *(0.3 * k / 9 for k in range(5)))),
        (Shear("y", 4), around(0, *(0.3 * k / 9 for k in range(5)))),
        (Translate("x", "side"), around(0, *(0.2 * k / 9 for k in range(5)))),
        (Translate("y", "side"), around(0, *(0.2 * k / 9 for k in range(5)))),
        (Rotate(128.0), {0, 40, 80, 120, 160}),
        (solarize, {round(256 - 25 * k / 9, 5) for k in range(5)}),
        (color, around(1, *(0.9 * k / 9 for k in range(5)))),
        (sharpness, around(1, *(0.9 * k / 9 for k in range(5)))),
        (contrast, around(1, *(0.5 * k / 9 for k in range(5)))),
        (brightness, around(1, *(0.3 * k / 9 for k in range(5)))),
    ],
)
def test_fedmatch_has_the_amounts_of_its_code(change: Change, expected: set[float]) -> None:
    found = amounts_of(FEDMATCH, change)
    assert sorted(found) == pytest.approx(sorted(expected), abs=2e-4)


def test_fedmatch_keeps_8_8_7_7_or_6_bits() -> None:
    bits = {round(amount) for amount in amounts_of(FEDMATCH, posterize)}
    assert [round(8 - 4 * k / 9) for k in range(5)] == [8, 8, 7, 7, 6]
    assert bits == {6, 7, 8}


def test_fedmatch_draws_a_bound_per_image_and_a_level_below_it_per_operation() -> None:
    # P(k) is the mean over M = 2..5 of 1/M for k < M: 77/240, 77/240, 47/240, 27/240, 12/240.
    rows, recorder = 4000, Recorder()
    # Amounts are recorded as they are drawn, operation after operation, each for all images in
    # order.
    RandAugment((Operation(recorder, 0, 9),), 6, 1.0, "steps")(images(rows, 1, 2, 2), rng())
    k = torch.tensor(recorder.amounts).round().long().view(6, rows)
    for level, times in enumerate((77, 77, 47, 27, 12)):
        share = times / 240
        # 6 standard deviations of 4,000 independent images
        spread = 6 * (share * (1 - share) / rows) ** 0.5
        assert float((k[0] == level).double().mean()) == pytest.approx(share, abs=spread)
    # One bound for all six: an image with M = 2 has no level above 1. Six independent bounds would
    # leave a share of (154/240)^6 = 7% of images below 2; one bound leaves
    # (1 + (2/3)^6 + (1/2)^6 + (2/5)^6) / 4 = 27.7%.
    low = float((k.amax(dim=0) < 2).double().mean())
    assert low == pytest.approx(0.2769, abs=6 * (0.277 * 0.723 / rows) ** 0.5)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        *((change, {1.9}) for change in (brightness, color, contrast, sharpness)),
        (posterize, {4}),
        (solarize, {0}),
        (Rotate(BLACK), {-30, 30}),
        (Shear("x", 2), {-0.3, 0.3}),
        (Shear("y", 2), {-0.3, 0.3}),
        (Translate("x", "pixel"), {-100, 100}),
        (Translate("y", "pixel"), {-100, 100}),
        (cutout, {40}),
    ],
)
def test_semifl_has_the_amounts_of_its_code(change: Change, expected: set[float]) -> None:
    assert sorted(amounts_of(FIXMATCH, change)) == pytest.approx(sorted(expected), abs=1e-5)


def test_translations_of_semifl_blank_an_image_and_its_solarize_inverts() -> None:
    x = images(5, 3, 32, 32)
    for axis in AXES:
        [shift] = [o for o in FIXMATCH.operations if o.change == Translate(axis, "pixel")]
        assert bool((RandAugment((shift,), 1, 1.0, "full")(x, rng()) == -1).all())
    assert torch.equal(always(solarize, 0)(x, rng()), always(invert)(x, rng()))


def test_one_in_six_or_seven_views_of_semifl_is_blank() -> None:
    # One operation blanks with probability 2/15 * 0.5 (translations) + 1/15 * 0.5 * (21/32)^2 (a
    # cutout that covers all) = 0.08102; one of two does with 1 - (1 - 0.08102)^2 = 15.55%. Less
    # than 0.15% of views were grey all over and then rotated or sheared, which gives them corners.
    view = FIXMATCH(images(3000, 3, 32, 32), rng(2))
    flat = (view.amax(dim=(2, 3)) == view.amin(dim=(2, 3))).all(dim=1)
    share = float(flat.double().mean())
    assert 0.1540 - 6 * 0.0066 < share < 0.1555 + 6 * 0.0066  # sqrt(.1555 * .8445 / 3000) = .0066


@pytest.mark.parametrize(
    ("change", "low", "high"),
    [
        *((change, 0.05, 0.95) for change in (brightness, color, contrast, sharpness)),
        (solarize, 0, 256),
        (Rotate(BLACK), -30, 30),
        (Shear("x", 1), -0.3, 0.3),
        (Translate("y", "side"), -0.3, 0.3),
    ],
)
def test_amounts_of_fedseal_fill_their_ranges(change: Change, low: float, high: float) -> None:
    found, reach = amounts_of(FEDSEAL, change), high - low
    assert low <= min(found) < low + reach / 20
    assert high - reach / 20 < max(found) <= high
    assert len(found) > 300  # of about 400: each operation draws its own strength


def test_fedseal_keeps_4_to_8_bits_with_equal_probability() -> None:
    recorder = Recorder()
    [operation] = [o for o in FEDSEAL.operations if o.change == posterize]
    alone = Operation(recorder, operation.weakest, operation.strongest)
    RandAugment((alone,), 1, 1.0, "uniform")(images(5000, 1, 2, 2), rng())
    counts = torch.tensor(recorder.amounts).round().long().bincount().tolist()
    assert counts[:4] == [0, 0, 0, 0]
    assert all(1000 - 6 * 28.3 < count < 1000 + 6 * 28.3 for count in counts[4:])
    assert len(counts) == 9


# Randomness ---------------------------------------------------------------------------------


@every_variant
def test_every_operation_of_a_pool_is_equally_likely_and_applied_with_its_probability(
    name: str,
) -> None:
    variant, rows = RANDAUGMENTS[name], 3000
    recorders = [Recorder() for _ in variant.operations]
    operations = tuple(Operation(recorder) for recorder in recorders)
    counted = RandAugment(operations, variant.count, variant.chance, variant.strength)
    counted(images(rows, 1, 2, 2), rng())
    share = variant.chance / len(operations)
    spread = 6 * (rows * variant.count * share * (1 - share)) ** 0.5
    for recorder in recorders:
        assert abs(len(recorder.amounts) - rows * variant.count * share) < spread


@every_variant
@pytest.mark.parametrize("channels", [1, 3])
def test_a_batch_of_views_equals_the_views_of_single_images(name: str, channels: int) -> None:
    # The reference: each image alone, through the operations that were drawn for it.
    variant, x = RANDAUGMENTS[name], images(60, channels)
    chance = torch.rand(60, 1 + COLUMNS * variant.count, generator=rng(4))
    for row, view in zip(range(60), variant(x, rng(4)), strict=True):
        level = ((x[row : row + 1] + 1) * 127.5).round()
        own = chance[row, 1:].view(variant.count, COLUMNS)
        for which, whether, strength, sign, top, left in own.tolist():
            operation = variant.operations[int(which * len(variant.operations))]
            if whether >= variant.chance:
                continue
            bound = 2 + int(4 * float(chance[row, 0]))
            strong = {"full": 1.0, "uniform": strength, "steps": int(bound * strength) / 9}
            amount = strong[variant.strength] * (operation.strongest - operation.weakest)
            amount *= -1 if operation.either_way and sign < 0.5 else 1
            place = torch.tensor([[top, left]])
            done = operation.change(level, torch.tensor([operation.weakest + amount]), place)
            level = done.clamp(0, 255).round()
        apart = (levels(view[None]) - level.long()).abs()
        assert int((apart > 1).sum()) == 0


def mean_of_all(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """A fault: the view of an image depends on the others."""
    return (x + x.mean(dim=0)) / 2


COUPLED = RandAugment((Operation(mean_of_all),), 1, 1.0, "full")


def equal_rows(variant: RandAugment, changed: int) -> list[bool]:
    """Which of six views stay bit-equal when one image is another."""
    x = images(6, 3)
    other = x.clone()
    other[changed] = 0.25
    before, after = variant(x, rng()), variant(other, rng())
    return (before == after).flatten(1).all(dim=1).tolist()


@every_variant
@pytest.mark.parametrize("changed", [0, 3, 5])
def test_no_view_depends_on_another_row(name: str, changed: int) -> None:
    unlike = [row for row, equal in enumerate(equal_rows(RANDAUGMENTS[name], changed)) if not equal]
    assert unlike in ([changed], [])  # []: both were blanked


def test_the_check_of_views_detects_an_operation_that_couples_rows() -> None:
    assert equal_rows(COUPLED, 3) == [False] * 6


@every_variant
def test_all_random_numbers_are_one_draw_with_a_row_per_image(name: str) -> None:
    variant, used, plain = RANDAUGMENTS[name], rng(5), rng(5)
    variant(images(7), used)
    torch.rand(7, 1 + 6 * variant.count, generator=plain)
    assert torch.equal(used.get_state(), plain.get_state())


@every_variant
def test_the_same_generator_state_gives_the_same_views_and_another_gives_others(name: str) -> None:
    variant, x = RANDAUGMENTS[name], images(20, 3)
    assert torch.equal(variant(x, rng(5)), variant(x, rng(5)))
    assert not torch.equal(variant(x, rng(5)), variant(x, rng(6)))


# Tensors ------------------------------------------------------------------------------------


@given(
    name=st.sampled_from(sorted(RANDAUGMENTS)),
    channels=st.integers(1, 4),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_views_keep_shape_and_range_and_do_not_modify_the_images(
    name: str, channels: int, height: int, width: int, seed: int
) -> None:
    x = torch.rand(5, channels, height, width, generator=rng(1)) * 2 - 1
    kept = x.clone()
    view = RANDAUGMENTS[name](x, rng(seed))
    assert view.shape == x.shape
    assert view.dtype == torch.float32
    assert -1 <= float(view.min()) <= float(view.max()) <= 1
    assert torch.equal(x, kept)


def test_the_identity_leaves_8_bit_images_bit_equal() -> None:
    x = torch.arange(256).to(torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(always(identity)(network_input(x), rng()), network_input(x))


@every_variant
def test_views_keep_the_memory_format(name: str) -> None:
    x = images(40, 3).contiguous(memory_format=torch.channels_last)
    view = RANDAUGMENTS[name](x, rng())
    assert view.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(view, RANDAUGMENTS[name](x.contiguous(), rng()))


@every_variant
def test_an_empty_batch_stays_empty_and_a_single_image_has_a_view(name: str) -> None:
    variant: Any = RANDAUGMENTS[name]
    assert variant(images()[:0], rng()).shape == (0, 1, 8, 8)
    assert variant(images()[:1], rng()).shape == (1, 1, 8, 8)
