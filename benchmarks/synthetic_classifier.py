"""Quality of a generator's rows, and test accuracy of a classifier trained on them alone.

    python -m benchmarks.synthetic_classifier RUN [--confidence 0.9] [--count 20000]
        [--steps 2500] [section.key=value]

The generator of a finished run makes the rows, and its released classifier labels them. A new
network of the run's kind trains on them in batches of 64 by Adam, whose rate decays to 0, with the
generator's views and no real row. The classifier of the metrics ``gen/*``, trained on test rows and
independent of G, gives the share of rows in the requested class. Prints one Markdown table.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import privssl
from privssl import models
from privssl.data.augmentations import View
from privssl.data.datasets import load_dataset
from privssl.experiment.config import load_config
from privssl.reporting.generator_quality import TRAINED_ON, train_judge
from privssl.runtime import randomness
from privssl.training.evaluation import score
from privssl.training.local_training import network_input

BATCH, RATE = 64, 2e-3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.synthetic_classifier")
    parser.add_argument("run", type=Path, help="run folder of a run on images or vectors")
    parser.add_argument("--count", type=int, default=20_000, help="number of synthetic rows")
    parser.add_argument("--confidence", type=float, default=0.0, help="as for privssl generate")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("overrides", nargs="*", help="section.key=value, such as data.root")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    run = privssl.open_run(options.run)
    config = load_config(options.run / "config.yaml", options.overrides)
    # The rows stay here.
    x, requested = run.generate(
        options.count, confidence=options.confidence, acknowledge_query_rows=True
    )
    predicted = torch.from_numpy(run.predict(x, probabilities=True)).argmax(dim=1)
    rows = network_input(torch.from_numpy(x))
    with randomness.seeded(randomness.stream(0, 0, "world", "synthetic classifier")):
        network = models.build_classifier(config.model, run.shape, len(run.class_names))
    rng = randomness.stream(0, 0, "world", "synthetic classifier's rows")
    optimiser = torch.optim.Adam(network.parameters(), lr=RATE)
    for step in range(options.steps):
        picked = torch.randint(len(rows), (BATCH,), generator=rng)
        loss = cross_entropy(network(View("mid")(rows[picked], rng)), predicted[picked])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.param_groups[0]["lr"] = RATE * (1 - step / options.steps)
        optimiser.step()
    tests = load_dataset(config.data)
    count = min(TRAINED_ON, len(tests.y_test) * 4 // 5)
    judge = train_judge(
        network_input(tests.x_test[:count]), tests.y_test[:count], len(run.class_names)
    )
    shares = [
        float((predicted == torch.from_numpy(requested)).float().mean()),
        _compute_accuracy(judge, torch.from_numpy(x), torch.from_numpy(requested)),
        _compute_accuracy(judge, tests.x_test[count:], tests.y_test[count:]),
        _compute_accuracy(network, tests.x_test, tests.y_test),
        run.results["test_accuracy"]["final"],
    ]
    print(
        "| rows | confidence | named as asked | right by the judge | the judge on real rows | "
        "on real test rows | the run's classifier |"
    )
    print("|---" * 7 + "|")
    print(
        " | ".join([f"| {options.count}", f"{options.confidence}", *(f"{v:.4f}" for v in shares)])
        + " |"
    )
    return 0


def _compute_accuracy(network: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the network's accuracy on rows (N, *shape) as stored."""
    return score(network, dict(network.state_dict()), x, y, device=torch.device("cpu")).accuracy


if __name__ == "__main__":
    sys.exit(main())
