"""The figure of a table: test accuracy against rounds, a panel a column and a line a row."""

import hashlib
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from privssl.compare.plot import COLOURS, DASHES
from privssl.reproduce.store import Kept
from privssl.reproduce.table_page import Measurements

ACROSS = 3  # panels
DRAWING = 1  # raise it when figures are drawn in another way
KEY = "Data"  # of the text in a PNG that has the hash of what it shows

Line = tuple[tuple[int, ...], tuple[float, ...]]  # rounds, mean accuracy over seeds


def panels(of: Measurements) -> dict[str, dict[str, Line]]:
    """Column -> row -> line; without cells of a single evaluation."""
    found: dict[str, dict[str, Line]] = {}
    for column in of.table.file.columns:
        for row in of.table.file.rows:
            kept = of.found.get((row.name, column.name))
            line = None if kept is None else _mean_line(kept)
            if line is not None and len(line[0]) > 1:
                found.setdefault(column.name, {})[row.name] = line
    return found


def _mean_line(kept: Kept) -> Line:
    curves = [
        dict(zip(entry["curve"]["round"], entry["curve"]["test_accuracy"], strict=True))
        for entry in kept.shown.values()
    ]
    rounds = tuple(sorted(set.intersection(*(set(curve) for curve in curves))))
    return rounds, tuple(statistics.fmean(curve[n] for curve in curves) for n in rounds)


def data_hash(shown: Mapping[str, Mapping[str, Line]]) -> str:
    """Of everything that a figure shows."""
    return hashlib.sha256(json.dumps([DRAWING, shown]).encode()).hexdigest()


def hash_in(path: Path) -> str | None:
    """That of the figure in a file; None: there is no figure that can be read."""
    try:
        with Image.open(path, formats=("PNG",)) as picture:
            found: str | None = picture.info.get(KEY)
            return found
    except OSError:
        return None


def draw(shown: Mapping[str, Mapping[str, Line]], rows: Sequence[str]) -> bytes:
    """A PNG. rows: all rows of the table, so that each has one colour in every panel."""
    across = min(ACROSS, len(shown))
    down = -(-len(shown) // across)
    named = [row for row in rows if any(row in lines for lines in shown.values())]
    # An entry of the legend takes about 0.075 inches a letter, and half an inch beside them.
    wide = 0.5 + 0.075 * max(map(len, named), default=0)
    columns = max(1, min(4, len(named), int(3.6 * across / wide)))
    height = 2.8 * down + 0.4 + 0.2 * -(-len(named) // columns)
    drawing = Figure(figsize=(3.6 * across, height), dpi=80, layout="constrained")
    FigureCanvasAgg(drawing)
    grid = drawing.subplots(down, across, sharey=True, squeeze=False).flatten()
    handles = {}
    for panel, (column, lines) in zip(grid, shown.items(), strict=False):
        for row, (x, y) in lines.items():
            place = rows.index(row)
            dash = DASHES[place // COLOURS % len(DASHES)]
            (handles[row],) = panel.plot(x, y, color=f"C{place % COLOURS}", ls=dash, lw=1.2)
        panel.set_title(column, fontsize="small")
        panel.grid(alpha=0.25)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    for panel in grid[len(shown) :]:
        panel.set_visible(False)
    for panel in grid[max(len(shown) - across, 0) : len(shown)]:
        panel.set_xlabel("rounds", fontsize="small")
    drawing.supylabel("test accuracy", fontsize="small")
    drawing.legend(
        handles.values(), handles, loc="outside lower center", ncols=columns,
        frameon=False, fontsize="small",
    )  # fmt: skip
    picture = io.BytesIO()
    drawing.savefig(picture, metadata={KEY: data_hash(shown), "Software": None})
    return picture.getvalue()
