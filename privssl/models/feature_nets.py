"""Small networks for vectors and sequences. No layer couples rows, except batch norm."""

import torch
from torch import Tensor, nn

from privssl.core.rows import Shape, filled, pooled
from privssl.models.convnets import norm_layer


def feature_norm(norm: str, features: int) -> nn.Module:
    """Return a normalisation of vectors (B, features)."""
    return nn.BatchNorm1d(features) if norm == "batch" else norm_layer(norm, features)


class Linear(nn.Module):
    """Logistic regression on a vector, or on the mean of a sequence's filled positions.

    Initial weights are 0. Input (B, *shape), output (B, classes).
    """

    def __init__(self, shape: Shape, classes: int, *, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        self.head = nn.Linear(shape[-1], classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(pooled(x))
        return logits


class MLP(nn.Module):
    """One hidden layer, on a vector, or on the mean of a sequence's filled positions. It has 16 x
    ``width`` units, 256 at width 16. Input (B, *shape), output (B, classes)."""

    def __init__(self, shape: Shape, classes: int, *, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        hidden = 16 * width
        self.trunk = nn.Sequential(
            nn.Linear(shape[-1], hidden), feature_norm(norm, hidden), nn.ReLU()
        )
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.trunk(pooled(x)))
        return logits


class TextCNN(nn.Module):
    """Convolution over three positions with 8 x ``width`` filters; mean and maximum over filled
    positions.

    Kim 2014, with one window size. Windows are concatenated for a linear layer, whose per-example
    gradients cost no more than a plain step. Input (B, length, features).
    """

    def __init__(self, shape: Shape, classes: int, *, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        filters = 8 * width
        self.filters = nn.Linear(3 * shape[1], filters)
        self.norm = feature_norm(norm, 2 * filters)
        self.head = nn.Linear(2 * filters, classes)

    def forward(self, x: Tensor) -> Tensor:
        empty = torch.zeros_like(x[:, :1])
        window = [torch.cat([empty, x[:, :-1]], dim=1), x, torch.cat([x[:, 1:], empty], dim=1)]
        present = filled(x)
        features = self.filters(torch.cat(window, dim=2)).relu() * present  # (B, length, filters)
        mean = features.sum(dim=1) / present.sum(dim=1).clamp(min=1)
        logits: Tensor = self.head(self.norm(torch.cat([mean, features.amax(dim=1)], dim=1)))
        return logits


class GRU(nn.Module):
    """One gated recurrent layer of 4 x ``width`` units; the mean of its states over filled
    positions.

    64 units at width 16. Empty positions do not change the state.

    Cho et al. 2014, with torch's gates and the results of ``nn.GRU``. Like Opacus' DPGRU it
    consists of two linear layers, for per-example gradients. Input (B, length, features).
    """

    def __init__(self, shape: Shape, classes: int, *, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        self.units = 4 * width
        self.read = nn.Linear(shape[1], 3 * self.units)
        self.keep = nn.Linear(self.units, 3 * self.units)
        self.norm = feature_norm(norm, self.units)
        self.head = nn.Linear(self.units, classes)

    def forward(self, x: Tensor) -> Tensor:
        present = filled(x)  # (B, length, 1)
        total = state = x.new_zeros(x.shape[0], self.units)
        for projection, mask in zip(self.read(x).unbind(dim=1), present.unbind(dim=1), strict=True):
            state = state + mask * (self._compute_next_state(projection, state) - state)
            total = total + mask * state
        logits: Tensor = self.head(self.norm(total / present.sum(dim=1).clamp(min=1)))
        return logits

    def _compute_next_state(self, projection: Tensor, state: Tensor) -> Tensor:
        """Return states (B, units) after a position with ``projection`` (B, 3 x units)."""
        read_r, read_z, read_n = projection.chunk(3, dim=-1)
        keep_r, keep_z, keep_n = self.keep(state).chunk(3, dim=-1)
        reset, update = (read_r + keep_r).sigmoid(), (read_z + keep_z).sigmoid()
        candidate = (read_n + reset * keep_n).tanh()
        next_state: Tensor = candidate + update * (state - candidate)
        return next_state
