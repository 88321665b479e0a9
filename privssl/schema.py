"""``python -m privssl.schema [--output FILE]``: a JSON schema of the config, for editors.

It knows every key, its type, range and meaning, and the keys of each algorithm. What depends on
several keys is checked by ``privssl.train --dry-run``.
Exit status: 0 written, 2 the user's mistake, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from privssl.errors import UserError
from privssl.runtime import plugins
from privssl.runtime.command import run_command
from privssl.runtime.console import results_to_standard_output

DRAFT = "http://json-schema.org/draft-07/schema#"  # what editors of YAML understand


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m privssl.schema",
        description="Write a JSON schema of the config, with which editors complete and check it.",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="absent: standard output")
    options = parser.parse_args(argv)
    return run_command(partial(_write, options.output), json=True, interrupted="Interrupted.")


def _write(output: Path | None, console: Console, _: ExitStack) -> int:
    import json

    from privssl.storage import atomic_files

    text = json.dumps(config_schema(), indent=2) + "\n"
    if output is None:
        results_to_standard_output(text.removesuffix("\n"))
        return 0
    with atomic_files.writing(output):
        if output.exists() and DRAFT.encode() not in output.read_bytes()[:1000]:
            raise UserError(f"{output} exists and is no JSON schema. Choose another --output")
        atomic_files.write(output, text)
    console.print(f"{output}. First line of a config in its folder:", markup=False)
    console.print(f"# yaml-language-server: $schema={output.name}", markup=False)
    return 0


def config_schema() -> dict[str, Any]:
    """The schema of a config file, draft 7."""
    from privssl.algorithms import ALGORITHMS
    from privssl.settings.section_builder import ORDER, SECTIONS

    sections = {name: _section(SECTIONS[name]) for name in ORDER if name in SECTIONS}
    kinds = dict(ALGORITHMS)
    with plugins.imports_allowed():  # what somebody installed as a plug-in
        kinds |= {name: ALGORITHMS[name] for name in plugins.entry_points("algorithms")}
    methods = {name: _section(kind.Config) for name, kind in kinds.items()}
    for name, method in methods.items():
        method["properties"]["name"] = {"const": name}
    reference = {"type": "string", "pattern": plugins.REFERENCE}
    named = {
        "anyOf": [{"enum": list(methods)}, reference],
        "description": "The method; its keys follow.",
    }
    algorithm = {
        "description": "The method and its settings.",
        "type": "object",
        "properties": {"name": named},
        "required": ["name"],
        # Not oneOf: an editor then says which key is wrong, and not that no method fits.
        "allOf": [
            {
                "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
                "then": {"$ref": f"#/definitions/{name}"},
            }
            for name in methods
        ],
    }
    for section in sections.values():
        section["type"] = ["object", "null"]  # nothing written: the defaults; privacy: null
    return {
        "$schema": DRAFT,
        "title": "Config of privssl",
        "type": "object",
        "properties": {name: sections.get(name, algorithm) for name in ORDER},
        "required": ["algorithm"],
        "additionalProperties": False,
        "definitions": methods,
    }


def _section(kind: type[Any]) -> dict[str, Any]:
    """The schema of a section, with the meaning of its keys from the code."""
    from pydantic import TypeAdapter

    from privssl.settings.descriptions import descriptions

    schema, texts = TypeAdapter(kind).json_schema(), descriptions(kind)
    schema["description"] = " ".join(schema["description"].split()).replace("``", "`")
    for name, key in schema["properties"].items():
        key.pop("title", None)
        if texts[name]:
            key["description"] = texts[name]
        _add_plugins(key)
    return schema


def _add_plugins(key: dict[str, Any]) -> None:
    """The names of installed plug-ins beside those of privssl, at any depth of a key's rule."""
    kind = key.pop("plugins", None)
    if kind is not None:
        key["anyOf"][0]["enum"] += sorted(plugins.entry_points(kind))
    for part in (*key.get("anyOf", ()), *([key["items"]] if "items" in key else ())):
        _add_plugins(part)


if __name__ == "__main__":
    sys.exit(main())
