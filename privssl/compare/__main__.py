"""``python -m privssl.compare CONFIG... [--seeds N] [--vary key=a,b] [section.key=value ...]``.

Every config runs with every seed, one run after another, on the same split of the same data. The
result is one table and one plot. Each run equals a run of ``privssl.train`` with the same config,
in its own folder DIR/NAME-SEED, and can be audited and resumed alone.

1. Everything is checked before the first run: each config, its data, its privacy plan, that all
   configs share a split in each seed, and what the folders already contain.
2. Finished runs are kept, interrupted ones are resumed from their checkpoint, the others start. So
   the same command continues after Ctrl-C, a kill or an error, and more seeds add their runs.

Exit status as of train: 0 finished, 2 user error, 130 interrupted.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from privssl.errors import ConfigError, RunFolderError
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
from privssl.storage import atomic_files


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _build_parser().parse_intermixed_args(argv)
    return run_command(
        partial(_compare, options), json=options.json,
        interrupted="Interrupted between runs; nothing is lost. The same command continues.",
    )  # fmt: skip


def _build_parser() -> argparse.ArgumentParser:
    parser = ConfigParser(
        prog="python -m privssl.compare",
        description="Run several configs on the same splits and seeds; one table, one plot.",
    )
    parser.add_argument(
        "arguments", nargs="+", metavar="CONFIG | section.key=value",
        help="YAML files, and values that apply to all of them, for example algorithm.rounds=20",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=_parse_seeds, default=(0, 1, 2), metavar="N",
        help="number of seeds, from 0 (default 3), or a list: 3,4,5",
    )  # fmt: skip
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="section.key=A,B,C",
        help="run each config with each of these values; given several times, with a grid",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR",
        help="folder of the table, the plot and all runs (default runs/compare-NAMES)",
    )  # fmt: skip
    parser.add_argument(
        "--allow-different-splits", action="store_true",
        help="compare configs that cannot share a split; each row of the table says so",
    )  # fmt: skip
    add_usual_flags(
        parser,
        dry_run="check everything and print the planned runs",
        json="print the table as JSON on standard output, and nothing else there",
    )
    return parser


def _parse_seeds(text: str) -> tuple[int, ...]:
    """Parse a number of seeds or a list of seeds.

    >>> _parse_seeds("3"), _parse_seeds("3,4,5"), _parse_seeds("7,")
    ((0, 1, 2), (3, 4, 5), (7,))
    """
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number (3) or a list (3,4,5)")
    numbers = tuple(map(int, parts))
    if "," not in text:
        numbers = tuple(range(numbers[0]))
    if not numbers or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: give at least one seed, and each once")
    return numbers


def _compare(options: argparse.Namespace, console: Console, stack: ExitStack) -> int:
    with gc_paused():  # here, so that --help and usage errors stay fast
        from privssl.compare import files, paired, plan, runner, table
        from privssl.experiment.plugin_names import imports_of

    in_one_thread()
    tune_malloc()
    stack.enter_context(imports_allowed())
    loaded = plan.load_configs(options.arguments, options.vary)
    stack.enter_context(imports_of(*loaded))
    planned = plan.all_runs(loaded, options.seeds, options.output or plan.default_output(loaded))
    output = planned[0].config.folder.parent  # without ~
    differs = plan.different_splits(planned)
    if any(differs.values()) and not options.allow_different_splits:
        raise ConfigError(plan.cannot_share(planned, differs))
    if (output / "split.json").exists():
        raise RunFolderError(f"{output} is the folder of a run. Give another --output")
    if options.dry_run:
        runner.overview(planned, differs, console)
        return 0
    stack.enter_context(private_umask())
    stack.enter_context(report_full_disk_once())
    with atomic_files.writing(output):
        output.mkdir(parents=True, exist_ok=True, mode=0o700)
    if runner.run_all(planned, quiet=options.quiet) == "interrupted":
        console.print("Interrupted; nothing is lost. The same command continues.")
        return INTERRUPTED
    rows, runs_by_config = runner.rows_of(planned, differs), plan.by_name(planned).items()
    folders = {name: [run.config.folder for run in runs] for name, runs in runs_by_config}
    files.write(output, rows, folders, plan.varied_values(loaded, options.vary))
    if options.json:
        results = [result.as_json() for result in paired.differences(rows)]
        content = {**table.as_json(rows), "paired_differences": results}
        results_to_standard_output(json.dumps(content, indent=2))
    runner.report(rows, output, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
