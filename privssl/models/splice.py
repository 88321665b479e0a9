"""Networks composed of the layers of two others.

FedTriNet's third network (Che et al. 2021, section III) has the first layers of the global network
under the last layers of a client's.
"""

from collections.abc import Sequence

from privssl.core.messages import StateDict
from privssl.errors import ConfigError


def splice(
    shallow_from: StateDict, deep_from: StateDict, shallow_names: Sequence[str]
) -> StateDict:
    """Return the named modules of one network and the rest of another of the same architecture.

    Whole modules are taken, with buffers; no tensor is copied. ``splice(weights, weights, names)``
    checks the names when a run starts.

    Args:
        shallow_from, deep_from: weights of one architecture.
        shallow_names: modules as in ``named_modules``, like "shallow" or "trunk.0" (which is not a
            prefix of "trunk.01"); none gives ``deep_from``, all give ``shallow_from``.

    Raises:
        ConfigError: a name without tensors.
        ValueError: the architectures differ.

    >>> one = {"conv.weight": 1, "conv.bias": 1, "head.weight": 1}
    >>> two = {"conv.weight": 2, "conv.bias": 2, "head.weight": 2}
    >>> splice(one, two, ["conv"])
    {'conv.weight': 1, 'conv.bias': 1, 'head.weight': 2}
    """
    if shallow_from.keys() != deep_from.keys():
        extra = sorted(shallow_from.keys() ^ deep_from.keys())
        raise ValueError(f"two networks of one architecture are needed; only one has {extra[0]}")
    for name in shallow_names:
        if not any(_is_in_module(key, name) for key in deep_from):
            top = sorted({key.partition(".")[0] for key in deep_from})
            raise ConfigError(
                f"the network has no layers under {name!r}. Name modules of it; it has "
                f"{', '.join(top)} and what is inside of them"
            )
    return {
        key: shallow_from[key] if any(_is_in_module(key, name) for name in shallow_names) else value
        for key, value in deep_from.items()
    }


def _is_in_module(key: str, module: str) -> bool:
    return key.startswith(f"{module}.")
