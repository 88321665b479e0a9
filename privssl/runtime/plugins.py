"""Plug-ins: the only module in which a string selects code to import.

A plug-in is ``package.module:Name``, or the name of an entry point of an installed package in the
group ``privssl.KIND``: algorithms, models, datasets, encoders, partitions, trackers.

Imports need permission of the process's user (:func:`imports_allowed`). Training permits the names
in its config, a site those in SITE.yaml. Commands that read a run folder permit only names in their
arguments. Messages of a coordinator cannot cause imports.
"""

import difflib
import hashlib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, reduce
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from privssl.errors import ConfigError, UserError, first_line
from privssl.runtime.code_version import hash_files

Kind = Literal["algorithms", "models", "datasets", "encoders", "partitions", "trackers"]

#: ``package.module:Name``; <> as in ``f.<locals>.Name``, which no module contains.
REFERENCE = r"^[A-Za-z_][\w.]*:[A-Za-z_<][\w.<>]*$"


class Permission(NamedTuple):
    """Importable names, and how to allow more; None: all names."""

    names: frozenset[str] | None
    advice: str


NOTHING = Permission(frozenset(), "train with it: privssl train, privssl.train")
_permission: ContextVar[Permission] = ContextVar("permission")
_provided: ContextVar[Mapping[tuple[Kind, str], Any]] = ContextVar("provided")


@contextmanager
def imports_allowed(names: Collection[str] | None = None, advice: str = "") -> Iterator[None]:
    """Allow plug-ins inside the block.

    Args:
        names: the only ones that may be imported; None: all, because the user gives the names.
        advice: how the user allows another one, for errors.
    """
    allowed = None if names is None else frozenset(names)
    token = _permission.set(Permission(allowed, advice))
    try:
        yield
    finally:
        _permission.reset(token)


def is_allowed(name: str) -> bool:
    """Return whether a plug-in may be imported here."""
    names = _permission.get(NOTHING).names
    return names is None or name in names


@contextmanager
def provided(kind: Kind, name: str, found: Any) -> Iterator[None]:
    """Register an object under a name inside the block, as if it were installed."""
    token = _provided.set({**_provided.get({}), (kind, name): found})
    try:
        yield
    finally:
        _provided.reset(token)


def is_reference(name: str) -> bool:
    """Return whether a name has the form ``package.module:Name``."""
    return re.match(REFERENCE, name) is not None


def is_known(kind: Kind, name: str) -> bool:
    """Return whether a name is a reference, or an installed entry point. Imports nothing."""
    return is_reference(name) or (kind, name) in _provided.get({}) or name in entry_points(kind)


def entry_points(kind: Kind) -> Mapping[str, metadata.EntryPoint]:
    """Return the installed entry points of a kind by name."""
    return {point.name: point for point in _read_entry_points(tuple(sys.path))[kind]}


@lru_cache(maxsize=8)
def _read_entry_points(_: tuple[str, ...]) -> Mapping[str, Sequence[metadata.EntryPoint]]:
    """Return all entry points of privssl's groups; cached because reading takes 10 ms."""
    points = metadata.entry_points()
    return {kind: tuple(points.select(group=f"privssl.{kind}")) for kind in get_args(Kind)}


def check_names(kind: Kind, built_in: Collection[str]) -> None:
    """Raise ConfigError for an installed plug-in with the name of privssl's or another one."""
    points: dict[str, metadata.EntryPoint] = {}
    for point in _read_entry_points(tuple(sys.path))[kind]:
        other = points.setdefault(point.name, point)
        if point.name in built_in or other.value != point.value:
            owner = "privssl itself" if point.name in built_in else _format_package(other)
            raise ConfigError(
                f"{_format_package(point)} installs a plug-in {point.name} (privssl.{kind}), a "
                f"name that {owner} has. Uninstall one, or name it as package.module:Name in a "
                "package without that entry point"
            )


def _format_package(point: metadata.EntryPoint) -> str:
    return point.value if point.dist is None else f"{point.dist.name} {point.dist.version}"


def load(kind: Kind, key: str, name: str) -> Any:
    """Import the object of a plug-in: of an entry point, or ``package.module:Name``.

    ``key``: the config key of the name, for errors, for example "model.name".

    Raises:
        ConfigError: the import is not allowed, the module or object does not exist, or importing
            the module raises an error.
    """
    if (kind, name) in (registered := _provided.get({})):
        return registered[kind, name]
    permission = _permission.get(NOTHING)
    if not is_allowed(name):
        raise ConfigError(
            f"{key} is {name}, code from outside of privssl that would be imported here, and "
            f"nobody allowed it. Read that code; then {permission.advice.format(name=name)}"
        )
    point = entry_points(kind).get(name)
    if point is not None and not is_reference(name):
        return import_object(f"{key} is {name} of {_format_package(point)}, and", point.value)
    return import_object(f"{key} is {name}, and", name)


def load_function(kind: Kind, key: str, name: str, advice: str) -> Callable[..., Any]:
    """Import like :func:`load`; ConfigError with ``advice`` if the object is not callable."""
    function = load(kind, key, name)
    if not callable(function):
        raise ConfigError(f"{key} {name} is {str(function)[:60]}. {advice}")
    return function  # type: ignore[no-any-return]


def import_object(error_prefix: str, reference: str) -> Any:
    """Import the object ``package.module:Name``.

    ``error_prefix``: the start of error messages. Raises ConfigError as :func:`load`.
    """
    module_name, _, path = reference.partition(":")
    if module_name == "__main__" or "<" in path:
        raise ConfigError(
            f"{error_prefix} it was defined in a notebook, a script or a function and cannot be "
            "imported. Give a network from Python (model=...), or put it into a file and name "
            "that: package.module:Name"
        )
    prefix = f"{error_prefix} importing {module_name} failed: "
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # a failed import inside the module
            raise ConfigError(f"{prefix}{type(error).__name__}: {error}") from error
        raise ConfigError(
            f"{error_prefix} there is no module {error.name} here. Install it, or start "
            "`python -m privssl.train` in the folder that holds it. The command `privssl` looks "
            "there with PYTHONPATH=."
        ) from None
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{prefix}{type(error).__name__}: {_format_error(error, module_name)}"
        ) from error
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError:
        similar = difflib.get_close_matches(path, dir(module), n=1)
        advice = f"Did you mean {similar[0]}?" if similar else "Write package.module:Name"
        raise ConfigError(f"{error_prefix} {module_name} has no {path}. {advice}") from None


def _format_error(error: BaseException, module: str) -> str:
    """Return the text of an error, and the failing line of the module or its package."""
    package = module.partition(".")[0]
    frames = [
        (Path(frame.f_code.co_filename).name, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == package
    ]
    return f"{error} ({frames[-1][0]}, line {frames[-1][1]})" if frames else str(error)


def call(error_prefix: str, build: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a plug-in's function; convert its errors to a ConfigError with this start."""
    try:
        return build(*arguments, **options)
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(f"{error_prefix} {type(error).__name__}: {first_line(error)}") from error


def describe(kind: Kind, name: str) -> dict[str, str | None]:
    """Return a run's record of a plug-in.

    ``name``, ``distribution``, ``version`` (None without an installed package), ``sha256`` of the
    defining file, and ``package_sha256`` of :func:`source_files` (None in a script or a notebook).
    """
    point = None if is_reference(name) else entry_points(kind).get(name)
    reference = name if point is None else point.value
    module_name = reference.partition(":")[0]
    module = sys.modules.get(module_name)
    distribution = None if point is None else point.dist
    if distribution is None:  # most packages have their distribution's name
        with suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(module_name.partition(".")[0])
    module = None if module is sys.modules.get("__main__") else module  # a script or a notebook
    file = None if module is None else inspect.getsourcefile(module)
    digest = None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return {
        "name": name,
        "distribution": None if distribution is None else distribution.name,
        "version": None if distribution is None else distribution.version,
        "sha256": digest,
        "package_sha256": None if file is None else hash_files(source_files(module_name)),
    }


def files_of(kind: Kind, name: str) -> Mapping[str, Path]:
    """Return :func:`source_files` of an imported plug-in. Empty for scripts, notebooks and privssl
    itself."""
    if (kind, name) in (registered := _provided.get({})):
        module = str(getattr(registered[kind, name], "__module__", ""))
    else:
        point = None if is_reference(name) else entry_points(kind).get(name)
        module = (name if point is None else point.value).partition(":")[0]
    outside = module.partition(".")[0] not in ("privssl", "__main__")
    return source_files(module) if outside and module in sys.modules else {}


def source_files(module: str) -> dict[str, Path]:
    """Map names to all Python files of an imported module's top-level package. All files, because a
    plug-in calls other modules of its package. A module without a package has one file."""
    file, package = inspect.getsourcefile(sys.modules[module]), sys.modules[module].__package__
    if file is None:
        return {}
    if not package:
        return {Path(file).name: Path(file)}
    top = Path(file).parents[package.count(".")]
    files = (path for path in sorted(top.rglob("*.py")) if path.is_file())  # no broken links
    return {path.relative_to(top.parent).as_posix(): path for path in files}
