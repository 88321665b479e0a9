"""The Python of docs/extending.md and docs/own_networks_and_data.md, run by a test."""

import csv
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accounting.ledger import read_journal
from privssl.algorithms.base import Algorithm
from privssl.audit import __main__ as audit
from privssl.core import messages
from privssl.data import split_manifest
from tests.support import command_line

ROOT = Path(__file__).parents[2]
DOCS, PACKAGE = ROOT / "docs", ROOT / "examples" / "privssl_example"
METHOD, CHECK, PARTITION, PREDICTING = (
    block
    for page in ("extending.md", "own_networks_and_data.md")
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
)
CONFIG = """\
data: {name: toy, labelled: 40, unlabelled: 80}
agents: {support: 2, query: 2}
model: {name: small_cnn, width: 4}
algorithm: {name: 'privssl_example.method:FedOwn', rounds: 3, threshold: 0.15}
"""
PRIVACY = "privacy: {epsilon: 4.0, delta: 1.0e-3, sample_rate: 0.5, steps: 2}\n"


def imported(name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of this source."""
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def method(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Algorithm[Any]]]:
    """The class of the page, importable."""
    monkeypatch.syspath_prepend(PACKAGE)
    yield importlib.import_module("privssl_example.method").FedOwn
    for name in [name for name in sys.modules if name.startswith("privssl_example")]:
        del sys.modules[name]


def test_the_method_on_the_page_equals_that_of_the_example() -> None:
    assert (PACKAGE / "privssl_example" / "method.py").read_text() == METHOD


def test_the_check_on_the_page_accepts_the_method(
    method: type[Algorithm[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported("check_of_the_page", CHECK, tmp_path, monkeypatch)


def test_messages_of_the_page_can_be_decoded_by_the_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [block] = re.findall(r"```python\n(.*?)```", (DOCS / "method_rules.md").read_text(), re.DOTALL)
    sent = imported("rules_of_the_page", block, tmp_path, monkeypatch).update
    back = messages.deserialize(type(sent), messages.serialize(sent))
    assert back.steps == 0 and back.prototypes.equal(sent.prototypes)


def runs(folder: Path, text: str, *given: str) -> Path:
    folder.mkdir()
    (folder / "c.yaml").write_text(text)
    outcome = command_line.command(folder / "c.yaml", f"run.output={folder / 'run'}", *given)
    assert outcome.status == 0, outcome.err
    return folder / "run"


def test_the_method_on_the_page_learns_keeps_memory_and_is_the_same_in_workers(
    method: type[Algorithm[Any]], tmp_path: Path
) -> None:
    one = runs(tmp_path / "one", CONFIG, "run.workers=1")
    two = runs(tmp_path / "two", CONFIG, "run.workers=2")
    for name in ("metrics.csv", "classifier.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    forgets = runs(tmp_path / "forgets", CONFIG, "run.workers=1", "algorithm.decay=0.0")
    assert (one / "metrics.csv").read_bytes() != (forgets / "metrics.csv").read_bytes()


def test_its_private_form_charges_every_visit_and_its_audit_is_consistent(
    method: type[Algorithm[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs(tmp_path / "private", CONFIG + PRIVACY)
    visits = {p.stem: read_journal(p).visits for p in (run / "ledger").glob("*.jsonl")}
    assert {name: len(each) for name, each in visits.items()} == {"s0": 3, "s1": 3}
    assert audit.main([str(run), "--plugin", "privssl_example.method:FedOwn"]) == 0
    capsys.readouterr()


def test_query_agents_of_its_private_form_have_their_settings_and_learn_after_the_last_visit(
    method: type[Algorithm[Any]], tmp_path: Path
) -> None:
    given = ("privacy.visits=2", "algorithm.batch_size=8", "algorithm.learning_rate=0.1")
    run = runs(tmp_path / "private", CONFIG + PRIVACY, *given)
    visits = [read_journal(path).visits for path in (run / "ledger").glob("*.jsonl")]
    assert [len(each) for each in visits] == [2, 2]
    rounds = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    assert [bool(row["train/loss_F"]) for row in rounds] == [True] * 3  # of query agents alone


def test_a_plan_for_networks_that_the_method_lacks_is_refused(
    method: type[Algorithm[Any]], tmp_path: Path
) -> None:
    strange = "{epsilon: 4.0, delta: 1.0e-3, update_at_support: [F, G], protect: [F, G]}"
    (tmp_path / "c.yaml").write_text(CONFIG + f"privacy: {strange}\n")
    refused = command_line.command(tmp_path / "c.yaml", f"run.output={tmp_path / 'other'}")
    assert refused.status == 2 and "FedOwn has no network G" in refused.err


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which runs/first-0 is a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    made = runs(tmp_path / "made", command_line.PLAIN)
    made.rename(tmp_path / "runs" / "first-0")
    yield tmp_path


def test_a_partition_of_a_user_is_replayed(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported("partition_of_the_page", PARTITION, there, monkeypatch)
    drawn, own = (
        split_manifest.read_manifest(Path("runs/first-0/split.json")),
        split_manifest.read_manifest(Path("own_split.json")),
    )
    assert len(own.agents["q1"].unlabelled) == 1 and own.hash != drawn.hash
    run = runs(there / "again", command_line.PLAIN, f"data.split={there / 'own_split.json'}")
    assert split_manifest.read_manifest(run / "split.json").hash == own.hash


def test_weights_predict(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = imported("predicting_of_the_page", PREDICTING, there, monkeypatch).classes
    assert classes.shape == (5,) and classes.min() >= 0 and classes.max() < 10
