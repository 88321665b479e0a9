"""Seconds of a round under two settings, e.g. with one and two worker processes, or float32 and
bfloat16.

    python -m benchmarks.rounds CONFIG... [--vary run.workers=1,2] [--rounds 6] [KEY=VALUE ...]

Runs the first rounds of each config (of the phase of --phase, if it has several), without
evaluation, pictures or files, three times under each value in turn. A value's time is the median of
its rounds. Prints a Markdown table with the ratio of the first to the last. To compare precisions
also give run.workers=1. Run it on an idle machine: other load changes the times.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.batched_agents import PASSES, Measured, play
from benchmarks.processes import about, at_least, configs_of, parser_of
from privssl.errors import UserError
from privssl.experiment.config import load_config
from privssl.experiment.prepare import prepare
from privssl.runtime.process import tune_malloc


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 if a config cannot be measured."""
    parser = parser_of("rounds", __doc__)
    parser.add_argument("configs", nargs="+", help="config files, and overrides for all of them")
    parser.add_argument("--vary", default="run.workers=1,2", metavar="KEY=VALUE,VALUE")
    parser.add_argument("--rounds", type=at_least(1), default=6)
    parser.add_argument("--phase", default="")
    options = parser.parse_intermixed_args(arguments)
    configs, overrides = configs_of(parser, options.configs)
    key, _, values = options.vary.partition("=")
    varied = [f"{key}={value}" for value in values.split(",")]
    torch.set_num_threads(1)
    tune_malloc()
    print(f"{about()}\nOne thread for each process.\n")
    print("| config | " + " | ".join(f"{setting}, s" for setting in varied) + " | times |")
    print("|---" * (len(varied) + 2) + "|")
    for name in configs:
        measured = {setting: Measured() for setting in varied}
        try:
            for _ in range(PASSES):
                for setting in varied:
                    prepared = prepare(load_config(Path(name), [*overrides, setting]))
                    play(prepared, options.rounds, options.phase, measured[setting])
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        times = [statistics.median(measured[setting].seconds) for setting in varied]
        cells = [f"{seconds:.2f}" for seconds in times] + [f"{times[0] / times[-1]:.2f}"]
        print(f"| {Path(name).stem} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
