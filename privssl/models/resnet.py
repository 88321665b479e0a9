"""ResNet-9: eight convolutions, four of them in two residual blocks, and a linear layer.

The network of FedMatch (Jeong et al., ICLR 2021: no norm, no bias) and of FedSEAL (Bian et al.
2021: the same layers; with norm and biases it is the well-known tutorial network):

    norm: none                   as is: 6,568,640 parameters at width 16, 10 classes, 3 channels
    norm: batch, group, static   each convolution normalised, biases everywhere: 6,575,370

Layers at width 16: 64; 128, halve; residual 128, 128; 256, halve; 512, halve; residual 512, 512;
global maximum; linear.

Differs from the papers: they pool 4x4 at the end, which at 32x32 pixels is the global maximum. Here
it is always the global maximum, so the head has one size for all images from 8x8 up.
"""

from torch import Tensor, nn

from privssl.core.rows import Shape
from privssl.models.convnets import norm_layer, scale_variance


class ResNet9(nn.Module):
    """ResNet-9: input (B, *shape), output (B, classes).

    ``width`` 16 is full size: 64 to 512 channels. Without norm ``scale_variance`` initialises
    weights; otherwise torch's rule.
    """

    def __init__(self, shape: Shape, classes: int, *, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        first, second, third, fourth = (factor * width for factor in (4, 8, 16, 32))
        self.conv1 = _make_convolution(shape[0], first, norm)
        self.conv2 = _make_convolution(first, second, norm, halved=True)
        self.residual1 = _make_residual(second, norm)
        self.conv3 = _make_convolution(second, third, norm, halved=True)
        self.conv4 = _make_convolution(third, fourth, norm, halved=True)
        self.residual2 = _make_residual(fourth, norm)
        self.head = nn.Linear(fourth, classes, bias=norm != "none")
        if norm == "none":
            scale_variance(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x))
        x = self.residual1(x) + x
        x = self.conv4(self.conv3(x))
        x = self.residual2(x) + x
        logits: Tensor = self.head(x.amax(dim=(2, 3)))
        return logits


def _make_convolution(channels: int, out: int, norm: str, *, halved: bool = False) -> nn.Sequential:
    """Return a 3x3 convolution, normalised if there is a norm, ReLU, halved on request."""
    bias = norm != "none"
    convolution = nn.Conv2d(channels, out, 3, padding=1, bias=bias)
    pooling = [nn.MaxPool2d(2)] if halved else []
    return nn.Sequential(convolution, norm_layer(norm, out), nn.ReLU(), *pooling)


def _make_residual(channels: int, norm: str) -> nn.Sequential:
    return nn.Sequential(
        _make_convolution(channels, channels, norm), _make_convolution(channels, channels, norm)
    )
