"""A run uses the device in its config, and private steps use the CPU."""

from pathlib import Path

import pytest
import torch

from privssl.errors import ConfigError
from privssl.experiment.config import load_config
from privssl.experiment.devices import device_of
from privssl.experiment.prepare import Prepared, prepare
from privssl.runs.launch import device_text
from tests.support.product import ROOT

#: Full batches, so that noise is calibrated by a formula.
FAST = ["privacy.sample_rate=1.0", "privacy.noise_multiplier=50.0", "privacy.steps=1"]


@pytest.fixture
def with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports a GPU; nothing is computed there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def prepared(config: str, *overrides: str) -> Prepared:
    return prepare(load_config(Path(ROOT, "configs", f"{config}.yaml"), overrides))


@pytest.mark.usefixtures("with_a_gpu")
def test_device_auto_is_a_gpu_except_for_private_steps() -> None:
    assert prepared("fedssl").device == torch.device("cuda")
    assert prepared("fedssl_dp", *FAST).device == torch.device("cpu")
    # A census releases labels with its own noise; training takes no private steps.
    assert prepared("label_census").device == torch.device("cuda")


@pytest.mark.usefixtures("with_a_gpu")
def test_the_log_says_that_private_steps_use_no_gpu_only_if_there_is_an_unused_gpu() -> None:
    told = "cpu (private steps take no GPU)"
    assert device_text(prepared("fedssl_dp", *FAST)) == told
    assert device_text(prepared("fedssl_dp", *FAST, "run.device=cpu")) == "cpu"
    assert device_text(prepared("label_census", "run.device=cpu")) == "cpu"


@pytest.mark.usefixtures("with_a_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_private_steps_on_a_gpu_are_refused(name: str) -> None:
    assert device_of(name).type == "cuda"  # the control: the device exists
    with pytest.raises(ConfigError, match="private steps need the CPU: a GPU rounds a row's grad"):
        prepared("fedssl_dp", *FAST, f"run.device={name}")


def test_an_unavailable_device_is_named_with_the_available_ones() -> None:
    assert device_of("auto") == device_of("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"run.device is 'cuda', but this machine has cpu"):
        device_of("cuda")
