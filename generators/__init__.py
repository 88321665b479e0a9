"""The conditional generator G and discriminator D of FedSSL, usable on their own.

Depends on torch alone. ``image``, ``variational`` and ``feature`` have the networks, ``objectives``
their losses, ``sampling`` draws rows of given classes.
"""

from typing import Literal

from generators.base import ConditionalDiscriminator, ConditionalGenerator
from generators.feature import FeatureDiscriminator, FeatureGenerator
from generators.image import ImageDiscriminator, ImageGenerator
from generators.objectives import (
    discriminator_loss,
    g,
    realistic_loss,
    reconstruction_loss,
)
from generators.sampling import draw_samples
from generators.variational import VariationalFeatureGenerator, VariationalImageGenerator

__all__ = [
    "ConditionalDiscriminator",
    "ConditionalGenerator",
    "FeatureDiscriminator",
    "FeatureGenerator",
    "ImageDiscriminator",
    "ImageGenerator",
    "VariationalFeatureGenerator",
    "VariationalImageGenerator",
    "discriminator_loss",
    "draw_samples",
    "g",
    "realistic_loss",
    "networks_for",
    "reconstruction_loss",
]


def networks_for(
    shape: tuple[int, ...], kind: Literal["mixing", "variational"] = "mixing"
) -> tuple[type[ConditionalGenerator], type[ConditionalDiscriminator]]:
    """The classes of G and D for rows of this shape: (channels, height, width), (length, features)
    or (features,). There is no variational G of sequences."""
    if len(shape) == 3:
        generator = VariationalImageGenerator if kind == "variational" else ImageGenerator
        return generator, ImageDiscriminator
    if len(shape) == 1 and kind == "variational":
        return VariationalFeatureGenerator, FeatureDiscriminator
    return FeatureGenerator, FeatureDiscriminator
