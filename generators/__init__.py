"""The conditional generator G and discriminator D of FedSSL, usable on their own.

Depends on torch alone. ``image`` has the networks, ``objectives`` their losses.
"""

from generators.base import ConditionalDiscriminator, ConditionalGenerator
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
    "ImageDiscriminator",
    "ImageGenerator",
    "discriminator_loss",
    "g",
    "realistic_loss",
    "reconstruction_loss",
]
