"""Table files, ``configs/tables/NAME.yaml``: the layout of a published table and its runs."""

import fnmatch
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from privssl.errors import ConfigError
from privssl.experiment.config import Config, load_config
from privssl.settings import yaml_reader
from privssl.settings.error_messages import problem_report, unknown
from privssl.settings.yaml_reader import ConfigProblem, YamlError

#: Keys that a cell may not set, and why.
DECIDED = {
    "run.seed": "the table's seeds decide it",
    "run.output": "a cell's run lies in runs/reproduce",
    "run.overwrite": "the command decides it",
}
LONGEST_SLUG = 60  # characters of a row's or column's name in a file name

Size = Literal["paper", "reduced", "absent"]
Name = Annotated[str, Field(min_length=1)]
Minutes = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Settings = dict[str, Any]  # section.key -> value


class _Entry(BaseModel):
    """Settings that the table, a row, a column or a cell may give to its runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: Name | None = None
    set: Settings = Field(default_factory=dict)
    size: Size | None = None
    differs: Name | None = None
    minutes: Minutes | None = None
    metric: Name | None = None  # "final", or a column of metrics.csv


class Line(_Entry):
    """A row or a column."""

    name: Name


class CellEntry(_Entry):
    """The settings of one cell."""

    row: Name
    column: Name
    skip: bool = False


class Order(BaseModel):
    """A paper's claim about the order of rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    claim: Name
    better: Name
    than: Annotated[tuple[Name, ...], Field(min_length=1)]
    columns: Literal["all"] | tuple[Name, ...] = "all"


class TableFile(_Entry):
    """The content of a table file."""

    title: Name
    paper: Literal["fedssl", "fedseal", "semifl", "fedmatch", "fedtrinet", "own"]
    place: Name
    priority: int
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0, 1, 2)
    minutes: Minutes
    size: Size
    rows: Annotated[tuple[Line, ...], Field(min_length=1)]
    columns: Annotated[tuple[Line, ...], Field(min_length=1)]
    paper_values: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)
    scale: Literal[1, 100] = 100
    cells: tuple[CellEntry, ...] = ()
    orders: tuple[Order, ...] = ()
    metric: Name = "final"


@dataclass(frozen=True)
class Cell:
    """A row and a column of a table, with its run."""

    table: str  # its name
    row: str
    column: str
    config: Path  # a YAML file
    overrides: tuple[str, ...]  # section.key=value
    size: Size
    differs: str | None  # what is smaller, missing or different from the paper, and why
    minutes: float  # estimate of one run on one core
    metric: str
    paper_value: float | None  # a fraction

    @property
    def title(self) -> str:
        return f"{self.row}/{self.column}"

    @property
    def slug(self) -> str:
        return f"{slug(self.row)}--{slug(self.column)}"

    def load(self, seed: int) -> Config:
        """The checked config of one run. Raises ConfigError."""
        try:
            return load_config(self.config, [*self.overrides, f"run.seed={seed}"])
        except ConfigError as problem:
            raise ConfigError(f"{self.table}, cell {self.title!r}: {problem}") from None


@dataclass(frozen=True)
class Table:
    """A table file, checked."""

    name: str
    file: TableFile
    cells: tuple[Cell, ...]  # column by column

    def cell(self, row: str, column: str) -> Cell | None:
        matches = (cell for cell in self.cells if (cell.row, cell.column) == (row, column))
        return next(matches, None)


def slug(text: str) -> str:
    """Convert a name to a part of a file name.

    >>> slug("FedSSL-DP (sound), 2 + 6: 100 labels"), slug("Dir(0.3)")
    ('fedssl-dp-sound-2-6-100-labels', 'dir-0.3')
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:LONGEST_SLUG]


def load_tables(root: Path, names: Sequence[str] = ()) -> list[Table]:
    """Load the tables of a clone, by priority and name; ``names``: requested ones, empty: all.

    Raises ConfigError if there is no clone, no such table, or a file is invalid.
    """
    folder = root / "configs" / "tables"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if not known:
        raise ConfigError(
            f"{folder} has no tables: they come with a clone of the repository, not with an "
            "installed package. Clone it, and start the command of the clone"
        )
    for name in names:
        if name not in known:
            raise ConfigError(f"{name}: {unknown('table', name, known)}")
    tables = [load_table(folder / f"{name}.yaml", root) for name in dict.fromkeys(names or known)]
    return sorted(tables, key=lambda table: (table.file.priority, table.name))


def load_table(path: Path, root: Path) -> Table:
    """Read and check a table file; paths of configs in it are relative to ``root``. Raises
    ConfigError."""
    try:
        document = yaml_reader.read_document(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except YamlError as error:
        problem = ConfigProblem(error.line, "", f"not a table: {error}")
        raise ConfigError(problem_report(path, [problem])) from None
    problems = list(document.problems)
    if not problems:
        try:
            file = TableFile.model_validate(document.value)
        except ValidationError as error:
            problems = [_convert_error(detail, document.lines) for detail in error.errors()]
        else:
            problems = [
                ConfigProblem(document.lines.get(key, 0), key, text)
                for key, text in _find_problems(file, root)
            ]
    if problems:
        raise ConfigError(problem_report(path, problems))
    return Table(path.stem, file, tuple(_build_cells(path.stem, file, root)))


def _convert_error(detail: Any, lines: Mapping[str, int]) -> ConfigProblem:
    """Convert an error of pydantic, with the line of its section: items of a list share their
    lines."""
    path = "".join(f"[{p + 1}]" if isinstance(p, int) else f".{p}" for p in detail["loc"])
    line = lines.get(str(detail["loc"][0]), 0)
    text = {"missing": "missing", "extra_forbidden": "unknown key"}.get(
        detail["type"], f"{detail['msg']}, got {detail['input']!r:.60}"
    )
    return ConfigProblem(line, path.removeprefix("."), text)


def _find_problems(file: TableFile, root: Path) -> Iterator[tuple[str, str]]:
    """Yield problems that involve several keys: names, numbers of values, configs."""
    rows, columns = [row.name for row in file.rows], [column.name for column in file.columns]
    for key, names in (("rows", rows), ("columns", columns)):
        for name, count in Counter(map(slug, names)).items():
            if count > 1 or not name:
                yield key, f"{count} names become {name!r} in file names. Rename one"
    for row, values in file.paper_values.items():
        if row not in rows:
            yield f"paper_values.{row}", unknown("row", row, rows)
        elif len(values) != len(columns):
            yield f"paper_values.{row}", f"{len(values)} values for {len(columns)} columns"
    for cell in file.cells:
        if cell.row not in rows:
            yield "cells", unknown("row", cell.row, rows)
        if cell.column not in columns:
            yield "cells", unknown("column", cell.column, columns)
    for position, count in Counter((cell.row, cell.column) for cell in file.cells).items():
        if count > 1:
            yield "cells", f"{'/'.join(position)} is given {count} times"
    for order in file.orders:
        for row in (order.better, *order.than):
            if row not in rows:
                yield "orders", unknown("row", row, rows)
        for column in () if order.columns == "all" else order.columns:
            if column not in columns:
                yield "orders", unknown("column", column, columns)
    if len(set(file.seeds)) < len(file.seeds):
        yield "seeds", "a seed is given twice"
    for entry in (file, *file.rows, *file.columns, *file.cells):
        for key in sorted(entry.set.keys() & DECIDED.keys()):
            yield "set", f"{key} cannot be set here: {DECIDED[key]}"
        if entry.config and not (root / entry.config).is_file():
            yield "config", f"{entry.config} does not exist (paths begin at the clone)"
    for entries in _collect_entries(file):
        yield from _find_cell_problems(*entries)


def _collect_entries(file: TableFile) -> Iterator[tuple[TableFile, Line, Line, CellEntry]]:
    """Yield the settings of each cell that is not skipped, weakest first; column by column."""
    overrides = {(cell.row, cell.column): cell for cell in file.cells}
    for column in file.columns:
        for row in file.rows:
            position = (row.name, column.name)
            cell = overrides.get(position) or CellEntry(row=row.name, column=column.name)
            if not cell.skip:
                yield file, column, row, cell


def _find_cell_problems(
    file: TableFile, column: Line, row: Line, cell: CellEntry
) -> Iterator[tuple[str, str]]:
    size, differs = (
        _find_strongest("size", file, column, row, cell),
        _find_differences(file, column, row, cell),
    )
    title = f"{row.name}/{column.name}"
    if size != "absent" and _find_strongest("config", file, column, row, cell) is None:
        yield "rows", f"{title} has no config. Give its row or the table one"
    if size != "paper" and differs is None:
        yield "differs", f"missing: {title} is {size}. Say what is smaller or absent, and why"


def _find_strongest(key: str, *entries: _Entry) -> Any:
    """Return the value of the strongest entry that sets it."""
    values = (getattr(entry, key) for entry in reversed(entries))
    return next((value for value in values if value is not None), None)


def _find_differences(*entries: _Entry) -> str | None:
    """Return the differences from the paper.

    At the paper's size only those stated at the same level as the size, or closer to the cell.

    So a row at the paper's size does not inherit why the rest of its table is reduced.
    """
    if _find_strongest("size", *entries) == "paper":
        strongest = max(index for index, entry in enumerate(entries) if entry.size)
        entries = entries[strongest:]
    differs: str | None = _find_strongest("differs", *entries)
    return differs


def _build_cells(name: str, file: TableFile, root: Path) -> Iterator[Cell]:
    order = [column.name for column in file.columns]
    for entries in _collect_entries(file):
        _, column, row, _ = entries
        settings: Settings = {}
        for entry in entries:
            settings |= entry.set
        settings.setdefault("run.workers", 1)  # it changes times, not results
        values = file.paper_values.get(row.name, (None,) * len(order))
        printed = values[order.index(column.name)]
        yield Cell(
            name, row.name, column.name, root / (_find_strongest("config", *entries) or ""),
            tuple(f"{key}={_format_yaml(value)}" for key, value in settings.items()),
            _find_strongest("size", *entries), _find_differences(*entries),
            _find_strongest("minutes", *entries), _find_strongest("metric", *entries),
            None if printed is None else printed / file.scale,
        )  # fmt: skip


def _format_yaml(value: object) -> str:
    """Format a value as a command line argument."""
    return str(value) if isinstance(value, yaml_reader.ExponentText) else json.dumps(value)


def matching(cells: Sequence[Cell], pattern: str) -> list[Cell]:
    """Return the cells whose row/column matches a glob, ignoring case."""
    lowered = pattern.lower()
    return [
        cell for cell in cells
        if fnmatch.fnmatchcase(cell.title.lower(), lowered)
        or fnmatch.fnmatchcase(cell.slug, lowered)
    ]  # fmt: skip
