"""The runs of a comparison in sequence, and their printed output."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from accounting.errors import AccountingError
from privssl.algorithms import WITH_UNREAD
from privssl.compare import plan
from privssl.compare import table as compare_table
from privssl.compare.paired import differences, explanation, p_heading
from privssl.compare.plan import Planned
from privssl.errors import ConfigError, DataError, UserError
from privssl.experiment import config as configs
from privssl.experiment.config import Config
from privssl.experiment.plugin_names import describe_here
from privssl.experiment.prepare import WITHHELD, prepare
from privssl.reporting.trackers import ProgressTracker, RoundRecord, Tracker
from privssl.runs import launch, run_dir
from privssl.runs.resume import other_file
from privssl.runtime.console import Terminal

WIDTH = 200  # characters of a table in a file or a pipe


def run_all(planned: Sequence[Planned], *, quiet: bool) -> Literal["finished", "interrupted"]:
    """Run all unfinished runs in sequence."""
    with ExitStack() as stack:
        todo = [(number, run) for number, run in enumerate(planned, 1) if run.state != "finished"]
        progress = None
        if todo and not quiet:
            total = sum(run.rounds for _, run in todo)
            progress = stack.enter_context(closing(ProgressTracker(total)))
        for number, run in todo:
            try:
                status = _run_config(run, progress, f"run {number}/{len(planned)} {run.title}, ")
            except (UserError, AccountingError) as problem:
                raise ConfigError(
                    f"{run.title}: {problem}\nRun {number} of {len(planned)}; those before it are "
                    "kept. Once this is corrected the same command continues."
                ) from problem
            if status == "interrupted":
                return "interrupted"
    return "finished"


class _RunProgress(Tracker):
    """One run's rounds within the progress of all runs."""

    def __init__(self, progress: ProgressTracker) -> None:
        self._progress = progress

    def round(self, record: RoundRecord) -> None:
        self._progress.round(record)


def _run_config(run: Planned, progress: ProgressTracker | None, title: str) -> str:
    """Run one config like ``train``; return the status of its results.json."""
    settings = dataclasses.replace(run.config.run, overwrite=run.state == "stale")
    prepared = prepare(dataclasses.replace(run.config, run=settings))
    if prepared.federated_data.manifest.hash != run.split:
        raise DataError("its data set was changed since the comparison began. Put it back")

    def make_trackers(after: int | None) -> list[Tracker]:
        if progress is None:
            return []
        progress.begin(title, after or 0, nominal=prepared.is_nominal)
        return [_RunProgress(progress)]

    with ExitStack() as stack:
        resume_folder = run.config.folder if run.state == "begun" else None
        return str(
            _read_results(launch.launch(prepared, resume_folder, make_trackers, stack))["status"]
        )


def _read_results(folder: Path) -> compare_table.Results:
    outcome = run_dir.read_outcome(folder)
    assert outcome is not None  # every ended run has written it
    return outcome[0]


def _widen_console(console: Console) -> Console:
    """Return a console for tables: files and pipes have no width."""
    if console.is_terminal:
        return console
    return Terminal(stderr=console.stderr, highlight=False, soft_wrap=True, width=WIDTH)


def overview(
    planned: Sequence[Planned], differs: Mapping[str, Sequence[str]], console: Console
) -> None:
    """Print a line per run, in execution order (--dry-run)."""
    words = {"new": "start", "stale": "start again", "begun": "resume", "finished": "nothing: done"}
    table = Table("run", Column("folder", overflow="fold"), "rounds", "split", "would do")
    for run in planned:
        split = WITHHELD if run.config.privacy else run.split[:12]
        split += " (different)" if differs[run.name] else ""
        table.add_row(
            run.title, str(run.config.folder), str(run.rounds), split, words[run.state]
        )  # fmt: skip
    _widen_console(console).print(table)


def _read_interval(folder: Path) -> int:
    config = configs.load_config(folder / "config.yaml", algorithms=WITH_UNREAD)
    return config.run.evaluate_every


def rows_of(
    planned: Sequence[Planned], differs: Mapping[str, Sequence[str]]
) -> list[compare_table.Row]:
    """Return a row of the table for each config, from the folders of its finished runs.

    ``run.evaluate_every`` is taken from the runs: it changes no result, so the config may differ.
    """
    rows = []
    for name, group in plan.by_name(planned).items():
        privacy, folders = group[0].config.privacy, [run.config.folder for run in group]
        runs, intervals = tuple(map(_read_results, folders)), tuple(map(_read_interval, folders))
        delta, lasting = (privacy.delta, bool(privacy.ledger)) if privacy else (None, False)
        epsilon = compare_table.epsilon_of(runs, delta, lasting=lasting)
        code_notes = tuple(_find_changed_plugins(group))
        rows.append(
            compare_table.Row(
                name, runs, epsilon, tuple(differs[name]), intervals, code_notes,
                splits=tuple(run.split for run in group),
                accounts=str(Path(privacy.ledger).expanduser().resolve()) if privacy else "",
                unprotected=_uses_unprotected_rows(group[0].config),
            )
        )  # fmt: skip
    return rows


def _uses_unprotected_rows(config: Config) -> bool:
    """Return whether a private config also uses rows without noise.

    These are unlabelled, validation or sampled test rows.
    """
    data, agents = config.data, config.agents
    learns = WITH_UNREAD[config.algorithm.name].reads_unlabelled
    has_unlabelled = bool(agents.query or agents.mixed)
    return bool((learns and has_unlabelled) or data.validation or data.test)


def _find_changed_plugins(planned: Sequence[Planned]) -> Iterator[str]:
    """Yield a sentence for each plug-in that has changed since the runs of a config."""
    plugins = describe_here(planned[0].config)
    for key, plugin in plugins.items():
        runs = [
            run.title
            for run in planned
            if _is_changed_plugin(_read_results(run.config.folder), key, plugin)
        ]
        if runs:
            yield (
                f"{', '.join(runs)}: made by other code of {key} {plugin['name']} than the one "
                "here. Remove these run folders, or give another --output, to run them again."
            )


def _is_changed_plugin(
    results: compare_table.Results, key: str, plugin: Mapping[str, str | None]
) -> bool:
    recorded = results.get("plugins", {}).get(key, plugin)
    return bool(other_file(recorded, plugin)) or recorded["version"] != plugin["version"]


def report(rows: Sequence[compare_table.Row], output: Path, console: Console) -> None:
    """Print the columns that fit a narrow screen, and the notes."""
    headings = ("config", "final test accuracy", "seconds", "bytes up", "bytes down", "epsilon")
    table = Table(*(Column(heading, overflow="fold") for heading in headings), box=SIMPLE)
    for row in rows:
        cells = compare_table.cells(row, rows[0].config)
        texts = dict(zip(compare_table.HEADINGS, cells, strict=True))
        table.add_row(*(texts[heading] for heading in headings))
    _widen_console(console).print(table)
    for note in compare_table.notes(rows):
        console.print(note, markup=False)
    results = differences(rows)
    for result in results:
        p = f"{p_heading(results)} {result.p_text()}"
        text = f"Difference {result.config} - {result.first}: {result.interval()}, {p}"
        console.print(text, markup=False)
    if results:
        console.print(explanation(results), markup=False)
    console.print(
        f"The whole table and the plot are in {output}: comparison.md, .csv, .tex, .png, .pdf; "
        "runs.csv",
        markup=False,
    )
