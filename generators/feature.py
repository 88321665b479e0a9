"""G as a blend and D as a projection discriminator, for vectors and sequences.

G mixes rows themselves: ``lam * x + (1 - lam) * made``, for sequences place by place, as Fan et
al., section 5.4, mix two sentences. ``made`` comes from noise and the target class. So lambda 1 is
x itself, with nothing to reconstruct, and lambda 0 never looks at x. No layer couples rows.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from generators.base import ConditionalDiscriminator, ConditionalGenerator
from generators.spectral import spectral_norm


class FeatureGenerator(ConditionalGenerator):
    """Blend of a row with one made of noise and a class; shape (features,) or (length, features).

    It has 8 x ``width`` hidden units, for sequences at every place.
    """

    audit_lambda: ClassVar[float] = 0.0  # at 1 its output says nothing about its weights

    def __init__(
        self, shape: tuple[int, ...], classes: int, *, width: int = 16, noise_size: int = 32
    ) -> None:
        super().__init__()
        hidden = 8 * width
        self.noise_size = noise_size
        self.code = nn.Linear(noise_size + classes, hidden)
        self.places = nn.Parameter(torch.randn(shape[0], hidden)) if len(shape) == 2 else None
        self.made = nn.Linear(hidden, shape[-1])

    def forward(self, x: Tensor, p: Tensor, p_target: Tensor, z: Tensor, lam: Tensor) -> Tensor:
        noise = (2 * z - 1) * 3**0.5  # unit variance, as the layers' initialisation expects
        code = self.code(torch.cat([noise, p_target], dim=1))
        if self.places is not None:
            code = code[:, None] + self.places  # (B, length, hidden)
        code = nn.functional.leaky_relu(code, 0.2)
        factor = lam.view(*lam.shape, *[1] * (x.dim() - 1))  # (B, L, 1, ...)
        mixes: Tensor = factor * x[:, None] + (1 - factor) * self.made(code)[:, None]
        return mixes


class FeatureDiscriminator(ConditionalDiscriminator):
    """Projection discriminator: logit = w.f(x) + f(x).V p / sqrt(C_f), p may be mixed. Of a
    sequence f is the mean over places."""

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        *,
        width: int = 16,
        feature_size: int = 64,
        spectral: bool = True,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Linear(shape[-1], 8 * width), nn.Linear(8 * width, feature_size)
        ]  # fmt: skip
        first, second = [spectral_norm(layer) if spectral else layer for layer in layers]
        self.trunk = nn.Sequential(first, nn.LeakyReLU(0.2), second, nn.LeakyReLU(0.2))
        self.realism = nn.Linear(feature_size, 1)
        self.projection = nn.Linear(classes, feature_size, bias=False)
        self.scale = feature_size**-0.5

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        features = self.trunk(x)  # (B, ..., feature_size)
        if x.dim() == 3:
            features = features.mean(dim=1)
        match = (features * self.projection(p)).sum(dim=1)  # (B,)
        logits: Tensor = self.realism(features)[:, 0] + self.scale * match
        return logits
