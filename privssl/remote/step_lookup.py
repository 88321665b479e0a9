"""Look up an algorithm's steps and their message classes by name.

A request names a step and a message class. Only steps marked ``@on_agent`` can be called, and only
classes in their annotations are built.
"""

import types
import typing
from collections.abc import Callable
from inspect import signature
from typing import Any

from privssl.core.engine import Step
from privssl.core.messages import Declined, Message


class StepError(Exception):
    """A request names a step or a message class that the algorithm does not have."""


def find_step(algorithm: object, name: str) -> Step[Any]:
    """The step of that name. Raises StepError unless the class marks it ``@on_agent``."""
    if getattr(getattr(type(algorithm), name, None), "runs_on_agent", False) is not True:
        raise StepError(f"{type(algorithm).__name__} has no step {name} for agents")
    return getattr(algorithm, name)  # type: ignore[no-any-return]


def input_type(step: Callable[..., Any], name: str) -> type[Message]:
    """The message class of that name that a step takes. Raises StepError."""
    message = list(signature(step).parameters)[1]  # after the agent
    return _find_class(step, name, _hints(step)[message])


def output_type(step: Callable[..., Any], name: str) -> type[Message]:
    """The message class of that name that a step returns, or Declined. Raises StepError."""
    return _find_class(step, name, _hints(step)["return"], Declined)


def _find_class(step: Callable[..., Any], name: str, *hints: Any) -> type[Message]:
    for hint in hints:
        union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        for kind in typing.get_args(hint) if union else (hint,):
            if isinstance(kind, type) and issubclass(kind, Message) and kind.__name__ == name:
                return kind
    raise StepError(f"{step.__name__} neither takes nor returns a message {name}")


def _hints(step: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(getattr(step, "__func__", step))
