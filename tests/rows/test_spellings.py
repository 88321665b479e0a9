"""Tables with other spellings, or another order of columns, than in training."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import privssl
from privssl import export
from privssl.data.csv_rows import read_table
from privssl.data.fields import (
    doubled,
    odd_categories,
    odd_numbers,
    places_of,
    plain,
    tells_classes,
)
from tests.api.digits import Frame, arrays
from tests.rows.test_csv_rows import save

ROWS = 60
CONFIG = {
    "algorithm": {"name": "fedavg", "rounds": 1},
    "agents": {"support": 2},
    "data": {"labelled": 20},
    "model": {"name": "mlp"},
    "run": {"workers": 1},
}


def patients(**more: Any) -> Frame:
    columns = {
        "ward": np.arange(ROWS) % 3 + 1,
        "smoker": [number % 4 < 2 for number in range(ROWS)],
        "pressure": np.linspace(100, 150, ROWS),
        "ill": [number % 2 == 0 for number in range(ROWS)],
    }
    return Frame(**(columns | more))


def declared(frame: Frame) -> privssl.Dataset:
    columns: dict[str, Any] = {
        "ward": ["1", "2", "3"],
        "smoker": ["False", "True"],
        "pressure": [100, 150],
    }
    return privssl.Dataset.from_frame(frame, "ill", columns=columns, class_names=["False", "True"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> privssl.Run:
    return privssl.train(
        CONFIG, data=declared(patients()), output=tmp_path_factory.mktemp("spellings") / "run"
    )


# Categories ----------------------------------------------------------------------------------


def test_integer_categories_beside_a_missing_value_keep_their_category(
    run: privssl.Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Pandas stores such a column as floats. The control: 1.5 is no ward."""
    wanted = run.predict(patients(), probabilities=True)
    ward = np.arange(ROWS) % 3 + 1.0
    found = run.predict(patients(ward=ward, smoker=["TRUE", "true", "FALSE", "false"] * 15), True)
    assert (found == wanted).all() and not caplog.text
    ward[:2] = np.nan, 1.5
    found = run.predict(patients(ward=ward), probabilities=True)
    assert (found != wanted).any(axis=1).tolist() == [True, True] + [False] * (ROWS - 2)
    said = "2 values of column ward are not among its categories (the first: ''; it has 1, 2, 3)"
    assert said in caplog.text


def test_a_value_that_matches_two_categories_or_is_missing_has_no_category() -> None:
    assert places_of(["m", "M", "f", "F", "x"], ["M", "f", "m"]) == [2, 0, 1, 1, -1]
    assert places_of(["yes", "Yes", "YES"], ["yes", "Yes"]) == [0, 1, -1]
    assert places_of(["", "NA", "none"], ["none", "nuts"]) == [-1, -1, 0]


# Classes -------------------------------------------------------------------------------------


def test_a_class_keeps_its_name_if_some_rows_of_its_file_have_no_label(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pandas writes 0 and 1 beside a missing label as 0.0 and 1.0. The control: v1 is not v1.0."""
    head = ("label", "size")
    for train, test in (("1.0", "1"), ("1", "1.0")):
        save(tmp_path, "train", [head, ("0", 1), (train, 2), ("", 3)])
        save(tmp_path, "test", [head, (test, 1), ("0.0", 2)])
        found = read_table(tmp_path, label="label", columns=None)
        assert found.class_names == ("0", train) and found.y_test.tolist() == [1, 0]
    assert not caplog.text
    save(tmp_path, "train", [head, ("0", 1), ("v1", 2)])
    save(tmp_path, "test", [head, ("v1.0", 1)])
    with pytest.raises(privssl.UserError, match=r"'v1\.0', which no training row has"):
        read_table(tmp_path, label="label", columns=None)


@pytest.mark.parametrize(
    ("names", "pair"),
    [
        (["Ill", "ill", "well"], ("Ill", "ill")),
        (["1", "1.0"], ("1", "1.0")),
        (["v1", "v1.0"], None),
    ],
)
def test_classes_that_differ_in_spelling_only_cause_a_warning(
    names: Sequence[str], pair: tuple[str, str] | None
) -> None:
    assert doubled(names) == pair
    labels = [names[number % len(names)] for number in range(ROWS)]
    found = privssl.Dataset.from_frame(patients(ill=labels), "ill")
    assert any("are two classes. Write them alike" in w for w in found.warnings) == bool(pair)


def test_labels_of_a_frame_are_matched_to_classes_as_in_training(run: privssl.Run) -> None:
    rows = patients()
    wanted = run.evaluate(rows, [str(label) for label in rows["ill"]])
    for labels in (np.array(rows["ill"]), rows["ill"], np.array(rows["ill"]) * 1.0):
        assert run.evaluate(rows, labels) == wanted
    with pytest.raises(privssl.UserError, match="evaluate, row 1: no label"):
        run.evaluate(rows, ["True", None] * (ROWS // 2))
    with pytest.raises(privssl.UserError, match="evaluate, row 0: no label"):
        run.evaluate(rows, np.full(ROWS, np.nan))
    with pytest.raises(privssl.UserError, match=r"knows no class 0\.5"):
        run.evaluate(rows, np.full(ROWS, 0.5))


def test_fractional_class_names_may_also_be_class_numbers(
    run: privssl.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: numbers that are no class names."""
    for names, refused in ((["1.0", "2.0"], True), (["0.0", "1.0"], False)):
        monkeypatch.setitem(run.results, "class_names", names)
        labels = np.ones(ROWS, dtype=int)
        if refused:
            with pytest.raises(privssl.UserError, match="can be class numbers"):
                run.evaluate(patients(), labels)
        else:
            assert run.evaluate(patients(), labels)["recall"]["0.0"] is None


# Columns -------------------------------------------------------------------------------------


def test_a_list_of_mappings_is_predicted_like_a_table(run: privssl.Run) -> None:
    rows = patients()
    lines = [{n: rows[n][at] for n in reversed(rows.columns)} for at in range(ROWS)]
    assert (run.predict(lines) == run.predict(rows)).all()
    del lines[7]["ward"]
    wrong: tuple[tuple[Any, str], ...] = (
        (lines, "row 7: no column ward"),
        ([[1, "True", 120.0]], "lines without names of columns"),
        (np.array([[1, "True", 120.0]], dtype=object), "lines without names of columns"),
    )
    for given, message in wrong:
        with pytest.raises(privssl.UserError, match=message):
            run.predict(given)


def test_a_duplicate_column_of_a_frame_is_named(run: privssl.Run) -> None:
    rows = patients()
    rows.columns.append("ward")
    for call in (run.predict, lambda frame: privssl.Dataset.from_frame(frame, "ill")):
        with pytest.raises(privssl.UserError, match="has the column ward twice"):
            call(rows)


def test_the_label_may_be_a_column_whose_name_is_not_text() -> None:
    frame = Frame(a=[1.0, 2.0] * 10, b=["x", "y"] * 10)
    frame._columns |= {2: frame["b"], ("b", "c"): frame["b"]}  # type: ignore[dict-item]
    frame.columns = ["a", 2, ("b", "c")]  # type: ignore[list-item]
    for label in (2, ("b", "c")):
        found = privssl.Dataset.from_frame(frame, label=label)  # type: ignore[arg-type]
        assert found.class_names == ("x", "y")
        with pytest.raises(privssl.UserError, match=r"has no 3; it has a, 2, \('b', 'c'\)"):
            privssl.Dataset.from_frame(frame, label=3)  # type: ignore[arg-type]


class Table(np.ndarray):
    """Numbers with column names, like a frame that NumPy accepts."""

    columns: list[str]


def as_table(x: Any, *columns: str) -> Table:
    found = np.asarray(x).view(Table)
    found.columns = list(columns)
    return found


def test_frames_with_columns_in_another_order_are_not_read_by_position() -> None:
    """The control: the same order."""
    x, y, x_test, y_test = arrays(shape=(2,))
    train, same, other = (
        as_table(x, "a", "b"),
        as_table(x_test, "a", "b"),
        as_table(x_test, "b", "a"),
    )
    privssl.Dataset.from_arrays(train, y, same, y_test)
    privssl.Dataset.federated({"s0": (train, y), "q0": same}, test=(same, y_test))
    wrong: tuple[Callable[[], object], ...] = (
        lambda: privssl.Dataset.from_arrays(train, y, other, y_test),
        lambda: privssl.Dataset.from_arrays(train, y, same, y_test, x_unlabelled=other),
        lambda: privssl.Dataset.federated({"s0": (train, y), "q0": other}, test=(same, y_test)),
        lambda: privssl.Dataset.federated({"s0": (train, y)}, test=(other, y_test)),
    )
    for make in wrong:
        with pytest.raises(privssl.UserError, match=r"has the columns .*Bring them into one order"):
            make()


@pytest.mark.ci
def test_an_exported_table_documents_how_its_columns_become_numbers(
    run: privssl.Run, tmp_path: Path
) -> None:
    path = tmp_path / "table.pt2"
    assert export.main([str(run.folder), "--torch-export", str(path)]) == 0
    texts = dict.fromkeys(("columns", "scaling"), "")
    torch.export.load(path, extra_files=texts)
    assert json.loads(texts["columns"]) == run.results["rows"]["columns"]
    assert texts["scaling"].startswith("columns by their bounds")
    assert texts["scaling"] in (run.folder / "model_card.md").read_text()


# Suspicious columns --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["2020-01-31", "2020-02-01 10:00:00", ""], "has dates"),
        (["31.01.2020", "1/2/2020"], "has dates"),
        (["120,5", "99", "NA"], "has numbers with a comma, such as '120,5'"),
        (["a", "b", "c"], "has 3 different values in 3 rows: an identifier"),
        (["a", "b", "a", "b"], ""),
        (["", "NA", "", ""], ""),
    ],
)
def test_dates_decimal_commas_and_identifiers_are_suspicious_categories(
    values: Sequence[str], said: str
) -> None:
    assert said in odd_categories(values) and bool(odd_categories(values)) == bool(said)


def test_a_column_that_numbers_its_rows_causes_a_warning() -> None:
    """The control: one number occurs twice, or has a fraction."""
    ids = 10**12 + np.arange(ROWS)
    for number, told in ((ids, True), (np.where(ids == ids[1], ids[0], ids), False)):
        found = privssl.Dataset.from_frame(patients(number=number), "ill")
        said = [w for w in found.warnings if "column number has another whole number" in w]
        assert bool(said) == told
    assert not odd_numbers([1.0, 2.5]) and odd_numbers([1.0, 2.0])


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (["yes", "no"] * 30, True),
        (["yes", "no"] * 29 + ["no", "no"], False),  # one row has the other value
        (np.where(np.arange(ROWS) % 2, -1, 1) * np.linspace(1, 9, ROWS), True),  # by a threshold
        (np.linspace(1, 9, ROWS), False),
        ([f"row {number}" for number in range(ROWS)], False),  # each value occurs once
        (["only"] * ROWS, False),
    ],
)
def test_a_column_that_determines_the_class_is_found(values: Sequence[Any], told: bool) -> None:
    labels = ["ill", "well"] * 30
    assert tells_classes([str(value) for value in values], labels) == told


def test_a_column_made_from_the_label_causes_a_warning() -> None:
    """The control: the other columns."""
    found = privssl.Dataset.from_frame(patients(made=["yes", "no"] * 30), "ill")
    said = [warning for warning in found.warnings if "alone tells the class" in warning]
    assert [warning.split()[2] for warning in said] == ["made"]


def test_a_match_that_chance_explains_causes_no_warning() -> None:
    assert not tells_classes(["yes", "no"] * 5, ["ill", "well"] * 5)  # 1 in 63 of ten rows
    rare = ["a"] + ["b"] * 99
    assert not tells_classes(rare, ["ill"] + ["well"] * 99)  # 1 in 25: one row is ill
    assert not tells_classes(["yes"] * 40, ["ill"] * 20 + [""] * 20)  # one class


def test_a_label_column_of_measured_numbers_is_named_in_the_error() -> None:
    with pytest.raises(privssl.UserError, match="60 rows have 60 different labels"):
        privssl.Dataset.from_frame(patients(), label="pressure")


def test_codes_with_an_underscore_are_categories_and_no_numbers(tmp_path: Path) -> None:
    """Python reads 1_01 and 10_1 as 101."""
    codes = ["1_01", "10_1", "2_2"]
    frame = patients(ward=[codes[number % 3] for number in range(ROWS)])
    scales = privssl.Dataset.from_frame(frame, "ill").rows.scales or {}
    assert scales["ward"] == ("10_1", "1_01", "2_2")
    bounds: dict[str, Any] = {"ward": [0, 200]}
    with pytest.raises(privssl.UserError, match=r"column ward has '1_01'\. Give finite numbers"):
        privssl.Dataset.from_frame(frame, "ill", columns=bounds)
    assert plain("1_01") != plain("10_1") != plain("101")


@pytest.mark.parametrize(
    ("labels", "warned"),
    [((-1, 0, 1), True), (("-1", "0", "1"), True), ((-1.0, 0.0, 1.0), True), ((-1, 1), False),
     ((0, 1), False)],
)  # fmt: skip
def test_a_class_minus_one_beside_two_others_causes_a_warning(
    labels: tuple[Any, ...], warned: bool
) -> None:
    """In arrays, and in scikit-learn, it means no label."""
    frame = patients(ill=[labels[number % len(labels)] for number in range(ROWS)])
    said = privssl.Dataset.from_frame(frame, "ill").warnings
    assert any("have the label -1, which counts as a class" in text for text in said) == warned
