"""``python -m privssl.train CONFIG.yaml [section.key=value ...]``: one run, from file to claim.

Exit status: 0 finished or budget spent, 2 the user's mistake, 130 interrupted after a
checkpoint. The last line is always the guarantee, or the sentence that there is none.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from accounting.errors import AccountingError
from privssl import durable
from privssl.errors import UserError

INTERRUPTED = 130
SECONDS_TO_WIND_UP = 5.0  # in which a second Ctrl-C is taken for the first

log = logging.getLogger("privssl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_intermixed_args(argv)
    console = Console(stderr=options.json, highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        stack.enter_context(_logging_to(_Screen()))
        stack.enter_context(_stopped_by(signal.SIGINT, signal.SIGTERM))
        try:
            return _train(options, console, stack)
        except (UserError, AccountingError) as problem:
            log.error("%s", problem)
            return problem.exit_status
        except KeyboardInterrupt:
            log.error(
                "Interrupted outside of the rounds. What a checkpoint has can be gone on with "
                "(--resume); a run folder without one can be replaced (run.overwrite=true)."
            )
            return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m privssl.train",
        description="Train one classifier from many parties and say what it leaked.",
    )
    parser.add_argument("config", type=Path, help="a YAML file, for example configs/fedssl.yaml")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value",
        help="set or change a value of the file, for example run.seed=1",
    )  # fmt: skip
    parser.add_argument(
        "--resume", type=Path, metavar="RUN_DIR",
        help="go on with the run in this folder, from its last checkpoint; same config",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="check everything, print who holds what and what it would cost, train nothing",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print results.json on standard output, and only that"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _train(options: argparse.Namespace, console: Console, stack: ExitStack) -> int:
    import torch  # here, so that --help and a typo in the command need no second

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    from privssl import checkpoint, run, run_folder
    from privssl import config as configs
    from privssl.prepare import prepare

    started = time.perf_counter()
    config = configs.load(options.config, options.overrides)
    if options.resume is not None:
        run_folder.check_resumable(options.resume, config)
        known = run_folder.outcome(options.resume)
        if known is not None and known[0]["status"] != "interrupted":
            console.print("This run has finished already; nothing was changed.")
            return _report(options, *known, options.resume, console)
    prepared = prepare(config)
    if options.dry_run:
        _warn(config.warnings)
        _describe(prepared, console)
        return 0
    stack.enter_context(_private_files())
    stack.enter_context(_full_disk_told_once())
    snapshot = None
    if options.resume is None:
        folder = stack.enter_context(run_folder.created(prepared))
        stack.enter_context(_logging_to(_LogFile(folder / "train.log")))
    else:
        folder = options.resume
        stack.enter_context(run_folder.locked(folder))
        stack.enter_context(_logging_to(_LogFile(folder / "train.log")))
        snapshot = checkpoint.load(folder / "checkpoints", configs.digest(config))
    _log_start(prepared)
    run.execute(prepared, folder, lambda: _trackers(folder, options, prepared, snapshot), snapshot)
    outcome = run_folder.outcome(folder)
    assert outcome is not None  # execute has just written it
    return _report(options, *outcome, folder, console, time.perf_counter() - started)


def _trackers(folder: Path, options: argparse.Namespace, prepared: Any, snapshot: Any) -> list[Any]:
    from privssl.run import rounds_of
    from privssl.tracker import CsvTracker, ProgressTracker, TensorBoardTracker

    after = None if snapshot is None else snapshot.round
    trackers: list[Any] = [
        CsvTracker(folder / "metrics.csv", resume_after=after),
        TensorBoardTracker(folder / "tensorboard", resume_after=after),
    ]
    if not options.quiet:
        trackers.append(ProgressTracker(rounds_of(prepared.algorithm), resume_after=after))
    return trackers


# What is told -------------------------------------------------------------------------------


class _Screen(logging.Handler):
    """Warnings and errors on standard error, below or above a progress bar."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        warns = record.levelno == logging.WARNING
        text = f"Warning: {record.getMessage()}" if warns else record.getMessage()
        style = "yellow" if warns else None
        Console(stderr=True, highlight=False, soft_wrap=True).print(text, style=style, markup=False)


class _LogFile(logging.FileHandler):
    """train.log. A line that a full disk does not take is dropped: the next write of metrics or
    of a checkpoint stops the run, and says why."""

    def __init__(self, path: Path) -> None:
        with durable.writing(path):
            super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        """See the head of the class."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def _logging_to(handler: logging.Handler) -> Iterator[None]:
    """Inside, what privssl logs goes to the handler, and not to those that libraries set up."""
    propagates, log.propagate = log.propagate, False
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagates
        handler.close()


def _log_start(prepared: Any) -> None:
    """The first lines of train.log: what is run, with what, on what."""
    from importlib.metadata import version

    config, agents = prepared.config, prepared.federation.agents
    log.info(
        "Run %s: %s on %s, seed %d, split %s, config %s",
        *(config.run.name, config.algorithm.name, config.data.name, config.run.seed),
        *(prepared.federation.manifest.hash[:12], config.source),
    )
    roles = ", ".join(f"{agent.id} ({agent.role})" for agent in agents)
    log.info("Device %s, torch %s. Agents: %s", prepared.device, version("torch"), roles)
    _warn(config.warnings)
    if prepared.plan is not None and prepared.plan.scope == "as_published":
        _warn([_nominal_warning(config.privacy)])


def _warn(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        log.warning("%s", sentence)


def _nominal_warning(privacy: Any) -> str:
    from accounting.budget import Nominal

    bare = tuple(n for n in privacy.update_at_support if n not in privacy.protect)
    return str(Nominal(privacy.epsilon, privacy.delta, privacy.protect, bare))


def _describe(prepared: Any, console: Console) -> None:
    """What --dry-run shows: the resolved config, who holds what, what would be spent."""
    from privssl import config as configs

    console.print(configs.to_yaml(prepared.config), markup=False)
    table = Table("agent", "role", "labelled", "unlabelled", "classes")
    names = prepared.federation.dataset.class_names
    privacy = prepared.config.privacy
    hidden = privacy is not None and privacy.record_counts == "private"
    for agent in prepared.federation.agents:
        labelled, unlabelled = agent.held_labelled, agent.held_unlabelled
        # Which classes a support agent has is part of what a claim protects.
        shown = labelled is not None and prepared.plan is None
        classes = [names[c] for c in labelled.y.unique().tolist()] if shown else []
        counts = ["-" if rows is None else str(len(rows)) for rows in (labelled, unlabelled)]
        if labelled is not None and hidden:
            counts[0] = "private"
        table.add_row(agent.id, agent.role, *counts, " ".join(classes) or "unknown")
    console.print(table)
    if prepared.plan is None:
        console.print("Not private: the plan spends no budget and nothing is guaranteed.")
    else:
        console.print(_planned_spending(prepared.plan, prepared.config.privacy), markup=False)


def _planned_spending(plan: Any, privacy: Any) -> str:
    from accounting.accountants import epsilon
    from accounting.budget import rounded_up
    from accounting.events import Unprotected, leaves

    noisy = [leaf for leaf in leaves(plan.event) if not isinstance(leaf, Unprotected)]
    spent = epsilon(noisy * plan.visits, privacy.delta) if plan.visits else 0.0
    return (
        f"Scope {plan.scope}. Noise multiplier {plan.noise_multiplier:g}, sample rate "
        f"{plan.sample_rate:g}, {plan.visits} visits of {plan.steps} private steps to each "
        f"support agent: {'nominal ' if plan.scope == 'as_published' else ''}epsilon "
        f"{rounded_up(spent)} of {privacy.epsilon:g} at delta {privacy.delta:g}."
        + (" The budget ends the visits before that." if spent > privacy.epsilon else "")
    )


def _report(
    options: argparse.Namespace, results: dict[str, Any], sentence: str, folder: Path,
    console: Console, seconds: float | None = None,
) -> int:  # fmt: skip
    """The last lines; returns the exit status."""
    if options.json:
        print(json.dumps(results, indent=2))
    accuracy, status = results["test_accuracy"], results["status"]
    words = {
        "finished": "Finished",
        "budget_exhausted": "Finished; the privacy budget ended visits to support agents early",
        "interrupted": f"Interrupted; go on with --resume {folder}",
    }
    took = "" if seconds is None else f", {seconds:.0f} s"
    console.print(
        f"{words[status]}. {results['rounds']} rounds{took}. Test accuracy "
        f"{accuracy['final']:.4f} (best {accuracy['best']:.4f} in round "
        f"{accuracy['best_round']}). Results in {folder}; pictures: "
        f"tensorboard --logdir {folder / 'tensorboard'}",
        markup=False,
    )
    console.print(sentence, style="bold", markup=False)
    return INTERRUPTED if status == "interrupted" else 0


# The process --------------------------------------------------------------------------------


@contextmanager
def _stopped_by(*signals: signal.Signals) -> Iterator[None]:
    """Inside, each signal is a KeyboardInterrupt; another one soon after it is not a second.

    People press Ctrl-C twice, and supervisors send SIGINT with SIGTERM: neither may disturb the
    checkpoint that the first one asked for.
    """
    stopped = -float("inf")

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        if time.monotonic() - stopped > SECONDS_TO_WIND_UP:
            stopped = time.monotonic()
            raise KeyboardInterrupt

    former = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _full_disk_told_once() -> Iterator[None]:
    """Inside, a thread that could not write ends without a traceback of its own.

    TensorBoard writes in a thread and raises the same error again at the next flush, where it
    stops the run with a message.
    """
    former = threading.excepthook

    def tell(crash: threading.ExceptHookArgs) -> None:
        if not isinstance(crash.exc_value, OSError):
            former(crash)

    threading.excepthook = tell
    try:
        yield
    finally:
        threading.excepthook = former


@contextmanager
def _private_files() -> Iterator[None]:
    """Inside, new files and folders are the user's alone."""
    former = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(former)


if __name__ == "__main__":
    sys.exit(main())
