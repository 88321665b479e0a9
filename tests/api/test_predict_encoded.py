"""``predict`` and ``evaluate`` on tables, texts and encoded pictures, as the run measured them."""

import csv
import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import privssl
from privssl import evaluate, predict
from privssl.data import datasets
from privssl.encoders import frozen
from privssl.encoders.frozen import Encoder
from privssl.errors import DataError
from tests.api.digits import arrays

ROWS = [  # weight, colour, class: each colour and weight of both classes, so that errors are made
    (round(w, 2), colour, ("cat", "dog")[int(w + noise > 5)])
    for w, colour, noise in zip(
        np.random.default_rng(0).uniform(0, 10, 150), ["red", "a, b", "blue"] * 50,
        np.random.default_rng(1).normal(0, 2, 150), strict=True,
    )
]  # fmt: skip
WORDS = {"cat": ["purr", "soft"], "dog": ["bark", "loud"]}
VOCABULARY = ["purr", "soft", "bark", "loud"]
TEXTS = [
    (c, " ".join(np.random.default_rng(n).choice(VOCABULARY + WORDS[c], 3)))
    for n, (_, _, c) in enumerate(ROWS)
]


def text_features(texts: Any) -> Tensor:
    counts = [[text.count(word) for word in VOCABULARY] for text in texts]
    return torch.tensor(counts).float()


def picture_features(rows: Any) -> Tensor:
    assert rows.dtype == torch.uint8 and rows.shape[1:] == (3, 8, 8)
    features: Tensor = rows[:, :, ::4, 3].float().flatten(1) / 255 - 0.5
    return features


TEXT = Encoder("minilm_mean", (4,), "t" * 64, "no data", lambda: text_features)
PICTURE = Encoder("efficientnet_lite0", (6,), "p" * 64, "no data", lambda: picture_features)


@pytest.fixture(scope="module", autouse=True)
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Encoder]]:
    """The encoders at hand."""
    at_hand = {TEXT.name: TEXT, PICTURE.name: PICTURE}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIVSSL_DATA", str(tmp_path_factory.mktemp("data")))
        patch.setattr(datasets, "open_encoder", lambda name, weights: at_hand[name])
        patch.setattr(frozen, "_networks", {})
        yield at_hand


def save(path: Path, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows])
    return path


def trained(folder: Path, data: dict[str, Any], **sections: Any) -> privssl.Run:
    config = {
        "run": {"workers": 1, "device": "cpu"},
        "agents": {"support": 2, "query": 2},
        "data": {"labelled": 40, "unlabelled": 40, **data},
        "model": {"name": "mlp", "width": 4},
        "algorithm": {"name": "pseudo", "rounds": 2, "local_steps": 3},
    }
    return privssl.train(config | sections, output=folder / "run")


def table_run(folder: Path) -> tuple[privssl.Run, Path, list[str]]:
    """A run on a table, its test file with other columns' order, and the true classes."""
    head = ("weight", "colour", "animal")
    save(folder / "rows" / "train.csv", head, ROWS[:110])
    save(folder / "rows" / "test.csv", head, ROWS[110:])
    run = trained(folder, {"name": "csv", "root": str(folder / "rows"), "label": "animal"})
    new = [("x", c, colour, w) for w, colour, c in ROWS[110:]]
    path = save(folder / "new.csv", ("more", "animal", "colour", "weight"), new)
    shutil.rmtree(folder / "rows")  # the run folder has what it takes
    return run, path, [row[2] for row in ROWS[110:]]


def text_run(folder: Path) -> tuple[privssl.Run, Path, list[str]]:
    """A run on texts through an encoder, and its test file."""
    save(folder / "rows" / "train.csv", ("animal", "said"), TEXTS[:110])
    save(folder / "rows" / "test.csv", ("animal", "said"), TEXTS[110:])
    data = {"name": "csv", "text": "said", "label": "animal", "encoder": TEXT.name}
    run = trained(folder, {**data, "root": str(folder / "rows")})
    return run, folder / "rows" / "test.csv", [row[0] for row in TEXTS[110:]]


def tweet_run(folder: Path) -> tuple[privssl.Run, Path, list[str]]:
    """Tweets, whose classes have other names in the files, and which are cleaned."""
    rows = [(int(c == "dog"), said.replace(" ", "  &amp; ")) for c, said in TEXTS]
    save(folder / "rows" / "train.csv", ("label", "text"), rows[:110])
    path = save(folder / "rows" / "test.csv", ("label", "text"), rows[110:])
    run = trained(
        folder, {"name": "sent140", "encoder": TEXT.name, "root": str(folder / "rows"),
                 "labelled": 8, "unlabelled": 4},
    )  # fmt: skip
    return run, path, [("negative", "positive")[label] for label, _ in rows[110:]]


def picture_run(folder: Path) -> tuple[privssl.Run, Path, list[str]]:
    """A run on features of pictures, and its NPZ file."""
    x, y, x_test, y_test = arrays(shape=(8, 8, 3))
    train, test = ((255 * rows).astype(np.uint8) for rows in (x, x_test))
    path = folder / "rows.npz"
    np.savez(path, x_train=train, y_train=y, x_test=test, y_test=y_test)
    run = trained(folder, {"name": "npz", "root": str(path), "encoder": PICTURE.name})
    return run, path, [str(label) for label in y_test]


Made = tuple[privssl.Run, Path, list[str]]
KINDS: dict[str, Callable[[Path], Made]] = {
    "table": table_run, "texts": text_run, "tweets": tweet_run, "pictures": picture_run,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in KINDS.items()}


def run_main(
    main: Any, capfd: pytest.CaptureFixture[str], *arguments: object, status: int = 0
) -> str:
    assert main([str(argument) for argument in arguments]) == status
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    return shown.err if status else shown.out


def lines_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


# Equal to what the run measured -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_right_as_often_as_the_run_says(
    kind: str, made: dict[str, Made], capfd: pytest.CaptureFixture[str]
) -> None:
    run, path, true = made[kind]
    reported = run.results["test_accuracy"]["final"]
    lines = lines_of(run_main(predict.main, capfd, run.folder, path))
    right = sum(line["class"] == name for line, name in zip(lines, true, strict=True))
    assert right / len(true) == reported
    assert lines[1]["row"] == f"{path}:1"
    found = json.loads(run_main(evaluate.main, capfd, run.folder, path, "--json"))
    assert (found["rows"], found["accuracy"]) == (len(true), reported)
    assert {name: found[name] for name in run.results["metrics"]} == run.results["metrics"]
    # Rows at other places would be right at another rate: the check can fail.
    again = [line["class"] for line in lines]
    assert any(
        sum(a == b for a, b in zip(again[n:] + again[:n], true, strict=True)) != right
        for n in range(1, 5)
    )


def test_a_folder_for_a_run_on_a_table_is_refused_by_what_its_rows_are(
    made: dict[str, Made], capfd: pytest.CaptureFixture[str]
) -> None:
    run, path, _ = made["table"]
    for command in (predict.main, evaluate.main):
        assert command([str(run.folder), str(path.parent)]) == 2
        assert "not trained on pictures, but on a table: a CSV file" in capfd.readouterr().err


def test_texts_tables_and_pictures_are_predicted_from_python(made: dict[str, Made]) -> None:
    run, path, _ = made["table"]
    lines = lines_of(path.read_text(encoding="utf-8"))
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    x, _ = run.form.read_csv(path, labelled=False)
    names = run.predict(columns)
    assert (run.predict(x) == names).all()  # scaled already
    numbers = {**columns, "weight": np.array([float(w) for w in columns["weight"]])}
    assert (run.predict(numbers) == names).all()

    run, path, true = made["texts"]
    texts = [line["said"] for line in lines_of(path.read_text(encoding="utf-8"))]
    names = run.predict(texts)
    for form in (np.array(texts), np.array(texts, dtype=object), tuple(texts)):
        assert (run.predict(form) == names).all()
    features = text_features(texts).half().float()
    assert (run.predict(features) == names).all()
    assert run.evaluate(texts, true)["accuracy"] == run.results["test_accuracy"]["final"]

    run, path, _ = made["pictures"]
    x = np.load(path)["x_test"]
    names = run.predict(x)
    assert (run.predict([Image.fromarray(row) for row in x]) == names).all()
    assert (run.predict(torch.tensor(x).permute(0, 3, 1, 2)) == names).all()
    assert run.predict(x[:0]).shape == (0,)


def test_a_picture_is_resized_to_what_the_encoder_of_the_run_saw(
    made: dict[str, Made], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, path, _ = made["pictures"]
    row = np.load(path)["x_test"][1]
    Image.fromarray(row).save(tmp_path / "one.png")
    Image.fromarray(row).resize((21, 17)).save(tmp_path / "two.png")
    text = run_main(predict.main, capfd, run.folder, tmp_path / "one.png", tmp_path / "two.png")
    lines = lines_of(text)
    assert len(lines) == 2 and lines[0]["class"] == run.predict(row[None])[0]


def test_results_say_what_rows_were(made: dict[str, Made]) -> None:
    assert made["table"][0].results["rows"]["columns"] == {
        "weight": [min(r[0] for r in ROWS[:110]), max(r[0] for r in ROWS[:110])],
        "colour": ["a, b", "blue", "red"],
    }
    assert made["pictures"][0].results["rows"]["raw_shape"] == [3, 8, 8]
    assert made["texts"][0].results["rows"]["encoder"] == TEXT.about


# Mistakes -----------------------------------------------------------------------------------------


def absent(name: str, weights: str) -> Encoder:
    raise DataError(f"data.encoder {name} needs the package x: pip install x")


@pytest.mark.parametrize("kind", ["texts", "pictures"])
def test_an_encoder_that_is_absent_or_has_other_weights_is_one_error(
    kind: str, made: dict[str, Made], opened: dict[str, Encoder],
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run, path, _ = made[kind]
    name = run.results["rows"]["encoder"]["name"]
    monkeypatch.setitem(opened, name, replace(opened[name], checksum="0" * 64))
    said = run_main(predict.main, capfd, run.folder, path, status=2)
    assert f"data.encoder {name}: its weights here have the checksum 000000000000" in said
    monkeypatch.setattr(datasets, "open_encoder", absent)
    assert "pip install x" in run_main(evaluate.main, capfd, run.folder, path, status=2)


WRONG: list[tuple[str, str, str, str]] = [
    ("table", "a.csv", "colour,weight\nred,heavy\n", "line 2: column weight has 'heavy'"),
    ("table", "a.csv", "colour,animal\nred,cat\n", "has no column weight"),
    ("table", "a.csv", "colour,weight\n", "has no rows"),
    ("texts", "a.csv", "animal\ncat\n", "has no column said"),
    ("pictures", "a.csv", "said\nx\n", r"trained on rows of (3, 8, 8)"),
    ("table", "none.csv", "", "no such file"),
    ("table", "a.png", "x", "was not trained on pictures, but on a table"),
    ("texts", "a.png", "x", "not trained on pictures, but on texts: a CSV file with the column"),
]


@pytest.mark.parametrize(("kind", "name", "content", "message"), WRONG)
def test_files_of_other_rows_are_one_error(
    kind: str, name: str, content: str, message: str,
    made: dict[str, Made], tmp_path: Path, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if content:
        (tmp_path / name).write_text(content)
    assert message in run_main(predict.main, capfd, made[kind][0].folder, tmp_path / name, status=2)


def test_a_row_without_a_label_or_of_an_unknown_class_cannot_be_measured(
    made: dict[str, Made], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.csv"
    for label, message in (("", "line 3: no label"), ("eel", "knows no class eel")):
        path.write_text(f"said,animal\npurr,cat\nbark,{label}\n")
        assert message in run_main(evaluate.main, capfd, made["texts"][0].folder, path, status=2)


def test_what_rows_of_python_are_not_is_one_error(made: dict[str, Made]) -> None:
    rows: list[tuple[str, Any, str]] = [
        ("table", np.array([[5.0, 1, -1, -1]]), r"beyond \[-1, 1\]"),
        ("table", {"weight": [1]}, "no column colour"),
        ("table", {"weight": [1], "colour": ["red", "red"]}, "different lengths"),
        ("table", {"weight": ["1", "y"], "colour": ["red", "red"]}, "row 1: column weight has 'y'"),
        ("table", ["purr"], "trained on a table"),
        ("texts", "purr", "Give a list of texts"),
        ("texts", {"said": ["purr"]}, "not on columns"),
        ("pictures", ["purr"], r"trained on rows of \(3, 8, 8\)"),
        ("pictures", np.zeros((2, 9, 8, 3)), r"shape \(3, 9, 8\), .* trained on \(3, 8, 8\)"),
    ]
    for kind, x, message in rows:
        with pytest.raises(privssl.UserError, match=message):
            made[kind][0].predict(x)
