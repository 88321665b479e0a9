"""All algorithms by the name that a config uses."""

from typing import Any

from privssl.algorithms.base import Algorithm
from privssl.algorithms.baselines import FedAvg, FedProx, ServerSL
from privssl.algorithms.bounds import MixMatch, Pseudo, Supervise
from privssl.algorithms.consistency import UDA, FixMatch
from privssl.algorithms.fedmatch import FedMatch
from privssl.algorithms.fedseal import FedSEAL
from privssl.algorithms.fedssl import FedSSL
from privssl.algorithms.fedtrinet import FedTriNet
from privssl.algorithms.label_census import LabelCensus
from privssl.algorithms.pseudo_baselines import FedSem
from privssl.algorithms.semifl import SemiFL

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "fedssl": FedSSL,
    "supervise": Supervise,
    "pseudo": Pseudo,
    "mixmatch": MixMatch,
    "fedseal": FedSEAL,
    "fedtrinet": FedTriNet,
    "fedmatch": FedMatch,
    "semifl": SemiFL,
    "label_census": LabelCensus,
    "server_sl": ServerSL,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fixmatch": FixMatch,
    "uda": UDA,
    "fedsem": FedSem,
}
