"""Train from Python: ``privssl.train`` and ``privssl.load``.

Same as the command ``train``, but restores the process afterwards: threads of torch, random
numbers, signal handlers, logging. Works in notebooks and beside other threads; signals are handled
in the main thread alone.
"""

import dataclasses
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
import yaml

from accounting.errors import AccountingError
from privssl.api.datasets import Dataset
from privssl.api.run import Run
from privssl.errors import ConfigError, DataError, PrivacyError, RunFolderError
from privssl.experiment import config as configs
from privssl.experiment.config import Config
from privssl.experiment.plugin_names import imports_of, names_in
from privssl.experiment.prepare import prepare
from privssl.models.own_networks import NetworkSource, reference_of
from privssl.runs import launch, lengthening, run_dir
from privssl.runtime.console import Screen
from privssl.runtime.plugins import imports_allowed
from privssl.runtime.process import (
    STOPPING,
    in_one_thread,
    interrupt_on_signals,
    logging_to,
    private_umask,
    report_full_disk_once,
    tune_malloc,
)

Sections = Mapping[str, Any]  # of a config, by name
#: A mapping of dotted keys to values, or ``section.key=value`` as on the command line.
Overrides = Mapping[str, Any] | Sequence[str]


@dataclass(frozen=True)
class Experiment:
    """A checked config that can be run several times, created by ``privssl.load``."""

    source: Path
    overrides: tuple[str, ...]
    config: Config
    text: str | None = None  # the YAML of a config without a file

    def run(
        self,
        data: Dataset | None = None,
        model: NetworkSource | str | None = None,
        output: str | Path | None = None,
        progress: bool = False,
    ) -> Run:
        """Train. Arguments and errors as in :func:`train`."""
        request = _ConfigRequest(self.source, self.overrides, self.text)
        return _run_request(request, data, model, output, progress)


def load(config: str | Path | Sections, overrides: Overrides | None = None) -> Experiment:
    """Read and check a config.

    Args:
        config: a YAML file, or its sections ``{"algorithm": {"name": ...}, ...}``; or the folder of
            a run to continue.
        overrides: ``{"section.key": value}``, or a list of "section.key=value".

    A config that needs ``data`` or ``model`` can be passed only to ``train``.

    Raises:
        privssl.UserError: with all problems of the file and the overrides.
    """
    request = _make_request(config, overrides)
    return Experiment(request.source, request.overrides, _load_config(*request), request.text)


def train(
    config: str | Path | Sections,
    overrides: Overrides | None = None,
    data: Dataset | None = None,
    model: NetworkSource | str | None = None,
    output: str | Path | None = None,
    progress: bool = False,
) -> Run:
    """Train one classifier by a config, like the command ``train``.

    Args:
        config: a YAML file, or its sections as of :func:`load`. The folder of a run: continue it
            from its last checkpoint; a finished one is returned as it is.
        overrides: ``{"section.key": value}``, or a list of "section.key=value".
        data: rows in memory, instead of those of ``data.name``.
        model: a network instead of that of ``model.name``: a ``torch.nn.Module`` class or function
            of (shape, classes, **model.options), a module (its last layer is replaced), or a name.
        output: folder of the run, instead of ``run.output``.
        progress: whether to print progress and warnings; else nothing is printed, and warnings are
            in ``run.results["warnings"]``.

    Returns:
        The run, finished or stopped because its budget is exhausted.

    Raises:
        privssl.UserError: a user error, with the text that the command prints.
        KeyboardInterrupt: a checkpoint was written; train its folder to continue.
    """
    return _run_request(_make_request(config, overrides), data, model, output, progress)


class _ConfigRequest(NamedTuple):
    """A config that is not checked yet: some keys depend on the rows and the network."""

    source: Path
    overrides: tuple[str, ...]
    text: str | None  # the YAML of a config without a file


def _make_request(config: str | Path | Sections, overrides: Overrides | None) -> _ConfigRequest:
    arguments = _parse_overrides(overrides)
    if isinstance(config, Mapping):
        return _ConfigRequest(Path("config"), arguments, _as_yaml("config", config))
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"config is {repr(config)[:60]}. Give a YAML file, its sections, or the folder of a run"
        )
    return _ConfigRequest(Path(config), arguments, None)


def _parse_overrides(overrides: Overrides | None) -> tuple[str, ...]:
    """Return command line arguments. Raises ConfigError for neither a mapping nor a list of
    strings."""
    if isinstance(overrides, Mapping):
        return _as_arguments(overrides)
    items = () if overrides is None else overrides
    if isinstance(items, Iterable) and not isinstance(items, str):
        texts = tuple(items)
        if all(isinstance(text, str) for text in texts):
            return texts
    raise ConfigError(
        f'overrides is {repr(overrides)[:60]}. Give {{"section.key": value}}, or a list of '
        '"section.key=value"'
    )


def _run_request(
    request: _ConfigRequest, data: Dataset | None, model: NetworkSource | str | None,
    output: str | Path | None, progress: bool,
) -> Run:  # fmt: skip
    settings: dict[str, Any] = {}
    folder = request.source if request.text is None and request.source.is_dir() else None
    if data is not None:
        if not isinstance(data, Dataset):
            raise ConfigError(
                f"data is a {type(data).__name__}. Give a privssl.Dataset, such as "
                "Dataset.from_arrays(x_train, y_train, x_test, y_test), or name a file: "
                "data.name and data.root"
            )
        settings |= data.settings
    if model is not None:
        settings["model.name"] = model if isinstance(model, str) else reference_of(model)
        settings["model.width"] = 16
    if output is not None:
        if folder is not None:
            raise RunFolderError(
                f"{folder} is a run to continue, in its own folder. Leave output out, or "
                f"give {folder / 'config.yaml'} for a new run"
            )
        settings["run.output"] = str(output)
    arguments = {"run": "output", "model": "model"}  # of ``train``, by config section
    for key in (text.partition("=")[0] for text in request.overrides):
        if key in settings:
            argument = arguments.get(key.partition(".")[0], "data")
            raise ConfigError(f"{key}: set by {argument}=. Leave one of the two out")
    config = _load_config(
        request.source, (*request.overrides, *_as_arguments(settings)), request.text
    )
    source = None if isinstance(model, str) else model
    return _train_config(_add_checksum(config, data, folder), data, source, folder, progress)


def _load_config(source: Path, arguments: Sequence[str], text: str | None) -> Config:
    path = source / "config.yaml" if text is None and source.is_dir() else source
    with imports_allowed():
        return configs.load_config(path, arguments, text=text)


def _as_arguments(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={_as_yaml(key, value)}" for key, value in values.items())


def _as_yaml(key: str, value: Any) -> str:
    plain = str(value) if isinstance(value, Path) else value
    try:
        text: str = yaml.safe_dump(plain, default_flow_style=True, width=2**20, allow_unicode=True)
    except yaml.YAMLError:
        path, invalid = _find_invalid_value("" if key == "config" else key, plain) or (key, value)
        advice = "Give text, a number of Python's, a bool, None, a list or a mapping of these"
        if isinstance(invalid, type | FunctionType):
            advice = f'Give its name: "{invalid.__module__}:{invalid.__qualname__}"'
        raise ConfigError(f"{path} is {repr(invalid)[:60]}. {advice}") from None
    return text.removesuffix("\n").removesuffix("\n...")


def _find_invalid_value(key: str, value: Any) -> tuple[str, Any] | None:
    """Return the first value inside that YAML cannot represent, and its dotted key."""
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        inner = ((f"{key}.{name}".removeprefix("."), item) for name, item in value.items())
    elif isinstance(value, list | tuple):
        inner = ((key, item) for item in value)
    elif not isinstance(value, str | int | float | None):
        return key, value
    return next(filter(None, (_find_invalid_value(*pair) for pair in inner)), None)


def _add_checksum(config: Config, data: Dataset | None, folder: Path | None) -> Config:
    """Return the config with the checksum of rows in memory; a recorded checksum must be the same.

    A new private run records none: the checksum has no key, so a reader with all rows but one could
    try rows until it matches, and an audit needs config.yaml. On resume split.json has it.
    """
    if data is None:
        return config
    recorded = config.data.checksum
    if recorded not in ("", data.checksum):  # do not print checksums of private rows
        raise DataError(
            f"data has other rows than {config.source} was written for. Give the same rows in the "
            "same order"
        )
    if data.rows.held is not None and config.hides_counts:
        raise PrivacyError(
            "Dataset.federated writes the number of labelled rows to config.yaml, and "
            "privacy.record_counts is private. Give Dataset.from_arrays and data.split instead"
        )
    resumed = "" if folder is None else recorded
    checksum = data.checksum if config.privacy is None else resumed
    settings = dataclasses.replace(config.data, checksum=checksum)
    return dataclasses.replace(config, data=settings)


def _train_config(
    config: Config, data: Dataset | None, network: NetworkSource | None, folder: Path | None,
    progress: bool,
) -> Run:  # fmt: skip
    """Run from the start, or with ``folder`` from its last checkpoint."""
    try:
        with _set_up_process(progress) as stack:
            stack.enter_context(imports_of(config))
            if folder is not None and lengthening.read_finished_outcome(folder, config) is not None:
                return Run(folder, network, names_in(config))
            if folder is None:
                run_dir.refuse_existing_run(config)  # before noise is calibrated
            if data is not None and config.privacy is not None:
                launch.warn(data.warnings)  # printed only: train.log is not open
            prepared = prepare(config, None if data is None else data.rows, network)
            bar = partial(launch.progress_trackers, prepared, shown=progress)
            run = Run(launch.launch(prepared, folder, bar, stack), network, names_in(config))
    except AccountingError as error:
        raise PrivacyError(str(error)) from error
    if run.results["status"] == "interrupted":
        raise KeyboardInterrupt(
            f"Interrupted; continue with privssl.train({str(run.folder)!r}, ...)"
        )
    return run


@contextmanager
def _set_up_process(progress: bool) -> Iterator[ExitStack]:
    """Set up the process for a run and restore it afterwards; hold the run's lock and log."""
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.enter_context(logging_to(Screen() if progress else logging.NullHandler()))
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(interrupt_on_signals(*STOPPING))
        stack.enter_context(private_umask())
        stack.enter_context(report_full_disk_once())
        in_one_thread()
        if "OMP_NUM_THREADS" not in os.environ:
            stack.callback(torch.set_num_threads, threads)
        tune_malloc()
        # Networks are built, and their weights then replaced by those of a seeded generator.
        stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        yield stack
