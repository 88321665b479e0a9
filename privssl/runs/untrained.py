"""Networks that took no training step in a whole run: their weights are those before round 1."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from privssl.algorithms.base import Algorithm
from privssl.core.messages import StateDict
from privssl.storage.tensor_files import bytes_of


def fingerprint_networks(algorithm: Algorithm[Any], state: Any) -> str:
    """A hash of each network of a server's state, as JSON; F is the classifier."""
    networks: dict[str, StateDict] = {"F": algorithm.classifier(state)}
    for name in algorithm.networks():
        held = getattr(state, name, None)
        if isinstance(held, Mapping) and all(isinstance(item, Tensor) for item in held.values()):
            networks.setdefault(name, held)
    return json.dumps({name: _hash(weights) for name, weights in networks.items()})


def _hash(weights: StateDict) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(bytes_of(weights[name]))
    return digest.hexdigest()[:16]


def untrained_warnings(before: str, after: str) -> list[str]:
    """A sentence on the networks that did not change, by their fingerprints. ``before``: of the
    state before round 1; empty if an older version began the run."""
    start, end = json.loads(before or "{}"), json.loads(after)
    same = [name for name in end if start.get(name) == end[name]]
    if not same:
        return []
    return [
        f"{', '.join(same)} took no training step: the weights are those before round 1, and the "
        "results mean nothing. Check the rows of the agents, the batch size and the budget"
    ]
