"""``python -m privssl.train CONFIG.yaml [section.key=value ...]``: train and report the guarantee.

With ``--resume RUN_DIR`` no config is needed: the run folder has it.

Exit status: 0 finished or budget spent, 2 user error or damaged ledger, 130 interrupted after a
checkpoint. The last line is always the guarantee, or the sentence that there is none.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from privssl.errors import UserError
from privssl.runtime.command import ConfigParser, add_usual_flags, run_command
from privssl.runtime.console import results_to_standard_output
from privssl.runtime.plugins import imports_allowed
from privssl.runtime.process import (
    INTERRUPTED,
    gc_paused,
    in_one_thread,
    private_umask,
    report_full_disk_once,
    tune_malloc,
)

if TYPE_CHECKING:
    from privssl.api.datasets import Dataset
    from privssl.api.experiment import Overrides, Sections
    from privssl.api.run import Run
    from privssl.models.own_networks import NetworkSource

log = logging.getLogger("privssl")


class _CallableModule(ModuleType):
    """A module that can be called, for ``privssl.train(...)``.

    Importing this module sets the attribute ``privssl.train``, which would replace a function of
    that name.
    """

    def __call__(
        self,
        config: "str | Path | Sections",
        overrides: "Overrides | None" = None,
        data: "Dataset | None" = None,
        model: "NetworkSource | str | None" = None,
        output: "str | Path | None" = None,
        progress: bool = False,
    ) -> "Run":
        """Call ``privssl.api.experiment.train``, which has the documentation."""
        from privssl.api.experiment import train

        return train(config, overrides, data, model, output, progress)


sys.modules[__name__].__class__ = _CallableModule


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parse_options(argv)
    return run_command(
        partial(_train, options), json=options.json,
        interrupted="Interrupted outside the training loop. Continue from a checkpoint with "
        "--resume; if there is none, start over with run.overwrite=true.",
    )  # fmt: skip


def _parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; a resumed run needs only its folder, which has the config."""
    parser = _build_parser()
    options = parser.parse_intermixed_args(argv)
    first = options.config
    if first and "=" in first and not Path(first).exists():  # not a file, but the first override
        options.config = next((arg for arg in options.overrides if "=" not in arg), None)
        options.overrides = [first, *(arg for arg in options.overrides if arg != options.config)]
    if options.config is None and options.resume is None:
        parser.error("which config? Give a YAML file, for example configs/fedssl.yaml")
    options.config = Path(options.config) if options.config else None
    return options


def _build_parser() -> argparse.ArgumentParser:
    parser = ConfigParser(
        prog="python -m privssl.train",
        description="Train one classifier from the data of many parties, and state the guarantee.",
    )
    parser.add_argument(
        "config", nargs="?",
        help="a YAML file, for example configs/fedssl.yaml; with --resume not needed",
    )  # fmt: skip
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value",
        help="set or change a value of the file, for example run.seed=1",
    )  # fmt: skip
    parser.add_argument(
        "--resume", type=Path, metavar="RUN_DIR",
        help="continue the run in this folder from its last checkpoint, with the same config; only "
        "algorithm.rounds may be larger",
    )  # fmt: skip
    add_usual_flags(
        parser,
        dry_run="check everything, print who holds what, the epsilon of the plan, and what the run "
        "would take; do not train",
        json="print results.json (of a dry run: its estimate) on standard output, and nothing else "
        "there",
    )
    return parser


def _train(options: argparse.Namespace, console: Console, stack: ExitStack) -> int:
    with gc_paused():  # here, so that --help and usage errors stay fast
        from privssl.experiment import config as configs
        from privssl.experiment.plugin_names import imports_of
        from privssl.experiment.prepare import prepare
        from privssl.runs import accounts, dry_run, launch, lengthening, resume, run_dir

        in_one_thread()
        tune_malloc()
        started = time.perf_counter()
        stack.enter_context(imports_allowed())
        config = configs.load_config(
            options.config or resume.config_of(options.resume), options.overrides
        )
        stack.enter_context(imports_of(config))
        if options.resume is not None:
            finished = lengthening.read_finished_outcome(options.resume, config)
            if finished is not None:
                console.print("This run has finished already; nothing was changed.")
                return _report(options, *finished, options.resume, console)
        if options.resume is None and not options.dry_run:
            run_dir.refuse_existing_run(config)  # before noise is calibrated
        prepared = prepare(config)  # its objects stay, too, and private runs import Opacus
    if options.dry_run:
        launch.warn(prepared.config.warnings)
        estimate = dry_run.describe(prepared, console)
        accounts.check_shared_accounts(prepared)
        if options.resume is None:
            try:
                run_dir.check_free(config)
            except UserError as problem:
                log.warning("The run would be refused: %s", problem)
        if options.json:
            results_to_standard_output(json.dumps({"estimate": estimate}, indent=2))
        return 0
    stack.enter_context(private_umask())
    stack.enter_context(report_full_disk_once())

    bar = partial(launch.progress_trackers, prepared, shown=not options.quiet)
    folder = launch.launch(prepared, options.resume, bar, stack)
    outcome = run_dir.read_outcome(folder)
    assert outcome is not None  # launch has just written it
    return _report(options, *outcome, folder, console, time.perf_counter() - started)


def _report(
    options: argparse.Namespace, results: dict[str, Any], sentence: str, folder: Path,
    console: Console, seconds: float | None = None,
) -> int:  # fmt: skip
    """Print the last lines; return the exit status."""
    if options.json:
        results_to_standard_output(json.dumps(results, indent=2))
    accuracy, status = results["test_accuracy"], results["status"]
    statuses = {
        "finished": "Finished",
        "budget_exhausted": "Finished; the privacy budget ended visits to support agents early",
        "interrupted": f"Interrupted; continue with: python -m privssl.train --resume {folder}",
    }
    elapsed = "" if seconds is None else f", {seconds:.0f} s"
    summary = (
        f"Test accuracy {accuracy['final']:.4f} (best {accuracy['best']:.4f} in round "
        f"{accuracy['best_round']})"
        if accuracy["best_round"]
        else "No round was evaluated yet"
    )
    for text in results.get("warnings", ()):  # older runs have none
        console.print(f"Warning: {text}", style="yellow", markup=False)
    console.print(
        f"{statuses[status]}. {results['rounds']} rounds{elapsed}. {summary}. Results in {folder}; "
        f"pictures: tensorboard --logdir {folder / 'tensorboard'}",
        markup=False,
    )
    console.print(sentence, style="bold", markup=False)
    return INTERRUPTED if status == "interrupted" else 0


if __name__ == "__main__":
    sys.exit(main())
