"""The runs of a comparison, carried out one after another, and what is told of them.

    run_all           what is not done yet, each as ``train`` would do it, with a board of progress
    overview          what would be run
    rows_of, report   what came out, from the folders of all runs; compare/table.py has the table

``compare/__main__.py`` is the command. It imports this when its arguments are known to be right,
for this needs torch.
"""

import dataclasses
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table

from accounting.errors import AccountingError
from privssl.compare import plan
from privssl.compare import table as compare_table
from privssl.compare.plan import Planned
from privssl.errors import ConfigError, DataError, UserError
from privssl.experiment import config as configs
from privssl.experiment.prepare import prepare
from privssl.reporting.trackers import Image, RoundRecord
from privssl.runs import launch, run_dir
from privssl.runtime.console import Terminal, ignore_closed_stream

EVERY_S = 10.0  # from one plain line to the next; the first and last round of a run have one
WIDTH = 200  # characters of a table that goes to a file or a pipe

# Running ------------------------------------------------------------------------------------


def run_all(planned: Sequence[Planned], *, quiet: bool) -> Literal["finished", "interrupted"]:
    """Do what is not done yet, one run after another."""
    with ExitStack() as stack:
        progress = None if quiet else stack.enter_context(ComparisonProgress(planned))
        for number, run in enumerate(planned, start=1):
            if run.state == "finished":
                continue
            if progress is not None:
                progress.begin(run, number)
            try:
                status = _run(run, progress)
            except (UserError, AccountingError) as problem:
                told = f"{run.title}: {problem}\nRun {number} of {len(planned)}; those before it"
                raise ConfigError(
                    f"{told} are kept. Once this is mended the same command goes on."
                ) from problem
            if status == "interrupted":
                return "interrupted"
    return "finished"


def _run(run: Planned, progress: "ComparisonProgress | None") -> str:
    """One run, as ``train`` does it; returns the status of its results.json."""
    settings = dataclasses.replace(run.config.run, overwrite=run.state == "stale")
    prepared = prepare(dataclasses.replace(run.config, run=settings))
    if prepared.federated_data.manifest.hash != run.split:
        raise DataError("its data set was changed since the comparison began. Put it back")

    def watchers(after: int | None) -> list[ComparisonProgress]:
        if progress is not None:
            progress.goes_on_after(after or 0)
        return [] if progress is None else [progress]

    begun = run.config.folder if run.state == "begun" else None
    with ExitStack() as stack:
        folder = launch.launch(prepared, begun, watchers, stack)
    outcome = run_dir.read_outcome(folder)
    assert outcome is not None  # execute has just written it
    return str(outcome[0]["status"])


class EtaEstimator:
    """How long the rounds that are left will take: each config's rounds as its rounds took.

    Args:
        rounds: config -> rounds of all its runs that are not finished.
    """

    def __init__(self, rounds: Mapping[str, int]) -> None:
        self.open = Counter(rounds)
        self._seconds: dict[str, list[float]] = {}

    def done(self, name: str, seconds: float | None = None, rounds: int = 1) -> None:
        """Rounds of a config are done; without seconds, in an earlier session."""
        self.open[name] -= rounds
        if seconds is not None:
            self._seconds.setdefault(name, []).append(seconds)

    def left(self) -> float | None:
        """Seconds; a config without a round yet counts as the mean of the others. None: unknown.

        >>> pace = EtaEstimator({"a": 3, "b": 2})
        >>> pace.done("a", 10.0), pace.left()  # 2 rounds of a and 2 of b, at 10 s
        (None, 40.0)
        """
        means = {name: statistics.fmean(of) for name, of in self._seconds.items()}
        if not means:
            return None
        usual = statistics.fmean(means.values())
        return sum(rounds * means.get(name, usual) for name, rounds in self.open.items())


class ComparisonProgress:
    """Progress over all runs, as a tracker of whichever is running: a bar, or now and then a line.

    Args:
        planned: every run.
    """

    def __init__(self, planned: Sequence[Planned]) -> None:
        self._planned = planned
        self._stream = sys.stderr  # standard output may carry the table
        todo = [run for run in planned if run.state != "finished"]
        self._waiting = len(todo)
        rounds: Counter[str] = Counter()
        for run in todo:
            rounds[run.name] += run.rounds
        self._eta, self._total = EtaEstimator(rounds), rounds.total()
        self._printed, self._accuracy = -float("inf"), ""
        self._bar: Progress | None = None

    def __enter__(self) -> "ComparisonProgress":
        if self._stream.isatty() and self._total:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=10),
                TextColumn("{task.fields[left]}"),
            )
            self._bar = Progress(*columns, console=Terminal(file=self._stream))
            self._task = self._bar.add_task("", total=self._total, left="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with ignore_closed_stream(self._stream):
                self._bar.stop()

    def begin(self, run: Planned, number: int) -> None:
        """The next run, the ``number``-th of all."""
        self._run, self._number, self._accuracy = run, number, ""
        self._waiting -= 1
        self._first = 1
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._where()} starts")

    def goes_on_after(self, round_number: int) -> None:
        """The running run has this many rounds from an earlier session."""
        self._first = round_number + 1
        self._eta.done(self._run.name, rounds=round_number)

    def round(self, record: RoundRecord) -> None:
        self._eta.done(self._run.name, record.values["time/round_s"])
        if "test/accuracy" in record.values:
            self._accuracy = f", accuracy {record.values['test/accuracy']:.4f}"
        with ignore_closed_stream(self._stream):
            if self._bar is not None:
                done = self._total - self._eta.open.total()
                note, left = self._note(record), f"{self._left()} left"
                self._bar.update(self._task, completed=done, description=note, left=left)
            elif (
                record.round in (self._first, record.total)
                or time.monotonic() - self._printed >= EVERY_S
            ):
                self._printed = time.monotonic()
                print(f"{self._note(record)}, {self._left()} left", file=self._stream, flush=True)

    def images(self, round_number: int, tag: str, image: Image) -> None:
        """A terminal shows no pictures."""

    def keep(self) -> None:
        """A terminal keeps nothing."""

    def close(self) -> None:
        """The run has ended; the board goes on with the next."""

    def _where(self) -> str:
        return f"run {self._number}/{len(self._planned)} {self._run.title}"

    def _note(self, record: RoundRecord) -> str:
        place = f"{self._where()}, round {record.round}/{record.total}"
        return f"{place}{self._accuracy}; {self._waiting} to come"

    def _left(self) -> timedelta:
        return timedelta(seconds=round(self._eta.left() or 0))


# What is told -------------------------------------------------------------------------------


def _wide(console: Console) -> Console:
    """Where a table goes: a file or a pipe has no width of its own."""
    if console.is_terminal:
        return console
    return Terminal(stderr=console.stderr, highlight=False, soft_wrap=True, width=WIDTH)


def overview(
    planned: Sequence[Planned], differs: Mapping[str, Sequence[str]], console: Console
) -> None:
    """What --dry-run shows: a line per run, in the order in which they would be done."""
    words = {"new": "start", "stale": "start again", "begun": "go on", "finished": "nothing: done"}
    table = Table("run", Column("folder", overflow="fold"), "rounds", "split", "would do")
    for run in planned:
        split = run.split[:12] + (" (different)" if differs[run.name] else "")
        folder = str(run.config.folder)
        table.add_row(run.title, folder, str(run.rounds), split, words[run.state])
    _wide(console).print(table)


def rows_of(
    planned: Sequence[Planned], differs: Mapping[str, Sequence[str]]
) -> list[compare_table.Row]:
    """A row of the table for each config, from the folders of its finished runs."""
    of_configs = []
    for name, of in plan.by_name(planned).items():
        privacy = of[0].config.privacy
        delta, lasting = (None, False) if privacy is None else (privacy.delta, bool(privacy.ledger))
        of_configs.append(
            compare_table.row(
                name, list(_results(of)), delta, differs[name],
                lasting=lasting, evaluate_every=[_evaluate_every(run) for run in of],
            )
        )  # fmt: skip
    return of_configs


def _evaluate_every(run: Planned) -> int:
    """As the run recorded it: the key decides over no result, so the config may have changed."""
    return configs.load_config(run.config.folder / "config.yaml").run.evaluate_every


def _results(of: Sequence[Planned]) -> Iterator[compare_table.Results]:
    for run in of:
        outcome = run_dir.read_outcome(run.config.folder)
        assert outcome is not None  # every run has finished
        # A run is known here by the name that its config has now: run.name may change.
        yield outcome[0]


def report(rows: Sequence[compare_table.Row], output: Path, console: Console) -> None:
    """The part of the table that a narrow screen has room for, and the notes."""
    headings = ("config", "final test accuracy", "seconds", "bytes up", "bytes down", "epsilon")
    table = Table(*(Column(heading, overflow="fold") for heading in headings), box=SIMPLE)
    for row in rows:
        cells = dict(
            zip(compare_table.HEADINGS, compare_table.cells(row, rows[0].config), strict=True)
        )
        table.add_row(*(cells[heading] for heading in headings))
    _wide(console).print(table)
    for note in compare_table.notes(rows):
        console.print(note, markup=False)
    console.print(
        f"The whole table and the plot are in {output}: comparison.md, .csv, .png", markup=False
    )
