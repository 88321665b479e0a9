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
        around = [torch.cat([empty, x[:, :-1]], dim=1), x, torch.cat([x[:, 1:], empty], dim=1)]
        there = filled(x)
        seen = self.filters(torch.cat(around, dim=2)).relu() * there  # (B, length, filters)
        mean = seen.sum(dim=1) / there.sum(dim=1).clamp(min=1)
        logits: Tensor = self.head(self.norm(torch.cat([mean, seen.amax(dim=1)], dim=1)))
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
        there = filled(x)  # (B, length, 1)
        total = state = x.new_zeros(x.shape[0], self.units)
        for seen, here in zip(self.read(x).unbind(dim=1), there.unbind(dim=1), strict=True):
            state = state + here * (self._next(seen, state) - state)
            total = total + here * state
        logits: Tensor = self.head(self.norm(total / there.sum(dim=1).clamp(min=1)))
        return logits

    def _next(self, seen: Tensor, state: Tensor) -> Tensor:
        """Return states (B, units) after a position whose projection is ``seen`` (B, 3 x units)."""
        read_r, read_z, read_n = seen.chunk(3, dim=-1)
        keep_r, keep_z, keep_n = self.keep(state).chunk(3, dim=-1)
        reset, update = (read_r + keep_r).sigmoid(), (read_z + keep_z).sigmoid()
        new = (read_n + reset * keep_n).tanh()
        after: Tensor = new + update * (state - new)
        return after
