"""Import what a config names as ``package.module:Name``: the one place where text chooses code.

Only what a user runs leads here: the config of a run, an argument of a command or of the Python
interface. No message of a coordinator does, and no run folder that is merely read
(tests/api/test_own_networks.py); a site asks its own SITE.yaml first.
"""

import difflib
import importlib
from functools import reduce
from typing import Any

from privssl.errors import ConfigError


def import_object(key: str, reference: str) -> Any:
    """The object that a reference names.

    Args:
        key: where it was given, for errors, for example "model.name".
        reference: ``package.module:Name``; Name may have dots.

    Raises:
        ConfigError: no such module or object, or the module raises an error when it is imported.
    """
    module_name, _, path = reference.partition(":")
    if module_name == "__main__" or "<" in path:
        raise ConfigError(
            f"{key} is {reference}, which was defined in a notebook, a script or a function and "
            "cannot be imported. Give it from Python (model=...), or put it into a file and name "
            "that: package.module:Name"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # an import of the module's own
            raise ConfigError(_failed(key, reference, error)) from error
        raise ConfigError(
            f"{key} is {reference}, but there is no module {error.name} here. Install it, or start "
            "in the folder that holds it (PYTHONPATH=.)"
        ) from None
    except Exception as error:
        raise ConfigError(_failed(key, reference, error)) from error
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError:
        near = difflib.get_close_matches(path, dir(module), n=1)
        advice = f"Did you mean {near[0]}?" if near else "Write package.module:Name"
        raise ConfigError(
            f"{key} is {reference}, but {module_name} has no {path}. {advice}"
        ) from None


def _failed(key: str, reference: str, error: Exception) -> str:
    return (
        f"{key} is {reference}, and importing {reference.partition(':')[0]} failed: "
        f"{type(error).__name__}: {error}"
    )
