"""``python -m privssl.reproduce [TABLE...]``: published tables, measured cell by cell.

A table is a file, ``configs/tables/NAME.yaml``. Each cell is run with each of its seeds by
``privssl.train``, in a separate process, and the results are stored in ``results/``. The same
command continues after Ctrl-C, a kill or an error. Several processes may work in parallel: none
repeats a run of another.

Exit status: 0 done, or out of time; 1 a cell failed; 2 user error; 130 interrupted.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from privssl.runtime.command import run_command
from privssl.runtime.process import gc_paused, in_one_thread

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command; returns its exit status."""
    parser = _build_parser()
    options = parser.parse_args(argv)
    if options.render and options.tables:
        parser.error("--render writes the pages of all tables: remove the names")
    return run_command(
        partial(_reproduce, options, root), json=False,
        interrupted="Interrupted; nothing is lost. The same command continues.",
    )  # fmt: skip


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m privssl.reproduce",
        description="Run cells of published tables and store the results in results/.",
    )
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE",
        help="names of files in configs/tables; with --list or --next the default is all",
    )  # fmt: skip
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--list", action="store_true", help="print tables and cells with their state")
    mode.add_argument(
        "--next", action="store_true",
        help="run what is missing by priority, one cell after the other, until stopped: one seed "
        "of all tables, then the next; old cells come last",
    )  # fmt: skip
    mode.add_argument(
        "--render", action="store_true", help="write the pages of docs/ from the store"
    )
    parser.add_argument(
        "--cells",
        metavar="PATTERN",
        help="only cells whose ROW/COLUMN matches, for example 'Fed*/*'",
    )
    parser.add_argument(
        "--seeds", type=_parse_count, metavar="N", help="only the first N of a table's seeds"
    )
    parser.add_argument(
        "--minutes", type=_parse_minutes, metavar="M",
        help="stop after this many minutes; a running cell writes a checkpoint",
    )  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="keep the run folders of stored cells")
    return parser


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1")
    return int(text)


def _parse_minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of minutes above 0")
    return minutes


def _reproduce(options: argparse.Namespace, root: Path, console: Console, _: ExitStack) -> int:
    until = time.monotonic() + 60 * (options.minutes or float("inf"))
    with gc_paused():  # here, so that --help and usage errors stay fast
        from privssl.errors import ConfigError
        from privssl.reproduce import schedule
        from privssl.reproduce.runner import Runner
        from privssl.reproduce.store import Store
        from privssl.reproduce.tables import load_tables

    in_one_thread()
    tables = load_tables(root, options.tables)
    store = Store(root)
    if options.render:
        from privssl.reproduce.pages import render

        for path in render(tables, store, root):
            console.print(f"Wrote {path}", markup=False)
        return 0
    if not (options.tables or options.list or options.next):
        raise ConfigError(
            "No table was named. --list shows all tables; name some of them, or give --next for "
            "all that is missing"
        )
    selected = schedule.select(tables, options.cells, options.seeds)
    if options.list:
        schedule.print_states(selected, store, console)
        return 0
    runner = Runner(root, store, keep=options.keep)
    return schedule.run_all(selected, store, runner, console, until, by_seed=options.next)


if __name__ == "__main__":
    sys.exit(main())
