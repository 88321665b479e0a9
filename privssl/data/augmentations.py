"""Augmentations by the names in configs.

none, weak, mid, strong        for digits (data/affine_augment.py)
crop                           of natural images: a shift, filled by mirroring
fixmatch, fedmatch, fedseal    RandAugment of another view (rand_augment.py)
"""

import torch
from torch import Tensor

from privssl.data.affine_augment import AUGMENTATIONS, Augmentation
from privssl.data.rand_augment import RANDAUGMENTS

#: Up to an eighth of the side each way: 4 of 32 pixels (FixMatch, SemiFL).
CROP = Augmentation(crop=1 / 8)
_PLAIN = {**AUGMENTATIONS, "crop": CROP}


def view(name: str, x: Tensor, rng: torch.Generator, *, flip: bool, under: str = "crop") -> Tensor:
    """One view of each row (B, *shape) in [-1, 1].

    Args:
        name: as above.
        flip: also mirror left to right with probability 1/2.
        under: the view to which RandAugment is applied.
    """
    if not len(x):
        return x
    if name in _PLAIN:
        return _PLAIN[name].flipping(flip)(x, rng)
    seen: Tensor = RANDAUGMENTS[name](view(under, x, rng, flip=flip), rng)
    return seen
