"""A hash of the code of a method, to recognise results of former code.

It covers the algorithm's package and all modules in ``privssl.algorithms`` and ``generators`` that
it imports, directly or not. What ``canonical_code`` leaves out does not matter: comments, layout,
the names of local variables. For a plug-in all Python files of its package count.
"""

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from privssl.algorithms import ALGORITHMS
from privssl.errors import ConfigError
from privssl.experiment.config import Config
from privssl.experiment.plugin_names import describe_here
from privssl.reproduce.canonical_code import canonical_code
from privssl.runtime.plugins import source_files

PACKAGES = ("privssl.algorithms", "generators")
REGISTRY = "privssl.algorithms"  # imports every algorithm


def sources_hash(config: Config, root: Path) -> str:
    """Return 16 hex digits of the code of a config: of its method and of all its plug-ins."""
    method = method_hash(config.algorithm.name, root)
    plugins = {
        key: description["package_sha256"]
        for key, description in describe_here(config).items()
        if key not in ("algorithm.name", "run.trackers")
    }
    if not plugins:
        return method
    return hashlib.sha256(f"{method} {sorted(plugins.items())}".encode()).hexdigest()[:16]


def method_hash(algorithm: str, root: Path) -> str:
    """Return 16 hex digits of the sources of an algorithm, in ``root`` or, for a plug-in, where
    Python finds it."""
    digest = hashlib.sha256()
    start = ALGORITHMS[algorithm].__module__
    built_in = start.startswith(f"{REGISTRY}.")
    modules = _find_modules(start, root) if built_in else _find_plugin_modules(start, root)
    if not modules:
        raise ConfigError(f"{root} has no sources of {algorithm}: it is not a clone of privssl")
    for name, path in sorted(modules.items()):
        digest.update(f"{name} {_parse_module(path.read_bytes()).statements}\n".encode())
    return digest.hexdigest()[:16]


def _find_modules(start: str, root: Path) -> dict[str, Path]:
    """Map modules to files, for a module, its package, and their imports from ``PACKAGES``."""
    modules: dict[str, Path] = {}
    pending = [start]
    package = start.rpartition(".")[0]
    if package not in (REGISTRY, f"{REGISTRY}.baselines"):  # that package contains several methods
        folder = root / package.replace(".", "/")
        pending += [f"{package}.{path.stem}" for path in folder.glob("*.py")]
    while pending:
        name = pending.pop()
        path = _find_file(name, root)
        if path is not None and name not in modules:
            modules[name] = path
            pending += _parse_module(path.read_bytes()).imports
    return modules


def _find_plugin_modules(start: str, root: Path) -> dict[str, Path]:
    """Map modules to files for a plug-in: its package, and that package's imports from
    ``PACKAGES``."""
    modules = source_files(start)
    for path in list(modules.values()):
        for name in _parse_module(path.read_bytes()).imports:
            modules |= _find_modules(name, root)
    return modules


def _find_file(name: str, root: Path) -> Path | None:
    """Return the file of a module that counts; None for others."""
    if name == REGISTRY or not f"{name}.".startswith(tuple(f"{package}." for package in PACKAGES)):
        return None
    folder = root / name.replace(".", "/")
    for path in (folder.with_name(f"{folder.name}.py"), folder / "__init__.py"):
        if path.is_file():
            return path
    return None


class _ParsedModule(NamedTuple):
    imports: tuple[str, ...]
    statements: str  # the part that counts


@functools.cache  # methods share most of their modules, and a table has many cells
def _parse_module(source: bytes) -> _ParsedModule:
    tree = ast.parse(source)
    return _ParsedModule(tuple(_find_imports(tree)), canonical_code(tree))


def _find_imports(tree: ast.Module) -> Iterator[str]:
    """Yield every name that an import may mean as a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
