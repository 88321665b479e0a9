"""Milliseconds of CPU to evaluate 1,000 rows: how rows lie, and how many go in one pass.

    python -m benchmarks.evaluation

One thread; bfloat16 where the processor has instructions for it. ``plain`` is how PyTorch lays
networks out by default; ``privssl.training.evaluation`` lays them out channels-last and takes the
number of rows that is marked. Ratios hold within one run.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.processes import about
from privssl.models import build_classifier
from privssl.ops.precision import Precision, has_instructions
from privssl.runtime.process import tune_malloc
from privssl.settings.schema import ModelSettings
from privssl.training.evaluation import CHUNK, accuracy

CASES: list[tuple[ModelSettings, tuple[int, int, int]]] = [
    (ModelSettings("small_cnn", 16, "group"), (1, 28, 28)),
    (ModelSettings("resnet9", 4, "none"), (3, 32, 32)),
]
PASSES = (64, CHUNK, 1000)
ROWS = 2000


def milliseconds(
    model: ModelSettings, shape: tuple[int, int, int], precision: Precision, chunk: int, plain: bool
) -> float:
    """CPU time of 1,000 rows, by the clock of this process."""
    network = build_classifier(model, shape, 10, precision)
    x, y = torch.randint(256, (ROWS, *shape), dtype=torch.uint8), torch.randint(10, (ROWS,))
    weights, at = dict(network.state_dict()), torch.device("cpu")
    if plain:
        network.to(memory_format=torch.contiguous_format)
    accuracy(network, weights, x, y, device=at, chunk=chunk)  # warm
    begun = time.process_time()
    accuracy(network, weights, x, y, device=at, chunk=chunk)
    return (time.process_time() - begun) / ROWS * 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a Markdown table."""
    argparse.ArgumentParser(
        prog="benchmarks.evaluation", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(arguments)  # fmt: skip
    torch.set_num_threads(1)
    tune_malloc()
    torch.manual_seed(0)
    print(f"{about()}\nOne thread.\n")
    names = [
        f"{layout}, {n}{' (ours)' * (n == CHUNK and layout == 'channels-last')}"
        for layout in ("plain", "channels-last")
        for n in PASSES
    ]
    print("| network | precision | " + " | ".join(names) + " |\n" + "|---" * 8 + "|")
    precisions: list[Precision] = ["float32"]
    if has_instructions():
        precisions.append("bfloat16")
    for model, shape in CASES:
        for precision in precisions:
            cells = [
                f"{milliseconds(model, shape, precision, chunk, plain):.0f}"
                for plain in (True, False)
                for chunk in PASSES
            ]
            name = f"{model.name}, width {model.width}"
            print(f"| {name} | {precision} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
