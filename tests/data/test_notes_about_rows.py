"""Notes about rows are printed and stored in the run folder; fewer are stored of private rows."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from PIL import Image

from privssl.data.datasets import load_dataset
from privssl.settings.schema import DataSettings
from tests.support.command_line import command

TEXT = """
run: {device: cpu, evaluate_every: 9, images_every: 9}
data: {name: image_folder, root: ROOT, labelled: 8, unlabelled: 12}
agents: {support: 2, query: 1}
model: {name: small_cnn, width: 2}
algorithm:
  {name: fedssl, rounds: 1, local_steps: 1, batch_size: 4, generator_width: 4, gate: 0.0,
   warm_up: 0}
"""
PRIVATE = "privacy: {epsilon: 9.0, delta: 1.0e-3, sample_rate: 1.0, steps: 1, visits: 1}\n"
CLASSES = ("1", "2", "3", "10")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six training images of each of four classes, and two unreadable files."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 2)):
        for name in CLASSES:
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                picture = rng.integers(0, 256, (8, 8), dtype=np.uint8)
                Image.fromarray(picture).save(root / part / name / f"{number}.png")
    for name in ("train/1/x.heic", "train/10/y.heic"):
        (root / name).write_text("")
    return root


def trained(root: Path, folder: Path, text: str = TEXT) -> tuple[str, str, dict[str, Any]]:
    """The screen, train.log and results.json of a run, with warnings about rows only."""
    (folder / "c.yaml").write_text(text.replace("ROOT", str(root)))
    done = command(folder / "c.yaml", f"run.output={folder / 'run'}", "--quiet")
    assert done.status == 0, done
    results = json.loads((folder / "run/results.json").read_text())
    results["warnings"] = [text for text in results["warnings"] if text.startswith(str(root))]
    return done.err, (folder / "run/train.log").read_text(), results


def test_skipped_files_and_the_rows_of_each_agent_are_logged_and_stored(
    pictures: Path, tmp_path: Path
) -> None:
    screen, log, results = trained(pictures, tmp_path)
    words = f"{pictures}: not read: 2 .heic. Images are"
    assert screen.count(words) == log.count(words) == 1
    assert [text.startswith(words) for text in results["warnings"]] == [True]
    assert f"{pictures}: 24 training and 8 test images of 4 classes" in log
    lines = [line.partition("INFO ")[2] for line in log.splitlines() if "Rows of" in line]
    agents = [line.split()[2] for line in lines]
    assert agents == ["s0:", "s1:", "q0:"]
    split = json.loads((tmp_path / "run/split.json").read_text())
    labels = np.repeat(range(4), 6)
    for line, agent in zip(lines, ("s0", "s1", "q0"), strict=True):
        for kind, words in (("labelled", "with labels"), ("unlabelled", "without labels")):
            held = labels[split["agents"][agent][kind]]
            each = ", ".join(f"{CLASSES[c]} {(held == c).sum()}" for c in range(4) if c in held)
            assert f"{words} {len(held)}" + (f" ({each})" if each else "") in line


def test_without_skipped_files_there_is_no_warning(pictures: Path, tmp_path: Path) -> None:
    clean = tmp_path / "clean"
    shutil.copytree(pictures, clean, ignore=shutil.ignore_patterns("*.heic"))
    screen, log, results = trained(clean, tmp_path)
    assert results["warnings"] == []
    assert "Warning" not in screen and f"WARNING {clean}" not in log


def test_the_folder_of_a_private_run_has_no_row_counts_per_class(
    pictures: Path, tmp_path: Path
) -> None:
    doubled = tmp_path / "doubled"
    shutil.copytree(pictures, doubled)
    shutil.copy(doubled / "train/1/0.png", doubled / "test/1/0.png")
    screen, log, results = trained(doubled, tmp_path, TEXT + PRIVATE)
    assert "not read: 2 .heic" in screen  # the screen belongs to the owner of the rows
    assert "not read" not in log and "training rows" not in log
    assert results["warnings"] == []
    assert [line.split("Rows of ")[1] for line in log.splitlines() if "Rows of" in line] == [
        f"{agent}: without labels {rows} (labelled rows are not logged)"
        for agent, rows in (("s0", 0), ("s1", 0), ("q0", 12))
    ]  # fmt: skip


# The order of outputs ---------------------------------------------------------------------------


def test_outputs_are_in_the_natural_order_of_class_folders_and_the_files_state_it(
    pictures: Path, tmp_path: Path
) -> None:
    found = load_dataset(DataSettings(name="image_folder", root=str(pictures)))
    assert found.class_names == CLASSES  # in text order 10 would be second
    with Image.open(pictures / "train/10/0.png") as image:
        assert found.x_train[18, 0].tolist() == np.asarray(image).tolist()
    assert found.y_train[18] == 3
    _, _, results = trained(pictures, tmp_path)
    rows = {"kind": "image", "shape": [1, 8, 8], "scaling": "[-1, 1]", "encoder": None}
    assert (results["rows"], results["class_names"]) == (rows, list(CLASSES))
    with safetensors.safe_open(tmp_path / "run/classifier.safetensors", "pt") as file:
        about = json.loads(file.metadata()["privssl"])
    assert about == {"rows": rows, "class_names": list(CLASSES)}


@pytest.mark.parametrize(
    ("names", "ordered"),
    [
        (["b10", "b9", "a", "B"], ["B", "a", "b9", "b10"]),
        (["01", "1", "002"], ["01", "1", "002"]),
        (["x1y10", "x1y9", "x"], ["x", "x1y9", "x1y10"]),
        (["cat", "7", "dog"], ["7", "cat", "dog"]),
        (["²", "2", "10"], ["2", "10", "²"]),  # a digit, but not a number to Python
    ],
)
def test_class_names_are_ordered_by_the_numbers_in_them(
    names: list[str], ordered: list[str], tmp_path: Path
) -> None:
    for part in ("train", "test"):
        for number, name in enumerate(names):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("L", (4, 4), number).save(tmp_path / part / name / "x.png")
    found = load_dataset(DataSettings(name="image_folder", root=str(tmp_path)))
    assert list(found.class_names) == ordered
