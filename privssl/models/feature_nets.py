"""Small networks for vectors and sequences. No layer couples rows, except batch norm."""

import torch
from torch import Tensor, nn

from privssl.core.rows import Shape, filled, pooled
from privssl.ops.group_norm import GroupNorm


def feature_norm(norm: str, features: int) -> nn.Module:
    """Normalisation of vectors (B, features)."""
    if norm == "group":
        return GroupNorm(4 if features % 4 == 0 else 1, features)
    return nn.BatchNorm1d(features) if norm == "batch" else nn.Identity()


class Linear(nn.Module):
    """Logistic regression on a vector, or on the mean of a sequence's filled places. Weights start
    at 0. Input (B, *shape), output (B, classes)."""

    def __init__(self, shape: Shape, classes: int, *, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        self.head = nn.Linear(shape[-1], classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(pooled(x))
        return logits


class MLP(nn.Module):
    """One hidden layer of 16 x ``width`` units, 256 at width 16, on a vector, or on the mean of a
    sequence's filled places. Input (B, *shape), output (B, classes)."""

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
    """Windows of three places, 8 x ``width`` filters; their mean and maximum over filled places.

    Kim 2014, with one size of window. Windows are laid side by side for a linear layer, whose
    per-row gradients DP-SGD has at the price of a plain step. Input (B, length, features).
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
