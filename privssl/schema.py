"""``python -m privssl.schema [--output FILE]``: a JSON schema of the config, for editors.

It has every key with its type, range and meaning, and the keys of each algorithm. Rules that
involve several keys are checked by ``privssl.train --dry-run``. Exit status: 0 written, 2 user
error, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from privssl.errors import UserError
from privssl.runtime.command import run_command
from privssl.runtime.console import results_to_standard_output


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m privssl.schema",
        description="Write a JSON schema of the config, for completion and checks in editors.",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="output file (default: standard output)"
    )
    options = parser.parse_args(argv)
    return run_command(partial(_write, options.output), json=True, interrupted="Interrupted.")


def _write(output: Path | None, console: Console, _: ExitStack) -> int:
    import json

    from privssl.experiment.json_schema import DRAFT, config_schema
    from privssl.storage import atomic_files

    text = json.dumps(config_schema(), indent=2) + "\n"
    if output is None:
        results_to_standard_output(text.removesuffix("\n"))
        return 0
    with atomic_files.writing(output):
        if output.exists() and DRAFT.encode() not in output.read_bytes()[:1000]:
            raise UserError(f"{output} exists and is no JSON schema. Choose another --output")
        atomic_files.write(output, text)
    console.print(f"{output}. First line of a config in its folder:", markup=False)
    console.print(f"# yaml-language-server: $schema={output.name}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
