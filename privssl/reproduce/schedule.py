"""Selection, order and time limit of cells; and ``--list``: all with their state."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Column
from rich.table import Table as Drawn

from privssl.errors import ConfigError, UserError
from privssl.reproduce.machine import is_bfloat16_emulated
from privssl.reproduce.runner import Runner
from privssl.reproduce.store import State, Store
from privssl.reproduce.tables import Cell, Table, matching


@dataclass(frozen=True)
class Wanted:
    """Requested cells of one table, and their seeds."""

    table: Table
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]


def select(tables: Sequence[Table], pattern: str | None, seeds: int | None) -> list[Wanted]:
    """Select the cells that match a pattern, with the first seeds of their tables.

    Raises ConfigError if nothing matches.
    """
    selected = []
    for table in tables:
        cells = table.cells if pattern is None else matching(table.cells, pattern)
        if cells:
            selected.append(Wanted(table, tuple(cells), table.file.seeds[:seeds]))
    if not selected:
        example = tables[0].cells[0].title
        raise ConfigError(
            f"--cells {pattern!r} matches no cell. A cell is called ROW/COLUMN, for example "
            f"{example!r}; --list shows all"
        )
    return selected


def print_states(wanted: Sequence[Wanted], store: Store, console: Console) -> None:
    """Print a table of cells for each table, the remaining hours, and the meaning of states."""
    minutes = 0.0
    for selection in wanted:
        file = selection.table.file
        heading = f"{selection.table.name}: {file.title} ({file.paper}, {file.place})"
        console.print(heading, style="bold", markup=False)
        table = Drawn(Column("cell", overflow="fold"), "state", "size", "minutes", box=None)
        for cell in selection.cells:
            state, missing = _describe_state(store, cell, selection.seeds)
            minutes += missing * cell.minutes
            table.add_row(cell.title, state, cell.size, f"{cell.minutes:g}")
        console.print(table, markup=False)
    console.print(
        f"Left: about {minutes / 60:.1f} hours on one core.\n"
        "State: seeds measured; old: the method's code or config has changed since; missing: not "
        "measured; absent: the data are not at hand. Minutes: of one seed.",
        markup=False,
    )


def _describe_state(store: Store, cell: Cell, seeds: Sequence[int]) -> tuple[str, int]:
    """Return the state in words, and the number of remaining runs."""
    try:
        counts = Counter(store.state(cell, seed) for seed in seeds)
    except UserError as problem:
        return f"wrong: {problem}", 0
    if counts["absent"]:
        return "absent", 0
    parts = [f"measured {counts['measured']} of {len(seeds)} seeds"] if counts["measured"] else []
    parts += [f"old {counts['old']}"] if counts["old"] else []
    return ", ".join(parts) or "missing", counts["missing"] + counts["old"]


def in_order(wanted: Sequence[Wanted], *, by_seed: bool) -> list[tuple[Cell, int]]:
    """Order all runs: table by table, in each of them seed by seed; or seed by seed over all
    tables."""
    runs = [
        (index, cell, seed)
        for selection in wanted
        for index, seed in enumerate(selection.seeds)
        for cell in selection.cells
    ]
    if by_seed:
        runs.sort(key=lambda run: run[0])  # stable: within a seed, tables keep their order
    return [(cell, seed) for _, cell, seed in runs]


def run_all(
    wanted: Sequence[Wanted], store: Store, runner: Runner, console: Console, until: float,
    *, by_seed: bool,
) -> int:  # fmt: skip
    """Run missing cells, then old ones; return the exit status.

    A cell that fails is reported and skipped. A named table with an invalid config fails before the
    first run.
    """
    states: list[tuple[Cell, int, State]] = []
    failed = busy = done = 0
    broken: set[tuple[str, str]] = set()
    for cell, seed in in_order(wanted, by_seed=by_seed):
        try:
            if not by_seed and cell.size != "absent":  # of named tables: quick to check
                store.config(cell, seed)
            states.append((cell, seed, store.state(cell, seed)))
        except UserError as problem:
            if (cell.table, cell.slug) not in broken:
                console.print(f"Left out: {problem}", markup=False)
            broken.add((cell.table, cell.slug))
            failed += 1
    todo = [
        (cell, seed) for state in ("missing", "old") for cell, seed, is_ in states if is_ == state
    ]
    for number, (cell, seed) in enumerate(todo, 1):
        if time.monotonic() >= until:
            return _report_time_up(console, len(todo) - number + 1)
        title = f"[{number}/{len(todo)}] {cell.table}: {cell.title}, seed {seed}"
        console.print(f"{title} (about {cell.minutes:g} min)", markup=False)
        try:
            if is_bfloat16_emulated(store.config(cell, seed)):
                console.print("  in float32, for want of bfloat16 instructions", markup=False)
            ended = runner.run(cell, seed, until)
        except UserError as problem:
            console.print(str(problem), markup=False)
            failed += 1
            continue
        if ended == "busy":
            console.print("  another process is running it", markup=False)
            busy += 1
        elif ended == "stopped":
            return _report_time_up(console, len(todo) - number + 1)
        else:
            minutes = ended["seconds"]["wall"] / 60
            console.print(f"  {ended['value']:.4f} in {minutes:.1f} min", markup=False)
            done += 1
    parts = [f"{done} measured", f"{failed} failed" if failed else ""]
    parts.append(f"{busy} left to another process" if busy else "")
    console.print(f"At the end: {', '.join(filter(None, parts))}.", markup=False)
    return 1 if failed else 0


def _report_time_up(console: Console, count: int) -> int:
    console.print(f"Time is up; {count} runs are left. The same command continues.", markup=False)
    return 0
