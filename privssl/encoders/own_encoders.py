"""Encoders from outside of privssl: a function of (weights) that returns an ``Encoder``.

Guarantees are about single rows, so an encoder must not keep state between rows. This is tested on
synthetic rows whenever one is opened. As with other plug-ins the test finds mistakes; it does not
stop a malicious author.
"""

import dataclasses

import torch

from privssl.encoders.frozen import Encoder, Rows
from privssl.errors import ConfigError
from privssl.runtime import plugins

TEXTS = ("", "a short text", "another text, which is longer: " + "word " * 50)


def open_own_encoder(name: str, weights: str) -> Encoder:
    """Open the encoder of a plug-in. Raises ConfigError if it cannot be imported, or returns no
    Encoder."""
    advice = "Name a function of (weights) that returns a privssl.encoders.Encoder"
    function = plugins.load_function("encoders", "data.encoder", name, advice)
    encoder = plugins.call(f"data.encoder {name} cannot be opened:", function, weights)
    if not isinstance(encoder, Encoder):
        raise ConfigError(
            f"data.encoder {name} returns a {type(encoder).__name__}. Return a "
            "privssl.encoders.Encoder"
        )
    return dataclasses.replace(encoder, name=name)


def refuse_state(encoder: Encoder, shape: tuple[int, ...] | None) -> None:
    """Raise ConfigError if a row's features depend on earlier rows, or on chance.

    Rows are encoded one at a time, so later rows cannot affect them.

    Args:
        shape: (channels, height, width) of images; None: texts.
    """
    rows: list[Rows]
    if shape is None:
        rows = [[text] for text in TEXTS]
    else:
        levels = torch.arange(3 * torch.Size(shape).numel()) * 37 % 251
        images = levels.view(3, *shape).to(torch.uint8)
        images[1], images[2] = 0, 255  # these would change a running statistic much
        rows = [image[None] for image in images]
    prefix = f"data.encoder {encoder.name} fails on made-up rows:"
    with torch.inference_mode():
        # Two networks see the rows in opposite order, so stored state differs.
        first, second = (
            [plugins.call(prefix, network, row).clone() for row in order]
            for order in (rows, rows[::-1])
            for network in [plugins.call(prefix, encoder.build)]
        )
    shapes = {tuple(features.shape) for features in (*first, *second)}
    if shapes != {(1, *encoder.shape)}:
        raise ConfigError(
            f"data.encoder {encoder.name} gives {shapes.pop()} for one row, and its shape says "
            f"{(1, *encoder.shape)}. Correct one"
        )
    if not all(map(torch.equal, first, reversed(second))):
        raise ConfigError(
            f"data.encoder {encoder.name} gives a row other features after other rows than before, "
            "so it keeps something of rows, or draws numbers. Use no running statistics, nothing "
            "that is fitted to the rows it sees, no dropout and no chance"
        )
