"""What a guarantee for a person costs: accuracy on digits whose rows belong to persons.

    python -m benchmarks.persons [--seeds 3]

Persons of a few training rows each, drawn at random. Prints one Markdown table: the guarantee for
a record; that for a person; and the guarantee for a record that bounds k records of one person
(group privacy): (epsilon, delta) of a record are k epsilon and k exp((k - 1) epsilon) delta of k
records (Vadhan 2017, Lemma 2.2).
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
DELTA = 1e-5
#: Method, config, labelled rows, rows of a person, epsilon.
CASES = (
    ("FedSSL-DP", "fedssl_dp.yaml", 800, 2, 8.0),
    ("label census", "label_census.yaml", 100, 5, 4.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.persons")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| method | labelled rows | guarantee | of | accuracy, mean | of each seed |")
    print("|---|---|---|---|---|---|")
    for method, config, rows, k, epsilon in CASES:
        each = epsilon / k
        # Persons have rows of any class, so records are not drawn by class either.
        records: dict[str, Any] = {"data.labelled": rows, "data.stratified": False}
        group = {"privacy.epsilon": each} | records
        person: dict[str, Any] = {"privacy.unit": "person", "data.labelled": rows // k}
        if method == "FedSSL-DP":
            group["privacy.delta"] = DELTA / (k * math.exp((k - 1) * each))
        person["privacy.views" if method == "FedSSL-DP" else "privacy.rows_per_person"] = k
        whole = {"privacy.epsilon": epsilon}
        for words, of, settings in (
            (f"epsilon {epsilon:g}", "a record", whole | records),
            (f"epsilon {epsilon:g}", "a person", whole | person),
            (f"epsilon {each:g} of a record", "a person", group),
        ):
            found = [run(config, settings, k, seed) for seed in range(options.seeds)]
            seeds, mean = ", ".join(f"{value:.4f}" for value in found), statistics.mean(found)
            held = f"{rows} of {rows // k} persons"
            print(f"| {method} | {held} | {words} | {of} | {mean:.4f} | {seeds} |", flush=True)


def run(config: str, settings: Mapping[str, Any], k: int, seed: int) -> float:
    """Train once, with k rows of each person; return the test accuracy after the last round."""
    rows = load_dataset(DataSettings(name="digits"))
    persons = None
    if "privacy.unit" in settings:
        persons = np.random.default_rng(seed).permutation(len(rows.y_train)) // k
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
