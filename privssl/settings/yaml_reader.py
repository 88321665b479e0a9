"""Read YAML as plain values with line numbers, and refuse what is unsafe or surprising.

Configs may be untrusted: aliases, anchors and tags are refused, and nesting and size are limited.
Silent conversions of YAML 1.1 (``on``, ``010``, ``1:30``, ``2024-01-01``, duplicate keys) are
reported with their line. Source of the rules: yaml.org/type, PyYAML's resolver.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import yaml

MAX_BYTES = 2**20
MAX_DEPTH = 8  # a config needs 3: section, key, list item

_PLAIN_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_PLAIN_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?|[-+]?\.inf|\.nan", re.I)
#: YAML 1.1 requires a dot and a sign in the exponent; YAML 1.2 and users do not.
_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
_TAG = "tag:yaml.org,2002:"
#: Advice for PyYAML's problems, by their beginnings.
_ADVICE = {
    "found character '\\t'": "Indent with spaces, not with tabs",
    "found character": "Put the text in quotes",
    "mapping values are not": "Begin the keys of a section in one column; quote text with a colon",
    "expected <block end>": "Begin the keys of a section in one column",
    "expected ',' or": "Close the bracket, and separate values by commas",
    "could not find expected ':'": "Write key: value",
    "but found another document": "Leave out the line of three dashes",
    "found unexpected end of stream": "Close the quotes",
}  # fmt: skip


class ConfigProblem(NamedTuple):
    """One problem. ``line`` counts from 1; 0: not in the file; None: an argument."""

    line: int | None
    key: str
    text: str


class ExponentText(str):
    """An unquoted 1e-3: a number where the key's type is one, else text."""

    __slots__ = ()


class YamlError(Exception):
    """The text is not plain YAML. ``line`` counts from 1."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


@dataclass(frozen=True)
class Document:
    """The content of a YAML text.

    ``value`` has dicts, tuples, str, int, float, bool and None; ``lines`` the line of every dotted
    key; ``problems`` the invalid values; ``empty`` the keys without a value, not even null.
    """

    value: object
    lines: Mapping[str, int]
    problems: tuple[ConfigProblem, ...]
    empty: frozenset[str]


class _PlainComposer(yaml.SafeLoader):
    """Composes nodes; refuses sharing, tags and deep nesting before it descends."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        refusal = None
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            refusal = "anchors (&) and aliases (*) are not read. Write the value out"
        elif getattr(event, "tag", None):
            refusal = f"the tag {event.tag} is not read. Leave it out"
        elif self._depth >= MAX_DEPTH:
            refusal = f"nested deeper than {MAX_DEPTH} levels"
        if refusal:
            raise yaml.composer.ComposerError(None, None, refusal, event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def read_document(text: str) -> Document:
    """Read the plain values of a YAML text.

    Raises:
        YamlError: not YAML, too long, or with aliases, tags or deep nesting.
    """
    if len(text) > MAX_BYTES:
        raise YamlError(1, f"longer than {MAX_BYTES} characters")
    try:
        root = _compose_root(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(mark.line + 1 if mark else 1, _add_advice(str(error.problem))) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(line, f"character {error.character:#x} is not text") from None
    reader = _Reader()
    value = None if root is None else reader.plain(root, "")
    return Document(value, reader.lines, tuple(reader.findings), frozenset(reader.empty))


def _compose_root(text: str) -> yaml.Node | None:
    root: yaml.Node | None = _PlainComposer(text).get_single_node()
    return root


def _add_advice(problem: str) -> str:
    return next(
        (f"{problem}. {advice}" for beginning, advice in _ADVICE.items() if beginning in problem),
        problem,
    )


class _Reader:
    """Converts nodes to plain values and records their lines."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.findings: list[ConfigProblem] = []
        self.empty: set[str] = set()

    def plain(self, node: yaml.Node, key: str) -> object:
        if isinstance(node, yaml.SequenceNode):
            return tuple(self.plain(item, key) for item in node.value)
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, key)
        if not node.value and node.tag == f"{_TAG}null":
            self.empty.add(key)
        try:
            value = scalar(node.value, node.tag.removeprefix(_TAG))
            unquoted = getattr(node, "style", None) is None  # not quoted
            if unquoted and isinstance(value, str) and _EXPONENT.fullmatch(value):
                return ExponentText(value)
            return value
        except ValueError as error:
            self.findings.append(ConfigProblem(node.start_mark.line + 1, key, str(error)))
            return None

    def _read_mapping(self, node: yaml.MappingNode, key: str) -> dict[str, object]:
        result: dict[str, object] = {}
        for name_node, item in node.value:
            line = name_node.start_mark.line + 1
            if not isinstance(name_node, yaml.ScalarNode):
                text = "a list or a mapping cannot be a key"
                self.findings.append(ConfigProblem(line, key, text))
                continue
            name = name_node.value
            dotted = f"{key}.{name}" if key else name
            if name in result:
                text = f"given twice: first on line {self.lines[dotted]}"
                self.findings.append(ConfigProblem(line, dotted, text))
                continue
            self.lines[dotted] = line
            result[name] = self.plain(item, dotted)
        return result


def scalar(text: str, kind: str) -> str | int | float | bool | None:
    """Convert one scalar that YAML resolved to ``kind`` (null, bool, int, float, str ...).

    Raises:
        ValueError: YAML reads it as something unintended.

    >>> scalar("0.5", "float"), scalar("on", "str")
    (0.5, 'on')
    """
    if kind == "str":
        return text
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind == "bool":
        raise ValueError(f"'{text}' is true or false to YAML. Write that, or put it in quotes")
    if kind == "int" and _PLAIN_INT.fullmatch(text) and len(text) <= 100:
        return int(text)
    if kind == "float" and _PLAIN_FLOAT.fullmatch(text):
        # Special values begin with a dot, which Python does not accept.
        return float(re.sub(r"\.(?=[a-z])", "", text.lower()))
    if kind in ("int", "float"):
        raise ValueError(
            f"'{text[:40]}' is a number to YAML, but in another base or with _ or : inside. "
            "Write plain decimal digits, or put it in quotes to mean text"
        )
    raise ValueError(f"'{text[:40]}' is a {kind} to YAML. Put it in quotes to mean text")


def as_yaml_number(text: str) -> str | None:
    """Convert a number that is text in YAML 1.1 to the form that YAML reads as a number.

    >>> as_yaml_number("1e-5"), as_yaml_number("1e5"), as_yaml_number("5"), as_yaml_number("x")
    ('1.0e-5', '1.0e+5', '5', None)
    """
    match = re.fullmatch(r"([-+]?[0-9]+)(\.[0-9]*)?(?:[eE]([-+]?)([0-9]+))?", text.strip())
    if match is None:
        return None
    integer, fraction, sign, exponent = match.groups()
    if exponent is None:
        return f"{integer}{fraction or ''}"
    return f"{integer}{fraction or '.0'}e{sign or '+'}{exponent}"
