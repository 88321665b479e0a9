"""``python -m privssl.compare CONFIG... [--seeds N] [section.key=value ...]``: who is better?

Every config runs with every seed, one run after another, on the same split of the same data; at
the end there is one table and one plot (compare/table.py). Each run is what ``privssl.train`` would
make of the same config, in a folder of its own, DIR/NAME-SEED: it can be audited and resumed alone.

1. Everything is checked before the first run: each config, its data, its privacy plan, that all
   share a split in each seed, and what already lies in the folders.
2. Finished runs are left alone, begun ones go on from their checkpoint, the others start. So after
   Ctrl-C, a kill or an error the same command goes on, and with more seeds it adds theirs.

Exit status as that of train: 0 finished, 2 the user's mistake, 130 interrupted.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from accounting.errors import AccountingError
from privssl.errors import ConfigError, RunFolderError, UserError
from privssl.runtime.console import (
    Screen,
    Terminal,
    open_standard_streams,
    results_to_standard_output,
)
from privssl.runtime.process import (
    INTERRUPTED,
    STOPPING,
    gc_paused,
    in_one_thread,
    interrupt_on_signals,
    logging_to,
    private_umask,
    report_full_disk_once,
    tune_malloc,
)
from privssl.storage import atomic_files

log = logging.getLogger("privssl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_intermixed_args(argv)
    open_standard_streams()
    console = Terminal(stderr=options.json, highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        screen = Screen()
        screen.addFilter(_Once())
        stack.enter_context(logging_to(screen))
        stack.enter_context(interrupt_on_signals(*STOPPING))
        try:
            return _compare(options, console, stack)
        except (UserError, AccountingError) as problem:
            log.error("%s", problem)
            return problem.exit_status
        except KeyboardInterrupt:
            log.error("Interrupted between runs; nothing is lost. The same command goes on.")
            return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m privssl.compare",
        description="Run several configs on the same splits and seeds; one table, one plot.",
    )
    parser.add_argument(
        "arguments", nargs="+", metavar="CONFIG | section.key=value",
        help="YAML files, and values that count for all of them, for example algorithm.rounds=20",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=_seeds, default=(0, 1, 2), metavar="N",
        help="how many seeds, from 0 (default 3), or which: 3,4,5",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="DIR",
        help="where the table, the plot and all runs go (default runs/compare-NAMES)",
    )  # fmt: skip
    parser.add_argument(
        "--allow-different-splits", action="store_true",
        help="compare configs that cannot share a split; the table says so in each row",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print what would be run"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the table as JSON on standard output, only that"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def _seeds(text: str) -> tuple[int, ...]:
    """
    >>> _seeds("3"), _seeds("3,4,5"), _seeds("7,")
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
    with gc_paused():  # here, so that --help and a typo in the command need no second
        from privssl.compare import plan, table
        from privssl.compare import runner as runs

    in_one_thread()
    tune_malloc()
    loaded = plan.load_configs(options.arguments)
    asked = options.output or plan.default_output(loaded)
    planned = plan.all_runs(loaded, options.seeds, asked)
    output = planned[0].config.folder.parent  # without ~
    differs = plan.different_splits(planned)
    if any(differs.values()) and not options.allow_different_splits:
        raise ConfigError(plan.cannot_share(planned, differs))
    if (output / "split.json").exists():
        raise RunFolderError(f"{output} is the folder of a run. Give another --output")
    if options.dry_run:
        runs.overview(planned, differs, console)
        return 0
    stack.enter_context(private_umask())
    stack.enter_context(report_full_disk_once())
    with atomic_files.writing(output):
        output.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = runs.run_all(planned, quiet=options.quiet)
    if status == "interrupted":
        console.print("Interrupted; nothing is lost. The same command goes on.")
        return INTERRUPTED
    rows, folders = runs.rows_of(planned, differs), plan.by_name(planned)
    table.write(
        output, rows, {name: [run.config.folder for run in of] for name, of in folders.items()}
    )
    if options.json:
        results_to_standard_output(json.dumps(table.as_json(rows), indent=2))
    runs.report(rows, output, console)
    return 0


class _Once(logging.Filter):
    """A warning that every seed would repeat is shown once."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        new = record.getMessage() not in self._seen
        self._seen.add(record.getMessage())
        return new


if __name__ == "__main__":
    sys.exit(main())
