"""What a guarantee for a person costs: accuracy on digits whose rows belong to persons.

    python -m benchmarks.persons [--seeds 3]

Persons of five training rows each, drawn at random. Prints one Markdown table: the guarantee for a
record; that for a person; and what a guarantee for a record must be so that it bounds five records
of one person (group privacy). For (epsilon, delta)-DP of a record, five records have 5 epsilon and
a delta of 5 exp(4 epsilon) delta (Dwork and Roth 2014, Theorem 2.2 and its proof for delta > 0).
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import privssl
from privssl.data.datasets import load_dataset
from privssl.settings.schema import DataSettings

CONFIGS = Path(__file__).parents[1] / "configs"
ROWS, EPSILON, DELTA = 5, 8.0, 1e-5  # rows of a person; the guarantee of fedssl_dp.yaml


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.persons")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for_group = {
        "privacy.epsilon": EPSILON / ROWS,
        "privacy.delta": DELTA / (ROWS * math.exp((ROWS - 1) * EPSILON / ROWS)),
    }
    print("| method | guarantee | of | accuracy, mean | of each seed |")
    print("|---|---|---|---|---|")
    for method, config, rows, group, epsilon in (
        ("FedSSL-DP", "fedssl_dp.yaml", 800, for_group, EPSILON),
        ("label census", "label_census.yaml", 100, {"privacy.epsilon": 4.0 / ROWS}, 4.0),
    ):
        person: dict[str, Any] = {"privacy.unit": "person", "data.labelled": rows // ROWS}
        whole = {"privacy.epsilon": epsilon}
        views = {"privacy.views": ROWS} if method == "FedSSL-DP" else {}
        for words, of, settings in (
            (f"epsilon {epsilon:g}", "a record", {**whole, "data.labelled": rows}),
            (f"epsilon {epsilon:g}", "a person", {**whole, **person, **views}),
            (
                f"epsilon {epsilon:g} for {ROWS} records",
                "a person",
                {**group, "data.labelled": rows},
            ),
        ):
            found = [run(config, settings, seed) for seed in range(options.seeds)]
            each = ", ".join(f"{value:.4f}" for value in found)
            print(
                f"| {method} | {words} | {of} | {statistics.mean(found):.4f} | {each} |", flush=True
            )


def run(config: str, settings: Mapping[str, Any], seed: int) -> float:
    """Train once; return the test accuracy after the last round."""
    rows = load_dataset(DataSettings(name="digits"))
    persons = None
    if "privacy.unit" in settings:
        persons = np.random.default_rng(seed).permutation(len(rows.y_train)) // ROWS
    data = privssl.Dataset.from_arrays(
        rows.x_train, rows.y_train, rows.x_test, rows.y_test, persons=persons
    )
    with tempfile.TemporaryDirectory() as folder:
        trained = privssl.train(
            CONFIGS / config, {**settings, "run.seed": seed, "run.workers": 1}, data=data,
            output=Path(folder) / "run",
        )  # fmt: skip
        return float(trained.results["test_accuracy"]["final"])


if __name__ == "__main__":
    main()
