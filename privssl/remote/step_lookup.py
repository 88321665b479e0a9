"""Look up an algorithm's steps and their message classes by name.

A request names a step and a message class. Only steps marked ``@on_agent`` can be called, and only
classes in their annotations are built.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from functools import lru_cache
from inspect import signature
from typing import Any

from torch import Tensor

from privssl.core.engine import Step
from privssl.core.messages import Declined, Message, MessageError, StateDict
from privssl.errors import ConfigError


class StepError(Exception):
    """A request names a step or a message class that the algorithm does not have."""


def find_step(algorithm: object, name: str) -> Step[Any]:
    """The step of that name. Raises StepError unless the class marks it ``@on_agent``."""
    if getattr(getattr(type(algorithm), name, None), "runs_on_agent", False) is not True:
        raise StepError(f"{type(algorithm).__name__} has no step {name} for agents")
    return getattr(algorithm, name)  # type: ignore[no-any-return]


def check_steps(kind: type) -> None:
    """Raise ConfigError for a step whose annotations do not name its messages, or whose messages
    have fields that cannot be read.

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
            for found in _message_classes(hints[key]):
                if wrong := _unreadable(found):
                    raise ConfigError(f"{said} its message {found.__qualname__} {wrong}")


def _unreadable(kind: type[Message]) -> str | None:
    """Why a message class cannot be read from its fields; None: it can."""
    own = vars(kind)
    if "__dataclass_params__" not in own and {"__init__", "__annotations__"} & own.keys():
        return "is no dataclass of its own. Write @dataclass(frozen=True) above it"
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        if not all(part in _READ for part in (typing.get_args(hint) if union else (hint,))):
            text = str(hint).replace("typing.", "")
            return (
                f"declares {field.name} as {text}, which worker processes and sites do not read. "
                "Declare StateDict (of privssl.core.messages), Tensor, float, int, bool or str, "
                "with | None where it may be absent"
            )
    return None


_READ = (StateDict, Tensor, float, int, bool, str, type(None))


def check_declared(step: Callable[..., Any], message: Message, reply: Message) -> None:
    """Raise MessageError for messages that a step does not declare, which worker processes and
    sites would not read. A step without annotations is not checked."""
    takes, gives = _declared(getattr(step, "__func__", step))
    for what, found, known in (("takes", message, takes), ("returns", reply, gives)):
        if known and type(found).__name__ not in known:
            raise MessageError(
                f"{step.__name__} {what} {' or '.join(known)} by its annotations, and here a "
                f"{type(found).__name__}. Name that class there, as worker processes and sites need"
            )


@lru_cache(maxsize=256)
def _declared(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the messages that a step takes and returns; empty: any."""
    try:
        hints = _hints_of(function)
    except NameError:
        return (), ()
    message = list(signature(function).parameters)[-2]
    takes, gives = ([*_message_classes(hints.get(key))] for key in (message, "return"))
    for known in (takes, gives):
        if Message in known:
            known.clear()
    gives += [Declined] * bool(gives)
    return tuple(k.__name__ for k in takes), tuple(dict.fromkeys(k.__name__ for k in gives))


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
    return _hints_of(getattr(step, "__func__", step))


@lru_cache(maxsize=256)
def _hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(function)
