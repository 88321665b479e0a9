"""A small private run of an algorithm, with its ledgers and its audit."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accounting.ledger import read_journal
from privssl.algorithms.base import Algorithm
from privssl.api.datasets import Dataset
from privssl.api.experiment import train
from privssl.runtime import plugins
from privssl.testing.federations import SHAPES, toy_rows

NAME = "the-algorithm-under-test"
DP_SGD: Mapping[str, Any] = {"privacy.sample_rate": 0.5, "privacy.steps": 2}


def check_private_run(
    kind: type[Algorithm[Any]], form: str, private: Mapping[str, Any]
) -> str | None:
    """What is wrong with a private run of two support and two query agents; None: nothing.

    Args:
        form: of the toy rows: image, vector or sequence.
        private: keys of the run, as ``{"privacy.steps": 2}``.
    """
    own = kind.__module__.partition(".")[0] != "privssl"
    name = NAME if own else kind.Config.__dataclass_fields__["name"].default
    census = kind.mechanism == "census"
    config = {
        "run": {"workers": 1},
        "data": {"labelled": 40, "unlabelled": 60},
        "agents": {"support": 2, "query": 2},
        "model": {"name": SHAPES[form][1], "width": 4},
        "algorithm": {"name": name, **({} if census else {"rounds": 3})},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
    }
    given = {**({} if census else DP_SGD), **private}
    with tempfile.TemporaryDirectory() as folder, plugins.provided("algorithms", name, kind):
        run = train(config, given, Dataset(toy_rows(form)), output=Path(folder) / "run")
        ledgers = sorted((run.folder / "ledger").glob("*.jsonl"))
        visits = {path.stem: len(read_journal(path).visits) for path in ledgers}
        verdict = run.audit()
    if sorted(visits) != ["s0", "s1"] or not all(visits.values()):
        return f"support agents were charged {visits}: labelled rows are read in charged visits"
    if verdict["verdict"] != "consistent":
        return f"the audit says {verdict['verdict']}: {verdict['problems'] or verdict['doubts']}"
    return None
