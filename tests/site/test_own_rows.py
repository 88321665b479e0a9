"""A site's own tables and image folders: read without test rows, in the format that all sites
share, or refused."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accounting.ledger import read_journal
from privssl.data import build
from privssl.data.datasets import load_dataset
from privssl.data.split_manifest import AgentRows
from privssl.errors import ConfigError, DataError, PrivacyError
from privssl.experiment import config as configs
from privssl.experiment.prepare import prepare
from privssl.site import settings, startup
from privssl.site.__main__ import main
from privssl.site.request_handler import SiteRequestHandler

TABLE = """
run: {device: cpu}
data: {name: csv, root: ROWS, label: ill, columns: COLUMNS}
agents: {support: 1, query: 1}
model: {name: mlp, width: 4}
algorithm: {name: fedssl, rounds: 1, generator: mixing}
"""
IMAGES = """
run: {device: cpu}
data: {name: image_folder, root: ROWS}
agents: {support: 1, query: 1}
model: {name: small_cnn, width: 4}
algorithm: {name: fedssl, rounds: 1}
"""
COLUMNS = "age: [0, 100]\nsex: ['f', 'm']\nweight: [0, 200]\n"
HEAD = "age,sex,weight,ill\n"


def site(
    folder: Path, config: str, rows: str, role: str = "support", agent: str = "s0", budget: str = ""
) -> SiteRequestHandler:
    """Open a site from a folder with its config, its rows and columns.yaml."""
    text = config.replace("COLUMNS", str(folder / "columns.yaml"))
    (folder / "c.yaml").write_text(text.replace("ROWS", str(folder / "rows")))
    budget_line = "" if role == "query" else f"budget: {budget or 'null'}\n"
    (folder / "site.yaml").write_text(
        f"site: {{agent: {agent}, role: {role}, config: c.yaml, folder: kept}}\n"
        f"rows: {rows}\n{budget_line}"
    )
    return startup.open_site(settings.load_site_config(folder / "site.yaml"))


def table(folder: Path, lines: str, columns: str = COLUMNS, name: str = "train") -> Path:
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    (folder / "rows" / f"{name}.csv").write_text(lines)
    (folder / "columns.yaml").write_text(columns)
    return folder


def image(path: Path, grey: int = 9, mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (8, 8), grey if mode == "L" else (grey, 0, 0)).save(path)


# Tables --------------------------------------------------------------------------------------

TRAIN = HEAD + "40,f,60,no\n50,m,80,yes\n60,f,70,no\n"
ROWS_WITH_CLASSES = "{root: rows, classes: ['no', 'yes']}"


def test_sites_with_other_column_bounds_values_or_order_have_other_hashes(
    tmp_path: Path,
) -> None:
    """Shape and classes are equal in all of them, but equal rows would be scaled differently."""
    others = {
        "alike": COLUMNS,
        "bounds": COLUMNS.replace("200", "150"),
        "values": COLUMNS.replace("['f', 'm']", "['m', 'f']"),
        "order": "weight: [0, 200]\nsex: ['f', 'm']\nage: [0, 100]\n",
    }
    ours = site(table(tmp_path / "ours", TRAIN), TABLE, ROWS_WITH_CLASSES)
    found = {
        name: site(table(tmp_path / name, TRAIN, columns), TABLE, ROWS_WITH_CLASSES)
        for name, columns in others.items()
    }
    assert found["alike"].agreement == ours.agreement
    assert len({ours.agreement, *(site.agreement for site in found.values())}) == 4
    assert {site.task for site in found.values()} == {ours.task}


def test_a_site_without_test_rows_has_the_hash_of_the_coordinator_with_test_rows(
    tmp_path: Path,
) -> None:
    coordinator = table(table(tmp_path / "here", TRAIN), TRAIN, name="test")
    other_site = site(
        table(tmp_path / "with_image", HEAD + "30,m,90,\n"), TABLE, ROWS_WITH_CLASSES, "query", "q0"
    )
    assert len(other_site.agent.held_unlabelled or ()) == 1
    text = TABLE.replace("COLUMNS", str(coordinator / "columns.yaml"))
    (coordinator / "c.yaml").write_text(text.replace("ROWS", str(coordinator / "rows")))
    config = configs.load_config(coordinator / "c.yaml")
    data = load_dataset(config.data)
    ours = configs.compatibility_hash(
        config, data.class_names, data.shape, "as stored", None, data.scales
    )
    assert other_site.agreement == ours


def test_a_run_over_sites_refuses_a_table_without_declared_columns(tmp_path: Path) -> None:
    """Without declared columns each site would scale by its own rows."""
    bare = TABLE.replace(", columns: COLUMNS", "")
    with pytest.raises(ConfigError, match=r"data\.columns is missing: each site would scale"):
        site(table(tmp_path / "with_image", TRAIN), bare, ROWS_WITH_CLASSES)
    coordinator = table(table(tmp_path / "here", TRAIN), TRAIN, name="test")
    (coordinator / "c.yaml").write_text(bare.replace("ROWS", str(coordinator / "rows")))
    with pytest.raises(ConfigError, match=r"data\.columns is missing: each site would scale"):
        prepare(configs.load_config(coordinator / "c.yaml", ["run.engine=flower"]))


def test_a_site_refuses_arrays_if_the_coordinator_has_a_table(tmp_path: Path) -> None:
    """Arrays do not record how they were scaled."""
    np.savez(table(tmp_path, TRAIN) / "rows.npz", x_labelled=np.zeros((2, 4)), y_labelled=[0, 1])
    with pytest.raises(ConfigError, match=r"rows\.arrays has no columns, and .* has a table"):
        site(tmp_path, TABLE, "{arrays: rows.npz, classes: ['no', 'yes']}")


def test_rows_without_a_label_are_the_unlabelled_rows_of_a_mixed_site(tmp_path: Path) -> None:
    mixed = TABLE.replace("support: 1, query: 1", "mixed: 1").replace(
        "label: ill", "label: ill, labels: labels-at-client"
    )
    rows = table(tmp_path, TRAIN + "30,m,90,\n20,f,50,\n")
    agent = site(rows, mixed, ROWS_WITH_CLASSES, "mixed", "m0").agent
    assert agent.held_labelled is not None and agent.held_unlabelled is not None
    assert len(agent.held_labelled) == 3 and len(agent.held_unlabelled) == 2
    table(tmp_path, TRAIN)
    with pytest.raises(DataError, match="has no unlabelled rows of m0, which is a mixed agent"):
        site(rows, mixed, ROWS_WITH_CLASSES, "mixed", "m0")


@pytest.mark.parametrize(
    ("lines", "rows", "text"),
    [
        (
            TRAIN.replace("yes", "maybe"),
            ROWS_WITH_CLASSES,
            r"line 3: the label is 'maybe', which is no decl",
        ),
        (
            TRAIN.replace("weight", "kg"),
            ROWS_WITH_CLASSES,
            r"train\.csv has no column weight; it has age",
        ),
        (TRAIN, "{root: rows, classes: ['no']}", r"rows\.classes .*too few"),
        (TRAIN, "{split: s.json, classes: ['no', 'yes']}", r"rows\.classes .*has no effect"),
        (TRAIN, "{root: rows}", r"test\.csv: No such file"),
    ],
    ids=["class", "column", "one class", "split", "no classes"],
)
def test_an_error_in_a_sites_table_names_the_line_column_or_key(
    tmp_path: Path, lines: str, rows: str, text: str
) -> None:
    with pytest.raises((DataError, ConfigError), match=text):
        site(table(tmp_path, lines), TABLE, rows)


# Images --------------------------------------------------------------------------------------

CLASSES = "{root: rows, classes: [cyst, normal, tumour]}"


def test_sites_with_some_classes_or_only_unlabelled_images_have_the_same_hash(
    tmp_path: Path,
) -> None:
    labelled, bare = tmp_path / "s0", tmp_path / "q0"
    image(labelled / "rows/train/tumour/a.png")
    image(labelled / "rows/train/cyst/b.png", 200)
    image(bare / "rows/unlabelled/c.png")
    one = site(labelled, IMAGES, CLASSES)
    other = site(bare, IMAGES, CLASSES, "query", "q0")
    assert one.agreement == other.agreement
    assert one.task == "3 classes (cyst, normal, tumour), rows of 1x8x8"
    assert one.agent.held_labelled is not None and other.agent.held_unlabelled is not None
    assert torch.equal(one.agent.held_labelled.y, torch.tensor([0, 2]))
    assert len(other.agent.held_unlabelled) == 1
    again = site(labelled, IMAGES, "{root: rows, classes: [tumour, normal, cyst]}")
    assert again.agreement != one.agreement  # the control: class names in another order


def test_an_image_folder_of_an_undeclared_class_is_refused(tmp_path: Path) -> None:
    image(tmp_path / "rows/train/Tumour/a.png")
    with pytest.raises(DataError, match=r"'Tumour' is no declared class\. Give one of cyst"):
        site(tmp_path, IMAGES, CLASSES)


def test_an_image_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    with pytest.raises(DataError, match="holds no image in train/CLASS or unlabelled"):
        site(tmp_path, IMAGES, CLASSES, "query", "q0")


def test_a_private_site_refuses_colour_images_beside_grey_ones(tmp_path: Path) -> None:
    private = IMAGES + "privacy: {epsilon: 8.0, noise_multiplier: 2.0, sample_rate: 1.0}\n"
    how: dict[str, Any] = {"budget": "{epsilon: 8.0}"}
    image(tmp_path / "rows/train/cyst/a.png", mode="RGB")
    image(tmp_path / "rows/train/normal/b.png", mode="RGB")
    site(tmp_path, private, CLASSES, **how)  # the control: all images are in colour
    image(tmp_path / "rows/train/normal/b.png")
    with pytest.raises(PrivacyError, match="colour"):
        site(tmp_path, private, CLASSES, **how)


# Private row counts -----------------------------------------------------------------------------

VECTORS = TABLE.replace(
    "name: csv, root: ROWS, label: ill, columns: COLUMNS",
    "name: npz, root: none.npz, labelled: 40",
)
ARRAYS = "{arrays: rows.npz, classes: 2}"
PRIVATE_COUNTS = (
    "privacy: {epsilon: 8.0, noise_multiplier: 2.0, sample_rate: 1.0, record_counts: private}\n"
)


@pytest.mark.parametrize(("counts", "refused"), [("public", True), ("private", False)])
def test_vectors_standardised_by_their_own_rows_are_refused_if_the_row_count_is_public(
    tmp_path: Path, counts: str, refused: bool
) -> None:
    x = np.random.default_rng(0).normal(5.0, 2.0, (40, 6))
    y, rows = np.arange(40) % 2, ARRAYS
    vectors = VECTORS + PRIVATE_COUNTS.replace("private}", counts + "}")
    how: dict[str, Any] = {"budget": "{epsilon: 8.0}"}
    np.savez(tmp_path / "rows.npz", x_labelled=x, y_labelled=y)
    site(tmp_path, vectors, rows, **how)
    np.savez(tmp_path / "rows.npz", x_labelled=(x - x.mean(axis=0)) / x.std(axis=0), y_labelled=y)
    if not refused:  # a refusal would reveal whether there are few rows
        site(tmp_path, vectors, rows, **how)
        return
    with pytest.raises(PrivacyError, match="rows were scaled by their own statistics"):
        site(tmp_path, vectors, rows, **how)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_with_a_private_row_count_an_empty_table_is_treated_like_any_other(
    tmp_path: Path, rows: int
) -> None:
    table(tmp_path, "".join(TRAIN.splitlines(keepends=True)[: rows + 1]))
    how: dict[str, Any] = {"budget": "{epsilon: 8.0}"}
    handler = site(tmp_path, TABLE + PRIVATE_COUNTS, ROWS_WITH_CLASSES, **how)
    assert len(handler.agent.labelled) == rows
    with pytest.raises(ConfigError, match=r"class names would follow.* in rows\.classes"):
        site(tmp_path, TABLE + PRIVATE_COUNTS, "{root: rows}", **how)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_with_a_private_row_count_empty_arrays_are_treated_like_any_others(
    tmp_path: Path, rows: int
) -> None:
    x, y = np.zeros((rows, 6), np.float32), np.zeros(rows, np.int64)
    np.savez(tmp_path / "rows.npz", x_labelled=x, y_labelled=y)
    handler = site(tmp_path, VECTORS + PRIVATE_COUNTS, ARRAYS, budget="{epsilon: 8.0}")
    assert len(handler.agent.labelled) == rows


@pytest.mark.parametrize("counts", ["public", "private"])
def test_a_site_names_persons_exactly_where_the_guarantee_is_for_persons(
    tmp_path: Path, counts: str
) -> None:
    records = VECTORS + PRIVATE_COUNTS.replace("private}", counts + "}")
    persons = records.replace("record_counts:", "unit: person, record_counts:")
    x, y, how = np.eye(6, dtype=np.float32), np.arange(6) % 2, {"budget": "{epsilon: 8.0}"}
    np.savez(tmp_path / "rows.npz", x_labelled=x, y_labelled=y)
    with pytest.raises(PrivacyError, match=r"the rows name no persons.*of a site: person_labelled"):
        site(tmp_path, persons, ARRAYS, **how)
    site(tmp_path, records, ARRAYS, **how)
    np.savez(tmp_path / "rows.npz", x_labelled=x, y_labelled=y, person_labelled=list("aabbcc"))
    with pytest.raises(PrivacyError, match=r"rows name persons, and privacy\.unit is record"):
        site(tmp_path, records, ARRAYS, **how)
    (tmp_path / "kept/ledger/s0.jsonl").unlink()  # of records
    shutil.rmtree(tmp_path / "kept/ledger/registry")
    handler = site(tmp_path, persons, ARRAYS, **how)
    assert handler.agent.labelled.persons == tuple("aabbcc")
    assert read_journal(tmp_path / "kept/ledger/s0.jsonl").plan.unit == "person"


def test_a_site_refuses_a_split_that_gives_rows_of_its_persons_to_others(tmp_path: Path) -> None:
    x, y = np.arange(72, dtype=np.float32).reshape(12, 6) / 72, np.arange(12) % 2
    names = np.arange(12) // 2
    np.savez(
        tmp_path / "rows.npz", x_train=x, y_train=y, x_test=x + 1, y_test=y, person_train=names
    )
    text = VECTORS.replace("none.npz, labelled: 40", f"{tmp_path / 'rows.npz'}, labelled: 3")
    text += PRIVATE_COUNTS.replace("record_counts: private", "unit: person")
    (tmp_path / "c.yaml").write_text(text)
    config = configs.load_config(tmp_path / "c.yaml")
    split = build(config.data, config.agents, 0).manifest
    split.write(tmp_path / "split.json")
    how: dict[str, Any] = {"rows": "{split: split.json}", "budget": "{epsilon: 8.0}"}
    site(tmp_path, text, **how)  # the control
    own, others = split.agents["s0"], split.agents["q0"]
    given = {
        "s0": AgentRows(own.labelled[1:], ()),
        "q0": AgentRows((), (*others.unlabelled, own.labelled[0])),
    }
    dataclasses.replace(split, agents=given).write(tmp_path / "split.json")
    with pytest.raises(PrivacyError, match="gives rows of a labelled person of s0 to others"):
        site(tmp_path, text, **how)


def test_sites_with_vectors_of_bytes_and_of_floats_do_not_agree(tmp_path: Path) -> None:
    """Bytes are scaled to [-1, 1], floats are not."""
    found = {}
    for kind in (np.uint8, np.float32, np.float64):
        np.savez(tmp_path / "rows.npz", x_unlabelled=np.eye(6).astype(kind))
        handler = site(tmp_path, VECTORS, ARRAYS, role="query", agent="q0")
        found[kind] = handler.agreement
    assert found[np.uint8] != found[np.float32] == found[np.float64]


def test_an_empty_table_is_refused_if_the_row_count_is_public(
    tmp_path: Path,
) -> None:
    public = TABLE + PRIVATE_COUNTS.replace("record_counts: private", "steps: 1")
    with pytest.raises(DataError, match="has no rows"):
        site(table(tmp_path, HEAD), public, ROWS_WITH_CLASSES, budget="{epsilon: 8.0}")


@pytest.mark.parametrize("with_image", [False, True])
def test_an_image_folder_is_refused_if_the_row_count_is_private(
    tmp_path: Path, with_image: bool
) -> None:
    """The shape of all rows would follow from one image, and there may be none."""
    if with_image:
        image(tmp_path / "rows/train/cyst/a.png")
    tmp_path.joinpath("rows").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match=r"tells whether there are any\. Give rows\.arrays"):
        site(tmp_path, IMAGES + PRIVATE_COUNTS, CLASSES, budget="{epsilon: 8.0}")


# The command ---------------------------------------------------------------------------------


def test_a_site_with_an_unwritable_folder_reports_it_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image(tmp_path / "rows/unlabelled/c.png")
    site(tmp_path, IMAGES, CLASSES, "query", "q0")
    path = tmp_path / "site.yaml"
    path.write_text(path.read_text().replace("folder: kept", "folder: c.yaml/kept"))
    assert main([str(path), "--serve"]) == 2
    printed = capsys.readouterr()
    assert "3 classes (cyst, normal, tumour), rows of 1x8x8." in printed.out
    assert "Traceback" not in printed.err
    assert f"{tmp_path}/c.yaml/kept: cannot be written: Not a directory" in printed.err
