"""Training rows without a known class: used without a label, and ignored by metrics."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from privssl import data
from privssl.data.datasets import load_dataset
from privssl.data.npz import NO_LABEL
from privssl.data.split_manifest import AgentRows
from privssl.errors import DataError
from privssl.settings.schema import AgentSettings, DataSettings
from privssl.training.evaluation import HiddenLabelMeter
from tests.support.command_line import assert_refused, command

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (60, 8, 8), dtype=np.uint8)
Y = np.arange(60) % 3
AGENTS = AgentSettings(support=2, query=2)
TEXT = """
run: {device: cpu, evaluate_every: 9, images_every: 9}
data: {name: npz, root: ROOT, labelled: 12, unlabelled: 24}
agents: {support: 2, query: 2}
model: {name: small_cnn, width: 2}
algorithm:
  {name: fedssl, rounds: 2, local_steps: 1, batch_size: 4, generator_width: 4, gate: 0.0,
   warm_up: 0}
"""


def npz(folder: Path, unknown: int, **more: Any) -> Path:
    """50 training rows, the first ``unknown`` of them without a label."""
    y = Y[:50].copy()
    y[:unknown] = NO_LABEL
    np.savez(folder / "x.npz", x_train=X[:50], y_train=y, x_test=X[50:], y_test=Y[50:], **more)
    return folder / "x.npz"


def settings(root: Path, **changes: Any) -> DataSettings:
    return DataSettings(**{"name": "npz", "root": str(root), "labelled": 12, **changes})


# Reading ----------------------------------------------------------------------------------------


def test_rows_of_x_unlabelled_are_training_rows_after_the_others(tmp_path: Path) -> None:
    more = X[:4] ^ 1
    found = load_dataset(settings(npz(tmp_path, 2, x_unlabelled=more)))
    assert found.y_train.tolist() == [-1, -1, *Y[2:50].tolist(), *[-1] * 4]
    assert found.x_train[50:, 0].tolist() == more.tolist()
    assert found.class_names == ("0", "1", "2")


def test_images_in_the_folder_unlabelled_are_training_rows_after_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["train/a/0", "train/b/0", "test/a/0", "test/b/0", "unlabelled/1", "unlabelled/x/0"]
    for name, picture in zip(names, X[:6], strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(tmp_path / f"{name}.png")
    found = load_dataset(DataSettings(name="image_folder", root=str(tmp_path)))
    assert found.y_train.tolist() == [0, 1, -1, -1]
    assert found.x_train[2:, 0].tolist() == X[4:6].tolist()
    assert "not read" not in caplog.text
    # the control: another folder name is reported
    (tmp_path / "unlabelled").rename(tmp_path / "unlabeled")
    assert len(load_dataset(DataSettings(name="image_folder", root=str(tmp_path))).y_train) == 2
    assert "not read: 1 folder unlabeled" in caplog.text


# Which agents get them --------------------------------------------------------------------------


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_rows_without_a_label_are_never_labelled_or_validation_rows(
    seed: int, stratified: bool, tmp_path: Path
) -> None:
    asked = settings(npz(tmp_path, 30), labelled=15, validation=5, stratified=stratified)
    found = data.build(asked, AGENTS, seed)
    held = found.manifest.agents.values()
    with_labels = [row for h in held for row in h.labelled] + list(found.manifest.validation)
    assert len(with_labels) == 20 and min(with_labels) >= 30
    assert sorted(row for h in held for row in h.unlabelled) == list(range(30))


def test_at_most_as_many_labels_as_exist_can_be_requested(tmp_path: Path) -> None:
    root = npz(tmp_path, 30)
    data.build(settings(root, labelled=20), AGENTS, 0)
    with pytest.raises(DataError, match="npz has 20 training rows with a label"):
        data.build(settings(root, labelled=20, validation=1), AGENTS, 0)


@pytest.mark.parametrize(
    "rule", [{"partition": "dirichlet", "alpha": 0.5}, {"partition": "round_robin"},
             {"partition": "classes_per_agent", "k": 2}, {"partition": "imbalanced"},
             {"partition": "dirichlet_equal", "alpha": 0.5}],
    ids=lambda rule: str(rule["partition"]),
)  # fmt: skip
def test_a_partition_by_class_is_refused_for_rows_without_a_class(
    rule: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"unlabelled rows have no label. Set data\.partition: iid"):
        data.build(settings(npz(tmp_path, 30), **rule), AGENTS, 0)
    data.build(settings(npz(tmp_path, 0), **rule, labelled_partition="iid"), AGENTS, 0)  # control


def test_labelled_rows_may_have_their_own_partition_rule(tmp_path: Path) -> None:
    asked = settings(npz(tmp_path, 30), labelled_partition="classes_per_agent", labelled_k=2)
    held = data.build(asked, AGENTS, 0).agents
    assert all(len(set(agent.labelled.y.tolist())) <= 2 for agent in held[:2])


def test_a_split_that_lists_a_row_without_a_label_as_labelled_is_refused(tmp_path: Path) -> None:
    asked = settings(npz(tmp_path, 30))
    manifest = data.build(asked, AGENTS, 0).manifest
    manifest.write(tmp_path / "split.json")
    again = settings(npz(tmp_path, 30), split=str(tmp_path / "split.json"))
    data.build(again, AGENTS, 0)  # the control
    swapped = {
        "s0": AgentRows(manifest.agents["q0"].unlabelled[:6], ()),
        "q0": AgentRows((), manifest.agents["s0"].labelled),
    }

    other = dataclasses.replace(manifest, agents={**manifest.agents, **swapped})
    other.write(tmp_path / "split.json")
    with pytest.raises(DataError, match="rows to be used with labels that have none"):
        data.build(again, AGENTS, 0)


# Metrics ----------------------------------------------------------------------------------------


def test_pseudo_labels_are_compared_with_known_classes_only() -> None:
    oracle = HiddenLabelMeter(torch.tensor([0, -1, 2, -1]))
    oracle.observe(torch.arange(4), torch.tensor([0, 1, 1, 0]), torch.tensor([True] * 4))
    assert oracle.report() == {"pseudo/coverage": 1.0, "pseudo/accuracy": 0.5}  # not 0.25
    ids = torch.tensor([1, 3])
    oracle.observe(ids, torch.tensor([0, 1]), torch.tensor([True, True]))
    assert oracle.report() == {"pseudo/coverage": 1.0}


def test_in_a_private_run_no_pseudo_label_is_compared_with_a_label_that_an_agent_holds() -> None:
    settings = DataSettings(name="toy", labelled=40, unlabelled=60, validation=20)
    found = data.build(settings, AGENTS, 0)
    hidden = sorted(i for held in found.manifest.agents.values() for i in held.unlabelled)
    measured = found.measured_labels(private=True)
    assert (measured != NO_LABEL).nonzero()[:, 0].tolist() == hidden
    assert torch.equal(measured[hidden], found.true_labels[hidden])
    every = torch.arange(len(measured))  # a step that reports the ids of other rows
    private, plain = (
        HiddenLabelMeter(found.measured_labels(private=private)) for private in (True, False)
    )
    for meter in (private, plain):
        meter.observe(every, found.true_labels, ~torch.isin(every, torch.tensor(hidden)))
    assert "pseudo/accuracy" not in private.report()
    assert plain.report()["pseudo/accuracy"] == 1.0  # the control


@pytest.mark.parametrize("private", [True, False])
def test_in_a_private_run_copies_are_looked_for_among_unlabelled_rows_alone(private: bool) -> None:
    settings = DataSettings(name="toy", labels="labels-at-client", labelled=40, unlabelled=60)
    found = data.build(settings, AgentSettings(mixed=3), 0)
    measured = torch.cat(found.measured_rows(private=private))
    held = found.manifest.agents.values()
    unlabelled = [i for rows in held for i in rows.unlabelled]
    labelled = [] if private else [i for rows in held for i in rows.labelled]  # the control
    assert len(unlabelled) == 60 and len(labelled) == (0 if private else 40)
    assert torch.equal(measured, load_dataset(settings).x_train[[*labelled, *unlabelled]])


def trained(folder: Path, unknown: int, *overrides: str) -> tuple[list[dict[str, str]], str, Any]:
    """metrics.csv, train.log and results.json of a run."""
    folder.mkdir()
    root = npz(folder, unknown)
    (folder / "c.yaml").write_text(TEXT.replace("ROOT", str(root)))
    done = command(folder / "c.yaml", f"run.output={folder / 'run'}", "--quiet", *overrides)
    assert done.status == 0, done
    with (folder / "run/metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    results = json.loads((folder / "run/results.json").read_text())
    return lines, (folder / "run/train.log").read_text(), results


def test_a_run_on_rows_without_a_class_has_no_metric_that_needs_one(tmp_path: Path) -> None:
    lines, log, results = trained(tmp_path / "unknown", 38)
    assert results["status"] == "finished" and results["test_accuracy"]["final"] > 0
    assert {line.get("pseudo/accuracy", "") for line in lines} == {""}
    assert any(line["pseudo/coverage"] for line in lines)
    assert "Rows of q0: with labels 0; without labels 12 (12 of unknown class)" in log
    # The control: with known classes the metric exists.
    lines, log, _ = trained(tmp_path / "known", 0)
    assert any(line["pseudo/accuracy"] for line in lines)
    assert "of unknown class" not in log


def test_a_private_run_and_a_dry_run_accept_rows_without_a_class(tmp_path: Path) -> None:
    asked = {"epsilon": 9, "delta": 0.001, "sample_rate": 1, "steps": 1, "visits": 1}
    private = [f"privacy.{key}={value}" for key, value in asked.items()]
    _, log, results = trained(tmp_path / "private", 38, *private)
    assert results["privacy"]["guarantee"]["epsilon"] <= 9
    assert "of unknown class" not in log
    config = tmp_path / "private/c.yaml"
    assert command(config, "--dry-run").status == 0
    assert_refused(
        command(config, "--dry-run", "data.labelled=13"), "12 training rows with a label"
    )
