"""Milliseconds of a training step of our classifiers, and the share of peak arithmetic they reach.

    python -m benchmarks.hot_loop [--passes 5] [--precisions float32 bfloat16]

The precision is float32, and also bfloat16 if the processor has instructions for it. A step is
forward, backward and SGD. In brackets: its floating-point operations (convolutions and matrix
products, by torch.utils.flop_counter) over its time, against the best rate of square matrix
products in the same precision, measured in the same run.

One thread; CPU time of this process. Cases alternate, ``--passes`` times; a number is the median.
``resnet9`` has rows of 3x32x32, the others of 1x28x28, channels last.
"""

import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.processes import about, at_least, parser_of
from privssl.models import build_classifier
from privssl.ops import dispatch
from privssl.ops.precision import Precision, has_instructions
from privssl.runtime.process import tune_malloc
from privssl.settings.schema import ModelSettings
from privssl.training import optim
from privssl.training.local_training import minimise, network_input

SMALL, RESNET = ModelSettings("small_cnn"), ModelSettings("resnet9", 4, "none")
LENET, TRINET = (ModelSettings(name, norm="none") for name in ("lenet", "trinet_cnn"))
NARROW, FULL = (ModelSettings("resnet9", width, "none") for width in (2, 16))
GREY, COLOUR = (1, 28, 28), (3, 32, 32)
STEPS: list[tuple[ModelSettings, int]] = [
    (SMALL, 10), (SMALL, 32), (SMALL, 64), (SMALL, 128), (LENET, 32), (TRINET, 50), (NARROW, 10),
    (NARROW, 100), (RESNET, 10), (RESNET, 100), (FULL, 10), (FULL, 32),
]  # fmt: skip
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
RATE = 1e-3
SIDES = (512, 1024, 2048)  # of the matrices
ENOUGH = 0.1  # least CPU seconds of one reading
Name = TypeVar("Name", bound=Hashable)


def median_seconds(
    cases: Mapping[Name, Callable[[], object]], passes: int, enough: float = ENOUGH
) -> dict[Name, float]:
    """Return CPU seconds of each call, the cases in turn, after one warm-up call each."""
    readings: dict[Name, list[float]] = {name: [] for name in cases}
    for call in cases.values():
        call()
    for _ in range(passes):
        for name, call in cases.items():
            start, count = time.process_time(), 0
            while time.process_time() - start < enough:
                call()
                count += 1
            readings[name].append((time.process_time() - start) / count)
    return {name: statistics.median(times) for name, times in readings.items()}


def product(side: int, precision: Precision) -> Callable[[], Tensor]:
    """Return a matrix product of 2 side^3 operations."""
    a, b = (torch.randn(side, side).to(getattr(torch, precision)) for _ in range(2))
    return lambda: a @ b


class Step:
    """A training step on rows in memory."""

    def __init__(self, model: ModelSettings, rows: int, precision: Precision) -> None:
        shape = COLOUR if model.name == "resnet9" else GREY
        stored = torch.randint(256, (rows, *shape), dtype=torch.uint8)
        self.x, self.y = network_input(stored), torch.randint(10, (rows,))
        self.network = build_classifier(model, shape, 10, precision).train()
        self.sgd = optim.SGD(self.network.parameters(), lr=RATE, momentum=0.9)

    def __call__(self) -> None:
        minimise(self.sgd, cross_entropy(self.network(self.x), self.y))

    def operations(self) -> int:
        """Count the operations of products and convolutions, forward and backward."""
        counter = FlopCounterMode(display=False)
        with counter, dispatch.disabled():  # the counter sees no other kernels
            self()
        return int(counter.get_total_flops())


def arithmetic(passes: int, precisions: Sequence[Precision]) -> None:
    """Print the table."""
    products = {(p, side): product(side, p) for p in precisions for side in SIDES}
    steps = {(p, index): Step(*case, p) for index, case in enumerate(STEPS) for p in precisions}
    rates = {
        key: 2 * key[1] ** 3 / seconds / 1e9
        for key, seconds in median_seconds(products, passes).items()
    }
    best = {p: max(rates[p, side] for side in SIDES) for p in precisions}
    text = ", ".join(f"{p} {rate:.0f} GFLOP/s" for p, rate in best.items())
    print(f"Matrix products, the best of sides {', '.join(map(str, SIDES))}: {text}\n")
    both = set(PRECISIONS) <= set(precisions)
    columns = [*(f"{p}, ms" for p in precisions), *(["times"] if both else [])]
    print("| network | width | rows | MFLOP | " + " | ".join(columns) + " |")
    print("|---" * (4 + len(columns)) + "|")
    times = median_seconds(steps, passes)
    for index, (model, rows) in enumerate(STEPS):
        count = steps[precisions[0], index].operations() / 1e6
        milliseconds = {p: times[p, index] * 1e3 for p in precisions}
        cells = [f"{ms:.1f} ({count / ms / best[p]:.0%})" for p, ms in milliseconds.items()]
        if both:
            cells.append(f"{milliseconds['float32'] / milliseconds['bfloat16']:.2f}")
        row_start = f"| {model.name} | {model.width} | {rows} | {count:.0f} | "
        print(row_start + " | ".join(cells) + " |", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a Markdown table."""
    default = PRECISIONS if has_instructions() else PRECISIONS[:1]
    parser = parser_of("hot_loop", __doc__)
    parser.add_argument("--passes", type=at_least(1), default=5)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=default)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tune_malloc()
    torch.manual_seed(0)
    print(f"{about()}\nOne thread.\n")
    arithmetic(options.passes, options.precisions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
