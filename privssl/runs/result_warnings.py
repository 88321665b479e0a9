"""Warnings about the meaning of a run's results, for its last lines and results.json.

In a private run each sentence is computed from covered releases (weights, replies to the server,
numbers of the config) and from test rows, which belong to no agent.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from privssl.algorithms.base import Algorithm
from privssl.algorithms.local_ssl import ClassifierTraining
from privssl.core.federation import Roster
from privssl.core.messages import StateDict
from privssl.errors import first_few
from privssl.storage.tensor_files import bytes_of
from privssl.training.evaluation import Scores

NOT_FINITE = "are not finite (NaN or infinite)"
LARGEST_CLUSTER = 0.75  # share of rows from which one cluster of a census is too large

log = logging.getLogger("privssl")


def warn_once(warnings: list[str], sentence: str) -> None:
    """Log a warning of a round, and add it to those for results.json."""
    if sentence not in warnings:
        warnings.append(sentence)
        log.warning("%s", sentence)


def not_finite_warning(scores: Scores) -> str:
    """Return a warning about outputs that are not finite; empty if there are none.

    Allowed in private runs: computed from the server's weights and test rows.
    """
    if not scores.not_finite:
        return ""
    return (
        f"the classifier's outputs on {scores.not_finite} of {scores.rows} test rows {NOT_FINITE}; "
        "they count as wrong. Lower the learning rate"
    )


def score_warnings(scores: Scores, names: Sequence[str]) -> Iterator[str]:
    """Yield warnings about the released classifier's outputs on test rows; ``names`` of the
    classes.

    Allowed in private runs: computed from the released weights and test rows.
    """
    rows, not_finite = scores.rows, scores.not_finite
    if not_finite:
        yield f"at the end {not_finite_warning(scores)}"
    actual, predicted = scores.confusion.sum(axis=1), scores.confusion[:, :-1].sum(axis=0)
    classes = [name for name, count in zip(names, predicted.tolist(), strict=True) if count]
    if len(classes) == 1 and rows - not_finite > 1:
        yield (
            f"the classifier predicts class {classes[0]} for every test row, so it has learned "
            "nothing. Check labels, learning rate and rounds"
        )
        return
    missed = [
        name for name, n, guesses in zip(names, actual.tolist(), predicted.tolist(), strict=True)
        if n and not guesses
    ]  # fmt: skip
    if missed and not_finite < rows:
        yield (
            f"recall is 0 for {len(missed)} of {len(names)} classes, which are never predicted on "
            f"test rows ({first_few(missed)})"
        )
    largest_class = int(actual.argmax())
    share = int(actual[largest_class]) / rows
    if share < 1 and scores.accuracy <= share:
        yield (
            f"test accuracy {scores.accuracy:.4f} is not above {share:.4f}, the share of class "
            f"{names[largest_class]} in the test rows: always predicting it does as well"
        )


def idle_agent_warnings(roster: Roster, trained: Sequence[str], asked: Sequence[str]) -> list[str]:
    """Return a warning about agents whose replies changed nothing in the whole run.

    Allowed in private runs: the server knows it from their replies, which the guarantee covers.

    Args:
        trained: ids of agents that have sent changed tensors.
        asked: roles that the run has called; a method that never calls query agents leaves them
            idle by design.
    """
    idle = [a.id for a in roster if a.role in asked and a.id not in set(trained)]
    if not idle:
        return []
    return [
        f"{len(idle)} of {len(roster)} agents took no training step in this run "
        f"({first_few(idle)}), so their rows had no effect. They were not drawn, or had no "
        "budget, no rows, no batch large enough or no pseudo-label sure enough"
    ]


def warm_up_warnings(algorithm: Algorithm[Any], rounds: int) -> list[str]:
    """Return a warning about a run that ended within its warm-up on labels.

    Allowed in private runs: computed from the config.
    """
    cfg = algorithm.cfg
    if not isinstance(cfg, ClassifierTraining) or rounds > cfg.warm_up:
        return []
    if not getattr(algorithm, "uses_unlabelled", True) or not getattr(cfg, "real_rows", True):
        return []  # it has no warm-up
    return [
        f"algorithm.warm_up is {cfg.warm_up}, and the run has no later round: unlabelled rows "
        "taught the classifier nothing. Give more rounds, or a shorter warm-up"
    ]


def cluster_warnings(algorithm: Algorithm[Any], metrics: Mapping[str, float]) -> list[str]:
    """Return a warning about a label census that has nearly all rows in one cluster.

    Allowed in private runs: computed from the config and unlabelled rows, which are not protected.
    """
    share = metrics.get("census/largest_cluster", 0.0)
    if share < LARGEST_CLUSTER or not getattr(algorithm.cfg, "balanced", False):
        return []
    return [
        f"one cluster of the label census has {share:.0%} of the unlabelled rows, so it cannot "
        "tell their classes apart. Give more algorithm.clusters, or a data.encoder; "
        "algorithm.balanced: false if one class has most rows"
    ]


def fingerprint_networks(algorithm: Algorithm[Any], state: Any) -> str:
    """Hash each network of a server's state, as JSON; F is the classifier."""
    networks: dict[str, StateDict] = {"F": algorithm.classifier(state)}
    for name in algorithm.networks():
        value = getattr(state, name, None)
        if isinstance(value, Mapping) and all(isinstance(item, Tensor) for item in value.values()):
            networks.setdefault(name, value)
    return json.dumps({name: _hash_weights(weights) for name, weights in networks.items()})


def _hash_weights(weights: StateDict) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(bytes_of(weights[name]))
    return digest.hexdigest()[:16]


def untrained_warnings(before: str, after: str) -> list[str]:
    """Return a warning about networks that were not trained in the whole run.

    ``before`` and ``after``: fingerprints before round 1 and at the end.
    """
    start, end = json.loads(before), json.loads(after)
    untrained = [name for name in end if start.get(name) == end[name]]
    if not untrained:
        return []
    return [
        f"{', '.join(untrained)} took no training step: the weights are those before round 1, and "
        "the results mean nothing. Check the rows of the agents, the batch size and the budget"
    ]
