"""Classifiers by name."""

from torch import nn

from privssl.models.convnets import LeNet, SmallCNN
from privssl.settings import ModelSettings

CLASSIFIERS = {"small_cnn": SmallCNN, "lenet": LeNet}


def build_classifier(
    settings: ModelSettings, shape: tuple[int, int, int], classes: int
) -> nn.Module:
    """An untrained F: (B, *shape) in [-1, 1] -> (B, classes) logits.

    Args:
        settings: name, width and normalisation.
        shape: (channels, height, width) of a row; height and width at least 8.
        classes: number of classes, at least 2.
    """
    network = CLASSIFIERS[settings.name]
    return network(shape, classes, width=settings.width, norm=settings.norm)
