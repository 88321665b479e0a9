"""The package in examples/, installed as users install it, without the index."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import privssl
from privssl.experiment.json_schema import config_schema
from privssl.runtime import plugins
from tests.support.command_line import command

PACKAGE = Path(__file__).parents[2] / "examples" / "privssl_example"
CONFIG = PACKAGE / "fedown.yaml"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The package in a folder on Python's path, with its entry points."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"  # setuptools writes beside the sources
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--no-build-isolation", "--no-compile", "--target", str(folder / "there"), str(source)]
    done = subprocess.run(
        pip, capture_output=True, text=True, check=False,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "there"))
        yield folder / "there"
    for name in [name for name in sys.modules if name.startswith("privssl_example")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def tests_of_author(installed: Path) -> Any:
    """``test_example.py``, which the package's author runs."""
    path = PACKAGE / "test_example.py"
    spec = importlib.util.spec_from_file_location("tests_of_the_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [
    "test_the_method_keeps_its_promises",
    pytest.param("test_a_run_uses_every_part", marks=pytest.mark.slow),
    "test_features_of_the_encoder_are_learned",
])  # fmt: skip
def test_the_tests_of_the_package_pass(name: str, tests_of_author: Any, tmp_path: Path) -> None:
    test = getattr(tests_of_author, name)
    test(**({"tmp_path": tmp_path} if test.__code__.co_argcount else {}))


def test_a_run_names_every_plug_in_and_records_its_origin(installed: Path, tmp_path: Path) -> None:
    run = privssl.train(CONFIG, {"algorithm.rounds": 1}, output=tmp_path / "run")
    kinds = ("algorithm.name", "model.name", "data.name", "data.partition", "run.trackers")
    assert sorted(run.results["plugins"]) == sorted(kinds)
    for about in run.results["plugins"].values():
        assert (about["distribution"], about["version"]) == ("privssl-example", "0.1.0")
        assert len(about["sha256"]) == 64
    assert run.predict([[[0.5] * 8] * 8]).shape == (1,)


def test_editors_complete_the_plug_ins_and_their_keys(installed: Path) -> None:
    known = config_schema()
    assert "fedown" in known["definitions"]
    assert known["definitions"]["fedown"]["properties"]["decay"]["maximum"] == 1
    sections = known["properties"]
    assert "two_convolutions" in sections["model"]["properties"]["name"]["anyOf"][0]["enum"]
    trackers = sections["run"]["properties"]["trackers"]["items"]["anyOf"][0]["enum"]
    assert trackers == ["wandb", "mlflow", "json_lines"]
    assert "plugins" not in str(sections["data"]["properties"]["name"].keys())


def test_a_run_is_not_resumed_with_another_version_of_a_plug_in(
    installed: Path, tmp_path: Path
) -> None:
    # Other tests interrupt runs; here the checkpoint of a finished run is extended.
    about = installed / "privssl_example-0.1.0.dist-info" / "METADATA"
    run = privssl.train(CONFIG, {"algorithm.rounds": 1}, output=tmp_path / "run")
    (run.folder / "results.json").unlink()  # as if it had been killed at its end
    kept = about.read_text()
    try:
        about.write_text(kept.replace("Version: 0.1.0", "Version: 0.2.0"))
        plugins._read_entry_points.cache_clear()
        outcome = command("--resume", run.folder)
        assert outcome.status == 2
        assert "was of privssl-example 0.1.0, and is of privssl-example 0.2.0" in outcome.err
    finally:
        about.write_text(kept)
        plugins._read_entry_points.cache_clear()
    assert command("--resume", run.folder).status == 0  # the control


@pytest.mark.slow  # five processes of Flower
@pytest.mark.flower
def test_over_flower_the_method_gives_the_same_weights(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    small = ["algorithm.rounds=2", "agents.support=1", "agents.query=1", "run.trackers=[]"]
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    demo = [sys.executable, "-m", "privssl.site.demo", str(tmp_path / "demo"), "--config"]
    process = subprocess.Popen(
        [*demo, str(CONFIG), *small], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    try:
        said = process.communicate(timeout=600)[0]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # so that it ends its own processes
            process.wait(timeout=60)
    assert process.returncode == 0, said
    alone = privssl.train(CONFIG, small, output=tmp_path / "alone")
    weights = [f / "classifier.safetensors" for f in (alone.folder, tmp_path / "demo" / "run")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
