"""How well a classifier does on real test rows that learned synthetic rows alone.

    python -m benchmarks.synthetic_classifier RUN [--count 20000] [--steps 2500] [section.key=value]

The generator of a finished run makes the rows, and its released classifier names them. A network of
the run's kind, with weights of its own, learns them in batches of 64 by Adam, whose rate falls to
0, in the views that the generator saw. It sees no real row. One Markdown table.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import privssl
from privssl import models
from privssl.data.affine_augment import AUGMENTATIONS
from privssl.data.datasets import load_dataset
from privssl.experiment.config import load_config
from privssl.runtime import randomness
from privssl.training.local_training import network_input

BATCH, RATE = 64, 2e-3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.synthetic_classifier")
    parser.add_argument("run", type=Path, help="a folder that train wrote, of images")
    parser.add_argument("--count", type=int, default=20_000, help="synthetic rows")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("overrides", nargs="*", help="section.key=value, such as data.root")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    run = privssl.open_run(options.run)
    config = load_config(options.run / "config.yaml", options.overrides)
    x, asked = run.generate(options.count)
    names = torch.from_numpy(run.predict(x, probabilities=True)).argmax(dim=1)
    rows = network_input(torch.from_numpy(x))
    with randomness.seeded(randomness.stream(0, 0, "world", "synthetic classifier")):
        network = models.build_classifier(config.model, run.shape, len(run.class_names))
    rng = randomness.stream(0, 0, "world", "synthetic classifier's rows")
    optimiser = torch.optim.Adam(network.parameters(), lr=RATE)
    for step in range(options.steps):
        picked = torch.randint(len(rows), (BATCH,), generator=rng)
        loss = cross_entropy(network(AUGMENTATIONS["mid"](rows[picked], rng)), names[picked])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.param_groups[0]["lr"] = RATE * (1 - step / options.steps)
        optimiser.step()
    tests = load_dataset(config.data)
    network.eval()
    with torch.no_grad():
        found = [
            network(network_input(part)).argmax(dim=1) for part in torch.split(tests.x_test, 1000)
        ]
    right = float((torch.cat(found) == tests.y_test).float().mean())
    named = float((names == torch.from_numpy(asked)).float().mean())
    released = run.results["test_accuracy"]["final"]
    print("| rows | named as asked | on real test rows | the run's classifier |")
    print("|---|---|---|---|")
    print(f"| {options.count} | {named:.4f} | {right:.4f} | {released:.4f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
