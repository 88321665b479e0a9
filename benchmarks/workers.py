"""Seconds of a round with one worker process, two, and so on: what the cores are worth.

    python -m benchmarks.workers CONFIG... [--workers 1,2] [--rounds 6] [section.key=value ...]

Plays the first rounds of each config, of the phase named by --phase where it has several, without
evaluation, pictures or files, once for each number of workers in turn and three times over; a
number's time is the median of its rounds. Prints a Markdown table with the ratio to the first
number. Other work on the machine shows in it: leave the machine alone.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from privssl.config import load
from privssl.errors import UserError
from privssl.evaluate import Oracle
from privssl.prepare import prepare
from privssl.process import keep_freed_memory
from privssl.run import planned_rounds
from privssl.run_engine import make_engine
from privssl.world import World

PASSES = 3


def seconds_of_rounds(
    path: Path, overrides: Sequence[str], workers: int, rounds: int, phase: str
) -> list[float]:
    """Of each of the first rounds (of a phase, if one is named), but for the very first."""
    prepared = prepare(load(path, [*overrides, f"run.workers={workers}"]))
    if prepared.plan is not None:
        raise UserError(f"{path}: agents with a privacy account work in one process. Leave it out")
    algorithm = prepared.algorithm
    found: list[float] = []
    with closing(make_engine(prepared, Oracle(prepared.federation.true_labels))) as engine:
        world = World(engine, prepared.config.run.seed)
        state = algorithm.start(world)
        for now in planned_rounds(algorithm.phases()):
            if len(found) > rounds:
                break
            world.begin(now)
            begun = time.perf_counter()
            state = algorithm.round(state, world)
            if now.phase == (phase or now.phase):
                found.append(time.perf_counter() - begun)
    return found[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0, or 2 where a config cannot be measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.workers", description=__doc__)
    parser.add_argument("configs", nargs="+", help="files, and overrides of all of them")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--phase", default="")
    options = parser.parse_intermixed_args(arguments)
    overrides = [text for text in options.configs if "=" in text]
    numbers = [int(n) for n in options.workers.split(",")]
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}\n")
    print("| config | " + " | ".join(f"{n}, s" for n in numbers) + " | times |")
    print("|---" * (len(numbers) + 2) + "|")
    for name in (text for text in options.configs if "=" not in text):
        seen: dict[int, list[float]] = {n: [] for n in numbers}
        try:
            for _ in range(PASSES):
                for n in numbers:
                    seen[n] += seconds_of_rounds(
                        Path(name), overrides, n, options.rounds, options.phase
                    )
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        times = [statistics.median(seen[n]) for n in numbers]
        cells = [f"{t:.2f}" for t in times] + [f"{times[0] / times[-1]:.2f}"]
        print(f"| {Path(name).stem} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
