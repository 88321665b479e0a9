"""The benchmark cell as the plain loop of ``benchmarks.plain_loop`` with PyTorch's defaults.

Threads, memory layouts and precision are PyTorch's defaults.
"""

import torch

from benchmarks.cell import work as cell
from benchmarks.plain_loop import Images, local_training, mean
from benchmarks.processes import tell


def main() -> None:
    """See ``benchmarks.cell.work``."""
    folder, rounds, _, _ = cell.given()
    x, y = cell.rows(folder)
    network = cell.CellCNN()
    network.load_state_dict(cell.begin())
    rng = torch.Generator().manual_seed(0)
    tell(round=0)
    for number in range(1, rounds + 1):
        sent = []
        for agent in torch.randperm(cell.AGENTS, generator=rng)[: cell.PER_ROUND].tolist():
            rows = slice(agent * cell.ROWS_EACH, (agent + 1) * cell.ROWS_EACH)
            weights = local_training(
                network, Images(x[rows], y[rows]), order=rng, batch=cell.BATCH, epochs=1,
                rate=cell.RATE, momentum=0.0,
            )  # fmt: skip
            sent.append(weights)
        network.load_state_dict(mean(sent, [cell.ROWS_EACH] * len(sent)))
        tell(round=number)
    tell(**cell.judge(dict(network.state_dict()), x, y))


if __name__ == "__main__":
    main()
