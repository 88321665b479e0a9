"""A row of a comparison's table, of the results of runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from privssl.compare.table import Row, epsilon_of


def row(
    config: str, runs: Sequence[Mapping[str, Any]], delta: float | None = None, *,
    lasting: bool = False, **more: Any,
) -> Row:  # fmt: skip
    """Evaluated after each round, with the split of all, unless told otherwise."""
    usual: dict[str, Any] = {
        "differs": (), "evaluate_every": (1,) * len(runs), "other_code": (),
        "splits": ("a split",) * len(runs), "bare": True,
    }  # fmt: skip
    epsilon = epsilon_of(runs, delta, lasting=lasting)
    return Row(config, tuple(runs), epsilon, **{**usual, **more})
