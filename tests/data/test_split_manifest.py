"""split.json: it reads back as written, and every change is detected."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privssl.data import split_manifest as manifests
from privssl.data.datasets import checksum, load_dataset
from privssl.data.split_manifest import AgentRows, Manifest, read_manifest
from privssl.errors import DataError
from privssl.settings.schema import DataSettings


def example(**changes: Any) -> Manifest:
    parts: dict[str, Any] = {
        "dataset": "toy",
        "checksum": "ab" * 32,
        "rows": 40,
        "seed": 7,
        "settings": {"partition": "dirichlet", "alpha": 0.5, "k": None, "stratified": True},
        "agents": {
            "s0": AgentRows((1, 2), ()),
            "q0": AgentRows((), (3, 5, 8)),
            "m0": AgentRows((9,), (10,)),
        },
        "validation": (30, 31),
    }
    return Manifest(**{**parts, **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "split.json"


def test_a_manifest_reads_back_as_written(path: Path) -> None:
    example().write(path)
    again = read_manifest(path)
    assert again == example()
    assert again.hash == example().hash


def test_the_hash_is_the_sha256_of_all_other_fields_in_canonical_json(path: Path) -> None:
    example().write(path)
    found = json.loads(path.read_text())
    stated = found.pop("hash")
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    assert stated == hashlib.sha256(text.encode()).hexdigest() == example().hash


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset": "digits"},
        {"checksum": "cd" * 32},
        {"rows": 41},
        {"seed": 8},
        {"settings": {}},
        {"agents": {"s0": AgentRows((1, 2), ())}},
        {"validation": (30, 32)},
    ],
    ids=str,
)
def test_every_field_changes_the_hash(changes: dict[str, Any]) -> None:
    assert example(**changes).hash != example().hash


@given(where=st.integers(0, 2**16), digit=st.sampled_from(b"0123456789"))
def test_a_changed_digit_is_detected(
    tmp_path_factory: pytest.TempPathFactory, where: int, digit: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.json"
    example().write(path)
    content = bytearray(path.read_bytes())
    digits = [place for place, byte in enumerate(content) if byte in b"0123456789"]
    place = digits[where % len(digits)]
    unchanged = content[place] == digit
    content[place] = digit
    path.write_bytes(content)
    if unchanged:
        assert read_manifest(path) == example()  # the control: only changes are refused
    else:
        with pytest.raises(DataError):
            read_manifest(path)


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the file and give it a valid hash, like an attacker."""
    example().write(path)
    found = json.loads(path.read_text())
    del found["hash"]
    change(found)
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**found, "hash": hashlib.sha256(text.encode()).hexdigest()}))


def test_the_forger_of_these_tests_writes_valid_hashes(path: Path) -> None:
    forge(path, lambda found: found.update(seed=8))
    assert read_manifest(path) == example(seed=8)


@pytest.mark.parametrize(
    ("agent", "kind", "rows", "said"),
    [
        ("q0", "unlabelled", [3, 2], "the row 2 is held by q0 and by s0"),
        ("m0", "unlabelled", [9], "the row 9 is held by m0 and by m0"),
        ("q0", "unlabelled", [5, 5], "the row 5 is held by q0 and by q0"),
        ("s0", "labelled", [31], "the row 31 is held by validation and by s0"),
        ("s0", "labelled", [40], "s0 holds the row 40, but the data set has rows 0 to 39"),
        ("s0", "labelled", [-1], "agents.s0.labelled.0: Input should be greater than or equal"),
        ("s0", "labelled", [True], "agents.s0.labelled.0: Input should be a valid integer"),
        ("s0", "labelled", [1.5], "agents.s0.labelled.0: Input should be a valid integer"),
        ("s0", "labelled", ["1"], "agents.s0.labelled.0: Input should be a valid integer"),
        ("s0", "path", ["/etc/passwd"], "agents.s0.path: Unexpected keyword argument"),
    ],
)
def test_invalid_rows_are_refused_even_with_a_valid_hash(
    path: Path, agent: str, kind: str, rows: list[Any], said: str
) -> None:
    forge(path, lambda found: found["agents"][agent].update({kind: rows}))
    with pytest.raises(DataError, match=said) as refusal:
        read_manifest(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not a split.json"),
        ("[]", "not a JSON object"),
        ("{}", "its schema is None"),
        ('{"seed": 1, "seed": 2}', "a key is given twice"),
        ('{"seed": NaN}', "NaN is not a number"),
        ("[" * 100_000, "is not a split.json"),
        ('{"seed": ' + "9" * 5000 + "}", "is not a split.json"),
        ('{"schema": "privssl/split/2"}', "its schema is privssl/split/2"),
        ('{"schema": "privssl/split/1"}', "Field required"),
        (b"\xff\xfe\xfa", "is not a split.json"),
    ],
    ids=lambda content: repr(content)[:30],
)
def test_files_other_than_manifests_are_refused(
    path: Path, content: str | bytes, said: str
) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=said) as refusal:
        read_manifest(path)
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


def test_a_manifest_without_its_hash_or_its_schema_is_refused(path: Path) -> None:
    for key in ("hash", "schema"):
        example().write(path)
        found = json.loads(path.read_text())
        del found[key]
        path.write_text(json.dumps(found))
        with pytest.raises(DataError, match=key):
            read_manifest(path)


def test_reading_stops_at_a_size_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example().write(path)
    monkeypatch.setattr(manifests, "MAX_BYTES", path.stat().st_size)
    assert read_manifest(path) == example()
    monkeypatch.setattr(manifests, "MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(DataError, match="more than"):
        read_manifest(path)


def test_a_file_that_is_missing_or_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_manifest(tmp_path / "absent.json")
    with pytest.raises(DataError, match="cannot be written"):
        example().write(tmp_path / "no folder" / "split.json")


def test_a_split_of_other_data_is_refused() -> None:
    toy = load_dataset(DataSettings(name="toy"))
    theirs = checksum(toy)
    example(checksum=theirs, rows=1000).check(toy, theirs)
    with pytest.raises(DataError, match=r"1000 other ones\. Use the same data"):
        example(rows=1000).check(toy, theirs)
    with pytest.raises(DataError, match="40 training rows"):
        example(checksum=theirs).check(toy, theirs)


def test_the_error_on_a_split_of_other_data_contains_no_checksum() -> None:
    toy = load_dataset(DataSettings(name="toy"))
    theirs, split = checksum(toy), example(rows=1000)
    with pytest.raises(DataError) as error:
        split.check(toy, theirs)
    assert not re.search("[0-9a-f]{8}", str(error.value))
    assert re.search("[0-9a-f]{8}", theirs) and re.search("[0-9a-f]{8}", split.checksum)
