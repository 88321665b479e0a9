"""Milliseconds of CPU per training step of each classifier, in float32 and in bfloat16.

    python -m benchmarks.precision

One thread; a step is forward, backward and SGD on random rows, as the round loop does it (rows in
channels-last). Ratios hold within one run of the command: read those, not the milliseconds.
"""

import platform
import sys
import time

import torch
from torch.nn.functional import cross_entropy

from privssl.learn import network_input
from privssl.models import build_classifier
from privssl.models.precision import Precision
from privssl.process import keep_freed_memory
from privssl.settings import ModelSettings

CASES: list[tuple[ModelSettings, tuple[int, int, int], int]] = [
    (ModelSettings("small_cnn", 16, "group"), (1, 28, 28), 10),
    (ModelSettings("small_cnn", 16, "group"), (1, 28, 28), 64),
    (ModelSettings("lenet", 16, "none"), (1, 28, 28), 32),
    (ModelSettings("trinet_cnn", 16, "none"), (1, 28, 28), 50),
    (ModelSettings("resnet9", 2, "none"), (3, 32, 32), 10),
    (ModelSettings("resnet9", 2, "none"), (3, 32, 32), 100),
    (ModelSettings("resnet9", 4, "none"), (3, 32, 32), 100),
]
WARM, STEPS = 5, 40


def milliseconds(
    model: ModelSettings, shape: tuple[int, int, int], rows: int, precision: Precision
) -> float:
    """CPU time of a step, by the clock of this process."""
    network = build_classifier(model, shape, 10, precision).train()
    x = network_input(torch.randint(256, (rows, *shape), dtype=torch.uint8))
    y = torch.randint(10, (rows,))
    sgd = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    for step in range(WARM + STEPS):
        if step == WARM:
            begun = time.process_time()
        sgd.zero_grad()
        cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    return (time.process_time() - begun) / STEPS * 1e3


def main() -> int:
    """Prints a Markdown table."""
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread\n")
    print(
        "| network | width | rows | float32, ms | bfloat16, ms | times |\n|---|---|---|---|---|---|"
    )
    for model, shape, rows in CASES:
        wide = milliseconds(model, shape, rows, "float32")
        thin = milliseconds(model, shape, rows, "bfloat16")
        told = f"{wide:.1f} | {thin:.1f} | {wide / thin:.2f}"
        print(f"| {model.name} | {model.width} | {rows} | {told} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
