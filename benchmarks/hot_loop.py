"""How close local training is to what the machine can do, and the share that augmentation takes.

    python -m benchmarks.hot_loop [--passes 5] [--precisions float32 bfloat16]

By default in float32, and in bfloat16 where the processor has instructions for it.

First table: milliseconds of a training step (forward, backward, SGD) of our classifiers, and how
many times as fast bfloat16 is as float32. In brackets its floating-point operations (convolutions
and matrix products, as torch.utils.flop_counter counts them) over its time, against the best rate
of square matrix products in the same precision, measured in the same minutes. What keeps a step
from 100 % is everything that is no product: pooling, norms, rectifiers, copies, optimiser, Python.

Second table: the share of a local step (``network_input``, the view, forward, backward, SGD) that
the view takes, where views are made ahead for many batches, as most algorithms have them
(``local_training.views_of``). The project's limit is a tenth.

Third table: what the time of a step goes into, by torch's profiler, which makes small operations
longer than they are: read it for what comes first. ``cell`` is pfl's network, of which
``benchmarks.against_flower_and_pfl`` trains many.

Fourth table: a step of that network, its large layer's steps written out, and kept as rows in
visits of five (``privssl/training/lazy_linear_sgd.py``).

One thread; CPU time of this process, so that other work counts only by what it does to caches and
clock. Cases take turns, ``--passes`` times; a number is the median. ``resnet9`` has rows of
3x32x32, the others of 1x28x28, all as runs lay them out (channels-last).
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cell.work import SHAPE, CellCNN
from benchmarks.processes import about, at_least
from privssl.data.augmentations import view
from privssl.models import build_classifier, optimize_layout
from privssl.ops import dispatch
from privssl.ops.precision import Precision, has_instructions, in_precision
from privssl.runtime.process import tune_malloc
from privssl.settings.schema import ModelSettings
from privssl.training import optim
from privssl.training.lazy_linear_sgd import plain_sgd
from privssl.training.local_training import SEEN_AT_ONCE, minimise, network_input

SMALL, RESNET = ModelSettings("small_cnn"), ModelSettings("resnet9", 4, "none")
LENET, TRINET = (ModelSettings(name, norm="none") for name in ("lenet", "trinet_cnn"))
NARROW, FULL = (ModelSettings("resnet9", width, "none") for width in (2, 16))
GREY, COLOUR = (1, 28, 28), (3, 32, 32)
STEPS: list[tuple[ModelSettings, int]] = [
    (SMALL, 10), (SMALL, 32), (SMALL, 64), (SMALL, 128), (LENET, 32), (TRINET, 50), (NARROW, 10),
    (NARROW, 100), (RESNET, 10), (RESNET, 100), (FULL, 10), (FULL, 32),
]  # fmt: skip
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
#: Name of the view, and what lies under it.
VIEWS = ("weak", "strong", "crop", "fixmatch", "fedmatch", "fedseal")
RATE = 1e-3
VISIT = 5  # steps of an agent of pfl's
SIDES = (512, 1024, 2048)  # of the matrices
ENOUGH = 0.1  # CPU seconds that one reading takes at least
#: What an operation counts as: the first whose words are in its name.
PARTS = {
    "our kernels": ("_FusedConv",),  # convolution, pooling, norm, rectifier as one
    "convolutions": ("convolution",),
    "products": ("aten::mm", "addmm", "bmm", "linear"),
    "pooling": ("pool", "fill_"),  # its gradient is put on zeros
    "norms": ("norm",),
    "rectifiers": ("clamp_min", "threshold"),
    "copies": ("copy_", "contiguous", "clone"),
    "optimiser": ("aten::add_", "aten::mul_", "aten::_foreach"),
}
REST = "rest"

Name = TypeVar("Name", bound=Hashable)


def median_seconds(
    cases: Mapping[Name, Callable[[], object]], passes: int, enough: float = ENOUGH
) -> dict[Name, float]:
    """CPU seconds of each call, the cases in turn. Each is called once before."""
    seen: dict[Name, list[float]] = {name: [] for name in cases}
    for call in cases.values():
        call()
    for _ in range(passes):
        for name, call in cases.items():
            begun, count = time.process_time(), 0
            while time.process_time() - begun < enough:
                call()
                count += 1
            seen[name].append((time.process_time() - begun) / count)
    return {name: statistics.median(times) for name, times in seen.items()}


def product(side: int, precision: Precision) -> Callable[[], Tensor]:
    """A matrix product of 2 side^3 operations."""
    a, b = (torch.randn(side, side).to(getattr(torch, precision)) for _ in range(2))
    return lambda: a @ b


class Step:
    """A training step on rows that are there already."""

    def __init__(
        self, network: nn.Module, shape: tuple[int, int, int], rows: int, sgd: optim.SGD
    ) -> None:
        stored = torch.randint(256, (rows, *shape), dtype=torch.uint8)
        self.x, self.y = network_input(stored), torch.randint(10, (rows,))
        self.network = network.train()
        self.sgd = sgd

    @classmethod
    def of(cls, model: ModelSettings, rows: int, precision: Precision) -> "Step":
        """With one of our classifiers."""
        shape = COLOUR if model.name == "resnet9" else GREY
        network = build_classifier(model, shape, 10, precision)
        sgd = optim.SGD(network.parameters(), lr=RATE, momentum=0.9)
        return cls(network, shape, rows, sgd)

    def __call__(self) -> None:
        minimise(self.sgd, cross_entropy(self.network(self.x), self.y))

    def operations(self) -> int:
        """Of products and convolutions, forward and backward."""
        counter = FlopCounterMode(display=False)
        with counter, dispatch.disabled():  # it sees no others
            self()
        return int(counter.get_total_flops())


def arithmetic(passes: int, precisions: Sequence[Precision]) -> None:
    """The first table."""
    products = {(p, side): product(side, p) for p in precisions for side in SIDES}
    steps = {(p, case): Step.of(*case, p) for case in STEPS for p in precisions}
    rates = {
        key: 2 * key[1] ** 3 / seconds / 1e9
        for key, seconds in median_seconds(products, passes).items()
    }
    best = {p: max(rates[p, side] for side in SIDES) for p in precisions}
    told = ", ".join(f"{p} {rate:.0f} GFLOP/s" for p, rate in best.items())
    print(f"Matrix products, the best of sides {', '.join(map(str, SIDES))}: {told}\n")
    both = set(PRECISIONS) <= set(precisions)
    columns = [*(f"{p}, ms" for p in precisions), *(["times"] if both else [])]
    print("| network | width | rows | MFLOP | " + " | ".join(columns) + " |")
    print("|---" * (4 + len(columns)) + "|")
    times = median_seconds(steps, passes)
    for case in STEPS:
        (model, rows), count = case, steps[precisions[0], case].operations() / 1e6
        taken = {p: times[p, case] * 1e3 for p in precisions}
        cells = [f"{ms:.1f} ({count / ms / best[p]:.0%})" for p, ms in taken.items()]
        if both:
            cells.append(f"{taken['float32'] / taken['bfloat16']:.2f}")
        start = f"| {model.name} | {model.width} | {rows} | {count:.0f} | "
        print(start + " | ".join(cells) + " |", flush=True)


def augmentation(passes: int, precisions: Sequence[Precision]) -> None:
    """The second table."""
    shares_of = " | ".join(f"share, {p}" for p in precisions)
    print(f"\n| view | network | rows | ms of the view | {shares_of} |")
    print("|---" * (4 + len(precisions)) + "|")
    for model, rows in ((SMALL, 10), (SMALL, 32), (RESNET, 10), (RESNET, 100)):
        steps = {p: Step.of(model, rows, p) for p in precisions}
        rng = torch.Generator().manual_seed(0)
        shape = steps[precisions[0]].x.shape[1:]
        stored = torch.randint(256, (SEEN_AT_ONCE // shape.numel(), *shape), dtype=torch.uint8)
        x, of_batch = network_input(stored), rows / len(stored)
        under = "weak" if model.name == "small_cnn" else "crop"
        cases: dict[str, Callable[[], object]] = {p: steps[p] for p in precisions}
        cases["input"] = partial(network_input, stored)
        for name in VIEWS:
            cases[name] = partial(view, name, x, rng, flip=model is not SMALL, under=under)
        times = median_seconds(cases, passes)
        times = {name: t * (1 if name in precisions else of_batch) for name, t in times.items()}
        for name in VIEWS:
            shares = [times[name] / (times[name] + times["input"] + times[p]) for p in precisions]
            cells = " | ".join(f"{share:.0%}" for share in shares)
            on = f"{name} on {under}" if name.startswith("f") else name
            print(
                f"| {on} | {model.name}, width {model.width} | {rows} | {times[name] * 1e3:.2f} "
                f"| {cells} |",
                flush=True,
            )


def whereabouts(precisions: Sequence[Precision]) -> None:
    """The third table."""
    print("\n| network | rows | precision | " + " | ".join([*PARTS, REST]) + " |")
    print("|---" * (4 + len(PARTS)) + "|")
    for precision in precisions:
        steps = {
            f"{m.name}, width {m.width} | {rows}": Step.of(m, rows, precision)
            for m, rows in ((SMALL, 10), (SMALL, 128), (RESNET, 100))
        }
        found = {name: parts(step) for name, step in steps.items()}
        cell = cell_step(precision)
        found["cell | 10"] = parts(partial(visit, cell), steps=20 // VISIT)
        for name, shares in found.items():
            cells = " | ".join(f"{shares[part]:.0%}" for part in [*PARTS, REST])
            print(f"| {name} | {precision} | {cells} |", flush=True)


def cell_step(precision: Precision) -> Step:
    """Of pfl's network, by plain SGD, as pfl has it."""
    network = optimize_layout(in_precision(CellCNN, precision)())
    return Step(network, SHAPE, 10, optim.SGD(network.parameters(), lr=RATE))


def visit(step: Step) -> None:
    """As many steps as an agent of pfl's takes, of which the large layer keeps its own."""
    with plain_sgd(step.network, RATE) as step.sgd:
        for _ in range(VISIT):
            step()


def kept_steps(passes: int, precisions: Sequence[Precision]) -> None:
    """The fourth table."""
    print("\n| cell, 10 rows | written out, ms | kept, ms | times |\n|---|---|---|---|")
    for precision in precisions:
        cases: dict[str, Callable[[], object]] = {
            "out": cell_step(precision), "kept": partial(visit, cell_step(precision)),
        }  # fmt: skip
        times = median_seconds(cases, passes)
        out, kept = times["out"] * 1e3, times["kept"] * 1e3 / VISIT
        print(f"| {precision} | {out:.2f} | {kept:.2f} | {out / kept:.2f} |", flush=True)


def parts(step: Callable[[], object], steps: int = 20) -> dict[str, float]:
    """Which share of a step's time goes into what; they add up to 1."""
    for _ in range(2):  # in a first profile, memory comes from the system anew, page by page
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(steps):
                with record_function("step"):  # its own time is that of Python between operations
                    step()
    spent: Counter[str] = Counter()
    for entry in seen.key_averages():
        found = (part for part, words in PARTS.items() if any(w in entry.key for w in words))
        spent[next(found, REST)] += entry.self_cpu_time_total
    return {part: spent[part] / spent.total() for part in [*PARTS, REST]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints four Markdown tables."""
    usual = PRECISIONS if has_instructions() else PRECISIONS[:1]
    parser = argparse.ArgumentParser(
        prog="benchmarks.hot_loop", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--passes", type=at_least(1), default=5)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=usual)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tune_malloc()
    torch.manual_seed(0)
    print(f"{about()}\nOne thread.\n")
    arithmetic(options.passes, options.precisions)
    augmentation(options.passes, options.precisions)
    whereabouts(options.precisions)
    kept_steps(options.passes, options.precisions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
