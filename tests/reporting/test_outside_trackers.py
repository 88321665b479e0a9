"""Trackers of ``run.trackers``: W&B and MLflow by fakes of their documented interfaces, and in
their offline modes if installed (slow).
"""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import privssl
from privssl.engines.remote import RemoteTraffic, SitesEngine
from privssl.errors import ConfigError
from privssl.reporting import outside_trackers
from privssl.reporting.outside_trackers import TrackedRun, check_trackers, open_trackers
from privssl.reporting.trackers import RoundRecord, Tracker
from privssl.runs.engine_factory import log_traffic
from privssl.runtime import plugins
from tests.support.command_line import PLAIN, command

HERE = "tests.reporting.test_outside_trackers:{}"
PRIVACY = "privacy: {epsilon: 8.0, delta: 1.0e-3, sample_rate: 0.5, steps: 1}\n"
PICTURE = np.zeros((4, 6, 3), dtype=np.uint8)


class Seen(Tracker):
    """Keep all arguments."""

    runs: ClassVar[list["Seen"]] = []

    def __init__(self, run: TrackedRun) -> None:
        self.run, self.records, self.pictures = run, list[RoundRecord](), list[str]()
        self.closed = 0
        Seen.runs.append(self)

    def round(self, record: RoundRecord) -> None:
        self.records.append(record)

    def images(self, round_number: int, tag: str, image: Any) -> None:
        self.pictures.append(tag)

    def close(self) -> None:
        self.closed += 1


class Failing(Seen):
    """Fails from the second round on."""

    def round(self, record: RoundRecord) -> None:
        super().round(record)
        if record.round > 1:
            raise OSError("the service is away")


def not_one(run: TrackedRun) -> int:
    return 3


def told(folder: Path, after: int | None = None, **more: Any) -> TrackedRun:
    config = {"run": {"seed": 0}, "algorithm": {"name": "fedavg", "rounds": 3}}
    return TrackedRun("fedavg-0", folder, config, more.get("private", False), after)


def record(number: int) -> RoundRecord:
    values = {"test/accuracy": number / 4, "comm/up_bytes": 3, "time/round_s": 0.5}
    return RoundRecord(number, 4, "train", values)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "c.yaml").write_text(PLAIN)
    return tmp_path / "c.yaml"


# What a tracker receives --------------------------------------------------------------------------


@pytest.mark.parametrize("private", [False, True])
def test_a_tracker_of_a_private_run_receives_neither_pictures_nor_times(
    private: bool, config: Path, tmp_path: Path
) -> None:
    if private:
        config.write_text(PLAIN + PRIVACY)
    given = [f"run.trackers=['{HERE.format('Seen')}']", f"run.output={tmp_path / 'run'}"]
    assert command(config, *given).status == 0
    seen = Seen.runs[-1]
    assert [r.round for r in seen.records] == [1, 2, 3] and seen.closed >= 1
    names = {name for r in seen.records for name in r.values}
    assert "test/accuracy" in names and ("dp/epsilon/s0" in names) == private
    assert any(name.startswith("time/") for name in names) != private
    assert bool(seen.pictures) != private
    # The content of metrics.csv in a private run.
    header = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert not private or names == set(header[1:])
    assert seen.run.private == private and seen.run.config["algorithm"]["name"] == "fedssl"
    assert not [key for key in ("root", "split", "columns") if key in seen.run.config["data"]]


def test_site_durations_are_times_that_no_tracker_of_a_private_run_receives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = RemoteTraffic(up=10, down=20, frames=3, seconds=[0.25, 0.75])
    monkeypatch.setattr(SitesEngine, "take_traffic", lambda self: now)
    values = log_traffic(SitesEngine.__new__(SitesEngine), absences=0)
    assert [name for name, value in values.items() if value == 0.5] == ["time/visit_s"]
    assert values["comm/letters"] == 3  # the control: counts have another prefix


def test_a_failing_tracker_is_disabled_with_one_warning(config: Path, tmp_path: Path) -> None:
    names = [HERE.format("Failing"), HERE.format("Seen")]
    run = privssl.train(config, {"run.trackers": names}, output=tmp_path / "run")
    assert run.results["status"] == "finished"
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count("Failing stopped: OSError: the service is away") == 1
    assert len(Seen.runs[-1].records) == 3  # the control: the other tracker continues


@pytest.mark.parametrize(("name", "said"), [
    ("wandb", r"not installed: pip install 'privssl\[wandb\]'"),
    ("mlflow", r"not installed: pip install 'privssl\[mlflow\]'"),
    (HERE.format("PRIVACY"), "Name a class or function of"),
])  # fmt: skip
def test_a_missing_tracker_package_is_reported_before_the_run(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside_trackers, "find_spec", lambda name: None)
    with plugins.imports_allowed(), pytest.raises(ConfigError, match=said):
        check_trackers([name])


def test_an_invalid_tracker_is_refused(tmp_path: Path) -> None:
    with plugins.imports_allowed(), pytest.raises(ConfigError, match="a int without round"):
        open_trackers([HERE.format("not_one")], told(tmp_path))


# Weights & Biases ---------------------------------------------------------------------------------


class FakeWandb(ModuleType):
    """The documented ``wandb``: init, Settings, Image, and a run with log and finish."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = 0
        self.Settings = dict
        self.Image = lambda pixels: ("image", pixels.shape)

    def init(self, **given: Any) -> Any:
        self.inits.append(given)
        return SimpleNamespace(
            log=lambda values, step: self.logged.append((step, values)),
            finish=lambda: setattr(self, "finished", self.finished + 1),
        )


def test_wandb_receives_rounds_as_steps_and_no_machine_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    [tracker] = open_trackers(["wandb"], told(tmp_path))
    tracker.round(record(1))
    tracker.images(1, "images/mixes", PICTURE)
    tracker.close()
    assert fake.logged[0] == (1, dict(record(1).values))
    assert fake.logged[1] == (1, {"images/mixes": ("image", (4, 6, 3))})
    [given] = fake.inits
    assert given["config"]["algorithm"]["rounds"] == 3 and given["dir"] == str(tmp_path)
    off = {k for k, v in given["settings"].items() if v is True}
    assert off >= {"x_disable_stats", "x_disable_meta", "x_disable_machine_info", "disable_git",
                   "disable_code"}  # fmt: skip
    assert given["settings"]["console"] == "off"
    assert given["settings"]["x_save_requirements"] is False
    assert os.environ["WANDB_ERROR_REPORTING"] == "false" and fake.finished == 1
    # A resumed run is the same run there; a new run in the same folder is another.
    open_trackers(["wandb"], told(tmp_path, after=1))
    open_trackers(["wandb"], told(tmp_path))
    ids = [given["id"] for given in fake.inits]
    assert ids[0] == ids[1] != ids[2]


# MLflow -------------------------------------------------------------------------------------------


class FakeClient:
    """The documented ``mlflow.MlflowClient``, for one server."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}

    def get_experiment_by_name(self, name: str) -> Any:
        return None

    def create_experiment(self, name: str) -> str:
        return "1"

    def create_run(self, experiment: str, run_name: str) -> Any:
        name = f"r{len(self.runs)}"
        self.runs[name] = {"params": {}, "metrics": [], "images": [], "ended": False}
        return SimpleNamespace(info=SimpleNamespace(run_id=name))

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        self.runs[run]["metrics"] += [(m.key, m.value, m.step) for m in metrics]
        self.runs[run]["params"] |= {p.key: p.value for p in params}

    def get_metric_history(self, run: str, key: str) -> Any:
        return [SimpleNamespace(step=s) for k, _, s in self.runs[run]["metrics"] if k == key]

    def log_image(self, run: str, image: Any, file: str) -> None:
        self.runs[run]["images"].append(file)

    def set_terminated(self, run: str) -> None:
        self.runs[run]["ended"] = True


def test_mlflow_receives_each_round_once_also_from_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, module, entities = FakeClient(), ModuleType("mlflow"), ModuleType("mlflow.entities")
    module.MlflowClient = lambda: client  # type: ignore[attr-defined]
    entities.Metric = lambda key, value, timestamp, step: SimpleNamespace(  # type: ignore[attr-defined]
        key=key, value=value, step=step
    )
    entities.Param = lambda key, value: SimpleNamespace(key=key, value=value)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    monkeypatch.setenv("DO_NOT_TRACK", "false")
    [tracker] = open_trackers(["mlflow"], told(tmp_path))
    for number in (1, 2, 3):
        tracker.round(record(number))
    tracker.images(3, "images/mixes", PICTURE)
    tracker.close()
    [resumed] = open_trackers(["mlflow"], told(tmp_path, after=2))
    for number in (3, 4):
        resumed.round(record(number))
    [run] = client.runs.values()
    assert [step for key, _, step in run["metrics"] if key == "test/accuracy"] == [1, 2, 3, 4]
    assert run["params"]["algorithm.name"] == "fedavg" and run["ended"]
    assert run["images"] == ["images/mixes_00003.png"]
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == os.environ["DO_NOT_TRACK"] == "true"
    open_trackers(["mlflow"], told(tmp_path))  # the control: a new run is another one
    assert len(client.runs) == 2


def test_class_names_become_valid_mlflow_metric_names() -> None:
    assert outside_trackers._convert_tag("test/recall/Zürich, CH!") == "test/recall/Z_rich_ CH_"


# The packages themselves --------------------------------------------------------------------------


@pytest.mark.slow
def test_wandb_writes_an_offline_run(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'privssl[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    privssl.train(config, {"run.trackers": ["wandb"]}, output=tmp_path / "run")
    [file] = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert file.stat().st_size > 500


@pytest.mark.slow
def test_mlflow_writes_a_local_run(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    run = privssl.train(config, {"run.trackers": ["mlflow"]}, output=tmp_path / "run")
    client, name = mlflow.MlflowClient(), (run.folder / "mlflow.id").read_text().strip()
    history = client.get_metric_history(name, "test/accuracy")
    assert [m.value for m in history] == run.metrics["test/accuracy"]
