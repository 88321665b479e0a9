"""``Run.generate``: what ``privssl generate`` writes, as arrays."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import privssl
from privssl.errors import PrivacyError
from privssl.generation.rows import generate_rows
from tests.api.digits import PLAIN, config, dataset

PRIVATE = PLAIN + "privacy: {epsilon: 50.0, noise_multiplier: 4.0, sample_rate: 0.5, steps: 2}\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> privssl.Run:
    folder = tmp_path_factory.mktemp("generate")
    return privssl.train(config(folder), data=dataset(), output=folder / "run")


def test_rows_are_those_of_the_command_in_the_form_of_the_data(run: privssl.Run) -> None:
    before = torch.get_rng_state()
    x, y = run.generate(7, classes=["2", "0"], seed=3)
    assert torch.equal(before, torch.get_rng_state())  # chance of the caller is left alone
    made = generate_rows(run.folder, 7, ["2", "0"], 3)
    assert not torch.equal(before, torch.get_rng_state())  # the control: networks draw weights
    assert np.array_equal(x, made.x) and np.array_equal(y, made.y)
    assert (x.shape, str(x.dtype)) == ((7, *run.shape), "uint8")
    assert y.tolist() == [2, 0, 2, 0, 2, 0, 2]
    assert not np.array_equal(x, run.generate(7, classes=["2", "0"], seed=4)[0])  # the control
    assert run.generate(4)[1].tolist() == [0, 1, 2, 0]  # all classes
    assert run.generate(2, classes="1")[1].tolist() == [1, 1]  # one name is no list of letters


def test_what_was_generated_can_be_predicted_and_trained_on(
    run: privssl.Run, tmp_path: Path
) -> None:
    x, y = run.generate(60)
    assert run.predict(x).shape == (60,) and run.evaluate(x, y)["rows"] == 60
    data = privssl.Dataset.from_arrays(x[:45], y[:45], x[45:], y[45:])
    given = {"algorithm.name": "fedavg", "algorithm.rounds": 1, "data.labelled": 12}
    given |= {"agents.query": 0, "data.unlabelled": None}
    text = "agents: {support: 2}\nalgorithm: {name: fedavg}\nrun: {workers: 1}\n"
    again = privssl.train(config(tmp_path, text), given, data=data, output=tmp_path / "run")
    assert again.results["dataset"] == "arrays"


@pytest.mark.parametrize(
    ("count", "more", "said"),
    [(0, {}, "count is 0"), (2, {"classes": ["x"]}, "unknown class"), (2, {"seed": -1}, "seed")],
)
def test_mistakes_are_user_errors(run: privssl.Run, count: int, more: object, said: str) -> None:
    with pytest.raises(privssl.UserError, match=said):
        run.generate(count, **more)  # type: ignore[arg-type]


def test_a_private_run_asks_for_the_word_that_python_can_give(tmp_path: Path) -> None:
    made = privssl.train(config(tmp_path, PRIVATE), data=dataset(), output=tmp_path / "run")
    with pytest.raises(PrivacyError, match="acknowledge_query_rows=True"):
        made.generate(2)
    assert len(made.generate(2, acknowledge_query_rows=True)[0]) == 2


def test_a_folder_chooses_no_code_when_rows_are_generated(run: privssl.Run, tmp_path: Path) -> None:
    name = "tests.api.failing_module"
    text = (run.folder / "config.yaml").read_text()
    assert "name: small_cnn" in text
    sys.modules.pop(name, None)
    (run.folder / "config.yaml").write_text(text.replace("name: small_cnn", f"name: {name}:Net"))
    try:
        # Another config than the checkpoint's, so it may refuse: it must not import.
        with pytest.raises(privssl.UserError):
            run.generate(2)
        assert name not in sys.modules
    finally:
        (run.folder / "config.yaml").write_text(text)
