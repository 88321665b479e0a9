"""Errors of a user's own method before its run, and its private form."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from privssl.algorithms.base import Algorithm
from privssl.core.plugin_errors import plugin_errors
from privssl.core.task import Task
from privssl.errors import ConfigError, PrivacyError
from privssl.experiment.plugin_names import plugins_of
from privssl.privacy.plan import Plan
from privssl.runtime import plugins
from privssl.settings.names import ALGORITHMS
from privssl.settings.schema import Problem
from privssl.settings.section_builder import UnusableValue


def problems_of(kind: type[Any], config: Any) -> Iterator[Problem]:
    """Yield the problems that the algorithm reports about a config.

    Raises ConfigError if an own ``problems`` yields something else, or fails; a setting that it
    reads may itself be invalid.
    """
    if config.algorithm.name in ALGORITHMS:
        yield from kind.problems(config)
        return
    group: plugins.Kind = "algorithms"
    with plugin_errors([(group, "algorithm.name", config.algorithm.name)], passing=UnusableValue):
        problems = kind.problems(config)
        for item in problems if hasattr(problems, "__iter__") else [problems]:
            is_text = isinstance(item, tuple) and all(isinstance(part, str) for part in item)
            if not (is_text and len(item) == 2):
                raise ConfigError(
                    f"algorithm.name {config.algorithm.name}: problems gives {str(item)[:60]!r}. "
                    'Yield Problem("section.key", "what is wrong, and what to do")'
                )
            yield Problem(*item)


def not_private(name: str, private: Sequence[str]) -> str:
    """Explain why an algorithm cannot have a privacy section; ``private``: those of privssl that
    can."""
    advice = "write its private form (can_be_private, docs/extending.md), "
    return (
        f"{name} reads labelled rows without noise, so nothing could be claimed. Use "
        f"{', '.join(private)}, {'' if name in ALGORITHMS else advice}or write privacy: null"
    )


def make(kind: type[Algorithm[Any]], config: Any, task: Task, plan: Plan | None) -> Algorithm[Any]:
    """Create the algorithm of a run. Raises ConfigError if an own one cannot be created."""
    try:
        inspect.signature(kind).bind(config.algorithm, task, plan)
    except TypeError as error:
        raise ConfigError(
            f"algorithm.name {config.algorithm.name}: __init__ cannot be called ({error}). Write "
            "__init__(self, config, task, plan=None), and call that of Algorithm in it"
        ) from None
    with plugin_errors(plugins_of(config)):
        return kind(config.algorithm, task, plan)


def refuse_unchecked(algorithm: Algorithm[Any], name: str) -> None:
    """Raise PrivacyError for an own private method that checks no loss."""
    inherited = type(algorithm).check_private is Algorithm.check_private
    if inherited and algorithm.mechanism != "census":
        raise PrivacyError(
            f"algorithm.name {name} has can_be_private = True and no check_private, so nobody "
            "checks whether one row changes another's loss. Write it (docs/extending.md), such as "
            "dp.check_classifier(self._F, self.task)"
        )
