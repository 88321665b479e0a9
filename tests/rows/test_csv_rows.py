"""Tables and texts from CSV files, and the errors about invalid ones (privssl/data/csv_rows.py)."""

import csv
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.testing import assert_allclose
from sklearn.datasets import load_breast_cancer
from torch import Tensor

from privssl.data import datasets
from privssl.data.canonical import canonical
from privssl.data.csv_rows import Texts, read_table, read_texts
from privssl.data.datasets import load_dataset
from privssl.data.sent140 import read_sent140
from privssl.encoders.frozen import Encoder
from privssl.errors import DataError, PrivacyError, UserError
from privssl.experiment import config
from privssl.experiment.prepare import prepare
from privssl.settings.schema import DataSettings
from privssl.train import main as train

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
HEAD = ("label", "size", "colour")
TRAIN = [("a", 0, "red"), ("b", 10, "blue"), ("", 5, "red"), ("a", 2.5, "green")]
TEST = [("b", 20, "red"), ("a", 5, "purple")]


def save(folder: Path, name: str, rows: Sequence[Sequence[Any]], *, bom: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.csv").open(
        "w", newline="", encoding="utf-8-sig" if bom else "utf-8"
    ) as f:
        csv.writer(f).writerows(rows)
    return folder


def table(folder: Path, *, head: Sequence[str] = HEAD, bom: bool = False, **parts: Any) -> Path:
    given: dict[str, Any] = {"train": TRAIN, "test": TEST} | parts
    for name, rows in given.items():
        save(folder, name, [head, *rows], bom=bom)
    return folder


def declared(folder: Path, **columns: Any) -> Path:
    path = folder / "columns.yaml"
    path.write_text(yaml.safe_dump(columns, sort_keys=False))
    return path


# Tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bom", [False, True])
def test_columns_become_numbers_by_the_bounds_and_categories_of_training_rows(
    bom: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = read_table(table(tmp_path, bom=bom), label="label", columns=None)
    assert found.class_names == ("a", "b")
    assert found.y_train.tolist() == [0, 1, -1, 0]  # the third has no label
    # size from 0 to 10; blue, green and red
    wanted = [[-1.0, -1, -1, 1], [1, 1, -1, -1], [0, -1, -1, 1], [-0.5, -1, 1, -1]]
    assert_allclose(found.x_train, np.array(wanted))
    assert_allclose(found.x_test, [[1, -1, -1, 1], [0, -1, -1, -1]])
    assert "column size has values beyond its bounds (1)" in caplog.text
    assert "1 values of column colour are not among its categories" in caplog.text


def test_declared_bounds_and_categories_fix_the_scaling(tmp_path: Path) -> None:
    path = declared(table(tmp_path), size=[-20, 20], colour=["red"])
    found = read_table(tmp_path, label="label", columns=path)
    wanted = [[0.0, 1], [0.5, -1], [0.25, 1], [0.125, -1]]
    assert_allclose(found.x_train, np.array(wanted))
    # The purpose: other rows do not change these numbers.
    table(tmp_path, train=[*TRAIN, ("a", 19, "black")])
    again = read_table(tmp_path, label="label", columns=path)
    assert_allclose(again.x_train[:4], found.x_train)
    # The control: without the file they do.
    assert_allclose(read_table(tmp_path, label="label", columns=None).x_train[0, 0], -1)
    assert read_table(tmp_path, label="label", columns=None).x_train[1, 0] < 1


def test_a_record_has_one_account_whatever_bounds_are_declared(tmp_path: Path) -> None:
    table(tmp_path, train=[*TRAIN, ("b", "10.0", "blue")])
    wide, narrow = (
        read_table(tmp_path, label="label", columns=declared(tmp_path, size=[0, top]))
        for top in (100, 20)
    )
    assert wide.records is not None
    assert wide.records == narrow.records
    assert wide.records[1] == wide.records[4]  # 10 and 10.0
    assert len(set(wide.records)) == 4
    assert wide.records[0] == "colour=red\x1fsize=0.0"  # and no label
    assert (wide.x_train[1] != narrow.x_train[1]).any()  # the control: the numbers differ


@pytest.mark.parametrize("number", [7, 1e17, -1e300])  # plus one is the same float
def test_a_constant_column_causes_a_warning_and_is_finite(
    number: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [(y, number, c) for y, _, c in TRAIN]
    found = read_table(table(tmp_path, train=rows), label="label", columns=None)
    assert np.isfinite(found.x_train).all()
    assert "column size is constant" in caplog.text


WITH_MISSING = [
    ("a", 0, "red"),
    ("b", "", "red"),
    ("", 10, ""),
    ("a", "NA", "red"),
    ("b", "nan", "red"),
]


def test_a_missing_number_becomes_the_middle_and_an_indicator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table(tmp_path, train=WITH_MISSING, test=[("a", "", "red"), ("b", 5, "red")])
    found = read_table(tmp_path, label="label", columns=None)
    size = np.array([[-1.0, -1], [0, 1], [1, -1], [0, 1], [0, 1]])
    assert_allclose(found.x_train[:, :2], size)
    # the middle and a missing number differ
    assert_allclose(found.x_test[:, :2], [[0, 1], [0, -1]])
    assert "number for them: size (3 of 5)." in caplog.text
    # All spellings of a missing value are one record to an account.
    assert found.records is not None
    assert found.records[1] == found.records[3] == found.records[4] != found.records[0]
    # A category that is missing is a category.
    assert_allclose(found.x_train[:, 2:], [[-1, 1], [-1, 1], [1, -1], [-1, 1], [-1, 1]])


def test_missing_values_must_be_declared_with_the_bounds_of_a_column(tmp_path: Path) -> None:
    table(tmp_path, train=WITH_MISSING)
    path = declared(tmp_path, size=[0, 40, "missing"])
    found = read_table(tmp_path, label="label", columns=path)
    assert_allclose(found.x_train, np.array([[-1, -1], [0, 1], [-0.5, -1], [0, 1], [0, 1]]))
    # The control: without ``missing`` every row needs a value.
    with pytest.raises(DataError, match="line 3: column size has ''"):
        read_table(tmp_path, label="label", columns=declared(tmp_path, size=[0, 40]))


def test_a_column_without_values_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [(y, "", c) for y, _, c in TRAIN]
    found = read_table(table(tmp_path, train=rows, test=rows[:2]), label="label", columns=None)
    assert_allclose(found.x_train[:, 0], [1, 1, 1, 1])
    assert "column size is constant" in caplog.text


@pytest.mark.parametrize("repeated", [1, 2])
def test_a_column_with_a_different_text_in_each_row_causes_a_warning(
    repeated: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The control: a text shared by two rows each may be a category."""
    rows = [("ab"[n % 2], n, f"patient {n // repeated}") for n in range(20)]
    read_table(table(tmp_path, train=rows), label="label", columns=None)
    warned = "column colour has 20 different values in 20 rows" in caplog.text
    assert warned == (repeated == 1)


def test_fields_may_contain_quotes_commas_and_line_breaks(tmp_path: Path) -> None:
    odd = 'a "red",\nkind'
    found = read_table(
        table(tmp_path, train=[*TRAIN, ("b", 1, odd)], test=[("a", 1, odd)]), label="label",
        columns=None,
    )  # fmt: skip
    assert found.x_train.shape == (5, 5)
    assert_allclose(found.x_test[0, 1:].max(), 1)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"train": [("a", "inf", "red"), ("b", 1, "red")]}, "line 2: column size has 'inf'"),
        ({"test": [("a", "inf", "red")]}, "line 2: column size has 'inf'"),
        ({"test": [("a", "", "red")]}, r"size has ''.* size: \[lowest, highest, missing\]"),
        ({"test": [("c", 1, "red")]}, "line 2: the label is 'c', which no training row has"),
        ({"test": [("", 1, "red")]}, "line 2: no label. Give each test row its class"),
        ({"head": ("label", "", "colour")}, r"a column without a name: .* to_csv\(index=False\)"),
        (
            {"train": [("a", 1, "red"), ("b\n## x", 1, "red")]},
            r"the class name 'b\\n## x' has line breaks",
        ),
        (
            {"train": [("a", 1, "red"), ("b", "?", "red"), ("a", 2, "red"), ("a", "", "red")]},
            r"line 3: column size has '\?', and most of its values are numbers. Correct it",
        ),
        ({"head": ("label;size;colour",)}, "'label;size;colour'. Separate columns by commas"),
        ({"train": [("a", 1)]}, "line 2: 2 fields, and the first line has 3"),
        ({"train": []}, "has no rows"),
        ({"train": [("a", 1, "red")]}, "1 classes in its label column"),
        ({"head": ("class", "size", "colour")}, "has no column label; it has class, size, colour"),
        ({"head": ("label", "size", "size")}, "has the column size twice"),
        ({"train": [("ab"[i % 2], 1, f"c{i}") for i in range(1001)]}, "1001 different values"),
    ],
)
def test_an_invalid_table_is_refused_with_file_and_line(
    parts: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=said):
        read_table(table(tmp_path, **parts), label="label", columns=None)


@pytest.mark.parametrize("word", ["NA", "nan", "unknown"])
def test_a_class_named_like_a_missing_value_causes_a_warning(
    word: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The control: another class name."""
    rows = [*TRAIN, (word, 1, "red"), (word, 2, "red")]
    found = read_table(table(tmp_path, train=rows), label="label", columns=None)
    assert word in found.class_names
    warned = f"2 rows have the label {word}, which counts as a class. Leave the field empty"
    assert (warned in caplog.text) == (word != "unknown")


def test_rows_without_a_text_are_counted_and_the_first_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The control: test rows, which all have a text."""
    head, rows = ("label", "said"), [("a", "yes"), ("b", ""), ("a", " \n"), ("b", "no")]
    table(tmp_path, head=head, train=rows, test=rows[::3])
    assert read_texts(tmp_path, text="said", label="label").x_train == ("yes", "", " \n", "no")
    assert "train.csv: 2 rows have no text in column said (the first: line 3)" in caplog.text
    assert "test.csv" not in caplog.text


def test_a_declaration_can_leave_out_a_column_without_a_name(tmp_path: Path) -> None:
    table(tmp_path, head=("label", "size", ""))
    found = read_table(tmp_path, label="label", columns=declared(tmp_path, size=[0, 20]))
    assert found.x_train.shape == (4, 1)


def test_a_column_missing_from_the_test_rows_is_named(tmp_path: Path) -> None:
    table(tmp_path)
    save(tmp_path, "test", [("label", "size"), ("a", 1)])
    with pytest.raises(DataError, match=r"has no column colour; .* both files the same columns$"):
        read_table(tmp_path, label="label", columns=None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("size: [1, 1]", "size is"),
        ("size: [0, .inf]", "size is"),
        ("size: 3", "size is"),
        ("colour: [red, 1]", "colour is"),
        ("size: [0, 1, absent]", "size is .* with missing as a third"),
        ("size: [0, missing]", "size is"),
        ("label: [a, b]\nsize: [0, 1]", "declares label"),
        ("[", r"columns\.yaml, line 1: cannot be read as YAML"),
        ("size: [0, 1]\nsize: [0, 9]", "line 2: size: given twice: first on line 1"),
        ("colour: [red, red]", "colour has the category 'red' twice"),
        ("colour: [on, off]", "line 1: colour: 'on' is true or false to YAML. .* in quotes"),
        ("", "give a line for each column"),
        (
            "width: [0, 1]",
            r"no column width; it has [^.]*\. Correct the columns in .*columns.yaml",
        ),
    ],
)
def test_invalid_column_declarations_are_refused_with_the_reason(
    content: str, said: str, tmp_path: Path
) -> None:
    table(tmp_path)
    (tmp_path / "columns.yaml").write_text(content)
    with pytest.raises(DataError, match=said):
        read_table(tmp_path, label="label", columns=tmp_path / "columns.yaml")


def test_numbers_with_an_exponent_are_bounds_and_in_quotes_they_are_categories(
    tmp_path: Path,
) -> None:
    rows = [("label", "size"), ("a", "250"), ("b", "1e3")]
    for part in ("train", "test"):
        save(tmp_path, part, rows)
    (tmp_path / "columns.yaml").write_text("size: [0, 1e3]")
    found = read_table(tmp_path, label="label", columns=tmp_path / "columns.yaml")
    assert found.x_train.tolist() == [[-0.5], [1.0]]
    (tmp_path / "columns.yaml").write_text("size: ['250', '1e3']")
    found = read_table(tmp_path, label="label", columns=tmp_path / "columns.yaml")
    assert found.x_train.tolist() == [[1.0, -1.0], [-1.0, 1.0]]


def test_a_column_named_like_a_yaml_boolean_can_be_declared(tmp_path: Path) -> None:
    for part in ("train", "test"):
        save(tmp_path, part, [("label", "yes"), ("a", 0), ("b", 1)])
    (tmp_path / "columns.yaml").write_text("yes: [0, 1]")
    found = read_table(tmp_path, label="label", columns=tmp_path / "columns.yaml")
    assert found.x_train.tolist() == [[-1.0], [1.0]]


def test_a_column_with_as_many_words_as_numbers_is_categorical(tmp_path: Path) -> None:
    rows = [("ab"[i % 2], i, ("1", "2", "X", "Y")[i % 4]) for i in range(8)]
    found = read_table(table(tmp_path, train=rows, test=rows), label="label", columns=None)
    assert found.x_train.shape == (8, 5)


def test_an_empty_or_missing_file_is_named(tmp_path: Path) -> None:
    table(tmp_path)
    with pytest.raises(DataError, match=r"no\.yaml: No such file .* Correct data"):
        read_table(tmp_path, label="label", columns=tmp_path / "no.yaml")
    (tmp_path / "train.csv").write_text("")
    with pytest.raises(DataError, match=r"train\.csv is empty\. Give a line of column names"):
        read_table(tmp_path, label="label", columns=None)


def test_files_other_than_csv_in_utf8_are_refused(tmp_path: Path) -> None:
    table(tmp_path)
    (tmp_path / "train.csv").write_bytes(b"label,size\na,\xff\n")
    with pytest.raises(DataError, match="is no CSV file"):
        read_table(tmp_path, label="label", columns=None)
    (tmp_path / "train.csv").write_text('label,size\na,"1\n')
    with pytest.raises(DataError, match="is no CSV file"):
        read_table(tmp_path, label="label", columns=None)


# Texts ---------------------------------------------------------------------------------------

ODD = ["", "\U0001f600", "word " * 2000, "今日は", 'a "quoted",\nline']


def test_texts_are_read_unchanged(tmp_path: Path) -> None:
    rows = [("ab"[i % 2], text) for i, text in enumerate(ODD)]
    table(tmp_path, head=("label", "text"), bom=True, train=rows, test=rows[:2])
    found = read_texts(tmp_path, text="text", label="label")
    assert list(found.x_train) == ODD
    with pytest.raises(DataError, match="no column tweet"):
        read_texts(tmp_path, text="tweet", label="label")


def test_equal_tweets_are_one_record_and_html_entities_are_resolved(tmp_path: Path) -> None:
    rows = [(1, "so &quot;good&quot;"), (0, "bad"), (0, 'so  "good"'), (1, "nice &amp; warm")]
    table(tmp_path, head=("label", "text"), train=rows, test=rows[:1])
    found = read_sent140(tmp_path)
    assert found.x_train == ('so "good"', "bad", "nice & warm")
    assert found.y_train.tolist() == [1, 0, 1]
    assert found.class_names == ("negative", "positive")
    plain = read_texts(tmp_path, text="text", label="label").x_train
    assert set(canonical(plain)) == set(canonical(found.x_train))  # one record, by both readers
    assert plain[0] != found.x_train[0]  # the control
    with pytest.raises(DataError, match="Put train"):
        read_sent140(tmp_path / "nowhere")


def fake_encoder() -> Encoder:
    """An encoder with five words of four numbers: digests of words, without a network."""

    def build() -> Any:
        def run(texts: Any) -> Tensor:
            rows = torch.zeros(len(texts), 5, 4)
            for row, text in enumerate(texts):
                for place, word in enumerate(text.split()[:5]):
                    digest = hashlib.sha256(word.encode()).digest()[:4]
                    rows[row, place] = torch.tensor([b / 128 - 1 for b in digest])
            return rows

        return run

    return Encoder("minilm", (5, 4), "fake", "nothing", build)


@pytest.mark.parametrize("algorithm", ["fedssl", "pseudo", "mixmatch"])
def test_a_run_on_texts_works_from_file_to_results(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVSSL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(datasets, "open_encoder", lambda name, weights: fake_encoder())
    rows = [(i % 2, f"text {i} is {('bad', 'good')[i % 2]}") for i in range(80)]
    table(tmp_path / "rows", head=("label", "text"), train=rows, test=rows[:20])
    path = tmp_path / "texts.yaml"
    text: dict[str, Any] = {
        "run": {"workers": 1, "device": "cpu", "output": str(tmp_path / "run")},
        "data": {"name": "sent140", "root": str(tmp_path / "rows"), "encoder": "minilm",
                 "labelled": 20},
        "agents": {"support": 1, "query": 3},
        "model": {"name": "text_cnn", "width": 2},
        "algorithm": {"name": algorithm, "rounds": 2, "local_steps": 2},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(text))
    assert train([str(path), "--quiet"]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["rows"]["kind"] == "sequence"
    assert results["class_names"] == ["negative", "positive"]


# Configs -------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., list[str]]:
    def write(private: bool = False, model: str = "mlp", **data: Any) -> list[str]:
        path = tmp_path / "c.yaml"
        sections: dict[str, Any] = {
            "data": data, "agents": {"support": 1}, "model": {"name": model},
            "algorithm": {"name": "fedavg", "rounds": 1},
        }  # fmt: skip
        if private:
            sections["privacy"] = {"epsilon": 4.0}
        path.write_text(yaml.safe_dump(sections))
        return [str(path)]

    return write


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"name": "csv"}, "data.root +missing"),
        ({"name": "csv", "root": "x", "text": "t"}, "data.encoder +missing: texts need one"),
        ({"name": "sent140"}, "data.encoder +missing: texts need one"),
        (
            {"name": "sent140", "encoder": "efficientnet_lite0"},
            "takes images, and sent140 has texts",
        ),
        ({"name": "csv", "root": "x", "encoder": "minilm"}, "takes texts, and csv has a table"),
        ({"name": "digits", "text": "t"}, "data.text +has no effect"),
        ({"name": "csv", "root": "x", "model": "small_cnn"}, "small_cnn takes images"),
        ({"name": "csv", "root": "x", "text": "label"}, "rows would contain their labels"),
        ({"name": "csv", "root": "x", "private": True}, "one more release. Declare them in a file"),
    ],
)
def test_settings_that_csv_files_do_not_support_are_refused_when_the_config_is_read(
    data: dict[str, Any], said: str, settings: Callable[..., list[str]]
) -> None:
    with pytest.raises(UserError, match=said):
        config.load_config(Path(settings(**data)[0]))


def test_a_private_table_with_declared_columns_is_accepted(
    settings: Callable[..., list[str]],
) -> None:
    data = {"name": "csv", "root": "x", "columns": "c.yaml", "private": True}
    assert config.load_config(Path(settings(**data)[0])).privacy is not None


@pytest.mark.parametrize("private", [True, False])
def test_a_class_that_only_private_labels_show_is_refused(
    private: bool, settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    rows = [*TRAIN[:2] * 3, ("rare disease", 1, "red")]
    rows = [(label, size + place / 9, colour) for place, (label, size, colour) in enumerate(rows)]
    table(tmp_path, train=rows)
    columns = declared(tmp_path, size=[0, 20], colour=["red", "blue"])
    data = {"name": "csv", "root": str(tmp_path), "columns": str(columns), "labelled": 7}
    path = Path(settings(private=private, **data)[0])
    ready = config.load_config(path, ["privacy.delta=0.01"] if private else [])
    if not private:
        assert prepare(ready).federated_data.dataset.class_names == ("a", "b", "rare disease")
        return
    with pytest.raises(PrivacyError, match="released from private labels") as refusal:
        prepare(ready)
    assert "rare" not in str(refusal.value)
    save(tmp_path, "test", [HEAD, *TEST, ("rare disease", 3, "red")])
    assert prepare(ready).federated_data.dataset.classes == 3


def test_the_shipped_table_equals_that_of_scikit_learn() -> None:
    loaded = load_dataset(
        DataSettings(
            name="csv", root=str(CONFIGS / "breast_cancer"), label="diagnosis",
            columns=str(CONFIGS / "breast_cancer" / "columns.yaml"),
        )
    )  # fmt: skip
    assert loaded.class_names == ("benign", "malignant")
    original = load_breast_cancer()
    low, high = original.data.min(axis=0), original.data.max(axis=0)
    wanted = 2 * (original.data - low) / (high - low) - 1
    both = np.concatenate([loaded.x_train.numpy(), loaded.x_test.numpy()])
    labels = np.concatenate([loaded.y_train.numpy(), loaded.y_test.numpy()])
    order, there = np.lexsort(both.T[:3]), np.lexsort(wanted.T[:3])
    assert_allclose(both[order], wanted[there], atol=2e-3)  # printed with six digits
    assert (labels[order] == 1 - original.target[there]).all()  # malignant is 0 there
    assert len(loaded.y_test) == 171


def test_texts_have_the_form_of_arrays() -> None:
    names = ("x_train", "y_train", "x_test", "y_test", "class_names", "persons")
    assert Texts._fields == names
