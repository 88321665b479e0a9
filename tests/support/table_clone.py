"""A clone with one small table, for the tests of ``privssl.reproduce``; entries may be invented.

Not a test itself.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from privssl.reproduce.runner import Ended, Interrupted, Runner
from privssl.reproduce.store import Store, config_hash
from privssl.reproduce.tables import Cell, Table, load_tables
from privssl.runtime.process import INTERRUPTED
from tests.support.command_line import command
from tests.support.product import PACKAGES, ROOT

CONFIG = """\
data: {name: digits, labelled: 40, unlabelled: 80}
agents: {support: 2, query: 2}
model: {name: small_cnn, width: 4}
algorithm: {name: pseudo, rounds: 4, local_steps: 1, batch_size: 8}
run: {checkpoint_every: 1, images_every: 1000}
"""
TABLE = """\
title: "A small table"
paper: fedssl
place: "Table 9"
priority: 5
seeds: [0, 1]
minutes: 0.1
size: paper
config: configs/tiny.yaml
rows:
  - {name: Supervise, set: {algorithm.name: supervise}}
  - {name: "Pseudo (all)"}
columns:
  - {name: "40 labels, 2 + 2"}
  - {name: "20 labels", set: {data.labelled: 20}, size: reduced, differs: "half the labels"}
paper_values:
  Supervise: [50, 40.25]
  Pseudo (all): [60, null]
orders:
  - {claim: "Pseudo is above Supervise", better: "Pseudo (all)", than: [Supervise]}
"""


@cache
def shipped_tables() -> tuple[Table, ...]:
    """The tables of the repository, read once; no test changes them."""
    return tuple(load_tables(ROOT))


@dataclass(frozen=True)
class Clone:
    """A folder that looks like a clone of the repository."""

    root: Path

    @property
    def tables(self) -> list[Table]:
        return load_tables(self.root)

    @property
    def table(self) -> Table:
        return self.tables[0]

    @property
    def file(self) -> Path:
        return self.root / "configs" / "tables" / "small.yaml"

    @property
    def store(self) -> Store:
        """The store as a new command reads it."""
        return Store(self.root)

    def change(self, old: str, new: str) -> None:
        text = self.file.read_text()
        assert old in text
        self.file.write_text(text.replace(old, new))

    def put(self, row: str, column: str, seed: int, value: float, **changes: Any) -> Path:
        """Write an invented entry."""
        cell = self.table.cell(row, column)
        assert cell is not None
        path = self.store.path(cell, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made_up(self.store, cell, seed, value) | changes))
        return path


def made_up(store: Store, cell: Cell, seed: int, value: float) -> dict[str, Any]:
    """An invented entry for the current config and sources."""
    config = store.config(cell, seed)
    sections = {name: vars(getattr(config, name)) for name in ("run", "data", "agents", "model")}
    return {
        "schema": 1, "table": cell.table, "row": cell.row, "column": cell.column, "seed": seed,
        "size": cell.size, "differs": cell.differs, "metric": "final", "value": value, "rounds": 2,
        "privacy": {"kind": "none", "epsilon": None, "delta": None, "covers": []},
        "seconds": {"wall": 90.0, "cpu": 60.0, "rounds": 50.0},
        "curve": {"round": [1, 2], "test_accuracy": [value / 2, value]},
        "split_hash": f"split {cell.column} {seed}", "config_hash": config_hash(config),
        "sources": store.sources(config),
        "processor": {"name": "P", "family": "1", "model": "2"}, "threads": 1,
        "versions": {"kernels": "torch"},
        "config": {
            **{name: dict(section) for name, section in sections.items()},
            "algorithm": dict(vars(config.algorithm)), "privacy": None,
        },
    }  # fmt: skip


def make_clone(root: Path, table: str = TABLE) -> Clone:
    (root / "configs" / "tables").mkdir(parents=True)
    (root / "docs").mkdir()
    for package in PACKAGES:
        (root / package).symlink_to(ROOT / package)
    (root / "configs" / "tiny.yaml").write_text(CONFIG)
    clone = Clone(root)
    clone.file.write_text(table)
    return clone


def train_here(arguments: Sequence[str], log: Path, lock: int, until: float) -> Ended:
    """Train in this process: as ``runner.train_in_a_process``, without the slow start."""
    begun = time.monotonic()
    outcome = command(*arguments, "--quiet")
    log.write_text(outcome.out + outcome.err)
    stopped = outcome.status == INTERRUPTED
    ended = Ended(outcome.status, stopped, time.monotonic() - begun, 0.5, 100.0)
    if stopped:
        raise Interrupted(ended)
    return ended


def runner(clone: Clone, training: Callable[..., Ended] = train_here, **how: bool) -> Runner:
    return Runner(clone.root, clone.store, train=training, **how)
