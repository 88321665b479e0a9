"""``Run.generate``: the rows that ``privssl generate`` writes, as arrays."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import privssl
from privssl import generate as command
from privssl.errors import PrivacyError
from privssl.generation.rows import generate_rows
from tests.api.digits import PLAIN, Frame, config, dataset

PRIVATE = PLAIN + "privacy: {epsilon: 50.0, noise_multiplier: 4.0, sample_rate: 0.5, steps: 2}\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> privssl.Run:
    folder = tmp_path_factory.mktemp("generate")
    return privssl.train(config(folder), data=dataset(), output=folder / "run")


def test_generate_returns_the_rows_of_the_command_in_the_format_of_the_data(
    run: privssl.Run,
) -> None:
    before = torch.get_rng_state()
    x, y = run.generate(7, classes=["2", "0"], seed=3)
    assert torch.equal(before, torch.get_rng_state())  # the caller's random state does not change
    made = generate_rows(run.folder, 7, ["2", "0"], 3)
    assert not torch.equal(
        before, torch.get_rng_state()
    )  # the control: building networks draws random weights
    assert np.array_equal(x, made.x) and np.array_equal(y, made.y)
    assert (x.shape, str(x.dtype)) == ((7, *run.shape), "uint8")
    assert y.tolist() == [2, 0, 2, 0, 2, 0, 2]
    assert not np.array_equal(x, run.generate(7, classes=["2", "0"], seed=4)[0])  # the control
    assert run.generate(4)[1].tolist() == [0, 1, 2, 0]  # all classes
    assert run.generate(2, classes="1")[1].tolist() == [
        1,
        1,
    ]  # a single name is not a list of characters


def test_generated_rows_can_be_predicted_and_trained_on(run: privssl.Run, tmp_path: Path) -> None:
    x, y = run.generate(60)
    assert run.predict(x).shape == (60,) and run.evaluate(x, y)["rows"] == 60
    data = privssl.Dataset.from_arrays(x[:45], y[:45], x[45:], y[45:])
    given = {"algorithm.name": "fedavg", "algorithm.rounds": 1, "data.labelled": 12}
    given |= {"agents.query": 0, "data.unlabelled": None}
    text = "agents: {support: 2}\nalgorithm: {name: fedavg}\nrun: {workers: 1}\n"
    again = privssl.train(config(tmp_path, text), given, data=data, output=tmp_path / "run")
    assert again.results["dataset"] == "arrays"


@pytest.mark.parametrize(
    ("count", "more", "error_text"),
    [
        (0, {}, "count is 0"),
        (2.0, {}, r"count is 2\.0: give a whole number, 1 or more"),
        ("2", {}, "count is '2'"),
        (2, {"classes": ["x"]}, "unknown class"),
        (2, {"classes": [1]}, "classes has 1: give names, which are text: '1'"),
        (2, {"classes": 1}, "classes has 1"),
        (2, {"classes": []}, "classes is empty"),
        (2, {"seed": -1}, "seed"),
        (2, {"seed": 0.5}, r"seed is 0\.5"),
    ],
)
def test_mistakes_are_user_errors(run: privssl.Run, count: Any, more: Any, error_text: str) -> None:
    with pytest.raises(privssl.UserError, match=error_text):
        run.generate(count, **more)


def test_generated_rows_of_a_table_have_the_scale_of_the_networks_input(tmp_path: Path) -> None:
    """The control is the first test of this file: images are bytes."""
    text = "model: {name: mlp}\n" + PLAIN.replace("generator_width: 4", "generator: mixing")
    columns: dict[str, Any] = {"age": [0, 120], "colour": ["red", "blue"]}
    rng = np.random.default_rng(0)
    frame = Frame(
        age=rng.integers(20, 90, 120).tolist(), colour=rng.choice(["red", "blue"], 120).tolist(),
        label=rng.choice(["ill", "well"], 120).tolist(),
    )  # fmt: skip
    data = privssl.Dataset.from_frame(frame, columns=columns)
    given = {"data.unlabelled": None}
    run = privssl.train(config(tmp_path, text), given, data, output=tmp_path / "run")
    x, y = run.generate(5)
    assert (x.shape, str(x.dtype)) == ((5, 3), "float32") and np.abs(x).max() <= 1
    assert run.predict(x).shape == y.shape == (5,)
    made = command.main([str(run.folder), "--count", "4", "--output", str(tmp_path / "made.npz")])
    assert made == 0 and not list(tmp_path.glob("*.png"))
    assert np.load(tmp_path / "made.npz")["x"].shape == (4, 3)
    assert command.main([str(run.folder), "--count", "4", "--output", str(tmp_path / "made")]) == 2


def test_an_empty_frame_has_no_predictions_and_a_scalar_column_is_refused(tmp_path: Path) -> None:
    text = "agents: {support: 2}\nmodel: {name: mlp}\nalgorithm: {name: fedavg, rounds: 1}\n"
    frame = Frame(age=list(range(40)), label=["ill", "well"] * 20)
    data = privssl.Dataset.from_frame(frame, columns={"age": [0, 120]})
    given = {"data.labelled": 20, "run.workers": 1}
    run = privssl.train(config(tmp_path, text), given, data, output=tmp_path / "run")
    assert run.predict(Frame(age=[])).shape == (0,)
    assert run.predict({"age": [30, 40]}).shape == (2,)
    for wrong in (30, "30"):
        with pytest.raises(privssl.UserError, match="column age is one value"):
            run.predict({"age": wrong})


def test_the_error_about_a_private_run_names_the_python_argument_to_give(tmp_path: Path) -> None:
    made = privssl.train(config(tmp_path, PRIVATE), data=dataset(), output=tmp_path / "run")
    with pytest.raises(PrivacyError, match="acknowledge_query_rows=True"):
        made.generate(2)
    assert len(made.generate(2, acknowledge_query_rows=True)[0]) == 2


def test_generate_imports_no_code_that_a_run_folder_names(run: privssl.Run, tmp_path: Path) -> None:
    name = "tests.api.failing_module"
    text = (run.folder / "config.yaml").read_text()
    assert "name: small_cnn" in text
    sys.modules.pop(name, None)
    (run.folder / "config.yaml").write_text(text.replace("name: small_cnn", f"name: {name}:Net"))
    try:
        # The config differs from the checkpoint's, so a refusal is allowed, but no import.
        with pytest.raises(privssl.UserError):
            run.generate(2)
        assert name not in sys.modules
    finally:
        (run.folder / "config.yaml").write_text(text)
