"""Encoders from outside of privssl: a function of (weights) that returns an ``Encoder``.

A claim is about single rows, so an encoder must map each row by itself. That is tried on made-up
rows whenever one is opened. As with other plug-ins this finds mistakes, and no malicious author.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from privssl.encoders.frozen import Encoder, Rows
from privssl.errors import ConfigError
from privssl.runtime import plugins

TEXTS = ("", "a short text", "another text, which is longer: " + "word " * 50)
#: Of the largest feature: a batch may round otherwise than a row alone, in bfloat16 too.
TOLERANCE = 0.02
#: Of the largest feature: the same rows again, in the same network, round the same way.
AGAIN = 1e-5
MOST_TRIED = 64  # rows of the batch that is tried


def open_own_encoder(name: str, weights: str) -> Encoder:
    """The encoder of a plug-in.

    Raises:
        ConfigError: it cannot be imported, returns no Encoder, or mixes rows.
    """
    found = plugins.load("encoders", "data.encoder", name)
    if not callable(found):
        raise ConfigError(
            f"data.encoder {name} is {str(found)[:60]}. Name a function of (weights) that returns "
            "a privssl.encoders.Encoder"
        )
    made = plugins.call(f"data.encoder {name} cannot be opened:", found, weights)
    if not isinstance(made, Encoder):
        raise ConfigError(
            f"data.encoder {name} returns a {type(made).__name__}. Return a "
            "privssl.encoders.Encoder"
        )
    return dataclasses.replace(made, name=name)


def refuse_mixing(encoder: Encoder, shape: tuple[int, ...] | None) -> None:
    """Raise ConfigError where a row's features depend on other rows, on those that came before, or
    on chance.

    Args:
        shape: (channels, height, width) of images; None: texts.
    """
    kinds = 3
    # A whole batch, as a statistic may need many rows.
    places = [place % kinds for place in range(max(kinds, min(encoder.batch, MOST_TRIED)))]
    if shape is None:
        rows: list[Rows] = [[text] for text in TEXTS]
        together: Rows = [TEXTS[place] for place in places]
    else:
        levels = torch.arange(kinds * torch.Size(shape).numel()) * 37 % 251
        images = levels.view(kinds, *shape).to(torch.uint8)
        images[1], images[2] = 0, 255  # a batch statistic would move much
        rows, together = [image[None] for image in images], images[places]
    said = f"data.encoder {encoder.name} fails on made-up rows:"
    with torch.inference_mode():
        one: Callable[[Rows], Tensor] = plugins.call(said, encoder.build)
        batch = plugins.call(said, one, together)
        after = plugins.call(said, one, rows[0])
        # Another, which sees rows alone first: what is fitted to the first batch differs.
        other: Callable[[Rows], Tensor] = plugins.call(said, encoder.build)
        alone = torch.cat([plugins.call(said, other, row) for row in rows])
    wanted = (len(places), *encoder.shape), (kinds, *encoder.shape)
    if (tuple(batch.shape), tuple(alone.shape)) != wanted:
        raise ConfigError(
            f"data.encoder {encoder.name} gives {tuple(batch.shape[1:])} for a row, and its shape "
            f"says {encoder.shape}. Correct one"
        )
    top = float(alone.abs().max())
    if not torch.allclose(batch, alone[places], rtol=0, atol=TOLERANCE * top):
        raise ConfigError(
            f"data.encoder {encoder.name} gives a row other features beside other rows than alone, "
            "so rows are not encoded one by one. Use no batch statistics, no dropout and no chance"
        )
    if not torch.allclose(after, alone[:1], rtol=0, atol=AGAIN * top):
        raise ConfigError(
            f"data.encoder {encoder.name} gives a row other features after other rows than before, "
            "so it keeps something of rows. Use no running statistics, and nothing that is fitted "
            "to the rows it sees"
        )
