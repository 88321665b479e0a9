"""The modules of our packages, read from the checkout, and their imports."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("privssl", "generators", "accounting")


class Module(NamedTuple):
    """One Python file of our packages."""

    name: str  # dotted, as it is imported
    source: str


def repository_files() -> list[Path]:
    """All files that git tracks or would track after ``git add``."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git cannot list the files here: {error}")
    paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def product_modules() -> list[Module]:
    """The modules of the three packages, read from this checkout."""
    return [
        Module(
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"),
            path.read_text(encoding="utf-8"),
        )
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


def inside(name: str, *prefixes: str) -> bool:
    """Whether a dotted name is one of the prefixes, or lies under one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


@cache
def parsed(source: str) -> ast.Module:
    """The syntax tree of a module; callers must not change it."""
    return ast.parse(source)


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a module's tree."""
    return tuple(ast.walk(parsed(source)))


def dotted(node: ast.AST) -> str:
    """The dotted name of a chain of attributes; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    owner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if owner and isinstance(node, ast.Attribute) else ""


@cache
def imports(source: str) -> tuple[tuple[int, str, str], ...]:
    """Every import of a module (see ``imported``)."""
    return tuple(imported(parsed(source)))


def imported(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Every import at any depth: its line, its local name, and its full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{origin}.{alias.name}"
