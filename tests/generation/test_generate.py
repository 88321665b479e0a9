"""``privssl generate``: rows of the requested classes, and a true line about their guarantee."""

import contextlib
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from accounting.budget import NO_GUARANTEE
from privssl import Dataset, generate, open_run
from privssl import train as api_train
from privssl.data.column_values import snap_to_columns
from privssl.data.csv_rows import numbers_of, read_new
from privssl.data.npz import Scale
from privssl.errors import DataError, PrivacyError, UserError
from privssl.generation import files, rows
from tests.support.command_line import PLAIN, Outcome, assert_refused
from tests.support.command_line import command as train
from tests.support.toy_worlds import TOY

SOUND = "privacy: {epsilon: 50.0, noise_multiplier: 4.0, sample_rate: 0.5, steps: 2}\n"
PUBLISHED = SOUND.replace(
    "{", "{acknowledge_unsound: true, update_at_support: [F, G, D], protect: [G], "
)
CENSUS = """
data: {name: toy, labels: support, labelled: 40, unlabelled: 80}
agents: {support: 2, query: 2}
model: {name: small_cnn, width: 4}
algorithm:
  {name: label_census, cells: 20, filters: 8, cluster_rounds: 3, vote_rounds: 1, local_steps: 1,
   self_training_rounds: 1, generator_rounds: 2, generator_width: 4, noise_size: 4}
privacy: {epsilon: 4.0}
"""
TABLE = """
data: {name: csv, root: ROOT, label: kind, columns: ROOT/columns.yaml, labelled: 20}
agents: {support: 2, query: 2}
model: {name: mlp}
algorithm:
  {name: fedssl, rounds: 2, local_steps: 1, generator: variational, generator_width: 2}
"""
OF_FRAME: dict[str, Any] = {
    "agents": {"support": 2, "query": 2}, "model": {"name": "mlp"}, "data": {"labelled": 9},
    "algorithm": {"name": "fedssl", "rounds": 1, "local_steps": 1},
}  # fmt: skip
COLUMNS = """
age: [18, 90]
weight: [30, 200, missing]
colour: ["red", "green"]
"""


def command(*arguments: object) -> Outcome:
    """``python -m privssl.generate`` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = generate.main([str(argument) for argument in arguments])
    return Outcome(status, out.getvalue(), err.getvalue())


def _pixels(path: Path) -> Any:
    with Image.open(path) as picture:
        return np.asarray(picture)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a finished run of a config, trained once."""
    base = tmp_path_factory.mktemp("runs")

    def folder(text: str) -> Path:
        place = base / f"{abs(hash(text))}"
        if not place.exists():
            path = base / "run.yaml"
            path.write_text(text)
            outcome = train(path, f"run.output={place}", "run.evaluate_every=100", "--quiet")
            assert outcome.status == 0, outcome
        return place

    return folder


@pytest.fixture(scope="module")
def table_run(runs: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table with a number, one with missing values, and a category."""
    root = tmp_path_factory.mktemp("table")
    (root / "columns.yaml").write_text(COLUMNS)
    rng = np.random.default_rng(0)
    for name, count in (("train", 100), ("test", 40)):
        lines = ["age,weight,colour,kind"]
        for number in range(count):
            weight = "" if number % 7 == 0 else f"{rng.uniform(30, 200):.3f}"
            colour, kind = ("red", "green")[number % 2], ("cat", "dog")[number % 3 == 0]
            lines.append(f"{rng.uniform(18, 90):.3f},{weight},{colour},{kind}")
        (root / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return runs(TABLE.replace("ROOT", str(root)))


def test_a_csv_file_has_the_columns_of_the_table_in_their_units_and_the_classes(
    table_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "made.csv"
    made = command(table_run, "--count", 200, "--output", out)
    assert made.status == 0, made
    with out.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == ["age", "weight", "colour", "kind"] and len(lines) == 200
    assert [line["kind"] for line in lines] == ["cat", "dog"] * 100
    assert {line["colour"] for line in lines} == {"red", "green"}
    assert all(18 <= float(line["age"]) <= 90 for line in lines)
    weights = [line["weight"] for line in lines]
    assert "" in weights and all(30 <= float(weight) <= 200 for weight in weights if weight)
    # The file is what a table of this run is: predict reads it, and so do the numbers in Python.
    run = open_run(table_run)
    x, _ = run.generate(200)
    by_name = {name: [line[name] for line in lines] for name in ("age", "weight", "colour")}
    assert run.predict(by_name, probabilities=True) == pytest.approx(
        run.predict(x, probabilities=True), abs=1e-4
    )
    in_python = run.to_columns(x)
    assert in_python["colour"] == by_name["colour"]
    assert in_python["age"] == pytest.approx([float(line["age"]) for line in lines], rel=1e-5)
    assert [value is None for value in in_python["weight"]] == [not w for w in weights]
    assert set(np.unique(x[:, 2:])) == {-1.0, 1.0}  # whether weight is missing, and colours


def test_fields_of_a_csv_file_tell_numbers_apart_and_are_within_their_bounds(
    tmp_path: Path,
) -> None:
    scales: dict[str, Scale] = {
        "time": (1_700_002_893.0, 1_702_591_621.0), "code": (1e6, 1e6 + 5), "loss": (-1e-9, 0.0),
        "third": (1 / 3, 2 / 3, "missing"),
    }  # fmt: skip
    x = np.stack([np.linspace(-1, 1, 1001)] * 4 + [np.full(1001, -1)], axis=1).astype(np.float32)
    made = rows.SyntheticRows(x, np.zeros(1001, dtype=np.int64), ("a", "b"), "", scales, "kind")
    files.write_rows(made, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    for place, (name, scale) in enumerate(scales.items()):
        low, high = float(scale[0]), float(scale[1])
        numbers = np.array([float(line[name]) for line in lines])
        assert low <= numbers.min() and numbers.max() <= high
        assert 2 * (numbers - low) / (high - low) - 1 == pytest.approx(x[:, place], abs=2e-5)


def test_a_csv_file_of_odd_categories_is_read_as_the_same_rows(tmp_path: Path) -> None:
    scales: dict[str, Scale] = {
        "c, d": ("a\rb", "a\nb", "a, b", " a", "'a'", '"', "NA", "nan", "", "=1+1"),
        'n "o"': (0.0, 1.0, "missing"), "e\rf": ("1", "2"),
    }  # fmt: skip
    numbers = np.random.default_rng(0).normal(size=(60, 14)).astype(np.float32)
    x = snap_to_columns(numbers, scales)
    made = rows.SyntheticRows(x, np.arange(60) % 2, ("a", "b, c"), "", scales, "kind")
    files.write_rows(made, tmp_path / "rows.csv")
    part = read_new(tmp_path / "rows.csv", tuple(scales), "kind")
    assert numbers_of(part, scales) == pytest.approx(x, abs=2e-5)
    assert part.labels == ["a", "b, c"] * 30


def test_a_csv_file_names_the_column_of_classes_as_the_frame_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = {"label": rng.uniform(size=60), "kind": ["cat", "dog"] * 30}  # a feature called label
    data = Dataset.from_frame(frame, label="kind")
    run = api_train(OF_FRAME, data=data, output=tmp_path / "run")
    assert command(run.folder, "--count", 4, "--output", tmp_path / "rows.csv").status == 0
    with (tmp_path / "rows.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == ["label", "kind"]
    assert [line["kind"] for line in lines] == ["cat", "dog"] * 2
    made = [float(line["label"]) for line in lines]
    assert made == pytest.approx(run.to_columns(run.generate(4)[0])["label"], rel=1e-4)


def test_a_class_with_a_comma_or_quotes_is_named_as_in_a_csv_file(tmp_path: Path) -> None:
    names = ["big, grey", 'the "cat"', "dog"]
    frame = {"size": np.arange(60.0), "kind": names * 20}
    data = Dataset.from_frame(frame, label="kind")
    run = api_train(OF_FRAME, data=data, output=tmp_path / "run")
    chosen = '"big, grey", "the ""cat"""'
    made = command(run.folder, "--count", 4, "--classes", chosen, "--output", tmp_path / "rows.csv")
    assert made.status == 0, made
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert [line["kind"] for line in csv.DictReader(file)] == names[:2] * 2


def test_a_csv_file_is_for_tables_and_pictures_are_for_images(
    runs: Callable[[str], Path], table_run: Path, tmp_path: Path
) -> None:
    refused = command(runs(PLAIN), "--count", 2, "--output", tmp_path / "rows.csv")
    assert_refused(refused, "rows are no table", "FILE.npz")
    refused = command(table_run, "--count", 2, "--output", tmp_path / "pictures")
    assert_refused(refused, "rows are no images", "FILE.npz or FILE.csv")
    image_run, table = open_run(runs(PLAIN)), open_run(table_run)
    with pytest.raises(DataError, match="was not trained on a table"):
        image_run.to_columns(image_run.generate(2)[0])
    with pytest.raises(DataError, match=r"rows are \(2, 3\). Give \(N, 5\)"):
        table.to_columns(np.zeros((2, 3), dtype=np.float32))
    made, _ = table.generate(2)
    assert table.to_columns(made.tolist()) == table.to_columns(made)  # lists and tensors, too
    with pytest.raises(DataError, match="to_columns"):
        table.to_columns("rows")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_an_npz_file_contains_rows_of_each_class_in_the_form_of_the_data(
    runs: Callable[[str], Path], tmp_path: Path
) -> None:
    made = command(runs(PLAIN), "--count", 23, "--output", tmp_path / "made.npz")
    assert made.status == 0, made
    with np.load(tmp_path / "made.npz", allow_pickle=False) as file:
        x, y, names = file["x"], file["y"], file["class_names"]
    real = TOY.x_train.numpy()
    assert (x.dtype, x.shape[1:]) == (real.dtype, real.shape[1:]) and len(x) == len(y) == 23
    assert x.min() >= 0 and x.max() <= 255 and x.std() > 1
    # as balanced as 23 rows can be
    assert np.bincount(y, minlength=10).tolist() == [3, 3, 3, *[2] * 7]
    assert tuple(names) == TOY.class_names
    assert _pixels(tmp_path / "made.contact_sheet.png").shape[1] > 8 * 10
    assert made.out.splitlines()[-1].startswith(NO_GUARANTEE)


def test_one_seed_gives_the_same_rows_and_another_gives_others(
    runs: Callable[[str], Path],
) -> None:
    folder = runs(PLAIN)
    first, again, other = (rows.generate_rows(folder, 6, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.x, again.x) and np.array_equal(first.y, again.y)
    assert not np.array_equal(first.x, other.x)
    more = rows.generate_rows(folder, 6, ["3", "7"])
    assert more.y.tolist() == [3, 7] * 3


def test_pictures_lie_in_folders_of_their_classes(
    runs: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "pictures"
    made = command(runs(PLAIN), "--count", 5, "--classes", "2,8", "--output", out, "--seed", 4)
    assert made.status == 0, made
    found = sorted(str(path.relative_to(out)) for path in out.rglob("*.png"))
    assert found == ["2/00000.png", "2/00002.png", "2/00004.png", "8/00001.png", "8/00003.png"]
    assert (tmp_path / "pictures.contact_sheet.png").is_file()  # the folder contains rows only
    expected = rows.generate_rows(runs(PLAIN), 5, ["2", "8"], seed=4)
    assert np.array_equal(_pixels(out / "8" / "00003.png"), expected.x[3, 0])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--count", 0), ("count is 0", "1 or more")),
        (("--count", -3), ("count is -3",)),
        (("--count", 2, "--classes", "3,x"), ("classes", "unknown class")),
        (("--count", 2, "--classes", ""), ("classes", "unknown class")),
        (("--count", 2, "--seed", -1), ("seed is -1",)),
        (("--count", 2, "--confidence", 1), ("confidence is 1.0", "below 1")),
        (("--count", 2, "--confidence", "nan"), ("confidence is nan",)),
    ],
)
def test_an_invalid_argument_is_an_error_and_nothing_is_written(
    arguments: tuple[object, ...],
    said: tuple[str, ...],
    runs: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    assert_refused(command(runs(PLAIN), *arguments, "--output", tmp_path / "x.npz"), *said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["rows.npy", "rows.json", "rows.PNG"])
def test_pictures_are_not_written_under_the_name_of_another_file_type(
    name: str, runs: Callable[[str], Path], tmp_path: Path
) -> None:
    refused = command(runs(PLAIN), "--count", 2, "--output", tmp_path / name)
    assert_refused(refused, name, "FILE.npz, or as PNG pictures into a folder")
    assert list(tmp_path.iterdir()) == []


def test_upper_case_npz_suffixes_and_spaces_between_classes_are_accepted(
    runs: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "rows.NPZ"
    made = command(runs(PLAIN), "--count", 2, "--classes", "3, 8", "--output", out)
    assert made.status == 0, made
    with np.load(out, allow_pickle=False) as file:
        assert file["y"].tolist() == [3, 8]


def test_existing_files_are_not_replaced(runs: Callable[[str], Path], tmp_path: Path) -> None:
    for taken in ("x.npz", "x.contact_sheet.png"):
        (tmp_path / taken).write_text("mine")
        refused = command(runs(PLAIN), "--count", 2, "--output", tmp_path / "x.npz")
        assert_refused(refused, taken, "exists", "another --output")
        assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
        (tmp_path / taken).unlink()


def test_runs_that_cannot_generate_are_refused(runs: Callable[[str], Path], tmp_path: Path) -> None:
    out = ("--count", 2, "--output", tmp_path / "x.npz")
    assert_refused(command(tmp_path, *out), "not the folder of a run")
    pseudo = runs(PLAIN.replace("fedssl", "pseudo").replace("  generator_width: 4\n", ""))
    assert_refused(command(pseudo, *out), "pseudo, which has no generator", "fedssl")
    assert_refused(
        command(runs(CENSUS.replace("generator_rounds: 2", "generator_rounds: 0")), *out),
        "trained no generator", "algorithm.generator_rounds",
    )  # fmt: skip
    unfinished = runs(PLAIN + "run: {seed: 5}\n")
    results = json.loads((unfinished / "results.json").read_text())
    (unfinished / "results.json").write_text(json.dumps(results | {"status": "interrupted"}))
    assert_refused(command(unfinished, *out), "not finished", "--resume")
    (unfinished / "results.json").unlink()
    assert_refused(command(unfinished, *out), "not finished")


def test_a_sound_run_states_what_covers_the_rows_after_an_acknowledgement(
    runs: Callable[[str], Path], tmp_path: Path
) -> None:
    out = ("--count", 4, "--output", tmp_path / "x.npz")
    refused = command(runs(PLAIN + SOUND), *out)
    assert_refused(refused, "Unlabelled rows are not protected", "--acknowledge-query-rows")
    with pytest.raises(PrivacyError, match="--acknowledge-query-rows"):
        rows.generate_rows(runs(PLAIN + SOUND), 4)
    given = command(runs(PLAIN + SOUND), *out, "--acknowledge-query-rows")
    assert given.status == 0, given
    last = given.out.splitlines()[-1]
    card = json.loads((runs(PLAIN + SOUND) / "privacy.json").read_text())
    assert "post-processing of what is covered" in last and card["sentence"] in last
    assert "Unlabelled rows are not protected" in last


def test_the_published_scheme_and_a_damaged_ledger_cover_nothing(
    runs: Callable[[str], Path], tmp_path: Path
) -> None:
    published = runs(PLAIN + PUBLISHED)
    out = ("--count", 4, "--output", tmp_path / "x.npz", "--acknowledge-query-rows")
    last = command(published, *out).out.splitlines()[-1]
    assert last.startswith("NOMINAL") and "post-processing" not in last
    card = json.loads((runs(PLAIN + SOUND) / "privacy.json").read_text())
    assert "post-processing" in rows.coverage_sentence(card)  # the control
    damaged = rows.coverage_sentence({**card, "ledger_problems": ["s0"], "guarantee": None})
    assert damaged.startswith("NO GUARANTEE") and "post-processing" not in damaged


def test_a_class_that_cannot_name_a_folder_needs_an_npz_file(
    runs: Callable[[str], Path], tmp_path: Path
) -> None:
    made = rows.generate_rows(runs(PLAIN), 2)
    odd = rows.SyntheticRows(made.x, made.y, ("a/b", *made.class_names[1:]), made.covered_by)
    with pytest.raises(Exception, match=r"cannot name a folder. Give --output FILE.npz"):
        files.write_rows(odd, tmp_path / "pictures")
    assert not (tmp_path / "pictures").exists()
    files.write_rows(odd, tmp_path / "x.npz")


def _made_up(x: Any) -> Any:
    """A classifier that is confident of rows with an even sum, for any class."""
    even = x.reshape(len(x), -1).sum(axis=1, dtype=np.int64) % 2 == 0
    return np.where(even, 0.9, 0.1)[:, None].repeat(10, axis=1).astype(np.float32)


def test_with_a_confidence_rows_are_drawn_until_the_classifier_reaches_it(
    runs: Callable[[str], Path],
) -> None:
    plain = rows.generate_rows(runs(PLAIN), 40)
    sure = rows.generate_rows(runs(PLAIN), 40, confidence=0.9, classify=_made_up)
    kept = _made_up(plain.x)[:, 0] >= 0.9
    assert 0 < kept.sum() < 40  # otherwise nothing is tested
    assert (_made_up(sure.x) >= 0.9).all() and np.array_equal(sure.y, plain.y)
    assert np.array_equal(sure.x[kept], plain.x[kept])  # an accepted row is not drawn again
    assert all(not np.array_equal(a, b) for a, b in zip(sure.x[~kept], plain.x[~kept], strict=True))


@pytest.mark.parametrize("given", [0.5, np.nan])
def test_a_confidence_that_no_row_reaches_is_reported(
    given: float, runs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "DRAWS", 3)
    never = lambda x: np.full((len(x), 10), given, dtype=np.float32)  # noqa: E731
    with pytest.raises(UserError, match=r"confidence 0.6: 4 of 4 rows stay below it after 3"):
        rows.generate_rows(runs(PLAIN), 4, confidence=0.6, classify=never)


def test_the_command_and_python_use_the_classifier_of_the_run(
    runs: Callable[[str], Path], tmp_path: Path
) -> None:
    run = open_run(runs(PLAIN))
    usual = run.predict(run.generate(60)[0], probabilities=True)[np.arange(60), np.arange(60) % 10]
    wanted = float(
        np.median(usual.reshape(6, 10), axis=0).min()
    )  # half the rows of a class reach it
    out = ("--count", 60, "--output", tmp_path / "x.npz", "--confidence", wanted)
    assert command(runs(PLAIN), *out).status == 0
    with np.load(tmp_path / "x.npz", allow_pickle=False) as file:
        x, y = file["x"], file["y"]
    assert (run.predict(x, probabilities=True)[np.arange(60), y] >= np.float32(wanted)).all()
    assert np.array_equal(run.generate(60, confidence=wanted)[0], x)


def test_rows_of_a_label_census_are_post_processing_of_pure_epsilon(
    runs: Callable[[str], Path], tmp_path: Path
) -> None:
    out = ("--count", 20, "--output", tmp_path / "x.npz")
    assert_refused(command(runs(CENSUS), *out), "--acknowledge-query-rows")
    made = command(runs(CENSUS), *out, "--acknowledge-query-rows")
    assert made.status == 0, made
    assert "post-processing of what is covered" in made.out
    assert "4-DP (pure epsilon, delta 0" in made.out and rows.NOT_PROTECTED in made.out
    with np.load(tmp_path / "x.npz", allow_pickle=False) as file:
        assert file["x"].shape[0] == 20 and file["x"].dtype == np.uint8
        assert np.bincount(file["y"]).tolist() == [2] * 10
