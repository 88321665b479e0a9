"""What test_algorithm_contract.py shares with other tests."""

import dataclasses
from typing import Any

from privssl.algorithms import ALGORITHMS
from privssl.algorithms.base import Algorithm
from privssl.data import FederatedDataset
from privssl.data.datasets import Dataset
from tests.support.toy_worlds import (
    TOY,
    make,
    toy_rows,
)

NEEDS: dict[str, dict[str, Any]] = {
    # with a higher threshold no agent is sure of a row, and none learns
    "semifl": {"threshold": 0.0, "epochs": 1.0, "server_epochs": 1.0},
    "fedseal": {"bootstrap_epochs": 3, "client_epochs": 1, "server_epochs": 1},
    "fixmatch": {"threshold": 0.0, "local_epochs": 1},
    "uda": {"threshold": 0.0, "annealing": "none", "local_epochs": 1},
    "fl2": {"sure_above": 0.1, "local_epochs": 1},
    "sage": {"threshold": 0.0, "local_epochs": 1, "batch_size": 20},
    # as few rounds as have every phase in them
    "label_census": {
        "clusters": 5,
        "cells": 12,
        "filters": 8,
        "places": 2,
        "cluster_rounds": 3,
        "vote_rounds": 1,
        "self_training_rounds": 1,
    },
    **{name: {"local_epochs": 1} for name in ("server_sl", "fedavg", "fedprox", "fedsem")},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, NEEDS.get(name, {})) for name in ALGORITHMS},
    "fedssl, gate open": ("fedssl", {"gate": 0.0, "mix_every": 1, "warm_up": 0}),
    "fedssl, one after the other": ("fedssl", {"order": "sequential", "gate": 0.0}),
    "fedssl, F by SGD": ("fedssl", {"optimiser": "sgd", "gate": 0.0, "warm_up": 0}),
    "fedssl, as printed": ("fedssl", {"gate": 0.0, "real_rows": False, "judge": "target"}),
    "fedssl, synthetic rows": (
        "fedssl",
        {
            "gate": 0.0,
            "warm_up": 0,
            "generator": "variational",
            "weight_real": 0.0,
            "weight_guidance": 0.0,
            "weight_mix": 0.0,
            "generator_at": "query",
            "synthetic_share": 0.5,
        },
    ),
    "fedssl, bfloat16": ("fedssl", {"gate": 0.0, "warm_up": 0, "precision": "bfloat16"}),
    "fedmatch, bfloat16": ("fedmatch", {"threshold": 0.0, "precision": "bfloat16"}),
    "pseudo, batch norm": ("pseudo", {"norm": "batch", "warm_up": 0}),
    "fedmatch, every row sure": ("fedmatch", {"threshold": 0.0, "helpers_every": 1}),
    "fedtrinet, all clients train": ("fedtrinet", {"trains": "all", "local_player": "labelled"}),
    "semifl, nobody is sure": ("semifl", NEEDS["semifl"] | {"threshold": 0.95}),
    "semifl, static norm": ("semifl", NEEDS["semifl"] | {"norm": "static"}),
}


#: Algorithms that take rows of every kind, and the view that takes the place of RandAugment.
FOR_VECTORS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("supervise", "pseudo", "mixmatch", "server_sl", "fedavg", "fedprox")},
    **{name: {"strong": "strong"} for name in ("fedmatch", "fixmatch", "uda")},
    **{name: {"weak": "weak", "strong": "strong"} for name in ("fl2", "sage")},
    "fedssl": {"gate": 0.0, "warm_up": 0},
    "fedsem": {},
    "fedseal": {"server_view": "weak", "positive_view": "strong"},
    "semifl": {"weak": "weak", "strong": "strong"},
    "label_census": {},
}
CASES |= {
    f"{name}, vectors": (name, NEEDS.get(name, {}) | own | {"rows": "vector"})
    for name, own in FOR_VECTORS.items()
}
CASES["fedssl, sequences"] = ("fedssl", {**FOR_VECTORS["fedssl"], "rows": "sequence"})
CASES["label_census, sequences"] = ("label_census", NEEDS["label_census"] | {"rows": "sequence"})


def algorithm(case: str, **settings: Any) -> Algorithm[Any]:
    name, own = CASES[case]
    return make(name, **(own | settings))


def rows_of(case: str) -> Dataset:
    """The toy rows in the shape that a case takes."""
    return toy_rows(CASES[case][1].get("rows", "image"))


# Hidden labels -------------------------------------------------------------------------------


def relabelled(parties: FederatedDataset, *, labelled: bool, rows: Dataset = TOY) -> Dataset:
    """The toy rows with the labels of some rows moved on by one class, all else as it was."""
    kind = "labelled" if labelled else "unlabelled"
    ids = [i for holding in parties.manifest.agents.values() for i in getattr(holding, kind)]
    y = TOY.y_train.clone()
    y[ids] = (y[ids] + 1) % 10
    return dataclasses.replace(rows, y_train=y)
