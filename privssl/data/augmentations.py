"""Augmentations by the names in configs, for rows of each kind.

none, weak, mid, strong        of images: digits (affine_augment.py); of others: feature_views.py
crop, shift                    of natural images: a shift, filled by mirroring
fedtrinet                      of images: the same, then contrast and grey
fixmatch, fedmatch, fedseal    of images: RandAugment of another view (rand_augment.py)
"""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from privssl.data.affine_augment import AUGMENTATIONS, Augmentation
from privssl.data.feature_views import SEQUENCE_VIEWS, VECTOR_VIEWS
from privssl.data.rand_augment import RANDAUGMENTS

#: Values of ``strong`` in the settings of algorithms.
StrongName: TypeAlias = Literal["none", "weak", "mid", "strong", "fixmatch", "fedmatch", "fedseal"]
#: Up to an eighth of the side each way: 4 of 32 pixels (FixMatch, SemiFL).
CROP = Augmentation(crop=1 / 8)
_PLAIN = {**AUGMENTATIONS, "crop": CROP, "shift": CROP}
#: FedTriNet's view, by the authors' code: largest relative change of contrast, and probability that
#: an image turns grey.
CONTRAST, GREY = 0.3, 0.1
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601


@dataclass(frozen=True)
class View:
    """An augmentation by name; call it with rows (B, *shape) and a generator.

    Args:
        name: as above; ``row_checks`` refuses names that do not fit the rows.
        flip: of images: also mirror left to right with probability 1/2.
        under: of images: the view to which RandAugment is applied.
    """

    name: str
    flip: bool = False
    under: str = "crop"

    def __call__(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return one view of each row, which depends only on that row and its random numbers."""
        if not len(x):
            return x
        if x.dim() < 4:
            return (SEQUENCE_VIEWS if x.dim() == 3 else VECTOR_VIEWS)[self.name](x, rng)
        if self.name == "fedtrinet":
            return contrast_and_grey(CROP.flipping(self.flip)(x, rng), rng)
        if self.name in _PLAIN:
            return _PLAIN[self.name].flipping(self.flip)(x, rng)
        augmented: Tensor = RANDAUGMENTS[self.name](View(self.under, self.flip)(x, rng), rng)
        return augmented


def contrast_and_grey(x: Tensor, rng: torch.Generator) -> Tensor:
    """Change the contrast of images (B, Ch, H, W) in [-1, 1], and turn one in ten grey.

    Che et al. (FedTriNet), IV.B; row i of one draw (B, 2) is the only randomness of view i.
    """
    chance = torch.rand(len(x), 2, generator=rng).to(x.device)
    if x.shape[1] == 3:
        luma = (x * torch.tensor(LUMA, device=x.device).view(3, 1, 1)).sum(dim=1, keepdim=True)
    else:
        luma = x.mean(dim=1, keepdim=True)
    middle = luma.mean(dim=(1, 2, 3), keepdim=True)
    factor = (1 + CONTRAST * (2 * chance[:, 0] - 1)).view(-1, 1, 1, 1)
    greyed = torch.where((chance[:, 1] < GREY).view(-1, 1, 1, 1), luma.expand_as(x), x)
    return (middle + factor * (greyed - middle)).clamp_(-1.0, 1.0)


def view(name: str, x: Tensor, rng: torch.Generator, *, flip: bool, under: str = "crop") -> Tensor:
    """Return one view of each row (B, *shape), see :class:`View`."""
    return View(name, flip, under)(x, rng)


class _ViewSettings(Protocol):
    @property
    def weak(self) -> str: ...
    @property
    def strong(self) -> str: ...
    @property
    def flip(self) -> bool: ...


class StrongViews:
    """Mixin for settings with ``weak``, ``strong`` and ``flip``."""

    def strong_view(self: _ViewSettings, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return a strong view of rows (B, *shape) in [-1, 1]; RandAugment works on a weak one."""
        return view(self.strong, x, rng, flip=self.flip, under=self.weak)
