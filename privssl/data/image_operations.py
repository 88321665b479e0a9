"""RandAugment's operations on batches of images with integer levels 0..255, as in PIL.

Results differ from PIL's by at most one level (PIL truncates, we round), and by the choice among
equally near pixels. ``csrc/views.cpp`` has the same operations and roundings (up to 65,793 pixels,
whose sums are exact in float32): change both together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from privssl.ops import image_transforms

BLACK, MIDDLE, TOP = 0.0, 127.0, 255.0  # levels

#: (levels (n, Ch, H, W), amount (n,), place (n, 2) in [0, 1)) -> levels, not yet clipped or rounded
Change = Callable[[Tensor, Tensor, Tensor], Tensor]

# Levels -------------------------------------------------------------------------------------


def identity(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Return the image unchanged."""
    return x


def autocontrast(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Stretch each channel to 0..255. A channel of one level is unchanged."""
    low, high = x.amin(dim=(2, 3), keepdim=True), x.amax(dim=(2, 3), keepdim=True)
    flat = low == high
    scale = TOP / (high - low).masked_fill(flat, TOP)
    return (x - low.masked_fill(flat, 0.0)) * scale


def equalize(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Equalise the histogram of each channel, in integers as in PIL.

    A channel with fewer than 255 pixels below its highest level is not changed.
    """
    rows, channels, height, width = x.shape
    level = x.long().view(rows * channels, height * width)
    offset = 256 * torch.arange(rows * channels, device=x.device)[:, None]
    counts = torch.bincount((level + offset).flatten(), minlength=256 * rows * channels)
    counts = counts.view(rows * channels, 256)
    highest = counts.gather(1, level.amax(dim=1, keepdim=True))  # (n Ch, 1)
    step = (height * width - highest) // 255
    below = counts.cumsum(dim=1) - counts  # pixels of lower levels
    table = (below + step // 2) // step.clamp(min=1)
    table = torch.where(step == 0, torch.arange(256, device=x.device), table)
    return table.gather(1, level).to(x.dtype).view_as(x)


def invert(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Return 255 - level."""
    return TOP - x


def posterize(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Keep the ``amount`` highest of 8 bits; ``amount`` is rounded."""
    step = torch.exp2(8 - amount.round())[:, None, None, None]
    return (x / step).floor_() * step


def solarize(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Invert the levels >= ``amount``."""
    return torch.where(x < amount[:, None, None, None], x, TOP - x)


def brightness(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Multiply by ``amount``: 0 is black, 1 the image."""
    return x * amount[:, None, None, None]


def contrast(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Interpolate from the image's mean grey at 0 to the image at 1."""
    mean = (_convert_to_grey(x).mean(dim=(1, 2, 3), keepdim=True) + 0.5).floor_()
    return _interpolate(mean, x, amount)


def color(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Interpolate from the grey image at 0 to the image at 1. No effect without colour."""
    return _interpolate(_convert_to_grey(x), x, amount) if x.shape[1] == 3 else x


def sharpness(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Interpolate from the smoothed image at 0 to the image at 1. Edge pixels are not changed."""
    smooth = x.clone()
    if min(x.shape[2:]) >= 3:
        # the weights are 1/13, and 5/13 in the middle
        inner = x[:, :, 1:-1, 1:-1]
        window_sums = avg_pool2d(x, 3, stride=1, divisor_override=1)
        smooth[:, :, 1:-1, 1:-1] = ((window_sums + 4 * inner) / 13).round_()
    return _interpolate(smooth, x, amount)


def _interpolate(degenerate: Tensor, x: Tensor, amount: Tensor) -> Tensor:
    """Interpolate from the degenerate image at ``amount`` 0 to the image at 1."""
    return degenerate + amount[:, None, None, None] * (x - degenerate)


def _convert_to_grey(x: Tensor) -> Tensor:
    """Return integer grey levels (n, 1, H, W): ITU-R 601 luma of three channels, else the channels'
    mean."""
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True).round_()
    red, green, blue = x[:, :1], x[:, 1:2], x[:, 2:]
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536).floor_()


# Places -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shear:
    """Shift each row (axis "x") or column ("y") by ``amount`` pixels per pixel from the top left.

    Outside is black.
    """

    axis: Literal["x", "y"]
    pixels_used: Literal[1, 2, 4]  # nearest, linear, cubic

    def __call__(self, x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
        x = x if self.axis == "x" else x.transpose(2, 3)
        middle = torch.arange(x.shape[2], device=x.device) + 0.5
        shifted = slide(x, amount[:, None] * middle, self.pixels_used)
        return shifted if self.axis == "x" else shifted.transpose(2, 3)


@dataclass(frozen=True)
class Translate:
    """Shift to the left ("x") or up ("y"), by whole pixels; outside is black."""

    axis: Literal["x", "y"]
    unit: Literal["side", "pixel"]  # of ``amount``

    def __call__(self, x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
        x = x if self.axis == "x" else x.transpose(2, 3)
        pixels = amount * x.shape[3] if self.unit == "side" else amount
        shifted = slide(x, pixels[:, None].expand(-1, x.shape[2]), 1)
        return shifted if self.axis == "x" else shifted.transpose(2, 3)


def slide(x: Tensor, offset: Tensor, pixels_used: Literal[1, 2, 4]) -> Tensor:
    """Shift rows: pixel j of row y of the view is at j + offset[y] of the same row; outside is
    black.

    Args:
        x: levels (n, Ch, H, W).
        offset: (n, H) pixels to the right.
        pixels_used: 1: nearest, 2: linear between two, 4: cubic (a = -1, as in PIL) between four;
            neighbours beyond the edge are the pixel at the edge.
    """
    width = x.shape[3]
    column = torch.arange(width, device=x.device)
    nearest = column + (offset + 0.5).floor()[:, :, None].long()  # (n, H, W)
    if pixels_used == 1:
        source, index = x, nearest.clamp(0, width - 1)
    else:
        # All pixels of a row have the same fraction t: interpolate once, then look up.
        whole = offset.floor()
        t = (offset - whole)[:, None, :, None]
        padded = pad(x, (2, 2, 0, 0), mode="replicate")
        a, b, c, d = (padded[..., start : start + width + 1] for start in range(4))
        if pixels_used == 2:
            source = b + t * (c - b)
        else:
            source = b + t * (c - a + t * (2 * (a - b) + c - d + t * (b - a + d - c)))
        index = (column + 1 + whole[:, :, None].long()).clamp(0, width)
    shifted = source.gather(3, index[:, None].expand(-1, x.shape[1], -1, -1))
    return shifted.masked_fill_(((nearest < 0) | (nearest >= width))[:, None], BLACK)


@dataclass(frozen=True)
class Rotate:
    """Rotate by ``amount`` degrees counter-clockwise about the middle, nearest pixel."""

    outside: float  # level outside the image

    def __call__(self, x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
        rows, channels, height, width = x.shape
        # In float64, so that every library has the same bits; Apple's GPUs have no float64.
        degrees = amount if amount.device.type == "mps" else amount.double()
        radians = torch.deg2rad(degrees)[:, None, None]  # (n, 1, 1)
        cos, sin = radians.cos().float(), radians.sin().float()
        down = (torch.arange(height, device=x.device) + 0.5 - height / 2)[:, None]  # (H, 1)
        right = torch.arange(width, device=x.device) + 0.5 - width / 2  # (W,)
        from_x = (cos * right - sin * down + width / 2).floor()  # (n, H, W)
        from_y = (sin * right + cos * down + height / 2).floor()
        outside = (from_x < 0) | (from_x >= width) | (from_y < 0) | (from_y >= height)
        pixel = (from_y * width + from_x).masked_fill(outside, 0).long().view(rows, 1, -1)
        rotated = x.reshape(rows, channels, -1).gather(2, pixel.expand(-1, channels, -1))
        return rotated.view_as(x).masked_fill_(outside[:, None], self.outside)


def cutout(x: Tensor, amount: Tensor, place: Tensor) -> Tensor:
    """Fill a square of ``amount`` pixels with grey.

    Its middle is at ``place``, but its top left corner is inside of the image, as in SemiFL's code.
    """
    inside = []
    for side, position in zip(x.shape[2:], place.unbind(dim=1), strict=True):
        start = (position * side - amount / 2).clamp(min=0).floor()[:, None]  # (n, 1)
        pixel = torch.arange(side, device=x.device)
        inside.append((pixel >= start) & (pixel < start + amount[:, None]))  # (n, side)
    hole = inside[0][:, None, :, None] & inside[1][:, None, None, :]  # (n, 1, H, W)
    return x.masked_fill(hole, MIDDLE)


def kind(change: Change) -> image_transforms.Kind | None:
    """Return the kernel's name of an operation; None if it has none."""
    match change:
        case Shear(axis, used):
            return image_transforms.Kind("shear", axis=axis, pixels_used=used)
        case Translate(axis, unit):
            return image_transforms.Kind("translate", axis=axis, of_side=unit == "side")
        case Rotate(outside):
            return image_transforms.Kind("rotate", outside=outside)
        case FunctionType() if change in _FUNCTIONS:
            return image_transforms.Kind(change.__name__)
    return None


_FUNCTIONS = (
    *(identity, autocontrast, equalize, invert, posterize, solarize, brightness, contrast, color),
    *(sharpness, cutout),
)
