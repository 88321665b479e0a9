"""All algorithms by the name that a config uses."""

from typing import Any

from privssl.algorithms.base import Algorithm
from privssl.algorithms.bounds import MixMatch, Pseudo, Supervise
from privssl.algorithms.fedssl import FedSSL

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "fedssl": FedSSL,
    "supervise": Supervise,
    "pseudo": Pseudo,
    "mixmatch": MixMatch,
}
