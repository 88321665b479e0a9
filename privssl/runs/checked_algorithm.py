"""Wrapper of a user's own method that checks its results in each round.

Without these checks a mistake would fail outside the method's code, or at the first checkpoint, or
never.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from privssl.algorithms.base import Algorithm
from privssl.core.federation import Federation
from privssl.core.messages import StateDict
from privssl.core.plugin_errors import PluginError
from privssl.runtime.randomness import others_seeded, seeded
from privssl.settings.names import ALGORITHMS
from privssl.storage.tensor_files import LazyTensors

#: Metrics of the run itself; an agent's number would appear in rounds without one.
RESERVED = ("test/", "validation/", "pseudo/", "comm/", "dp/", "time/", "images/")


def add_checks(algorithm: Algorithm[Any], name: str, warn: Callable[[str], None]) -> Algorithm[Any]:
    """Wrap an own algorithm with checks; return privssl's unchanged. ``warn``: gets sentences."""
    is_plugin = name not in ALGORITHMS
    return CheckedAlgorithm(algorithm, name, warn) if is_plugin else algorithm  # type: ignore[return-value]


class CheckedAlgorithm:
    """An algorithm with checks. Other attributes are the algorithm's own; steps are not called
    through it."""

    def __init__(self, algorithm: Algorithm[Any], name: str, warn: Callable[[str], None]) -> None:
        self._algorithm, self._name, self._warn = algorithm, name, warn
        self._warned: set[str] = set()
        # A classifier of the task, for its names and shapes.
        self._like = {n: t.shape for n, t in algorithm.task.new_classifier().state_dict().items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def start(self, federation: Federation) -> Any:
        return self._call_method("start", federation)

    def round(self, state: Any, federation: Federation) -> Any:
        new_state = self._call_method("round", federation, state)
        for name in federation.metrics:
            self._refuse_reserved("a step", name)
        return new_state

    def finish(self, state: Any, federation: Federation) -> Any:
        return self._call_method("finish", federation, state)

    def classifier(self, state: Any) -> StateDict:
        weights = self._algorithm.classifier(state)
        if not isinstance(weights, Mapping):
            raise self._error("classifier", f"returns a {_type_of(weights)}. Return F's state dict")
        for name in [*self._like, *weights]:
            expected, actual = self._like.get(name), getattr(weights.get(name), "shape", None)
            if expected != actual:
                problem = f"lacks {name}" if actual is None else f"has {name} as {[*actual]}"
                expected_text = "lacks it" if expected is None else f"has it as {[*expected]}"
                raise self._error(
                    "classifier",
                    f"{problem}, and the network of model.name {expected_text}. Return all of F",
                )
        return weights

    def metrics(self, state: Any) -> Mapping[str, float]:
        metrics = self._algorithm.metrics(state)
        if not isinstance(metrics, Mapping):
            raise self._error("metrics", f"returns a {_type_of(metrics)}. Return {{name: number}}")
        for name, value in metrics.items():
            self._refuse_reserved("metrics", name)
            if not isinstance(value, int | float):
                raise self._error("metrics", f"gives {name} as a {_type_of(value)}. Give a number")
        return metrics

    def _call_method(self, method: str, federation: Federation, *state: Any) -> Any:
        old = self._read_own_attributes()
        rng = federation.rng(f"own {method}")
        with seeded(rng), others_seeded(rng):
            result = getattr(self._algorithm, method)(*state, federation)
        self._check_state(method, result)
        new = self._read_own_attributes()
        changed = [name for name in new if name not in old or new[name] is not old[name]]
        for name in changed:
            if name not in self._warned:
                self._warned.add(name)
                self._warn(
                    f"{self._name} keeps {name} on the algorithm object, which no checkpoint has "
                    "and no worker process shares: a resumed run would end otherwise. Keep it in "
                    "the state, or in agent.memory"
                )
        return result

    def _read_own_attributes(self) -> dict[str, Any]:
        return {n: v for n, v in vars(self._algorithm).items() if not isinstance(v, nn.Module)}

    def _check_state(self, method: str, state: Any) -> None:
        expected = self._algorithm.StateType
        if type(state) is not expected:
            raise self._error(
                method,
                f"returns a {_type_of(state)}, and StateType is {expected.__name__}, by which a "
                f"checkpoint is read. Return a {expected.__name__}",
            )
        for field in dataclasses.fields(expected):
            self._check_part(
                method, f"{expected.__name__}.{field.name}", getattr(state, field.name)
            )

    def _check_part(self, method: str, path: str, value: Any) -> None:
        """Raise if a checkpoint cannot store a value: ``runs/state_tree.py``."""
        if isinstance(value, Tensor):
            if value.requires_grad:
                raise self._error(method, f"returns {path} with a gradient. Give {path}.detach()")
        elif isinstance(value, LazyTensors):  # of an earlier round, in a file
            return
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if not isinstance(key, str):
                    raise self._error(method, f"returns {path} with the key {key!r}. Give text")
                self._check_part(method, f"{path}[{key!r}]", item)
        elif isinstance(value, tuple):
            for item in value:
                self._check_part(method, path, item)
        elif not isinstance(value, bool | int | float | str | None):
            raise self._error(
                method,
                f"returns {path} as a {_type_of(value)}, which no checkpoint holds. Give tensors, "
                "numbers, text, None, and tuples or mappings of these",
            )

    def _refuse_reserved(self, source: str, name: str) -> None:
        if name.startswith(RESERVED):
            raise self._error(source, f"logs {name}, which the run measures. Name it train/WORD")

    def _error(self, source: str, problem: str) -> PluginError:
        return PluginError(f"algorithm.name {self._name}: {source} {problem}")


def _type_of(value: object) -> str:
    return "torch module" if isinstance(value, nn.Module) else type(value).__name__
