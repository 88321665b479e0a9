"""The conditional generator G and discriminator D of FedSSL, usable on their own.

Depends on torch alone. ``image`` and ``variational`` have the networks, ``objectives`` their
losses, ``sampling`` draws rows of given classes.
"""

from generators.base import ConditionalDiscriminator, ConditionalGenerator
from generators.image import ImageDiscriminator, ImageGenerator
from generators.objectives import (
    discriminator_loss,
    g,
    realistic_loss,
    reconstruction_loss,
)
from generators.sampling import draw_samples
from generators.variational import VariationalImageGenerator

__all__ = [
    "ConditionalDiscriminator",
    "ConditionalGenerator",
    "ImageDiscriminator",
    "ImageGenerator",
    "VariationalImageGenerator",
    "discriminator_loss",
    "draw_samples",
    "g",
    "realistic_loss",
    "reconstruction_loss",
]
