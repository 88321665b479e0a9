"""RandAugment as three papers on federated learning have it, on whole batches.

A view is made by a few operations that are drawn for each image. What Cubuk et al. (2020) call
RandAugment exists in as many variants as there are authors; here are those of SemiFL ("fixmatch"),
of FedMatch ("fedmatch") and of FedSEAL ("fedseal"). ``RANDAUGMENTS`` at the end is the table,
operation by operation.

The operations are PIL's, on images of whole levels 0..255. A result differs from PIL's by at most
one level per operation (it cuts fractions off where we round), and where the nearest pixel is a
tie. Images that drew the same operation go through it together: there is a loop over
operations and none over images.

Images that were not 8-bit are rounded to whole levels first. Images that do not have three channels
have no colour: ``color`` was drawn, counts as one of the operations, and changes nothing.

Not part of a variant is what SemiFL and FedSEAL do before it to natural images, mirroring and
cropping: ``Augmentation(crop=0.125, flip=True)`` of ``augment.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

BLACK, MIDDLE, TOP = 0.0, 127.0, 255.0  # levels
COLUMNS = 6  # of chance per operation: which, whether, how strong, which sign, from top, from left

#: (levels (n, Ch, H, W), amount (n,), place (n, 2) in [0, 1)) -> levels, not yet clipped or rounded
Change = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Operation:
    """One change, and from what to what its amount goes as the strength goes from 0 to 1."""

    change: Change
    weakest: float = 0.0
    strongest: float = 0.0
    either_way: bool = False  # the amount is mirrored at ``weakest`` every second time


@dataclass(frozen=True)
class RandAugment:
    """A variant; call it with images to get one view of each.

    Args:
        operations: what is drawn from, each as likely, with replacement.
        count: operations per image.
        chance: that an operation that was drawn is carried out. In (0, 1].
        strength: "full": 1 always; "uniform": from [0, 1) for each operation; "steps": k / 9 with
            k below a bound that is one of 2 to 5 for each image (FedMatch).
    """

    operations: tuple[Operation, ...]
    count: int
    chance: float
    strength: Literal["full", "uniform", "steps"]

    def __call__(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """One view of each row.

        Args:
            x: images (B, Ch, H, W), float32 in [-1, 1]; not written to.
            rng: a generator on the CPU. One draw of (B, 1 + 6 count) numbers, and row i of it is
                all the chance in view i, so no view depends on another row.

        Returns:
            (B, Ch, H, W) in [-1, 1], in x's memory format: 256 levels as ``learn.network_input``
            makes them of 8-bit images.
        """
        chance = torch.rand(len(x), 1 + COLUMNS * self.count, generator=rng).to(x.device)
        levels = ((x + 1) * 127.5).round_().clamp_(BLACK, TOP).contiguous()
        for drawn in torch.split(chance[:, 1:], COLUMNS, dim=1):
            self._change(levels, drawn, self._strengths(chance[:, 0], drawn[:, 2]))
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        form = torch.channels_last if channels_last else torch.contiguous_format
        return levels.div_(127.5).sub_(1).contiguous(memory_format=form)

    def _strengths(self, of_image: Tensor, of_operation: Tensor) -> Tensor:
        """(B,) in [0, 1] from chance (B,) and (B,)."""
        if self.strength == "full":
            return torch.ones_like(of_operation)
        if self.strength == "uniform":
            return of_operation
        bound = 2 + (4 * of_image).floor()  # M of FedMatch: 2, 3, 4 or 5
        return (bound * of_operation).floor() / 9

    def _change(self, levels: Tensor, drawn: Tensor, strength: Tensor) -> None:
        """Carry out one operation on each image, in place. drawn (B, 6), strength (B,)."""
        kinds = len(self.operations)
        which = (kinds * drawn[:, 0]).long()
        which = torch.where(drawn[:, 1] < self.chance, which, kinds)  # ``kinds``: none
        sign = torch.where(drawn[:, 3] < 0.5, -1.0, 1.0)
        order = which.argsort(stable=True)
        sizes = torch.bincount(which, minlength=kinds + 1).tolist()
        # the images of each operation; those of none come last and are left over
        for operation, rows in zip(self.operations, torch.split(order, sizes), strict=False):
            if operation.change is identity or not len(rows):
                continue
            amount = strength[rows] * (operation.strongest - operation.weakest)
            if operation.either_way:
                amount = amount * sign[rows]
            changed = operation.change(levels[rows], operation.weakest + amount, drawn[rows, 4:])
            levels.index_copy_(0, rows, changed.clamp_(BLACK, TOP).round_())


# Levels -------------------------------------------------------------------------------------


def identity(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Nothing."""
    return x


def autocontrast(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Stretch each channel to 0..255. A channel of one level stays."""
    low, high = x.amin(dim=(2, 3), keepdim=True), x.amax(dim=(2, 3), keepdim=True)
    flat = low == high
    scale = TOP / (high - low).masked_fill(flat, TOP)
    return (x - low.masked_fill(flat, 0.0)) * scale


def equalize(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Map each channel's levels so that they become equally frequent, in whole numbers as PIL does.

    A channel stays that has too few pixels beside those of its highest level (fewer than 255).
    """
    rows, channels, height, width = x.shape
    level = x.long().view(rows * channels, height * width)
    first = 256 * torch.arange(rows * channels, device=x.device)[:, None]
    counts = torch.bincount((level + first).flatten(), minlength=256 * rows * channels)
    counts = counts.view(rows * channels, 256)
    highest = counts.gather(1, level.amax(dim=1, keepdim=True))  # (n Ch, 1)
    step = (height * width - highest) // 255
    below = counts.cumsum(dim=1) - counts  # pixels of lower levels
    table = (below + step // 2) // step.clamp(min=1)
    table = torch.where(step == 0, torch.arange(256, device=x.device), table)
    return table.gather(1, level).to(x.dtype).view_as(x)


def invert(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Light for dark."""
    return TOP - x


def posterize(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Keep the ``amount`` highest of 8 bits; rounded to a whole number."""
    step = torch.exp2(8 - amount.round())[:, None, None, None]
    return (x / step).floor_() * step


def solarize(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Invert the levels from ``amount`` up."""
    return torch.where(x < amount[:, None, None, None], x, TOP - x)


def brightness(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Times ``amount``: 0 is black, 1 the image."""
    return x * amount[:, None, None, None]


def contrast(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Away from the image's mean grey: 0 is that grey, 1 the image."""
    mean = (_grey(x).mean(dim=(1, 2, 3), keepdim=True) + 0.5).floor_()
    return _from(mean, x, amount)


def color(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Away from the grey image: 0 is grey, 1 the image. Nothing where there is no colour."""
    return _from(_grey(x), x, amount) if x.shape[1] == 3 else x


def sharpness(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Away from the smoothed image: 0 is smooth, 1 the image. Pixels at the edge stay."""
    smooth = x.clone()
    if min(x.shape[2:]) >= 3:
        # the weights are 1/13, and 5/13 in the middle
        inner = x[:, :, 1:-1, 1:-1]
        smooth[:, :, 1:-1, 1:-1] = ((9 * avg_pool2d(x, 3, stride=1) + 4 * inner) / 13).round_()
    return _from(smooth, x, amount)


def _from(degenerate: Tensor, x: Tensor, amount: Tensor) -> Tensor:
    """``amount`` 0 is the degenerate image, 1 the image itself, and so on along the line."""
    return degenerate + amount[:, None, None, None] * (x - degenerate)


def _grey(x: Tensor) -> Tensor:
    """(n, 1, H, W) whole levels: ITU-R 601 luma of three channels, else the channels' mean."""
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True).round_()
    red, green, blue = x[:, :1], x[:, 1:2], x[:, 2:]
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536).floor_()


# Places -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shear:
    """Slide rows of pixels (axis "x") or columns ("y") along themselves, the farther they are from
    the top left corner by ``amount`` pixels per pixel; black comes in."""

    axis: Literal["x", "y"]
    pixels_used: Literal[1, 2, 4]  # nearest, linear, cubic

    def __call__(self, x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
        x = x if self.axis == "x" else x.transpose(2, 3)
        middle = torch.arange(x.shape[2], device=x.device) + 0.5
        moved = slide(x, amount[:, None] * middle, self.pixels_used)
        return moved if self.axis == "x" else moved.transpose(2, 3)


@dataclass(frozen=True)
class Translate:
    """Move everything to the left ("x") or up ("y"), to whole pixels; black comes in."""

    axis: Literal["x", "y"]
    unit: Literal["side", "pixel"]  # of ``amount``

    def __call__(self, x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
        x = x if self.axis == "x" else x.transpose(2, 3)
        pixels = amount * x.shape[3] if self.unit == "side" else amount
        moved = slide(x, pixels[:, None].expand(-1, x.shape[2]), 1)
        return moved if self.axis == "x" else moved.transpose(2, 3)


def slide(x: Tensor, offset: Tensor, pixels_used: Literal[1, 2, 4]) -> Tensor:
    """Look pixel j of row y of the view up at j + offset[y] of the same row; outside is black.

    Args:
        x: levels (n, Ch, H, W).
        offset: (n, H) pixels to the right.
        pixels_used: 1 the nearest, 2 linearly between two, 4 cubically (a = -1, as PIL's) between
            four; neighbours beyond the edge are the pixel at the edge.
    """
    width = x.shape[3]
    column = torch.arange(width, device=x.device)
    nearest = column + (offset + 0.5).floor()[:, :, None].long()  # (n, H, W)
    if pixels_used == 1:
        source, number = x, nearest.clamp(0, width - 1)
    else:
        # All pixels of a row lie equally far between two pixels of the image: the values in
        # between are made once, from left of the first pixel to right of the last, then looked up.
        whole = offset.floor()
        t = (offset - whole)[:, None, :, None]
        edged = pad(x, (2, 2, 0, 0), mode="replicate")
        a, b, c, d = (edged[..., start : start + width + 1] for start in range(4))
        if pixels_used == 2:
            source = b + t * (c - b)
        else:
            source = b + t * (c - a + t * (2 * (a - b) + c - d + t * (b - a + d - c)))
        number = (column + 1 + whole[:, :, None].long()).clamp(0, width)
    seen = source.gather(3, number[:, None].expand(-1, x.shape[1], -1, -1))
    return seen.masked_fill_(((nearest < 0) | (nearest >= width))[:, None], BLACK)


@dataclass(frozen=True)
class Rotate:
    """Turn by ``amount`` degrees counter-clockwise about the middle, nearest pixel."""

    outside: float  # level of what comes in

    def __call__(self, x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
        rows, channels, height, width = x.shape
        turn = torch.deg2rad(amount)[:, None, None]  # (n, 1, 1)
        cos, sin = turn.cos(), turn.sin()
        down = (torch.arange(height, device=x.device) + 0.5 - height / 2)[:, None]  # (H, 1)
        right = torch.arange(width, device=x.device) + 0.5 - width / 2  # (W,)
        from_x = (cos * right - sin * down + width / 2).floor()  # (n, H, W)
        from_y = (sin * right + cos * down + height / 2).floor()
        outside = (from_x < 0) | (from_x >= width) | (from_y < 0) | (from_y >= height)
        pixel = (from_y * width + from_x).masked_fill(outside, 0).long().view(rows, 1, -1)
        seen = x.reshape(rows, channels, -1).gather(2, pixel.expand(-1, channels, -1))
        return seen.view_as(x).masked_fill_(outside[:, None], self.outside)


def cutout(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Fill a square of ``amount`` pixels with grey.

    Its top left corner lies half a side above and to the left of ``place``, but never outside of
    the image: there the square begins at the edge with its full side, as in SemiFL's code.
    """
    inside = []
    for size, where in zip(x.shape[2:], place.unbind(dim=1), strict=True):
        start = (where * size - amount / 2).clamp(min=0).floor()[:, None]  # (n, 1)
        pixel = torch.arange(size, device=x.device)
        inside.append((pixel >= start) & (pixel < start + amount[:, None]))  # (n, size)
    hole = inside[0][:, None, :, None] & inside[1][:, None, None, :]  # (n, 1, H, W)
    return x.masked_fill(hole, MIDDLE)


# Variants -----------------------------------------------------------------------------------

#: SemiFL's code, 15 operations, two of them per image, each with probability 0.5 (there: drawn from
#: U(0.2, 0.8) for each operation, which is the same) and always at full strength. Its constants
#: are those of larger images: a shift by 100 pixels blanks an image of 32, so that 15.5% of
#: the views show nothing. All of SemiFL's published numbers were made with it.
FIXMATCH = RandAugment(
    operations=(
        Operation(autocontrast),
        Operation(equalize),
        Operation(invert),
        Operation(posterize, 4, 4),
        Operation(brightness, 1, 1.9),
        Operation(color, 1, 1.9),
        Operation(contrast, 1, 1.9),
        Operation(sharpness, 1, 1.9),
        Operation(solarize, 0, 0),
        Operation(Rotate(BLACK), 0, 30, either_way=True),
        Operation(Shear("x", 2), 0, 0.3, either_way=True),
        Operation(Shear("y", 2), 0, 0.3, either_way=True),
        Operation(Translate("x", "pixel"), 0, 100, either_way=True),
        Operation(Translate("y", "pixel"), 0, 100, either_way=True),
        Operation(cutout, 40, 40),
    ),
    count=2,
    chance=0.5,
    strength="full",
)

#: FedMatch's code, 13 operations, six of them per image at small strengths. "Equalize" does nothing
#: there; rotation is by 0, 40, 80, 120 or 160 degrees, always counter-clockwise.
FEDMATCH = RandAugment(
    operations=(
        Operation(Shear("x", 4), 0, 0.3, either_way=True),
        Operation(Shear("y", 4), 0, 0.3, either_way=True),
        Operation(Translate("x", "side"), 0, 0.2, either_way=True),
        Operation(Translate("y", "side"), 0, 0.2, either_way=True),
        Operation(Rotate(128.0), 0, 360),
        Operation(solarize, 256, 231),
        Operation(color, 1, 1.9, either_way=True),
        Operation(sharpness, 1, 1.9, either_way=True),
        Operation(contrast, 1, 1.5, either_way=True),
        Operation(brightness, 1, 1.3, either_way=True),
        Operation(posterize, 8, 4),
        Operation(autocontrast),
        Operation(identity),  # named equalize
    ),
    count=6,
    chance=1.0,
    strength="steps",
)

#: FixMatch's pool of 14, as our reading of FedSEAL has it (the paper says RandAugment and no more):
#: two per image, each with probability 0.5, at a strength of its own.
FEDSEAL = RandAugment(
    operations=(
        Operation(autocontrast),
        Operation(equalize),
        Operation(identity),
        Operation(brightness, 0.05, 0.95),
        Operation(color, 0.05, 0.95),
        Operation(contrast, 0.05, 0.95),
        Operation(sharpness, 0.05, 0.95),
        Operation(posterize, 3.5, 8.5),  # rounded: 4 to 8 bits, each as likely
        Operation(solarize, 0, 256),
        Operation(Rotate(BLACK), 0, 30, either_way=True),
        Operation(Shear("x", 1), 0, 0.3, either_way=True),
        Operation(Shear("y", 1), 0, 0.3, either_way=True),
        Operation(Translate("x", "side"), 0, 0.3, either_way=True),
        Operation(Translate("y", "side"), 0, 0.3, either_way=True),
    ),
    count=2,
    chance=0.5,
    strength="uniform",
)

RANDAUGMENTS = {"fixmatch": FIXMATCH, "fedmatch": FEDMATCH, "fedseal": FEDSEAL}
