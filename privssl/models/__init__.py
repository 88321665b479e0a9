"""Classifiers by name."""

from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import nn

from privssl.core.rows import IMAGE, Shape, kind_of
from privssl.errors import DataError
from privssl.models import own_networks
from privssl.models.convnets import (
    AlexNetLike,
    FedAvgCNN,
    LeNet,
    LeNet32,
    SmallCNN,
    TriNetCNN,
    TriNetSVHN,
)
from privssl.models.feature_nets import GRU, MLP, Linear, TextCNN
from privssl.models.resnet import ResNet9
from privssl.models.resnet18 import ResNet18, ResNet18Small
from privssl.models.wide_resnet import WideResNet28x2
from privssl.ops.dropout import Dropout
from privssl.ops.fused_conv import fuse
from privssl.ops.pointwise_conv import avoid_overrun
from privssl.ops.precision import Precision, in_precision
from privssl.settings.names import is_outside
from privssl.settings.schema import ModelSettings
from privssl.storage.tensor_files import sha256_of

Network = TypeVar("Network", bound=nn.Module)

PublicPart: TypeAlias = dict[Literal["name", "weights"], str]

SMALLEST = 8  # least side of an image, in pixels
CLASSIFIERS: dict[str, type[nn.Module]] = {
    "small_cnn": SmallCNN,
    "lenet": LeNet,
    "fedavg_cnn": FedAvgCNN,
    "lenet32": LeNet32,
    "alexnet": AlexNetLike,
    "trinet_cnn": TriNetCNN,
    "trinet_svhn": TriNetSVHN,
    "resnet9": ResNet9,
    "resnet18": ResNet18,
    "resnet18_3x3": ResNet18Small,
    "wresnet28x2": WideResNet28x2,
    "linear": Linear,
    "mlp": MLP,
    "text_cnn": TextCNN,
    "gru": GRU,
}  # others: models/own_networks.py


def build_classifier(
    settings: ModelSettings,
    shape: Shape,
    classes: int,
    precision: Precision = "float32",
    source: own_networks.NetworkSource | None = None,
) -> nn.Module:
    """Build an untrained F: (B, *shape), as ``rows.network_input`` returns, -> (B, classes) logits.

    Args:
        settings: the section ``model``; ``row_checks`` has checked that it fits the rows.
        precision: of multiplications; weights and logits are float32.
        source: a network given from Python, instead of ``model.name``.

    Raises:
        DataError: images have a side below 8 pixels.
        ConfigError: an own network cannot be built, or ``model.weights`` do not fit.
    """
    if source is not None or is_outside(settings.name):
        return own_networks.build_network(settings, shape, classes, source)
    if kind_of(shape) is IMAGE and min(shape[1:]) < SMALLEST:
        _, height, width = shape
        raise DataError(
            f"rows are {height}x{width} pixels, and {settings.name} needs at least "
            f"{SMALLEST}x{SMALLEST}. Resize or pad the images (image_folder: data.image_size)"
        )
    network: type[nn.Module] = in_precision(CLASSIFIERS[settings.name], precision)
    classifier = network(shape, classes, width=settings.width, norm=settings.norm)
    if settings.weights:
        own_networks.load_initial_weights(classifier, settings.weights)
    return optimize_layout(classifier)


def public_part(settings: ModelSettings) -> PublicPart | None:
    """Return name, and SHA-256 of ``model.weights`` or "", of an own or initialised classifier.

    A guarantee takes both as public. None if there is neither. The weights have been read.
    """
    if not is_outside(settings.name) and not settings.weights:
        return None
    path = Path(settings.weights).expanduser()
    return {"name": settings.name, "weights": sha256_of(path) if settings.weights else ""}


#: Layers that commute with the layers after them. A kernel fuses the layers before dropout.
LATER: dict[type, tuple[type, ...]] = {
    nn.ReLU: (nn.MaxPool2d,),
    nn.Dropout2d: (nn.MaxPool2d, nn.ReLU, nn.Identity),
}


def optimize_layout(network: Network) -> Network:
    """Convert a network to the fastest equivalent form for training.

    Weights channels last, faster dropout, fused layers, and ReLU and channel dropout after max
    pooling (on a quarter of the elements, with the same result). Layers that oneDNN computes
    wrongly are replaced. Parameter names stay.

    Call it when a network is built: another layout rounds differently, so the first step of a
    resumed run would differ.
    """
    for module in list(network.modules()):
        avoid_overrun(module)
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p, child.inplace).train(child.training))
        if type(module) is nn.Sequential:
            _pool_early(module)
            fuse(module)
    return network.to(memory_format=torch.channels_last)


def _pool_early(layers: nn.Sequential) -> None:
    swapped = True
    while swapped:
        swapped = False
        for index in range(len(layers) - 1):
            first, second = layers[index], layers[index + 1]
            can_swap = type(second) in LATER.get(type(first), ())
            if can_swap and not getattr(second, "return_indices", False):
                layers[index], layers[index + 1], swapped = second, first, True
