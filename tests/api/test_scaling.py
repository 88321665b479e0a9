"""Vectors of bytes are scaled and floats are not, so the two are never mixed; names at resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import privssl
from privssl.api.new_rows import RowForm
from privssl.generation import rows
from tests.api.digits import Frame

ROWS = 60
Y = np.arange(ROWS) % 3
X = (Y[:, None] * 80 + np.random.default_rng(0).integers(0, 20, (ROWS, 6))).astype(np.uint8)
CONFIG = {
    "algorithm": {"name": "fedssl", "rounds": 1, "generator": "mixing", "warm_up": 0},
    "agents": {"support": 1, "query": 1},
    "data": {"labelled": 20},
    "model": {"name": "mlp"},
    "run": {"workers": 1},
}


def train(folder: Path, x: Any) -> privssl.Run:
    data = privssl.Dataset.from_arrays(x[:40], Y[:40], x[40:], Y[40:])
    return privssl.train(CONFIG, data=data, output=folder / "run")


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> privssl.Run:
    return train(tmp_path_factory.mktemp("bytes"), X)


@pytest.fixture(scope="module")
def of_floats(tmp_path_factory: pytest.TempPathFactory) -> privssl.Run:
    return train(tmp_path_factory.mktemp("floats"), (X > 90).astype(np.float32))


@pytest.mark.parametrize("x", [X.astype(float), X / 255, (X > 90).astype(np.float32)])
def test_a_run_on_bytes_refuses_floats_that_it_would_not_scale(
    of_bytes: privssl.Run, x: Any
) -> None:
    for use in (of_bytes.predict, lambda rows: of_bytes.evaluate(rows, Y)):
        with pytest.raises(privssl.UserError, match=r"rows are floats.*trained on bytes"):
            use(x)


def test_a_run_on_bytes_accepts_rows_as_its_network_and_its_generator_have_them(
    of_bytes: privssl.Run,
) -> None:
    found = of_bytes.predict(X, probabilities=True)
    scaled = of_bytes.predict(X / 127.5 - 1, probabilities=True)
    assert np.allclose(found, scaled, atol=1e-6)
    made, _ = of_bytes.generate(9)
    assert len(of_bytes.predict(made)) == 9


def test_generated_rows_lie_where_the_rows_of_the_run_do(
    tmp_path: Path, of_bytes: privssl.Run, of_floats: privssl.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator of vectors has no bounds, and new rows beyond [-1, 1] are refused."""
    data = privssl.Dataset.from_frame(Frame(age=X[:, 0].tolist(), label=Y.tolist()))
    table = privssl.train(CONFIG, data=data, output=tmp_path / "run")

    def beyond(generator: object, labels: Tensor, classes: int, shape: Any, rng: object) -> Tensor:
        return torch.linspace(-2, 2, len(labels))[:, None].repeat(1, *shape)

    monkeypatch.setattr(rows, "draw_samples", beyond)
    for run in (of_bytes, table):
        x = run.generate(9, confidence=1e-9)[0]
        assert x[:, 0].tolist() == [-1, -1, -1, -0.5, 0, 0.5, 1, 1, 1]
        assert len(run.predict(x)) == 9
    assert of_floats.generate(9)[0][:, 0].tolist() == torch.linspace(-2, 2, 9).tolist()


def test_a_run_on_floats_refuses_bytes_that_it_would_scale(of_floats: privssl.Run) -> None:
    x = (X > 90).astype(np.uint8)
    with pytest.raises(privssl.UserError, match=r"rows are bytes.*trained on floats"):
        of_floats.predict(x)
    assert of_floats.evaluate(x.astype(np.float16), Y)["rows"] == ROWS  # the control


@pytest.mark.parametrize("kind", ["bytes", "floats"])
def test_results_name_the_scaling_of_vectors(
    kind: str, of_bytes: privssl.Run, of_floats: privssl.Run
) -> None:
    run, text = {"bytes": (of_bytes, "bytes to [-1, 1]"), "floats": (of_floats, "as stored")}[kind]
    assert run.results["rows"]["scaling"] == text
    assert f"scaling: {text}" in (run.folder / "model_card.md").read_text()


def test_a_run_of_a_former_version_predicts_rows_of_any_type(of_bytes: privssl.Run) -> None:
    """Its results.json does not say what it was trained on."""
    of_bytes.results["rows"] |= {"scaling": "bytes to [-1, 1], other numbers as stored"}
    former = RowForm.of(of_bytes.folder, of_bytes._config.data, of_bytes.results["rows"])
    assert former.convert(X.astype(float)).dtype == np.float32
    of_bytes.results["rows"] |= {"scaling": "bytes to [-1, 1]"}


FEDAVG = {**CONFIG, "algorithm": {"name": "fedavg", "rounds": 1}, "agents": {"support": 2}}


def named(*names: str) -> privssl.Dataset:
    return privssl.Dataset.from_arrays(X[:40], Y[:40], X[40:], Y[40:], class_names=names)


def test_a_resumed_run_keeps_the_names_of_its_classes(tmp_path: Path) -> None:
    run = privssl.train(FEDAVG, data=named("ill", "well", "unknown"), output=tmp_path / "run")
    with pytest.raises(privssl.UserError, match="began with the classes ill, well, unknown, which"):
        privssl.train(run.folder, ["algorithm.rounds=2"], data=named("well", "ill", "unknown"))
    again = privssl.train(run.folder, ["algorithm.rounds=2"], data=named("ill", "well", "unknown"))
    assert (again.class_names, again.results["rounds"]) == (["ill", "well", "unknown"], 2)


def test_a_resumed_run_keeps_the_names_of_its_columns(tmp_path: Path) -> None:
    """The same numbers under other names have the same checksum."""

    def table(*columns: str) -> dict[str, str]:
        rows = [f"{n % 5},{n % 7},{'ab'[n % 2]}" for n in range(40)]
        for part in ("train", "test"):
            text = "\n".join([",".join([*columns, "label"]), *rows])
            (tmp_path / f"{part}.csv").write_text(text)
        return {"data.name": "csv", "data.root": str(tmp_path)}

    given = table("height", "weight")
    run = privssl.train(FEDAVG, given, output=tmp_path / "run")
    table("weight", "height")
    with pytest.raises(privssl.UserError, match="began with the columns height, weight, which"):
        privssl.train(run.folder, ["algorithm.rounds=2"])
    table("height", "weight")
    assert privssl.train(run.folder, ["algorithm.rounds=2"]).results["rounds"] == 2
