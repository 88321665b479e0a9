"""``predict`` and ``evaluate`` on tables, texts and encoded images."""

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

# weight, colour, class: both classes have every colour and weight, so some predictions are wrong
ROWS = [
    (round(w, 2), colour, ("cat", "dog")[int(w + noise > 5)])
    for w, colour, noise in zip(
        np.random.default_rng(0).uniform(0, 10, 150), ["red", "a, b", "blue"] * 50,
        np.random.default_rng(1).normal(0, 2, 150), strict=True,
    )
]  # fmt: skip
WORDS_OF_CLASS = {"cat": ["purr", "soft"], "dog": ["bark", "loud"]}
VOCABULARY = ["purr", "soft", "bark", "loud"]
TEXTS = [
    (c, " ".join(np.random.default_rng(n).choice(VOCABULARY + WORDS_OF_CLASS[c], 3)))
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
def encoders_available(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Encoder]]:
    """The encoders that these tests provide."""
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


def train_run(folder: Path, data: dict[str, Any], **sections: Any) -> privssl.Run:
    config = {
        "run": {"workers": 1, "device": "cpu"},
        "agents": {"support": 2, "query": 2},
        "data": {"labelled": 40, "unlabelled": 40, **data},
        "model": {"name": "mlp", "width": 4},
        "algorithm": {"name": "pseudo", "rounds": 2, "local_steps": 3},
    }
    return privssl.train(config | sections, output=folder / "run")


def table_run(folder: Path) -> tuple[privssl.Run, Path, list[str]]:
    """A run on a table, a test file with another column order, and the true classes."""
    head = ("weight", "colour", "animal")
    save(folder / "rows" / "train.csv", head, ROWS[:110])
    save(folder / "rows" / "test.csv", head, ROWS[110:])
    run = train_run(folder, {"name": "csv", "root": str(folder / "rows"), "label": "animal"})
    new = [("x", c, colour, w) for w, colour, c in ROWS[110:]]
    path = save(folder / "new.csv", ("more", "animal", "colour", "weight"), new)
    shutil.rmtree(folder / "rows")  # the run folder is enough
    return run, path, [row[2] for row in ROWS[110:]]


def text_run(folder: Path) -> tuple[privssl.Run, Path, list[str]]:
    """A run on texts through an encoder, and its test file."""
    save(folder / "rows" / "train.csv", ("animal", "said"), TEXTS[:110])
    save(folder / "rows" / "test.csv", ("animal", "said"), TEXTS[110:])
    data = {"name": "csv", "text": "said", "label": "animal", "encoder": TEXT.name}
    run = train_run(folder, {**data, "root": str(folder / "rows")})
    return run, folder / "rows" / "test.csv", [row[0] for row in TEXTS[110:]]


def tweet_run(folder: Path) -> tuple[privssl.Run, Path, list[str]]:
    """A run on tweets, which are cleaned and whose files use other class names."""
    rows = [(int(c == "dog"), said.replace(" ", "  &amp; ")) for c, said in TEXTS]
    save(folder / "rows" / "train.csv", ("label", "text"), rows[:110])
    path = save(folder / "rows" / "test.csv", ("label", "text"), rows[110:])
    run = train_run(
        folder, {"name": "sent140", "encoder": TEXT.name, "root": str(folder / "rows"),
                 "labelled": 8, "unlabelled": 4},
    )  # fmt: skip
    return run, path, [("negative", "positive")[label] for label, _ in rows[110:]]


def picture_run(folder: Path) -> tuple[privssl.Run, Path, list[str]]:
    """A run on features of images, and its NPZ file."""
    x, y, x_test, y_test = arrays(shape=(8, 8, 3))
    train, test = ((255 * rows).astype(np.uint8) for rows in (x, x_test))
    path = folder / "rows.npz"
    np.savez(path, x_train=train, y_train=y, x_test=test, y_test=y_test)
    run = train_run(folder, {"name": "npz", "root": str(path), "encoder": PICTURE.name})
    return run, path, [str(label) for label in y_test]


RunAndFile = tuple[privssl.Run, Path, list[str]]
KINDS: dict[str, Callable[[Path], RunAndFile]] = {
    "table": table_run, "texts": text_run, "tweets": tweet_run, "pictures": picture_run,
}  # fmt: skip


@pytest.fixture(scope="module")
def run_and_file(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunAndFile]:
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


# Test accuracy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_have_the_runs_test_accuracy(
    kind: str, run_and_file: dict[str, RunAndFile], capfd: pytest.CaptureFixture[str]
) -> None:
    run, path, true = run_and_file[kind]
    reported = run.results["test_accuracy"]["final"]
    lines = lines_of(run_main(predict.main, capfd, run.folder, path))
    right = sum(line["class"] == name for line, name in zip(lines, true, strict=True))
    assert right / len(true) == reported
    assert lines[1]["row"] == f"{path}:1"
    found = json.loads(run_main(evaluate.main, capfd, run.folder, path, "--json"))
    assert (found["rows"], found["accuracy"]) == (len(true), reported)
    assert {name: found[name] for name in run.results["metrics"]} == run.results["metrics"]
    # The control: in another order of rows the accuracy differs.
    again = [line["class"] for line in lines]
    assert any(
        sum(a == b for a, b in zip(again[n:] + again[:n], true, strict=True)) != right
        for n in range(1, 5)
    )


def test_a_folder_is_refused_as_input_of_a_run_on_a_table(
    run_and_file: dict[str, RunAndFile], capfd: pytest.CaptureFixture[str]
) -> None:
    run, path, _ = run_and_file["table"]
    for command in (predict.main, evaluate.main):
        assert command([str(run.folder), str(path.parent)]) == 2
        assert "not trained on pictures, but on a table: a CSV file" in capfd.readouterr().err


def test_texts_tables_and_images_can_be_predicted_from_python(
    run_and_file: dict[str, RunAndFile],
) -> None:
    run, path, _ = run_and_file["table"]
    lines = lines_of(path.read_text(encoding="utf-8"))
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    x, _ = run.form.read_csv(path, labelled=False)
    names = run.predict(columns)
    assert (run.predict(x) == names).all()  # scaled already
    numbers = {**columns, "weight": np.array([float(w) for w in columns["weight"]])}
    assert (run.predict(numbers) == names).all()

    run, path, true = run_and_file["texts"]
    texts = [line["said"] for line in lines_of(path.read_text(encoding="utf-8"))]
    names = run.predict(texts)
    for form in (np.array(texts), np.array(texts, dtype=object), tuple(texts)):
        assert (run.predict(form) == names).all()
    features = text_features(texts).half().float()
    assert (run.predict(features) == names).all()
    assert run.evaluate(texts, true)["accuracy"] == run.results["test_accuracy"]["final"]

    run, path, _ = run_and_file["pictures"]
    x = np.load(path)["x_test"]
    names = run.predict(x)
    assert (run.predict([Image.fromarray(row) for row in x]) == names).all()
    assert (run.predict(torch.tensor(x).permute(0, 3, 1, 2)) == names).all()
    assert run.predict(x[:0]).shape == (0,)


def test_an_image_is_resized_to_the_input_size_of_the_runs_encoder(
    run_and_file: dict[str, RunAndFile], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, path, _ = run_and_file["pictures"]
    row = np.load(path)["x_test"][1]
    Image.fromarray(row).save(tmp_path / "one.png")
    Image.fromarray(row).resize((21, 17)).save(tmp_path / "two.png")
    text = run_main(predict.main, capfd, run.folder, tmp_path / "one.png", tmp_path / "two.png")
    lines = lines_of(text)
    assert len(lines) == 2 and lines[0]["class"] == run.predict(row[None])[0]


def test_results_json_describes_the_rows(run_and_file: dict[str, RunAndFile]) -> None:
    assert run_and_file["table"][0].results["rows"]["columns"] == {
        "weight": [min(r[0] for r in ROWS[:110]), max(r[0] for r in ROWS[:110])],
        "colour": ["a, b", "blue", "red"],
    }
    assert run_and_file["pictures"][0].results["rows"]["raw_shape"] == [3, 8, 8]
    assert run_and_file["texts"][0].results["rows"]["encoder"] == TEXT.about


# Mistakes -----------------------------------------------------------------------------------------


def encoder_missing(name: str, weights: str) -> Encoder:
    raise DataError(f"data.encoder {name} needs the package x: pip install x")


@pytest.mark.parametrize("kind", ["texts", "pictures"])
def test_a_missing_or_changed_encoder_raises_one_clear_error(
    kind: str, run_and_file: dict[str, RunAndFile], encoders_available: dict[str, Encoder],
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run, path, _ = run_and_file[kind]
    name = run.results["rows"]["encoder"]["name"]
    monkeypatch.setitem(
        encoders_available, name, replace(encoders_available[name], checksum="0" * 64)
    )
    said = run_main(predict.main, capfd, run.folder, path, status=2)
    assert f"data.encoder {name}: its weights here have the checksum 000000000000" in said
    monkeypatch.setattr(datasets, "open_encoder", encoder_missing)
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
def test_files_with_other_rows_raise_one_clear_error(
    kind: str, name: str, content: str, message: str,
    run_and_file: dict[str, RunAndFile], tmp_path: Path, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if content:
        (tmp_path / name).write_text(content)
    assert message in run_main(
        predict.main, capfd, run_and_file[kind][0].folder, tmp_path / name, status=2
    )


def test_evaluate_refuses_rows_without_a_label_or_of_an_unknown_class(
    run_and_file: dict[str, RunAndFile], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.csv"
    for label, message in (("", "line 3: no label"), ("eel", "knows no class eel")):
        path.write_text(f"said,animal\npurr,cat\nbark,{label}\n")
        assert message in run_main(
            evaluate.main, capfd, run_and_file["texts"][0].folder, path, status=2
        )


def test_wrong_rows_from_python_raise_one_clear_error(run_and_file: dict[str, RunAndFile]) -> None:
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
            run_and_file[kind][0].predict(x)
