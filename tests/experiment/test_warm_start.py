"""Initial weights from an earlier run, and the rows which that run used."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import yaml
from torch import nn

import privssl
from privssl.data import split_manifest
from privssl.data.datasets import load_dataset
from privssl.errors import PrivacyError
from privssl.experiment.config import Config, load_config, to_yaml
from privssl.experiment.prepare import Prepared, prepare
from privssl.experiment.warm_start import check_warm_start
from privssl.models.own_networks import reference_of
from privssl.runtime.plugins import imports_allowed
from privssl.settings.schema import DataSettings
from tests.support.command_line import assert_refused, command

CONFIG = """
run: {device: cpu, workers: 1}
data: {name: toy, labelled: 40, unlabelled: 100}
agents: {support: 2, query: 1}
model: {width: 2}
algorithm: {name: fedavg, rounds: 1}
"""
PRIVATE = ("privacy.epsilon=8.0", "privacy.sample_rate=0.5", "privacy.steps=1")


def load_config_of(place: Path, *overrides: str) -> Config:
    (place / "c.yaml").write_text(CONFIG)
    with imports_allowed():
        return load_config(place / "c.yaml", overrides)


def prepared(place: Path, *overrides: str) -> Prepared:
    return prepare(load_config_of(place, *overrides))


def weights_of_a_run(place: Path, *overrides: str, guarantee: object = None) -> str:
    """The weights in a run folder, with its split and its card."""
    former, run = prepared(place, *overrides), place / "former"
    run.mkdir()
    former.federated_data.manifest.write(run / "split.json")
    (run / "privacy.json").write_text(json.dumps({"guarantee": guarantee}))
    weights = former.algorithm.task.new_classifier().state_dict()
    path = run / "classifier.safetensors"
    safetensors.torch.save_file({n: w.contiguous() for n, w in weights.items()}, path)
    return f"model.weights={path}"


def test_a_run_is_not_resumed_if_its_file_of_initial_weights_has_changed(
    tmp_path: Path,
) -> None:
    run, file = tmp_path / "run", tmp_path / "public.safetensors"
    weights = prepared(tmp_path).algorithm.task.new_classifier().state_dict()
    safetensors.torch.save_file({n: w.contiguous() for n, w in weights.items()}, file)
    began, first = file.read_bytes(), (tmp_path / "c.yaml", *PRIVATE, f"model.weights={file}")
    assert command(*first, f"run.output={run}").status == 0
    card = json.loads((run / "privacy.json").read_text())
    for name in ("results.json", "privacy.json"):  # as if it had been killed at its end
        (run / name).unlink()
    safetensors.torch.save_file({n: w.contiguous() + 1 for n, w in weights.items()}, file)
    assert_refused(command("--resume", run), "began with other files of weights (model.weights")
    file.write_bytes(began)
    assert command("--resume", run).status == 0  # the control
    assert json.loads((run / "privacy.json").read_text())["network"] == card["network"]


@pytest.mark.parametrize("former", [(), ("run.seed=1",)], ids=["same split", "other split"])
def test_a_private_run_refuses_weights_of_a_run_that_used_its_rows_without_noise(
    tmp_path: Path, former: tuple[str, ...]
) -> None:
    weights = weights_of_a_run(tmp_path, *former)
    with pytest.raises(PrivacyError, match=r"used \d+ labelled rows .* without protection"):
        prepared(tmp_path, *PRIVATE, weights)
    prepared(tmp_path, weights)  # the control: without a claim the weights are accepted


def test_a_private_run_refuses_weights_in_a_run_folder_that_lost_its_split(tmp_path: Path) -> None:
    weights = weights_of_a_run(tmp_path)
    for name in ("config.yaml", "metrics.csv"):
        (tmp_path / "former" / name).write_text("")
    (tmp_path / "former" / "split.json").unlink()
    with pytest.raises(PrivacyError, match=r"the folder of a run without its split\.json"):
        prepared(tmp_path, *PRIVATE, weights)
    prepared(tmp_path, weights)  # the control: without a claim the weights are accepted
    (tmp_path / "former" / "config.yaml").unlink()
    prepared(tmp_path, *PRIVATE, weights)  # and in a folder that is not of a run


def test_a_private_run_accepts_weights_of_a_run_on_other_rows(tmp_path: Path) -> None:
    weights = weights_of_a_run(tmp_path)
    split = tmp_path / "former" / "split.json"
    split.unlink()
    other = prepared(tmp_path, "data.name=digits").federated_data.manifest
    other.write(split)
    assert not any(
        "model.weights" in warnings_with
        for warnings_with in prepared(tmp_path, *PRIVATE, weights).warnings
    )


@pytest.mark.parametrize(
    ("former", "now"),
    [(("data.test=300",), ()), (("data.test=300",), ("data.test=300", "run.seed=1")),
     ((), ("data.test=300",))],
    ids=["former run", "both, differently", "this run"],
)  # fmt: skip
def test_a_private_run_refuses_weights_of_a_run_that_drew_other_test_rows_of_the_same_data(
    tmp_path: Path, former: tuple[str, ...], now: tuple[str, ...]
) -> None:
    """Drawing test rows renumbers the other rows, so checksums and row numbers differ."""
    weights = weights_of_a_run(tmp_path, *former)
    with pytest.raises(PrivacyError, match=r"drew its test rows \(data\.test\).* is unknown"):
        prepared(tmp_path, *PRIVATE, *now, weights)
    prepared(tmp_path, *now, weights)  # the control: without a claim the weights are accepted
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
        "is of the run" in warnings_with and "was not looked at" in warnings_with
        for warnings_with in prepared(tmp_path, *PRIVATE, weights).warnings
    )


def test_a_private_run_warns_of_weights_of_a_run_on_its_rows_under_another_name(
    tmp_path: Path,
) -> None:
    toy = load_dataset(DataSettings(name="toy"))
    floats = {n: getattr(toy, n).numpy() for n in ("x_train", "y_train", "x_test", "y_test")}
    floats |= {n: (x / 255).astype(np.float32) for n, x in floats.items() if n.startswith("x")}
    np.savez(tmp_path / "toy.npz", **floats)
    weights = weights_of_a_run(tmp_path, "data.name=npz", f"data.root={tmp_path / 'toy.npz'}")
    warnings_with = prepared(tmp_path, *PRIVATE, weights).warnings
    assert any("on npz. Whether" in text for text in warnings_with)
    # The control: without a claim there is no warning.
    assert not any("model.weights" in text for text in prepared(tmp_path, weights).warnings)


class Own(nn.Sequential):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, classes))


@pytest.mark.parametrize("form", ["itself", "a copy", "a part", "its layer", "a function's"])
def test_a_private_run_refuses_the_classifier_of_a_run_that_used_its_rows_without_noise(
    tmp_path: Path, form: str
) -> None:
    config = yaml.safe_load(CONFIG)
    former = privssl.train(config, model=Own, output=tmp_path / "former").classifier()
    network: Any = {
        "itself": former,
        "a copy": copy.deepcopy(former),
        "a part": nn.Sequential(former, nn.Linear(10, 10)),
        "its layer": nn.Sequential(nn.Flatten(), next(iter(former.modules()))[1]),  # type: ignore[index]
        "a function's": lambda shape, classes: former,
    }[form]
    private = (*PRIVATE, f"model.name={reference_of(network)}", "model.width=16")
    with pytest.raises(PrivacyError, match=r"^model is of the run .* without protection"):
        prepare(load_config_of(tmp_path, *private), None, network)
    # The control: a network with its own weights is accepted.
    prepare(load_config_of(tmp_path, *private), None, Own)


def test_a_classifier_of_a_run_with_a_missing_folder_is_refused(tmp_path: Path) -> None:
    config = yaml.safe_load(CONFIG)
    former = privssl.train(config, {"run.seed": 1}, model=Own, output=tmp_path / "former")
    network = former.classifier()
    name = (f"model.name={reference_of(network)}", "model.width=16")
    (tmp_path / "former").rename(tmp_path / "elsewhere")
    with pytest.raises(PrivacyError, match=r"^model is of the run .* is unknown"):
        prepare(load_config_of(tmp_path, *PRIVATE, *name), None, network)
    # The controls: without a claim, and a network that is not from a run.
    prepare(load_config_of(tmp_path, *name), None, network)
    prepare(load_config_of(tmp_path, *PRIVATE, *name), None, Own((1, 8, 8), 10))


@pytest.mark.parametrize("guarantee", [None, {"epsilon": 8.0}], ids=["without", "with"])
@pytest.mark.parametrize("labels", ["support", "labels-at-server"])
def test_a_private_run_refuses_weights_of_a_run_over_sites_on_the_same_data(
    tmp_path: Path, labels: str, guarantee: object
) -> None:
    """Its split.json lists no rows of sites."""
    server = (f"data.labels={labels}", "agents.support=0", "algorithm.name=server_sl")
    at = () if labels == "support" else server
    weights = weights_of_a_run(tmp_path, *at, guarantee=guarantee)
    former = prepared(tmp_path, "run.engine=flower", "run.workers=auto", *at)
    former.federated_data.manifest.write(tmp_path / "former" / "split.json")
    (tmp_path / "former" / "config.yaml").write_text(to_yaml(former.config))
    with pytest.raises(PrivacyError, match=r"^model\.weights is of the run .* over sites on toy"):
        prepared(tmp_path, *PRIVATE, weights)
    prepared(tmp_path, weights)  # the control: without a claim the weights are accepted
    copied = tmp_path / "copy.safetensors"
    copied.write_bytes(Path(weights.removeprefix("model.weights=")).read_bytes())
    prepared(tmp_path, *PRIVATE, f"model.weights={copied}")


def test_a_private_run_warns_that_epsilons_add_up_with_those_of_the_run_of_its_weights(
    tmp_path: Path,
) -> None:
    weights = weights_of_a_run(tmp_path, guarantee={"epsilon": 8.0})
    assert any(
        "add up" in warnings_with
        for warnings_with in prepared(tmp_path, *PRIVATE, weights).warnings
    )


def test_weights_of_a_private_run_of_another_unit_count_as_unprotected(tmp_path: Path) -> None:
    for unit in ("person", "record"):
        place = tmp_path / unit
        place.mkdir()
        weights = weights_of_a_run(place, guarantee={"epsilon": 8.0, "unit": unit})
        if unit == "person":
            with pytest.raises(PrivacyError, match="labelled rows of this run without protection"):
                prepared(place, *PRIVATE, weights)
        else:  # the control
            assert any("add up" in text for text in prepared(place, *PRIVATE, weights).warnings)


@pytest.mark.parametrize("counts", ["private", "public"])
def test_the_warning_about_former_weights_does_not_depend_on_a_private_row_count(
    tmp_path: Path, counts: str
) -> None:
    weights = weights_of_a_run(tmp_path, guarantee={"epsilon": 8.0})
    private = (*PRIVATE, weights, f"privacy.record_counts={counts}")
    warnings_with = [text for text in prepared(tmp_path, *private).warnings if "add up" in text]
    split = tmp_path / "former" / "split.json"
    found = split_manifest.read_manifest(split)
    fewer = {a: dataclasses.replace(h, labelled=h.labelled[1:]) for a, h in found.agents.items()}
    dataclasses.replace(found, agents=fewer).write(split)
    now = [text for text in prepared(tmp_path, *private).warnings if "add up" in text]
    assert warnings_with and (now == warnings_with) is (
        counts == "private"
    )  # public numbers are the control


@pytest.mark.parametrize("guarantee", [None, {"epsilon": 8.0}], ids=["without", "with"])
def test_over_sites_a_warning_says_that_rows_of_the_sites_were_not_checked(
    tmp_path: Path, guarantee: object
) -> None:
    weights, sites = weights_of_a_run(tmp_path, guarantee=guarantee), "run.engine=flower"

    def warnings_with(*overrides: str) -> list[str]:
        here = prepared(tmp_path, sites, "run.workers=auto", *overrides)
        assert not here.federated_data.manifest.agents
        return [text for text in here.warnings if "model.weights" in text]

    (text,) = warnings_with(*PRIVATE, weights)
    assert "Whether rows of the sites are among them was not looked at" in text
    # The controls: without such weights, or without a claim, there is no warning.
    assert not warnings_with(*PRIVATE)
    assert not warnings_with(weights)


def test_rows_that_a_private_run_used_without_their_labels_are_refused_too(tmp_path: Path) -> None:
    weights = weights_of_a_run(tmp_path, "run.seed=1", guarantee={"epsilon": 8.0})
    # Of 40 labelled rows among 1,000 some were among the 100 unlabelled ones of the other split.
    with pytest.raises(PrivacyError, match="without protection"):
        prepared(tmp_path, *PRIVATE, weights)


def test_weights_of_an_encoder_are_checked_like_initial_weights(tmp_path: Path) -> None:
    file = weights_of_a_run(tmp_path).removeprefix("model.weights=")
    split = prepared(tmp_path).federated_data.manifest
    config = load_config(tmp_path / "c.yaml", PRIVATE)
    data = dataclasses.replace(config.data, encoder_weights=file)
    new = prepared(tmp_path).algorithm.task.new_classifier
    assert list(check_warm_start(config, split, new)) == []  # the control
    with pytest.raises(PrivacyError, match=r"data\.encoder_weights is of the run"):
        list(check_warm_start(dataclasses.replace(config, data=data), split, new))
