"""``model_card.md``: the facts of results.json and the privacy card, and no other claim."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import privssl
from tests.api.digits import PRIVATE, config, dataset

PLAIN = PRIVATE.partition("privacy:")[0] + "run: {workers: 1}\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, privssl.Run]:
    """A run without privacy, and a private one."""
    folder = tmp_path_factory.mktemp("cards")
    return {
        name: privssl.train(config(folder, text), data=dataset(), output=folder / name)
        for name, text in (("plain", PLAIN), ("private", PRIVATE))
    }


def header_and_page(run: privssl.Run) -> tuple[dict[str, Any], str]:
    """The header and the page of a model card."""
    _, header, page = (run.folder / "model_card.md").read_text().split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(header)
    return found, page


@pytest.mark.parametrize("name", ["plain", "private"])
def test_the_model_cards_header_has_the_metrics_of_results_json_in_hub_format(
    name: str, runs: dict[str, privssl.Run]
) -> None:
    header, _ = header_and_page(runs[name])
    results = runs[name].results
    [index] = header["model-index"]
    [measured] = index["results"]
    assert measured["dataset"] == {"name": "arrays", "type": "arrays", "split": "test"}
    assert {m["type"]: m["value"] for m in measured["metrics"]} == {
        "accuracy": results["test_accuracy"]["final"], "f1": results["metrics"]["macro_f1"]
    }  # fmt: skip
    assert measured["task"]["type"] == header["pipeline_tag"] == "image-classification"
    assert ("differential-privacy" in header["tags"]) == (name == "private")


def test_the_model_card_of_a_private_run_contains_no_times(runs: dict[str, privssl.Run]) -> None:
    assert " seconds" in header_and_page(runs["plain"])[1]  # the control
    assert " seconds" not in header_and_page(runs["private"])[1]


@pytest.mark.parametrize("name", ["plain", "private"])
def test_the_model_card_repeats_the_guarantee_of_the_run_exactly_once(
    name: str, runs: dict[str, privssl.Run]
) -> None:
    run = runs[name]
    _, page = header_and_page(run)
    guarantee = run.guarantee or "NO GUARANTEE: this run is not private."
    assert guarantee in page
    assert page.count("GUARANTEE") == 1
    assert f"classes in order: {', '.join(run.class_names)}" in page
    assert f"| accuracy | {run.results['test_accuracy']['final']:.4f} |" in page


def test_the_audit_finds_a_model_card_with_another_claim(
    runs: dict[str, privssl.Run],
) -> None:
    run = runs["private"]
    assert run.audit()["problems"] == []
    path = run.folder / "model_card.md"
    original = path.read_text()
    for old, new in (
        ("1e-05)-DP", "1e-06)-DP"),
        ("## Privacy", "## Privacy\n\n(1.0000, 1e-05)-DP\n\n## Privacy"),
        ("## Privacy", "## Secrecy"),
    ):
        assert old in original
        path.write_text(original.replace(old, new))
        assert any("model_card.md is not" in text for text in run.audit()["problems"])
    path.write_text(
        original.replace("A classifier of", "Our classifier of")
    )  # an edit by the author
    assert run.audit()["problems"] == []
    path.unlink()  # runs of former versions have no model card
    assert run.audit()["problems"] == []
    path.write_text(original)


def test_names_cannot_add_sections_or_lines_to_the_model_card(runs: dict[str, privssl.Run]) -> None:
    from privssl.runs.model_card import model_card

    claim = "x\n\n## Privacy\n\nGUARANTEE: for every support agent\u2028- epsilon 0.1"
    results = json.loads(json.dumps(runs["plain"].results))
    plain = model_card(results, "NO GUARANTEE").splitlines()
    results |= {"name": claim, "class_names": [claim, "b", "c"], "warnings": [claim]}
    results["metrics"]["recall"] = {claim: 0.5, "b": 1.0, "c": 1.0}
    results["rows"] |= {"columns": {claim: [0, 1]}, "scaling": claim}
    page = model_card(results, "NO GUARANTEE")
    lines = page.partition("---\n\n")[2].splitlines()
    heads, as_ever = ([text for text in page if text.startswith("## ")] for page in (lines, plain))
    assert [text for text in heads if text != "## Warnings"] == [
        text for text in as_ever if text != "## Warnings"
    ]
    assert not any(line.startswith(("GUARANTEE", "- epsilon")) for line in lines)


@pytest.mark.parametrize(
    ("rows", "task"),
    [
        ({"kind": "image", "encoder": None}, "image-classification"),
        ({"kind": "vector", "encoder": None, "columns": {"a": [0, 1]}}, "tabular-classification"),
        ({"kind": "vector", "encoder": {}, "raw_shape": [3, 8, 8]}, "image-classification"),
        ({"kind": "vector", "encoder": {}, "raw_shape": [9]}, "tabular-classification"),
        ({"kind": "sequence", "encoder": {}}, "text-classification"),
    ],
)
def test_the_model_cards_task_follows_from_the_rows_before_encoding(
    rows: dict[str, Any], task: str, runs: dict[str, privssl.Run]
) -> None:
    from privssl.runs.model_card import model_card

    if rows["encoder"] is not None:
        rows["encoder"] = {"name": "minilm", "weights": "0" * 64, "trained_on": "books"}
    results = json.loads(json.dumps(runs["plain"].results))
    results["rows"] |= rows
    page = model_card(results, "NO GUARANTEE")
    assert f"pipeline_tag: {task}\n" in page
    assert ("minilm" in page) == (rows["encoder"] is not None)


def test_remove_claim_deletes_the_model_card(tmp_path: Path) -> None:
    from privssl.runs.run_dir import MODEL_CARD, remove_claim

    (tmp_path / MODEL_CARD).write_text("x")
    remove_claim(tmp_path)
    assert not (tmp_path / MODEL_CARD).exists()
