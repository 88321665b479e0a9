"""All algorithms by the name that a config uses; others are plug-ins (``runtime/plugins.py``)."""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from privssl.algorithms.base import Algorithm
from privssl.errors import ConfigError
from privssl.runtime import plugins
from privssl.settings.names import ALGORITHMS as NAMES


class _Algorithms(Mapping[str, type[Algorithm[Any]]]):
    """Imports an algorithm when it is looked up: importing all would take 0.1 s of each start.

    Iterates over those of privssl. Looking up a plug-in raises ConfigError if it is none.
    """

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
            case "fedmatch_mixup":
                from privssl.algorithms.baselines.fedmatch_mixup import FedMatchMixup as Kind
            case "fedseal":
                from privssl.algorithms.fedseal.algorithm import FedSEAL as Kind
            case "fedtrinet":
                from privssl.algorithms.fedtrinet.algorithm import FedTriNet as Kind
            case "fedmatch":
                from privssl.algorithms.fedmatch.algorithm import FedMatch as Kind
            case "semifl":
                from privssl.algorithms.semifl.algorithm import SemiFL as Kind
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
            case "pi_model":
                from privssl.algorithms.baselines.mean_teacher import PiModel as Kind
            case "mean_teacher":
                from privssl.algorithms.baselines.mean_teacher import MeanTeacher as Kind
            case "remixmatch":
                from privssl.algorithms.baselines.remixmatch import ReMixMatch as Kind
            case "feddyn":
                from privssl.algorithms.baselines.feddyn import FedDyn as Kind
            case "lg_fedavg":
                from privssl.algorithms.baselines.lg_fedavg import LGFedAvg as Kind
            case "heterofl":
                from privssl.algorithms.baselines.heterofl import HeteroFL as Kind
            case "fedrgd":
                from privssl.algorithms.baselines.fedrgd import FedRGD as Kind
            case "fl2":
                from privssl.algorithms.fl2.algorithm import FL2 as Kind  # noqa: N811
            case "sage":
                from privssl.algorithms.baselines.sage import SAGE as Kind  # noqa: N811
            case _ if plugins.is_known("algorithms", name):
                return check_own(name, plugins.load("algorithms", "algorithm.name", name))
            case _:
                raise KeyError(name)
        return Kind

    def __contains__(self, name: object) -> bool:
        return name in NAMES or (isinstance(name, str) and plugins.is_known("algorithms", name))

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


class Unread(Algorithm[Any]):
    """Stands for a plug-in that is not imported, whose settings are read and not checked."""

    Config = None  # type: ignore[assignment]  # any keys
    can_be_private = True


class _WithUnread(_Algorithms):
    def __getitem__(self, name: str) -> type[Algorithm[Any]]:
        if name in NAMES or plugins.is_allowed(name) or name not in self:
            return super().__getitem__(name)
        return Unread


def check_own(name: str, candidate: Any) -> type[Algorithm[Any]]:
    """The class that a plug-in names. Raises ConfigError where it is no algorithm."""
    wrong = None
    if not (inspect.isclass(candidate) and issubclass(candidate, Algorithm)):
        wrong = f"is {str(candidate)[:60]}. Name a class of privssl.algorithms.base.Algorithm"
    elif inspect.isabstract(candidate):
        wrong = f"has no {', '.join(sorted(candidate.__abstractmethods__))}. Write it"
    elif not (
        dataclasses.is_dataclass(getattr(candidate, "Config", None))
        and dataclasses.is_dataclass(getattr(candidate, "StateType", None))
    ):
        wrong = "needs Config and StateType, two frozen dataclasses (docs/extending.md)"
    elif candidate.make_plan.__func__ is not Algorithm.make_plan.__func__:  # type: ignore[attr-defined]
        wrong = "has a make_plan of its own, and only privssl's plans carry a claim. Remove it"
    else:
        types = {field.name: field.type for field in dataclasses.fields(candidate.Config)}
        if types.get("name") not in (str, "str") or "rounds" not in types:
            wrong = "needs a Config with name: str and rounds: int"
    if wrong is not None:
        raise ConfigError(f"algorithm.name {name} {wrong}")
    kind: type[Algorithm[Any]] = candidate
    return kind


ALGORITHMS: Mapping[str, type[Algorithm[Any]]] = _Algorithms()
#: The same for reading a run folder, where a plug-in that is not allowed is :class:`Unread`.
WITH_UNREAD: Mapping[str, type[Algorithm[Any]]] = _WithUnread()
