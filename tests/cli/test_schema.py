"""``privssl schema``: editors accept what privssl accepts, and report what it refuses."""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from privssl import schema
from privssl.algorithms import ALGORITHMS
from privssl.experiment.config import load_config, to_yaml
from privssl.experiment.json_schema import config_schema
from privssl.settings.schema import PrivacySettings
from privssl.settings.yaml_reader import ExponentText, read_document

ROOT = Path(__file__).parents[2]
CONFIGS = [
    path for path in sorted((ROOT / "configs").rglob("*.yaml"))
    if "algorithm:" in path.read_text(encoding="utf-8") and path.parent.name != "tables"
]  # fmt: skip
SCHEMA = config_schema()
KINDS: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list | tuple,
    "object": dict, "null": type(None),
}  # fmt: skip
#: Keywords without effect on validation.
ANNOTATIONS = {"$schema", "title", "description", "default", "definitions"}
BOUNDS = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
}


def problems(value: Any, rule: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Errors of a value under JSON schema draft 7, for the keywords used here."""
    assert "$ref" not in rule or len(rule) == 1, "draft 7 ignores what stands beside a $ref"
    keys = rule.get("properties", {})
    for word, limit in rule.items():
        match word:
            case "type":
                names = [limit] if isinstance(limit, str) else limit
                fits = any(isinstance(value, KINDS[name]) for name in names)
                if not fits or (isinstance(value, bool) and "boolean" not in names):
                    yield f"{at} is no {limit}"
            case "enum" | "const":
                if value not in (limit if word == "enum" else [limit]):
                    yield f"{at} is not {limit}"
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                if isinstance(value, int | float) and not BOUNDS[word](value, limit):
                    yield f"{at} {word} {limit}"
            case "pattern":
                if isinstance(value, str) and not re.search(limit, value):
                    yield f"{at} has not the form {limit}"
            case "properties" if isinstance(value, dict):
                for name in value.keys() & limit.keys():
                    yield from problems(value[name], limit[name], f"{at}.{name}")
            case "additionalProperties" if isinstance(value, dict) and limit is False:
                yield from (f"{at}.{name} is unknown" for name in sorted(value.keys() - keys))
            case "required" if isinstance(value, dict):
                yield from (f"{at}.{name} is missing" for name in limit if name not in value)
            case "items" if isinstance(value, list | tuple):
                for place, item in enumerate(value):
                    yield from problems(item, limit, f"{at}.{place}")
            case "anyOf":
                if all(list(problems(value, one)) for one in limit):
                    yield f"{at} is none of what is allowed"
            case "allOf":
                for one in limit:
                    yield from problems(value, one, at)
            case "if":
                if not list(problems(value, limit)):
                    yield from problems(value, rule["then"], at)
            case "$ref":
                yield from problems(value, SCHEMA["definitions"][limit.split("/")[-1]], at)
            case "properties" | "additionalProperties" | "required" | "items" | "then":
                pass
            case _:
                assert word in ANNOTATIONS, f"this test does not know the word {word}"


def as_json(value: Any) -> Any:
    """A document as an editor reads it: 1e-3 is a number."""
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return float(value) if isinstance(value, ExponentText) else value


def document(path: Path) -> Any:
    return as_json(read_document(path.read_text(encoding="utf-8")).value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_schema_accepts_every_shipped_config(path: Path) -> None:
    assert list(problems(document(path), SCHEMA)) == []


def test_the_shipped_configs_cover_every_algorithm() -> None:
    methods = {document(path)["algorithm"]["name"] for path in CONFIGS}
    assert len(CONFIGS) > 30 and methods == set(ALGORITHMS)


def test_the_schema_accepts_the_config_that_a_run_writes(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_config(ROOT / "configs" / "fedssl_dp.yaml")))
    assert list(problems(document(path), SCHEMA)) == []


@pytest.mark.parametrize(
    ("section", "key", "value", "error_text"),
    [
        ("algorithm", "roundz", 3, ".algorithm.roundz is unknown"),
        ("algorithm", "rounds", "three", ".algorithm.rounds is no integer"),
        ("algorithm", "rounds", 0, ".algorithm.rounds minimum 1"),
        ("algorithm", "rounds", True, ".algorithm.rounds is no integer"),
        ("algorithm", "name", "fedsll", ".algorithm.name is none of"),
        ("algorithm", "client_epochs", 2, ".algorithm.client_epochs is unknown"),  # of FedSEAL
        ("privacy", "epsilom", 2, ".privacy.epsilom is unknown"),
        ("privacy", "protect", ["H"], ".privacy.protect.0 is not"),
        ("privacy", "momentum", 1, ".privacy.momentum exclusiveMaximum 1"),
        ("model", "name", "smal_cnn", ".model.name is none of"),
        ("data", "partition", "idd", ".data.partition is none of"),
        ("runn", "seed", 0, ".runn is unknown"),
    ],
)
def test_the_schema_reports_a_mistake_at_its_key(
    section: str, key: str, value: Any, error_text: str
) -> None:
    config = copy.deepcopy(document(ROOT / "configs" / "fedssl_dp.yaml"))
    assert list(problems(config, SCHEMA)) == []
    config.setdefault(section, {})[key] = value
    [problem] = problems(config, SCHEMA)
    assert problem.startswith(error_text)


@pytest.mark.parametrize(
    ("key", "inside", "outside"),
    [
        ("epsilon", [0.0], [-0.1]),
        ("delta", [1e-12, 0.99], [0.0, 1.0]),
        ("noise_multiplier", [0.2, 1e4, None], [0.19, 10001.0]),
        ("clip_norm", [0.001, 1e6], [0.0009, 1000001.0]),
        ("sample_rate", [1e-6, 1.0], [0.0, 1.01]),
        ("learning_rate", [1e-9, 1000.0], [0.0, 1000.1]),
        ("momentum", [0.0, 0.99], [-0.01, 1.0]),
    ],
)
def test_the_schema_refuses_the_same_privacy_numbers_as_a_run(
    key: str, inside: list[float | None], outside: list[float]
) -> None:
    def errors_at(value: float | None) -> list[str]:
        return list(problems({"algorithm": {"name": "fedssl"}, "privacy": privacy(value)}, SCHEMA))

    def privacy(value: float | None) -> dict[str, Any]:
        return {"epsilon": 8.0, key: value}

    def is_refused(value: float | None) -> bool:
        try:
            return any(
                problem.key == key for problem in PrivacySettings(**privacy(value)).problems()
            )
        except ValidationError:
            return True

    assert [(v, errors_at(v), is_refused(v)) for v in inside] == [(v, [], False) for v in inside]
    for value in outside:
        assert [error_text.split()[0] for error_text in errors_at(value)] == [
            f".privacy.{key}"
        ] and is_refused(value)


def test_the_schema_requires_required_keys_and_allows_null_in_optional_ones() -> None:
    assert list(problems({}, SCHEMA)) == [".algorithm is missing"]
    assert list(problems({"algorithm": {}}, SCHEMA)) == [".algorithm.name is missing"]
    fine = {"algorithm": {"name": "fedavg"}, "run": None, "privacy": None}
    assert list(problems(fine, SCHEMA)) == []
    assert list(problems(fine | {"privacy": {}}, SCHEMA)) == [".privacy.epsilon is missing"]
    own = fine | {"model": {"name": "package.module:Net", "options": {"depth": 3}}}
    assert list(problems(own, SCHEMA)) == []


def test_every_key_of_the_schema_has_a_description() -> None:
    sections = {**SCHEMA["properties"], **SCHEMA["definitions"]}
    silent = [
        f"{section}.{key}"
        for section, rule in sections.items()
        for key, item in rule["properties"].items()
        if not item.get("description") and key != "name"
    ]
    assert silent == []


def test_the_command_prints_the_schema_or_writes_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert schema.main([]) == 0
    assert json.loads(capfd.readouterr().out) == SCHEMA
    path = tmp_path / "privssl.schema.json"
    for _ in range(2):  # another version may be written over it
        assert schema.main(["--output", str(path)]) == 0
        assert "# yaml-language-server: $schema=privssl.schema.json" in capfd.readouterr().err
    assert json.loads(path.read_text()) == SCHEMA
    (tmp_path / "mine.yaml").write_text("algorithm: {name: fedssl}\n")
    assert schema.main(["--output", str(tmp_path / "mine.yaml")]) == 2
    assert "exists and is no JSON schema" in capfd.readouterr().err
    assert (tmp_path / "mine.yaml").read_text() == "algorithm: {name: fedssl}\n"
    assert schema.main(["--output", str(tmp_path / "no" / "folder.json")]) == 2
