"""What makes a run meaningless is refused before it, or said at its end and in results.json."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privssl.algorithms import ALGORITHMS
from privssl.errors import ConfigError
from privssl.experiment.config import load_config
from tests.support.command_line import PLAIN, Outcome, assert_refused, command

#: Algorithms that train with batch norm, with keys that let them start.
BATCH_NORM = {
    "supervise": "support", "pseudo": "support", "mixmatch": "support", "fedavg": "support",
    "fedprox": "support", "fixmatch": "support", "uda": "support", "fedsem": "support",
    "fedssl": "support", "server_sl": "labels-at-server", "fedseal": "support", "fedtrinet": "support",
}  # fmt: skip


def written(folder: Path, text: str, name: str = "tiny.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def run(folder: Path, text: str, *arguments: str) -> tuple[Outcome, list[str]]:
    """A run that ends well: what it printed, and the warnings of its results.json."""
    outcome = command(
        written(folder, text), f"run.output={folder / 'run'}", "--quiet", "run.workers=1",
        *arguments,
    )  # fmt: skip
    assert outcome.status == 0, outcome
    results: dict[str, Any] = json.loads((folder / "run" / "results.json").read_text())
    return outcome, list(results["warnings"])


# Batch norm ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BATCH_NORM)
def test_batch_norm_with_batches_of_one_row_is_refused(name: str, tmp_path: Path) -> None:
    labels = BATCH_NORM[name]
    agents = "query: 2" if labels == "labels-at-server" else "support: 2, query: 2"
    path = written(
        tmp_path,
        f"data: {{name: toy, labelled: 100, labels: {labels}}}\nagents: {{{agents}}}\n"
        f"model: {{norm: batch}}\nalgorithm: {{name: {name}}}\n",
    )
    with pytest.raises(ConfigError, match=r"algorithm\.batch_size .*batch norm needs two rows"):
        load_config(path, ["algorithm.batch_size=1"])
    with pytest.raises(ConfigError, match=r"data\.labelled .*single labelled row"):
        load_config(path, [f"data.labelled={1 if 'server' in labels else 2}"])
    # The controls: two rows, and another norm.
    load_config(path, ["algorithm.batch_size=2"])
    if name != "fedseal":  # which needs more rows than one for its own reasons
        load_config(path, ["algorithm.batch_size=1", "model.norm=group"])


def test_every_algorithm_is_in_that_list_or_refuses_batch_norm(tmp_path: Path) -> None:
    for name in set(ALGORITHMS) - set(BATCH_NORM) - {"label_census"}:
        path = written(
            tmp_path,
            "data: {name: toy, labelled: 40}\nagents: {support: 2, query: 2}\n"
            f"model: {{norm: batch}}\nalgorithm: {{name: {name}}}\n",
        )
        with pytest.raises(ConfigError, match=r"model\.norm "):
            load_config(path)
