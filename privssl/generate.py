"""``python -m privssl.generate RUN --count N --output FILE.npz|FILE.csv|FOLDER``: synthetic rows.

The generator of a finished run makes labelled rows from a class and noise. The last line names the
guarantee that covers them. Exit status: 0 written, 2 user error, 130 interrupted.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from privssl.predict import add_run_arguments
from privssl.runtime.command import ALLOWED_BY_FLAG, run_command
from privssl.runtime.plugins import imports_allowed
from privssl.runtime.process import gc_paused, in_one_thread


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _build_parser().parse_args(argv)
    return run_command(
        partial(_generate, options), json=False, interrupted="Interrupted. Delete the output."
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m privssl.generate",
        description="Write labelled synthetic rows made by the generator of a finished run.",
    )
    add_run_arguments(parser)
    parser.add_argument("--count", type=int, required=True, metavar="N", help="number of rows")
    parser.add_argument(
        "--classes", metavar="A,B",
        help="names of classes (default: all); one with a comma in double quotes, as in a CSV file",
    )  # fmt: skip
    parser.add_argument(
        "--confidence", type=float, default=0.0, metavar="P",
        help="least probability of a row's class by the run's classifier",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same rows")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE.npz|FILE.csv|FOLDER",
        help="an NPZ file with x, y and class_names; for a table also a CSV file with its columns, "
        "for images a folder of PNG files",
    )  # fmt: skip
    parser.add_argument(
        "--acknowledge-query-rows", action="store_true",
        help="needed for a private run: its unlabelled rows are not protected, and the generator "
        "learned from them",
    )  # fmt: skip
    return parser


def _generate(options: argparse.Namespace, console: Console, stack: ExitStack) -> int:
    with gc_paused():  # here, so that --help and usage errors need no torch
        from privssl.api.run import open_run
        from privssl.generation.files import check_free, write_rows
        from privssl.generation.rows import generate_rows

    in_one_thread()
    stack.enter_context(imports_allowed(options.plugin, ALLOWED_BY_FLAG))
    check_free(options.output)
    classify = None
    if options.confidence:
        run = open_run(options.run, options.model, options.plugin)
        classify = lambda x: run.predict(x, probabilities=True)  # noqa: E731
    classes = None
    if options.classes is not None:
        fields = next(csv.reader([options.classes], skipinitialspace=True), [])
        classes = [name.strip() for name in fields or [""]]
    rows = generate_rows(
        options.run, options.count, classes, options.seed,
        acknowledge_query_rows=options.acknowledge_query_rows, confidence=options.confidence,
        classify=classify,
    )  # fmt: skip
    write_rows(rows, options.output)
    counts = {rows.class_names[c]: int((rows.y == c).sum()) for c in sorted(set(rows.y.tolist()))}
    listing = ", ".join(f"{name}: {number}" for name, number in counts.items())
    console.print(f"{len(rows.y)} rows in {options.output} ({listing}).", markup=False)
    console.print(rows.covered_by, style="bold", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
