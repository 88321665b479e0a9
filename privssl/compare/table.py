"""The table of a comparison: one row per config, as Markdown, CSV and JSON.

Every number comes from the results.json of a run. The final accuracy is the result. The best of
all rounds was chosen on test rows, and every form of the table says so.
"""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from accounting.budget import Unit, delta_up, round_up

Results: TypeAlias = Mapping[str, Any]  # results.json of a finished run

HEADINGS = (
    *("config", "algorithm", "labels", "rounds", "final test accuracy"),
    *("best test accuracy (chosen on test rows)", "seconds", "bytes up", "bytes down"),
    *("epsilon", "split"),
)
QUANTITIES = {  # column of comparison.csv -> where results.json has it
    "final_test_accuracy": ("test_accuracy", "final"),
    "best_on_test_rows": ("test_accuracy", "best"),
    "seconds": ("seconds", "total"),
    "bytes_up": ("bytes", "up"),
    "bytes_down": ("bytes", "down"),
}
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


@dataclass(frozen=True)
class MeanStd:
    """One quantity of a config, a value per seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Sample standard deviation (n - 1); None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def text(self, digits: int, unit: float = 1.0) -> str:
        """Format mean and standard deviation.

        >>> MeanStd((1.0, 3.0)).text(2), MeanStd((1500.0,)).text(1, unit=1000.0)
        ('2.00 ± 1.41', '1.5')
        """
        mean = f"{self.mean / unit:.{digits}f}"
        return mean if self.std is None else f"{mean} ± {self.std / unit:.{digits}f}"

    def in_bytes(self) -> str:
        """Format as bytes with a unit.

        >>> MeanStd((12_345_678.0,)).in_bytes(), MeanStd((0.0,)).in_bytes()
        ('12.3 MB', '0 B')
        """
        size, name = next((unit for unit in UNITS if self.mean >= unit[0]), UNITS[-1])
        return f"{self.text(int(size > 1), size)} {name}"

    def as_json(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std, "values": list(self.values)}


@dataclass(frozen=True)
class Epsilon:
    """The weakest guarantee of a config over its seeds; a mean of bounds is not a bound.

    It covers one run or, if accounts outlive runs (``lasting``), all charges of an account until
    the end of the run.
    """

    kind: Literal["guarantee", "nominal", "none"]
    value: float | None = None  # >= 0; None without a guarantee or nominal number
    delta: float | None = None  # in (0, 1)
    covers: tuple[str, ...] = ()  # networks; none unless guaranteed
    lasting: bool = False
    unit: Unit = "record"

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "epsilon": self.value, "delta": self.delta,
            "covers": list(self.covers), "unit": self.unit,
        }  # fmt: skip

    def __str__(self) -> str:
        if self.value is None:
            return "none"
        runs = ", all runs of the account so far" if self.lasting else ""
        number = f"{round_up(self.value)} (delta {delta_up(self.delta or 0.0)}{runs})"
        if self.kind == "nominal":
            return f"NOMINAL {number}, no guarantee"
        unit = " of a person" if self.unit == "person" else ""
        return f"guarantee{unit} {number} for {' '.join(self.covers)}"


@dataclass(frozen=True)
class Row:
    """One config of the comparison."""

    config: str
    runs: tuple[Results, ...]  # one per seed
    epsilon: Epsilon
    differs: tuple[str, ...]  # keys for which its split is not that of the first config
    evaluate_every: tuple[int, ...]  # rounds, of each run
    other_code: tuple[str, ...]  # sentences about plug-ins that changed since the runs
    splits: tuple[str, ...]  # hash of each run's split; not printed
    accounts: str  # folder of accounts that outlive runs; not printed
    unprotected: bool  # whether rows other than labelled ones are used, without noise

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run["seed"] for run in self.runs)

    @cached_property
    def values(self) -> Mapping[str, MeanStd]:
        """Values over the runs, by the names of ``QUANTITIES``."""
        return {
            name: MeanStd(tuple(float(run[section][key]) for run in self.runs))
            for name, (section, key) in QUANTITIES.items()
        }


def epsilon_of(runs: Sequence[Results], delta: float | None, *, lasting: bool = False) -> Epsilon:
    """Return the guarantee of at least one finished run of a config.

    ``delta``: of its privacy section; None without one. ``lasting``: whether its accounts outlive
    runs (``privacy.ledger``).
    """
    privacy = [run["privacy"] for run in runs]
    guarantees = [claim["guarantee"] for claim in privacy]
    nominal = [claim["nominal_epsilon"] for claim in privacy]
    if all(guarantees):
        weakest = max(guarantees, key=lambda claim: float(claim["epsilon"]))
        covers, largest = tuple(weakest["covers"]), max(claim["delta"] for claim in guarantees)
        return Epsilon("guarantee", weakest["epsilon"], largest, covers, lasting, weakest["unit"])
    if None not in nominal:
        return Epsilon("nominal", max(nominal), delta, lasting=lasting)
    return Epsilon("none")


def cells(of: Row, first: str) -> tuple[str, ...]:
    """Format a row in the order of ``HEADINGS``. first: the config to compare splits with."""
    split = f"DIFFERENT from {first}: {', '.join(of.differs)}" if of.differs else "shared"
    labels, rounds = (str(of.runs[0][key]) for key in ("labels", "rounds"))
    final, best, seconds, up, down = of.values.values()
    return (
        *(of.config, of.runs[0]["algorithm"], labels, rounds),
        *(final.text(4), best.text(4), seconds.text(1), up.in_bytes(), down.in_bytes()),
        *(str(of.epsilon), split),
    )


def notes(rows: Sequence[Row]) -> list[str]:
    """Return notes on the limits of the numbers."""
    seeds = rows[0].seeds
    lines = [
        f"Seeds {', '.join(map(str, seeds))}: each value is the mean ± the sample standard "
        "deviation (n - 1) over them."
        if len(seeds) > 1
        else f"Seed {seeds[0]} alone: the variation over seeds is not known.",
        "Final is the accuracy after the last round. Best is the highest of all evaluated "
        "rounds: it was chosen on test rows, so it is too high and is no result.",
        "Seconds are the wall time of the rounds with their evaluation. They depend on the load of "
        "the machine, and the first run also loads the libraries. Bytes are of all messages "
        "between the server and the agents.",
    ]
    if len({interval for row in rows for interval in row.evaluate_every}) > 1:
        intervals = _list_runs_by_value(
            rows, [[f"every {n}" for n in row.evaluate_every] for row in rows]
        )
        lines.append(
            f"run.evaluate_every differs ({intervals}). Best is chosen among more rounds where "
            "they are evaluated more often, and seconds include more evaluations: compare neither."
        )
    for package in sorted({name for row in rows for run in row.runs for name in run["versions"]}):
        versions = [[run["versions"].get(package, "unknown") for run in row.runs] for row in rows]
        if len({version for texts in versions for version in texts}) > 1:
            lines.append(
                f"Versions of {package} differ ({_list_runs_by_value(rows, versions)}). A "
                "difference between these runs may come from that alone."
            )
    lines += [sentence for row in rows for sentence in row.other_code]
    if any(row.epsilon.kind == "guarantee" and not row.epsilon.lasting for row in rows):
        lines.append(
            "An epsilon is that of one run unless it says otherwise, the largest over seeds. A "
            "record that has its label in several of these runs pays for each: whoever publishes "
            "them, or chooses among them, can spend up to their sum, at the sum of their deltas."
        )
    lasting = [row for row in rows if row.epsilon.kind == "guarantee" and row.epsilon.lasting]
    if len({row.accounts for row in lasting}) > 1:
        lines.append(
            "Accounts lie in several folders (privacy.ledger). A record with its label in several "
            "of them pays in each: its epsilons add up, at the sum of their deltas."
        )
    if any(row.epsilon.kind == "nominal" for row in rows):
        lines.append("NOMINAL: the number of a scheme that guarantees nothing.")
    lines += _note_unprotected_splits(rows)
    lines += _note_unprotected_configs(rows)
    warnings: dict[str, list[str]] = {}
    for row in rows:
        for run in row.runs:
            for text in run.get("warnings", ()):  # older runs have none
                warnings.setdefault(text, []).append(f"{row.config} seed {run['seed']}")
    lines += [f"Warning of {', '.join(names)}: {text}" for text, names in warnings.items()]
    different = [row.config for row in rows if row.differs]
    lines.append(
        f"{', '.join(different)}: other rows, labels or agents than {rows[0].config}. A difference "
        "in accuracy may come from the split alone."
        if different
        else "All configs had the same split in each seed."
    )
    return lines


def _note_unprotected_splits(rows: Sequence[Row]) -> list[str]:
    """Note that labelled records of one split may have no noise in another; from public numbers
    alone."""
    claims = [row for row in rows if row.epsilon.kind == "guarantee"]
    splits: dict[str, set[str]] = {}  # by data set
    for row in claims:
        for run, split in zip(row.runs, row.splits, strict=True):
            splits.setdefault(run["dataset"], set()).add(split)
    several = {name for name, hashes in splits.items() if len(hashes) > 1}
    names = [
        row.config
        for row in claims
        if row.unprotected and several & {run["dataset"] for run in row.runs}
    ]
    if not names:
        return []
    return [
        f"{', '.join(names)}: private runs on several splits. A record with its label in one split "
        "may be an unlabelled, validation or test row of another, which no noise protects. For all "
        "runs together it is then bounded by no epsilon above, nor by their sum. Give all runs one "
        "split (data.split)."
    ]


def _note_unprotected_configs(rows: Sequence[Row]) -> list[str]:
    """Note configs that use the rows of private ones without protection; from public names."""
    claims = [row for row in rows if row.epsilon.kind == "guarantee"]
    sets = {run["dataset"] for row in claims for run in row.runs}
    others = [
        row for row in rows if row not in claims and sets & {run["dataset"] for run in row.runs}
    ]
    if not others:
        return []
    return [
        f"{', '.join(row.config for row in others)}: no guarantee, and rows of the same data set "
        f"as {', '.join(row.config for row in claims)}. For a record that both use, whoever sees "
        "what the former release (weights, metrics, this table) is bounded by no epsilon above."
    ]


def _list_runs_by_value(rows: Sequence[Row], values: Sequence[Sequence[str]]) -> str:
    """List runs with each value, given per row and seed: "2.0: a seed 0, a seed 1; 2.1: ..."."""
    runs: dict[str, list[str]] = {}
    for row, texts in zip(rows, values, strict=True):
        for seed, value in zip(row.seeds, texts, strict=True):
            runs.setdefault(value, []).append(f"{row.config} seed {seed}")
    return "; ".join(f"{text}: {', '.join(names)}" for text, names in runs.items())


def markdown(rows: Sequence[Row]) -> str:
    """Return the table, its notes, and a table with a line per run."""
    runs = [
        (
            *(row.config, str(run["seed"])),
            *(f"{run['test_accuracy'][key]:.4f}" for key in ("final", "best")),
            *(f"{run['seconds']['total']:.1f}", run["status"], run["split_hash"][:12]),
        )
        for row in rows
        for run in row.runs
    ]
    headings = ("config", "seed", "final", "best (on test rows)", "seconds", "status", "split")
    return "\n".join(
        [
            *("# Comparison", ""),
            *(*table_lines(HEADINGS, [cells(row, rows[0].config) for row in rows]), ""),
            *(f"- {note}" for note in notes(rows)),
            *("", "## Each run", "", *table_lines(headings, runs), ""),
        ]
    )


def table_lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (headings, ["---"] * len(headings), *rows)]


def csv_text(rows: Sequence[Row]) -> str:
    """Return a line per config with all digits; unknown values are empty."""
    return csv_lines([_row_as_csv(row) for row in rows])


def csv_lines(lines: Sequence[Mapping[str, object]]) -> str:
    """Format at least one line, all with the same columns, as CSV."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def _row_as_csv(row: Row) -> dict[str, object]:
    return {
        "config": row.config,
        **{key: row.runs[0][key] for key in ("algorithm", "dataset")},
        "seeds": " ".join(map(str, row.seeds)),
        **{key: row.runs[0][key] for key in ("labels", "rounds")},
        **{
            f"{name}_{statistic}": getattr(quantity, statistic)
            for name, quantity in row.values.items()
            for statistic in ("mean", "std")
        },
        "epsilon": row.epsilon.value,
        "epsilon_kind": row.epsilon.kind,
        "delta": row.epsilon.delta,
        "split": "different" if row.differs else "shared",
        "split_differs_in": " ".join(row.differs),
    }


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the table as JSON, each quantity with its value of every seed."""
    return {
        "seeds": list(rows[0].seeds),
        "rows": [_row_as_json(row) for row in rows],
        "notes": notes(rows),
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    final, best, seconds, up, down = (quantity.as_json() for quantity in row.values.values())
    return {
        "config": row.config,
        **{key: row.runs[0][key] for key in ("algorithm", "dataset", "labels", "rounds")},
        "final_test_accuracy": final,
        "best_test_accuracy": {**best, "chosen_on": "test rows"},
        "seconds": seconds,
        "bytes": {"up": up, "down": down},
        "privacy": {
            **row.epsilon.as_json(),
            "of": "all runs of the account so far" if row.epsilon.lasting else "one run",
        },
        "split": {
            "shared": not row.differs,
            "differs_in": list(row.differs),
            "hashes": [run["split_hash"] for run in row.runs],
        },
        "statuses": [run["status"] for run in row.runs],
    }
