"""Networks made of the layers of two others: what FedTriNet calls its third player.

Che et al. (2021), section III: the first layers of the global network, which know about images
in general, under the last layers of a client's own network, which know its rows.
"""

from collections.abc import Sequence

from privssl.core.messages import StateDict
from privssl.errors import ConfigError


def splice(
    shallow_from: StateDict, deep_from: StateDict, shallow_names: Sequence[str]
) -> StateDict:
    """The named modules of one network and everything else of another of the same form.

    Whole modules are taken, with weight, bias and the buffers of their norms. No tensor is copied:
    a network that loads the result copies. Also the check of a cut, when a run
    starts: ``splice(weights, weights, names)``.

    Args:
        shallow_from, deep_from: weights of one architecture.
        shallow_names: modules as ``named_modules`` calls them: "shallow", or "trunk.0" for one
            layer (then "trunk.0.weight" is taken and "trunk.01.weight" is not). None of them:
            ``deep_from`` as it is. All of them: ``shallow_from``.

    Raises:
        ConfigError: a name that no tensor lies under.
        ValueError: the two are not of one architecture.

    >>> one = {"conv.weight": 1, "conv.bias": 1, "head.weight": 1}
    >>> two = {"conv.weight": 2, "conv.bias": 2, "head.weight": 2}
    >>> splice(one, two, ["conv"])
    {'conv.weight': 1, 'conv.bias': 1, 'head.weight': 2}
    """
    if shallow_from.keys() != deep_from.keys():
        unlike = sorted(shallow_from.keys() ^ deep_from.keys())
        raise ValueError(f"two networks of one architecture are needed; only one has {unlike[0]}")
    for name in shallow_names:
        if not any(_submodules(key, name) for key in deep_from):
            top = sorted({key.partition(".")[0] for key in deep_from})
            raise ConfigError(
                f"the network has no layers under {name!r}. Name modules of it; it has "
                f"{', '.join(top)} and what is inside of them"
            )
    return {
        key: shallow_from[key] if any(_submodules(key, name) for name in shallow_names) else value
        for key, value in deep_from.items()
    }


def _submodules(key: str, module: str) -> bool:
    return key.startswith(f"{module}.")
