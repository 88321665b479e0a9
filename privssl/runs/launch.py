"""Start or resume a run in its folder, with log and trackers; used by ``train`` and ``compare``."""

import json
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from privssl.core.plugin_errors import plugin_errors
from privssl.core.rows import IMAGE, kind_of
from privssl.data import FederatedDataset, class_counts_of
from privssl.experiment import config as configs
from privssl.experiment.plugin_names import plugins_of
from privssl.experiment.prepare import Prepared
from privssl.models.network_checks import outputs_of
from privssl.ops import dispatch
from privssl.reporting.outside_trackers import TrackedRun, open_trackers
from privssl.reporting.trackers import CsvTracker, ProgressTracker, TensorBoardTracker, Tracker
from privssl.runs import checkpoint, lengthening, round_loop, run_dir
from privssl.runs import resume as runs_resume
from privssl.runs.engine_factory import refuse_unreachable
from privssl.runs.round_plan import rounds_of
from privssl.runtime.process import LogFile, logging_to
from privssl.settings.names import is_outside
from privssl.storage import atomic_files
from privssl.storage.tensor_files import open_lazily
from privssl.training.local_training import load_weights

log = logging.getLogger("privssl")


def launch(
    prepared: Prepared,
    resume: Path | None,
    extra_trackers: Callable[[int | None], Sequence[Tracker]],
    stack: ExitStack,
) -> Path:
    """Run from the start or from the last checkpoint; return the run's folder.

    Args:
        resume: the folder of the run to resume; None: begin the run of ``prepared``.
        extra_trackers: makes trackers beside ``metrics.csv`` and TensorBoard. Called after all
            checks, with the round after which it resumes (None: from the start).
        stack: holds the folder's lock and log; the caller closes it after reporting errors, so that
            the log includes them.
    """
    refuse_unreachable(prepared)  # before a former run is replaced
    if resume is None:
        folder = stack.enter_context(run_dir.create_run_dir(prepared))
    else:
        folder = resume
        run_dir.restore_replaced_run(folder)
        stack.enter_context(run_dir.lock_run_dir(folder))
    log_file = LogFile(folder / "train.log")
    stack.enter_context(logging_to(log_file))
    snapshot = None
    if resume is not None:
        digest = configs.config_hash(prepared.config)
        digest_with_rounds = partial(lengthening.digest_after, prepared.config)
        snapshot = checkpoint.load_snapshot(folder / "checkpoints", digest, digest_with_rounds)
        runs_resume.check_device(folder)
        runs_resume.check_same_split(folder, prepared, snapshot)
        runs_resume.check_same_names(folder, prepared, snapshot)
        runs_resume.check_same_public_parts(folder, prepared, snapshot)
        runs_resume.check_spending_shown(folder, prepared)
        runs_resume.check_former_ledgers(folder, prepared, snapshot)
        warn(runs_resume.other_code_warnings(snapshot))
        warn(runs_resume.check_same_plugins(folder, prepared, snapshot))
        if lengthening.asks_for_more(folder, prepared.config):
            lengthening.record(folder, prepared.config.algorithm.rounds)
    resume_after, config = None if snapshot is None else snapshot.round, prepared.config
    sections, private = configs.without_paths(config), config.privacy is not None
    tracked_run = TrackedRun(config.run.name, folder, sections, private, resume_after)
    _log_start(prepared)
    for record in row_log_records(prepared):
        log_file.handle(record)

    def make_trackers() -> list[Tracker]:
        # Here, because round_loop calls this after all checks of the new run.
        run_dir.remove_replaced_run(folder)
        return [
            CsvTracker(folder / "metrics.csv", resume_after=resume_after),
            TensorBoardTracker(folder / "tensorboard", resume_after=resume_after),
            *open_trackers(config.run.trackers, tracked_run),
            *extra_trackers(resume_after),
        ]

    def keep_traceback(error: Exception) -> str:
        text = "".join(traceback.format_exception(error))
        log_file.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, text, (), None))
        return f". The traceback is in {folder / 'train.log'}"

    with plugin_errors(plugins_of(prepared.config), keep_traceback):
        round_loop.train(prepared, folder, make_trackers, snapshot)
        _record_outputs(prepared, folder)
    return folder


def _record_outputs(prepared: Prepared, folder: Path) -> None:
    """Add outputs of an own network on synthetic rows to results.json, for who opens the run."""
    outcome, cpu = run_dir.read_outcome(folder), torch.device("cpu")
    if outcome is None or outcome[0]["status"] == "interrupted":
        return
    if not is_outside(prepared.config.model.name):
        return
    network = prepared.algorithm.task.new_classifier()
    load_weights(network, dict(open_lazily(folder / run_dir.CLASSIFIER)), cpu)
    outputs = outputs_of(network, prepared.algorithm.task.shape, cpu)
    text = json.dumps(outcome[0] | {"outputs": outputs}, indent=2) + "\n"
    atomic_files.write(folder / "results.json", text)


def progress_trackers(
    prepared: Prepared, resume_after: int | None, *, shown: bool
) -> list[ProgressTracker]:
    """Return the progress bar of one run, as ``extra_trackers`` of :func:`launch`."""
    total, nominal = rounds_of(prepared.algorithm), prepared.is_nominal
    return [ProgressTracker(total, resume_after, nominal=nominal)] if shown else []


def _log_start(prepared: Prepared) -> None:
    """Log the first lines of train.log: config, versions, device."""
    config, agents = prepared.config, prepared.roster
    log.info(
        "Run %s: %s on %s, seed %d, split %s, config %s",
        *(config.run.name, config.algorithm.name, config.data.name, config.run.seed),
        *(prepared.published_split_hash[:12], config.source),
    )
    roles = ", ".join(f"{agent.id} ({agent.role})" for agent in agents)
    log.info(
        "Device %s, torch %s, kernels %s. Agents: %s",
        *(device_text(prepared), version("torch"), dispatch.instruction_set() or "torch", roles),
    )
    kind = kind_of(prepared.federated_data.dataset.shape)
    if kind is not IMAGE:
        log.info("Rows are %ss, so TensorBoard has no pictures of them", kind.name)
    warn([*config.warnings, *prepared.nominal_warnings])


def device_text(prepared: Prepared) -> str:
    """Return the device of a run, and why it is not a GPU if one exists and the CPU was not
    requested."""
    device, requested = prepared.device, prepared.config.run.device
    gpu_unused = requested == "auto" and device.type == "cpu" and torch.cuda.device_count()
    return f"{device} (private steps take no GPU)" if gpu_unused else str(device)


def row_log_records(prepared: Prepared) -> Iterator[logging.LogRecord]:
    """Yield log records about rows for train.log alone: of reading them, and classes by agent.

    A private run's log gives numbers of unlabelled rows and nothing of labelled ones.
    """
    federated_data = prepared.federated_data
    private = prepared.config.privacy is not None
    if not private:
        yield from federated_data.dataset.said
    for agent, holding in federated_data.manifest.agents.items():
        if private:
            text = f"without labels {len(holding.unlabelled)} (labelled rows are not logged)"
        else:
            labelled = _format_class_counts(federated_data, holding.labelled)
            unlabelled = _format_class_counts(federated_data, holding.unlabelled)
            text = f"with labels {labelled}; without labels {unlabelled}"
        text = f"Rows of {agent}: {text}"
        yield log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None)


def _format_class_counts(federated_data: FederatedDataset, ids: Sequence[int]) -> str:
    """Return how many rows, and how many of each class, by the true labels."""
    counts = class_counts_of(federated_data, ids)
    names = federated_data.dataset.class_names
    parts = [f"{name} {n}" for name, n in zip(names, counts.tolist(), strict=True) if n]
    if unknown := len(ids) - int(counts.sum()):
        parts.append(f"{unknown} of unknown class")
    by_class = ", ".join(parts)
    return f"{len(ids)} ({by_class})" if by_class else str(len(ids))


def warn(sentences: Sequence[str]) -> None:
    """Log sentences as warnings, to the console and the file."""
    for sentence in sentences:
        log.warning("%s", sentence)
