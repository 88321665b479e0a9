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
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from PIL import Image

from privssl.compare.plot import COLOURS, DASHES
from privssl.reproduce.store import Kept
from privssl.reproduce.table_page import Measurements

ACROSS = 3  # panels per line
DRAWING = 3  # increase it when the drawing changes
KEY = "Data"  # PNG text field with the hash of the data

#: Quantity of the x-axis -> its label. Entries of former versions have only rounds.
AGAINST = {
    "round": "rounds", "bytes": "bytes, up and down", "seconds": "CPU seconds (of a GPU: seconds)"
}  # fmt: skip

Line = tuple[tuple[float, ...], tuple[float, ...]]  # means over seeds: of x, of the accuracy
Panels = Mapping[tuple[str, str], Mapping[str, Line]]  # (of AGAINST, column) -> row -> line


def panels(of: Measurements) -> Panels:
    """Collect all lines, without cells of a single evaluation, and without seconds of different
    devices."""
    lines: dict[tuple[str, str], dict[str, Line]] = {}
    for x_axis in AGAINST:
        for column in of.table.file.columns:
            if x_axis == "seconds" and len(of.gpus(column.name)) > 1:
                continue
            for row in of.table.file.rows:
                kept = of.found.get((row.name, column.name))
                line = None if kept is None else _compute_mean_line(kept, x_axis)
                if line is not None and len(line[0]) > 1:
                    lines.setdefault((x_axis, column.name), {})[row.name] = line
    return lines


def _compute_mean_line(kept: Kept, x_axis: str) -> Line | None:
    """Average over seeds; None if an entry does not have the quantity."""
    curves = [_with_cpu_seconds(entry) for entry in kept.shown.values()]
    if any(x_axis not in curve for curve in curves):
        return None
    rounds = sorted(set.intersection(*(set(curve["round"]) for curve in curves)))

    def mean(quantity: str) -> tuple[float, ...]:
        by_round = [dict(zip(curve["round"], curve[quantity], strict=True)) for curve in curves]
        return tuple(statistics.fmean(values[number] for values in by_round) for number in rounds)

    return mean(x_axis), mean("test_accuracy")


def _with_cpu_seconds(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The curve of an entry; of a CPU its seconds are the run's CPU seconds, shared equally among
    its rounds: the clock also counts pauses and other work of the machine."""
    curve: Mapping[str, Any] = entry["curve"]
    if entry.get("gpu") or "seconds" not in curve:
        return curve
    seconds_a_round = entry["seconds"]["cpu"] / entry["rounds"]
    return {**curve, "seconds": [number * seconds_a_round for number in curve["round"]]}


def data_hash(shown: Panels) -> str:
    """Hash the data of a figure."""
    return hashlib.sha256(json.dumps([DRAWING, list(shown.items())]).encode()).hexdigest()


def hash_in(path: Path) -> str | None:
    """Read the hash in a figure's file; None if it is missing or unreadable."""
    try:
        with Image.open(path, formats=("PNG",)) as picture:
            value: str | None = picture.info.get(KEY)
            return value
    except OSError:
        return None


def draw(shown: Panels, rows: Sequence[str]) -> bytes:
    """Draw a PNG. rows: all rows of the table, so that each has the same colour in every panel."""
    kinds = [x_axis for x_axis in AGAINST if any(kind == x_axis for kind, _ in shown)]
    counts = [sum(kind == x_axis for kind, _ in shown) for x_axis in kinds]
    n_columns = min(ACROSS, max(counts))
    row_counts = [-(-count // n_columns) for count in counts]  # lines of panels, by quantity
    n_rows = sum(row_counts)
    labels = [row for row in rows if any(row in lines for lines in shown.values())]
    # A legend entry takes about 0.075 inches per character, plus half an inch.
    legend_width = 0.5 + 0.075 * max(map(len, labels), default=0)
    columns = max(1, min(4, len(labels), int(3.6 * n_columns / legend_width)))
    height = 2.8 * n_rows + 0.4 + 0.2 * -(-len(labels) // columns)
    fig = Figure(figsize=(max(3.6 * n_columns, legend_width), height), dpi=80, layout="constrained")
    FigureCanvasAgg(fig)
    grid = fig.subplots(n_rows, n_columns, sharey=True, squeeze=False).flatten()
    starts = [n_columns * n for n in itertools.accumulate(row_counts, initial=0)]
    handles, next_panel = {}, dict(zip(kinds, starts, strict=False))
    for (kind, column), lines in shown.items():
        panel = grid[next_panel[kind]]
        next_panel[kind] += 1
        for row, (x, y) in lines.items():
            index = rows.index(row)
            dash = DASHES[index // COLOURS % len(DASHES)]
            (handles[row],) = panel.plot(x, y, color=f"C{index % COLOURS}", ls=dash, lw=1.2)
        panel.set_title(column, fontsize="small")
        panel.grid(alpha=0.25)
        panel.set_xlabel(AGAINST[kind], fontsize="small")
        panel.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        if kind == "bytes":
            panel.xaxis.set_major_formatter(EngFormatter(unit="B"))
    for panel in grid:
        panel.set_visible(bool(panel.lines))
    fig.supylabel("test accuracy", fontsize="small")
    fig.legend(
        handles.values(), handles, loc="outside lower center", ncols=columns,
        frameon=False, fontsize="small",
    )  # fmt: skip
    buffer = io.BytesIO()
    fig.savefig(buffer, metadata={KEY: data_hash(shown), "Software": None})
    return buffer.getvalue()
