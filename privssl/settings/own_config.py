"""The section ``algorithm`` of a user's own method, whose class must check its keys."""

import dataclasses
from typing import Any

from pydantic import PydanticUserError, TypeAdapter
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.errors import PydanticSchemaGenerationError

from privssl.errors import ConfigError, first_line

_WRITE = "Write @pydantic.dataclasses.dataclass(frozen=True, config=strict) above it"


def check_own_config(name: str, kind: type[Any]) -> None:
    """Raise ConfigError unless Config checks types, and both Config and state are immutable.

    A checkpoint stores the state that ``round`` returns.
    """
    config, problem = kind.Config, None
    if config is None:  # the plug-in is not imported
        return
    if not is_pydantic_dataclass(config):
        problem = f"has a Config that takes values of any type. {_WRITE} (privssl.settings.schema)"
    elif not _is_frozen(config):
        problem = (
            f"has a Config that can be changed during a run. {_WRITE} (privssl.settings.schema)"
        )
    elif not _is_frozen(kind.StateType):
        problem = (
            f"has a StateType, {kind.StateType.__name__}, that can be changed, so an interrupted "
            "round could reach a checkpoint. Write @dataclass(frozen=True) above it"
        )
    else:
        try:
            TypeAdapter(config).json_schema()
        except (PydanticUserError, PydanticSchemaGenerationError) as error:
            problem = (
                f"has a Config with a key that YAML cannot give ({first_line(error)}). Use "
                "numbers, text, bool, None, and lists or mappings of these"
            )
    if problem is not None:
        raise ConfigError(f"algorithm.name {name} {problem}")


def _is_frozen(kind: type[Any]) -> bool:
    return dataclasses.is_dataclass(kind) and bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]
