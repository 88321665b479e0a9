"""What several configs came to on the same splits and seeds, as one table in three forms.

    row(...)                      a config's runs -> means and standard deviations over seeds
    markdown, csv_text, as_json   rows -> text; cells and notes for the screen

Every number comes from results.json of a run. Final accuracy is the result; the best of all rounds
was chosen on test rows, and every form of the table says so. The plot: compare/plot.py.
"""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from accounting.budget import round_up
from privssl.compare.plot import curve, figure
from privssl.storage import atomic_files

EpsilonKind = Literal["guarantee", "nominal", "none"]
Results: TypeAlias = Mapping[str, Any]  # results.json of a finished run

HEADINGS = (
    *("config", "algorithm", "labels", "rounds", "final test accuracy"),
    *("best test accuracy (chosen on test rows)", "seconds", "bytes up", "bytes down"),
    *("epsilon", "split"),
)


# The table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeanStd:
    """One quantity of a config, a value per seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """The sample standard deviation (n - 1); None for one seed, which says nothing of it."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def text(self, digits: int, unit: float = 1.0) -> str:
        """
        >>> MeanStd((1.0, 3.0)).text(2), MeanStd((1500.0,)).text(1, unit=1000.0)
        ('2.00 ± 1.41', '1.5')
        """
        mean = f"{self.mean / unit:.{digits}f}"
        return mean if self.std is None else f"{mean} ± {self.std / unit:.{digits}f}"


@dataclass(frozen=True)
class Epsilon:
    """What a config may claim: the largest number over its seeds, and of which kind.

    It is that of one run; or, where accounts outlive runs (``lasting``), of all that an account
    had paid for when the run ended.
    """

    kind: EpsilonKind
    value: float | None = None  # >= 0; None when there is neither a guarantee nor a nominal number
    delta: float | None = None  # in (0, 1)
    covers: tuple[str, ...] = ()  # networks; none unless guaranteed
    lasting: bool = False

    def __str__(self) -> str:
        if self.value is None:
            return "none"
        runs = ", all runs of the account so far" if self.lasting else ""
        number = f"{round_up(self.value)} (delta {self.delta:g}{runs})"
        if self.kind == "nominal":
            return f"NOMINAL {number}, no guarantee"
        return f"guarantee {number} for {' '.join(self.covers)}"


@dataclass(frozen=True)
class Row:
    """A config of the comparison. Spreads are over ``seeds``, in that order.

    ``differs`` names the keys for which its split is not that of the first config; empty when
    the split is shared.
    """

    config: str
    algorithm: str
    dataset: str
    seeds: tuple[int, ...]
    labels: int
    rounds: int
    final: MeanStd  # test accuracy in [0, 1] after the last round
    best: MeanStd  # the highest of all evaluated rounds, so chosen on test rows
    seconds: MeanStd  # of all rounds with their evaluation
    up: MeanStd  # bytes from agents to the server
    down: MeanStd  # bytes from the server to agents
    epsilon: Epsilon
    splits: tuple[str, ...]  # split_hash of each seed, which private runs withhold
    differs: tuple[str, ...]
    statuses: tuple[str, ...]
    versions: tuple[Mapping[str, str], ...]  # of each seed: package -> version
    evaluate_every: tuple[int, ...]  # rounds, of each seed


def row(
    config: str,
    runs: Sequence[Results],
    delta: float | None,
    differs: Sequence[str] = (),
    *,
    lasting: bool = False,
    evaluate_every: Sequence[int] = (),
) -> Row:
    """A config's row from results.json of each of its seeds.

    Args:
        config: its name, as in its run folders.
        runs: at least one, all finished, of one config and different seeds.
        delta: of its privacy section; None without one.
        differs: keys for which its splits are not those of the first config.
        lasting: whether its accounts outlive runs (``privacy.ledger``).
        evaluate_every: rounds from one evaluation to the next, of each run; empty: each round.
    """

    def mean_std(section: str, key: str) -> MeanStd:
        return MeanStd(tuple(float(run[section][key]) for run in runs))

    first = runs[0]
    return Row(
        config=config,
        algorithm=first["algorithm"],
        dataset=first["dataset"],
        seeds=tuple(run["seed"] for run in runs),
        labels=first["labels"],
        rounds=first["rounds"],
        final=mean_std("test_accuracy", "final"),
        best=mean_std("test_accuracy", "best"),
        seconds=mean_std("seconds", "total"),
        up=mean_std("bytes", "up"),
        down=mean_std("bytes", "down"),
        epsilon=_epsilon([run["privacy"] for run in runs], delta, lasting),
        splits=tuple(run["split_hash"] for run in runs),
        differs=tuple(differs),
        statuses=tuple(run["status"] for run in runs),
        versions=tuple(run["versions"] for run in runs),
        evaluate_every=tuple(evaluate_every) or (1,) * len(runs),
    )


def _epsilon(privacy: Sequence[Mapping[str, Any]], delta: float | None, lasting: bool) -> Epsilon:
    """The weakest claim of several runs: a mean of bounds would bound nothing."""
    guarantees = [of_run["guarantee"] for of_run in privacy]
    if all(guarantees):
        largest = max(guarantees, key=lambda claim: float(claim["epsilon"]))
        covers = tuple(largest["covers"])
        return Epsilon("guarantee", largest["epsilon"], largest["delta"], covers, lasting)
    nominal = [of_run["nominal_epsilon"] for of_run in privacy]
    if None not in nominal:
        return Epsilon("nominal", max(nominal), delta, lasting=lasting)
    return Epsilon("none")


def cells(of: Row, first: str) -> tuple[str, ...]:
    """A row's texts, in the order of ``HEADINGS``. first: the config that the splits are of."""
    split = f"DIFFERENT from {first}: {', '.join(of.differs)}" if of.differs else "shared"
    return (
        *(of.config, of.algorithm, str(of.labels), str(of.rounds)),
        *(of.final.text(4), of.best.text(4), of.seconds.text(1)),
        *(_in_bytes(of.up), _in_bytes(of.down), str(of.epsilon), split),
    )


def _in_bytes(mean_std: MeanStd) -> str:
    """
    >>> _in_bytes(MeanStd((12_345_678.0,))), _in_bytes(MeanStd((0.0,)))
    ('12.3 MB', '0 B')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if mean_std.mean >= unit:
            return f"{mean_std.text(1, unit)} {name}"
    return f"{mean_std.text(0)} B"


def notes(rows: Sequence[Row]) -> list[str]:
    """The sentences without which the numbers would say more than they should."""
    said = [
        f"Seeds {', '.join(map(str, rows[0].seeds))}: each value is the mean ± the sample standard "
        "deviation (n - 1) over them."
        if len(rows[0].seeds) > 1
        else f"Seed {rows[0].seeds[0]} alone: how much the values vary over seeds is not known.",
        "Final is the accuracy after the last round. Best is the highest of all evaluated "
        "rounds: it was chosen on test rows, so it is too high and is no result.",
        "Seconds are wall time of the rounds with their evaluation; they move with whatever else "
        "the machine did, and the first run pays for what is loaded once. Bytes are of all "
        "messages between the server and the agents.",
    ]
    if len({every for of in rows for every in of.evaluate_every}) > 1:
        often = _distinguish(rows, [[f"every {n}" for n in of.evaluate_every] for of in rows])
        said.append(
            f"run.evaluate_every differs ({often}). Best is chosen among more rounds where they "
            "are evaluated more often, and seconds have more evaluations: compare neither."
        )
    for package in sorted({name for of in rows for known in of.versions for name in known}):
        found = [[known.get(package, "unknown") for known in of.versions] for of in rows]
        if len({version for of_row in found for version in of_row}) > 1:
            said.append(
                f"Versions of {package} differ ({_distinguish(rows, found)}). A difference between "
                "these runs may come from that alone."
            )
    if any(of.epsilon.value is not None and not of.epsilon.lasting for of in rows):
        said.append(
            "An epsilon is that of one run unless it says otherwise, the largest over seeds. A "
            "record that takes part in several of these runs pays for each: whoever publishes "
            "them, or chooses among them, can spend up to their sum."
        )
    if any(of.epsilon.kind == "nominal" for of in rows):
        said.append(
            "NOMINAL: the number of a scheme that guarantees nothing, no rival of a guarantee."
        )
    apart = [of.config for of in rows if of.differs]
    if apart:
        said.append(
            f"{', '.join(apart)}: other rows, labels or agents than {rows[0].config}. A difference "
            "in accuracy may come from the split alone."
        )
    else:
        said.append("All configs had the same split in each seed.")
    return said


def _distinguish(rows: Sequence[Row], values: Sequence[Sequence[str]]) -> str:
    """Which runs have which value, given per row and seed: "2.0: a seed 0, a seed 1; 2.1: ..."."""
    runs: dict[str, list[str]] = {}
    for of, of_row in zip(rows, values, strict=True):
        for seed, value in zip(of.seeds, of_row, strict=True):
            runs.setdefault(value, []).append(f"{of.config} seed {seed}")
    return "; ".join(f"{text}: {', '.join(names)}" for text, names in runs.items())


def markdown(rows: Sequence[Row]) -> str:
    """The table, a second one with a line per run, and the notes."""
    first = rows[0].config
    lines = ["# Comparison", "", *_table(HEADINGS, [cells(of, first) for of in rows]), ""]
    lines += [f"- {note}" for note in notes(rows)]
    runs = [
        (
            *(of.config, str(seed), f"{of.final.values[i]:.4f}", f"{of.best.values[i]:.4f}"),
            *(f"{of.seconds.values[i]:.1f}", of.statuses[i], of.splits[i][:12]),
        )
        for of in rows
        for i, seed in enumerate(of.seeds)
    ]
    headings = ("config", "seed", "final", "best (on test rows)", "seconds", "status", "split")
    lines += ["", "## Each run", "", *_table(headings, runs)]
    return "\n".join(lines) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (headings, ["---"] * len(headings), *rows)]


def csv_text(rows: Sequence[Row]) -> str:
    """A line per config with all digits; what is not known or does not exist is empty."""
    lines = [_csv_line(of) for of in rows]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def _csv_line(of: Row) -> dict[str, object]:
    line: dict[str, object] = {
        "config": of.config,
        "algorithm": of.algorithm,
        "dataset": of.dataset,
        "seeds": " ".join(map(str, of.seeds)),
        "labels": of.labels,
        "rounds": of.rounds,
    }
    for name, mean_std in (
        ("final_test_accuracy", of.final),
        ("best_on_test_rows", of.best),
        ("seconds", of.seconds),
        ("bytes_up", of.up),
        ("bytes_down", of.down),
    ):
        line |= {f"{name}_mean": mean_std.mean, f"{name}_std": mean_std.std}
    return line | {
        "epsilon": of.epsilon.value,
        "epsilon_kind": of.epsilon.kind,
        "delta": of.epsilon.delta,
        "split": "different" if of.differs else "shared",
        "split_differs_in": " ".join(of.differs),
    }


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The table for machines, each quantity with its value of every seed."""

    def mean_std(of: MeanStd) -> dict[str, Any]:
        return {"mean": of.mean, "std": of.std, "values": list(of.values)}

    return {
        "seeds": list(rows[0].seeds),
        "rows": [
            {
                "config": of.config,
                "algorithm": of.algorithm,
                "dataset": of.dataset,
                "labels": of.labels,
                "rounds": of.rounds,
                "final_test_accuracy": mean_std(of.final),
                "best_test_accuracy": {**mean_std(of.best), "chosen_on": "test rows"},
                "seconds": mean_std(of.seconds),
                "bytes": {"up": mean_std(of.up), "down": mean_std(of.down)},
                "privacy": {
                    "kind": of.epsilon.kind,
                    "epsilon": of.epsilon.value,
                    "delta": of.epsilon.delta,
                    "covers": list(of.epsilon.covers),
                    "of": "all runs of the account so far" if of.epsilon.lasting else "one run",
                },
                "split": {
                    "shared": not of.differs,
                    "differs_in": list(of.differs),
                    "hashes": list(of.splits),
                },
                "statuses": list(of.statuses),
            }
            for of in rows
        ],
        "notes": notes(rows),
    }


# The files ----------------------------------------------------------------------------------


def write(folder: Path, rows: Sequence[Row], runs: Mapping[str, Sequence[Path]]) -> None:
    """Write comparison.md, comparison.csv and comparison.png, each whole or not at all.

    Args:
        runs: config -> its run folders.

    Raises:
        RunFolderError: a file cannot be written, or the course of a run cannot be read.
    """
    contents = {"comparison.md": markdown(rows).encode(), "comparison.csv": csv_text(rows).encode()}
    for name, content in contents.items():
        with atomic_files.writing(folder / name):
            atomic_files.replace(folder / name, content)
    drawn = io.BytesIO()
    curves = {name: [curve(run) for run in of] for name, of in runs.items()}
    figure(curves).savefig(drawn, format="png")
    with atomic_files.writing(folder / "comparison.png"):
        atomic_files.replace(folder / "comparison.png", drawn.getvalue())
