"""ResNet-18 (He et al., CVPR 2016) with its two stems: the network of FedSEAL's main table.

    resnet18       7x7 with stride 2, then max pooling, as torchvision's: 11,175,370 parameters at
                   width 16, 1x28x28, 10 classes with a norm
    resnet18_3x3   3x3 with stride 1, no pooling, as is usual for 32x32 pixels: 11,172,810, and 14
                   times the multiplications

Bian et al. (FedSEAL) do not say which they use. Convolutions have no bias.
"""

from torch import Tensor, nn
from torch.nn.functional import relu

from privssl.core.rows import Shape
from privssl.models.convnets import norm_layer


class ResNet18(nn.Module):
    """ResNet-18: input (B, *shape), output (B, classes). ``width`` 16 is full size: 64 to 512
    channels."""

    large_stem = True

    def __init__(self, shape: Shape, classes: int, *, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        channels, sides = 4 * width, list(shape[1:])
        stem = (7, 2, 3) if self.large_stem else (3, 1, 1)
        pooling = [nn.MaxPool2d(3, stride=2, padding=1)] if self.large_stem else []
        if self.large_stem:
            sides = [-(-side // 4) for side in sides]
        self.stem = nn.Sequential(
            nn.Conv2d(shape[0], channels, *stem, bias=False),
            norm_layer(norm, channels),
            nn.ReLU(),
            *pooling,
        )
        blocks = []
        for number, out in enumerate((channels, 2 * channels, 4 * channels, 8 * channels)):
            # One pixel cannot be halved; in bfloat16 torch's gradient of that stride is wrong.
            high, wide = (2 if number and side > 1 else 1 for side in sides)
            blocks += [_Block(channels, out, (high, wide), norm), _Block(out, out, (1, 1), norm)]
            channels, sides = out, [-(-side // 2) if number else side for side in sides]
        self.trunk = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        features = self.trunk(self.stem(x)).mean(dim=(2, 3))  # (B, 32 width)
        logits: Tensor = self.head(features)
        return logits


class ResNet18Small(ResNet18):
    """ResNet-18 with the 3x3 stem."""

    large_stem = False


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut; the first has the stride."""

    def __init__(self, channels: int, out: int, stride: tuple[int, int], norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm_layer(norm, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = norm_layer(norm, out)
        self.shortcut = None
        if channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride=stride, bias=False), norm_layer(norm, out)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(inner + (x if self.shortcut is None else self.shortcut(x)))
