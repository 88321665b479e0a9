"""Random affine views of a batch of images, computed without a loop over rows.

A view is a random affine map (rotation, scale, shear, shift), for natural images a crop and a
mirror image, and last a cutout. Strengths were tuned on MNIST; they are fractions of the side. The
affine grid is one product of all maps with cached pixel positions: 20 times faster than torch's
``affine_grid``, which multiplies a small matrix per row.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from privssl.ops import image_transforms
from privssl.training.batched.deferred import batched_call

BLANK = -1.0  # outside an image and inside a cutout: black in [-1, 1]


@dataclass(frozen=True)
class Augmentation:
    """Strengths of random changes; call it with images to get one view of each.

    Args:
        rotation: largest angle either way, degrees.
        scale: factors of size are in [1 - scale, 1 + scale]. In [0, 1).
        shear: largest shift of a row of pixels per pixel of height, either way.
        shift: largest shift along each axis, fraction of the side.
        cutout: side of the blank square, fraction of the side. In [0, 1].
        crop: largest shift by whole pixels, fraction of the side, filled by mirroring. In [0, 1).
        flip: mirror left to right with probability 1/2.
    """

    rotation: float = 0.0
    scale: float = 0.0
    shear: float = 0.0
    shift: float = 0.0
    cutout: float = 0.0
    crop: float = 0.0
    flip: bool = False

    def __call__(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return one view of each row.

        Args:
            x: images (B, Ch, H, W), float32 in [-1, 1]; not written to.
            rng: a generator on the CPU. Row i of one draw (B, 10) is the only randomness of view i,
                so views are independent of other rows.

        Returns:
            (B, Ch, H, W), in x's memory format; x itself without any change.
        """
        if self == NONE:
            return x
        chance = torch.rand(len(x), 10, generator=rng)  # in [0, 1)
        view: Tensor = batched_call(_make_views, {"x": x, "chance": chance}, self)
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        return view.contiguous(memory_format=memory_format)

    def flipping(self, flip: bool) -> "Augmentation":
        """Return the same strengths, with or without mirroring."""
        return dataclasses.replace(self, flip=flip)


NONE = Augmentation()

#: Strengths by name, on the 28 pixels of MNIST. Source: ours.
AUGMENTATIONS = {
    "none": NONE,
    "weak": Augmentation(rotation=8, shift=2 / 28),
    "mid": Augmentation(rotation=12, shift=2 / 28),
    "strong": Augmentation(rotation=25, scale=0.2, shear=0.3, shift=3 / 28, cutout=8 / 28),
}


def _make_views(fields: Mapping[str, Tensor], strengths: Augmentation) -> Tensor:
    """Return a view of each row x (B, Ch, H, W), from its random numbers "chance" (B, 10) in [0,
    1)."""
    x = fields["x"]
    chance = fields["chance"].to(x.device)
    signed = 2 * chance - 1  # (B, 10) in [-1, 1)
    height, width = x.shape[2:]
    view = x
    if strengths.flip or strengths.crop:
        max_shift = torch.tensor([int(strengths.crop * side) for side in (height, width)])
        max_shift = max_shift.to(x.device)  # pixels; shifts are uniform in -max_shift..max_shift
        shift = (chance[:, 7:9] * (2 * max_shift + 1)).long() - max_shift
        view = move_mirrored(view, shift, flipped=(chance[:, 9] < 0.5) & strengths.flip)
    if strengths.rotation or strengths.scale or strengths.shear or strengths.shift:
        maps = affine(
            angle=signed[:, 0] * strengths.rotation,
            zoom=1 + signed[:, 1] * strengths.scale,
            shear=signed[:, 2] * strengths.shear,
            shift=signed[:, 3:5] * strengths.shift,
            aspect=height / width,
        )
        view = warp(view, maps)
    return cut_out(view, strengths.cutout, chance[:, 5:7]) if strengths.cutout else view


def affine(*, angle: Tensor, zoom: Tensor, shear: Tensor, shift: Tensor, aspect: float) -> Tensor:
    """Return maps from positions in the view to positions in the image, for ``warp``.

    The inverse of shearing, zooming, rotating about the middle and shifting, in this order, in
    pixels. Positions are relative to the middle, in half sides, y downwards.

    Args:
        angle: (B,) degrees, counter-clockwise as seen.
        zoom: (B,) > 0; above 1 enlarges.
        shear: (B,) pixels to the right per pixel downwards.
        shift: (B, 2) fraction of the height downwards, of the width to the right.
        aspect: height / width.

    Returns:
        (B, 2, 3): rows x and y of the image; columns x, y and 1 of the view.
    """
    radians = torch.deg2rad(angle)
    cos, sin = radians.cos() / zoom, radians.sin() / zoom
    xx, xy = cos - shear * sin, (-sin - shear * cos) * aspect
    yx, yy = sin / aspect, cos
    down, right = 2 * shift[:, 0], 2 * shift[:, 1]
    x_row = torch.stack([xx, xy, -(xx * right + xy * down)], dim=1)  # (B, 3)
    y_row = torch.stack([yx, yy, -(yx * right + yy * down)], dim=1)
    return torch.stack([x_row, y_row], dim=1)


def warp(x: Tensor, maps: Tensor) -> Tensor:
    """Sample every pixel of the view from its image bilinearly; outside is blank.

    Args:
        x: (B, Ch, H, W) float32.
        maps: (B, 2, 3), see ``affine``.
    """
    rows, _, height, width = x.shape
    grid = maps.reshape(rows * 2, 3) @ _make_pixel_positions(height, width, x.device)  # (2 B, H W)
    grid = grid.view(rows, 2, height, width).permute(0, 2, 3, 1)  # (B, H, W, 2)
    # grid_sample fills with 0 outside, so black is 0 here
    sampled = functional.grid_sample(
        x - BLANK, grid, mode="bilinear", padding_mode="zeros", align_corners=False
    )
    return sampled.add_(BLANK)


@lru_cache(maxsize=16)
def _make_pixel_positions(height: int, width: int, device: torch.device) -> Tensor:
    """Return the middle of each pixel: rows x, y and 1, columns pixels; (3, H W) in (-1, 1)."""
    y = (2 * torch.arange(height, device=device) + 1) / height - 1
    x = (2 * torch.arange(width, device=device) + 1) / width - 1
    down, right = torch.meshgrid(y, x, indexing="ij")
    return torch.stack([right, down, torch.ones_like(down)]).reshape(3, height * width)


def move_mirrored(x: Tensor, shift: Tensor, flipped: Tensor) -> Tensor:
    """Shift by whole pixels; fill with the image mirrored at its edge pixel.

    Args:
        x: (B, Ch, H, W).
        shift: (B, 2) whole pixels down and to the right, less than the side.
        flipped: (B,), whether an image is mirrored left to right before it is shifted.
    """
    if image_transforms.available(x):
        return image_transforms.shift_and_flip(x, shift, flipped)
    rows, channels, height, width = x.shape
    down, right = _mirror(height, shift[:, 0]), _mirror(width, shift[:, 1])  # (B, H), (B, W)
    right = torch.where(flipped[:, None], width - 1 - right, right)
    pixel = (down[:, :, None] * width + right[:, None, :]).view(rows, 1, height * width)
    flat = x.reshape(rows, channels, height * width)
    return flat.gather(2, pixel.expand_as(flat)).view(rows, channels, height, width)


def _mirror(side: int, shift: Tensor) -> Tensor:
    """Return the source of each of ``side`` positions: (B, side), mirrored at both ends."""
    last = side - 1
    source = (torch.arange(side, device=shift.device) - shift[:, None]).abs()  # (B, side)
    return last - (last - source).abs()


def cut_out(x: Tensor, share: float, place: Tensor) -> Tensor:
    """Blank one square inside each image. DeVries and Taylor 2017, arXiv:1708.04552.

    Differs from the paper: the square is inside of the image, so its area is constant.

    Args:
        x: (B, Ch, H, W).
        share: side of the square, fraction of each side of the image, rounded to whole pixels.
        place: (B, 2) in [0, 1): its position from the top and from the left.
    """
    inside = []
    for side, position in zip(x.shape[2:], place.unbind(dim=1), strict=True):
        length = round(share * side)
        start = (position * (side - length + 1)).long()[:, None]  # (B, 1) in 0..side - length
        pixel = torch.arange(side, device=x.device)
        inside.append((pixel >= start) & (pixel < start + length))  # (B, side)
    hole = inside[0][:, None, :, None] & inside[1][:, None, None, :]  # (B, 1, H, W)
    return x.masked_fill(hole, BLANK)
