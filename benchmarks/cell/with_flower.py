"""The benchmark cell in Flower's simulation, with a client as optimised as privssl's.

Flower 1.2x and later: a ``ClientApp`` with a train function, the strategy ``FedAvg`` of
``flwr.serverapp``, 1,000 supernodes of which 50 train in a round, and the Ray backend with one
actor for each core (``client_resources: num_cpus 1``), as its guide to simulation advises for
clients that use one core each. ``run_simulation`` is called from Python: Flower marks it deprecated
for ``flwr run``, which starts more processes (a SuperLink) for the same engine.

Like privssl, the client keeps rows (uint8) and one network in its actor between rounds, normalises
in batches, and trains channels-last, in bfloat16 by autocast if requested. Telemetry, evaluation
and Ray's dashboard (by Flower's default) are off.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.cell import work as cell
from benchmarks.processes import tell


@lru_cache(maxsize=1)
def resident(folder: str) -> tuple[Tensor, Tensor, torch.nn.Module]:
    """Return rows and the network, loaded once per actor."""
    torch.set_num_threads(1)
    x, y = cell.rows(Path(folder))
    network = cell.CellCNN().to(memory_format=torch.channels_last)
    return torch.from_numpy(x), torch.from_numpy(y), network


def client(folder: str, precision: str) -> ClientApp:
    """Return an app that trains one epoch on the rows of its partition."""
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        x, y, network = resident(folder)
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        network.train()
        sgd = torch.optim.SGD(network.parameters(), lr=cell.RATE)
        first = int(context.node_config["partition-id"]) * cell.ROWS_EACH
        for batch in torch.split(first + torch.randperm(cell.ROWS_EACH), cell.BATCH):
            images = x[batch].float().div(cell.MIDDLE).sub(1)
            images = images.contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                logits = network(images)
            sgd.zero_grad(set_to_none=True)
            cross_entropy(logits.float(), y[batch]).backward()  # type: ignore[no-untyped-call]
            sgd.step()
        content = RecordDict(
            {
                "arrays": ArrayRecord(network.state_dict()),
                "metrics": MetricRecord({"num-examples": cell.ROWS_EACH}),
            }
        )
        return Message(content=content, reply_to=message)

    return app


def server(folder: Path, rounds: int) -> ServerApp:
    """Return an app that runs the rounds and reports the end of each."""
    app = ServerApp()

    def report_round(number: int, arrays: ArrayRecord) -> Any:
        if number:
            tell(round=number)
        if number == rounds:
            tell(**cell.judge(arrays.to_torch_state_dict(), *cell.rows(folder)))

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=cell.PER_ROUND / cell.AGENTS,
            fraction_evaluate=0.0,
            min_available_nodes=cell.AGENTS,
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(cell.begin()),
            num_rounds=rounds,
            evaluate_fn=report_round,
        )

    return app


def main() -> None:
    """See ``benchmarks.cell.work``."""
    folder, rounds, precision, actors = cell.given()
    run_simulation(
        server_app=server(folder, rounds),
        client_app=client(str(folder), precision),
        num_supernodes=cell.AGENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": actors, "num_gpus": 0, "log_to_driver": False},
        },
    )


if __name__ == "__main__":
    # Imported under its own name, by which Ray's actors find its functions.
    from benchmarks.cell import with_flower

    with_flower.main()
