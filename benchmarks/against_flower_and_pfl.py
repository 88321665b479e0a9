"""privssl against pfl-research, Flower's simulation and a plain loop, on pfl's CIFAR-10 cell.

    python -m benchmarks.against_flower_and_pfl [--pfl-python PATH] [--flower-python PATH]
                                                [--rounds 5] [--passes 3] [--beside 0]
                                                [--only NAME ...]

The two frameworks need an environment (one for both will do; the torch of ours, so that all
compute alike):

    python3 -m venv OTHER && OTHER/bin/pip install 'flwr[simulation]' pfl torch==VERSION torchvision

``benchmarks/cell/work.py`` defines the work; the file that the table names does it with one
framework and documents its settings. A framework that cannot be imported is skipped with a message.

A repeat is a new process: one warm-up round, then ``--rounds`` timed ones. Passes alternate between
all frameworks, so that other load on the machine affects all. ``rounds/s`` is the reciprocal of the
median timed round. ``begins`` is the time from the launch of the process to its first round
(imports, rows, splitting, starting other processes); ``start`` also includes the first round less a
median round. Flower starts its processes within its first round, so both of its columns show
``start``. ``CPU`` is the CPU time of a round over all processes, daemons included. Other load
changes it less than rounds/s, but measure both on an idle machine. ``memory`` is the largest sum
over all processes that a repeat started, pages shared by several counted once (PSS). ``loss`` and
``accuracy`` are on 1,000 test rows after all rounds: all frameworks start from the same weights,
sample agents by their own sampler, and should agree closely. Each uses ``--cores`` (2) cores:
processes of one thread each, except the plain loop, which uses PyTorch's default threads. With
``--beside N`` they share the cores with N busy processes.
"""

import argparse
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cell import work as cell
from benchmarks.processes import (
    Told,
    about,
    at_least,
    beside_option,
    carry_out,
    other_work,
    parser_of,
)
from privssl.ops.precision import has_instructions

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 60.0  # seconds for start and one round, before a repeat is aborted


@dataclass
class Competitor:
    """One line of the table, and the results of its repeats."""

    name: str
    module: str
    python: Path
    precision: str
    told: list[Told] = field(default_factory=list)

    def repeat(self, rows: Path, rounds: int, cores: int) -> str | None:
        """Run it once; return the reason if it failed."""
        command = [str(self.python), "-m", f"benchmarks.cell.{self.module}", str(rows)]
        command += [str(rounds + 1), self.precision, str(cores)]
        with tempfile.TemporaryDirectory() as folder:
            count = cores if self.module == "with_pfl" else 1
            environments = [self._build_environment(folder, n, cores) for n in range(count)]
            for name in ("PFL_WORKER_ADDRESSES",) if count > 1 else ():
                addresses = ",".join(f"localhost:{port}" for port in _find_free_ports(count))
                environments = [{**e, name: addresses} for e in environments]
            result = carry_out([command] * count, environments, limit=LIMIT * (rounds + 2))
        finished = sum("round" in line and line["round"] > 0 for line in result.lines)
        if result.status or finished != rounds + 1 or "loss" not in result.lines[-1]:
            return f"{self.name}: status {result.status}, {result.errors.strip()[-800:]}"
        self.told.append(result)
        return None

    def _build_environment(self, folder: str, number: int, cores: int) -> dict[str, str]:
        common = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
        if self.module == "plain":
            return {**common, "OMP_NUM_THREADS": str(cores), "OMP_WAIT_POLICY": ""}
        if self.module == "with_pfl":
            return {**common, "OMP_NUM_THREADS": "1", "PFL_WORKER_RANK": str(number)}
        if self.module == "with_flower":
            return {
                **common, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0",
                "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder, "FLWR_HOME": folder,
            }  # fmt: skip
        return {**common, "OMP_NUM_THREADS": "1"}

    def numbers(self) -> "Numbers":
        """Return the numbers of its table line."""
        seconds, begins, starts, cpu = [], [], [], []
        for result in self.told:
            ends = [line["at"] for line in result.lines if line.get("round")]
            rounds = [after - before for before, after in itertools.pairwise(ends)]
            seconds += rounds
            cpu.append(result.cpu_between(ends[0], ends[-1]) / len(rounds))
            starts.append(ends[0] - result.begun - statistics.median(rounds))
            first_begin = [
                line["at"] - result.begun for line in result.lines if line.get("round") == 0
            ]
            begins.append(first_begin[0] if first_begin else starts[-1])
        last = [result.lines[-1] for result in self.told]
        return Numbers(
            1 / statistics.median(seconds),
            (1 / max(seconds), 1 / min(seconds)),
            statistics.median(cpu),
            statistics.median(begins),
            statistics.median(starts),
            max(result.peak_pss for result in self.told),
            statistics.median(line["loss"] for line in last),
            statistics.median(line["accuracy"] for line in last),
        )


@dataclass(frozen=True)
class Numbers:
    """The numbers of a table line."""

    rate: float  # rounds per second
    rates: tuple[float, float]  # of the slowest and the fastest round
    cpu: float  # seconds of a round
    begins: float  # seconds
    start: float  # seconds
    memory: float  # MB
    loss: float
    accuracy: float


def _find_free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("localhost", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def _read_versions(python: Path, *names: str) -> str | None:
    """Return versions of packages in an environment; None if one of them cannot be imported."""
    modules = ", ".join(names)
    code = (
        f"import {modules}\nfrom importlib.metadata import version\n"
        f"print(', '.join(f'{{n}} {{version(n)}}' for n in {list(names)!r}))"
    )
    quiet = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        process = subprocess.run(
            [str(python), "-c", code], capture_output=True, text=True, env=quiet, check=False
        )
    except OSError:
        return None
    return process.stdout.strip().splitlines()[-1] if process.returncode == 0 else None


def competitors(options: argparse.Namespace) -> list[Competitor]:
    """Return the frameworks that can run; print the others to standard error."""
    own_python = Path(sys.executable)
    entries = [
        Competitor(f"privssl, {p}", "ours", own_python, p) for p in ("float32", "bfloat16")
    ] + [Competitor("plain loop, float32, defaults", "plain", own_python, "float32")]
    for name, module, python, packages in (
        ("pfl-research", "with_pfl", options.pfl_python, ("pfl", "torch")),
        ("Flower simulation", "with_flower", options.flower_python, ("flwr", "ray", "torch")),
    ):
        versions = None if python is None else _read_versions(python, *packages)
        if versions is None:
            flag = f"--{module.removeprefix('with_')}-python"
            print(f"{name} is left out: {flag} {python or 'was not given'}", file=sys.stderr)
            continue
        print(f"{name}: {versions}")
        entries += [Competitor(f"{name}, {p}", module, python, p) for p in ("float32", "bfloat16")]
    return [c for c in entries if not options.only or any(word in c.name for word in options.only)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a Markdown table; return 1 if a framework failed."""
    parser = parser_of("against_flower_and_pfl", __doc__)
    parser.add_argument("--pfl-python", type=Path, metavar="PATH")
    parser.add_argument("--flower-python", type=Path, metavar="PATH")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="timed rounds of a repeat")
    parser.add_argument("--passes", type=at_least(1), default=3)
    parser.add_argument("--cores", type=at_least(1), default=2)
    beside_option(parser)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of framework names")
    options = parser.parse_args(arguments)
    print(about())
    entries = competitors(options)
    if not entries:
        parser.error(f"--only {' '.join(options.only)} matches no framework")
    if not has_instructions() and any(entry.precision == "bfloat16" for entry in entries):
        print("This processor has no instructions for bfloat16: it is emulated.")
    errors = []
    with tempfile.TemporaryDirectory() as folder, other_work(options.beside):
        cell.make_rows(Path(folder))
        for number in range(options.passes):
            for entry in entries:
                errors.append(entry.repeat(Path(folder), options.rounds, options.cores))
                print(f"pass {number + 1}: {entry.name}", file=sys.stderr)
    for error in filter(None, errors):
        print(error, file=sys.stderr)
    report({entry.name: entry.numbers() for entry in entries if entry.told}, entries, options)
    return 1 if any(errors) else 0


def report(
    numbers: Mapping[str, Numbers], competitors: Sequence[Competitor], options: argparse.Namespace
) -> None:
    """Print the table, and the ratios that are this project's targets."""
    files = {own.name: f"cell/{own.module}.py" for own in competitors}
    print(
        f"\n{cell.AGENTS:,} agents of {cell.ROWS_EACH} rows, {cell.PER_ROUND} in a round, batches "
        f"of {cell.BATCH}, one epoch. {options.cores} cores, {options.beside} processes of other "
        f"work beside, {options.passes} passes of {options.rounds} timed rounds.\n\n"
        "| competitor | rounds/s (slowest, fastest) "
        "| CPU s per round | begins, s | start, s | memory, MB | loss | accuracy | file |\n"
        + "|---" * 9
        + "|"
    )
    for name, n in numbers.items():
        low, high = n.rates
        print(
            f"| {name} | {n.rate:.3f} ({low:.3f}, {high:.3f}) | {n.cpu:.2f} | {n.begins:.1f} "
            f"| {n.start:.1f} | {n.memory:.0f} | {n.loss:.3f} | {n.accuracy:.3f} | {files[name]} |"
        )
    print("\n| ratio of rounds/s | times | at least | of CPU, for information |\n|---|---|---|---|")
    for own_name, other_name, target in (
        ("privssl, bfloat16", "pfl-research, bfloat16", "1.25"),
        ("privssl, float32", "pfl-research, float32", "1"),
        ("privssl, bfloat16", "Flower simulation, bfloat16", "2.5"),
        ("privssl, float32", "Flower simulation, float32", "2.5"),
        ("privssl, bfloat16", "plain loop, float32, defaults", "2.3"),
        ("privssl, float32", "plain loop, float32, defaults", "2.3"),
    ):
        if own_name in numbers and other_name in numbers:
            own, other = numbers[own_name], numbers[other_name]
            ratios = f"{own.rate / other.rate:.2f} | {target} | {other.cpu / own.cpu:.2f}"
            print(f"| {own_name} / {other_name} | {ratios} |")


if __name__ == "__main__":
    sys.exit(main())
