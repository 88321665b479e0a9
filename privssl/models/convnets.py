"""Small CNNs for 8x8 to 32x32 images.

Pooling precedes normalisation: on a CPU a group norm at full resolution costs more than the
convolution before it.
"""

import math

import torch
from torch import Tensor, nn

from privssl.core.rows import Shape
from privssl.models.static_norm import StaticNorm
from privssl.ops.group_norm import GroupNorm

TRUNCATED = 0.87962566103423978  # standard deviation of a standard normal truncated at +-2


def norm_layer(norm: str, channels: int) -> nn.Module:
    """Return a normalisation over channels. "batch" and "static" couple rows: private runs refuse
    them."""
    if norm == "group":
        return GroupNorm(4 if channels % 4 == 0 else 1, channels)
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "static":
        return StaticNorm(channels)
    return nn.Identity()


def scale_variance(network: nn.Module) -> None:
    """Initialise weights as in FedMatch, by Keras' VarianceScaling. Normal with variance 1 /
    fan-in, truncated at two standard deviations."""
    with torch.no_grad():
        for weight in network.parameters():
            std = math.sqrt(1 / weight[0].numel()) / TRUNCATED
            nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class _TrunkAndHead(nn.Module):
    trunk: nn.Sequential
    head: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.trunk(x))
        return logits


class _ShallowAndDeep(nn.Module):
    shallow: nn.Sequential
    deep: nn.Sequential

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.deep(self.shallow(x))
        return logits


def _make_pooled_convolution(
    channels: int, out: int, kernel: int, padding: int, norm: str, *, bias: bool = True
) -> list[nn.Module]:
    """Return a convolution, halved, normalised, with ReLU."""
    convolution = nn.Conv2d(channels, out, kernel, padding=padding, bias=bias)
    return [convolution, nn.MaxPool2d(2), norm_layer(norm, out), nn.ReLU()]


class SmallCNN(_TrunkAndHead):
    """Three convolutions, each pooled, normalised, with ReLU; one linear layer. 29,546 parameters
    at width 16, 28x28, 10 classes. Input (B, *shape), output (B, classes)."""

    head: nn.Linear

    def __init__(self, shape: Shape, classes: int, *, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        channels, height, breadth = shape
        widths = (width, 2 * width, 4 * width)
        layers: list[nn.Module] = []
        for out, kernel in zip(widths, (5, 3, 3), strict=True):
            layers += _make_pooled_convolution(channels, out, kernel, kernel // 2, norm)
            channels = out
        self.trunk = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Linear(channels * (height // 8) * (breadth // 8), classes)


class FedAvgCNN(_TrunkAndHead):
    """The network of FedAvg (McMahan et al. 2017) for CIFAR-10, by SemiFL's Table 3 and its code.
    Two 5x5 convolutions, each pooled, and a hidden layer. 2,156,490 parameters at width 16,
    3x32x32, 10 classes without norm. ``width`` scales 32/64/512 (16 keeps them)."""

    def __init__(self, shape: Shape, classes: int, *, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        channels, height, breadth = shape
        layers: list[nn.Module] = []
        for out in (2 * width, 4 * width):
            layers += _make_pooled_convolution(channels, out, 5, 2, norm)
            channels = out
        self.trunk = nn.Sequential(*layers, nn.Flatten())
        features = channels * (height // 4) * (breadth // 4)
        self.head = nn.Sequential(
            nn.Linear(features, 32 * width), nn.ReLU(), nn.Linear(32 * width, classes)
        )


class LeNet(_TrunkAndHead):
    """LeNet-5 with ReLU and max pooling (LeCun et al. 1998), for inputs from 8x8. The first
    convolution pads by two, as for 28x28 digits; the second pads only small images. ``width``
    scales 6/16/120/84 (16 keeps them)."""

    unpadded_from = math.inf  # the first convolution does not pad images with sides of this or more

    def __init__(self, shape: Shape, classes: int, *, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        channels, height, breadth = shape
        side = min(height, breadth)
        first, second, third, fourth = (max(1, n * width // 16) for n in (6, 16, 120, 84))
        first_pad = 0 if side >= self.unpadded_from else 2
        second_pad = 0 if side >= 14 else 2
        self.trunk = nn.Sequential(
            *_make_pooled_convolution(channels, first, 5, first_pad, norm),
            *_make_pooled_convolution(first, second, 5, second_pad, norm),
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


class LeNet32(LeNet):
    """LeNet-5 for 32x32 images without padding: FedSEAL's network for SVHN. 62,006 parameters at
    width 16, 3x32x32, 10 classes without norm. Images below 28 pixels are padded."""

    unpadded_from = 28


class AlexNetLike(_TrunkAndHead):
    """FedMatch's smaller network (Jeong et al., ICLR 2021, B.4; Serra et al. 2018).

    Convolutions of 64, 128 and 256 filters with kernels of 4, 3 and 2, each followed by 2x2 max
    pooling, and two linear layers of 2048 units. 6,519,808 parameters at width 16, 3x32x32, 10
    classes without norm, where it has no biases and the initial weights of FedMatch's ResNet-9.

    The paper gives neither padding nor dropout: there is none here (Serra et al. have dropout).
    Images with a side below 19 pixels are padded, because pooling would leave nothing.
    """

    def __init__(self, shape: Shape, classes: int, *, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        channels, *sides = shape
        small, bias = min(sides) < 19, norm != "none"
        layers: list[nn.Module] = []
        for out, kernel in ((4 * width, 4), (8 * width, 3), (16 * width, 2)):
            pad = kernel // 2 if small else 0
            layers += _make_pooled_convolution(channels, out, kernel, pad, norm, bias=bias)
            channels, sides = out, [(side + 2 * pad - kernel + 1) // 2 for side in sides]
        units = 128 * width
        self.trunk = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Sequential(
            nn.Linear(channels * sides[0] * sides[1], units, bias=bias),
            nn.ReLU(),
            nn.Linear(units, units, bias=bias),
            nn.ReLU(),
            nn.Linear(units, classes, bias=bias),
        )
        if not bias:
            scale_variance(self)


class TriNetCNN(_ShallowAndDeep):
    """FedTriNet's network for MNIST and Fashion-MNIST (Che et al. 2021, as in their code).

    30,840 parameters at width 16, 1x32x32, 10 classes without norm. The paper names no layers.
    ``shallow`` has the two convolutions, ``deep`` the two linear layers, the halves of
    ``splice.splice``. ``width`` scales 10/20/50 (16 keeps them).

    Dropout (half of the channels, half of the hidden units) draws from torch's global generator:
    train inside ``randomness.seeded``.

    Differs from the paper: images with a side below 16 pixels are padded by two.
    """

    def __init__(self, shape: Shape, classes: int, *, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        channels, height, breadth = shape
        first, second, hidden = (max(1, n * width // 16) for n in (10, 20, 50))
        pad = 0 if min(height, breadth) >= 16 else 2
        self.shallow = nn.Sequential(
            *_make_pooled_convolution(channels, first, 5, pad, norm),
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


class TriNetSVHN(_ShallowAndDeep):
    """FedTriNet's network for SVHN, as in the authors' code.

    Six convolutions and three linear layers. 5,852,170 parameters at width 16, 3x32x32, 10 classes
    with a norm, which follows the first, third and fifth convolution; the authors' is batch norm.

    ``shallow`` has the first two convolutions, as the paper splices (its code: the first alone),
    ``deep`` the rest. ``width`` scales all channels and units (16 keeps them). Dropout as in
    ``TriNetCNN``.
    """

    def __init__(self, shape: Shape, classes: int, *, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        channels, height, breadth = shape
        self.shallow = nn.Sequential(*_make_convolution_pair(channels, 2 * width, 4 * width, norm))
        units = 16 * width * (height // 8) * (breadth // 8)
        self.deep = nn.Sequential(
            *_make_convolution_pair(4 * width, 8 * width, 8 * width, norm),
            nn.Dropout2d(0.05),
            *_make_convolution_pair(8 * width, 16 * width, 16 * width, norm),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(units, 64 * width),
            nn.ReLU(),
            nn.Linear(64 * width, 32 * width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(32 * width, classes),
        )


def _make_convolution_pair(
    channels: int, first: int, second: int, norm: str
) -> tuple[nn.Module, ...]:
    """Return a 3x3 convolution, normalised, ReLU; another, ReLU, halved."""
    return (
        nn.Conv2d(channels, first, 3, padding=1),
        norm_layer(norm, first),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
