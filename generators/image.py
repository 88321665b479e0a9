"""G as a convolutional encoder-decoder and D as a projection discriminator, for images.

G mixes in latent space: ``code = lam * e(x) + (1 - lam) * m(z, p_target)``; the decoder gets the
code, the mixed label p' and lambda. So lambda 1 is a plain auto-encoder and lambda 0 never looks at
x (Fan et al., Fig. 2 leaves the form open; docs/fedssl.md). No layer couples rows.
"""

import torch
from torch import Tensor, nn

from generators.base import ConditionalDiscriminator, ConditionalGenerator
from generators.spectral import spectral_norm


class ImageGenerator(ConditionalGenerator):
    """Conditional encoder-decoder for images whose sides are multiples of 4. 250,305 parameters for
    1x28x28, 10 classes, width 16."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        *,
        width: int = 16,
        code_size: int = 64,
        noise_size: int = 32,
    ) -> None:
        super().__init__()
        channels, quarter_sides = shape[0], compute_quarter_sides(shape)
        features = 2 * width * quarter_sides[0] * quarter_sides[1]
        self.noise_size = noise_size
        self.encoder = nn.Sequential(
            *make_halving_layers(channels, width),
            nn.Linear(features, code_size),
        )
        self.class_prior = nn.Sequential(
            nn.Linear(noise_size + classes, 2 * code_size),
            nn.LeakyReLU(0.2),
            nn.Linear(2 * code_size, code_size),
        )
        self.decoder = nn.Sequential(
            nn.Linear(code_size + classes + 1, features),
            nn.Unflatten(1, (2 * width, *quarter_sides)),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, channels, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, x: Tensor, p: Tensor, p_target: Tensor, z: Tensor, lam: Tensor) -> Tensor:
        noise = (2 * z - 1) * 3**0.5  # unit variance, as the layers' initialisation expects
        prior = self.class_prior(torch.cat([noise, p_target], dim=1))[:, None]  # (B, 1, code)
        factor = lam[:, :, None]  # (B, L, 1)
        code = factor * self.encoder(x)[:, None] + (1 - factor) * prior  # (B, L, code)
        label = factor * p[:, None] + (1 - factor) * p_target[:, None]  # (B, L, C)
        mixes = self.decoder(torch.cat([code, 2 * label, factor], dim=2).flatten(0, 1))
        rows: Tensor = mixes.unflatten(0, lam.shape)
        return rows


class ImageDiscriminator(ConditionalDiscriminator):
    """Projection discriminator: logit = w.f(x) + f(x).V p / sqrt(C_f), p may be mixed.

    Miyato and Koyama 2018 (projection), Miyato et al. 2018 (spectral normalisation of the trunk).
    Spectral normalisation keeps a buffer, so it must be off where D is under DP.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        *,
        width: int = 16,
        feature_size: int = 64,
        spectral: bool = True,
    ) -> None:
        super().__init__()
        quarter_sides = compute_quarter_sides(shape)
        layers: list[nn.Module] = [
            nn.Conv2d(shape[0], width, 4, stride=2, padding=1),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.Linear(2 * width * quarter_sides[0] * quarter_sides[1], feature_size),
        ]
        if spectral:
            layers = [spectral_norm(layer) for layer in layers]
        first, second, third = layers
        self.trunk = nn.Sequential(
            first, nn.LeakyReLU(0.2), second, nn.LeakyReLU(0.2), nn.Flatten(),
            third, nn.LeakyReLU(0.2),
        )  # fmt: skip
        self.realism = nn.Linear(feature_size, 1)
        self.projection = nn.Linear(classes, feature_size, bias=False)
        self.scale = feature_size**-0.5

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        features = self.trunk(x)  # (B, feature_size)
        match = (features * self.projection(p)).sum(dim=1)  # (B,)
        logits: Tensor = self.realism(features)[:, 0] + self.scale * match
        return logits


def make_halving_layers(channels: int, width: int) -> tuple[nn.Module, ...]:
    """Images (B, channels, H, W) -> features (B, 2 width H/4 W/4)."""
    return (
        nn.Conv2d(channels, width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
    )


def compute_quarter_sides(shape: tuple[int, int, int]) -> tuple[int, int]:
    """Height and width after two halvings. Raises ValueError unless both are multiples of 4."""
    _, height, width = shape
    if height % 4 or width % 4:
        raise ValueError(f"rows are {height}x{width}; both sides must be multiples of 4")
    return height // 4, width // 4
