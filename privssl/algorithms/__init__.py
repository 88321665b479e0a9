"""All algorithms by the name that a config uses.

A run has one of them, so each is imported when it is asked for: all take a tenth of a second, of
each start of a command and of each process that it spawns.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from privssl.algorithms.base import Algorithm

NAMES = (
    "fedssl",
    "supervise",
    "pseudo",
    "mixmatch",
    "fedseal",
    "fedtrinet",
    "fedmatch",
    "semifl",
    "label_census",
    "server_sl",
    "fedavg",
    "fedprox",
    "fixmatch",
    "uda",
    "fedsem",
)


class _Algorithms(Mapping[str, type[Algorithm[Any]]]):
    def __getitem__(self, name: str) -> type[Algorithm[Any]]:
        match name:
            case "fedssl":
                from privssl.algorithms.fedssl.algorithm import FedSSL

                return FedSSL
            case "supervise":
                from privssl.algorithms.baselines.fedssl_baselines import Supervise

                return Supervise
            case "pseudo":
                from privssl.algorithms.baselines.fedssl_baselines import Pseudo

                return Pseudo
            case "mixmatch":
                from privssl.algorithms.baselines.fedssl_baselines import MixMatch

                return MixMatch
            case "fedseal":
                from privssl.algorithms.fedseal.algorithm import FedSEAL

                return FedSEAL
            case "fedtrinet":
                from privssl.algorithms.fedtrinet.algorithm import FedTriNet

                return FedTriNet
            case "fedmatch":
                from privssl.algorithms.fedmatch.algorithm import FedMatch

                return FedMatch
            case "semifl":
                from privssl.algorithms.semifl import SemiFL

                return SemiFL
            case "label_census":
                from privssl.algorithms.label_census.algorithm import LabelCensus

                return LabelCensus
            case "server_sl":
                from privssl.algorithms.baselines.supervised import ServerSL

                return ServerSL
            case "fedavg":
                from privssl.algorithms.baselines.supervised import FedAvg

                return FedAvg
            case "fedprox":
                from privssl.algorithms.baselines.supervised import FedProx

                return FedProx
            case "fixmatch":
                from privssl.algorithms.baselines.fixmatch_uda import FixMatch

                return FixMatch
            case "uda":
                from privssl.algorithms.baselines.fixmatch_uda import UDA

                return UDA
            case "fedsem":
                from privssl.algorithms.baselines.pseudo_labeling import FedSem

                return FedSem
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return name in NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


ALGORITHMS: Mapping[str, type[Algorithm[Any]]] = _Algorithms()
