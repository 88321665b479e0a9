"""``python -m privssl.predict RUN INPUT...``: classify rows with a finished run.

Inputs are images, folders of images, NPZ files (x, x_test or x_unlabelled), NPY files, and CSV
files with the columns that the run was trained on. The output has a line per row: its file or
number, its class, and the probability of each class.
"""

import argparse
import csv
import io
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from privssl.runtime.command import add_plugin_flag, run_command
from privssl.runtime.console import results_to_standard_output

EARLIER = (b"row,class", b'[\n  {\n    "row"', b"[]")  # start of predictions, CSV and JSON


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m privssl.predict", description="Classify rows with a finished run."
    )
    add_run_arguments(parser)
    parser.add_argument(
        "inputs", nargs="+", type=Path, metavar="INPUT",
        help="image, folder of images, NPZ file (x, x_test or x_unlabelled), NPY or CSV file",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.csv", help="write the output to this file"
    )
    options = parser.parse_args(argv)
    return run_command(partial(_predict, options), json=True, interrupted="Interrupted.")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN, ``--model`` and ``--plugin``."""
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder")
    parser.add_argument(
        "--model", metavar="PACKAGE.MODULE:NAME",
        help="your own network, if the run used one: names in the run folder are not imported",
    )  # fmt: skip
    add_plugin_flag(parser)


def _predict(options: argparse.Namespace, console: Console, stack: ExitStack) -> int:
    from privssl.api.inputs import read_rows
    from privssl.api.run import open_run
    from privssl.runtime.process import in_one_thread
    from privssl.storage import atomic_files

    in_one_thread()
    if options.output is not None:
        _check_output(options.output)
    run = open_run(options.run, options.model, options.plugin)
    names: list[str] = []
    rows: list[list[float]] = []
    for row_names, x in read_rows(options.inputs, run.form):
        names += row_names
        rows += run.predict(x, probabilities=True).tolist()
    if options.json:
        text = json.dumps(_as_json(run.class_names, names, rows), indent=2)
    else:
        text = _as_csv(run.class_names, names, rows)
    if options.output is None:
        results_to_standard_output(text.removesuffix("\n"))
    else:
        atomic_files.write(options.output, text)
        console.print(f"{len(names)} rows: {options.output}", markup=False)
    return 0


def _check_output(output: Path) -> None:
    """Refuse to replace a file that is not an earlier output, such as the rows or a file of the
    run."""
    from privssl.errors import RunFolderError
    from privssl.storage import atomic_files

    with atomic_files.writing(output):
        begin = output.read_bytes()[:100] if output.exists() else EARLIER[0]
    if not begin.startswith(EARLIER):
        raise RunFolderError(f"{output} exists and holds no predictions. Choose another --output")


def _find_best(classes: Sequence[str], row: Sequence[float]) -> str:
    return classes[row.index(max(row))]


def _as_json(
    classes: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    entries = []
    for name, row in zip(names, rows, strict=True):
        by_class = dict(zip(classes, row, strict=True))
        entries.append({"row": name, "class": _find_best(classes, row), "probabilities": by_class})
    return entries


def _as_csv(classes: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[float]]) -> str:
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["row", "class", *classes])
    for name, row in zip(names, rows, strict=True):
        table.writerow([name, _find_best(classes, row), *(f"{p:.6f}" for p in row)])
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
