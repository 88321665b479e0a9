"""Which cells are run, in which order, until when."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from privssl.errors import ConfigError, UserError
from privssl.reproduce.runner import Runner
from privssl.reproduce.store import State, Store
from privssl.reproduce.tables import Cell, Table, matching


@dataclass(frozen=True)
class Wanted:
    """Cells of one table, and the seeds with which they are wanted."""

    table: Table
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]


def select(tables: Sequence[Table], pattern: str | None, seeds: int | None) -> list[Wanted]:
    """The cells that match a pattern, with the first seeds of their tables. Raises ConfigError:
    nothing matches."""
    found = []
    for table in tables:
        cells = table.cells if pattern is None else matching(table.cells, pattern)
        if cells:
            found.append(Wanted(table, tuple(cells), table.file.seeds[:seeds]))
    if not found:
        example = tables[0].cells[0].title
        raise ConfigError(
            f"--cells {pattern!r} matches no cell. A cell is called ROW/COLUMN, for example "
            f"{example!r}; --list shows all"
        )
    return found


def in_order(wanted: Sequence[Wanted], *, by_seed: bool) -> Iterator[tuple[Cell, int]]:
    """All runs: table by table, in each of them seed by seed; or seed by seed over all tables."""
    if not by_seed:
        for of in wanted:
            for seed in of.seeds:
                yield from ((cell, seed) for cell in of.cells)
        return
    for place in range(max(len(of.seeds) for of in wanted)):
        for of in wanted:
            if place < len(of.seeds):
                yield from ((cell, of.seeds[place]) for cell in of.cells)


def run_all(
    wanted: Sequence[Wanted], store: Store, runner: Runner, console: Console, until: float,
    *, by_seed: bool,
) -> int:  # fmt: skip
    """Run what is missing, then what is old; returns the exit status.

    A cell that fails is told and left out for this call; with a wrong config of a table that was
    named, before the first run.
    """
    order = list(in_order(wanted, by_seed=by_seed))
    states: list[tuple[Cell, int, State]] = []
    failed = busy = done = 0
    broken: set[tuple[str, str]] = set()
    for cell, seed in order:
        try:
            if not by_seed and cell.size != "absent":  # of tables that were named: soon done
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
            return _time_is_up(console, len(todo) - number + 1)
        title = f"[{number}/{len(todo)}] {cell.table}: {cell.title}, seed {seed}"
        console.print(f"{title} (about {cell.minutes:g} min)", markup=False)
        try:
            ended = runner.run(cell, seed, until)
        except UserError as problem:
            console.print(str(problem), markup=False)
            failed += 1
            continue
        if ended == "busy":
            console.print("  another process is running it", markup=False)
            busy += 1
        elif ended == "stopped":
            return _time_is_up(console, len(todo) - number + 1)
        else:
            minutes = ended["seconds"]["wall"] / 60
            console.print(f"  {ended['value']:.4f} in {minutes:.1f} min", markup=False)
            done += 1
    told = [f"{done} measured", f"{failed} failed" if failed else ""]
    told.append(f"{busy} left to another process" if busy else "")
    console.print(f"At the end: {', '.join(filter(None, told))}.", markup=False)
    return 1 if failed else 0


def _time_is_up(console: Console, left: int) -> int:
    console.print(f"Time is up; {left} runs are left. The same command continues.", markup=False)
    return 0
