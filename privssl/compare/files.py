"""The files of a comparison: Markdown, CSV, LaTeX, and the plot as PNG and PDF."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from privssl.compare.paired import Difference, differences, explanation, p_heading
from privssl.compare.plot import curve, figure
from privssl.compare.table import Row, cells, csv_lines, csv_text, markdown, notes, table_lines
from privssl.storage import atomic_files

ESCAPES = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "<": r"$<$", ">": r"$>$", **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}  # fmt: skip
FILES = ("comparison.md", "comparison.csv", "runs.csv", "comparison.tex")


def write(
    folder: Path,
    rows: Sequence[Row],
    runs: Mapping[str, Sequence[Path]],
    varied: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write all files, each atomically, the plot last. ``runs`` and ``varied`` are by config: run
    folders, and keys of ``--vary`` with values.

    Raises:
        RunFolderError: a file cannot be written, or the metrics of a run cannot be read.
    """
    results = differences(rows)
    texts = (
        "\n".join([markdown(rows), *paired_section(results)]),
        csv_text(rows), runs_text(rows, varied), latex(rows, results),
    )  # fmt: skip
    for name, text in zip(FILES, texts, strict=True):
        atomic_files.write(folder / name, text)
    claimed = {row.config for row in rows if row.epsilon.kind == "guarantee"}
    fig = figure({n: [curve(run, n in claimed) for run in folders] for n, folders in runs.items()})
    for kind in ("png", "pdf"):
        buffer = io.BytesIO()
        # Embed fonts in a type that publishers accept.
        with mpl.rc_context({"pdf.fonttype": 42}):
            fig.savefig(buffer, format=kind)
        atomic_files.write(folder / f"comparison.{kind}", buffer.getvalue())


def paired_section(results: Sequence[Difference]) -> list[str]:
    """Return the lines of the Markdown table of differences; none without differences."""
    if not results:
        return []
    lines = [(result.config, result.interval(), result.p_text()) for result in results]
    headings = ("config", f"difference from {results[0].first} [95% interval]", p_heading(results))
    table = table_lines(headings, lines)
    return ["## Paired differences", "", *table, "", f"- {explanation(results)}", ""]


def runs_text(rows: Sequence[Row], varied: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a CSV line per run with all digits, and a column for each varied key."""
    return csv_lines(
        [
            {
                **{"config": row.config, "seed": run["seed"]},
                **varied.get(row.config, {}),
                **{key: run[key] for key in ("algorithm", "dataset", "labels", "rounds", "status")},
                "final_test_accuracy": run["test_accuracy"]["final"],
                "best_on_test_rows": run["test_accuracy"]["best"],
                "seconds": run["seconds"]["total"],
                **{f"bytes_{direction}": run["bytes"][direction] for direction in ("up", "down")},
                "epsilon": (run["privacy"]["guarantee"] or {}).get("epsilon"),
                "nominal_epsilon": run["privacy"]["nominal_epsilon"],
                "split_hash": run["split_hash"],
            }
            for row in rows
            for run in row.runs
        ]
    )


def escape(text: str) -> str:
    r"""Escape text for LaTeX.

    >>> print(escape("a_1 ± 5%"))
    a\_1 $\pm$ 5\%
    """
    return re.sub(r"[\\~^±<>&%$#_{}]", lambda sign: ESCAPES[sign[0]], text)


def latex(rows: Sequence[Row], results: Sequence[Difference]) -> str:
    """Return the table in LaTeX with booktabs, a row per config; notes are comments.

    The best accuracy is left out: it was chosen on test rows. ``results``: paired differences from
    the first config.
    """
    headings = ["config", "algorithm", "labels", "rounds", "final test accuracy", "epsilon"]
    by_config = {result.config: result for result in results}
    lines = []
    for row in rows:
        texts = cells(row, rows[0].config)
        line = [*texts[:5], texts[9] + (" (DIFFERENT split)" if row.differs else "")]
        if results:
            result = by_config.get(row.config)
            line += [result.interval(), result.p_text()] if result else ["", ""]
        lines.append(" & ".join(map(escape, line)) + r" \\")
    if results:
        headings += [f"difference from {rows[0].config}", p_heading(results)]
    # A note of several lines would end the comment.
    comments = [f"% {' '.join(note.split())}" for note in notes(rows)]
    return "\n".join(
        [
            *(*comments, r"% \usepackage{booktabs}"),
            r"\begin{tabular}{llrr" + "l" * (len(headings) - 4) + "}",
            *(r"\toprule", " & ".join(map(escape, headings)) + r" \\", r"\midrule"),
            *(*lines, r"\bottomrule", r"\end{tabular}", ""),
        ]
    )
