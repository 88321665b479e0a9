"""The conditional generator G and discriminator D of FedSSL, usable on their own.

Depends on torch alone. ``image`` and ``feature`` have the networks, ``objectives`` their losses.
"""

from generators.base import ConditionalDiscriminator, ConditionalGenerator
from generators.feature import FeatureDiscriminator, FeatureGenerator
from generators.image import ImageDiscriminator, ImageGenerator
from generators.objectives import (
    discriminator_loss,
    g,
    realistic_loss,
    reconstruction_loss,
)

__all__ = [
    "ConditionalDiscriminator",
    "ConditionalGenerator",
    "FeatureDiscriminator",
    "FeatureGenerator",
    "ImageDiscriminator",
    "ImageGenerator",
    "discriminator_loss",
    "g",
    "realistic_loss",
    "networks_for",
    "reconstruction_loss",
]


def networks_for(
    shape: tuple[int, ...],
) -> tuple[type[ConditionalGenerator], type[ConditionalDiscriminator]]:
    """The classes of G and D for rows of this shape: (channels, height, width), (length, features)
    or (features,)."""
    if len(shape) == 3:
        return ImageGenerator, ImageDiscriminator
    return FeatureGenerator, FeatureDiscriminator
