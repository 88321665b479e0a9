"""The benchmark cell in pfl-research, set up like its own benchmark and tuned by its guide.

From apple/pfl-research: ``PyTorchModel`` with a central SGD (1.0), ``FederatedAveraging``,
``WeightByDatapoints``, ``FederatedDataset.from_slices`` over float32 rows in memory (height, width,
channels: convolutions then run channels-last), users drawn at random. Its guide "Fast distributed
simulations" has one process for each core (``PFL_WORKER_ADDRESSES``), which split a cohort and sum
by gloo; bfloat16 is its own ``amp_dtype``. Evaluation (every ten rounds in its config) runs only
before the first round, which is not timed.
"""

import os
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.cell import work as cell
from benchmarks.processes import tell


class Model(cell.CellCNN):
    """The network with the methods that pfl needs. Rows are (B, 32, 32, 3)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2))

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        self.train(not eval)
        return cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
        self.train(not eval)
        return {"loss": Weighted(float(cross_entropy(self(x), y, reduction="sum")), len(y))}


class Ticks(TrainingProcessCallback):  # type: ignore[misc]  # pfl's environment has its types
    """Callback that reports when the first round begins and when each ends."""

    def on_train_begin(self, *, model: Any) -> Metrics:
        tell(round=0)
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Any]:
        tell(round=central_iteration + 1)
        return False, Metrics()


def main() -> None:
    """Run the cell (see ``benchmarks.cell.work``) in every process of pfl."""
    folder, rounds, precision, _ = cell.given()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    np.random.seed(0)
    x, y = cell.rows(folder)
    train = len(x) - cell.TEST_ROWS
    images = np.ascontiguousarray(x[:train].transpose(0, 2, 3, 1), dtype=np.float32)
    images -= cell.MIDDLE
    images /= cell.SCALE
    rows, labels = torch.from_numpy(images), torch.from_numpy(y[:train])
    users = [
        (rows[start : start + cell.ROWS_EACH], labels[start : start + cell.ROWS_EACH])
        for start in range(0, train, cell.ROWS_EACH)
    ]
    dataset = FederatedDataset.from_slices(users, get_user_sampler("random", range(len(users))))
    network = Model()
    network.load_state_dict(cell.begin())
    model = PyTorchModel(
        model=network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
        amp_dtype=torch.bfloat16 if precision == "bfloat16" else None,
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10 * rounds,
            train_cohort_size=cell.PER_ROUND,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(dataset, dataset, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=cell.RATE, local_num_epochs=1, local_batch_size=cell.BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=1000),
        callbacks=[Ticks()],
    )
    tell(**cell.judge(dict(network.state_dict()), x, y))


if __name__ == "__main__":
    main()
