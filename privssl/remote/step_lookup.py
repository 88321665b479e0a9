"""Look up an algorithm's steps and their message classes by name.

A request names a step and a message class. Only steps marked ``@on_agent`` can be called, and only
classes in their annotations are instantiated.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Sequence
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
    """Return the step of that name. Raises StepError unless the class marks it ``@on_agent``."""
    if getattr(getattr(type(algorithm), name, None), "runs_on_agent", False) is not True:
        raise StepError(f"{type(algorithm).__name__} has no step {name} for agents")
    return getattr(algorithm, name)  # type: ignore[no-any-return]


def check_steps(kind: type) -> None:
    """Raise ConfigError for steps without annotated messages, or with unreadable fields in them.

    Worker processes and sites need the annotations to read messages; a single process does not.
    """
    for name, step in inspect.getmembers(kind, inspect.isfunction):
        if getattr(step, "runs_on_agent", False) is not True:
            continue
        where = f"{kind.__module__}:{kind.__qualname__}, step {name}:"
        parameters = list(signature(step).parameters)
        if len(parameters) != 4:
            raise ConfigError(
                f"{where} takes ({', '.join(parameters)}). A step takes (self, agent, message, ctx)"
            )
        try:
            inputs, outputs = _messages_of(step)
        except NameError as error:
            raise ConfigError(
                f"{where} its annotations cannot be read ({error}). Import what they name where "
                "the module is run, not under TYPE_CHECKING alone"
            ) from None
        input_hint = f"{parameters[2]}: MESSAGE"
        for messages, annotation in ((inputs, input_hint), (outputs, "-> MESSAGE | Declined")):
            if not any(kind is not Message for kind in messages):
                raise ConfigError(
                    f"{where} has no annotation `{annotation}`, by which worker processes and "
                    "sites read a message. Name its class of privssl.core.messages.Message"
                )
            for message in messages:
                if problem := _explain_unreadable(message):
                    raise ConfigError(f"{where} its message {message.__qualname__} {problem}")


def _explain_unreadable(kind: type[Message]) -> str | None:
    """Return why a message class cannot be read from its fields; None if it can."""
    attrs = vars(kind)
    if "__dataclass_params__" not in attrs and {"__init__", "__annotations__"} & attrs.keys():
        return "is no dataclass of its own. Write @dataclass(frozen=True) above it"
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if not all(part in _READ for part in _split_union(hint)):
            text = str(hint).replace("typing.", "")
            return (
                f"declares {field.name} as {text}, which worker processes and sites do not read. "
                "Declare StateDict (of privssl.core.messages), Tensor, float, int, bool or str, "
                "with | None where it may be absent"
            )
    return None


_READ = (StateDict, Tensor, float, int, bool, str, type(None))


def check_declared(step: Callable[..., Any], message: Message, reply: Message) -> None:
    """Raise MessageError for messages that a step does not declare.

    Worker processes and sites could not read them. A step without annotations is not checked.
    """
    try:
        inputs, outputs = _messages_of(step)
    except NameError:
        return
    for verb, actual, declared, extra in (
        ("takes", message, inputs, ()), ("returns", reply, outputs, (Declined,)),
    ):  # fmt: skip
        names = list(dict.fromkeys(kind.__name__ for kind in (*declared, *extra)))
        if declared and Message not in declared and type(actual).__name__ not in names:
            raise MessageError(
                f"{step.__name__} {verb} {' or '.join(names)} by its annotations, and here a "
                f"{type(actual).__name__}. Name that class there, as worker processes and sites "
                "need"
            )


def input_type(step: Callable[..., Any], name: str) -> type[Message]:
    """Return the message class of that name that a step accepts. Raises StepError."""
    return _find_class(step, name, _messages_of(step)[0])


def output_type(step: Callable[..., Any], name: str) -> type[Message]:
    """Return the message class of that name that a step returns, or Declined. Raises StepError."""
    return _find_class(step, name, (*_messages_of(step)[1], Declined))


def _find_class(
    step: Callable[..., Any], name: str, candidates: Sequence[type[Message]]
) -> type[Message]:
    for kind in candidates:
        if kind.__name__ == name:
            return kind
    raise StepError(f"{step.__name__} neither takes nor returns a message {name}")


def _messages_of(step: Callable[..., Any]) -> tuple[Sequence[type[Message]], ...]:
    """Return the message classes in a step's annotations: accepted ones, returned ones.

    Raises NameError if they cannot be read.
    """
    return _read_annotations(getattr(step, "__func__", step))


@lru_cache(maxsize=256)
def _read_annotations(function: Callable[..., Any]) -> tuple[Sequence[type[Message]], ...]:
    hints = typing.get_type_hints(function)
    message = list(signature(function).parameters)[-2]  # the parameter before the context
    return tuple(
        [
            kind for kind in _split_union(hints.get(key))
            if isinstance(kind, type) and issubclass(kind, Message)
        ]
        for key in (message, "return")
    )  # fmt: skip


def _split_union(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; of another annotation itself."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if union else (hint,)
