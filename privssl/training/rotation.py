"""Rotation prediction, a self-supervised task (Gidaris, Singh, Komodakis, ICLR 2018)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

TURNS = 4  # by 0, 90, 180 and 270 degrees


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate square images (B, C, S, S), each by its number (B,) of quarter turns."""
    turned = torch.stack([torch.rot90(x, k, (2, 3)) for k in range(TURNS)])
    return turned[turns, torch.arange(len(x), device=x.device)]


def last_linear(F: nn.Module) -> nn.Linear | None:
    """Return the layer whose input is the features of a row; None if there is none."""
    layers = [layer for layer in F.modules() if isinstance(layer, nn.Linear)]
    return layers[-1] if layers else None


@contextmanager
def features_of(F: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the input of the last linear layer (B, D) of each forward pass in the block."""
    features: list[Tensor] = []
    layer = last_linear(F)
    assert layer is not None
    hook = layer.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    try:
        yield features
    finally:
        hook.remove()


def rotation_loss(head: Tensor, features: Tensor, turns: Tensor) -> Tensor:
    """Compute cross-entropy of turns (B,) predicted by a head (4, D) from features (B, D)."""
    return cross_entropy(linear(features.float(), head), turns)
