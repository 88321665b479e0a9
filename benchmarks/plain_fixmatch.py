"""privssl against FedAvg-FixMatch as in common research code, on the same work.

    python -m benchmarks.plain_fixmatch [--data mnist] [--agents 10] [--rows 300] [--batch 32]
        [--rate 0.005] [--labels 100] [--warm-up 200] [--rounds 5] [--beside 0]

A server with few labelled rows trains on weak views of them. Then agents without labels train on
their confident pseudo-labels (FixMatch: the class of a weak view is the label of a strong view),
and their weights are averaged.

The plain loop uses, for each party, a deep copy of the global network, a ``Dataset`` that makes a
PIL image of a row and puts it through torchvision's ``RandomCrop``, for the strong view
``RandAugment`` after it, ``ToTensor`` and ``Normalize``; a ``DataLoader`` without worker processes;
every row of a batch goes through the network, the loss of unconfident ones is multiplied by 0; SGD
in float32 with PyTorch's defaults. Ours: the algorithm ``fixmatch``. Network, first weights, rows,
batches, their order, epochs, threshold and rates are the same; both draw the same 14 operations of
RandAugment, two for a row, each applied with probability 1/2. Each loop samples its own views, so
weights differ; accuracies and shares of confident rows are compared.

Both begin from a network trained on the server's rows: a new network is confident about no row, and
privssl skips unconfident rows. Shares are printed. If the learning rate is too high for RandAugment
on digits (0.02, or 0.005 with batches of 10), both collapse differently, and the check fails.
Order, medians, columns and ``--beside`` as in ``benchmarks.plain_loop``. Exit status: 1 if results
disagree.
"""

import argparse
import copy
import dataclasses
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks.plain_loop import (
    CPU,
    SEED,
    Competitor,
    Order,
    as_image,
    common_options,
    mean,
    our_rounds,
    set_up,
    table,
    take_turns,
)
from benchmarks.processes import other_work
from privssl import data
from privssl.algorithms.baselines.fixmatch_uda import FixMatch, FixMatchConfig
from privssl.algorithms.baselines.pseudo_labeling import PseudoLabelState
from privssl.core.agents import Agent
from privssl.core.task import Task
from privssl.errors import UserError
from privssl.models import build_classifier
from privssl.ops.precision import Precision
from privssl.runtime import randomness
from privssl.settings.schema import AgentSettings, DataSettings, ModelSettings
from privssl.training import optim
from privssl.training.evaluation import score
from privssl.training.local_training import fresh_weights, minimise, network_input

MOMENTUM, THRESHOLD = 0.9, 0.9
WARM_UP_RATE = 0.005
CROP = 1 / 8  # of the side, each way
ACCURACY_APART, SHARES_APART = 0.05, 0.1
VALIDATION = 500  # rows for accuracy: rates were chosen so that no training collapses


# As research code writes it ------------------------------------------------------------------


class TwoViews(Dataset[tuple[Tensor, Tensor, int]]):
    """A weak view, a strong view and the label of each row; -1 if it has none."""

    def __init__(self, x: np.ndarray, y: np.ndarray | None = None) -> None:
        """Store x (N, channels, side, side) uint8; y (N,). With labels the strong view is the weak
        one."""
        self.x, self.y = x.transpose(0, 2, 3, 1), y
        side, centre = x.shape[2], (0.5,) * x.shape[1]
        self.crop = transforms.RandomCrop(side, int(CROP * side), padding_mode="reflect")
        augmentation = transforms.RandomApply([transforms.RandAugment(1)], 0.5)
        self.strong = transforms.Compose([self.crop, augmentation, augmentation])
        self.tensor = transforms.Compose(
            [transforms.ToTensor(), transforms.Normalize(centre, centre)]
        )

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        image = as_image(self.x[number])
        weak: Tensor = self.tensor(self.crop(image))
        if self.y is not None:
            return weak, weak, int(self.y[number])
        return weak, self.tensor(self.strong(image)), -1


def local_training(
    network: nn.Module, views: TwoViews, *, order: torch.Generator, batch: int, rate: float
) -> tuple[dict[str, Tensor], float]:
    """Train an epoch by SGD on a copy of the network; return its weights and the share of confident
    rows."""
    local = copy.deepcopy(network).train()
    loader = DataLoader(views, batch, sampler=Order(len(views), order))
    sgd = torch.optim.SGD(local.parameters(), lr=rate, momentum=MOMENTUM)
    confident = 0
    for weak, strong, y in loader:
        if views.y is not None:
            loss = cross_entropy(local(weak), y)
        else:
            with torch.no_grad():
                p = local(weak).softmax(dim=1)  # group norm: training or not is the same
            mask = p.amax(dim=1) >= THRESHOLD
            confident += int(mask.sum())
            if not mask.any():  # as in privssl: no step by momentum alone
                continue
            loss = (cross_entropy(local(strong), p.argmax(dim=1), reduction="none") * mask).mean()
        sgd.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
    return copy.deepcopy(local.state_dict()), confident / len(views)


# Both, a round at a time ---------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The work of both."""

    federated_data: data.FederatedDataset
    begin: dict[str, Tensor]
    batch: int
    rate: float

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Work":
        """Build it, with a network trained on the server's rows.

        Raises UserError if the data set is missing.
        """
        settings = DataSettings(
            options.data, labels="labels-at-server", labelled=options.labels,
            unlabelled=options.agents * options.rows, validation=VALIDATION,
        )  # fmt: skip
        federated_data = data.build(settings, AgentSettings(query=options.agents), SEED)
        work = cls(federated_data, {}, options.batch, options.rate)
        network = work.new()
        network.load_state_dict(
            fresh_weights(work.new, randomness.stream(SEED, 0, "world", "init"))
        )
        sgd = optim.SGD(network.parameters(), lr=WARM_UP_RATE, momentum=MOMENTUM)
        rows, rng = work.server.labelled, randomness.stream(SEED, 0, "world", "warm-up")
        for _ in range(options.warm_up):
            x = work.config.weak_view(network_input(rows.x), rng)
            minimise(sgd, cross_entropy(network(x), rows.y))
        return dataclasses.replace(work, begin=dict(network.state_dict()))

    @property
    def server(self) -> Agent:
        """The agent with labels."""
        return next(agent for agent in self.federated_data.agents if agent.role == "server")

    @property
    def others(self) -> list[Agent]:
        """The agents without labels."""
        return [agent for agent in self.federated_data.agents if agent.role == "query"]

    @property
    def config(self) -> FixMatchConfig:
        """privssl's config of the same training."""
        return FixMatchConfig(
            rounds=1, local_epochs=1, batch_size=self.batch, learning_rate=self.rate,
            momentum=MOMENTUM, weak="crop", guess_on="weak", strong="fedseal", threshold=THRESHOLD,
            mean_over="batch",
        )  # fmt: skip

    def new(self, precision: Precision = "float32") -> nn.Module:
        """Return a new small_cnn."""
        dataset = self.federated_data.dataset
        return build_classifier(ModelSettings(), dataset.shape, dataset.classes, precision)

    def plain(self, name: str, threads: int, shares: list[float]) -> Competitor:
        """Return the plain loop. shares: receives shares of confident rows in the last round."""
        network = self.new()
        network.load_state_dict(self.begin)

        def visit(
            agent: Agent, number: int, step: str, views: TwoViews
        ) -> tuple[dict[str, Tensor], float]:
            order = randomness.stream(SEED, number, agent.id, f"{number}/{agent.id}/{step}/1:order")
            return local_training(network, views, order=order, batch=self.batch, rate=self.rate)

        def play(number: int) -> None:
            torch.manual_seed(number)  # for views
            rows = self.server.labelled
            views = TwoViews(rows.x.numpy(), rows.y.numpy())
            network.load_state_dict(visit(self.server, number, "support_pass", views)[0])
            sent = [
                visit(agent, number, "query_pass", TwoViews(agent.unlabelled.x.numpy()))
                for agent in self.others
            ]
            counts = [len(agent.unlabelled) for agent in self.others]
            network.load_state_dict(mean([weights for weights, _ in sent], counts))
            shares[:] = [share for _, share in sent]

        return Competitor(name, play, lambda: dict(network.state_dict()), threads)

    def ours(
        self, precision: Precision, workers: int, shares: list[float], stack: ExitStack
    ) -> Competitor:
        """Return privssl; its workers are forked here."""
        dataset = self.federated_data.dataset
        task = Task(dataset.classes, dataset.shape, partial(self.new, precision), precision)
        return our_rounds(
            FixMatch(self.config, task), self.federated_data.agents,
            PseudoLabelState(self.begin, self.begin), workers, stack, shares,
        )  # fmt: skip

    def accuracy(self, weights: dict[str, Tensor]) -> float:
        """Return the accuracy on rows that no agent holds and that are not test rows."""
        rows = self.federated_data.validation
        assert rows is not None
        return score(self.new(), weights, rows.x, rows.y, device=CPU).accuracy


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a Markdown table."""
    parser = common_options("plain_fixmatch", __doc__, rows=300, batch=32)
    parser.add_argument("--labels", type=int, default=100, help="labelled rows at the server")
    parser.add_argument(
        "--rate", type=float, default=0.005, help="learning rate; smaller for small batches"
    )
    parser.add_argument(
        "--warm-up", type=int, default=200, help="steps on labelled rows before round 1"
    )
    options = parser.parse_args(arguments)
    threads = set_up()
    try:
        work = Work.of(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    shares: dict[str, list[float]] = {}
    with ExitStack() as stack:
        precisions: tuple[Precision, ...] = ("float32", "bfloat16")
        ours = [
            work.ours(p, n, shares.setdefault(f"ours, {p}, {n}", []), stack)
            for n in (1, 2)
            for p in precisions
        ]
        plain = [work.plain(name, n, shares.setdefault(name, [])) for name, n in threads.items()]
        competitors = [*plain, *ours]
        stack.enter_context(other_work(options.beside))
        take_turns(competitors, options.rounds)
    print(
        f"{options.data}, {options.labels} labels at the server, {options.agents} agents with "
        f"{options.rows} rows, batches of {options.batch}, rate {options.rate}, "
        f"{options.rounds} timed rounds, {options.beside} processes of other work beside\n"
    )
    accuracies = {entry.name: work.accuracy(entry.weights()) for entry in competitors}
    table(competitors, accuracies, images=options.agents * options.rows + options.labels)
    return verdict(work.accuracy(work.begin), list(accuracies.values()), shares)


def verdict(begun: float, right: Sequence[float], shares: dict[str, list[float]]) -> int:
    """Print whether all trainings agree; return 0 if so, else 1."""
    mean_shares = {name: sum(values) / len(values) for name, values in shares.items()}
    spread, shares_spread = (max(values) - min(values) for values in (right, mean_shares.values()))
    agree = spread <= ACCURACY_APART and shares_spread <= SHARES_APART
    print(f"\nAccuracy before the first round: {begun:.4f}. Sure rows in the last: ", end="")
    print(", ".join(f"{name} {share:.3f}" for name, share in mean_shares.items()))
    print(
        f"Accuracies: {spread:.4f} apart (at most {ACCURACY_APART}); shares of sure rows: "
        f"{shares_spread:.3f} (at most {SHARES_APART}). "
        + ("Trained alike." if agree else "NOT trained alike.")
    )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
