"""``--list``: all tables and cells with their state."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from privssl.errors import UserError
from privssl.reproduce.schedule import Wanted
from privssl.reproduce.store import Store
from privssl.reproduce.tables import Cell


def print_states(wanted: Sequence[Wanted], store: Store, console: Console) -> None:
    """A table of cells for each table, the hours that are left, and what the states mean."""
    left = 0.0
    for of in wanted:
        file = of.table.file
        heading = f"{of.table.name}: {file.title} ({file.paper}, {file.place})"
        console.print(heading, style="bold", markup=False)
        drawn = Table(Column("cell", overflow="fold"), "state", "size", "minutes", box=None)
        for cell in of.cells:
            state, missing = _state(store, cell, of.seeds)
            left += missing * cell.minutes
            drawn.add_row(cell.title, state, cell.size, f"{cell.minutes:g}")
        console.print(drawn, markup=False)
    console.print(
        f"Left: about {left / 60:.1f} hours on one core.\n"
        "State: seeds measured; old: the method's code or config has changed since; missing: not "
        "measured; absent: the data are not at hand. Minutes: of one seed.",
        markup=False,
    )


def _state(store: Store, cell: Cell, seeds: Sequence[int]) -> tuple[str, int]:
    """In words, and how many runs are left."""
    try:
        counts = Counter(store.state(cell, seed) for seed in seeds)
    except UserError as problem:
        return f"wrong: {problem}", 0
    if counts["absent"]:
        return "absent", 0
    parts = [f"measured {counts['measured']} of {len(seeds)} seeds"] if counts["measured"] else []
    parts += [f"old {counts['old']}"] if counts["old"] else []
    return ", ".join(parts) or "missing", counts["missing"] + counts["old"]
