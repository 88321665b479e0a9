"""A classifier of images."""

import torch
from torch import Tensor, nn


class TwoConvolutions(nn.Module):
    """Two convolutions with group norm, and a linear layer."""

    def __init__(self, shape: tuple[int, ...], classes: int, channels: int = 16) -> None:
        """``shape``: channels, height and width of a row; ``channels``: model.options.channels."""
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(shape[0], channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        features = self.features(torch.zeros(1, *shape)).shape[1]
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, *shape) in [-1, 1] -> (B, classes) logits."""
        logits: Tensor = self.head(self.features(x))
        return logits
