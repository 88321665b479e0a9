"""What the author of the package tests."""

from pathlib import Path

from privssl_example.method import FedOwn

import privssl
from privssl.testing import check_algorithm

CONFIG = Path(__file__).with_name("fedown.yaml")
SETTINGS = {"threshold": 0.15}  # so that query agents learn from the first round on


def test_the_method_keeps_its_promises() -> None:
    assert check_algorithm(FedOwn, SETTINGS, private={"algorithm.threshold": 0.15}) == {}


def test_a_run_uses_every_part(tmp_path: Path) -> None:
    run = privssl.train(CONFIG, output=tmp_path / "run")
    assert run.results["test_accuracy"]["best"] > 0.5  # chance is 0.33
    assert len((run.folder / "rounds.jsonl").read_text().splitlines()) == 5
    assert run.results["plugins"]["algorithm.name"]["version"] == "0.1.0"


def test_features_of_the_encoder_are_learned(tmp_path: Path) -> None:
    given = {"data.encoder": "brightness", "model.name": "mlp", "model.options": {}}
    run = privssl.train(CONFIG, given, output=tmp_path / "run")
    assert run.results["rows"]["shape"] == [4]
