"""The cases of test_algorithm_contract.py, shared with other tests."""

from typing import Any

from privssl.algorithms import ALGORITHMS
from privssl.algorithms.base import Algorithm
from privssl.data.datasets import Dataset
from privssl.testing.federations import relabelled as relabelled
from tests.support.toy_worlds import make, toy_rows

NO_RAMP: dict[str, Any] = {"local_epochs": 1, "ramp_up": 0, "steps_of": "labelled"}
NEEDS: dict[str, dict[str, Any]] = {
    "fedmatch_mixup": {"warm_up": 0},
    "pi_model": NO_RAMP,
    "mean_teacher": NO_RAMP | {"teacher_decay": 0.5},
    "remixmatch": NO_RAMP | {"teacher_decay": 0.5, "strong_views": 1, "strong": "strong"},
    # with a higher threshold no row is confident, and no agent learns
    "semifl": {"threshold": 0.0, "epochs": 1.0, "server_epochs": 1.0},
    "fedseal": {"bootstrap_epochs": 3, "client_epochs": 1, "server_epochs": 1},
    "fixmatch": {"threshold": 0.0, "local_epochs": 1},
    "uda": {"threshold": 0.0, "annealing": "none", "local_epochs": 1},
    "fl2": {"sure_above": 0.1, "local_epochs": 1},
    "sage": {"threshold": 0.0, "local_epochs": 1, "batch_size": 20},
    # the fewest rounds that contain every phase
    "label_census": {
        "clusters": 5,
        "cells": 12,
        "filters": 8,
        "places": 2,
        "cluster_rounds": 3,
        "vote_rounds": 1,
        "self_training_rounds": 1,
    },
    **{
        name: {"local_epochs": 1}
        for name in ("server_sl", "fedavg", "fedprox", "fedsem", "feddyn", "lg_fedavg", "heterofl")
    },
    "fedrgd": {"threshold": 0.0, "local_epochs": 1},
}
SYNTHETIC: dict[str, Any] = {
    "gate": 0.0,
    "warm_up": 0,
    "generator": "variational",
    "weight_real": 0.0,
    "weight_guidance": 0.0,
    "weight_mix": 0.0,
    "generator_at": "query",
    "synthetic_share": 0.5,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, NEEDS.get(name, {})) for name in ALGORITHMS},
    "fedssl, gate open": ("fedssl", {"gate": 0.0, "mix_every": 1, "warm_up": 0}),
    "fedssl, gate by similarity": ("fedssl", {"gate": "similarity", "warm_up": 0}),
    "fedssl, one after the other": ("fedssl", {"order": "sequential", "gate": 0.0}),
    "fedssl, in turn": ("fedssl", {"updates": "in_turn", "gate": 0.0, "warm_up": 0}),
    "fedssl, F by SGD": ("fedssl", {"optimiser": "sgd", "gate": 0.0, "warm_up": 0}),
    "fedssl, as printed": ("fedssl", {"gate": 0.0, "real_rows": False, "judge": "target"}),
    "fedssl, synthetic rows": ("fedssl", SYNTHETIC),
    "fedssl, synthetic rows, bfloat16": ("fedssl", SYNTHETIC | {"precision": "bfloat16"}),
    "fedssl, bfloat16": ("fedssl", {"gate": 0.0, "warm_up": 0, "precision": "bfloat16"}),
    "fedmatch, bfloat16": ("fedmatch", {"threshold": 0.0, "precision": "bfloat16"}),
    "label_census, generator": (
        "label_census",
        NEEDS["label_census"] | {"generator_rounds": 1, "generator_width": 4, "noise_size": 4},
    ),
    "pseudo, batch norm": ("pseudo", {"norm": "batch", "warm_up": 0}),
    "fedmatch, every row sure": ("fedmatch", {"threshold": 0.0, "helpers_every": 1}),
    "fedmatch, as printed": ("fedmatch", {"profile": "fedmatch-paper", "threshold": 0.0}),
    "fedmatch, without decomposition": ("fedmatch", {"threshold": 0.0, "decomposition": False}),
    "fedavg, each alone": ("fedavg", NEEDS["fedavg"] | {"aggregation": "none"}),
    "fedtrinet, all clients train": ("fedtrinet", {"trains": "all", "local_player": "labelled"}),
    "semifl, nobody is sure": ("semifl", NEEDS["semifl"] | {"threshold": 0.95}),
    "semifl, static norm": ("semifl", NEEDS["semifl"] | {"norm": "static"}),
    "semifl, as printed": ("semifl", NEEDS["semifl"] | {"profile": "semifl-text"}),
    "heterofl, static norm": ("heterofl", {"local_epochs": 1, "norm": "static"}),
}


#: Algorithms that accept rows of every kind, and the view that replaces RandAugment.
FOR_VECTORS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("supervise", "pseudo", "mixmatch", "server_sl", "fedavg", "fedprox")},
    **{name: {"strong": "strong"} for name in ("fedmatch", "fixmatch", "uda")},
    **{name: {"weak": "weak", "strong": "strong"} for name in ("fl2", "sage")},
    "fedssl": {"gate": 0.0, "warm_up": 0},
    "fedmatch_mixup": {"warm_up": 0},
    **{name: {} for name in ("pi_model", "mean_teacher", "remixmatch", "fedsem")},
    **{name: {} for name in ("feddyn", "lg_fedavg", "heterofl")},
    "fedrgd": {"strong": "strong"},
    "fedseal": {"server_view": "weak", "positive_view": "strong"},
    "semifl": {"weak": "weak", "strong": "strong"},
    "label_census": {},
}
CASES |= {
    f"{name}, vectors": (name, NEEDS.get(name, {}) | own | {"rows": "vector"})
    for name, own in FOR_VECTORS.items()
}
CASES["fedssl, synthetic vectors"] = ("fedssl", SYNTHETIC | {"rows": "vector"})
CASES["label_census, generator of vectors"] = (
    "label_census", CASES["label_census, generator"][1] | {"rows": "vector"}
)  # fmt: skip
CASES["fedssl, sequences"] = ("fedssl", {**FOR_VECTORS["fedssl"], "rows": "sequence"})
CASES["fedmatch_mixup, sequences"] = ("fedmatch_mixup", {"warm_up": 0, "rows": "sequence"})
CASES["fedmatch_mixup, in sequence"] = ("fedmatch_mixup", {"warm_up": 0, "order": "sequential"})
CASES["label_census, sequences"] = ("label_census", NEEDS["label_census"] | {"rows": "sequence"})


def algorithm(case: str, **settings: Any) -> Algorithm[Any]:
    name, own = CASES[case]
    return make(name, **(own | settings))


def rows_of(case: str) -> Dataset:
    """The toy rows in the shape that a case needs."""
    return toy_rows(CASES[case][1].get("rows", "image"))
