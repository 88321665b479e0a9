"""Build the sections of a config from a file and arguments, collecting all problems.

An invalid value is recorded instead of raised; checks that access it later stop silently.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from privssl.errors import ConfigError
from privssl.runtime import plugins
from privssl.settings import yaml_reader
from privssl.settings.error_messages import (
    as_reference,
    describe_errors,
    either,
    nearest,
    problem_report,
    read_exponents,
    show,
    unknown,
)
from privssl.settings.names import ALGORITHMS
from privssl.settings.own_config import check_own_config
from privssl.settings.schema import (
    AgentSettings,
    DataSettings,
    ModelSettings,
    PrivacySettings,
    Problem,
    RunSettings,
)
from privssl.settings.yaml_reader import ConfigProblem, YamlError

SECTIONS: Mapping[str, type[Any]] = {
    "run": RunSettings,
    "data": DataSettings,
    "agents": AgentSettings,
    "model": ModelSettings,
    "privacy": PrivacySettings,
}
ORDER = ("run", "data", "agents", "model", "algorithm", "privacy")


class ConfigBuilder:
    """The values of the file and the arguments, their positions, and the problems so far."""

    sections: ClassVar[Mapping[str, type[Any]]] = SECTIONS
    order: ClassVar[Sequence[str]] = ORDER
    #: The section that may be null, and advice if it is empty.
    null: ClassVar[tuple[str, str]] = (
        "privacy", "Give epsilon, or write privacy: null for no privacy",
    )  # fmt: skip

    def __init__(self, path: Path, algorithms: Mapping[str, type[Any]]) -> None:
        self._path = path
        self._algorithms = algorithms
        self._values: dict[str, Any] = {}  # section -> key -> value
        self._empty: set[str] = set()  # keys without a value
        self._places: dict[str, int | None] = {}
        self.findings: list[ConfigProblem] = []
        self.bad: set[str] = set()  # dotted keys whose value must not be used

    def add(self, key: str, text: str) -> None:
        """Record a problem of a key, at the line of the key or else its section."""
        section = key.partition(".")[0]
        line = self._places.get(key, self._places.get(section, 0))
        self._add(ConfigProblem(line, key, text))

    def _add(self, finding: ConfigProblem) -> None:
        self.findings.append(finding)
        self.bad.add(finding.key)

    def read_file(self, text: str | None = None) -> None:
        """Read the file, or instead a given text. Raises ConfigError if it is not YAML."""
        text = _read_text(self._path) if text is None else text
        try:
            document = yaml_reader.read_document(text)
        except YamlError as error:
            finding = ConfigProblem(error.line, "", f"not a config: {error}")
            raise ConfigError(problem_report(self._path, [finding])) from None
        self._places.update(document.lines)
        for finding in document.problems:
            self._add(finding)
        if isinstance(document.value, dict):
            self._values = document.value
        elif document.value is not None:
            self._add(
                ConfigProblem(1, "", f"needs sections ({', '.join(self.order)}), not one value")
            )
        for name in [name for name in self._values if name not in self.order]:
            key_of = self._suggest_sections(name)
            self.add(
                name, f"unknown section{key_of}" if key_of else unknown("section", name, self.order)
            )
        self._empty = set(document.empty)

    def leave_out(self, former: Mapping[str, Mapping[str, Any]]) -> None:
        """Drop keys of earlier versions (by section) that have these default values."""
        for section, defaults in former.items():
            entries = self._values.get(section)
            if isinstance(entries, dict):
                kept = {k: v for k, v in entries.items() if k not in defaults or defaults[k] != v}
                self._values[section] = kept

    def value(self, key: str) -> Any:
        """Return the unchecked value of section.key; None if not given."""
        section, _, name = key.partition(".")
        entries = self._values.get(section)
        return entries.get(name) if isinstance(entries, dict) else None

    def override(self, argument: str) -> None:
        """Apply one ``section.key=value``."""
        key, equals, text = argument.partition("=")
        section, dot, name = key.partition(".")
        if not equals or section not in ORDER:
            complete = equals and dot  # otherwise seed=1 would be reported as an unknown section
            text = unknown("section", section, ORDER) if complete else "write section.key=value"
            self._add(ConfigProblem(None, key, text + self._suggest_sections(key)))
            return
        if key in self._places and self._places[key] is None:
            self._add(ConfigProblem(None, key, "given twice among the arguments"))
            return
        try:
            document = yaml_reader.read_document(text)
        except YamlError as error:
            self._add(ConfigProblem(None, key, f"{text!r} cannot be read: {error}"))
            return
        self._drop_key(key)
        for finding in document.problems:
            self._add(ConfigProblem(None, key, finding.text))
        previous = self._values.get(section)
        if dot and (previous is None or isinstance(previous, dict)):
            self._values[section] = {**(previous or {}), name: document.value}
            self._places.setdefault(section, None)
        elif key == "privacy" and document.value is None and text.strip():
            self._values["privacy"] = None
        elif not dot:
            self._add(ConfigProblem(None, key, f"is a section. Write {key}.key=value"))

    def _suggest_sections(self, key: str) -> str:
        """Return a question with the full names of a key that has no section; without any, ""."""
        name = self.value("algorithm.name")
        method = self._algorithms.get(name) if name in ALGORITHMS else None
        kinds = {"algorithm": getattr(method, "Config", None), **self.sections}
        full_names = [
            f"{section}.{key}" for section in self.order
            if (kind := kinds[section]) is not None
            and key in [spec.name for spec in dataclasses.fields(kind)]
        ]  # fmt: skip
        return f". Did you mean {either(full_names)}?" if full_names else ""

    def _drop_key(self, key: str) -> None:
        """Drop the file's values at a key and below, with their problems."""
        self._places[key] = None
        self._empty.discard(key)
        prefix = f"{key}."
        self.findings = [f for f in self.findings if f.key != key and not f.key.startswith(prefix)]
        self.bad = {k for k in self.bad if k != key and not k.startswith(prefix)}

    def given(self, name: str) -> bool:
        """Return whether the file or an argument has a section, even null."""
        return name in self._values

    def section(self, name: str) -> Any:
        """Return the section as its dataclass; accessing an invalid value raises UnusableValue."""
        entries = self._values.get(name)
        if name == self.null[0] and entries is None:
            if name in self._empty:
                # Its keys may all be commented out, which must not silently mean "not private".
                self.add(name, f"empty. {self.null[1]}")
            return None
        if entries is not None and not isinstance(entries, dict):
            self.add(name, f"needs keys with values, got {show(entries)}")
            return None
        kind = self.sections.get(name) or self._find_config_class(entries or {})
        if kind is None:
            self.bad.add(name)
            return None
        return self._build_section(name, kind, entries or {})

    def _find_config_class(self, entries: Mapping[str, Any]) -> type[Any] | None:
        """Return the Config class of the named algorithm, or None after recording a problem."""
        name = entries.get("name")
        if isinstance(name, str) and name in self._algorithms:
            try:
                algorithm = self._algorithms[name]
                if name not in ALGORITHMS:
                    check_own_config(name, algorithm)
            except ConfigError as error:  # a plug-in that cannot be imported
                self.add("algorithm.name", str(error).removeprefix("algorithm.name "))
                return None
            kind: type[Any] | None = algorithm.Config
            if kind is not None:
                return kind
            return dataclasses.make_dataclass(
                "Unread", [(key, Any) for key in entries], frozen=True
            )
        if "algorithm.name" not in self.bad:
            known = [*self._algorithms, *plugins.entry_points("algorithms")]
            text = f"missing: needs {either(known)}"
            if isinstance(name, str) and (reference := as_reference(name)):
                text = f"unknown algorithm. Did you mean {reference}?"
            elif isinstance(name, str):
                text = unknown("algorithm", name, known)
                text += f"{'' if text.endswith('?') else '.'} Your own is package.module:Name"
            self.add("algorithm.name", text)
        return None

    def _build_section(self, section: str, kind: type[Any], entries: Mapping[str, Any]) -> Any:
        prefix = f"{section}."
        known = [spec.name for spec in dataclasses.fields(kind)]
        for name in (name for name in entries if name not in known):
            self.add(prefix + name, self._explain_unknown_key(section, name, known))
            # Otherwise the intended key would seem to be missing, or to have its default.
            similar = nearest(name, known)
            self.bad |= {prefix + similar} if similar and similar not in entries else set()
        for name, value in entries.items():
            if isinstance(value, str) and not value.isprintable():
                self.add(prefix + name, f"{show(value)} has characters that cannot be printed")
        values = {n: entries[n] for n in known if n in entries and prefix + n not in self.bad}
        values = read_exponents(kind, values)
        try:
            result = kind(**values)
        except ValidationError as error:
            result = None
            for key, text in describe_errors(error, kind, values):
                dotted = prefix + key if key else section
                if dotted not in self.bad:
                    self.add(dotted, text)
        bad = {key.removeprefix(prefix) for key in self.bad if key.startswith(prefix)}
        if result is None or bad:
            result = unless_bad(kind, _defaults_of(kind) | values, bad)
        if section not in self.bad:
            self.check(prefix, getattr(result, "problems", tuple)())
        return result

    def _explain_unknown_key(self, section: str, name: str, known: list[str]) -> str:
        line = self._places.get("algorithm.name", 0)
        if section == "algorithm" and line is None and self._places.get(f"{section}.{name}"):
            other = self._values[section]["name"]  # given by an argument; the file is for another
            return f"{other} has no such key. Remove it, or start from a config of {other}"
        return unknown("key", name, known)

    def check(self, prefix: str, problems: Iterable[Problem]) -> None:
        """Record the problems of a check, until it accesses an invalid value."""
        with suppress(UnusableValue):
            for key, text in problems:
                self.add(prefix + key, text)


class UnusableValue(Exception):  # noqa: N818  (a signal between a check and its caller)
    """Raised if a check accesses an invalid value."""


def unless_bad(kind: type[Any], values: Mapping[str, Any], bad: set[str]) -> Any:
    """Return a ``kind`` with these values; accessing a bad one raises UnusableValue."""

    def guard(self: Any, name: str) -> Any:
        if name in bad:
            raise UnusableValue(name)
        return object.__getattribute__(self, name)

    guarded = type(kind.__name__, (kind,), {"__getattribute__": guard}) if bad else kind
    result: Any = object.__new__(guarded)
    object.__getattribute__(result, "__dict__").update(values)
    return result


def _defaults_of(kind: type[Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for spec in dataclasses.fields(kind):
        if spec.default is not dataclasses.MISSING:
            defaults[spec.name] = spec.default
        elif spec.default_factory is not dataclasses.MISSING:
            defaults[spec.name] = spec.default_factory()
    return defaults


def _read_text(path: Path) -> str:
    """Read a config file. Raises ConfigError, with similar file names."""
    try:
        with path.open("rb") as file:
            data = file.read(yaml_reader.MAX_BYTES + 1)
        if len(data) > yaml_reader.MAX_BYTES:
            raise ConfigError(f"{path}: larger than 1 MiB, so this is no config file")
        return data.decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path}: no such file. {_suggest_files(path)}") from None
    except IsADirectoryError:
        text = f"{path}: a folder, not a config file. {_suggest_files(path / 'any')}"
        raise ConfigError(text) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte {error.start}). Save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{show(str(path))}: cannot be read: {reason}") from None


def _suggest_files(path: Path) -> str:
    """Return a sentence with the config files in the folder of a missing file."""
    if not path.parent.is_dir():
        return f"There is no folder {path.parent}"
    files = sorted(file.name for file in path.parent.glob("*.y*ml"))
    similar = difflib.get_close_matches(path.name, files, n=3, cutoff=0.5)
    if similar:
        return f"Did you mean {either([str(path.parent / name) for name in similar])}?"
    return f"In {path.parent} there is {', '.join(files[:10]) or 'no YAML file'}"
