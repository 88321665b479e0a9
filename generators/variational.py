"""G as a conditional variational auto-encoder for images (Sohn et al. 2015).

The code of a row is a Gaussian whose distance from N(0, I) costs (``with_cost``), so at lambda 0
noise alone is a code: other noise gives another row of the class, where the mixing generator has
one picture a class. It needs no discriminator.

    lambda 1   code = mean(x, p) + sd(x, p) * noise       a reconstruction
    lambda 0   code = noise                                a row of p_target that looks at no x
    between    code = lambda mean + (lambda sd + 1 - lambda) noise

Noise and label enter every layer of the decoder by a scale and a shift of each channel (FiLM, Perez
et al. 2018). No layer couples rows.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from generators.base import ConditionalGenerator
from generators.image import compute_quarter_sides, make_halving_layers

LARGEST_LOG_VARIANCE = 4.0
#: Factor of labels: an agent that has one class moves the weights of its label alone, and averaging
#: divides what it learned by the number of agents.
LABEL_GAIN = 6.0


class VariationalImageGenerator(ConditionalGenerator):
    """Conditional VAE for images whose sides are multiples of 4; ``noise_size`` is its code's."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, *, width: int = 16, noise_size: int = 32
    ) -> None:
        super().__init__()
        channels, quarter_sides = shape[0], compute_quarter_sides(shape)
        features = 2 * width * quarter_sides[0] * quarter_sides[1]
        self.noise_size = noise_size
        self.encoder = nn.Sequential(*make_halving_layers(channels, width))
        self.posterior = nn.Linear(features + classes, 2 * noise_size)
        self.first = nn.Linear(noise_size + classes, features)
        self.unflatten = nn.Unflatten(1, (2 * width, *quarter_sides))
        self.film_first = nn.Linear(noise_size + classes, 4 * width)
        self.film_second = nn.Linear(noise_size + classes, 2 * width)
        self.up_first = nn.ConvTranspose2d(2 * width, 2 * width, 3, padding=1)
        self.up_second = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.up_last = nn.ConvTranspose2d(width, channels, 4, stride=2, padding=1)

    def forward(  # type: ignore[override]  # two results with the flag, which is ours alone
        self, x: Tensor, p: Tensor, p_target: Tensor, z: Tensor, lam: Tensor,
        with_cost: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """As the base class; with ``with_cost`` also the code's cost in nats, (B,)."""
        noise = 2**0.5 * torch.erfinv((2 * z - 1).clamp(-1 + 1e-6, 1 - 1e-6))  # N(0, 1)
        moments = self.posterior(torch.cat([self.encoder(x), LABEL_GAIN * p], dim=1))
        mean, log_variance = moments.chunk(2, dim=1)
        log_variance = LARGEST_LOG_VARIANCE * torch.tanh(log_variance / LARGEST_LOG_VARIANCE)
        factor = lam[:, :, None]  # (B, L, 1)
        spread = factor * (log_variance / 2).exp()[:, None] + 1 - factor
        code = factor * mean[:, None] + spread * noise[:, None]  # (B, L, code)
        label = factor * p[:, None] + (1 - factor) * p_target[:, None]  # (B, L, C)
        mixes = self._decode(torch.cat([code, LABEL_GAIN * label], dim=2).flatten(0, 1))
        rows = mixes.reshape(*lam.shape, *mixes.shape[1:])
        if not with_cost:
            return rows
        cost = (mean.square() + log_variance.exp() - log_variance - 1).sum(dim=1) / 2
        return rows, cost  # KL divergence from N(0, I)

    def _decode(self, code: Tensor) -> Tensor:
        """Codes with labels (N, noise_size + C) -> rows (N, *shape)."""
        hidden = relu(self.unflatten(self.first(code)))
        hidden = _film(self.up_first(hidden), self.film_first(code))
        hidden = _film(self.up_second(hidden), self.film_second(code))
        return torch.tanh(self.up_last(hidden))


def _film(hidden: Tensor, moments: Tensor) -> Tensor:
    """ReLU of channels (N, K, H, W) scaled by 1 + s and shifted, moments (N, 2 K)."""
    scale, shift = moments[:, :, None, None].chunk(2, dim=1)
    return relu(hidden * (1 + scale) + shift)
