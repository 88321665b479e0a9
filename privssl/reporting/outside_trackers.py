"""Trackers of ``run.trackers``: Weights & Biases, MLflow, and plug-ins.

They run at the coordinator, not at sites. In a private run they get only the content of
``metrics.csv``: no pictures and no times. The packages' reports about the machine (system
statistics, code, output) are off in every run. A tracker that fails during the run is dropped with
a warning, because a charged round must not be lost.

A plug-in is a function or class of (``TrackedRun``) that returns a ``Tracker``.
"""

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from privssl.errors import ConfigError
from privssl.reporting.trackers import Image, RoundRecord, Tracker
from privssl.runtime import plugins
from privssl.runtime.process import defer_interrupts
from privssl.settings.names import TRACKERS
from privssl.storage import atomic_files

log = logging.getLogger("privssl")


@dataclass(frozen=True)
class TrackedRun:
    """A tracker's information about a run."""

    name: str
    folder: Path  # of the run; a tracker may write files into it
    config: Mapping[str, Any]  # section -> key -> value, without paths of this machine
    private: bool
    resume_after: int | None  # the last round of the checkpoint; None: a new run


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if a tracker is not installed, cannot be imported, or is not a tracker."""
    for name in names:
        if name in TRACKERS and find_spec(name) is None:
            raise ConfigError(
                f"run.trackers has {name}, which is not installed: pip install 'privssl[{name}]'"
            )
        _find_maker(name)


def open_trackers(names: Sequence[str], run: TrackedRun) -> list[Tracker]:
    """Open the trackers of a run. Raises ConfigError if one cannot start."""
    opened: list[Tracker] = []
    for name in dict.fromkeys(names):
        with defer_interrupts():
            tracker = plugins.call(f"run.trackers: {name} cannot start:", _find_maker(name), run)
        if not all(callable(getattr(tracker, method, None)) for method in ("round", "close")):
            raise ConfigError(
                f"run.trackers: {name} gives a {type(tracker).__name__} without round or close. "
                "Return a privssl.reporting.trackers.Tracker"
            )
        opened.append(_GuardedTracker(name, tracker, private=run.private))
    return opened


def _find_maker(name: str) -> Callable[[TrackedRun], Any]:
    if name in TRACKERS:
        return {"wandb": WandbTracker, "mlflow": MLflowTracker}[name]
    advice = (
        "Name a class or function of (TrackedRun) that gives a privssl.reporting.trackers.Tracker"
    )
    return plugins.load_function("trackers", "run.trackers", name, advice)


class _GuardedTracker(Tracker):
    """Passes permitted records to a tracker, until it fails."""

    def __init__(self, name: str, tracker: Tracker, *, private: bool) -> None:
        self._name, self._tracker, self._private = name, tracker, private
        self._works = True

    def round(self, record: RoundRecord) -> None:
        values = record.values
        if self._private:
            values = {k: v for k, v in values.items() if not k.startswith("time/")}
        with self._guard():
            self._tracker.round(RoundRecord(record.round, record.total, record.phase, values))

    def images(self, round_number: int, tag: str, image: Image) -> None:
        if not self._private and hasattr(self._tracker, "images"):
            with self._guard():
                self._tracker.images(round_number, tag, image)

    def keep(self) -> None:
        if hasattr(self._tracker, "keep"):
            with self._guard():
                self._tracker.keep()

    def close(self) -> None:
        with self._guard():
            self._tracker.close()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            with defer_interrupts():
                yield
        except Exception as error:
            if self._works:
                log.warning("run.trackers: %s stopped: %s: %s", self._name, type(error).__name__,
                            error)  # fmt: skip
                self._works = False


class WandbTracker(Tracker):
    """Weights & Biases. Project and mode are package settings: $WANDB_PROJECT, $WANDB_MODE."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, disable_code=True, disable_git=True, save_code=False,
            disable_job_creation=True, x_disable_meta=True, x_disable_stats=True,
            x_disable_machine_info=True, x_save_requirements=False,
        )  # fmt: skip
        project = os.environ.get("WANDB_PROJECT") or "privssl"
        self._image = wandb.Image
        self._run = wandb.init(
            project=project, name=run.name, id=_keep_id(run, "wandb.id", secrets.token_hex(8)),
            dir=str(run.folder), config=dict(run.config), resume="allow", settings=settings,
        )  # fmt: skip

    def round(self, record: RoundRecord) -> None:
        self._run.log(dict(record.values), step=record.round)

    def images(self, round_number: int, tag: str, image: Image) -> None:
        self._run.log({tag: self._image(image)}, step=round_number)

    def close(self) -> None:
        self._run.finish()


class MLflowTracker(Tracker):
    """MLflow, without repeated rounds of resumed runs.

    Server and experiment are the package's settings: $MLFLOW_TRACKING_URI, $MLFLOW_EXPERIMENT_NAME.
    """

    def __init__(self, run: TrackedRun) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = os.environ["DO_NOT_TRACK"] = "true"
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric, self._client = Metric, mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "privssl"
        existing = self._client.get_experiment_by_name(name)
        experiment = (
            self._client.create_experiment(name) if existing is None else existing.experiment_id
        )
        stored_id = _keep_id(run, "mlflow.id")
        self._sent = -1
        if stored_id is None:
            self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
            _keep_id(run, "mlflow.id", self._id)
            params = [
                Param(k, str(v)[:500])
                for k, v in _flatten_config(run.config)
                if v not in ("", None)
            ]
            for start in range(0, len(params), 100):  # the limit of one call
                self._client.log_batch(self._id, params=params[start : start + 100])
        else:
            self._id = stored_id
            history = self._client.get_metric_history(self._id, "comm/up_bytes")
            self._sent = max((metric.step for metric in history), default=-1)

    def round(self, record: RoundRecord) -> None:
        if record.round <= self._sent:
            return
        values = {_convert_tag(name): float(value) for name, value in record.values.items()}
        metrics = [self._metric(name, v, 0, record.round) for name, v in values.items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[start : start + 1000])

    def images(self, round_number: int, tag: str, image: Image) -> None:
        self._client.log_image(self._id, image, f"{_convert_tag(tag)}_{round_number:05}.png")

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _keep_id(run: TrackedRun, file: str, new: str | None = None) -> str | None:
    """Return the service's id of the run: the stored one on resume, else store ``new``."""
    path = run.folder / file
    if run.resume_after is not None and path.is_file():
        return path.read_text(encoding="ascii").strip()
    if new is not None:
        atomic_files.write(path, new + "\n")
    return new


def _convert_tag(tag: str) -> str:
    """Convert a tag to characters that MLflow permits; class names may have others."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-. /") else "_" for c in tag)


def _flatten_config(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten_config(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
