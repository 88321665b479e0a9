"""A small private run of an algorithm, with its ledgers and its audit."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accounting.ledger import read_journal
from privssl.algorithms.base import Algorithm
from privssl.api.experiment import train
from privssl.runtime import plugins
from privssl.testing.federations import QUICK, SHAPES, toy_rows

NAME = "the-algorithm-under-test"
USUAL: Mapping[str, Any] = {"epsilon": 8.0, "delta": 1e-3}
DP_SGD: Mapping[str, Any] = {"sample_rate": 0.5, "steps": 2}


def check_private_run(
    kind: type[Algorithm[Any]], settings: Mapping[str, Any], privacy: Mapping[str, Any] | None
) -> str | None:
    """What is wrong with a private run of two support and two query agents; None: nothing.

    Args:
        settings: as of ``check_algorithm``.
        privacy: keys of the section beside epsilon and delta; None: small ones.
    """
    from privssl.api.datasets import Dataset

    known = kind.Config.__dataclass_fields__
    quick = {key: value for key, value in (QUICK | dict(settings)).items() if key in known}
    form = settings.get("rows", "image")
    own = kind.__module__.partition(".")[0] != "privssl"
    name = NAME if own else known["name"].default
    given = {} if kind.mechanism == "census" else DP_SGD
    config = {
        "run": {"workers": 1},
        "data": {"labelled": 40, "unlabelled": 60},
        "agents": {"support": 2, "query": 2},
        "model": {"name": SHAPES[form][1], "width": 4},
        "algorithm": {**quick, "name": name},
        "privacy": {**USUAL, **(given if privacy is None else privacy)},
    }
    with tempfile.TemporaryDirectory() as folder, plugins.provided("algorithms", name, kind):
        run = train(config, data=Dataset(toy_rows(form)), output=Path(folder) / "run")
        ledgers = sorted((run.folder / "ledger").glob("*.jsonl"))
        visits = {path.stem: sum(map(len, read_journal(path).visits)) for path in ledgers}
        verdict = run.audit()
    if sorted(visits) != ["s0", "s1"] or not all(visits.values()):
        return f"support agents were charged {visits}: labelled rows are read in charged visits"
    if verdict["verdict"] != "consistent":
        return f"the audit says {verdict['verdict']}: {verdict['problems'] or verdict['doubts']}"
    return None
