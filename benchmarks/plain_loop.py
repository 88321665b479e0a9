"""privssl against a plain FedAvg loop as in common research code, on the same work.

    python -m benchmarks.plain_loop [--data mnist] [--agents 10] [--rows 100] [--batch 10]
        [--augment none|weak|mid] [--beside 0] ...

The plain loop uses, for each agent, a deep copy of the global network, a ``Dataset`` that makes a
PIL image of a row and puts it through torchvision's ``ToTensor`` and ``Normalize``, and before them
``RandomAffine`` where rows are augmented, a ``DataLoader`` without worker processes, SGD in float32
with PyTorch's defaults, and a mean of state dicts. Ours: the algorithm ``fedavg`` with its engine,
rows as uint8 tensors, in float32 and bfloat16, in this process and in worker processes. Network
(small_cnn, group norm), initial weights, rows, batches and their order are the same: the plain loop
draws its order from the same generators.

Both alternate, a round each, in one process; a time is the median of the rounds without the first.
The first round counts steps of optimisers, which must agree; after it the weights of plain float32
and ours float32 must agree within 1e-2 (sums have another order, and training amplifies the
difference), at the end all accuracies within 0.03. With ``--augment`` both rotate and shift rows by
the same distribution but other samples, so only accuracies are compared, to 0.05. "1 thread" is one
intra-op thread; "defaults" is PyTorch's default. Ours has one thread per process. ``--beside 1``
keeps one core busy with another process. Exit status: 1 if results disagree.
"""

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision import transforms

from benchmarks.processes import about, at_least, beside_option, other_work, parser_of
from privssl import data
from privssl.algorithms.base import Algorithm
from privssl.algorithms.baselines.supervised import FedAvg, FedAvgConfig, SupervisedState
from privssl.core.agents import Agent
from privssl.core.engine import Engine
from privssl.core.federation import Federation, Round
from privssl.core.task import Task
from privssl.data.affine_augment import AUGMENTATIONS
from privssl.engines.local import LocalEngine
from privssl.engines.process_pool import WorkerEngine
from privssl.errors import UserError
from privssl.models import build_classifier
from privssl.models.convnets import SmallCNN
from privssl.ops.precision import Precision
from privssl.runtime import randomness
from privssl.runtime.process import tune_malloc
from privssl.settings.schema import AgentSettings, DataSettings, ModelSettings
from privssl.training import optim
from privssl.training.evaluation import score
from privssl.training.local_training import fresh_weights

SEED, RATE, MOMENTUM = 0, 0.02, 0.9
WEIGHTS_APART = 1e-2
#: By whether both sample the same augmentation; own samples differed by up to 0.026.
ACCURACY_APART = {True: 0.03, False: 0.05}
CPU = torch.device("cpu")


# As research code writes it ------------------------------------------------------------------


class Images(Dataset[tuple[Tensor, int]]):
    """Rows of one agent as a torchvision data set."""

    def __init__(self, x: np.ndarray, y: np.ndarray, augment: str = "none") -> None:
        """Store x (N, channels, height, width) uint8; y (N,); augment: a name among our views."""
        self.x, self.y = x.transpose(0, 2, 3, 1), y
        centre, limits = (0.5,) * x.shape[1], AUGMENTATIONS[augment]
        random = transforms.RandomAffine(
            limits.rotation,
            (limits.shift, limits.shift),
            interpolation=transforms.InterpolationMode.BILINEAR,
        )
        self.transform = transforms.Compose(
            [random] * (limits != AUGMENTATIONS["none"])
            + [transforms.ToTensor(), transforms.Normalize(centre, centre)]
        )

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.transform(as_image(self.x[number])), int(self.y[number])


def as_image(row: np.ndarray) -> Image.Image:
    """Convert a row (height, width, channels) to a PIL image."""
    return Image.fromarray(row[:, :, 0] if row.shape[2] == 1 else row)


class Order(Sampler[int]):
    """A sampler with a new order for each epoch, from a given generator."""

    def __init__(self, rows: int, rng: torch.Generator) -> None:
        self.rows, self.rng = rows, rng

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.rows, generator=self.rng).tolist())

    def __len__(self) -> int:
        return self.rows


def local_training(
    network: nn.Module, images: Images, *, order: torch.Generator, batch: int, epochs: int,
    rate: float, momentum: float,
) -> dict[str, Tensor]:  # fmt: skip
    """Train epochs by SGD on a copy of the network; return its weights."""
    local = copy.deepcopy(network).train()
    loader = DataLoader(images, batch, sampler=Order(len(images), order))
    sgd = torch.optim.SGD(local.parameters(), lr=rate, momentum=momentum)
    for _ in range(epochs):
        for x, y in loader:
            sgd.zero_grad()
            cross_entropy(local(x), y).backward()  # type: ignore[no-untyped-call]
            sgd.step()
    return copy.deepcopy(local.state_dict())


def mean(weights: Sequence[dict[str, Tensor]], rows: Sequence[int]) -> dict[str, Tensor]:
    """Return their mean, weighted by rows."""
    total = sum(rows)
    return {
        name: torch.stack([w[name] * (n / total) for w, n in zip(weights, rows, strict=True)]).sum(
            0
        )
        for name in weights[0]
    }


# Both, a round at a time ---------------------------------------------------------------------


@dataclass
class Competitor:
    """One entry of the comparison, and the times of its rounds."""

    name: str
    play: Callable[[int], None]  # runs a round, by its number
    weights: Callable[[], dict[str, Tensor]]
    threads: int = 1
    seconds: list[float] = field(default_factory=list)
    steps: int = 0  # in round 1, in this process
    first: dict[str, Tensor] = field(default_factory=dict)  # weights after round 1


@dataclass(frozen=True)
class Work:
    """The work of both."""

    federated_data: data.FederatedDataset
    new: Callable[[Precision], nn.Module]
    begin: dict[str, Tensor]
    batch: int
    epochs: int
    augment: Literal["none", "weak", "mid"]

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Work":
        """Build it. Raises UserError if the data set is missing."""
        settings = DataSettings(options.data, labelled=options.agents * options.rows)
        federated_data = data.build(settings, AgentSettings(support=options.agents), SEED)
        dataset = federated_data.dataset

        def make_network(precision: Precision) -> nn.Module:
            return build_classifier(ModelSettings(), dataset.shape, dataset.classes, precision)

        begin = fresh_weights(
            partial(make_network, "float32"), randomness.stream(SEED, 0, "world", "init")
        )
        return cls(
            federated_data, make_network, begin, options.batch, options.epochs, options.augment
        )

    def plain(self, name: str, threads: int) -> Competitor:
        """Return the plain loop."""
        dataset = self.federated_data.dataset
        channels, height, width = dataset.shape
        network = SmallCNN((channels, height, width), dataset.classes)
        network.load_state_dict(self.begin)

        def visit(agent: Agent, number: int) -> dict[str, Tensor]:
            key = f"{number}/{agent.id}/labelled_pass/1:order"  # the key of privssl's generator
            rows = agent.labelled
            return local_training(
                network, Images(rows.x.numpy(), rows.y.numpy(), self.augment), batch=self.batch,
                order=randomness.stream(SEED, number, agent.id, key), epochs=self.epochs,
                rate=RATE, momentum=MOMENTUM,
            )  # fmt: skip

        def play(number: int) -> None:
            agents = self.federated_data.agents
            sent = [visit(agent, number) for agent in agents]
            network.load_state_dict(mean(sent, [len(agent.labelled) for agent in agents]))

        return Competitor(name, play, lambda: dict(network.state_dict()), threads)

    def ours(self, precision: Precision, workers: int, stack: ExitStack) -> Competitor:
        """Return privssl; its workers are forked here."""
        config = FedAvgConfig(
            rounds=1, local_epochs=self.epochs, batch_size=self.batch, learning_rate=RATE,
            momentum=MOMENTUM, weak=self.augment,
        )  # fmt: skip
        dataset = self.federated_data.dataset
        task = Task(dataset.classes, dataset.shape, partial(self.new, precision), precision)
        return our_rounds(
            FedAvg(config, task), self.federated_data.agents, SupervisedState(self.begin), workers,
            stack,
        )  # fmt: skip

    def accuracy(self, weights: dict[str, Tensor]) -> float:
        """Return the accuracy on the test rows."""
        dataset, network = self.federated_data.dataset, self.new("float32")
        return score(network, weights, dataset.x_test, dataset.y_test, device=CPU).accuracy


def our_rounds(
    algorithm: Algorithm[Any], agents: Sequence[Agent], state: Any, workers: int,
    stack: ExitStack, shares: list[float] | None = None,
) -> Competitor:  # fmt: skip
    """Return privssl's rounds from a state with weights F; its workers are forked here.

    shares: receives the shares of confident rows in the last round.
    """
    engine: Engine = LocalEngine(agents, seed=SEED, device=CPU)
    if workers > 1:
        engine = WorkerEngine(agents, algorithm=algorithm, workers=workers, seed=SEED, device=CPU)
    stack.enter_context(closing(engine))
    federation, states = Federation(engine, SEED), [state]

    def play(number: int) -> None:
        federation.begin(Round(number))
        states[:] = [algorithm.round(states[0], federation)]
        if shares is not None:
            shares[:] = federation.metrics["train/kept"]

    name = f"ours, {algorithm.task.precision}, {workers} process{'es' * (workers > 1)}"
    return Competitor(name, play, lambda: dict(states[0].F))


@contextmanager
def counted_steps() -> Iterator[list[int]]:
    """Count the optimiser steps of this process in the one number of the list.

    torch's optimisers are counted by a hook, ours by a wrapper.
    """
    count = [0]

    def count_step(*_: Any) -> None:
        count[0] += 1

    def add_counter(step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)  # torch must see the original signature
        def counted_step(*arguments: Any) -> Any:
            count_step()
            return step(*arguments)

        return counted_step

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_post_hook(count_step).remove)
        for kind in (optim.SGD, optim.Adam):
            stack.enter_context(patch.object(kind, "step", add_counter(kind.step)))
        yield count


def set_up() -> dict[str, int]:
    """Print the machine. Return the names of plain loops with their threads: 1, and PyTorch's
    default.

    Then set one thread, as workers are forked from a single-threaded process.
    """
    defaults = torch.get_num_threads()
    torch.set_num_threads(1)
    tune_malloc()
    print(about())
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        if name in os.environ:
            print(f"{name}={os.environ[name]} is set: PyTorch's defaults are others without it.")
    threads = {"1 thread": 1} | {f"defaults ({n} threads)": n for n in {defaults} - {1}}
    return {f"plain loop, float32, {name}": n for name, n in threads.items()}


def take_turns(competitors: Sequence[Competitor], rounds: int) -> None:
    """Run the entries in turn, round by round; the first round is not timed."""
    with counted_steps() as count:
        for entry in competitors:
            torch.set_num_threads(entry.threads)
            before = count[0]
            entry.play(1)
            entry.steps = count[0] - before
            entry.first = {name: value.clone() for name, value in entry.weights().items()}
    for number in range(2, rounds + 2):
        for entry in competitors:
            torch.set_num_threads(entry.threads)
            start = time.perf_counter()
            entry.play(number)
            entry.seconds.append(time.perf_counter() - start)
    torch.set_num_threads(1)


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference between two networks' weights."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def common_options(
    module: str, about: str | None, *, rows: int, batch: int
) -> argparse.ArgumentParser:
    """Return a parser with the options of both comparisons with a plain loop."""
    parser = parser_of(module, about)
    parser.add_argument("--data", default="mnist", choices=("mnist", "fashion_mnist", "digits"))
    parser.add_argument("--agents", type=at_least(1), default=10)
    parser.add_argument("--rows", type=at_least(1), default=rows, help="rows of each agent")
    parser.add_argument("--batch", type=at_least(1), default=batch)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="timed rounds")
    beside_option(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a Markdown table."""
    parser = common_options("plain_loop", __doc__, rows=100, batch=10)
    parser.add_argument("--epochs", type=at_least(1), default=1)
    parser.add_argument("--augment", default="none", choices=("none", "weak", "mid"))
    parser.add_argument("--workers", type=at_least(1), default=2)
    options = parser.parse_args(arguments)
    threads = set_up()
    try:
        work = Work.of(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    with ExitStack() as stack:
        precisions: tuple[Precision, ...] = ("float32", "bfloat16")
        numbers = sorted({1, options.workers})
        ours = [work.ours(p, n, stack) for n in numbers for p in precisions]
        competitors = [*(work.plain(name, n) for name, n in threads.items()), *ours]
        stack.enter_context(other_work(options.beside))
        take_turns(competitors, options.rounds)
    return report(competitors, work, options)


def table(competitors: Sequence[Competitor], right: Mapping[str, float], images: int) -> None:
    """Print the table.

    Args:
        competitors: the plain loop on one thread comes first, then, if different, with PyTorch's
            default threads.
        right: accuracy of each by its name.
        images: number of images of a round.
    """
    times = {entry.name: statistics.median(entry.seconds) for entry in competitors}
    plain = {"1 thread": competitors[0]}
    if competitors[1].threads > 1:
        plain["defaults"] = competitors[1]
    print(
        f"| competitor | s per round | images/s | {' | '.join(f'times plain, {n}' for n in plain)} "
        f"| accuracy | steps of round 1 here |\n{'|---' * (5 + len(plain))}|"
    )
    for entry in competitors:
        seconds = times[entry.name]
        ratios = " | ".join(f"{times[baseline.name] / seconds:.2f}" for baseline in plain.values())
        print(
            f"| {entry.name} | {seconds:.3f} | {images / seconds:.0f} | {ratios} "
            f"| {right[entry.name]:.4f} | {entry.steps or 'elsewhere'} |"
        )


def report(competitors: Sequence[Competitor], work: Work, options: argparse.Namespace) -> int:
    """Print the table and any disagreement; return the exit status."""
    images = options.agents * options.rows * options.epochs
    print(
        f"{options.data}, {options.agents} agents with {options.rows} rows, batches of "
        f"{options.batch}, {options.epochs} local epochs, augmentation {options.augment}, "
        f"{options.rounds} timed rounds, {options.beside} processes of other work beside\n"
    )
    first = competitors[0]
    accuracies = {entry.name: work.accuracy(entry.weights()) for entry in competitors}
    table(competitors, accuracies, images)
    counterpart = next(entry for entry in competitors if entry.name.startswith("ours, float32, 1"))
    gap = apart(first.first, counterpart.first)
    spread = max(accuracies.values()) - min(accuracies.values())
    same_rows = options.augment == "none"
    agree = (
        (gap <= WEIGHTS_APART or not same_rows)
        and spread <= ACCURACY_APART[same_rows]
        and len({entry.steps for entry in competitors if entry.steps}) == 1
    )
    print()
    if same_rows:
        print(
            f"Weights of plain and ours, float32, after the first round: {gap:.1e} apart (at "
            f"most {WEIGHTS_APART:g})."
        )
    print(
        f"Accuracies: {spread:.4f} apart (at most {ACCURACY_APART[same_rows]:g}). "
        + ("Trained alike." if agree else "NOT trained alike.")
    )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
