"""The benchmark cell with privssl: algorithm ``fedavg``, its engine, worker processes.

Run folder, trackers, checkpoints and evaluation are omitted, as with the other frameworks. Imports
are those of a run.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from privssl.runtime.process import gc_paused, in_one_thread, tune_malloc

with gc_paused():
    import torch
    from torch import nn

    from benchmarks.cell import work as cell
    from benchmarks.processes import tell
    from privssl import data
    from privssl.algorithms.baselines.supervised import FedAvg, FedAvgConfig, SupervisedState
    from privssl.algorithms.local_ssl import ModelState
    from privssl.core.federation import Federation, Round
    from privssl.core.task import Task
    from privssl.data.datasets import from_arrays
    from privssl.data.npz import Arrays
    from privssl.engines.local import LocalEngine
    from privssl.engines.process_pool import WorkerEngine
    from privssl.models import optimize_layout
    from privssl.ops.precision import Precision, in_precision
    from privssl.settings.schema import AgentSettings, DataSettings


def main() -> None:
    """See ``benchmarks.cell.work``."""
    folder, rounds, word, workers = cell.given()
    in_one_thread()
    tune_malloc()
    device = torch.device("cpu")
    state = play(folder, rounds, word, workers, device, lambda number: tell(round=number))
    tell(**cell.judge(dict(state.F), *cell.rows(folder)))


def play(
    folder: Path, rounds: int, word: str, workers: int, device: torch.device,
    report_end: Callable[[int], None],
) -> ModelState:  # fmt: skip
    """Run the rounds on a device; call ``report_end`` before the first (0) and after each."""
    precision: Precision = "bfloat16" if word == "bfloat16" else "float32"
    x, y = cell.rows(folder)
    train = len(x) - cell.TEST_ROWS
    tests = x[train:].copy(), y[train:].copy()  # a view would keep all rows
    names = tuple(map(str, range(cell.CLASSES)))
    dataset = from_arrays("cell", Arrays(x[:train], y[:train], *tests, names))
    settings = DataSettings("npz", "unused", labelled=train)
    federated_data = data.build(settings, AgentSettings(support=cell.AGENTS), 0, dataset)
    del x, y, dataset  # each row is with its agent now, as in a run

    def make_network() -> nn.Module:
        return optimize_layout(in_precision(cell.CellCNN, precision)())

    config = FedAvgConfig(
        rounds=rounds, local_epochs=1, batch_size=cell.BATCH, learning_rate=cell.RATE,
        momentum=0.0, weak="none", agents_per_round=cell.PER_ROUND,
    )  # fmt: skip
    algorithm = FedAvg(config, Task(cell.CLASSES, cell.SHAPE, make_network, precision))
    engine = (
        LocalEngine(federated_data.agents, seed=0, device=device)
        if workers == 1
        else WorkerEngine(
            federated_data.agents, algorithm=algorithm, workers=workers, seed=0, device=device
        )
    )
    with closing(engine):
        federation = Federation(engine, 0)
        state: ModelState = SupervisedState(cell.begin())
        report_end(0)
        for number in range(1, rounds + 1):
            federation.begin(Round(number))
            state = algorithm.round(state, federation)
            report_end(number)
    return state


if __name__ == "__main__":
    main()
