"""Refuse numbers with which a run is impossible or meaningless."""

from collections.abc import Collection, Iterator
from typing import Any

from privssl.algorithms import ALGORITHMS
from privssl.settings.schema import MAX_LEARNING_RATE, MAX_NUMBER, Problem

#: Larger integers would fill the memory, or never end, before an error could be reported.
LARGEST = {"agents": 10**6, "model": 2**16, "algorithm": 10**7}


def number_problems(config: Any, bad: Collection[str]) -> Iterator[Problem]:
    """Yield problems of single numbers of a config, and of batch norm with batches of one row.

    ``config``: an ``experiment.config.Config``. ``bad``: keys that are reported already.
    """
    for problem in (
        *_find_large_integers(config),
        *_find_large_floats(config),
        *_find_single_row_batches(config),
        *_find_rows_per_person(config),
    ):
        if problem.key not in bad:
            yield problem


def _find_large_integers(config: Any) -> Iterator[Problem]:
    for section, limit in LARGEST.items():
        for key, value in vars(getattr(config, section)).items():
            if type(value) is int and value > limit:
                yield Problem(f"{section}.{key}", f"{value}: give at most {limit}")


def _find_large_floats(config: Any) -> Iterator[Problem]:
    for key, value in vars(config.algorithm).items():
        limit = MAX_LEARNING_RATE if key.endswith("learning_rate") else MAX_NUMBER
        if isinstance(value, float) and not value <= limit:
            reason = (
                "one step would move the weights so far that the outputs are not finite"
                if limit == MAX_LEARNING_RATE
                else "networks compute in float32, where larger ones soon are not finite"
            )
            yield Problem(f"algorithm.{key}", f"{value:g}: give at most {limit:.0f} ({reason})")


def _find_single_row_batches(config: Any) -> Iterator[Problem]:
    """Yield batches of one row, for which batch norm has no variance."""
    if config.model.norm != "batch" or config.privacy is not None:
        return
    for key, value in vars(config.algorithm).items():
        if key.endswith("batch_size") and value == 1:
            yield Problem(
                f"algorithm.{key}",
                "1, but batch norm needs two rows in a batch. Give 2 or more, or set "
                "model.norm: group",
            )
    if 0 < count_labelled_rows(config) < 2:
        yield Problem(
            "data.labelled",
            f"{config.data.labelled}: an agent has a single labelled row, and batch norm needs two "
            "in a batch. Give more rows or fewer agents, or set model.norm: group",
        )


def _find_rows_per_person(config: Any) -> Iterator[Problem]:
    """Yield persons in the published scheme, and a number of their rows that nothing counts."""
    if config.privacy is None:
        return
    if config.privacy.unit == "person" and config.privacy.scope != "sound":
        text = "person, and the published scheme guarantees nothing for anybody. Set record"
        yield Problem("privacy.unit", text)
    if config.privacy.rows_per_person == 1:
        return
    if config.privacy.unit != "person" or ALGORITHMS[config.algorithm.name].mechanism != "census":
        yield Problem(
            "privacy.rows_per_person",
            "has no effect: it belongs to a label census with privacy.unit person. DP-SGD takes "
            "privacy.views rows of a person in a step",
        )


def count_labelled_rows(config: Any) -> float:
    """Return the labelled rows of an average agent with labels; 0 if there is none."""
    agents = {
        "support": config.agents.support,
        "labels-at-client": config.agents.mixed,
        "labels-at-server": 1,
        "labels-at-both": config.agents.support,
    }[config.data.labels]
    labelled = config.data.labelled - (config.data.server_labelled or 0)
    return labelled / agents if agents else 0.0
