"""``python -m privssl.evaluate RUN DATA``: measure a finished run on labelled rows.

DATA is an NPZ file (x and y, or x_test and y_test), a CSV file with the columns that the run was
trained on, or a folder with a folder of images for each class (``DATA/test`` if there is one).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from privssl.predict import add_run_arguments
from privssl.runtime.command import run_command
from privssl.runtime.console import results_to_standard_output

MOST_COLUMNS = 20  # classes up to which the confusion matrix is printed; --json always has it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m privssl.evaluate", description="Measure a finished run on labelled rows."
    )
    add_run_arguments(parser)
    parser.add_argument(
        "data", type=Path, metavar="DATA",
        help="an NPZ file (x and y, or x_test and y_test), a CSV file, or a folder of classes",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    return run_command(partial(_evaluate, options), json=options.json, interrupted="Interrupted.")


def _evaluate(options: argparse.Namespace, console: Console, stack: ExitStack) -> int:
    from privssl.api.inputs import read_labelled
    from privssl.api.run import open_run
    from privssl.runtime.process import in_one_thread

    in_one_thread()
    run = open_run(options.run, options.model, options.plugin)
    metrics = run.evaluate(*read_labelled(options.data, run.form))
    if options.json:
        results_to_standard_output(json.dumps(metrics, indent=2))
    else:
        for name, value in metrics.items():
            if not isinstance(value, list | dict):
                shown = f"{value:.4f}" if isinstance(value, float) else value
                console.print(f"{name.replace('_', ' ')}: {shown}", markup=False)
        console.print(_build_table(run.class_names, metrics))
    return 0


def _build_table(classes: Sequence[str], metrics: dict[str, Any]) -> Table:
    """Return a table of the recall of each class, and of its predicted classes."""
    digits = len(str(max(max(row) for row in metrics["confusion"])))
    printed = classes if len(classes) <= MOST_COLUMNS else ()
    table = Table(
        *(Column(name, no_wrap=True) for name in ("class", "recall")),  # narrow screens fold names
        *(Column(escape(name), overflow="fold", min_width=digits) for name in printed),
    )
    for name, row in zip(classes, metrics["confusion"], strict=True):
        recall = metrics["recall"][name]
        shown = "-" if recall is None else f"{recall:.4f}"
        counts = map(str, row) if len(classes) <= MOST_COLUMNS else ()
        table.add_row(escape(name), shown, *counts)
    return table


if __name__ == "__main__":
    sys.exit(main())
