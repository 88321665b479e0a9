"""Check a paper's claimed order of methods against measurements."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from privssl.reproduce.store import Kept
from privssl.reproduce.tables import Cell, Order, Table

#: Best first: a claim over several columns is as good as its worst answer.
ANSWERS = ("holds in every seed", "holds in one seed", "holds in the mean only", "does not hold")
Answer = Literal[
    "holds in every seed", "holds in one seed", "holds in the mean only", "does not hold",
    "not tested yet", "cannot be tested",
]  # fmt: skip
Found = Mapping[tuple[str, str], Kept]  # (row, column) -> measurements


@dataclass(frozen=True)
class ColumnAnswer:
    """The answer to a claim in one column."""

    column: str
    answer: Answer
    numbers: str  # the compared accuracies, in percent
    reduced: bool  # whether one of its cells is smaller than the paper's
    old: bool  # whether it uses an entry of a method that has changed


@dataclass(frozen=True)
class Verdict:
    """The answers to a claim in all its columns."""

    claim: str
    tested: tuple[ColumnAnswer, ...]

    @property
    def answered(self) -> tuple[ColumnAnswer, ...]:
        return tuple(column for column in self.tested if column.answer in ANSWERS)

    @property
    def answer(self) -> Answer:
        """Return the worst answer of all answered columns."""
        if self.answered:
            return max((column.answer for column in self.answered), key=ANSWERS.index)
        untested = any(column.answer == "not tested yet" for column in self.tested)
        return "not tested yet" if untested else "cannot be tested"

    @property
    def in_short(self) -> str:
        """Return the answer over all columns, with the columns in which alone it holds."""
        holds = sum(column.answer != "does not hold" for column in self.answered)
        mixed = self.answer == "does not hold" and holds
        return f"holds in {holds} of {len(self.answered)} columns" if mixed else self.answer

    @property
    def reduced(self) -> bool:
        return any(column.reduced for column in self.answered)

    def in_words(self) -> str:
        """Summarise the answers by columns.

        >>> one = ColumnAnswer("a", "does not hold", "", False, False)
        >>> other = ColumnAnswer("b", "holds in every seed", "", False, False)
        >>> Verdict("x", (one, other)).in_words()
        'does not hold in 1, holds in every seed in 1 of 2 columns'
        """
        counts = dict.fromkeys((*reversed(ANSWERS), "not tested yet", "cannot be tested"), 0)
        for column in self.tested:
            counts[column.answer] += 1
        parts = [f"{answer} in {count}" for answer, count in counts.items() if count]
        columns = f"{len(self.tested)} column{'s' if len(self.tested) > 1 else ''}"
        return f"{', '.join(parts)} of {columns}" if len(self.tested) > 1 else self.answer


def verdicts(table: Table, found: Found) -> list[Verdict]:
    """Answer each claim of a table."""
    return [
        Verdict(order.claim, tuple(_test_order(table, order, found))) for order in table.file.orders
    ]


def _test_order(table: Table, order: Order, results: Found) -> Iterator[ColumnAnswer]:
    names = [column.name for column in table.file.columns]
    for column in names if order.columns == "all" else order.columns:
        rows = (order.better, *order.than)
        yield _test_column(column, rows, {row: table.cell(row, column) for row in rows}, results)


def _test_column(
    column: str, rows: Sequence[str], cells: Mapping[str, Cell | None], results: Found
) -> ColumnAnswer:
    better, *others = rows
    kept = {row: results[row, column] for row in rows if results.get((row, column))}
    reduced = any(cell is not None and cell.size == "reduced" for cell in cells.values())
    old = any(entry.is_old for entry in kept.values())
    absent = [row for row, cell in cells.items() if cell is None or cell.size == "absent"]
    if better in kept:
        answers = {row: _compare(kept[better], kept[row]) for row in others if row in kept}
        if "does not hold" in answers.values() or len(answers) == len(others):
            worst = max(answers.values(), key=ANSWERS.index)
            seeds = len(_find_common_seeds([kept[better], *(kept[row] for row in answers)]))
            numbers = _format_numbers(better, kept, answers)
            return ColumnAnswer(column, worst, f"{numbers}; n = {seeds}", reduced, old)
    missing = [row for row in rows if row not in kept and row not in absent]
    if absent:
        return ColumnAnswer(column, "cannot be tested", f"no {', '.join(absent)}", reduced, old)
    return ColumnAnswer(column, "not tested yet", f"missing: {', '.join(missing)}", reduced, old)


def _find_common_seeds(cells: Sequence[Kept]) -> list[int]:
    """Return the seeds that all of them have."""
    return sorted(set.intersection(*(set(cell.shown) for cell in cells)))


def _compare(better: Kept, other: Kept) -> Answer:
    """Compare on common seeds, or by means if there are none."""
    pairs = [
        (better.shown[seed]["value"], other.shown[seed]["value"])
        for seed in _find_common_seeds([better, other])
    ]
    if pairs and all(a > b for a, b in pairs):
        return "holds in every seed" if len(pairs) > 1 else "holds in one seed"
    means = [fmean(column) for column in zip(*pairs, strict=True)] or [better.mean, other.mean]
    return "holds in the mean only" if means[0] > means[1] else "does not hold"


def _format_numbers(better: str, kept: Mapping[str, Kept], compared: Mapping[str, Answer]) -> str:
    """Format the row that should be above, and the highest of the others."""
    highest = max(compared, key=lambda row: kept[row].mean)
    return f"{100 * kept[better].mean:.2f} against {100 * kept[highest].mean:.2f} ({highest})"
