"""Error messages about configs: the requirement, the given value, and advice.

pydantic reports an invalid value; the JSON schema of its dataclass gives the requirement, as in
``needs a whole number >= 1, got 0``.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from privssl.runtime import plugins
from privssl.settings.yaml_reader import ConfigProblem, ExponentText, as_yaml_number

_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "object": "keys with values",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_KEY_WIDTH = 22  # least width of the column of keys


def problem_report(path: Path, findings: Sequence[ConfigProblem]) -> str:
    """Format all problems under one heading: those of the file by line, then those of the
    arguments."""
    ordered = sorted(findings, key=lambda f: (f.line is None, f.line or 0))
    positions = [_format_place(finding.line) for finding in ordered]
    position_width = max(map(len, positions))
    key_width = max(_KEY_WIDTH, *(len(finding.key) for finding in ordered))
    count = f"{len(ordered)} problem{'s' if len(ordered) > 1 else ''}"
    rows = [
        f"  {position:<{position_width}}  {finding.key:<{key_width}}  {finding.text}"
        for position, finding in zip(positions, ordered, strict=True)
    ]
    return "\n".join([f"{path}: {count}", *rows])


def _format_place(line: int | None) -> str:
    if line is None:
        return "argument"
    return f"line {line}" if line else "file"


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """Return the message for an unknown name, with the nearest known one or all of them.

    >>> unknown("key", "epsilonn", ["delta", "epsilon"])
    'unknown key. Did you mean epsilon?'
    """
    similar = nearest(name, known)
    return f"unknown {what}. " + (
        f"Did you mean {similar}?" if similar else f"Known: {either(known)}"
    )


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the most similar known name, ignoring case; None if none is similar.

    >>> nearest("MNIST", ["digits", "mnist"])
    'mnist'
    """
    folded = {candidate.casefold(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.casefold(), folded, n=1)
    return folded[matches[0]] if matches else None


def as_reference(name: str) -> str | None:
    """Return ``package.module:Name`` for a name with a dot in place of the colon; None without a
    dot.

    >>> as_reference("mine.method.Mine"), as_reference("mine")
    ('mine.method:Mine', None)
    """
    module, dot, last = name.rpartition(".")
    reference = f"{module}:{last}"
    return reference if dot and plugins.is_reference(reference) else None


def either(names: Sequence[str]) -> str:
    """Join names with commas and "or".

    >>> either(["F", "G", "D"])
    'F, G or D'
    """
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def show(value: object) -> str:
    """Format a value as in YAML, shortened; text in quotes, unprintable characters escaped."""
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(v if isinstance(v, str) else show(v) for v in value)}]"[:60]
    if isinstance(value, dict):
        return f"keys ({', '.join(map(str, value))})"[:60]
    return repr(value)[:60]


def describe_errors(
    error: ValidationError, kind: type[Any], values: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each field that pydantic refused; an empty key is the section.

    ``error``: raised by ``kind(**values)``.
    """
    schema = TypeAdapter(kind).json_schema()["properties"]
    reported = set()
    for detail in error.errors():
        if detail["type"] == "value_error":  # raised by a validator of the dataclass
            yield ".".join(map(str, detail["loc"])), str(detail["ctx"]["error"])
            continue
        # The options of a union and the items of a list are reported once, as their field.
        key = str(detail["loc"][0])
        if key in reported:
            continue
        reported.add(key)
        if key not in values:
            yield key, f"missing: needs {describe_needed(schema[key])}"
        else:
            yield key, _explain_refusal(values[key], schema[key])


def read_exponents(kind: type[Any], values: Mapping[str, object]) -> dict[str, object]:
    """Return the values of a section, with 1e-3 as a number if the type of its key is numeric."""

    def read(value: object, schema: Mapping[str, Any]) -> object:
        options = schema.get("anyOf", [schema])
        if isinstance(value, dict):  # the values of a mapping have no type
            return {key: read(item, {"type": "number"}) for key, item in value.items()}
        if isinstance(value, tuple):
            items: Mapping[str, Any] = next(
                (option["items"] for option in options if "items" in option), {}
            )
            return tuple(read(item, items) for item in value)
        if not isinstance(value, ExponentText):
            return value
        free = [option for option in options if not {"const", "enum"} & option.keys()]
        types = {option.get("type") for option in free}  # a fixed text is no number
        return float(value) if "number" in types and "string" not in types else str(value)

    if not any(map(_has_exponent, values.values())):
        return dict(values)  # most sections: building a schema takes milliseconds
    schema = TypeAdapter(kind).json_schema()["properties"]
    return {key: read(value, schema[key]) for key, value in values.items()}


def _has_exponent(value: object) -> bool:
    if isinstance(value, dict | tuple):
        return any(map(_has_exponent, value.values() if isinstance(value, dict) else value))
    return isinstance(value, ExponentText)


def _explain_refusal(value: object, schema: Mapping[str, Any]) -> str:
    needed = describe_needed(schema)
    number = as_yaml_number(value) if isinstance(value, str) else None
    if number is not None and "whole number" in needed and float(number).is_integer():
        number = f"{float(number):.0f}"
    if number is not None and "number" in needed:
        return f"'{value}' is text to YAML. Write {number}"
    text = f"needs {needed}, got {show(value)}"
    if value is None and needed == "text":
        return f"{text}. Write '' for none"
    if isinstance(value, int | float) and schema.get("type") == "string":
        return f"{text}. Put it in quotes"
    if value in schema.get("items", {}).get("enum", []):
        return f"{text}. Write [{value}]"
    similar = nearest(str(value), _list_names(schema))
    if "plugins" in schema and isinstance(value, str):
        similar = as_reference(value) or similar
    return f"{text}. Did you mean {similar}?" if similar else text


def _list_names(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield all names of a JSON schema, at any depth of its alternatives, and those of plug-ins."""
    yield from schema.get("enum", [])
    if "plugins" in schema:
        yield from plugins.entry_points(schema["plugins"])
    for option in schema.get("anyOf", []):
        yield from _list_names(option)


def describe_needed(schema: Mapping[str, Any], mark: str = "") -> str:
    """Describe what a JSON schema accepts, as the object of "needs"; ``mark`` is around names."""
    if "anyOf" in schema:
        return " or ".join(describe_needed(option, mark) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        names = schema.get("enum", [schema.get("const")])
        return either([f"{mark}{name}{mark}" for name in names])
    if "pattern" in schema:  # a pattern is not readable
        return str(schema["description"]).replace("`", mark)
    if schema.get("type") == "array":
        return f"a list of {describe_needed(schema.get('items', {}), mark)}"
    bounds = [
        f"{sign} {_convert_bound(schema[name])}" for name, sign in _BOUNDS.items() if name in schema
    ]
    return " ".join(
        [_TYPES.get(schema.get("type", ""), "another value"), " and ".join(bounds)]
    ).strip()


def _convert_bound(number: float) -> float:
    """Return a bound; pydantic before 2.8 has 0.0 for the bound 0 of a float."""
    return int(number) if float(number).is_integer() else number
