"""The figure of a table: test accuracy against rounds, bytes and seconds.

A panel per column and a line per row.
"""

import hashlib
import io
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from PIL import Image

from privssl.compare.plot import COLOURS, DASHES
from privssl.reproduce.store import Kept
from privssl.reproduce.table_page import Measurements

ACROSS = 3  # panels per line
DRAWING = 2  # increase it when the drawing changes
KEY = "Data"  # PNG text field with the hash of the data

#: Quantity of the x-axis -> its label. Entries of former versions have only rounds.
AGAINST = {"round": "rounds", "bytes": "bytes, up and down", "seconds": "seconds of one process"}

Line = tuple[tuple[float, ...], tuple[float, ...]]  # means over seeds: of x, of the accuracy
Panels = Mapping[tuple[str, str], Mapping[str, Line]]  # (of AGAINST, column) -> row -> line


def panels(of: Measurements) -> Panels:
    """Collect all lines, without cells of a single evaluation, and without seconds of different
    devices."""
    found: dict[tuple[str, str], dict[str, Line]] = {}
    for against in AGAINST:
        for column in of.table.file.columns:
            if against == "seconds" and len(of.gpus(column.name)) > 1:
                continue
            for row in of.table.file.rows:
                kept = of.found.get((row.name, column.name))
                line = None if kept is None else _mean_line(kept, against)
                if line is not None and len(line[0]) > 1:
                    found.setdefault((against, column.name), {})[row.name] = line
    return found


def _mean_line(kept: Kept, against: str) -> Line | None:
    """Average over seeds; None if an entry does not have the quantity."""
    curves = [entry["curve"] for entry in kept.shown.values()]
    if any(against not in curve for curve in curves):
        return None
    rounds = sorted(set.intersection(*(set(curve["round"]) for curve in curves)))

    def mean(quantity: str) -> tuple[float, ...]:
        known = [dict(zip(curve["round"], curve[quantity], strict=True)) for curve in curves]
        return tuple(statistics.fmean(one[number] for one in known) for number in rounds)

    return mean(against), mean("test_accuracy")


def data_hash(shown: Panels) -> str:
    """Hash the data of a figure."""
    return hashlib.sha256(json.dumps([DRAWING, list(shown.items())]).encode()).hexdigest()


def hash_in(path: Path) -> str | None:
    """Read the hash in a figure's file; None if it is missing or unreadable."""
    try:
        with Image.open(path, formats=("PNG",)) as picture:
            found: str | None = picture.info.get(KEY)
            return found
    except OSError:
        return None


def draw(shown: Panels, rows: Sequence[str]) -> bytes:
    """Draw a PNG. rows: all rows of the table, so that each has the same colour in every panel."""
    kinds = [against for against in AGAINST if any(kind == against for kind, _ in shown)]
    counts = [sum(kind == against for kind, _ in shown) for against in kinds]
    across = min(ACROSS, max(counts))
    lines_of = [-(-count // across) for count in counts]  # lines of panels, by quantity
    down = sum(lines_of)
    named = [row for row in rows if any(row in lines for lines in shown.values())]
    # A legend entry takes about 0.075 inches per character, plus half an inch.
    wide = 0.5 + 0.075 * max(map(len, named), default=0)
    columns = max(1, min(4, len(named), int(3.6 * across / wide)))
    height = 2.8 * down + 0.4 + 0.2 * -(-len(named) // columns)
    drawing = Figure(figsize=(max(3.6 * across, wide), height), dpi=80, layout="constrained")
    FigureCanvasAgg(drawing)
    grid = drawing.subplots(down, across, sharey=True, squeeze=False).flatten()
    first = [across * above for above in itertools.accumulate(lines_of, initial=0)]
    handles, free = {}, dict(zip(kinds, first, strict=False))
    for (kind, column), lines in shown.items():
        panel = grid[free[kind]]
        free[kind] += 1
        for row, (x, y) in lines.items():
            place = rows.index(row)
            dash = DASHES[place // COLOURS % len(DASHES)]
            (handles[row],) = panel.plot(x, y, color=f"C{place % COLOURS}", ls=dash, lw=1.2)
        panel.set_title(column, fontsize="small")
        panel.grid(alpha=0.25)
        panel.set_xlabel(AGAINST[kind], fontsize="small")
        panel.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        if kind == "bytes":
            panel.xaxis.set_major_formatter(EngFormatter(unit="B"))
    for panel in grid:
        panel.set_visible(bool(panel.lines))
    drawing.supylabel("test accuracy", fontsize="small")
    drawing.legend(
        handles.values(), handles, loc="outside lower center", ncols=columns,
        frameon=False, fontsize="small",
    )  # fmt: skip
    picture = io.BytesIO()
    drawing.savefig(picture, metadata={KEY: data_hash(shown), "Software": None})
    return picture.getvalue()
