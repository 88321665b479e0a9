"""Every algorithm, with labels everywhere they can be and rows handed out by every rule.

The expected cells are read from docs/placements.md: its table says which run, its blocks with
which settings. A pair that does not run is refused when the config is read, with the reason that
the table gives and advice after it.
"""

import itertools
import re
import typing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from privssl.algorithms import ALGORITHMS
from privssl.config import load
from privssl.data import build
from privssl.data.datasets import Dataset
from privssl.data.datasets import load as load_dataset
from privssl.errors import ConfigError
from privssl.settings import AgentSettings, DataSettings, PartitionName

PAGE = Path(__file__).parents[1] / "docs" / "placements.md"
PLACEMENTS = typing.get_args(typing.get_type_hints(DataSettings)["labels"])
PARTITIONS = typing.get_args(PartitionName)


class Row(NamedTuple):
    """One line of the table: an algorithm, a placement, and what each partition gives."""

    algorithm: str
    labels: str
    runs: dict[str, bool]
    reason: str  # "key text", without backticks; empty where all partitions run


def table(page: str) -> list[Row]:
    """The rows of the page's last table."""
    lines = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        for line in page[page.index("## The table") :].splitlines()
        if line.startswith("|")
    ]
    names = lines[0][2:-1]
    said = {"yes": True, "no": False}
    return [
        Row(
            line[0], line[1], dict(zip(names, [said[c] for c in line[2:-1]], strict=True)), line[-1]
        )
        for line in lines[2:]
    ]


def blocks(page: str) -> list[dict[str, Any]]:
    """The settings by placement and by partition."""
    return [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.S)]


TEXT = PAGE.read_text(encoding="utf-8")
TABLE = table(TEXT)
BY_PLACEMENT, BY_PARTITION = blocks(TEXT)


def sections(labels: str, partition: str) -> dict[str, Any]:
    """The data and agents sections of a cell."""
    place, rule = BY_PLACEMENT[labels], BY_PARTITION[partition]
    asked = {"name": "digits", "labelled": 300, "labels": labels, "partition": partition}
    return {"data": asked | rule | place.get("data", {}), "agents": place["agents"]}


def refusal(algorithm: str, labels: str, partition: str, folder: Path) -> str:
    """``key text`` of each problem of a cell's config, one per line; empty when it is accepted."""
    config = sections(labels, partition) | {"algorithm": {"name": algorithm}}
    path = folder / "cell.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    try:
        load(path)
    except ConfigError as error:
        problems = [" ".join(row.split()) for row in str(error).splitlines()[1:]]
        return "\n".join(re.sub(r"^(line \d+|file|argument) ", "", row) for row in problems)
    return ""


def wrong(row: Row, folder: Path) -> list[str]:
    """What of a row of the table is not so."""
    found = []
    for partition, runs in row.runs.items():
        told = refusal(row.algorithm, row.labels, partition, folder)
        cell = f"{row.algorithm}, {row.labels}, {partition}"
        if runs and told:
            found.append(f"{cell}: the table says yes, but: {told}")
        elif not runs and not told:
            found.append(f"{cell}: the table says no, but the config is accepted")
        elif not runs and not (row.reason and told.startswith(f"{row.reason}. ")):
            found.append(f"{cell}: the table says {row.reason!r}, but: {told}")
    return found


def missing(rows: list[Row]) -> set[tuple[str, str]]:
    """Pairs of algorithm and placement that the table does not have, or has without being so."""
    return {(row.algorithm, row.labels) for row in rows} ^ set(
        itertools.product(ALGORITHMS, PLACEMENTS)
    )


def as_line(algorithm: str, labels: str, folder: Path) -> str:
    """A row of the table, as the code has it."""
    told = [refusal(algorithm, labels, partition, folder) for partition in PARTITIONS]
    cells = ["no" if problem else "yes" for problem in told]
    key, _, text = max(told).partition(" ")
    reason = f"`{key}` {text.partition('. ')[0]}" if key else ""
    return f"| `{algorithm}` | `{labels}` | {' | '.join(cells)} | {reason} |"


def test_the_page_has_every_algorithm_and_every_place_of_labels(tmp_path: Path) -> None:
    absent = sorted(missing(TABLE))
    lines = [as_line(*pair, tmp_path) for pair in absent if pair[0] in ALGORITHMS]
    unknown = [pair for pair in absent if pair[0] not in ALGORITHMS]
    assert not absent, "\n".join(
        [f"unknown to the code: {unknown}", "check these rows and put them in:", *lines]
    )
    assert len(TABLE) == len(ALGORITHMS) * len(PLACEMENTS)  # none twice


def test_the_page_has_every_partition_and_the_settings_of_all() -> None:
    assert all(tuple(row.runs) == PARTITIONS for row in TABLE)
    assert tuple(BY_PLACEMENT) == PLACEMENTS
    assert tuple(BY_PARTITION) == PARTITIONS


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_cell_runs_or_is_refused_for_the_reason_that_the_page_gives(
    name: str, tmp_path: Path
) -> None:
    problems = [text for row in TABLE if row.algorithm == name for text in wrong(row, tmp_path)]
    assert not problems, "\n".join(problems)


def test_no_algorithm_is_refused_everywhere() -> None:
    can = {row.algorithm for row in TABLE if any(row.runs.values())}
    assert can == set(ALGORITHMS)


DIGITS: Dataset = load_dataset(DataSettings(name="digits"))


@pytest.mark.parametrize("labels", PLACEMENTS)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_split_of_each_cell_can_be_drawn_and_leaves_nobody_without_rows(
    labels: str, partition: str
) -> None:
    asked = sections(labels, partition)
    parties = build(DataSettings(**asked["data"]), AgentSettings(**asked["agents"]), 0, DIGITS)
    holders = [agent for agent in parties.agents if agent.held_labelled is not None]
    assert sum(len(agent.labelled) for agent in holders) == 300
    assert all(
        len(agent.labelled if agent in holders else agent.unlabelled) for agent in parties.agents
    )


# Controls: what the tests above would notice ------------------------------------------------


def row_of(algorithm: str, labels: str) -> Row:
    return next(row for row in TABLE if (row.algorithm, row.labels) == (algorithm, labels))


def test_a_cell_that_says_the_opposite_is_found(tmp_path: Path) -> None:
    accepted, refused = row_of("fedssl", "support"), row_of("server_sl", "support")
    assert not wrong(accepted, tmp_path) and not wrong(refused, tmp_path)
    flipped = [
        row._replace(runs={name: not runs for name, runs in row.runs.items()})
        for row in (accepted, refused)
    ]
    assert [len(wrong(row, tmp_path)) for row in flipped] == [len(PARTITIONS)] * 2


@pytest.mark.parametrize("reason", ["", "data.labels", "data.labels support, but it rains"])
def test_another_reason_than_the_one_given_is_found(reason: str, tmp_path: Path) -> None:
    row = row_of("server_sl", "support")._replace(reason=reason)
    assert len(wrong(row, tmp_path)) == len(PARTITIONS)


def test_a_row_too_few_and_a_row_too_many_are_found(tmp_path: Path) -> None:
    assert missing(TABLE[1:]) == {(TABLE[0].algorithm, TABLE[0].labels)}
    stranger = TABLE[0]._replace(algorithm="fedsleep")
    assert missing([*TABLE, stranger]) == {("fedsleep", stranger.labels)}


@pytest.mark.parametrize("number", [0, -1])
def test_the_rows_that_a_failure_prints_are_rows_of_the_table(number: int, tmp_path: Path) -> None:
    row = row_of("server_sl", "labels-at-client") if number else TABLE[0]
    line = as_line(row.algorithm, row.labels, tmp_path)
    page = "\n".join(["## The table", f"| a | l | {' | '.join(PARTITIONS)} | why |", "|-|", line])
    assert table(page) == [row]
