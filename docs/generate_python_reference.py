"""Write python_reference.md from docstrings: python docs/generate_python_reference.py."""

import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import privssl
from privssl.api import experiment
from privssl.storage import atomic_files
from privssl.testing import check_algorithm

PAGE = Path(__file__).with_name("python_reference.md")
HEAD = """\
# Python reference

Look up here what each function of `import privssl` takes, returns and raises. Examples:
[python.md](python.md). This page is generated from docstrings: run `make docs`.
"""
#: What the page lists: functions, and classes with their public members.
CONTENT = {
    "privssl.train": experiment.train,
    "privssl.load": privssl.load,
    "privssl.open_run": privssl.open_run,
    "Experiment": privssl.Experiment,
    "Run": privssl.Run,
    "Dataset": privssl.Dataset,
    "UserError": privssl.UserError,
    "privssl.testing.check_algorithm": check_algorithm,
}
SECTIONS = {"Args:": "", "Returns:": "returns: ", "Raises:": "raises "}  # of a docstring


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, item in CONTENT.items():
        parts.append(f"## {heading(name, item)}\n\n{prose(item)}")
        inside = dict(members(item) if isinstance(item, type) else ())
        values = [member for member, found in inside.items() if is_value(found)]
        if values:
            lines = (
                f"- `{member}`: {' '.join(prose(inside[member]).split())}" for member in values
            )
            parts.append("\n".join(lines) + "\n")
        parts += [
            f"### {heading(f'{name}.{member}', found)}\n{prose(found)}"
            for member, found in inside.items()
            if member not in values
        ]
    return "\n".join(parts)


def is_value(member: Any) -> bool:
    """Whether it is read, not called."""
    return isinstance(member, property | cached_property)


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties in the order of the source."""
    for name, found in vars(owner).items():
        if name.startswith("_") or not inspect.getdoc(found):
            continue
        if is_value(found) or isinstance(found, classmethod) or callable(found):
            yield name, found


def heading(name: str, item: Any) -> str:
    """A name with its parameters, if it is a function."""
    function: Any = getattr(item, "__func__", item)
    if not inspect.isfunction(function):
        return f"`{name}`"
    given = inspect.signature(function)
    kept = [
        parameter.replace(annotation=parameter.empty)
        for parameter in given.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    return f"`{name}{given.replace(parameters=kept, return_annotation=given.empty)}`"


def prose(item: Any) -> str:
    """A docstring as Markdown, its sections as one list."""
    text = inspect.getdoc(item) or ""
    text = re.sub(r":\w+:`[~.]*([\w.]+)`", r"``\1``", text).replace("``", "`")
    paragraphs, lines = [], []
    for block in re.split(r"\n\n+", text):
        title, _, body = block.partition("\n")
        if title not in SECTIONS:
            paragraphs.append(block if "\n " in block else " ".join(block.split()))
            continue
        for entry in textwrap.dedent(body).replace("\n    ", " ").splitlines():
            named = title != "Returns:" and re.sub(r"^[\w., ]+(?=: )", as_code, entry)
            lines.append(f"- {SECTIONS[title]}{named or entry}")
    return "\n\n".join([*paragraphs, *(["\n".join(lines)] if lines else [])]) + "\n"


def as_code(names: re.Match[str]) -> str:
    """Names with commas, each as code."""
    return ", ".join(f"`{name}`" for name in names[0].split(", "))


if __name__ == "__main__":
    atomic_files.write(PAGE, page().encode())
