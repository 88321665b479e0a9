"""Initial weights of an earlier run on the rows that are now private."""

import dataclasses
import json
from pathlib import Path

import pytest
import safetensors.torch

from privssl.data import split_manifest
from privssl.errors import PrivacyError
from privssl.experiment.config import load_config
from privssl.experiment.prepare import Prepared, prepare
from privssl.experiment.warm_start import check_warm_start

CONFIG = """
run: {device: cpu, workers: 1}
data: {name: toy, labelled: 40, unlabelled: 100}
agents: {support: 2, query: 1}
model: {width: 2}
algorithm: {name: fedavg, rounds: 1}
"""
PRIVATE = ("privacy.epsilon=8.0", "privacy.sample_rate=0.5", "privacy.steps=1")


def prepared(place: Path, *overrides: str) -> Prepared:
    (place / "c.yaml").write_text(CONFIG)
    return prepare(load_config(place / "c.yaml", overrides))


def weights_of_a_run(place: Path, *overrides: str, guarantee: object = None) -> str:
    """The weights in a run's folder, with its split and its card."""
    former, run = prepared(place, *overrides), place / "former"
    run.mkdir()
    former.federated_data.manifest.write(run / "split.json")
    (run / "privacy.json").write_text(json.dumps({"guarantee": guarantee}))
    weights = former.algorithm.task.new_classifier().state_dict()
    path = run / "classifier.safetensors"
    safetensors.torch.save_file({n: w.contiguous() for n, w in weights.items()}, path)
    return f"model.weights={path}"


@pytest.mark.parametrize("former", [(), ("run.seed=1",)], ids=["same split", "other split"])
def test_a_private_run_refuses_weights_of_a_run_that_used_its_rows_without_noise(
    tmp_path: Path, former: tuple[str, ...]
) -> None:
    weights = weights_of_a_run(tmp_path, *former)
    with pytest.raises(PrivacyError, match=r"used \d+ labelled rows .* without protection"):
        prepared(tmp_path, *PRIVATE, weights)
    prepared(tmp_path, weights)  # the control: without a claim anything goes


def test_weights_of_a_run_on_other_rows_may_begin_a_private_run(tmp_path: Path) -> None:
    weights = weights_of_a_run(tmp_path)
    split = tmp_path / "former" / "split.json"
    split.unlink()
    other = prepared(tmp_path, "data.name=digits").federated_data.manifest
    other.write(split)
    assert not any(
        "model.weights" in said for said in prepared(tmp_path, *PRIVATE, weights).warnings
    )


@pytest.mark.parametrize(
    ("former", "now"),
    [(("data.test=300",), ()), (("data.test=300",), ("data.test=300", "run.seed=1")),
     ((), ("data.test=300",))],
    ids=["former run", "both, differently", "this run"],
)  # fmt: skip
def test_weights_of_a_run_that_drew_other_test_rows_of_the_same_data_are_refused(
    tmp_path: Path, former: tuple[str, ...], now: tuple[str, ...]
) -> None:
    """Drawing test rows numbers the others anew, so that checksums and row numbers differ."""
    weights = weights_of_a_run(tmp_path, *former)
    with pytest.raises(PrivacyError, match=r"drew its test rows \(data\.test\).* is unknown"):
        prepared(tmp_path, *PRIVATE, *now, weights)
    prepared(tmp_path, *now, weights)  # the control: without a claim anything goes
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(Path(weights.removeprefix("model.weights=")).read_bytes())
    prepared(tmp_path, *PRIVATE, *now, f"model.weights={copy}")


def test_a_private_run_warns_of_weights_of_a_run_on_another_version_of_its_data(
    tmp_path: Path,
) -> None:
    weights = weights_of_a_run(tmp_path)
    split = tmp_path / "former" / "split.json"
    found = split_manifest.read_manifest(split)
    dataclasses.replace(found, checksum="0" * 64).write(split)
    assert any(
        "is of the run" in said and "was not looked at" in said
        for said in prepared(tmp_path, *PRIVATE, weights).warnings
    )


def test_a_private_run_says_that_epsilons_add_up_with_those_of_the_run_of_its_weights(
    tmp_path: Path,
) -> None:
    weights = weights_of_a_run(tmp_path, guarantee={"epsilon": 8.0})
    assert any("add up" in said for said in prepared(tmp_path, *PRIVATE, weights).warnings)


def test_rows_that_a_private_run_used_without_a_label_are_refused_too(tmp_path: Path) -> None:
    weights = weights_of_a_run(tmp_path, "run.seed=1", guarantee={"epsilon": 8.0})
    # Of 40 labelled rows among 1,000 some were among the 100 unlabelled ones of the other split.
    with pytest.raises(PrivacyError, match="without protection"):
        prepared(tmp_path, *PRIVATE, weights)


def test_weights_of_an_encoder_are_looked_at_like_initial_weights(tmp_path: Path) -> None:
    file = weights_of_a_run(tmp_path).removeprefix("model.weights=")
    split = prepared(tmp_path).federated_data.manifest
    config = load_config(tmp_path / "c.yaml", PRIVATE)
    data = dataclasses.replace(config.data, encoder_weights=file)
    assert list(check_warm_start(config, split)) == []  # the control
    with pytest.raises(PrivacyError, match=r"data\.encoder_weights is of the run"):
        list(check_warm_start(dataclasses.replace(config, data=data), split))
