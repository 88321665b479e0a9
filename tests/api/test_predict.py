"""``predict``, ``evaluate``, ``Run``: a finished run's classifier has the run's test accuracy."""

import csv
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import privssl
from privssl import evaluate, predict
from privssl.api.inputs import read_rows
from tests.api.digits import arrays, config

X, Y, X_TEST, Y_TEST = arrays(shape=(8, 8, 3))


def bytes_of(x: Any) -> Any:
    return (x * 255).astype(np.uint8)


@pytest.fixture(scope="module")
def npz(tmp_path_factory: pytest.TempPathFactory) -> tuple[privssl.Run, Path]:
    """A run on an NPZ file, and that file."""
    folder = tmp_path_factory.mktemp("npz")
    path = folder / "rows.npz"
    np.savez(path, x_train=X, y_train=Y, x_test=X_TEST, y_test=Y_TEST)
    given = {"data.name": "npz", "data.root": str(path)}
    return privssl.train(config(folder), given, output=folder / "run"), path


@pytest.fixture(scope="module")
def image_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[privssl.Run, Path]:
    """A run on a folder of resized images, and that folder."""
    folder = tmp_path_factory.mktemp("image_run")
    for part, x, y in (("train", X, Y), ("test", X_TEST, Y_TEST)):
        for number, (row, label) in enumerate(zip(bytes_of(x), y.tolist(), strict=True)):
            path = folder / "data" / part / ("dog", "cat", "eel")[label] / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(row).resize((11, 9 + number % 3)).save(path)
    given = {"data.name": "image_folder", "data.root": str(folder / "data"), "data.image_size": 8}
    return privssl.train(config(folder), given, output=folder / "run"), folder / "data"


def run_main(
    main: Any, capfd: pytest.CaptureFixture[str], *arguments: object, status: int = 0
) -> str:
    """Run a command; return its standard output, or its error if it fails."""
    assert main([str(argument) for argument in arguments]) == status
    shown = capfd.readouterr()
    return shown.err if status else shown.out


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def accuracy_of(rows: Sequence[dict[str, str]], true: Sequence[str]) -> float:
    return sum(row["class"] == name for row, name in zip(rows, true, strict=True)) / len(rows)


# Test accuracy ------------------------------------------------------------------------------------


def test_predictions_on_an_npz_file_have_the_runs_test_accuracy(
    npz: tuple[privssl.Run, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    run, path = npz
    reported = run.results["test_accuracy"]["final"]
    rows = table(run_main(predict.main, capfd, run.folder, path))
    assert accuracy_of(rows, [str(label) for label in Y_TEST]) == reported
    assert [row["row"] for row in rows[:2]] == [f"{path}:0", f"{path}:1"]
    for row in rows:
        by_class = {name: float(row[name]) for name in run.class_names}
        assert sum(by_class.values()) == pytest.approx(1, abs=1e-5)
        assert row["class"] == max(by_class, key=by_class.__getitem__)
    found = json.loads(run_main(evaluate.main, capfd, run.folder, path, "--json"))
    assert (found["rows"], found["accuracy"]) == (30, reported)
    # The other metrics agree with results.json and with the printed predictions.
    assert {name: found[name] for name in run.results["metrics"]} == run.results["metrics"]
    pairs = [(str(true), row["class"]) for true, row in zip(Y_TEST, rows, strict=True)]
    names = run.class_names
    assert found["confusion"] == [[pairs.count((a, b)) for b in names] for a in names]
    assert f"accuracy: {reported:.4f}" in run_main(evaluate.main, capfd, run.folder, path)


def test_predictions_on_images_have_the_runs_test_accuracy(
    image_run: tuple[privssl.Run, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    run, data = image_run
    reported = run.results["test_accuracy"]["final"]
    rows = table(run_main(predict.main, capfd, run.folder, data / "test"))
    assert len(rows) == 30
    assert accuracy_of(rows, [Path(row["row"]).parent.name for row in rows]) == reported
    for folder in (data, data / "test"):
        found = json.loads(run_main(evaluate.main, capfd, run.folder, folder, "--json"))
        assert (found["rows"], found["accuracy"]) == (30, reported)


def odd_pictures() -> dict[str, Any]:
    """Pictures whose pixels depend on how they are read."""
    rng, picture = np.random.default_rng(3), Image.fromarray(bytes_of(X_TEST[0]))
    clear, turned = picture.convert("RGBA"), Image.Exif()
    clear.putalpha(Image.fromarray(rng.choice([0, 90, 255], (8, 8)).astype(np.uint8)))
    turned[274] = 6  # the EXIF orientation
    return {
        "alpha.png": (clear, {}),
        "palette.png": (clear.convert("P"), {"transparency": 0}),
        "turned.png": (picture, {"exif": turned}),
    }


@pytest.mark.parametrize(("name", "odd"), odd_pictures().items(), ids=list(odd_pictures()))
def test_a_picture_in_memory_is_predicted_like_its_file(
    image_run: tuple[privssl.Run, Path], tmp_path: Path, name: str, odd: tuple[Any, dict[str, Any]]
) -> None:
    run = image_run[0]
    odd[0].save(tmp_path / name, **odd[1])
    [(_, rows)] = read_rows([tmp_path / name], run.form)
    with Image.open(tmp_path / name) as picture:
        assert (run.network_input([picture]) == run.network_input(rows)).all()
        plain = np.asarray(picture.convert("RGB"))
    assert (run.network_input(rows) != run.network_input(plain[None])).any()  # the control


def test_a_damaged_picture_in_memory_raises_one_clear_error(
    image_run: tuple[privssl.Run, Path], tmp_path: Path
) -> None:
    path = tmp_path / "cut.png"
    Image.fromarray(bytes_of(X_TEST[0])).save(path)
    path.write_bytes(path.read_bytes()[:-60])
    with (
        Image.open(path) as picture,
        pytest.raises(privssl.UserError, match="row 0 cannot be read as an image"),
    ):
        image_run[0].predict([picture])


def test_json_and_csv_predictions_have_the_same_rows(
    npz: tuple[privssl.Run, Path], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, _ = npz
    np.save(tmp_path / "x.npy", X_TEST)
    Image.fromarray(bytes_of(X_TEST[0])).save(tmp_path / "one.png")
    given = (run.folder, tmp_path / "x.npy", tmp_path / "one.png")
    found = json.loads(run_main(predict.main, capfd, *given, "--json"))
    assert run_main(predict.main, capfd, *given, "--output", tmp_path / "out.csv") == ""
    written = table((tmp_path / "out.csv").read_text())
    assert [row["class"] for row in written] == [row["class"] for row in found]
    assert [row["row"] for row in written] == [row["row"] for row in found]
    assert len(found) == 31
    assert found[0]["probabilities"]["1"] == pytest.approx(float(written[0]["1"]), abs=1e-6)


def test_a_prediction_file_replaces_only_former_predictions(
    npz: tuple[privssl.Run, Path], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, _ = npz
    np.save(tmp_path / "x.npy", X_TEST)
    given = (run.folder, tmp_path / "x.npy")
    for kind in ([], ["--json"]):
        for _ in range(2):
            run_main(predict.main, capfd, *given, *kind, "--output", tmp_path / "out.csv")
    for path, said in (
        (tmp_path / "x.npy", "exists and holds no predictions. Choose another --output"),
        (run.folder / "config.yaml", "exists and holds no predictions"),
        (tmp_path, "cannot be written: Is a directory. Name a file in a folder that exists"),
        (tmp_path / "a" / "b.csv", "cannot be written: No such file or directory. Name a file"),
    ):
        before = path.read_bytes() if path.is_file() else None
        assert said in run_main(predict.main, capfd, *given, "--output", path, status=2)
        assert before == (path.read_bytes() if path.is_file() else None)


def test_predict_accepts_arrays_tensors_and_lists_of_images(npz: tuple[privssl.Run, Path]) -> None:
    run, _ = npz
    x = bytes_of(X_TEST)
    names = run.predict(x)
    assert names.shape == (30,)
    assert (run.predict(torch.tensor(x)) == names).all()
    assert (run.predict(x.transpose(0, 3, 1, 2)) == names).all()
    assert (run.predict([Image.fromarray(row) for row in x]) == names).all()
    assert run.predict(x[:0]).shape == (0,)
    assert run.predict(x[:0], probabilities=True).shape == (0, 3)
    # Predictions do not depend on the batch.
    alone = np.concatenate([run.predict(row[None]) for row in x])
    assert (alone == names).all()


# Run folders --------------------------------------------------------------------------------------


def test_a_moved_run_folder_can_predict(npz: tuple[privssl.Run, Path], tmp_path: Path) -> None:
    run, _ = npz
    shutil.copytree(run.folder, tmp_path / "moved")
    moved = privssl.open_run(tmp_path / "moved")
    assert moved.results == run.results
    assert (moved.predict(X_TEST) == run.predict(X_TEST)).all()


def test_run_metrics_are_columns_or_a_data_frame(npz: tuple[privssl.Run, Path]) -> None:
    run, _ = npz
    assert run.metrics["round"] == [1.0, 2.0]
    assert run.metrics["test/accuracy"][-1] == run.results["test_accuracy"]["final"]
    try:
        frame = run.frame()
    except privssl.UserError as error:
        assert "pip install pandas" in str(error)
        return
    assert frame["test/accuracy"].tolist() == run.metrics["test/accuracy"]


def test_opening_anything_but_a_finished_run_raises_one_clear_error(
    npz: tuple[privssl.Run, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, path = npz
    broken = tmp_path / "broken"
    shutil.copytree(run.folder, broken)
    (broken / "classifier.safetensors").write_bytes(b"nothing")
    for folder, message in (
        (tmp_path, "no results.json"),
        (tmp_path / "absent", "there is no run folder"),
        (broken, "classifier.safetensors"),
    ):
        text = run_main(predict.main, capfd, folder, path, status=2)
        assert message in text
        assert "Traceback" not in text
    (broken / "classifier.safetensors").unlink()
    with pytest.raises(privssl.UserError, match=r"has no classifier\.safetensors"):
        privssl.open_run(broken).classifier()


def test_a_model_argument_that_is_no_network_is_refused_when_the_run_is_opened(
    npz: tuple[privssl.Run, Path],
) -> None:
    with pytest.raises(privssl.UserError, match=r"model is 5\. Give a torch\.nn\.Module class"):
        privssl.open_run(npz[0].folder, model=5)  # type: ignore[arg-type]


WRONG_ROWS = [
    (X_TEST[..., :1], r"the shape \(1, 8, 8\), .* trained on \(3, 8, 8\)"),
    (X_TEST[:, :4], r"the shape \(3, 4, 8\).*Resize or convert them"),
    (X_TEST[0], r"This is one row: give a batch of it, x\[None\]"),
    (X_TEST.reshape(30, -1), r"the shape \(192,\)"),
    (X_TEST * 9, r"floats in \[0, 1\]"),
    (["a.png"], "Give numbers"),
    (None, "predict"),
    (5, r"5 is one value. Give rows"),
]


@pytest.mark.parametrize(("x", "message"), WRONG_ROWS, ids=range(len(WRONG_ROWS)))
def test_rows_of_another_shape_raise_one_clear_error(
    x: Any, message: str, npz: tuple[privssl.Run, Path]
) -> None:
    with pytest.raises(privssl.UserError, match=message):
        npz[0].predict(x)


def test_the_error_about_unsuitable_weights_names_them(npz: tuple[privssl.Run, Path]) -> None:
    def build_wider_network(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, classes + 1))

    with pytest.raises(privssl.UserError, match=r"does not fit .* \(Missing key.*Give the network"):
        privssl.open_run(npz[0].folder, model=build_wider_network).classifier()


def test_wrong_labels_raise_one_clear_error(npz: tuple[privssl.Run, Path]) -> None:
    for y, message in (
        (Y_TEST[:-1], "30 rows and 29 labels"),
        (Y_TEST + 1, "labels go from 1 to 3, and classes from 0 to 2"),
        (Y_TEST + 0.5, "knows no class 0.5"),
        (["wolf"] * 30, "knows no class wolf"),
        (None, r"labels are object of shape \(\)"),
        ("wolf", r"labels are <U4 of shape \(\)"),
    ):
        with pytest.raises(privssl.UserError, match=message):
            npz[0].evaluate(X_TEST, y)


def test_labels_that_may_be_class_numbers_or_class_names_are_refused(
    npz: tuple[privssl.Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grades 1, 2 and 3 are classes 0, 1 and 2. The controls: names as text, and labels that are
    no names."""
    run = npz[0]
    wanted = run.evaluate(X_TEST, Y_TEST)["accuracy"]
    monkeypatch.setitem(run.results, "class_names", ["1", "2", "3"])
    graded = Y_TEST < 2  # no row of grade 3, so all labels are below the number of classes
    with pytest.raises(privssl.UserError, match="labels 1, 2 can be class numbers"):
        run.evaluate(X_TEST[graded], Y_TEST[graded] + 1)
    assert run.evaluate(X_TEST, (Y_TEST + 1).astype(str))["accuracy"] == wanted
    assert run.evaluate(X_TEST, Y_TEST)["accuracy"] == wanted


def test_unreadable_inputs_raise_one_clear_error(
    npz: tuple[privssl.Run, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, _ = npz
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "bad.png").write_text("x")
    (tmp_path / "bad.npy").write_text("x")
    np.savez(tmp_path / "other.npz", rows=X_TEST)
    for name, message in (
        ("absent.png", "absent.png: no such file"),
        ("absent.npz", "no such file"),
        ("absent", "no such file"),
        ("empty", "holds no image"),
        ("notes.txt", "no picture, folder, NPZ, NPY or CSV file"),
        ("bad.png", "cannot be read as an image"),
        ("bad.npy", "cannot be read as an NPY file"),
        ("other.npz", "has no x, or x_test, or x_unlabelled"),
    ):
        text = run_main(predict.main, capfd, run.folder, tmp_path / name, status=2)
        assert message in text, text
        assert "Traceback" not in text
    text = run_main(evaluate.main, capfd, run.folder, tmp_path / "other.npz", status=2)
    assert "has no x and y, or x_test and y_test" in text
    np.save(tmp_path / "rows.npy", X_TEST)
    text = run_main(evaluate.main, capfd, run.folder, tmp_path / "rows.npy", status=2)
    assert "single array. Save x and y, or x_test and y_test with numpy.savez_compressed" in text
    shutil.copy(tmp_path / "rows.npy", tmp_path / "ROWS.NPY")
    assert "Traceback" not in run_main(predict.main, capfd, run.folder, tmp_path / "ROWS.NPY")
    text = run_main(predict.main, capfd, tmp_path / "rows.npy", tmp_path / "rows.npy", status=2)
    assert "rows.npy has no results.json: it is no run" in text  # a file is no run folder
