"""A run takes the device that its config names, and private steps take the CPU."""

from pathlib import Path

import pytest
import torch

from privssl.errors import ConfigError
from privssl.experiment.config import load_config
from privssl.experiment.devices import device_of
from privssl.experiment.prepare import Prepared, prepare
from privssl.runs.launch import device_text
from tests.support.product import ROOT

#: Batches of everything, so that noise is calibrated by a formula.
FAST = ["privacy.sample_rate=1.0", "privacy.noise_multiplier=50.0", "privacy.steps=1"]


@pytest.fixture
def beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sees one; nothing is computed there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def prepared(config: str, *overrides: str) -> Prepared:
    return prepare(load_config(Path(ROOT, "configs", f"{config}.yaml"), overrides))


@pytest.mark.usefixtures("beside_a_gpu")
def test_auto_is_a_gpu_but_for_private_steps() -> None:
    assert prepared("fedssl").device == torch.device("cuda")
    assert prepared("fedssl_dp", *FAST).device == torch.device("cpu")
    # A census releases labels by noise of its own; training takes no private steps.
    assert prepared("label_census").device == torch.device("cuda")


@pytest.mark.usefixtures("beside_a_gpu")
def test_the_log_says_that_private_steps_take_no_gpu_only_where_they_passed_one_over() -> None:
    told = "cpu (private steps take no GPU)"
    assert device_text(prepared("fedssl_dp", *FAST)) == told
    assert device_text(prepared("fedssl_dp", *FAST, "run.device=cpu")) == "cpu"
    assert device_text(prepared("label_census", "run.device=cpu")) == "cpu"


@pytest.mark.usefixtures("beside_a_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_private_steps_on_a_gpu_are_refused(name: str) -> None:
    assert device_of(name).type == "cuda"  # the control: there is one
    with pytest.raises(ConfigError, match="private steps need the CPU: a GPU rounds a row's grad"):
        prepared("fedssl_dp", *FAST, f"run.device={name}")


def test_a_device_that_is_not_there_is_named_with_those_that_are() -> None:
    assert device_of("auto") == device_of("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"run.device is 'cuda', but this machine has cpu"):
        device_of("cuda")
