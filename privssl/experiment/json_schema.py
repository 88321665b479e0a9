"""The JSON schema of a config: every key with its type, range and meaning, for editors."""

from typing import Any

from pydantic import TypeAdapter

from privssl.algorithms import ALGORITHMS
from privssl.runtime import plugins
from privssl.settings.descriptions import descriptions
from privssl.settings.section_builder import ORDER, SECTIONS

DRAFT = "http://json-schema.org/draft-07/schema#"  # the version that YAML editors support


def config_schema() -> dict[str, Any]:
    """Return the schema of a config file, draft 7."""
    sections = {name: _build_section(SECTIONS[name]) for name in ORDER if name in SECTIONS}
    algorithms = dict(ALGORITHMS)
    with plugins.imports_allowed():  # include installed plug-ins
        algorithms |= {name: ALGORITHMS[name] for name in plugins.entry_points("algorithms")}
    methods = {name: _build_section(kind.Config) for name, kind in algorithms.items()}
    for name, method in methods.items():
        method["properties"]["name"] = {"const": name}
    reference = {"type": "string", "pattern": plugins.REFERENCE}
    name_schema = {
        "anyOf": [{"enum": list(methods)}, reference],
        "description": "The method; its keys follow.",
    }
    algorithm = {
        "description": "The method and its settings.",
        "type": "object",
        "properties": {"name": name_schema},
        "required": ["name"],
        # Not oneOf: so an editor names the wrong key, instead of reporting that no method fits.
        "allOf": [
            {
                "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
                "then": {"$ref": f"#/definitions/{name}"},
            }
            for name in methods
        ],
    }
    for section in sections.values():
        section["type"] = ["object", "null"]  # an empty section: the defaults; privacy: null
    return {
        "$schema": DRAFT,
        "title": "Config of privssl",
        "type": "object",
        "properties": {name: sections.get(name, algorithm) for name in ORDER},
        "required": ["algorithm"],
        "additionalProperties": False,
        "definitions": methods,
    }


def _build_section(kind: type[Any]) -> dict[str, Any]:
    """Return the schema of a section, with the meaning of its keys from the code."""
    schema, texts = TypeAdapter(kind).json_schema(), descriptions(kind)
    schema["description"] = " ".join(schema["description"].split()).replace("``", "`")
    for name, key in schema["properties"].items():
        key.pop("title", None)
        if texts[name]:
            key["description"] = texts[name]
        _add_plugins(key)
    return schema


def _add_plugins(key: dict[str, Any]) -> None:
    """Add the names of installed plug-ins to those of privssl, at any depth of a key's schema."""
    kind = key.pop("plugins", None)
    if kind is not None:
        key["anyOf"][0]["enum"] += sorted(plugins.entry_points(kind))
    for part in (*key.get("anyOf", ()), *([key["items"]] if "items" in key else ())):
        _add_plugins(part)
