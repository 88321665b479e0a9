"""All pages rendered from the store: a page per table, ``docs/results.md``, and blocks of pages.

A block of a page in ``docs/`` or of the README begins with ``<!-- results: TABLE -->`` and ends
with ``<!-- end -->``; the table is between them. ``<!-- results: TABLE link -->`` has a link to the
table's page instead.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from privssl.errors import ConfigError
from privssl.reproduce import figure
from privssl.reproduce.claims import Verdict
from privssl.reproduce.store import Store, write_public
from privssl.reproduce.table_page import (
    GENERATED,
    PAPERS,
    Measurements,
    filled,
    markdown,
    matrix,
    rows_of,
)
from privssl.reproduce.tables import Cell, Table

FOLDER = Path("docs") / "results"
SUMMARY = Path("docs") / "results.md"
OPEN_CLAIMS = FOLDER / "open_claims.md"
LONGEST_PAGE = 200  # lines
#: Number of accuracies in the tables of each paper. "-", for diverged training, does not count.
PRINTED = {"fedssl": 112, "fedseal": 71, "semifl": 80, "fedmatch": 96, "fedtrinet": 108}
QUOTING = ("fedtrinet-readings",)  # its printed numbers are those of Tables I and II
_BLOCK = re.compile(r"(<!-- results: (\S+)( link)? -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Rendered:
    """Files by path in the clone: texts, and figures with the hash of their data."""

    texts: Mapping[Path, str]
    figures: Mapping[Path, Measurements]


def render(tables: Sequence[Table], store: Store, root: Path) -> list[Path]:
    """Write changed pages, and remove pages of former tables; return the written paths."""
    rendered = rendered_pages(tables, store, root)
    written = [path for path, text in rendered.texts.items() if _read_page(root / path) != text]
    for path in written:
        write_public(root / path, rendered.texts[path])
    for path, results in rendered.figures.items():
        panels = figure.panels(results)
        if figure.hash_in(root / path) != figure.data_hash(panels):
            rows = [row.name for row in results.table.file.rows]
            write_public(root / path, figure.draw(panels, rows))
            written.append(path)
    for path in former_pages(rendered, root):
        path.unlink()
    return written


def _read_page(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def former_pages(rendered: Rendered, root: Path) -> list[Path]:
    """List files in the folder of pages that belong to no table."""
    current = {root / path for path in (*rendered.texts, *rendered.figures)}
    return [path for path in sorted((root / FOLDER).glob("*.*")) if path not in current]


def rendered_pages(tables: Sequence[Table], store: Store, root: Path) -> Rendered:
    """Render all pages. Raises ConfigError for too long pages, or a block without a table."""
    by_table = {table.name: Measurements.of(table, store) for table in tables}
    measured = [results for results in by_table.values() if results.found]
    texts = {FOLDER / f"{results.table.name}.md": markdown(results) for results in measured}
    texts |= _render_summary(list(by_table.values()))
    for path, text in texts.items():
        if (lines := text.count("\n")) > LONGEST_PAGE:
            raise ConfigError(
                f"{path} would have {lines} lines, and a page has at most {LONGEST_PAGE}. Divide "
                "its table into two files"
            )
    for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        if path.is_file() and _BLOCK.search(text := path.read_text(encoding="utf-8")):
            name = path.relative_to(root)
            texts[name] = _fill_blocks(text, name, by_table)
    figures = {
        FOLDER / f"{results.table.name}.png": results
        for results in measured
        if figure.panels(results)
    }
    return Rendered(texts, figures)


def _fill_blocks(text: str, path: Path, by_table: Mapping[str, Measurements]) -> str:
    """Return a page with its blocks filled."""

    def fill_block(match: re.Match[str]) -> str:
        begin, name, link, _, end = match.groups()
        if name not in by_table:
            raise ConfigError(f"{path}: {begin.strip()} names no file of configs/tables")
        page = (FOLDER / f"{name}.md").relative_to(path.parent)
        results = by_table[name]
        table = [*matrix(results), ""] if results.found else []
        lines = [_status_of(results, page)] if link else ["", *table, _status_of(results, page), ""]
        return begin + "\n".join(lines) + "\n" + end

    return _BLOCK.sub(fill_block, text)


def _status_of(results: Measurements, page: Path) -> str:
    """Return a link to the page of a table, and the number of cells without an entry."""
    cells = [cell for cell in results.table.cells if cell.size != "absent"]
    if not cells:
        reasons = dict.fromkeys(cell.differs for cell in results.table.cells if cell.differs)
        return filled(f"Cannot be measured: {'; '.join(reasons)}.")
    missing = [cell for cell in cells if not results.kept(cell)]
    minutes = sum(cell.minutes for cell in missing) * len(results.table.file.seeds)
    time = f"{minutes / 60:.0f} hours" if minutes >= 90 else f"{minutes:.0f} minutes"
    total = f" of {len(cells)}" if results.found else ""
    link = f"[Each cell, and what differs]({page})." if results.found else ""
    remaining = f"Not measured yet: {len(missing)}{total} cells, about {time}." if missing else ""
    return f"{link} {remaining}".strip()


def _render_summary(all_results: Sequence[Measurements]) -> dict[Path, str]:
    """Render docs/results.md; open cells go to a separate page if it would be too long."""
    claims = [(results, verdict) for results in all_results for verdict in results.verdicts]
    tested = [(results, verdict) for results, verdict in claims if verdict.answered]
    untested = [(results, verdict) for results, verdict in claims if not verdict.answered]
    head = [
        *(GENERATED, "", "# What holds of what the papers claim", ""),
        "Find here what was measured of each published table, and whether the order of methods "
        "that a paper claims holds.",
        "Each table has a page with seeds, sizes and times. How to run it: "
        "[reproduce.md](reproduce.md).",
        *("", "## Cells", "", *_render_counts(all_results), ""),
        *("## Tables", "", *_render_tables(all_results), ""),
        *("## Claims tested", "", *_render_claims(tested, "results/"), ""),
        "What the answers mean: [reproduce.md](reproduce.md#the-pages).",
        "",
    ]
    tail = ["## Claims not tested", "", *_render_claims(untested, "results/"), ""]
    if len(head) + len(tail) <= LONGEST_PAGE:
        return {SUMMARY: "\n".join(head + tail)}
    link = f"Claims not tested: [{OPEN_CLAIMS.name}](results/{OPEN_CLAIMS.name})."
    page = [GENERATED, "", "# Claims not tested", "", *_render_claims(untested, ""), ""]
    return {SUMMARY: "\n".join([*head, link, ""]), OPEN_CLAIMS: "\n".join(page)}


def _render_claims(claims: Sequence[tuple[Measurements, Verdict]], folder: str) -> list[str]:
    lines = [["table", "claim", "answer", "size", "column by column"]]
    for results, verdict in claims:
        size = ("reduced" if verdict.reduced else "paper") if verdict.answered else ""
        lines.append(
            [_link_to(results, folder), verdict.claim, verdict.in_short, size, verdict.in_words()]
        )
    return rows_of(lines) if claims else ["None."]


def _link_to(results: Measurements, folder: str) -> str:
    table = results.table
    label = f"{table.file.paper}, {table.file.place}" if table.file.paper != "own" else table.name
    return f"[{label}]({folder}{table.name}.md)" if results.found else label


def _render_counts(all_results: Sequence[Measurements]) -> list[str]:
    """For each paper, count its accuracies, and how many of them were measured."""
    lines = [["paper", "printed", "measured at the paper's size", "reduced", "data absent"]]
    total = [0, 0, 0, 0]
    for paper, printed in PRINTED.items():
        sizes = [
            cell.size
            for results in all_results
            if results.table.file.paper == paper
            for cell in printed_accuracies(results.table)
            if results.kept(cell) or cell.size == "absent"
        ]
        row = [printed, *(sizes.count(size) for size in ("paper", "reduced", "absent"))]
        total = [a + b for a, b in zip(total, row, strict=True)]
        lines.append([PAPERS[paper], *map(str, row)])
    return rows_of([*lines, ["all", *map(str, total)]])


def printed_accuracies(table: Table) -> list[Cell]:
    """Return the cells for which a paper prints an accuracy, in the table that prints it."""
    return [
        cell
        for cell in table.cells
        if cell.paper_value is not None
        and table.name not in QUOTING
        and cell.metric.startswith(("final", "test/accuracy"))
    ]


def _render_tables(all_results: Sequence[Measurements]) -> list[str]:
    lines = [
        ["table", "what", "cells measured", "reduced", "claims that hold, at least in the mean"]
    ]
    for results in all_results:
        cells = [cell for cell in results.table.cells if cell.size != "absent"]
        reduced = sum(cell.size == "reduced" for cell in cells if results.kept(cell))
        holding = sum(verdict.answer.startswith("holds") for verdict in results.verdicts)
        claims = f"{holding} of {len(results.verdicts)}" if results.verdicts else ""
        count = f"{len(results.found)} of {len(cells)}"
        lines.append(
            [_link_to(results, "results/"), results.table.file.title, count, str(reduced), claims]
        )
    return rows_of(lines)
