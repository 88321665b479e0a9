"""A row of a comparison table, made of invented results of runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from privssl.compare.table import Row, epsilon_of


def results(**changes: Any) -> dict[str, Any]:
    """An invented results.json."""
    return {
        "algorithm": "fedssl", "dataset": "toy", "seed": 0, "status": "finished", "rounds": 4,
        "labels": 40, "test_accuracy": {"final": 0.5, "best": 0.5, "best_round": 4},
        "seconds": {"total": 1.0, "round_median": 0.2}, "bytes": {"up": 1, "down": 2},
        "privacy": {"guarantee": None, "nominal_epsilon": None, "scope": "none"},
        "split_hash": "0" * 64, "versions": {"privssl": "1.0", "torch": "2.0"},
    } | changes  # fmt: skip


def row(
    config: str, runs: Sequence[Mapping[str, Any]], delta: float | None = None, *,
    lasting: bool = False, **more: Any,
) -> Row:  # fmt: skip
    """A row of runs on one split, evaluated after each round by default."""
    usual: dict[str, Any] = {
        "differs": (), "evaluate_every": (1,) * len(runs), "other_code": (),
        "splits": ("a split",) * len(runs), "unprotected": True, "accounts": "",
    }  # fmt: skip
    epsilon = epsilon_of(runs, delta, lasting=lasting)
    return Row(config, tuple(runs), epsilon, **{**usual, **more})
