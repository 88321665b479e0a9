"""WResNet-28x2: a wide residual network of 28 layers (Zagoruyko and Komodakis 2016).

The network of SemiFL (Diao, Ding, Tarokh, NeurIPS 2022) for CIFAR-10 and SVHN, as in their code:
ReLU, no dropout, convolutions without bias; trained with ``norm: static``. 1,467,610 parameters at
width 16, 10 classes, 3 channels.

A block applies norm and ReLU before each convolution. Where it changes the number of channels, its
shortcut is a 1x1 convolution of the rectified input; otherwise the input.
"""

from torch import Tensor, nn
from torch.nn.functional import relu

from privssl.core.rows import Shape
from privssl.models.convnets import norm_layer

BLOCKS = 4  # in each of three groups, of two convolutions; with the stem and three shortcuts 28


class WideResNet28x2(nn.Module):
    """WResNet-28x2: input (B, *shape), output (B, classes). ``width`` 16: 32, 64, 128 channels."""

    def __init__(self, shape: Shape, classes: int, *, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        self.stem = nn.Conv2d(shape[0], width, 3, padding=1, bias=False)
        blocks, channels = [], width
        for out, stride in ((2 * width, 1), (4 * width, 2), (8 * width, 2)):
            for number in range(BLOCKS):
                blocks.append(_Block(channels, out, stride if number == 0 else 1, norm))
                channels = out
        self.trunk = nn.Sequential(*blocks, norm_layer(norm, channels), nn.ReLU())
        self.head = nn.Linear(channels, classes)
        nn.init.zeros_(self.head.bias)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        features = self.trunk(self.stem(x)).mean(dim=(2, 3))  # (B, 8 width)
        logits: Tensor = self.head(features)
        return logits


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut; the first has the stride."""

    def __init__(self, channels: int, out: int, stride: int, norm: str) -> None:
        super().__init__()
        self.norm1 = norm_layer(norm, channels)
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.norm2 = norm_layer(norm, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.shortcut = (
            None if channels == out else nn.Conv2d(channels, out, 1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        active = relu(self.norm1(x))
        out: Tensor = self.conv2(relu(self.norm2(self.conv1(active))))
        return out + (x if self.shortcut is None else self.shortcut(active))
