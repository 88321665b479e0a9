"""Seconds per round and peak memory of each method, on its own config.

    python -m benchmarks.methods [--data digits|mnist] [--workers 1,2] [--rounds 4] [--only NAME]

FedSSL, FedSEAL, SemiFL, FedMatch, FedTriNet and the label census, from configs/*.yaml; ``--data
mnist`` changes ``data.name`` and nothing else (13 to 37 times the rows, of 28x28 pixels for 8x8).
A method is played in a process of its own, as its run would be, without evaluation and files, but
with what its plan says of privacy: accounts are opened in a temporary folder. Phases are shortened
to a first round, which is not timed, and ``--rounds`` that are; each phase is a line of the table.
FedSSL has no warm-up here and its gate is open, so that every round has all of its work; schedules
that grow with rounds (FedTriNet's) are at their beginning.

``s`` is the median of a phase's rounds. ``CPU s`` is what its rounds took of all processes, in the
mean. ``memory`` is the peak of the whole program, rows and torch itself included: the sum over its
processes, with pages that several share counted once (PSS), looked at every quarter of a second.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path

import torch

from benchmarks.processes import Told, about, carry_out, numbers, tell
from privssl.core.federation import Federation
from privssl.errors import UserError
from privssl.experiment.config import load_config
from privssl.experiment.prepare import prepare
from privssl.runs import accounts
from privssl.runs.engine_factory import make_engine
from privssl.runs.round_plan import planned_rounds
from privssl.runtime.process import tune_malloc
from privssl.training.evaluation import HiddenLabelMeter

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
#: What shortens each method to phases of {n} rounds.
METHODS: dict[str, tuple[str, ...]] = {
    "fedssl": ("algorithm.rounds={n}", "algorithm.warm_up=0", "algorithm.gate=0"),
    "fedseal": ("algorithm.rounds={n}",),
    "semifl": ("algorithm.rounds={n}",),
    "fedmatch": ("algorithm.rounds={n}",),
    "fedtrinet": ("algorithm.rounds={2n}", "algorithm.warm_up={n}"),
    "label_census": (
        "algorithm.cluster_rounds={n}",
        "algorithm.vote_rounds={n}", "algorithm.self_training_rounds={n}",
    ),
}  # fmt: skip
LIMIT = 1800.0  # seconds that a method may take


def overrides(method: str, data: str, workers: int, rounds: int) -> list[str]:
    """What changes the method's config."""
    counts = {"{n}": str(rounds + 1), "{2n}": str(2 * rounds + 2)}
    shorter = []
    for text in METHODS[method]:
        for sign, count in counts.items():
            text = text.replace(sign, count)
        shorter.append(text)
    return [*shorter, f"data.name={data}", f"run.workers={workers}"]


def play(config: Path, changes: Sequence[str]) -> None:
    """A run's rounds, telling of each when it is over."""
    torch.set_num_threads(1)
    tune_malloc()
    prepared = prepare(load_config(config, list(changes)))
    with (
        tempfile.TemporaryDirectory() as folder,
        accounts.open_accounts(prepared, Path(folder), None),
        closing(
            make_engine(prepared, HiddenLabelMeter(prepared.federated_data.true_labels))
        ) as engine,
    ):
        federation = Federation(engine, prepared.config.run.seed)
        state = prepared.algorithm.start(federation)
        tell(phase="start")
        for now in planned_rounds(prepared.algorithm.phases()):
            federation.begin(now)
            state = prepared.algorithm.round(state, federation)
            tell(phase=now.phase)
        prepared.algorithm.finish(state, federation)


def lines(method: str, workers: int, told: Told) -> list[str]:
    """Rows of the table: one for each phase."""
    found = []
    ends = [line["at"] for line in told.lines]
    phases = [line["phase"] for line in told.lines]
    for phase, group in groupby(range(1, len(ends)), key=phases.__getitem__):
        places = list(group)[1:]
        if not places:  # a phase of one round
            continue
        seconds = statistics.median(ends[n] - ends[n - 1] for n in places)
        cpu = told.cpu_between(ends[places[0] - 1], ends[places[-1]]) / len(places)
        found.append(
            f"| {method} | {phase} | {workers} | {seconds:.3f} | {cpu:.3f} | {told.peak_pss:.0f} |"
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a Markdown table; 1 where a method could not be measured."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.methods", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--data", default="digits", choices=("digits", "mnist", "fashion_mnist"))
    parser.add_argument("--workers", type=numbers, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=4, help="timed ones of a phase, >= 2")
    parser.add_argument("--only", nargs="+", choices=tuple(METHODS), default=tuple(METHODS))
    parser.add_argument("--play", nargs="+", help=argparse.SUPPRESS)  # the process of a method
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more: a label census has three cluster rounds or more")
    if options.play:
        try:
            play(Path(options.play[0]), options.play[1:])
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    print(f"{about()}\n{options.data}; one thread for each process.\n")
    print("| method | phase | workers | s | CPU s | memory, MB |\n|---|---|---|---|---|---|")
    failed = False
    for method in options.only:
        for workers in options.workers:
            changes = overrides(method, options.data, workers, options.rounds)
            command = [sys.executable, "-m", "benchmarks.methods", "--play"]
            command += [str(CONFIGS / f"{method}.yaml"), *changes]
            environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CONFIGS.parent)}
            told = carry_out([command], [environment], limit=LIMIT)
            if told.status:
                print(f"{method}: {told.errors.strip()[-600:]}", file=sys.stderr)
                failed = True
                continue
            print("\n".join(lines(method, workers, told)), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
