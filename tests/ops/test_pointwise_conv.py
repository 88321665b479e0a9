"""Strided 1x1 convolutions of few channels have the right gradient on every processor."""

import pytest
import torch
from torch import Tensor, nn

from privssl.models import CLASSIFIERS, build_classifier, optimize_layout
from privssl.ops.pointwise_conv import CHANNELS, PointwiseConv2d
from privssl.settings.schema import ModelSettings


def rows(channels: int, pixels: int = 8) -> Tensor:
    return torch.randn(6, channels, pixels, pixels).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("stride", [2, 3, (1, 2)])
@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (3, 1), (4, 1), (15, 1), (16, 4)])
def test_output_and_gradients_follow_the_formula(
    channels: int, groups: int, stride: int | tuple[int, int]
) -> None:
    given = nn.Conv2d(channels, 8, 1, stride, groups=groups)
    layer = optimize_layout(nn.Sequential(given))[0]
    assert type(layer) is PointwiseConv2d and layer is given
    x, step = rows(channels).requires_grad_(), layer.stride
    out = layer(x)
    seen = x.detach()[..., :: step[0], :: step[1]].reshape(6, groups, -1, *out.shape[2:])
    weight = layer.weight.detach().reshape(groups, 8 // groups, -1)
    expected = torch.einsum("ngihw,goi->ngohw", seen, weight).reshape(out.shape)
    assert layer.bias is not None
    torch.testing.assert_close(out, expected + layer.bias[:, None, None])

    into = torch.randn_like(out)
    out.backward(into)
    grouped = into.reshape(6, groups, 8 // groups, *out.shape[2:])
    gradient = torch.einsum("ngohw,ngihw->goi", grouped, seen).reshape(8, -1)
    assert layer.weight.grad is not None and x.grad is not None
    torch.testing.assert_close(layer.weight.grad[..., 0, 0], gradient, rtol=1e-5, atol=1e-4)
    back = torch.zeros_like(x)
    back[..., :: step[0], :: step[1]] = torch.einsum("ngohw,goi->ngihw", grouped, weight).flatten(
        1, 2
    )
    torch.testing.assert_close(x.grad, back)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(CHANNELS, 8, 1, 2), nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, 2, 1),
        nn.Conv2d(4, 8, 1, 2, padding=1),
    ],
)  # fmt: skip
def test_other_convolutions_are_not_replaced(layer: nn.Conv2d) -> None:
    assert type(optimize_layout(nn.Sequential(layer))[0]) is nn.Conv2d


@pytest.mark.parametrize("name", [name for name in CLASSIFIERS if "res" in name])
def test_no_narrow_classifier_keeps_a_strided_1x1_convolution(name: str) -> None:
    network = build_classifier(ModelSettings(name=name, width=2), (3, 16, 16), 10)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1):
            narrow = layer.stride != (1, 1) and layer.in_channels < CHANNELS
            assert isinstance(layer, PointwiseConv2d) is narrow
    network(rows(3, 16)).sum().backward()
    assert all(
        bool(torch.isfinite(p.grad).all()) for p in network.parameters() if p.grad is not None
    )
