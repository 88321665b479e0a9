"""Interfaces of generator and discriminator: Fan, Hu, Huang, "Private Semi-Supervised Federated
Learning", section 3.4. In a private run no layer may mix rows of a batch."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn


class ConditionalGenerator(nn.Module, ABC):
    """G((x1, p1), p2, z, lambda): lambda-likely x1, (1 - lambda)-likely of class p2.

    ``noise_size`` is the length D_n of z.
    """

    noise_size: int
    #: The lambda at which a row's own output differs most with the weights; for audits.
    audit_lambda: ClassVar[float] = 1.0

    @abstractmethod
    def forward(self, x: Tensor, p: Tensor, p_target: Tensor, z: Tensor, lam: Tensor) -> Tensor:
        """Mix rows with classes.

        Args:
            x: rows (B, *shape); images in [-1, 1].
            p: their label distributions (B, C).
            p_target: the classes to mix in, one-hot (B, C).
            z: noise (B, noise_size), uniform in [0, 1).
            lam: blending factors (B, L) in [0, 1], several mixes of one row; 1 rebuilds x,
                0 never looks at it.

        Returns:
            Mixed rows (B, L, *shape); images in [-1, 1].
        """


class ConditionalDiscriminator(nn.Module, ABC):
    """D(x, p): how real x looks as a row with label p."""

    @abstractmethod
    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        """Rows (B, *shape) in [-1, 1], labels (B, C), which may be mixed -> logits (B,)."""
