"""Which steps an algorithm has for agents, what each takes, and what it may give back.

A letter names a step and the class of a message. Both are looked for among what the algorithm
declares (``@on_agent``, and the annotations of the step); nothing else of it can be called, and
no other class is built.
"""

import types
import typing
from collections.abc import Callable
from inspect import signature
from typing import Any

from privssl.core.engine import Step
from privssl.core.messages import Declined, Message


class StepError(Exception):
    """A letter asks for a step, or brings a message, that the algorithm does not have."""


def find_step(algorithm: object, name: str) -> Step[Any]:
    """The step of that name. Raises StepError unless the class marks it ``@on_agent``."""
    if getattr(getattr(type(algorithm), name, None), "runs_on_agent", False) is not True:
        raise StepError(f"{type(algorithm).__name__} has no step {name} for agents")
    return getattr(algorithm, name)  # type: ignore[no-any-return]


def input_type(step: Callable[..., Any], name: str) -> type[Message]:
    """The class of the message that a step takes. Raises StepError unless that is its name."""
    message = list(signature(step).parameters)[1]  # after the agent
    return _find_named(step, name, _classes(_hints(step)[message]))


def output_type(step: Callable[..., Any], name: str) -> type[Message]:
    """The class of a reply that a step may give, by name; Silence is one always.

    Raises:
        StepError: it gives none of that name.
    """
    return _find_named(step, name, (*_classes(_hints(step)["return"]), Declined))


def _find_named(
    step: Callable[..., Any], name: str, known: tuple[type[Message], ...]
) -> type[Message]:
    for kind in known:
        if kind.__name__ == name:
            return kind
    raise StepError(f"{step.__name__} has nothing to do with a message {name}")


def _classes(hint: Any) -> tuple[type[Message], ...]:
    """The message classes of an annotation: one, or those of a union."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    found = typing.get_args(hint) if union else (hint,)
    return tuple(kind for kind in found if isinstance(kind, type) and issubclass(kind, Message))


def _hints(step: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(getattr(step, "__func__", step))
