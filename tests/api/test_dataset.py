"""``privssl.Dataset``: rows in memory, with the checks of NPZ files and clear errors."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

import privssl
from privssl.api.frames import field_of
from privssl.api.new_rows import RowForm
from privssl.data.npz import read_npz
from privssl.errors import PrivacyError
from privssl.experiment.row_checks import refuse_classes_of_labels_alone
from privssl.settings.schema import DataSettings
from tests.api.digits import PRIVATE, Frame, arrays, config, dataset, plain

Rows = privssl.Dataset
X, Y, X_TEST, Y_TEST = arrays()


def test_a_dataset_from_arrays_has_the_rows_of_the_same_npz_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    names = ("x_train", "y_train", "x_test", "y_test", "x_unlabelled")
    given = (X, Y, X_TEST, Y_TEST, X_TEST[:5])
    written: Any = dict(zip(names, given, strict=True))
    np.savez(path, **written)
    read, made = (
        read_npz(path),
        Rows.from_arrays(X, Y, X_TEST, Y_TEST, x_unlabelled=X_TEST[:5]).rows,
    )
    for name in ("x_train", "y_train", "x_test", "y_test"):
        assert (getattr(read, name) == getattr(made, name).numpy()).all(), name
    assert made.y_train[-5:].tolist() == [-1] * 5
    assert (made.class_names, made.shape) == (("0", "1", "2"), (1, 8, 8))


def test_a_dataset_accepts_tensors_and_lists_and_copies_them() -> None:
    x = X.copy()
    first = Rows.from_arrays(x, Y, X_TEST, Y_TEST)
    x[:] = 0
    x_train, y_train, x_test, y_test = map(torch.tensor, (X, Y, X_TEST, Y_TEST))
    tensors = Rows.from_arrays(x_train, y_train, x_test, y_test)
    lists = Rows.from_arrays(X.tolist(), Y.tolist(), X_TEST.tolist(), Y_TEST.tolist())
    assert first.checksum == tensors.checksum == lists.checksum == dataset().checksum
    assert Rows.from_arrays(x, Y, X_TEST, Y_TEST).checksum != first.checksum


class PillowDataset(TorchDataset[Any]):
    """A data set like torchvision's: Pillow images, class numbers and class names."""

    classes = ("no", "some", "much")

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[Any, int | None]:
        shade = 40 + 80 * (row % 3)
        label = None if row % 5 == 4 and self.rows > 30 else row % 3
        return Image.new("RGB", (10, 8), (shade, row, 7)), label


def test_a_dataset_accepts_map_style_datasets_of_torch() -> None:
    found = Rows.from_torch(PillowDataset(60), PillowDataset(30))
    assert (found.shape, found.class_names, len(found)) == ((3, 8, 10), PillowDataset.classes, 60)
    assert found.rows.x_train[4, :, 0, 0].tolist() == [120, 4, 7]
    assert found.rows.y_train[:6].tolist() == [0, 1, 2, 0, -1, 2]
    parts = [TensorDataset(torch.tensor(x), torch.tensor(y)) for x, y in ((X, Y), (X_TEST, Y_TEST))]
    assert Rows.from_torch(*parts).checksum == dataset().checksum


def test_an_array_with_a_mask_that_hides_nothing_is_accepted() -> None:
    found = Rows.from_arrays(np.ma.masked_less(X, -1), Y, X_TEST, Y_TEST)
    assert found.checksum == dataset().checksum


class HuggingFaceTable(list[dict[str, Any]]):
    """The methods of ``datasets.Dataset`` that privssl uses."""

    features: Any


def table(x: Any, y: Any, **columns: str) -> HuggingFaceTable:
    found = HuggingFaceTable(
        {"image": row, "digit": int(label)} for row, label in zip(x, y, strict=True)
    )
    found.features = {"image": SimpleNamespace(), "digit": SimpleNamespace(names=["a", "b", "c"])}
    return found


def test_a_dataset_accepts_hugging_face_datasets() -> None:
    found = Rows.from_huggingface(table(X, Y), table(X_TEST, Y_TEST), label="digit")
    assert found.class_names == ("a", "b", "c")
    assert found.checksum == dataset().checksum


Y_FLOAT, ITEM = Y.astype(float), [(X[0], 0), (X[1], 1)]
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "lengths": (lambda: Rows.from_arrays(X, Y[:-1], X_TEST, Y_TEST), "120 rows and y_train 119"),
    "shape": (
        lambda: Rows.from_arrays(X.reshape(120, 64), Y, X_TEST, Y_TEST),
        "Make them alike",
    ),
    "ragged": (lambda: Rows.from_arrays([[1], [1, 2]], Y, X, Y), "x_train is no array"),
    "range": (lambda: Rows.from_arrays(X * 9, Y, X_TEST, Y_TEST), r"floats in \[0, 1\]"),
    "float labels": (lambda: Rows.from_arrays(X, Y_FLOAT, X_TEST, Y_TEST), "y_train is float64"),
    "text labels": (lambda: Rows.from_arrays(X, Y.astype(str), X, Y), "number the classes"),
    "no test label": (
        lambda: Rows.from_arrays(X, Y, X_TEST, Y_TEST - 1),
        "y_test has the label -1",
    ),
    "few names": (lambda: Rows.from_arrays(X, Y, X, Y, ["a", "b"]), "2 names, .* 3 classes"),
    "equal names": (lambda: Rows.from_arrays(X, Y, X, Y, ["a", "b", "b"]), "name of its own"),
    "one name": (lambda: Rows.from_arrays(X, Y, X, Y, "abc"), "Give a list of names"),
    "no pair": (lambda: Rows.from_torch([X[0]], ITEM), r"train: item 0 is no \(row, label\)"),
    "no label": (lambda: Rows.from_torch(ITEM, [(X[0], "a")]), "test: row 0 has the label 'a'"),
    "half a label": (lambda: Rows.from_torch(ITEM, [(X[0], 0.5)]), "row 0 has the label 0.5"),
    "a stream": (lambda: Rows.from_torch(iter(ITEM), ITEM), "Give a map-style data set"),
    "two forms": (
        lambda: Rows.from_torch([*ITEM, (X[0, :4], 0)], ITEM),
        "row 2 is float32 of shape",
    ),
    "no rows": (lambda: Rows.from_torch([], ITEM), "train has no rows"),
    "an infinite label": (lambda: Rows.from_torch([(X[0], float("inf"))], ITEM), "the label inf"),
    "a huge label": (lambda: Rows.from_torch([(X[0], 10**30)], ITEM), "the label 1000"),
    "masked values": (
        lambda: Rows.from_arrays(np.ma.masked_less(X, 0.1), Y, X_TEST, Y_TEST),
        "x_train has masked values",
    ),
    "16 bits": (
        lambda: Rows.from_torch([(Image.fromarray(np.full((8, 8), 999, np.uint16)), 0)], ITEM),
        "row 0 is an image of Pillow's mode I;16",
    ),
    "floats in a picture": (
        lambda: Rows.from_torch([(Image.fromarray(X[0]), 0)], ITEM),
        "row 0 is an image of Pillow's mode F",
    ),
    "no features": (lambda: Rows.from_huggingface(ITEM, ITEM), "a list without features"),
    "no column": (lambda: Rows.from_huggingface(table(X, Y), table(X, Y)), "no column 'label'"),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_wrong_rows_raise_one_clear_error(make: Callable[[], object], message: str) -> None:
    with pytest.raises(privssl.UserError, match=message):
        make()


# Federated rows ----------------------------------------------------------------------------------

AGENTS = {"s1": (X[20:40], Y[20:40]), "s0": (X[:20], Y[:20]), "q0": X[40:]}


def test_federated_rows_stay_with_their_agents(tmp_path: Path) -> None:
    run = privssl.train(
        config(tmp_path), None, Rows.federated(AGENTS, (X_TEST, Y_TEST)), output=tmp_path / "run"
    )
    split = json.loads((run.folder / "split.json").read_text())["agents"]
    # Ids are numbered through the agents in natural order: q0 first.
    assert split["q0"] == {"labelled": [], "unlabelled": list(range(80))}
    assert split["s0"] == {"labelled": list(range(80, 100)), "unlabelled": []}
    assert split["s1"] == {"labelled": list(range(100, 120)), "unlabelled": []}
    assert run.results["agents"] == {"support": 2, "query": 1}


def test_mixed_agents_and_a_server_hold_the_rows_given_to_them() -> None:
    y = np.where(np.arange(60) < 10, Y[:60], -1)
    mixed = Rows.federated({"m0": (X[:60], y), "m1": (X[60:], Y[60:])}, (X_TEST, Y_TEST))
    assert mixed.settings["data.labels"] == "labels-at-client"
    assert mixed.settings["agents.mixed"] == 2
    assert (mixed.settings["data.labelled"], mixed.settings["data.unlabelled"]) == (70, 50)
    server = Rows.federated({"server": (X[:60], Y[:60]), "q0": X[60:]}, (X_TEST, Y_TEST))
    assert server.settings["data.labels"] == "labels-at-server"
    assert (server.settings["agents.support"], server.settings["agents.query"]) == (0, 1)


def test_the_agents_of_a_run_follow_from_its_federated_rows(tmp_path: Path) -> None:
    sections = {"algorithm": {"name": "pseudo", "rounds": 1}}  # needs a query agent
    data = Rows.federated(AGENTS, (X_TEST, Y_TEST))
    run = privssl.train(sections, {"run.workers": 1}, data, output=tmp_path / "run")
    assert run.results["agents"] == {"support": 2, "query": 1}


FEDERATED: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"hospital": (X, Y)}, "'hospital' is no agent's name. Call agents s0, q0"),
    "gap": ({"s0": (X, Y), "s2": (X, Y)}, "s0, s2, where a run would have s0, s1"),
    "no labels": ({"q0": X}, "agents.support is 0"),
    "none": ({}, "no agent would hold labels"),
    "rows alone": ({"s0": X}, r"s0 is .*Give \(x, y\)"),
    "lengths": ({"s0": (X, Y[:3])}, r"s0 has 120 rows and labels of shape \(3,\)"),
    "hidden labels": ({"s0": (X, Y - 1)}, "s0 has rows without a label"),
    "forms": (
        {"s0": (X, Y), "q0": X[:, :4]},
        "rows of different forms or types: .* Make them alike",
    ),
    "kinds": ({"s0": (X, Y), "m0": (X, Y)}, "agents.support is 1"),
    "labels at a query agent": ({"s0": (X, Y), "q0": (X, Y)}, "q0 has labels, .* Give x alone"),
    "numbers": ({0: (X, Y)}, "agents is .*Give the rows of each agent by its name"),  # type: ignore[dict-item]
    "a list": ([(X, Y)], "agents is .*Give the rows of each agent by its name"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize(("agents", "message"), FEDERATED.values(), ids=FEDERATED)
def test_invalid_agents_raise_one_clear_error(agents: dict[str, Any], message: str) -> None:
    with pytest.raises(privssl.UserError, match=message):
        Rows.federated(agents, (X_TEST, Y_TEST))


def test_test_rows_of_agents_need_labels() -> None:
    with pytest.raises(privssl.UserError, match=r"test is ndarray. Give \(x, y\)"):
        Rows.federated(AGENTS, X_TEST)


def test_a_config_key_that_a_python_argument_sets_is_refused(tmp_path: Path) -> None:
    data = Rows.federated(AGENTS, (X_TEST, Y_TEST))
    for key, given, argument in (
        ("data.labelled", 5, "data"),
        ("agents.query", 2, "data"),
        ("run.output", "x", "output"),
        ("model.name", "mlp", "model"),
    ):
        error_text = f"{key}: set by {argument}=. Leave one of the two out"
        with pytest.raises(privssl.UserError, match=error_text):
            privssl.train(config(tmp_path), {key: given}, data, "linear", tmp_path / "run")


def test_split_settings_are_refused_for_federated_rows(tmp_path: Path) -> None:
    data = Rows.federated(AGENTS, (X_TEST, Y_TEST))
    with pytest.raises(privssl.UserError, match=r"data\.validation can divide them no more"):
        privssl.train(config(tmp_path), {"data.validation": 5}, data, output=tmp_path / "run")
    private = {"privacy.record_counts": "private"}
    only = {name: rows for name, rows in AGENTS.items() if name != "q0"}
    data = Rows.federated(only, (X_TEST, Y_TEST))
    with pytest.raises(privssl.UserError, match=r"writes the number of labelled rows"):
        privssl.train(config(tmp_path, PRIVATE), private, data, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


VECTORS = {
    "model": {"name": "linear"}, "algorithm": {"name": "fedavg", "rounds": 1},
    "privacy": {"epsilon": 8.0, "delta": 1e-3, "sample_rate": 1.0, "steps": 1},
}  # fmt: skip


@pytest.mark.parametrize("agent", ["s1", "q0"])
def test_private_vectors_standardised_by_an_agents_own_rows_are_refused(
    agent: str, tmp_path: Path
) -> None:
    """Also if the rows of all agents together do not look standardised."""
    rng, y = np.random.default_rng(0), np.arange(50) % 2
    rows = {name: rng.uniform(-1, 1, (50, 6)).astype(np.float32) for name in ("s0", "s1", "q0")}
    rows[agent] = (rows[agent] - rows[agent].mean(axis=0)) / rows[agent].std(axis=0)
    agents: Any = {name: x if name == "q0" else (x, y) for name, x in rows.items()}
    data = Rows.federated(agents, (rng.uniform(-1, 1, (40, 6)), y[:40]), ["a", "b"])
    assert not data.rows.standardised
    if agent == "q0":  # the control: only labelled rows are protected
        assert privssl.train(VECTORS, data=data, output=tmp_path / "run").guarantee
        return
    with pytest.raises(PrivacyError, match="scaled by their own statistics"):
        privssl.train(VECTORS, data=data, output=tmp_path / "run")
    assert privssl.train(VECTORS, {"privacy": None}, data, output=tmp_path / "run")


# Tables -------------------------------------------------------------------------------------------


AGES = [20, 30, 40, 60, 25, 35, 45, 55]
FRAME = Frame(age=AGES, colour=["red", "blue"] * 4, target=["no", "yes"] * 4)
NO_COLUMNS: dict[str, Any] = {"age": 3}
COLUMNS: dict[str, Any] = {"age": [0, 80], "colour": ["blue", "red", "green"]}


def test_a_data_frame_is_scaled_by_declared_bounds_or_by_its_training_rows() -> None:
    found = Rows.from_frame(FRAME, "target", test=0.25, columns=COLUMNS)
    assert (found.shape, found.class_names) == ((4,), ("no", "yes"))
    assert (len(found), len(found.rows.y_test)) == (6, 2)  # a quarter of the four of each class
    every = torch.cat([found.rows.x_train, found.rows.x_test])
    wanted = sorted([2 * age / 80 - 1, -1.0, 1.0, -1.0] if at % 2 == 0 else
                    [2 * age / 80 - 1, 1.0, -1.0, -1.0] for at, age in enumerate(AGES))  # fmt: skip
    assert np.allclose(sorted(every.tolist()), wanted)
    rows = found.network_rows(Frame(colour=["green"], age=[80.0], other=[1]))
    assert rows.tolist() == [[1.0, -1.0, -1.0, 1.0]]
    measured = Rows.from_frame(FRAME, "target", test=FRAME)  # bounds 20 and 60, blue and red
    assert measured.network_rows(Frame(age=[40], colour=["red"])).tolist() == [[0.0, -1.0, 1.0]]
    assert measured.shape == (3,)


def test_a_mapping_of_columns_is_read_like_a_frame_of_them() -> None:
    columns = {"age": np.array(AGES), "colour": ["red", "blue"] * 4, "target": ["no", "yes"] * 4}
    ours, of_frame = (Rows.from_frame(x, "target", 0.25, COLUMNS) for x in (columns, FRAME))
    assert torch.equal(ours.rows.x_train, of_frame.rows.x_train)
    assert torch.equal(ours.rows.y_test, of_frame.rows.y_test)
    assert ours.rows.records == of_frame.rows.records  # the same records to an account
    new = {"age": [80.0], "colour": ["green"]}
    assert ours.network_rows(new).tolist() == of_frame.network_rows(Frame(**new)).tolist()


def test_warnings_about_a_data_frame_are_kept_for_the_log_and_the_results() -> None:
    def warnings_of(ages: list[int]) -> list[str]:
        found = Rows.from_frame(Frame(age=ages, x=range(8), y=["no", "yes"] * 4), "y", test=0.25)
        return [record.getMessage() for record in found.rows.said]

    assert warnings_of([30] * 8) == [
        "Dataset.from_frame: column age is constant, so it has no information."
    ]
    assert warnings_of(AGES) == []  # the control


def test_a_row_without_a_label_is_a_training_row_and_no_test_row() -> None:
    labels = [0.0, 1.0, None, float("nan"), 0.0, 1.0, 0.0, 1.0]  # as in pandas
    found = Rows.from_frame(Frame(x=AGES, label=labels), test=0.3)
    assert found.class_names == ("0", "1")
    assert found.rows.y_train.tolist().count(-1) == 2 and -1 not in found.rows.y_test.tolist()


def test_a_rows_record_does_not_depend_on_the_declared_columns() -> None:
    def records(columns: dict[str, Any], **more: Any) -> tuple[str, ...] | None:
        frame = Frame(age=AGES, colour=["red", "blue"] * 4, target=["no", "yes"] * 4, **more)
        return Rows.from_frame(frame, "target", 0.25, columns).rows.records

    age = {"age": [0, 80]}
    assert records(COLUMNS) == records(age) is not None
    # The control: an undeclared patient number distinguishes rows, as in a CSV file.
    pictures = [np.zeros(2)] * 8
    assert records(age) != records(age, patient=range(8)) != records(age, patient=pictures)


def test_a_rows_record_does_not_depend_on_precision_or_on_the_csv_reader() -> None:
    def records(sizes: Any, smokes: Any) -> tuple[str, ...]:
        frame = Frame(size=sizes, smokes=smokes, target=["no", "yes"] * 4)
        found = Rows.from_frame(frame, "target", 0.25, {"size": [0, 9]}).rows.records
        assert found is not None
        return found

    sizes, smokes = np.linspace(1.1, 8.3, 8).round(2), [True, False] * 4
    double = records(sizes, smokes)
    assert len(set(double)) == len(double)
    assert records(sizes.astype(np.float32), smokes) == double
    # Simulates a CSV reader with slightly different numbers and unparsed booleans.
    assert records(np.nextafter(sizes, 9), ["true", "false"] * 4) == double
    # The control: whole numbers of any size are exact and distinguish rows.
    assert not set(records([2**24] * 8, smokes)) & set(records([2**24 + 1] * 8, smokes))


def test_a_rows_record_does_not_depend_on_memory_addresses_or_on_set_order() -> None:
    def fields(*tags: str) -> list[str]:
        kept = [object() for _ in range(3)]  # objects at different addresses
        assert len(set(map(str, kept))) == 3
        pictures = [Image.new("L", (2, 2), grey) for grey in (0, 0, 7)]
        return [*map(field_of, (*kept, *pictures)), field_of(set(tags))]

    one, other = fields("i", "q"), fields("q", "i")
    assert one == other and len({*one[:3]}) == 1 and "0x" not in "".join(one)
    assert one[3] == one[4] != one[5]  # images are compared by pixels
    assert field_of({"i", "q"}) != field_of({"i"}) != field_of("met at 0x1")
    assert field_of("met at 0x1") == "met at 0x1"  # texts are compared exactly


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_missing_category_is_encoded_alike_in_training_and_prediction(missing: object) -> None:
    frame = Frame(
        colour=["red", missing] * 4, size=np.array(AGES, np.float32) / 3, target=["no", "yes"] * 4
    )
    data = Rows.from_frame(frame, "target", test=0.25)
    settings = DataSettings(name="arrays")
    form = RowForm(Path("run"), settings, data.shape, None, data.rows.scales, None, "as stored")
    found = form.convert(frame)
    assert found.tolist() == data.network_rows(frame).tolist()
    assert found[1, :2].tolist() == [1.0, -1.0]  # no value, then red


@pytest.mark.parametrize("top", [50, 80])
def test_suspicious_data_frames_give_a_warning_in_the_run(top: int, tmp_path: Path) -> None:
    """The control: bounds that hold all ages."""
    rng = np.random.default_rng(0)
    frame = Frame(age=rng.permutation(np.linspace(0, 79, 60)), label=[0, 1] * 30)
    data = Rows.from_frame(frame, columns={"age": [0, top]})
    given = {"data.labelled": 6, "data.unlabelled": 12, "model.name": "mlp"}
    run = privssl.train(config(tmp_path), given, data, output=tmp_path / "run")
    warned = any("column age has values beyond its bounds" in w for w in run.results["warnings"])
    assert warned == (top == 50)


def test_warnings_about_private_rows_are_printed_and_written_to_no_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    frame = Frame(age=np.arange(60.0), label=[0, 1] * 30)
    data = Rows.from_frame(frame, test=frame, columns={"age": [0, 50]})
    words = "column age has values beyond its bounds (9)"
    assert any(words in text for text in data.warnings)
    given = {"data.labelled": 20, "model.name": "mlp"}
    private = config(tmp_path, PRIVATE)
    run = privssl.train(private, given, data, output=tmp_path / "run", progress=True)
    assert words in " ".join(capfd.readouterr().err.split())
    for name in ("train.log", "results.json", "privacy.json", "model_card.md"):
        assert "beyond its bounds" not in (run.folder / name).read_text()


def test_columns_named_by_numbers_are_found() -> None:
    """As pandas names the columns of an array."""
    data = Rows.from_frame(Frame(**{"0": AGES, "target": ["no", "yes"] * 4}), "target", test=0.25)
    settings = DataSettings(name="arrays")
    form = RowForm(Path("run"), settings, data.shape, None, data.rows.scales, None, "as stored")
    assert form.convert({0: AGES}).tolist() == form.convert({"0": AGES}).tolist()
    with pytest.raises(privssl.UserError, match="no column 0"):  # the control
        form.convert({1: AGES})


def test_class_names_are_kept_except_whole_numbers_stored_as_floats() -> None:
    for labels in (["v1.0", "v2.0"] * 4, ["1.0", "1"] * 4):
        found = Rows.from_frame(Frame(x=AGES, label=labels), test=0.3)
        assert found.class_names == tuple(sorted(set(labels)))
    numbers = Frame(x=AGES, label=np.array([1.0, 2.0, np.nan, 1.0, 2.0, 1.0, 2.0, 1.0]))
    assert Rows.from_frame(numbers, test=0.3).class_names == ("1", "2")


@pytest.mark.parametrize("names", [["ill", "well"], None], ids=["declared", "measured"])
def test_with_declared_classes_no_training_label_affects_the_choice_of_test_rows(
    names: list[str] | None,
) -> None:
    labels = ["ill"] * 13 + ["well"] * 27

    def sampled_test_rows(y: list[str]) -> Rows:
        return Rows.from_frame(Frame(x=np.arange(40.0), y=y), "y", 0.2, {"x": [0, 40]}, names)

    before = sampled_test_rows(labels).rows
    trains = round((float(before.x_train[0, 0]) + 1) * 20)  # a row that is no test row
    assert labels[trains] == "ill" and len(before.y_test) == 8
    after = sampled_test_rows([*labels[:trains], "well", *labels[trains + 1 :]]).rows
    same = torch.equal(before.x_test, after.x_test) and torch.equal(before.y_test, after.y_test)
    # The control: without declared names, 12 rows of a class give two test rows, and 13 give three.
    assert same == (names is not None)


def test_a_private_run_refuses_bounds_from_its_rows_and_accepts_declared_ones(
    tmp_path: Path,
) -> None:
    many = Frame(x=np.linspace(0, 1, 60), y=["a", "b", "c"] * 20)
    given = {"data.labelled": 12, "agents.support": 1, "agents.query": 1,
             "privacy.steps": 1, "algorithm.rounds": 1}  # fmt: skip
    path = config(tmp_path, PRIVATE)
    measured = Rows.from_frame(many, "y")
    with pytest.raises(privssl.UserError, match=r"would be one more release\. Declare them"):
        privssl.train(path, given, measured, plain, output=tmp_path / "run")
    declared = Rows.from_frame(many, "y", many, columns={"x": [0, 1]})
    run = privssl.train(path, given, declared, plain, output=tmp_path / "run")  # the control
    assert run.guarantee and run.predict(declared.network_rows(many)).shape == (60,)


def test_a_private_run_refuses_a_class_count_inferred_from_labels(tmp_path: Path) -> None:
    given = {"data.labelled": 12, "agents.support": 1, "agents.query": 1,
             "privacy.steps": 1, "algorithm.rounds": 1}  # fmt: skip
    path, x, y = config(tmp_path, PRIVATE), X, Y
    rare = y.copy()
    rare[0] = 3  # one row more would add an output to the classifier
    np.savez(tmp_path / "rare.npz", x_train=x, y_train=rare, x_test=X_TEST, y_test=Y_TEST)
    of_file = {"data.name": "npz", "data.root": str(tmp_path / "rare.npz")}
    counted = Rows.from_arrays(x, rare, X_TEST, Y_TEST)
    error_text = "no test row has class 3, the largest in the training rows"
    for data, more in ((counted, {}), (None, of_file)):
        with pytest.raises(privssl.UserError, match=error_text):
            privssl.train(path, {**given, **more}, data, output=tmp_path / "run")
    declared = Rows.from_arrays(x, rare, X_TEST, Y_TEST, class_names=["a", "b", "c", "d"])
    for data in (declared, Rows.from_arrays(x, y, X_TEST, Y_TEST)):  # the controls
        out = tmp_path / f"run-{len(data.class_names)}"
        assert privssl.train(path, given, data, output=out).guarantee
    bare = yaml.safe_load(PRIVATE)
    del bare["privacy"], given["privacy.steps"]
    assert privssl.train(bare, given, counted, output=tmp_path / "bare").guarantee is None


def test_test_rows_drawn_from_private_rows_do_not_make_classes_public(tmp_path: Path) -> None:
    given = {"data.labelled": 12, "agents.support": 1, "agents.query": 1,
             "privacy.steps": 1, "algorithm.rounds": 1}  # fmt: skip
    rare = Frame(x=np.linspace(0, 1, 60), y=["a", "b", "rare disease"] * 20)
    columns: Any = {"x": [0, 1]}
    np.savez(tmp_path / "rows.npz", x_train=X, y_train=Y, x_test=X_TEST, y_test=Y_TEST)
    of_file = {"data.name": "npz", "data.root": str(tmp_path / "rows.npz")}
    sampled_test_rows, path = {"data.test": 12}, config(tmp_path, PRIVATE)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (Rows.from_frame(rare, "y", columns=columns), {}, "another frame .test=., or class_names"),
        (
            Rows.from_arrays(X, Y, X_TEST, Y_TEST),
            sampled_test_rows,
            "without data.test, or class_names in",
        ),
        (None, {**of_file, **sampled_test_rows}, "a test set of its own, without data.test"),
    ]

    def network(data: Any) -> Any:
        return plain if data is not None and data.rows.table else None

    for data, more, error_text in refused:
        with pytest.raises(privssl.UserError, match=error_text) as refusal:
            privssl.train(path, given | more, data, network(data), output=tmp_path / "run")
        assert "rare" not in str(refusal.value)
    names = ["a", "b", "rare disease"]
    allowed: list[tuple[Any, dict[str, Any]]] = [
        (Rows.from_frame(rare, "y", columns=columns, class_names=[*names, "healthy"]), {}),
        (Rows.from_frame(rare, "y", rare, columns=columns), {}),
        (Rows.from_arrays(X, Y, X_TEST, Y_TEST, class_names=names), sampled_test_rows),
        (None, of_file),
    ]
    for number, (data, more) in enumerate(allowed):
        output = tmp_path / f"run-{number}"
        run = privssl.train(path, given | more, data, network(data), output=output)
        assert run.guarantee
        assert number != 0 or run.class_names == [*names, "healthy"]


@pytest.mark.parametrize(("name", "known"), [("image_folder", False), ("toy", True)])
def test_declared_classes_are_public_for_any_test_rows(name: str, known: bool) -> None:
    private: Any = SimpleNamespace(privacy=object(), data=SimpleNamespace(name=name))
    sampled_test_rows = dataclasses.replace(
        Rows.from_arrays(X, Y, X_TEST, Y_TEST).rows, tests_drawn=True
    )
    with nullcontext() if known else pytest.raises(PrivacyError, match=r"without data\.test$"):
        refuse_classes_of_labels_alone(private, sampled_test_rows)
    refuse_classes_of_labels_alone(
        private, dataclasses.replace(sampled_test_rows, tests_drawn=False)
    )


@pytest.mark.parametrize(("make", "error_text"), [
    (lambda: Rows.from_frame(FRAME, "target", class_names=["no"]), "Give two or more"),
    (lambda: Rows.from_frame(FRAME, "target", class_names="no"), "Give a list of names"),
    (lambda: Rows.from_frame(FRAME, "target", class_names=["no", "so"]), "lacks the label 'yes'"),
    (lambda: Rows.from_frame(FRAME), "has no label; it has age, colour, target"),
    (lambda: Rows.from_frame([1, 2]), "a list without columns"),
    (lambda: Rows.from_frame({"x": [1, 2], "label": ["a"]}), "of values: x 2, label 1"),
    (lambda: Rows.from_frame({"x": 1, "label": "a"}), "the column x is no list of values"),
    (lambda: Rows.from_frame({"x": [[1], [2]], "label": "ab"}), "column x is no list of values"),
    (lambda: Rows.from_frame({"x": [1, 2], "label": "ab"}), "column label is no list of values"),
    (lambda: Rows.from_frame(FRAME, "target", test=20), "test is 20. Give the share of rows"),
    (lambda: Rows.from_frame(FRAME, "target", test=1.5), r"a share in \(0, 1\)"),
    (lambda: Rows.from_frame(FRAME, "target", columns=NO_COLUMNS), "columns: age is 3"),
    (lambda: Rows.from_frame(FRAME, "target", columns={"age": [80, 0]}), "columns: age is"),
    (lambda: Rows.from_frame(FRAME, "target", columns=["age"]),  # type: ignore[arg-type]
     r"columns is \['age'\]. Give bounds or categories for each column"),
    (lambda: Rows.from_frame(FRAME, "target", columns={"size": [0, 1]}), "has no size; it has"),
    (lambda: Rows.from_frame(
        Frame(x=[1.0, 1.0, None] * 4, label=[0, 1] * 6), columns={"x": [0, 1]}),
     r"row \d+: column x has ''"),
    (lambda: Rows.from_frame(Frame(**{"Unnamed: 0": AGES, "label": [0, 1] * 4})),
     "has a column without a name"),
    (lambda: Rows.from_arrays(X, Y, X_TEST, Y_TEST).network_rows(FRAME), "is from no frame"),
])  # fmt: skip
def test_a_wrong_data_frame_raises_one_clear_error(
    make: Callable[[], Any], error_text: str
) -> None:
    with pytest.raises(privssl.UserError, match=error_text):
        make()


def test_partitions_of_flwr_datasets_are_the_rows_of_agents() -> None:
    parts = {"s0": table(X[:6], Y[:6]), "s1": table(X[6:9], Y[6:9]), "q0": table(X[9:], Y[9:])}
    found = Rows.federated(parts, test=table(X_TEST, Y_TEST), label="digit")
    assert found.class_names == ("a", "b", "c")
    assert found.rows.held is not None
    assert {name: tuple(map(len, ids)) for name, ids in found.rows.held.items()} == {
        "q0": (0, len(X) - 9), "s0": (6, 0), "s1": (3, 0),
    }  # fmt: skip
    same = {"s0": (X[:6], Y[:6]), "s1": (X[6:9], Y[6:9]), "q0": X[9:]}
    other = Rows.federated(same, test=(X_TEST, Y_TEST), class_names=["a", "b", "c"])
    assert found.checksum == other.checksum
    with pytest.raises(privssl.UserError, match="q0 has no column 'label'"):
        Rows.federated(parts, test=(X_TEST, Y_TEST))
