"""G as a conditional variational auto-encoder, for images and vectors (Sohn et al. 2015).

The code of a row is a Gaussian whose distance from N(0, I) costs (``with_cost``), so at lambda 0
noise alone is a code: other noise gives another row of the class, where the mixing generator has
one picture a class. It needs no discriminator.

    lambda 1   code = mean(x, p) + sd(x, p) * noise       a reconstruction
    lambda 0   code = noise                                a row of p_target that looks at no x
    between    code = lambda mean + (lambda sd + 1 - lambda) noise

Noise and label enter every layer of the decoder by a scale and a shift of each channel (FiLM, Perez
et al. 2018). No layer couples rows.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from generators.base import ConditionalGenerator
from generators.image import compute_quarter_sides, make_halving_layers

LARGEST_LOG_VARIANCE = 4.0
LEAST_LOG_DEVIATION = -4.0  # of a number from its mean; a constant one would have none
DEVIATION_GAIN = 5.0  # factor of learned log deviations, which have far to go in few steps
#: Factor of labels: an agent that has one class moves the weights of its label alone, and averaging
#: divides what it learned by the number of agents.
LABEL_GAIN = 6.0


class VariationalGenerator(ConditionalGenerator):
    """What both kinds share: from a row to its code, and from code and label to a row."""

    encoder: nn.Module
    posterior: nn.Linear  # features of a row with its label -> mean and log variance of its code

    @abstractmethod
    def decode(self, code: Tensor) -> Tensor:
        """Codes with labels (N, code + C) -> rows (N, *shape)."""

    def forward(  # type: ignore[override]  # two results with the flag, which is ours alone
        self, x: Tensor, p: Tensor, p_target: Tensor, z: Tensor, lam: Tensor,
        with_cost: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """As the base class; with ``with_cost`` also each row's :meth:`cost`, (B,).

        Then the last blending factor is 1, and rows are the decoder's means.
        """
        noise = 2**0.5 * torch.erfinv((2 * z - 1).clamp(-1 + 1e-6, 1 - 1e-6))  # N(0, 1)
        moments = self.posterior(torch.cat([self.encoder(x), LABEL_GAIN * p], dim=1))
        mean, log_variance = moments.chunk(2, dim=1)
        log_variance = LARGEST_LOG_VARIANCE * torch.tanh(log_variance / LARGEST_LOG_VARIANCE)
        factor = lam[:, :, None]  # (B, L, 1)
        spread = factor * (log_variance / 2).exp()[:, None] + 1 - factor
        code = factor * mean[:, None] + spread * noise[:, None, : mean.shape[1]]  # (B, L, code)
        label = factor * p[:, None] + (1 - factor) * p_target[:, None]  # (B, L, C)
        mixes = self.decode(torch.cat([code, LABEL_GAIN * label], dim=2).flatten(0, 1))
        rows = mixes.reshape(*lam.shape, *mixes.shape[1:])
        if not with_cost:
            return self.add_noise(rows, noise[:, mean.shape[1] :])
        cost = (mean.square() + log_variance.exp() - log_variance - 1).sum(dim=1) / 2
        return rows, self.cost(cost, x, rows[:, -1])

    def add_noise(self, rows: Tensor, noise: Tensor) -> Tensor:
        """Rows (B, L, *shape) from their means. ``noise``: what the code leaves of it (B, any)."""
        return rows

    def cost(self, code_cost: Tensor, x: Tensor, rebuilt: Tensor) -> Tensor:
        """What training minimises beside the distance of ``rebuilt`` from x (B, *shape), in nats.

        ``code_cost``: the KL divergence of the code's law from N(0, I), (B,).
        """
        return code_cost


class VariationalImageGenerator(VariationalGenerator):
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

    def decode(self, code: Tensor) -> Tensor:
        hidden = relu(self.unflatten(self.first(code)))
        hidden = _film(self.up_first(hidden), self.film_first(code))
        hidden = _film(self.up_second(hidden), self.film_second(code))
        return torch.tanh(self.up_last(hidden))


class VariationalFeatureGenerator(VariationalGenerator):
    """Conditional VAE for vectors (features,); 8 x ``width`` hidden units.

    A number is Gaussian around the decoder's output, with a deviation of its own that is learned.
    Without it, made numbers would vary less than real ones. ``noise_size``: the code's, and one for
    each number; with less noise rows are the means.
    """

    def __init__(
        self, shape: tuple[int], classes: int, *, width: int = 16, noise_size: int = 32
    ) -> None:
        super().__init__()
        (features,), hidden = shape, 8 * width
        self.noise_size = noise_size + features
        self.encoder = nn.Sequential(
            nn.Linear(features, hidden), nn.LeakyReLU(0.2),
            nn.Linear(hidden, hidden), nn.LeakyReLU(0.2),
        )  # fmt: skip
        self.posterior = nn.Linear(hidden + classes, 2 * noise_size)
        self.first = nn.Linear(noise_size + classes, hidden)
        self.film = nn.Linear(noise_size + classes, 2 * hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, features)
        self.log_deviation = nn.Parameter(torch.full((features,), -1 / DEVIATION_GAIN))

    def decode(self, code: Tensor) -> Tensor:
        hidden = self.second(relu(self.first(code)))
        return self.last(_film(hidden, self.film(code)))  # type: ignore[no-any-return]

    def add_noise(self, rows: Tensor, noise: Tensor) -> Tensor:
        if not noise.shape[1]:
            return rows
        return rows + self._log_deviations().exp() * noise[:, None]

    def cost(self, code_cost: Tensor, x: Tensor, rebuilt: Tensor) -> Tensor:
        """The negative evidence lower bound, less a constant."""
        log_deviation = self._log_deviations()
        errors = (x - rebuilt) * (-log_deviation).exp()
        return code_cost + (errors.square() / 2 + log_deviation).sum(dim=1)

    def _log_deviations(self) -> Tensor:
        return (DEVIATION_GAIN * self.log_deviation).clamp(min=LEAST_LOG_DEVIATION)


def _film(hidden: Tensor, moments: Tensor) -> Tensor:
    """ReLU of channels (N, K, ...) scaled by 1 + s and shifted, moments (N, 2 K)."""
    scale, shift = moments.view(*moments.shape, *[1] * (hidden.dim() - 2)).chunk(2, dim=1)
    return relu(hidden * (1 + scale) + shift)
