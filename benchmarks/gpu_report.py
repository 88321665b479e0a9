"""Measure privssl on a GPU in eight minutes and write results/gpu/NAME.json.

    python -m benchmarks.gpu_report [--device cuda] [--minutes 8] [--only SECTION ...] [--small]

``make gpu-report`` runs it with the active Python. It installs and downloads nothing, because the
machine may have no network. Sections, in this order:

``networks``: each network on the device against the CPU: milliseconds of a step without privacy and
of a private one, and the relative difference of private steps without noise. ``row_bits``: whether
the bits of a row's clipped gradient are independent of the other rows, which private training on
the device needs (``privssl/privacy/row_bits.py``). ``batched_agents``: seconds of a round with
sequential agents, and 8, 32, 100 batched. ``cell``: rounds a second of pfl-research's CIFAR-10 cell
(``benchmarks/cell/work.py``). ``semifl``: a round of SemiFL in bfloat16 at the size of its CIFAR-10
runs (synthetic rows).

A failed section is recorded with its error; sections without time are listed under ``left_out``.
``--small`` makes each section tiny, to test the program on a CPU.
"""

import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks import batched_agents
from benchmarks.cell import ours as cell
from benchmarks.cell import work
from benchmarks.private_step import (
    APART,
    COLOUR,
    PRIVATE,
    Case,
    cases,
    coloured_case,
    moved,
    open_step,
    our_step,
)
from benchmarks.processes import about, at_least, parser_of
from privssl.errors import PrivacyError
from privssl.models import build_classifier
from privssl.privacy.per_example_gradients import Parameters
from privssl.privacy.row_bits import refuse_batch_dependent_rounding
from privssl.settings.schema import ModelSettings
from privssl.training.batched.deferred import FunctionalModule

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
STACKS = (1, 8, 32, 100)  # batched agents
#: Settings of each method's first rounds: FedSSL's query agents wait for the end of the warm-up.
METHODS = {"fedssl": {"algorithm.warm_up": 1}, "pseudo": {"algorithm.warm_up": 1}}
#: Each agent takes part in each round.
EVERY_AGENT = {"agents.query": 100, "algorithm.query_per_round": 100}
#: SemiFL, section 4: 100 agents of which 10 take part, 4,000 labels, WRN-28-2, 5 epochs. All rows
#: exceed threshold 0: a round has its largest cost.
SEMIFL = {
    "algorithm.threshold": 0,
    "data.name": "npz", "data.labelled": 4000, "agents.query": 100, "algorithm.query_per_round": 10,
    "algorithm.epochs": 5, "algorithm.server_epochs": 5, "algorithm.batch_size": 10,
    "algorithm.server_batch_size": 250, "model.name": "wresnet28x2", "model.norm": "static",
    "algorithm.weak": "crop", "algorithm.strong": "fixmatch",
}  # fmt: skip
#: For --small.
FEW = {"agents.query": 2, "algorithm.query_per_round": 1}
SMALL_SEMIFL = FEW | {
    "data.labelled": 100, "algorithm.epochs": 1, "algorithm.server_epochs": 1, "model.width": 2,
    "algorithm.server_batch_size": 50,
}  # fmt: skip


def networks(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Measure milliseconds of steps on the CPU and on the device, and their relative difference."""
    rows, passes = (4, 1) if small else (64, 3)
    records = []
    every_case = cases(rows) | {
        name: coloured_case(rows, ModelSettings(name, 4 if small else 16))
        for name in (PRIVATE[:1] if small else PRIVATE)
    }
    for name, case in every_case.items():
        on_device = _move_case(case, device)
        open_steps = {"cpu": open_step(case), "device": open_step(on_device)}
        private_steps = {"cpu": our_step(case), "device": our_step(on_device)}
        change, device_change = (
            moved(case, partial(our_step, sigma=0.0)),
            moved(on_device, partial(our_step, sigma=0.0)),
        )
        difference = float((device_change.cpu() - change).norm() / change.norm())
        records.append(
            {
                "network": name,
                "rows": rows,
                "plain_ms": {
                    k: _measure_milliseconds(step, device, passes) for k, step in open_steps.items()
                },
                "private_ms": {
                    k: _measure_milliseconds(step, device, passes)
                    for k, step in private_steps.items()
                },
                "apart": difference,
                "alike": difference <= APART,
            }
        )
    return records


def _move_case(case: Case, device: torch.device) -> Case:
    inputs = tuple(tensor.to(device) for tensor in case.inputs)
    new, criterion = case.new, case.criterion
    return replace(
        case, new=lambda: new().to(device), criterion=lambda: criterion().to(device),
        inputs=inputs, target=case.target.to(device),
    )  # fmt: skip


def _measure_milliseconds(step: Callable[[], None], device: torch.device, passes: int) -> float:
    times = []
    for _ in range(passes + 1):
        _synchronize(device)
        start = time.perf_counter()
        step()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def row_bits(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Run the check before a private run on the device; report success or its message."""
    records = []
    for name in PRIVATE[:1] if small else PRIVATE:
        for size in (32,) if small else (32, 64):
            network = build_classifier(ModelSettings(name, 4 if small else 16), COLOUR, 10)
            network.to(device)
            fields = {
                "x": torch.randn(size, 1, *COLOUR, device=device),
                "y": torch.randint(10, (size, 1), device=device),
            }

            def row_loss(parameters: Parameters, row: Any, network: Any = network) -> torch.Tensor:
                logits = FunctionalModule(network, parameters["F"])(row["x"])
                return cross_entropy(logits, row["y"])

            refused = ""
            try:
                refuse_batch_dependent_rounding({"F": network}, row_loss, fields)
            except PrivacyError as error:
                refused = str(error)
            records.append({"network": name, "rows": size, "refused": refused})
    return records


def stacks(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Measure seconds of a round by the number of batched agents."""
    records = []
    for name, settings in METHODS.items():
        changes = EVERY_AGENT | settings | {"run.device": device.type} | (FEW if small else {})
        for at_once in (1, 2) if small else STACKS:
            measured = _measure_rounds(name, changes, 1 if small else 2, at_once)
            records.append(
                {
                    "method": name,
                    "agents_at_once": at_once,
                    "round_s": statistics.median(measured.seconds),
                    "cpu_s": statistics.median(measured.cpu),
                }
            )
    return records


def cell_rounds(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Measure rounds per second of pfl-research's CIFAR-10 benchmark."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        work.make_rows(Path(folder))
        for precision in ("float32",) if small else ("float32", "bfloat16"):
            times: list[float] = []

            def add_time(_: int, times: list[float] = times) -> None:
                times.append(time.perf_counter())

            cell.play(Path(folder), 2 if small else 6, precision, 1, device, add_time)
            # A round waits for the device, because weights come back to the CPU.
            gaps = [end - start for start, end in itertools.pairwise(times[1:])]
            records.append({"precision": precision, "rounds_per_s": 1 / statistics.median(gaps)})
    return records


def semifl(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Measure a round of SemiFL with CIFAR-10's sizes."""
    rng = np.random.default_rng(0)
    train, test = (600, 100) if small else (50_000, 1_000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npz"
        labels = [np.arange(count) % 10 for count in (train, test)]
        rows = [rng.integers(0, 256, (len(y), *COLOUR), dtype=np.uint8) for y in labels]
        np.savez(path, x_train=rows[0], y_train=labels[0], x_test=rows[1], y_test=labels[1])
        changes = SEMIFL | {"data.root": path, "run.device": device.type}
        changes |= SMALL_SEMIFL if small else {}
        measured = _measure_rounds("semifl", changes | {"run.precision": "bfloat16"}, 1)
    return [{"precision": "bfloat16", "round_s": measured.seconds[0]}]


def _measure_rounds(
    name: str, changes: Mapping[str, Any], rounds: int, at_once: int = 1
) -> batched_agents.Measured:
    config = RESULTS.parents[1] / "configs" / f"{name}.yaml"
    texts = [f"{key}={value}" for key, value in changes.items()]
    measured = batched_agents.Measured()
    batched_agents.play(batched_agents.prepared(config, texts, at_once, None), rounds, "", measured)
    return measured


SECTIONS: dict[str, Callable[[torch.device, bool], list[dict[str, Any]]]] = {
    "networks": networks,
    "row_bits": row_bits,
    "batched_agents": stacks,
    "cell": cell_rounds,
    "semifl": semifl,
}


def report(
    device: torch.device, names: Sequence[str], minutes: float, small: bool, into: Path
) -> dict[str, Any]:
    """Measure the sections; write the file after each, so that an aborted run keeps its results."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    results: dict[str, Any] = {
        "device": str(device), "gpu": gpu, "machine": about(), "python": platform.python_version(),
        "torch": torch.__version__, "small": small, "sections": {}, "left_out": [],
    }  # fmt: skip
    start = time.monotonic()
    for name in names:
        if time.monotonic() - start > minutes * 60:
            results["left_out"].append(name)
            continue
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        section_start, section = time.monotonic(), dict[str, Any]()
        try:
            section["measured"] = SECTIONS[name](device, small)
        except Exception as error:  # the other sections still run
            section["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        section["seconds"] = round(time.monotonic() - section_start, 1)
        if device.type == "cuda":
            section["peak_memory_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
        results["sections"][name] = section
        print(f"{name}: {section['seconds']} s", flush=True)
        into.parent.mkdir(parents=True, exist_ok=True)
        into.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if a section failed; 2 if the device does not exist."""
    parser = parser_of("gpu_report", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=at_least(1), default=8)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, help="default: results/gpu/NAME.json")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU here. --device cpu --small tries the program", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    into = options.output or RESULTS / f"{name.replace(' ', '-').lower()}.json"
    results = report(device, options.only, options.minutes, options.small, into)
    print(f"Written to {into}")
    return int(any("error" in section for section in results["sections"].values()))


if __name__ == "__main__":
    sys.exit(main())
