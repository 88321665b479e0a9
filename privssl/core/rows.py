"""Kinds of rows, by shape, and the properties of each kind.

    image      (channels, height, width)
    sequence   (length, features): words of a text. A position whose features are all 0 is empty
    vector     (features,): a line of a table, or an encoder's features

Networks by kind are in ``models`` and ``generators``, views in ``data/augmentations.py``, refusals
in ``experiment/row_checks.py``. An algorithm treats rows of all kinds alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Shape = tuple[int, ...]
KindName = Literal["image", "sequence", "vector"]


@dataclass(frozen=True)
class RowKind:
    """Properties of one kind of rows."""

    name: KindName
    networks: tuple[str, ...]  # values of ``model.name``
    norms: tuple[str, ...]  # values of ``model.norm``
    views: tuple[str, ...]  # names of augmentations


IMAGE = RowKind(
    "image",
    ("small_cnn", "lenet", "lenet32", "fedavg_cnn", "alexnet", "trinet_cnn", "trinet_svhn",
     "resnet9", "resnet18", "resnet18_3x3", "wresnet28x2"),
    ("group", "batch", "static", "none"),
    ("none", "weak", "mid", "strong", "crop", "shift", "fixmatch", "fedmatch", "fedseal",
     "fedtrinet"),
)  # fmt: skip
SEQUENCE = RowKind(
    "sequence", ("linear", "mlp", "text_cnn", "gru"), ("group", "batch", "none"),
    ("none", "weak", "mid", "strong"),
)  # fmt: skip
VECTOR = RowKind(
    "vector", ("linear", "mlp"), ("group", "batch", "none"),
    ("none", "weak", "mid", "strong"),
)  # fmt: skip
#: Networks with dropout, which private runs refuse.
WITH_DROPOUT = ("trinet_cnn", "trinet_svhn")
BYTES, AS_STORED = "bytes to [-1, 1]", "as stored"  # scalings of vectors
KINDS = {3: IMAGE, 2: SEQUENCE, 1: VECTOR}  # by dimensions


def kind_of(shape: Shape) -> RowKind:
    """Return the kind of rows of this shape. Raises KeyError for another number of dimensions."""
    return KINDS[len(shape)]


def describe(shape: Shape) -> str:
    """Describe rows of this shape.

    >>> describe((30,)), describe((40, 384)), describe((3, 32, 48))
    ('vectors of 30 numbers', 'sequences of 40 places with 384 numbers', 'images of 32x48 pixels')
    """
    match shape:
        case (features,):
            return f"vectors of {features} numbers"
        case (length, features):
            return f"sequences of {length} places with {features} numbers"
    return f"images of {shape[1]}x{shape[2]} pixels"


def describe_task(classes: Sequence[str], shape: Shape, scaling: str) -> str:
    """Describe classes in their order, the shape of a row and its scaling, to compare two parties.

    >>> describe_task(("cat", "dog"), (1, 8, 8), "[-1, 1]")
    '2 classes (cat, dog), rows of 1x8x8'
    >>> describe_task(("cat", "dog"), (30,), BYTES)
    '2 classes (cat, dog), rows of 30 bytes'
    """
    names = ", ".join([*classes[:20], *["..."][: len(classes) > 20]])
    form = "x".join(map(str, shape))
    return f"{len(classes)} classes ({names}), rows of {form}{' bytes' * (scaling == BYTES)}"


def scaling_of(x: Tensor) -> str:
    """Describe how :func:`network_input` scales stored rows; parties of a run must share it.

    >>> scaling_of(torch.zeros(1, 1, 8, 8)), scaling_of(torch.zeros(1, 30))
    ('[-1, 1]', 'as stored')
    """
    if x.dim() == 4:
        return "[-1, 1]"
    return BYTES if x.dtype == torch.uint8 else AS_STORED


def network_input(x: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Convert stored rows to network input, scaled by a public constant.

    Args:
        x: (B, *shape). uint8 in 0..255 becomes [-1, 1]. Floats of images are in [0, 1] and become
            [-1, 1]; those of vectors and sequences are used as they are.

    Returns:
        float32 on the device; images channels last in memory. Strides are fixed even for a
        single channel, because a convolution's order of summation depends on them.
    """
    x = x.to(device)
    if x.dim() != 4:
        return x.float() / 127.5 - 1 if x.dtype == torch.uint8 else x.float().contiguous()
    scaled = x.float() / 127.5 - 1 if x.dtype == torch.uint8 else 2 * x - 1
    scaled = scaled.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = x.shape
    return scaled.as_strided(x.shape, (height * width * channels, 1, width * channels, channels))


def filled(x: Tensor) -> Tensor:
    """Return which positions of sequences (..., length, features) are not empty: (..., length, 1),
    0 or 1."""
    return (x != 0).any(dim=-1, keepdim=True).to(x.dtype)


def pooled(x: Tensor) -> Tensor:
    """Average the filled positions of sequences (B, length, features), 0 if none; keep vectors: (B,
    features)."""
    if x.dim() < 3:
        return x
    return x.sum(dim=1) / filled(x).sum(dim=1).clamp(min=1)
