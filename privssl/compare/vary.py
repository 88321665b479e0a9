"""``--vary section.key=a,b,c``: the variants of a config, one for each point of the grid."""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from privssl.errors import ConfigError

SEPARATOR = re.compile(r",(?![^\[{]*[\]}])")  # a comma that is not inside [F, G] or {a: 1, b: 2}
NO_FOLDER = re.compile(r"[/\\:*?\"<>|\s]+")  # characters that run names cannot have
MOST = 200  # variants of a config


class Variant(NamedTuple):
    """One point of the grid."""

    name: str  # suffix of the config's name, for example ",alpha=0.1"
    overrides: tuple[str, ...]  # section.key=value


def grid(vary: Sequence[str]) -> list[Variant]:
    """Return the variants, the last key changing fastest; without keys, one unchanged variant.

    Args:
        vary: ``section.key=a,b,c``, of different keys.

    Raises:
        ConfigError: an argument has another form, a key or a value is repeated, or there are too
            many variants.

    >>> [variant.name for variant in grid(["data.alpha=0.1,1", "privacy.protect=[F],[F, G]"])][:3]
    [',alpha=0.1,protect=[F]', ',alpha=0.1,protect=[F,G]', ',alpha=1,protect=[F]']
    """
    keys, choices = list[str](), list[list[str]]()
    for text in vary:
        key, equals, rest = text.partition("=")
        values = [value.strip() for value in SEPARATOR.split(rest)]
        if not equals or not re.fullmatch(r"\w+\.\w+(\.\w+)*", key) or "" in values:
            raise ConfigError(f"--vary {text!r}: write section.key=a,b,c")
        if key in keys:
            raise ConfigError(f"--vary {key} is given twice: write all its values after one")
        if len(set(values)) < len(values):
            raise ConfigError(f"--vary {text!r}: give each value once")
        keys.append(key)
        choices.append(values)
    combinations = list(itertools.islice(itertools.product(*choices), MOST + 1))
    if len(combinations) > MOST:
        raise ConfigError(f"--vary: more than {MOST} variants. Give fewer values")
    last = [key.rpartition(".")[2] for key in keys]
    titles = [name if last.count(name) == 1 else key for name, key in zip(last, keys, strict=True)]
    return [_build_variant(keys, titles, combination) for combination in combinations]


def _build_variant(keys: Sequence[str], titles: Sequence[str], values: Sequence[str]) -> Variant:
    name = "".join(
        f",{title}={_as_folder_part(value)}" for title, value in zip(titles, values, strict=True)
    )
    return Variant(name, tuple(f"{key}={value}" for key, value in zip(keys, values, strict=True)))


def _as_folder_part(value: str) -> str:
    """Convert a value to a part of a folder's name."""
    compact = re.sub(r"\s*([,\[\]{}])\s*", r"\1", value.replace(": ", "="))
    return NO_FOLDER.sub("-", compact).strip(".")
