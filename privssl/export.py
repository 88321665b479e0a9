"""``python -m privssl.export RUN --onnx FILE | --torch-export FILE``: write a classifier.

The file maps rows (B, *shape), as ``Run.network_input`` returns, to logits (B, classes), for any B.
It is written only if its outputs agree with those of the classifier on synthetic rows. Exit status:
0 written, 2 user error, 130 interrupted.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from privssl.errors import RunFolderError
from privssl.predict import add_run_arguments
from privssl.runtime.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m privssl.export",
        description="Write the classifier of a finished run for other programs.",
    )
    add_run_arguments(parser)
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--onnx", type=Path, metavar="FILE", help="needs pip install 'privssl[onnx]'")
    form.add_argument("--torch-export", type=Path, metavar="FILE", help="read by torch.export.load")
    options = parser.parse_args(argv)
    return run_command(partial(_export, options), json=False, interrupted="Interrupted.")


def _export(options: argparse.Namespace, console: Console, _: ExitStack) -> int:
    from privssl.api.run import open_run
    from privssl.models import exported
    from privssl.runs.model_card import scaling_of
    from privssl.runtime.process import in_one_thread
    from privssl.storage import atomic_files

    in_one_thread()
    output = options.onnx or options.torch_export
    if output.exists() or output.is_symlink():
        raise RunFolderError(f"{output} exists. Choose another file")
    run = open_run(options.run, options.model, options.plugin)
    network = run.classifier()  # raises for folders without "rows"
    rows = run.results["rows"]
    shape, columns = tuple(rows["shape"]), rows.get("columns")
    metadata = {
        "class_names": "\n".join(run.class_names), "shape": "x".join(map(str, shape)),
        "scaling": scaling_of(rows), **({"columns": json.dumps(columns)} if columns else {}),
    }  # fmt: skip
    write = exported.as_onnx if options.onnx else exported.as_torch_export
    written, diff = exported.checked(write, network, shape, metadata)
    atomic_files.write(output, written, parents=True)
    console.print(
        f"{output}: rows (B, {', '.join(map(str, shape))}), {metadata['scaling']}, to logits "
        f"(B, {len(run.class_names)}). Largest difference on {exported.ROWS} rows: {diff:.1e}.",
        markup=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
