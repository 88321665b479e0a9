"""Costs by the number of agents: preparing a run, a round, memory, a checkpoint.

    python -m benchmarks.scale configs/semifl.yaml configs/fedmatch.yaml --agents 10,100,1000,10000

Each config runs with this number of query agents of ``--rows`` rows each, of which ``--sampled``
take part in a round. Rows are synthetic: ten noisy patterns of ``--side`` x ``--side`` pixels in a
file beside the run. Each run has its own process. Prints a Markdown table:

* prepare: seconds from the config to agents with their rows; begin: to the first checkpoint,
* round: seconds from one round's end to the next, and CPU seconds of the run's process (without its
  workers, ``--workers``); medians, without the first. Other load affects the former more than the
  latter,
* import, peak: MB of the process after its imports, and at most, without memory of worker processes
  alone. Linux (/proc),
* checkpoint: seconds and MB, after the last round.

In FedSEAL every agent predicts in every round, so rounds grow with the number of agents; in the
variant ``algorithm.history=sampled`` they do not.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import about, at_least, configs_of, numbers, parser_of

LABELLED, TESTED, CLASSES = 100, 200, 10
CHUNK = 10_000  # rows generated at once


# The rows ------------------------------------------------------------------------------------


def write_rows(path: Path, rows: int, side: int) -> None:
    """Write an NPZ file of ``rows`` training rows and a few test rows, from a fixed seed."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(40, 215, (CLASSES, side, side), dtype=np.int16)
    x = np.empty((rows + TESTED, side, side), dtype=np.uint8)
    y = np.arange(len(x)) % CLASSES
    for i in range(0, len(x), CHUNK):
        part = patterns[y[i : i + CHUNK]]
        x[i : i + CHUNK] = (part + rng.integers(-60, 60, part.shape, dtype=np.int16)).clip(0, 255)
    np.savez(path, x_train=x[:rows], y_train=y[:rows], x_test=x[rows:], y_test=y[rows:])


# One cell: a process of its own ----------------------------------------------------------------


def peak_megabytes() -> float:
    """Return the peak memory of this process since its program was loaded.

    ru_maxrss would include the parent process.
    """
    text = Path("/proc/self/status").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def measure(config: str, overrides: Sequence[str], folder: Path) -> dict[str, float]:
    """Measure one run in this process; see the module's docstring."""
    import torch
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401  (else a part of the run)

    from privssl.experiment.config import load_config
    from privssl.experiment.prepare import prepare
    from privssl.reporting.trackers import CsvTracker, TensorBoardTracker, Tracker
    from privssl.runs import engine_factory, round_loop
    from privssl.storage.spill_store import SpillStore
    from privssl.training.evaluation import HiddenLabelMeter

    torch.set_num_threads(1)
    results = {"import": peak_megabytes()}
    start = time.perf_counter()
    prepared = prepare(load_config(Path(config), overrides))
    results["prepare"] = time.perf_counter() - start
    clocks: list[tuple[float, float]] = []  # after each round

    class Clock(Tracker):
        def round(self, record: Any) -> None:
            clocks.append((time.perf_counter(), time.process_time()))

    with ExitStack() as stack:
        oracle = HiddenLabelMeter(prepared.federated_data.true_labels)
        limit = prepared.config.run.memories_mb * 2**20
        store = stack.enter_context(closing(SpillStore(folder, limit)))
        engine = stack.enter_context(closing(engine_factory.make_engine(prepared, oracle, store)))
        start = time.perf_counter()
        prepared.federated_data.manifest.write(folder / "split.json")
        csv, board = CsvTracker(folder / "metrics.csv"), TensorBoardTracker(folder)
        loop = round_loop.RoundLoop(prepared, folder, engine, oracle, [csv, board, Clock()], store)
        stack.callback(loop.close)
        loop.begin()
        results["begin"] = time.perf_counter() - start
        loop.run_rounds()
        start = time.perf_counter()
        loop.save()
        results["save"] = time.perf_counter() - start
    latest = sorted((folder / "checkpoints").glob("round_*"))[-1]
    results["bytes"] = sum(file.stat().st_size for file in latest.iterdir())
    wall, processor = np.median(np.diff(clocks, axis=0), axis=0).tolist()
    return results | {"round": wall, "processor": processor, "peak": peak_megabytes()}


# The table -------------------------------------------------------------------------------------


def cell(options: argparse.Namespace, config: str, overrides: list[str], agents: int) -> Any:
    """Run ``measure`` in a new process with this number of agents."""
    with tempfile.TemporaryDirectory() as folder:
        rows = agents * options.rows + LABELLED
        write_rows(Path(folder) / "rows.npz", rows, options.side)
        settings = [
            "data.name=npz", f"data.root={folder}/rows.npz", f"data.labelled={LABELLED}",
            f"agents.query={agents}", f"algorithm.query_per_round={options.sampled}",
            f"algorithm.rounds={options.rounds}", f"run.workers={options.workers}",
            "run.device=cpu", "run.checkpoint_every=100000", "run.images_every=100000",
            *overrides,
        ]  # fmt: skip
        out = Path(folder) / "run"
        out.mkdir()
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.scale", "--cell", str(out), config, *settings],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        return json.loads(process.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or the status of a cell that failed."""
    parser = parser_of("scale", __doc__)
    parser.add_argument("configs", nargs="+", help="config files, and overrides for all of them")
    parser.add_argument("--agents", type=numbers, default=[10, 100, 1000, 10000])
    parser.add_argument("--rows", type=at_least(1), default=50, help="rows of each agent")
    parser.add_argument("--side", type=at_least(1), default=8, help="side of an image in pixels")
    parser.add_argument("--sampled", type=at_least(1), default=10, help="agents per round")
    parser.add_argument("--rounds", type=at_least(2), default=12)
    parser.add_argument("--workers", type=at_least(1), default=1)
    parser.add_argument("--cell", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(arguments)
    configs, overrides = configs_of(parser, options.configs)
    if options.cell:
        from privssl.errors import UserError

        try:
            print(json.dumps(measure(configs[0], overrides, options.cell)))
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    print(
        f"{about()}\nOne thread for each process; {options.rows} rows of {options.side} x "
        f"{options.side} pixels each, {options.sampled} agents in a round, "
        f"{options.rounds} rounds, {options.workers} workers\n"
    )
    print(
        "| config | agents | prepare, s | begin, s | round, s | of the processor, s "
        "| import, MB | peak, MB | checkpoint, s | checkpoint, MB |"
    )
    print("|---" * 10 + "|")
    for config in configs:
        for agents in options.agents:
            try:
                m = cell(options, config, overrides, agents)
            except subprocess.CalledProcessError as error:
                return error.returncode
            print(
                f"| {Path(config).stem} | {agents:,} | {m['prepare']:.2f} | {m['begin']:.2f} "
                f"| {m['round']:.3f} | {m['processor']:.3f} | {m['import']:.0f} | {m['peak']:.0f} "
                f"| {m['save']:.2f} | {m['bytes'] / 1e6:.1f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
