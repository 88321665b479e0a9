"""All algorithms by the name that a config uses."""

from collections.abc import Iterator, Mapping
from typing import Any

from privssl.algorithms.base import Algorithm

NAMES = (
    *("fedssl", "supervise", "pseudo", "mixmatch", "fedseal", "fedtrinet", "fedmatch", "semifl"),
    *("label_census", "server_sl", "fedavg", "fedprox", "fixmatch", "uda", "fedsem"),
    *("fl2", "sage"),
)


class _Algorithms(Mapping[str, type[Algorithm[Any]]]):
    """Imports an algorithm when it is looked up: importing all would take 0.1 s of each start."""

    def __getitem__(self, name: str) -> type[Algorithm[Any]]:
        Kind: type[Algorithm[Any]]
        match name:
            case "fedssl":
                from privssl.algorithms.fedssl.algorithm import FedSSL as Kind
            case "supervise":
                from privssl.algorithms.baselines.fedssl_baselines import Supervise as Kind
            case "pseudo":
                from privssl.algorithms.baselines.fedssl_baselines import Pseudo as Kind
            case "mixmatch":
                from privssl.algorithms.baselines.fedssl_baselines import MixMatch as Kind
            case "fedseal":
                from privssl.algorithms.fedseal.algorithm import FedSEAL as Kind
            case "fedtrinet":
                from privssl.algorithms.fedtrinet.algorithm import FedTriNet as Kind
            case "fedmatch":
                from privssl.algorithms.fedmatch.algorithm import FedMatch as Kind
            case "semifl":
                from privssl.algorithms.semifl import SemiFL as Kind
            case "label_census":
                from privssl.algorithms.label_census.algorithm import LabelCensus as Kind
            case "server_sl":
                from privssl.algorithms.baselines.supervised import ServerSL as Kind
            case "fedavg":
                from privssl.algorithms.baselines.supervised import FedAvg as Kind
            case "fedprox":
                from privssl.algorithms.baselines.supervised import FedProx as Kind
            case "fixmatch":
                from privssl.algorithms.baselines.fixmatch_uda import FixMatch as Kind
            case "uda":
                from privssl.algorithms.baselines.fixmatch_uda import UDA as Kind  # noqa: N811
            case "fedsem":
                from privssl.algorithms.baselines.pseudo_labeling import FedSem as Kind
            case "fl2":
                from privssl.algorithms.fl2.algorithm import FL2 as Kind  # noqa: N811
            case "sage":
                from privssl.algorithms.baselines.sage import SAGE as Kind  # noqa: N811
            case _:
                raise KeyError(name)
        return Kind

    def __contains__(self, name: object) -> bool:
        return name in NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


ALGORITHMS: Mapping[str, type[Algorithm[Any]]] = _Algorithms()
