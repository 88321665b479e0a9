"""The committed store of results: ``results/TABLE/CELL/SEED.json``, one entry per run.

Every number of a rendered page comes from here. An entry is old if the method or the config of its
cell has changed since.
"""

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from privssl.compare import plot
from privssl.compare.table import epsilon_of
from privssl.errors import RunFolderError
from privssl.experiment import config as configs
from privssl.experiment.config import Config
from privssl.experiment.later_keys import forget_later_keys
from privssl.experiment.plugin_names import imports_of, plugins_of
from privssl.reproduce.method_sources import sources_hash
from privssl.reproduce.tables import Cell, Table
from privssl.runs import run_dir
from privssl.runs.accounts import read_metrics, to_number
from privssl.runtime.plugins import imports_allowed
from privssl.settings.names import DATA_SETS, encoder_without_path
from privssl.storage import atomic_files

SCHEMA = 1
FINAL = "final"  # the metric that is the accuracy after the last round
#: Config keys with paths of one machine.
_PLACES = {
    "data": ("root", "split"), "run": ("output", "certificate", "keys"), "privacy": ("ledger",),
}  # fmt: skip
#: Those of them that determine rows: their names are stored (``_names_of_rows``).
_ROWS = ("root", "split")
#: Keys that name a file: its name counts, not its folder.
_FILES = {"data": ("columns", "encoder_weights"), "model": ("weights",)}

Entry = Mapping[str, Any]
State = Literal["measured", "old", "missing", "absent"]


@dataclass(frozen=True)
class Measured:
    """Costs of one run of a cell, in addition to its folder."""

    wall: float  # seconds, of the process
    cpu: float  # seconds, of the process and its children
    peak_mb: float  # of the largest process
    origin: Mapping[str, Any]  # commit, dirty, sources, processor, threads; gpu, if any


class Store:
    """The entries in a folder, compared with the current code and configs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._hashes: dict[tuple[str, ...], str] = {}
        self._configs: dict[tuple[str, str], Config] = {}

    def path(self, cell: Cell, seed: int) -> Path:
        return self._root / "results" / cell.table / cell.slug / f"{seed}.json"

    def read(self, cell: Cell, seed: int) -> Entry | None:
        """Read an entry, or None. Raises RunFolderError for a damaged one."""
        path = self.path(cell, seed)
        try:
            entry: Entry = json.loads(path.read_bytes())
            readable = entry["schema"] == SCHEMA
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunFolderError(
                f"{path} is not an entry of the store ({error!r}). Put it back, or remove it and "
                "the cell is run again"
            ) from None
        if not readable:
            raise RunFolderError(f"{path} is of schema {entry['schema']}, not {SCHEMA}")
        return entry

    def state(self, cell: Cell, seed: int) -> State:
        if cell.size == "absent":
            return "absent"
        entry = self.read(cell, seed)
        if entry is None:
            return "missing"
        return "old" if self.why_old(cell, seed, entry) else "measured"

    def config(self, cell: Cell, seed: int) -> Config:
        """Return the current config of a run. Raises ConfigError."""
        config = self._configs.get((cell.table, cell.slug))
        if config is None:
            with imports_allowed():  # the user chose the table
                config = self._configs[cell.table, cell.slug] = cell.load(0)
        return dataclasses.replace(config, run=dataclasses.replace(config.run, seed=seed))

    def why_old(self, cell: Cell, seed: int, entry: Entry) -> str | None:
        """Return what has changed since an entry was measured; None if nothing has."""
        config = _adapt_precision(self.config(cell, seed), entry)
        if entry["metric"] != cell.metric:
            return f"the table asks for {cell.metric}, not {entry['metric']}"
        if entry["config_hash"] != config_hash(config) and (
            changed := changed_keys(entry["config"], config)
        ):
            return f"its config has changed ({', '.join(changed)})"
        if entry["sources"] != self.sources(config):
            return "its method has changed"
        return None

    def sources(self, config: Config) -> str:
        """Return the hash of the code of a config."""
        names = (config.algorithm.name, *(name for _, _, name in plugins_of(config)))
        if names not in self._hashes:
            with imports_of(config):
                self._hashes[names] = sources_hash(config, self._root)
        return self._hashes[names]

    def equal_entry(self, cell: Cell, seed: int) -> Entry | None:
        """Return the entry of another cell that is the same run: code, config, seed and metric."""
        for path in sorted((self._root / "results").glob(f"*/*/{seed}.json")):
            entry: Entry = json.loads(path.read_bytes())
            readable = path != self.path(cell, seed) and entry["schema"] == SCHEMA
            if readable and self._has_rows_of(cell, seed, entry):
                return entry
        return None

    def _has_rows_of(self, cell: Cell, seed: int, entry: Entry) -> bool:
        """Return whether an entry is of this run, with the same file of rows, if any."""
        stored, current = entry["config"]["data"], vars(self.config(cell, seed).data)
        unchanged = self.why_old(cell, seed, entry) is None
        return unchanged and _names_of_rows(stored) == _names_of_rows(current)

    def share(self, cell: Cell, seed: int, entry: Entry) -> Entry:
        """Store the run of another cell for this one too."""
        cell_fields = {"table": cell.table, "row": cell.row, "column": cell.column}
        same_run = entry.get("same_run_as", f"{entry['table']}: {entry['row']}/{entry['column']}")
        shared = {
            **entry, **cell_fields, "size": cell.size, "differs": cell.differs,
            "same_run_as": same_run,
        }  # fmt: skip
        write_public(self.path(cell, seed), as_text(shared))
        return shared

    def forget(self) -> None:
        """Clear cached sources and configs: they may change while a table is run."""
        self._hashes.clear()
        self._configs.clear()

    def write(self, cell: Cell, seed: int, folder: Path, measured: Measured) -> Entry:
        """Store a finished run."""
        entry = _build_entry(cell, seed, folder, measured)
        write_public(self.path(cell, seed), as_text(entry))
        return entry


def write_public(path: Path, data: str | bytes) -> None:
    """Write a file of the clone, which every user of the system may read."""
    with atomic_files.writing(path):
        atomic_files.write(path, data, parents=True)
        path.chmod(0o644)


@dataclass(frozen=True)
class Kept:
    """The entries of a cell by seed; old ones count only without newer ones."""

    entries: Mapping[int, Entry]
    why_old: Mapping[int, str]

    @classmethod
    def of(cls, store: Store, table: Table, cell: Cell) -> "Kept":
        seeds = () if cell.size == "absent" else table.file.seeds
        entries = {s: e for s in seeds if (e := store.read(cell, s)) is not None}
        reasons = {s: store.why_old(cell, s, e) for s, e in entries.items()}
        return cls(entries, {seed: text for seed, text in reasons.items() if text})

    @cached_property
    def shown(self) -> Mapping[int, Entry]:
        new = {seed: entry for seed, entry in self.entries.items() if seed not in self.why_old}
        return new or self.entries

    @property
    def is_old(self) -> bool:
        return any(seed in self.why_old for seed in self.shown)

    @property
    def values(self) -> tuple[float, ...]:
        """Return one number per seed, as fractions."""
        return tuple(entry["value"] for _, entry in sorted(self.shown.items()))

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


def in_float32(config: Config) -> Config:
    """Return the same run with float32 multiplications."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, precision="float32"))


def _adapt_precision(config: Config, entry: Entry) -> Config:
    """Return the current config of an entry, in the entry's precision.

    A float32 run also fills a cell with bfloat16, which only saves time on processors with its
    instructions (``machine.is_bfloat16_emulated``).
    """
    is_float32 = entry["config"]["run"].get("precision", "float32") == "float32"
    return in_float32(config) if is_float32 and config.run.precision == "bfloat16" else config


def config_hash(config: Config) -> str:
    """Hash everything that may change a trained bit, without paths of one machine."""
    return configs.hash_values(_remove_places(configs.result_relevant(config)))


def _remove_places(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections of a config without ``_PLACES``, and with only the names of ``_FILES``."""
    sections = {
        name: section and {
            key: Path(value).name if key in _FILES.get(name, ()) else value
            for key, value in section.items() if key not in _PLACES.get(name, ())
        }
        for name, section in parts.items()
    }  # fmt: skip
    if data := parts.get("data"):
        sections["data"] |= _names_of_rows(data)
        if data.get("encoder"):
            sections["data"]["encoder"] = encoder_without_path(data["encoder"])
    return sections


def _names_of_rows(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of split.json and of the data set's file or folder, as in the table.

    A path in the clone, or the base name of one elsewhere.
    """
    built_in = data["name"] in DATA_SETS and data["name"] not in ("npz", "csv", "image_folder")
    values = {key: data.get(key) for key in _ROWS if not (key == "root" and built_in)}
    return {
        key: Path(text).name if text.startswith(("/", "~")) else text
        for key, text in values.items() if text
    }  # fmt: skip


def changed_keys(then: Mapping[str, Any], now: Config) -> list[str]:
    """Return keys of a stored config whose value differs from the current one.

    A key that did not exist then must have its default, because defaults of new keys keep former
    behaviour.
    """
    changed = []
    current = _remove_places(configs.result_relevant(now))
    former = {name: then.get(name) and dict(then[name]) for name in current}
    forget_later_keys(former)  # as ``result_relevant`` does: null may have another name today
    for name, section in current.items():
        stored = former[name]
        if (stored is None) != (section is None):
            changed.append(name)
        elif section is not None and stored is not None:
            section_type = getattr(now, name)
            defaults = {spec.name: spec.default for spec in dataclasses.fields(section_type)}
            changed += _find_changed_rows(stored, section) if name == "data" else []
            for key, value in section.items():
                if key in _ROWS:
                    continue
                if _as_json(stored.get(key, defaults.get(key))) != _as_json(value):
                    changed.append(f"{name}.{key}")
    return changed


def _find_changed_rows(stored: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[str]:
    """Yield keys of rows that differ. Entries without a recorded root may have had any."""
    names = _names_of_rows(stored)
    for key in _ROWS:
        if names.get(key) != current.get(key) and (key == "split" or key in names):
            yield f"data.{key}"


def _as_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=list)


def _build_entry(cell: Cell, seed: int, folder: Path, measured: Measured) -> dict[str, Any]:
    """Return the stored data of a finished run, in writing order."""
    outcome = run_dir.read_outcome(folder)
    assert outcome is not None  # the caller has checked that the run is finished
    results, metrics = outcome[0], read_metrics(folder)
    # Read without checks: other code than this process's may have written it.
    recorded = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    relevant = {**recorded, "run": {key: recorded["run"][key] for key in ("seed", "precision")}}
    run_curve = plot.curve(folder)
    curve = {
        "round": list(run_curve.rounds),
        "test_accuracy": [round(value, 6) for value in run_curve.accuracy],
        "bytes": [round(value) for value in run_curve.bytes],
        "seconds": [round(value, 1) for value in run_curve.seconds],
    }
    seconds = {
        "wall": round(measured.wall, 1),
        "cpu": round(measured.cpu, 1),
        "rounds": round(results["seconds"]["total"], 1),
    }
    return {
        "schema": SCHEMA,
        "table": cell.table,
        "row": cell.row,
        "column": cell.column,
        "seed": seed,
        "size": cell.size,
        "differs": cell.differs,
        "metric": cell.metric,
        "value": _read_value(cell.metric, results, metrics, folder),
        "final_test_accuracy": results["test_accuracy"]["final"],
        "status": results["status"],
        "rounds": results["rounds"],
        "algorithm": results["algorithm"],
        "privacy": epsilon_of([results], (recorded["privacy"] or {}).get("delta")).as_json(),
        "bytes": results["bytes"],
        "seconds": seconds,
        "peak_mb": round(measured.peak_mb),
        "curve": curve,
        "split_hash": results["split_hash"],  # withheld in private runs: entries are public
        "config_hash": configs.hash_values(_remove_places(relevant)),
        **measured.origin,
        "versions": results["versions"],
        "config": _remove_places(recorded),
    }


def _read_value(
    metric: str, results: Mapping[str, Any], metrics: Sequence[Mapping[str, str]], folder: Path
) -> float:
    """Return the value of a table: final accuracy, or the last of a column of metrics.csv."""
    if metric == FINAL:
        return float(results["test_accuracy"]["final"])
    values = [to_number(line[metric]) for line in metrics if metric in line]
    if not values or not math.isfinite(values[-1]):
        raise RunFolderError(
            f"{folder / 'metrics.csv'} has no number in its column {metric}, which the table asks "
            "for (metric)"
        )
    return values[-1]


def as_text(entry: Entry) -> str:
    """Format as JSON with one key per line, and lists of numbers or names on one line.

    >>> print(as_text({"a": [1, 2.5], "b": {"c": ["x"]}}), end="")
    {
     "a": [1, 2.5],
     "b": {
      "c": ["x"]
     }
    }
    """
    text = json.dumps(entry, indent=1, ensure_ascii=False, allow_nan=False)

    def join_lines(match: re.Match[str]) -> str:
        return "[" + re.sub(r",\s*\n\s*", ", ", match[1]) + "]"

    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", join_lines, text) + "\n"
