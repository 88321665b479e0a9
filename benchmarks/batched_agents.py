"""Seconds of a round with sequential agents, and with many agents batched into one stream of
kernels.

    python -m benchmarks.batched_agents CONFIG... [--at-once 1,8,32] [--rounds 6] [--phase NAME]
        [--count] [section.key=value ...]

Runs the first rounds of each config on the device of ``run.device`` (auto: a GPU, if there is one),
without evaluation, pictures or files, three times with each number of batched agents. A time is the
median over rounds without each first one. ``times`` is the speed-up over the first number.
``apart`` is the largest difference of a weight from the classifier of the first number: rounding
errors, amplified by training (docs/batched_agents.md), and in a private run its noise.

With ``--count`` nothing is timed: rounds run on ``benchmarks.far_device``, which counts operations.
``kernels`` are operations of a round, ``copies`` tensors copied to the device, ``waits``
synchronisations. ``times`` is the ratio of kernels: launching them dominates the cost of small
networks on a GPU.

A round batches at most as many agents as take part in it: give ``agents.query=32`` (FedAvg under
noise: ``agents.support=32``) and, if agents are sampled, ``algorithm.query_per_round=32``. Other
load on the machine affects the numbers.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import far_device
from benchmarks.far_device import Asked
from benchmarks.processes import about, at_least, configs_of, numbers, parser_of
from privssl.core.federation import Federation
from privssl.errors import UserError
from privssl.experiment.config import load_config
from privssl.experiment.prepare import Prepared, prepare
from privssl.runs.accounts import open_accounts
from privssl.runs.engine_factory import make_engine
from privssl.runs.round_plan import planned_rounds
from privssl.training.evaluation import HiddenLabelMeter

PASSES = 3
TIMED = "s | CPU s | times | apart"


@dataclass
class Measured:
    """Times of rounds, and the final weights."""

    seconds: list[float] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)  # if counted
    cpu: list[float] = field(default_factory=list)  # of this process
    classifier: Mapping[str, Tensor] = field(default_factory=dict)


def prepared(
    path: Path, overrides: Sequence[str], at_once: int, device: torch.device | None
) -> Prepared:
    """Prepare a config with this number of batched agents, on its own device or another.

    Raises:
        UserError: the config does not permit it.
    """
    changes = [*overrides, "run.workers=1", f"run.batched_agents={at_once}"]
    result = prepare(load_config(path, changes))
    return result if device is None else replace(result, device=device)


def play(
    one: Prepared, rounds: int, phase: str, into: Measured, asked: Callable[[], Asked] | None = None
) -> None:
    """Add the first rounds (of a phase, if one is named), without the very first.

    A round ends with weights on the CPU, so no work of the GPU is pending then.

    Args:
        asked: returns the operations of the device since its previous call, if counted.

    Raises:
        UserError: there is no phase of that name; ``""`` names none.
    """
    algorithm, played = one.algorithm, 0
    names = [each.name for each in algorithm.phases()]
    if phase and phase not in names:
        raise UserError(
            f"{one.config.source}: there is no phase {phase}. Phases: {', '.join(names)}"
        )
    with (
        tempfile.TemporaryDirectory() as folder,
        open_accounts(one, Path(folder), None),
        closing(make_engine(one, HiddenLabelMeter(one.federated_data.true_labels))) as engine,
    ):
        federation = Federation(engine, one.config.run.seed)
        state = algorithm.start(federation)
        for planned in planned_rounds(algorithm.phases()):
            if played > rounds:
                break
            federation.begin(planned)
            if asked is not None:
                asked()
            start, cpu_start = time.perf_counter(), time.process_time()
            state = algorithm.round(state, federation)
            if planned.phase == (phase or planned.phase):
                played += 1
                if played > 1:
                    into.seconds.append(time.perf_counter() - start)
                    into.cpu.append(time.process_time() - cpu_start)
                    if asked is not None:
                        into.asked.append(asked())
    into.classifier = algorithm.classifier(state)


def lines(name: str, measured: Mapping[int, Measured]) -> list[str]:
    """Return rows of the table, one for each number of batched agents."""
    first = next(iter(measured.values()))
    table_rows = []
    for at_once, measurement in measured.items():
        seconds, cpu = statistics.median(measurement.seconds), statistics.median(measurement.cpu)
        times = statistics.median(first.seconds) / seconds
        difference = max(
            float((value.double() - first.classifier[key].double()).abs().max())
            for key, value in measurement.classifier.items()
        )
        table_rows.append(
            f"| {name} | {at_once} | {seconds:.3f} | {cpu:.3f} | {times:.2f} | {difference:.0e} |"
        )
    return table_rows


def counts(name: str, measured: Mapping[int, Measured]) -> list[str]:
    """Return rows of the other table: operations of a round on the device."""
    table_rows = []
    first = 0.0
    for at_once, measurement in measured.items():
        kernels, copies, waits = (
            statistics.median(float(getattr(asked, count)) for asked in measurement.asked)
            for count in ("kernels", "to", "waits")
        )
        first = first or kernels
        table_rows.append(
            f"| {name} | {at_once} | {kernels:,.0f} | {copies:,.0f} | {waits:,.0f} "
            f"| {first / kernels:.1f} |"
        )
    return table_rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a Markdown table; return 2 if a config cannot be measured."""
    parser = parser_of("batched_agents", __doc__)
    parser.add_argument("configs", nargs="+", help="config files, and overrides for all of them")
    parser.add_argument("--at-once", type=numbers, default=[1, 8, 32])
    parser.add_argument("--rounds", type=at_least(1), default=6)
    parser.add_argument("--phase", default="")
    parser.add_argument("--count", action="store_true", help="count operations instead of timing")
    options = parser.parse_intermixed_args(arguments)
    configs, overrides = configs_of(parser, options.configs)
    torch.set_num_threads(1)
    try:
        device = far_device.begin() if options.count else None
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    asked = far_device.asked if options.count else None
    for index, name in enumerate(configs):
        measured = {n: Measured() for n in options.at_once}
        try:
            for _ in range(1 if options.count else PASSES):
                for n in options.at_once:
                    run = prepared(Path(name), overrides, n, device)
                    play(run, options.rounds, options.phase, measured[n], asked)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        if not index:
            print(f"{_describe_machine(run.device)}\n")
            columns = "kernels | copies | waits | times" if options.count else TIMED
            print(f"| config | agents at once | {columns} |")
            print("|---" * (3 + columns.count("|")) + "|")
        table = counts if options.count else lines
        print("\n".join(table(Path(name).stem, measured)), flush=True)
    return 0


def _describe_machine(device: torch.device) -> str:
    gpu = f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" else ""
    return f"Device {device}: {gpu}{about()}\nOne thread."


if __name__ == "__main__":
    sys.exit(main())
