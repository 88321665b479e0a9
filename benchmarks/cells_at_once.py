"""Run many cells of published tables in parallel, on a GPU or on many cores.

    python -m benchmarks.cells_at_once TABLE... [--cells PATTERN] [--seeds 1] [--at-once 16]
        [--minutes 7] [--root CLONE]

Like ``privssl.reproduce``, but each cell is trained in a fork of this process, which shares its
imports and decoded images: these take 40 seconds of a slow core per CIFAR-10 cell, which a GPU
trains in 150. Prints a line for each finished cell.

The longest cells start first; cells that cannot end in time, by the finished ones, do not start.
After ``--minutes`` running cells write a checkpoint and stop; either command continues them. An
entry records the commit of the clone; without git, that of the variable ``PRIVSSL_COMMIT``, and not
whether the code has uncommitted changes.
"""

import functools
import os
import resource
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.processes import at_least, parser_of
from privssl.data import datasets, downloads
from privssl.errors import UserError
from privssl.experiment.prepare import prepare
from privssl.reproduce import runner as runners
from privssl.reproduce import schedule
from privssl.reproduce.runner import Ended, Runner
from privssl.reproduce.store import Store
from privssl.reproduce.tables import Cell, load_tables
from privssl.runs import launch  # noqa: F401  (imported once, for all forks)
from privssl.runtime.process import INTERRUPTED
from privssl.train import main as train

ROOT = Path(__file__).parents[1]


def train_here(arguments: Sequence[str], log: Path, _: int, __: float) -> Ended:
    """Run ``privssl.train`` in this process, a fork for this cell alone."""
    start = time.monotonic()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # A checkpoint of a wide network costs more than repeating a minute; the last one is written.
    argv = [argument for argument in arguments if not argument.startswith("run.checkpoint_every=")]
    status = train([*argv, "run.checkpoint_every=1000", "--quiet"])
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu, stopped = usage.ru_utime + usage.ru_stime, status == INTERRUPTED
    return Ended(status, stopped, time.monotonic() - start, cpu, usage.ru_maxrss / 1024)


def run_in_a_fork(cell: Cell, seed: int, root: Path, answer: int) -> int:
    """Start a cell; return the process. Its outcome is written to the file descriptor."""
    if pid := os.fork():
        return pid
    try:
        outcome = Runner(root, Store(root), train=train_here).run(cell, seed)
        text = outcome if isinstance(outcome, str) else f"{outcome['value']:.4f}"
    except BaseException as error:  # a fork must not return into its parent's loop
        traceback.print_exc()
        text = f"failed: {error}"
    os.write(answer, f"{text.splitlines()[0]}\n".encode())
    os._exit(0)


def run_all(todo: Sequence[tuple[Cell, int]], root: Path, at_once: int, minutes: float) -> int:
    """Run cells, the longest first, until none or no time is left.

    A cell does not start if it would take too long, by the finished ones. Returns the number of
    cells without a result.
    """
    deadline, failed, stopping = time.monotonic() + 60 * minutes, 0, False
    waiting = sorted(todo, key=lambda run: run[0].minutes, reverse=True)
    running: dict[int, tuple[Cell, int, int, float]] = {}
    pace = [0.0]  # seconds of finished cells, divided by the minutes of their tables
    while True:
        seconds = deadline - time.monotonic()
        limit = statistics.median(pace)
        fitting = [run for run in waiting if seconds > 0 and run[0].minutes * limit <= seconds]
        for cell, seed in fitting[: at_once - len(running)]:
            waiting.remove((cell, seed))
            reader, writer = os.pipe()
            running[run_in_a_fork(cell, seed, root, writer)] = cell, seed, reader, time.monotonic()
            os.close(writer)
        if not running:
            return failed + len(waiting)
        if seconds <= 0 and not stopping:
            stopping = True
            for pid in running:
                os.kill(pid, signal.SIGTERM)
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.1)
            continue
        cell, seed, reader, start = running.pop(pid)
        with os.fdopen(reader) as lines:
            outcome = lines.readline().strip() or "killed"
        duration = time.monotonic() - start
        if outcome.replace(".", "").isdecimal():
            pace = [*filter(None, pace), duration / cell.minutes]
        else:
            failed += 1
        print(f"{cell.table}: {cell.title}, seed {seed}: {outcome}, {duration:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if cells are left, 2 for a user error, 130 if interrupted."""
    parser = parser_of("cells_at_once", __doc__)
    parser.add_argument("tables", nargs="+", metavar="TABLE")
    parser.add_argument("--cells", metavar="PATTERN")
    parser.add_argument("--seeds", type=at_least(1), default=1)
    parser.add_argument("--at-once", type=at_least(1), default=16)
    parser.add_argument("--minutes", type=at_least(1), default=7)
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    # Counting GPUs must not start CUDA here: CUDA cannot be used in forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    torch.set_num_threads(1)
    origin = {"commit": os.environ.get("PRIVSSL_COMMIT"), "dirty": None}
    with ExitStack() as stack:
        cached = functools.cache(downloads.read_published)
        stack.enter_context(patch.object(datasets, "read_published", cached))
        if origin["commit"]:
            stack.enter_context(patch.object(runners, "commit_of", lambda root: origin))
        tables, store = load_tables(options.root, options.tables), Store(options.root)
        selected = schedule.select(tables, options.cells, options.seeds)
        order = schedule.in_order(selected, by_seed=False)
        todo = [
            (cell, seed) for cell, seed in order if store.state(cell, seed) in ("missing", "old")
        ]
        for cell in {cell.config: cell for cell, _ in todo}.values():
            prepare(cell.load(0))  # decodes images, once for all forks
        print(f"{len(todo)} runs, {options.at_once} at once", flush=True)
        left = run_all(todo, options.root, options.at_once, options.minutes)
    print(f"{left} left", flush=True)
    return int(left > 0)


def command() -> int:
    """Run :func:`main`, printing user errors as messages."""
    try:
        return main()
    except UserError as problem:
        print(problem, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # forks got the signal too, and write their checkpoints
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(command())
