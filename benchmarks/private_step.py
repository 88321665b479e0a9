"""A step of privssl's DP-SGD against the same step without privacy, and against Opacus.

    python -m benchmarks.private_step [--rows 16 64 256] [--passes 5]
        [--classifier NAME [--width 16]]

Networks: the classifier F (small_cnn, 1x28x28), the generator G and the discriminator D alone, and
all three by FedSSL's joint loss. Opacus' hooks do not support that loss, so only the step without
privacy is compared. Ours is ``PrivateTraining.run`` as a visit calls it: per-example gradients by
vmap, joint clipping, unseeded noise, mean, step. Opacus is ``PrivacyEngine.make_private`` in its
grad_sample_modes hooks, functorch, ew and ghost, without Poisson sampling, its noise from torch's
generator. All use the same rows, clip to 1 with noise multiplier 1, and step by SGD; every row is
in every batch. With ``--classifier`` only that classifier is measured, on 3x32x32 rows.

The step without privacy and ours use the layout of runs (channels-last). Opacus is measured
channels-last and in PyTorch's default layout; the faster counts. Before it is timed, a mode must
give our step without noise: with channels-last kernels Opacus 1.6 clips wrong gradients in the mode
hooks, without an error. One thread, CPU time; cases alternate and a number is the median of
``--passes`` readings. Targets: at most 2.3 times the step without privacy, and no Opacus mode
faster.
"""

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.version import __version__ as opacus_version
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.hot_loop import median_seconds
from benchmarks.processes import about, at_least, parser_of
from generators import ImageDiscriminator, ImageGenerator
from privssl.algorithms.fedssl.losses import MixupBatch, NetworkFunctions, mixing_losses
from privssl.algorithms.fedssl.settings import FedSSLConfig
from privssl.core.rows import IMAGE, WITH_DROPOUT
from privssl.models import build_classifier, optimize_layout
from privssl.privacy.dp_sgd import PrivateTraining, choose_max_microbatch_size
from privssl.privacy.per_example_gradients import Parameters
from privssl.privacy.plan import PrivatePlan
from privssl.runtime.process import tune_malloc
from privssl.settings.schema import ModelSettings
from privssl.training.batched.deferred import FunctionalModule

SHAPE, CLASSES, NOISE = (1, 28, 28), 10, 32
COLOUR = (3, 32, 32)
PRIVATE: list[Any] = [
    n for n in IMAGE.networks if n not in WITH_DROPOUT
]  # dropout is refused under DP-SGD
MODES = ("hooks", "functorch", "ew", "ghost")
LAYOUTS = {"channels-last": torch.channels_last, "plain": torch.contiguous_format}
CLIP, RATE = 1.0, 1e-4  # the rate is so small that the weights stay nearly constant
#: Largest relative difference of equal steps. One row of hundreds at the kink of a ReLU makes 4e-3;
#: wrong gradients make 8e-2 and more.
APART = 2e-2
LIMIT = 2.3


class RowMeans(nn.Module):
    """Squared error of each row, reduced by ``reduction`` (Opacus' ghost mode sets it)."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(self, made: Tensor, x: Tensor) -> Tensor:
        rows = (made - x).square().flatten(1).mean(dim=1)
        return rows.mean() if self.reduction == "mean" else rows


@dataclass(frozen=True)
class Case:
    """One network with its inputs and targets."""

    new: Callable[[], nn.Module]
    criterion: Callable[[], nn.Module]  # mean over rows
    inputs: tuple[Tensor, ...]  # each (B, ...)
    target: Tensor  # (B, ...)


def images(rows: int, shape: tuple[int, int, int]) -> Tensor:
    """Return random images (B, *shape), laid out as in runs."""
    return (torch.rand(rows, *shape) * 2 - 1).contiguous(memory_format=torch.channels_last)


def cases(rows: int) -> dict[str, Case]:
    """Return F, G and D on random rows."""
    x, y = images(rows, SHAPE), torch.randint(CLASSES, (rows,))
    p, p2 = (torch.rand(rows, CLASSES).softmax(dim=1) for _ in range(2))
    z, lam = torch.rand(rows, NOISE), torch.ones(rows, 1)
    return {
        "F": Case(classifier, nn.CrossEntropyLoss, (x,), y),
        "G": Case(generator, RowMeans, (x, p, p2, z, lam), x[:, None]),
        "D": Case(discriminator, nn.BCEWithLogitsLoss, (x, p), torch.ones(rows)),
    }


def coloured_case(rows: int, model: ModelSettings) -> Case:
    """Return a classifier of colour images on random rows."""
    new = partial(build_classifier, model, COLOUR, CLASSES)
    y = torch.randint(CLASSES, (rows,))
    return Case(new, nn.CrossEntropyLoss, (images(rows, COLOUR),), y)


def classifier() -> nn.Module:
    """Return F with the settings of runs."""
    return build_classifier(ModelSettings(), SHAPE, CLASSES)


def generator() -> nn.Module:
    """Return G with the settings of runs."""
    return optimize_layout(ImageGenerator(SHAPE, CLASSES, noise_size=NOISE))


def discriminator() -> nn.Module:
    """Return D with the settings of private runs: without spectral norm."""
    return optimize_layout(ImageDiscriminator(SHAPE, CLASSES, spectral=False))


def sgd(network: nn.Module) -> torch.optim.SGD:
    """Return SGD without momentum."""
    return torch.optim.SGD(network.parameters(), lr=RATE)


def open_step(case: Case) -> Callable[[], None]:
    """Return a step without privacy."""
    network, criterion = case.new(), case.criterion()
    optimizer = sgd(network)

    def step() -> None:
        optimizer.zero_grad()
        criterion(network(*case.inputs), case.target).backward()
        optimizer.step()

    return step


def plan(rows: int, protect: tuple[str, ...], sigma: float) -> PrivatePlan:
    """Return a plan with every row in every batch."""
    return PrivatePlan(
        update=protect, protect=protect, noise_multiplier=sigma, clip_norm=CLIP, sample_rate=1.0,
        steps=1, expected_batch=rows, learning_rate=RATE, momentum=0.0, views=1, visits=1,
    )  # fmt: skip


def our_step(case: Case, sigma: float = 1.0) -> Callable[[], None]:
    """Return a step of privssl."""
    network, criterion = case.new(), case.criterion()
    training = PrivateTraining(plan(len(case.target), ("N",), sigma), {"N": network})

    def fields_of(picked: Tensor, _: int) -> Mapping[str, Tensor]:
        inputs = {str(index): tensor[picked] for index, tensor in enumerate(case.inputs)}
        return {**inputs, "target": case.target[picked]}

    def row_loss(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        inputs = [row[str(index)][None] for index in range(len(case.inputs))]
        loss: Tensor = criterion(
            FunctionalModule(network, parameters["N"])(*inputs), row["target"][None]
        )
        return loss

    max_microbatch_size = choose_max_microbatch_size({"N": network}, case.inputs[0][0].numel())
    return lambda: training.run(
        len(case.target), fields_of, row_loss, max_microbatch_size=max_microbatch_size
    )


def opacus_step(
    case: Case, mode: str, layout: torch.memory_format, sigma: float = 1.0
) -> Callable[[], None]:
    """Return a step of Opacus. It, or the step, raises Opacus' error for unsupported networks."""
    network, criterion = case.new().to(memory_format=layout), case.criterion()
    inputs = tuple(
        tensor.contiguous(memory_format=layout) if tensor.dim() == 4 else tensor
        for tensor in case.inputs
    )
    private = PrivacyEngine(accountant="rdp").make_private(
        module=network, optimizer=sgd(network), criterion=criterion,
        data_loader=DataLoader(TensorDataset(case.target), len(case.target)),
        noise_multiplier=sigma, max_grad_norm=CLIP, poisson_sampling=False, grad_sample_mode=mode,
    )  # fmt: skip
    module, optimizer = private[0], private[1]
    loss = private[2] if mode == "ghost" else criterion

    def step() -> None:
        optimizer.zero_grad()
        loss(module(*inputs), case.target).backward()
        optimizer.step()

    return step


def joint_steps(rows: int) -> dict[str, Callable[[], None]]:
    """Return steps of FedSSL's loss for F, G and D together: without privacy, and ours."""
    nets = {"F": classifier(), "G": generator(), "D": discriminator()}
    cfg, networks = FedSSLConfig(), ("F", "G", "D")
    fields = {
        "strong": torch.rand(rows, *SHAPE) * 2 - 1,
        "mild": torch.rand(rows, *SHAPE) * 2 - 1,
        "p1": torch.eye(CLASSES)[torch.randint(CLASSES, (rows,))],
        "p2": torch.eye(CLASSES)[torch.randint(CLASSES, (rows,))],
        "z": torch.rand(rows, NOISE),
        "lam": torch.rand(rows),
    }

    def loss(parameters: Parameters, batch: Mapping[str, Tensor]) -> Tensor:
        functions = NetworkFunctions.with_parameters(nets, parameters)
        by_network, _ = mixing_losses(cfg, functions, MixupBatch(**batch), networks, True)
        return torch.stack([term.mean() for term in by_network.values()]).sum()

    optimizer = torch.optim.SGD([p for net in nets.values() for p in net.parameters()], lr=RATE)
    training = PrivateTraining(plan(rows, networks, 1.0), nets)

    def open_step() -> None:
        optimizer.zero_grad()
        parameters = {name: dict(net.named_parameters()) for name, net in nets.items()}
        loss(parameters, fields).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def fields_of(picked: Tensor, _: int) -> Mapping[str, Tensor]:
        return {name: value[picked][:, None] for name, value in fields.items()}

    max_microbatch_size = choose_max_microbatch_size(nets, math.prod(SHAPE))
    return {
        "open": open_step,
        "ours": lambda: training.run(
            rows, fields_of, loss, max_microbatch_size=max_microbatch_size
        ),
    }


def moved(case: Case, make: Callable[[Case], Callable[[], None]]) -> Tensor:
    """Return the change of a network's weights by a step, as one vector, from fixed initial
    weights."""
    network = case.new()
    with torch.no_grad():
        rng = torch.Generator().manual_seed(0)
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) / 10)
    before = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    make(replace(case, new=lambda: network))()
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()]) - before


def check(case: Case, mode: str, layout: torch.memory_format) -> None:
    """Raise ValueError if Opacus' step without noise is not ours."""
    our_change = moved(case, lambda case: our_step(case, 0.0))
    their_change = moved(case, lambda case: opacus_step(case, mode, layout, 0.0))
    difference = float((their_change - our_change).norm() / our_change.norm())
    if not difference <= APART:
        raise ValueError(f"its clipped gradient is another, by {difference:.0%}")


def steps_of(case: Case) -> dict[str, Callable[[], None]]:
    """Return all steps on a network. Modes of Opacus that refuse it or differ are named on standard
    error."""
    steps = {"open": open_step(case), "ours": our_step(case)}
    for mode in MODES:
        for name, layout in LAYOUTS.items():
            try:
                check(case, mode, layout)
            except Exception as error:
                text = (str(error).splitlines() or [type(error).__name__])[0]
                print(f"Opacus, {mode}, {name}, is left out: {text[:120]}", file=sys.stderr)
            else:
                steps[f"{mode}, {name}"] = opacus_step(case, mode, layout)
    return steps


def line(name: str, rows: int, times: Mapping[str, float]) -> str:
    """Return a row of the table: milliseconds, and times the step without privacy."""
    base, ours = times["open"], times["ours"]
    cells = [name, str(rows), f"{base * 1e3:.2f}", f"{ours * 1e3:.2f} ({ours / base:.2f})"]
    fastest = float("inf")
    for mode in MODES:
        of_mode = {key: value for key, value in times.items() if key.startswith(f"{mode},")}
        best = min(of_mode, key=of_mode.__getitem__, default="")
        if not best:
            cells.append("-")
            continue
        fastest = min(fastest, times[best])
        mark = "" if best.endswith("channels-last") else ", plain layout"
        cells.append(f"{times[best] * 1e3:.2f} ({times[best] / base:.2f}{mark})")
    within = "yes" if ours <= LIMIT * base else "NO"
    first = "-" if fastest == float("inf") else "yes" if ours <= fastest else "NO"
    return "| " + " | ".join([*cells, within, first]) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a Markdown table."""
    parser = parser_of("private_step", __doc__)
    parser.add_argument("--rows", type=at_least(1), nargs="+", default=[16, 64, 256])
    parser.add_argument("--passes", type=at_least(1), default=5)
    parser.add_argument("--classifier", choices=PRIVATE)
    parser.add_argument("--width", type=at_least(1), help="width of the classifier (16)")
    options = parser.parse_args(arguments)
    if options.width and not options.classifier:
        parser.error("--width needs --classifier")
    torch.set_num_threads(1)
    tune_malloc()
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # Opacus' warnings about its own modes
    print(f"{about()}\nOpacus {opacus_version}. One thread. In brackets: times 'no privacy'.\n")
    print(
        f"| network | rows | no privacy, ms | ours | {' | '.join(MODES)} | at most {LIMIT} times "
        "| not slower than Opacus |\n" + "|---" * (6 + len(MODES)) + "|"
    )
    for rows in options.rows:
        if options.classifier:
            model = ModelSettings(name=options.classifier, width=options.width or 16)
            times = median_seconds(steps_of(coloured_case(rows, model)), options.passes)
            print(line(f"{model.name}, width {model.width}", rows, times), flush=True)
            continue
        for name, case in cases(rows).items():
            print(line(name, rows, median_seconds(steps_of(case), options.passes)), flush=True)
        times = median_seconds(joint_steps(rows), options.passes)
        print(line("F, G, D joint", rows, times), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
