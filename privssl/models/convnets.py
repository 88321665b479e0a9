"""Small CNNs for 8x8 to 32x32 images. Pooling precedes normalisation: on a CPU a group norm at full
resolution costs more than the convolution before it."""

import torch
from torch import Tensor, nn

from privssl.models.static_norm import StaticNorm
from privssl.ops.group_norm import GroupNorm


def norm_layer(norm: str, channels: int) -> nn.Module:
    """Normalisation over channels. "batch" and "static" couple rows: private runs refuse them."""
    if norm == "group":
        return GroupNorm(4 if channels % 4 == 0 else 1, channels)
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "static":
        return StaticNorm(channels)
    return nn.Identity()


class SmallCNN(nn.Module):
    """Three convolutions, each pooled, normalised, rectified; one linear layer. 29,546 parameters
    at width 16, 28x28, 10 classes. Input (B, *shape), output (B, classes)."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, *, width: int = 16, norm: str = "group"
    ) -> None:
        super().__init__()
        channels, height, breadth = shape
        widths = (width, 2 * width, 4 * width)
        layers: list[nn.Module] = []
        for out, kernel in zip(widths, (5, 3, 3), strict=True):
            layers += [
                nn.Conv2d(channels, out, kernel, padding=kernel // 2),
                nn.MaxPool2d(2),
                norm_layer(norm, out),
                nn.ReLU(),
            ]
            channels = out
        self.trunk = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Linear(channels * (height // 8) * (breadth // 8), classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.trunk(x))
        return logits


class FedAvgCNN(nn.Module):
    """The network of FedAvg (McMahan et al. 2017) for CIFAR-10, as SemiFL's Table 3 and its code
    have it: two 5x5 convolutions, each pooled, and a hidden layer. 2,156,490 parameters at width
    16, 3x32x32, 10 classes without norm. ``width`` scales 32/64/512 (16 keeps them)."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, *, width: int = 16, norm: str = "group"
    ) -> None:
        super().__init__()
        channels, height, breadth = shape
        layers: list[nn.Module] = []
        for out in (2 * width, 4 * width):
            layers += [
                nn.Conv2d(channels, out, 5, padding=2),
                nn.MaxPool2d(2),
                norm_layer(norm, out),
                nn.ReLU(),
            ]
            channels = out
        self.trunk = nn.Sequential(*layers, nn.Flatten())
        features = channels * (height // 4) * (breadth // 4)
        self.head = nn.Sequential(
            nn.Linear(features, 32 * width), nn.ReLU(), nn.Linear(32 * width, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.trunk(x))
        return logits


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max pooling (LeCun et al. 1998), any input of 8x8 or more. The first
    convolution pads by two, as for 28x28 digits; the second pads only small images. ``width``
    scales 6/16/120/84 (16 keeps them)."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, *, width: int = 16, norm: str = "group"
    ) -> None:
        super().__init__()
        channels, height, breadth = shape
        first, second, third, fourth = (max(1, n * width // 16) for n in (6, 16, 120, 84))
        second_pad = 0 if min(height, breadth) >= 14 else 2
        self.trunk = nn.Sequential(
            nn.Conv2d(channels, first, 5, padding=2),
            nn.MaxPool2d(2),
            norm_layer(norm, first),
            nn.ReLU(),
            nn.Conv2d(first, second, 5, padding=second_pad),
            nn.MaxPool2d(2),
            norm_layer(norm, second),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            features = self.trunk.eval()(torch.zeros(1, *shape)).shape[1]
        self.trunk.train()
        self.head = nn.Sequential(
            nn.Linear(features, third),
            nn.ReLU(),
            nn.Linear(third, fourth),
            nn.ReLU(),
            nn.Linear(fourth, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.trunk(x))
        return logits


class TriNetCNN(nn.Module):
    """FedTriNet's network for MNIST and Fashion-MNIST (Che et al. 2021, as in their code).

    30,840 parameters at width 16, 1x32x32, 10 classes without norm, as in the paper. ``shallow``
    has the two convolutions, ``deep`` the two linear layers, the halves of ``splice.splice``.
    ``width`` scales 10/20/50 (16 keeps them).

    Dropout (half of the channels, half of the hidden units) draws from torch's global generator:
    train inside ``randomness.seeded``.

    Differs from the paper: images with a side below 16 pixels are padded by two.
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int, *, width: int = 16, norm: str = "group"
    ) -> None:
        super().__init__()
        channels, height, breadth = shape
        first, second, hidden = (max(1, n * width // 16) for n in (10, 20, 50))
        pad = 0 if min(height, breadth) >= 16 else 2
        self.shallow = nn.Sequential(
            nn.Conv2d(channels, first, 5, padding=pad),
            nn.MaxPool2d(2),
            norm_layer(norm, first),
            nn.ReLU(),
            nn.Conv2d(first, second, 5, padding=pad),
            nn.Dropout2d(0.5),
            nn.MaxPool2d(2),
            norm_layer(norm, second),
            nn.ReLU(),
        )
        high, wide = (((side - 4 + 2 * pad) // 2 - 4 + 2 * pad) // 2 for side in (height, breadth))
        self.deep = nn.Sequential(
            nn.Flatten(),
            nn.Linear(second * high * wide, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.deep(self.shallow(x))
        return logits
