"""Seconds of a round under one setting and under another: with one worker process and with two,
or in float32 and in bfloat16.

    python -m benchmarks.rounds CONFIG... [--vary run.workers=1,2] [--rounds 6] [KEY=VALUE ...]

Plays the first rounds of each config, of the phase named by --phase where it has several, without
evaluation, pictures or files, under each value in turn and three times over; a value's time is the
median of its rounds. Prints a Markdown table with the ratio of the first to the last. For precision
give run.workers=1 as well: two processes on two cores also tell how free the cores were. Other work
on the machine shows in it: leave the machine alone.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import about, at_least, configs_of
from privssl.algorithms.base import Algorithm
from privssl.core.federation import Federation
from privssl.errors import UserError
from privssl.experiment.config import load_config
from privssl.experiment.prepare import prepare
from privssl.runs.engine_factory import make_engine
from privssl.runs.round_plan import planned_rounds
from privssl.runtime.process import tune_malloc
from privssl.training.evaluation import HiddenLabelMeter

PASSES = 3


def of_rounds(
    path: Path, overrides: Sequence[str], rounds: int, phase: str, clock: Callable[[], Any]
) -> list[Any]:
    """What a clock says that each of the first rounds took (of a phase, if one is named), but for
    the very first."""
    prepared = prepare(load_config(path, overrides))
    if prepared.plan is not None:
        raise UserError(
            f"{path}: private rounds are timed by benchmarks.batched_agents. "
            "Give a config without privacy"
        )
    algorithm = prepared.algorithm
    check_phase(path, algorithm, phase)
    found: list[Any] = []
    with closing(
        make_engine(prepared, HiddenLabelMeter(prepared.federated_data.true_labels))
    ) as engine:
        federation = Federation(engine, prepared.config.run.seed)
        state = algorithm.start(federation)
        for now in planned_rounds(algorithm.phases()):
            if len(found) > rounds:
                break
            federation.begin(now)
            begun = clock()
            state = algorithm.round(state, federation)
            if now.phase == (phase or now.phase):
                found.append(clock() - begun)
    return found[1:]


def check_phase(path: Path, algorithm: Algorithm[Any], phase: str) -> None:
    """Raises UserError where a config has no phase of that name. None is named by ``""``."""
    names = [one.name for one in algorithm.phases()]
    if phase and phase not in names:
        raise UserError(f"{path}: there is no phase {phase}. Phases: {', '.join(names)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0, or 2 where a config cannot be measured."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.rounds", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("configs", nargs="+", help="files, and overrides of all of them")
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
    print("| config | " + " | ".join(f"{one}, s" for one in varied) + " | times |")
    print("|---" * (len(varied) + 2) + "|")
    for name in configs:
        seen: dict[str, list[float]] = {one: [] for one in varied}
        try:
            for _ in range(PASSES):
                for one in varied:
                    seen[one] += of_rounds(
                        Path(name), [*overrides, one], options.rounds, options.phase,
                        time.perf_counter,
                    )  # fmt: skip
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        times = [statistics.median(seen[one]) for one in varied]
        cells = [f"{t:.2f}" for t in times] + [f"{times[0] / times[-1]:.2f}"]
        print(f"| {Path(name).stem} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
