"""Look up an algorithm's steps and their message classes by name.

A request names a step and a message class. Only steps marked ``@on_agent`` can be called, and only
classes in their annotations are built.
"""

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

from privssl.core.engine import Step
from privssl.core.messages import Declined, Message
from privssl.errors import ConfigError


class StepError(Exception):
    """A request names a step or a message class that the algorithm does not have."""


def find_step(algorithm: object, name: str) -> Step[Any]:
    """The step of that name. Raises StepError unless the class marks it ``@on_agent``."""
    if getattr(getattr(type(algorithm), name, None), "runs_on_agent", False) is not True:
        raise StepError(f"{type(algorithm).__name__} has no step {name} for agents")
    return getattr(algorithm, name)  # type: ignore[no-any-return]


def check_steps(kind: type) -> None:
    """Raise ConfigError for a step whose annotations do not name its messages.

    Worker processes and sites read a message by them; one process alone does not need them.
    """
    for name, step in inspect.getmembers(kind, inspect.isfunction):
        if getattr(step, "runs_on_agent", False) is not True:
            continue
        said = f"{kind.__module__}:{kind.__qualname__}, step {name}:"
        parameters = list(signature(step).parameters)
        if len(parameters) != 4:
            raise ConfigError(
                f"{said} takes ({', '.join(parameters)}). A step takes (self, agent, message, ctx)"
            )
        try:
            hints = _hints(step)
        except NameError as error:
            raise ConfigError(
                f"{said} its annotations cannot be read ({error}). Import what they name where the "
                "module is run, not under TYPE_CHECKING alone"
            ) from None
        message = parameters[2]
        for key, what in ((message, f"{message}: MESSAGE"), ("return", "-> MESSAGE | Declined")):
            if not any(found is not Message for found in _message_classes(hints.get(key))):
                raise ConfigError(
                    f"{said} has no annotation `{what}`, by which worker processes and sites read "
                    "a message. Name its class of privssl.core.messages.Message"
                )


def input_type(step: Callable[..., Any], name: str) -> type[Message]:
    """The message class of that name that a step takes. Raises StepError."""
    message = list(signature(step).parameters)[1]  # after the agent
    return _find_class(step, name, _hints(step)[message])


def output_type(step: Callable[..., Any], name: str) -> type[Message]:
    """The message class of that name that a step returns, or Declined. Raises StepError."""
    return _find_class(step, name, _hints(step)["return"], Declined)


def _find_class(step: Callable[..., Any], name: str, *hints: Any) -> type[Message]:
    for hint in hints:
        for kind in _message_classes(hint):
            if kind.__name__ == name:
                return kind
    raise StepError(f"{step.__name__} neither takes nor returns a message {name}")


def _message_classes(hint: Any) -> Iterator[type[Message]]:
    """The classes of messages in an annotation."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    for kind in typing.get_args(hint) if union else (hint,):
        if isinstance(kind, type) and issubclass(kind, Message):
            yield kind


def _hints(step: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(getattr(step, "__func__", step))
