"""Memory of a run over sites, by round.

    python -m benchmarks.sites_memory [--rounds 50] [--sites 5]

A SuperLink and the sites, each with its SuperNode, are processes on loopback, and the training
command runs over them: FedAvg on digits, no privacy, one parallel step per round, so that requests
dominate a round. After each round (a line of metrics.csv) it measures the PSS of the coordinator,
the SuperLink, Flower's server process (which delivers the coordinator's requests), and the first
site and its SuperNode. PSS counts a page shared by several processes in part for each of them.

The first ``--warm-up`` rounds are not counted: caches fill and the first checkpoint is written. The
table has the first, lowest, highest and last value of the others, and the range. Linux (/proc);
needs Flower; about ten seconds per round.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks.processes import about, parser_of, pss
from privssl.errors import UserError
from privssl.site import demo

CONFIG = """
data: {{name: digits, labelled: 100}}
agents: {{support: {sites}, query: 0}}
model: {{name: small_cnn}}
algorithm: {{name: fedavg, rounds: {rounds}, local_epochs: 1, batch_size: 32, learning_rate: 0.02}}
"""
#: The measured processes, by a word of their command line.
WEIGHED = {
    "coordinator": "privssl.train",
    "SuperLink": "flower-superlink",
    "server process": "flwr-serverapp",
    "a site": "privssl.site",
    "its SuperNode": "flower-supernode",
}
EVERY = 0.2  # seconds between two reads of metrics.csv
LIMIT = 120.0  # seconds that a round may take

Weights = Mapping[str, float]  # MB, by the names of WEIGHED


def measure(folder: Path, rounds: int, sites: int) -> Iterator[Weights]:
    """Yield the memory of each process after each round."""
    config = folder / "config.yaml"
    # One round more, so that all processes still run after the last measured round.
    config.write_text(CONFIG.format(rounds=rounds + 1, sites=sites))
    with ExitStack() as stack:
        names = demo.write_sites(folder / "sites", config, [])
        address = stack.enter_context(demo.superlink(folder / "sites" / "superlink"))
        folders = {name: folder / "sites" / name for name in names}
        started = {name: stack.enter_context(demo.site(folders[name], address)) for name in names}
        for name, process in started.items():
            demo.wait_until((folders[name] / "door").exists, process, folders[name] / "out")
        run = demo.train(folder / "sites", address, "--quiet")
        stack.callback(run.kill)
        for number in range(1, rounds + 1):
            _wait_for_round(number, folder / "sites" / "run" / "metrics.csv", run)
            yield _measure_processes(folder)
        if run.wait(LIMIT):
            raise UserError(f"the run ended with status {run.returncode}")


def _wait_for_round(number: int, metrics: Path, run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT
    while not metrics.exists() or len(metrics.read_text().splitlines()) <= number:
        if run.poll() is not None or time.monotonic() > deadline:
            raise UserError(f"round {number} did not end within {LIMIT:g} s")
        time.sleep(EVERY)


def _measure_processes(folder: Path) -> Weights:
    """Measure the first started process of each kind: it represents the others."""
    lines = dict(_find_processes(folder))
    kinds = {
        kind: next((process for process in sorted(lines) if name in lines[process]), None)
        for kind, name in WEIGHED.items()
    }
    if missing := [kind for kind, process in kinds.items() if process is None]:
        raise UserError(f"There is no process of the {', '.join(missing)} any more")
    return {kind: pss(process) for kind, process in kinds.items() if process is not None}


def _find_processes(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield processes, with their command lines, that have this folder in them or in FLWR_HOME."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                if bytes(folder) in line + (entry / "environ").read_bytes():
                    yield int(entry.name), line.decode()


# The table -------------------------------------------------------------------------------------


def table(weights: Sequence[Weights], warm_up: int) -> str:
    """Format the values after the warm-up, a line for each process."""
    lines = [
        f"| PSS, MB | round {warm_up + 1} | lowest | highest | round {len(weights)} | span |",
        "|---" * 6 + "|",
    ]
    for kind in weights[0]:
        values = [weight[kind] for weight in weights[warm_up:]]
        low, high = min(values), max(values)
        cells = " | ".join(f"{value:.1f}" for value in (values[0], low, high, values[-1]))
        lines.append(f"| {kind} | {cells} | {high / low - 1:.1%} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 2 if a process did not start or ended early."""
    parser = parser_of("sites_memory", __doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument(
        "--warm-up", type=int, default=5, help="first rounds, which are not counted"
    )
    options = parser.parse_args(arguments)
    if not 0 <= options.warm_up < options.rounds:
        parser.error("--warm-up must be less than --rounds")
    print(f"{about()} {options.sites} sites, {options.rounds} rounds\n", flush=True)
    start, weights = time.monotonic(), list[Weights]()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for weight in measure(Path(folder), options.rounds, options.sites):
                weights.append(weight)
                text = ", ".join(f"{kind} {value:.1f}" for kind, value in weight.items())
                print(f"round {len(weights)}: {text}", file=sys.stderr, flush=True)
    except UserError as problem:
        print(str(problem), file=sys.stderr)
        return problem.exit_status
    print(table(weights, options.warm_up))
    print(f"\n{time.monotonic() - start:.0f} seconds, start and end included")
    return 0


if __name__ == "__main__":
    sys.exit(main())
