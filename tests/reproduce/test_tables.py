"""Table files: which run belongs to a cell, and what is refused."""

import re
import shutil
from pathlib import Path

import pytest

from privssl.errors import ConfigError
from privssl.reproduce.tables import Cell, Table, load_tables
from privssl.runtime.plugins import imports_allowed
from tests.support.product import ROOT
from tests.support.table_clone import TABLE, Clone, make_clone, shipped_tables


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return make_clone(tmp_path)


def cell(clone: Clone, row: str = "Supervise", column: str = "20 labels") -> Cell:
    found = clone.table.cell(row, column)
    assert found is not None
    return found


def test_cell_settings_override_row_settings_which_override_column_and_table_settings(
    clone: Clone,
) -> None:
    clone.change("size: paper\n", "size: paper\nset: {algorithm.rounds: 1, data.unlabelled: 10}\n")
    clone.change("set: {data.labelled: 20}", "set: {data.labelled: 20, algorithm.rounds: 2}")
    row = "set: {algorithm.name: supervise"
    clone.change(row, f"{row}, algorithm.rounds: 3")
    clone.file.write_text(
        clone.file.read_text() + "cells:\n"
        '  - {row: Supervise, column: "20 labels", set: {algorithm.rounds: 4}, minutes: 7}\n'
    )

    def rounds(row: str, column: str) -> tuple[int, int, int | None]:
        config = cell(clone, row, column).load(0)
        return config.algorithm.rounds, config.data.labelled, config.data.unlabelled

    assert rounds("Pseudo (all)", "40 labels, 2 + 2") == (1, 40, 10)
    assert rounds("Pseudo (all)", "20 labels") == (2, 20, 10)
    assert rounds("Supervise", "40 labels, 2 + 2") == (3, 40, 10)
    assert rounds("Supervise", "20 labels") == (4, 20, 10)
    assert [one.minutes for one in clone.table.cells] == [0.1, 0.1, 7, 0.1]  # column by column


def test_a_cell_has_its_seed_its_size_and_the_papers_number_as_a_fraction(clone: Clone) -> None:
    reduced = cell(clone)

    assert reduced.load(7).run.seed == 7
    assert (reduced.size, reduced.differs) == ("reduced", "half the labels")
    assert reduced.paper_value == pytest.approx(0.4025)
    assert cell(clone, "Pseudo (all)").paper_value is None
    assert cell(clone, "Pseudo (all)").slug == "pseudo-all--20-labels"


def test_a_row_at_the_papers_size_has_no_reason_for_a_reduced_size(clone: Clone) -> None:
    clone.change("size: paper", 'size: reduced\ndiffers: "width 4"')
    clone.change("name: supervise}", "name: supervise}, size: paper")

    assert cell(clone).differs is None
    assert cell(clone, "Pseudo (all)", "40 labels, 2 + 2").differs == "width 4"


def test_settings_at_the_papers_size_are_kept(clone: Clone) -> None:
    clone.change("name: supervise}", "name: supervise}, differs: another network")

    assert cell(clone, column="40 labels, 2 + 2").differs == "another network"


def test_a_skipped_cell_does_not_exist_and_a_missing_one_needs_no_config(clone: Clone) -> None:
    clone.change("config: configs/tiny.yaml\n", "")
    clone.change("supervise}}", "supervise}, config: configs/tiny.yaml}")
    clone.change('- {name: "Pseudo (all)"}', '- {name: "Pseudo (all)", size: absent, differs: x}')
    clone.file.write_text(
        clone.file.read_text() + 'cells:\n  - {row: Supervise, column: "20 labels", skip: true}\n'
    )

    assert [(one.title, one.size) for one in clone.table.cells] == [
        ("Supervise/40 labels, 2 + 2", "paper"),
        ("Pseudo (all)/40 labels, 2 + 2", "absent"),
        ("Pseudo (all)/20 labels", "absent"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("size: paper", "sise: paper", 7, "unknown key"),
        ("minutes: 0.1\n", "", 0, "missing"),
        ("minutes: 0.1", "minutes: 0", 6, "greater than 0"),
        ("- {name: Supervise", "- {nam: Supervise", 9, "rows[1].nam"),
        ("title:", "place: x\ntitle:", 4, "given twice"),
        ('"20 labels"', '"40 labels (2 + 2)"', 12, "Rename one"),
        ("[50, 40.25]", "[50]", 16, "1 values for 2 columns"),
        ("  Supervise: [50", "  Supervice: [50", 16, "Did you mean Supervise?"),
        ("than: [Supervise]", "than: [Pseudo]", 18, "unknown row"),
        ("differs: ", "place: ", 0, "unknown key"),
        (', differs: "half the labels"', "", 0, "Say what is smaller or absent"),
        ("data.labelled: 20", "run.seed: 20", 0, "the table's seeds decide it"),
        ("configs/tiny.yaml", "configs/none.yaml", 8, "does not exist"),
        ("config: configs/tiny.yaml\n", "", 8, "has no config"),
        ("seeds: [0, 1]", "seeds: [1, 1]", 5, "given twice"),
        ("seeds: [0, 1]", "seeds: [", 7, "not a table"),
    ],
)
def test_an_invalid_table_is_refused_with_file_line_and_reason(
    clone: Clone, old: str, new: str, line: int, said: str
) -> None:
    clone.change(old, new)

    with pytest.raises(ConfigError) as caught:
        load_tables(clone.root)

    text = str(caught.value)
    assert str(clone.file) in text and said in text, text
    assert line == 0 or f"line {line}" in text, text


def test_unknown_table_names_and_a_folder_without_tables_are_refused(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")

    with pytest.raises(ConfigError, match=r"smal: unknown table\. Did you mean small"):
        load_tables(clone.root, ["smal"])
    with pytest.raises(ConfigError, match="come with a clone of the repository"):
        load_tables(tmp_path / "clone" / "docs")


def test_tables_are_ordered_by_priority(clone: Clone) -> None:
    (clone.file.parent / "first.yaml").write_text(TABLE.replace("priority: 5", "priority: 4"))

    assert [table.name for table in clone.tables] == ["first", "small"]


# The page -------------------------------------------------------------------------------------


def test_the_example_table_in_the_docs_has_an_own_method_and_equal_agents_in_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [table] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "reproduce.md").read_text(), re.S)
    shutil.copytree(ROOT / "configs", tmp_path / "configs", ignore=lambda *_: ["papers", "tables"])
    (tmp_path / "configs" / "tables").mkdir()
    (tmp_path / "configs" / "tables" / "mine.yaml").write_text(table)
    own = "data: {name: digits}\nalgorithm: {name: 'privssl_example.method:FedOwn'}\n"
    (tmp_path / "configs" / "mine.yaml").write_text(own)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "privssl_example"))
    [made] = load_tables(tmp_path, ["mine"])
    with imports_allowed():
        loaded = [one.load(0) for one in made.cells]
    assert [one.algorithm.name.rpartition(":")[2] for one in loaded] == [
        "FedOwn",
        "fixmatch",
        "fedavg",
    ]
    assert len({(one.agents, one.data) for one in loaded}) == 1


# The tables that are shipped --------------------------------------------------------------------

SHIPPED = shipped_tables()


@pytest.mark.parametrize("table", SHIPPED, ids=lambda table: table.name)
def test_every_cell_of_a_shipped_table_has_a_config_that_loads(table: Table) -> None:
    problems = []
    for one in table.cells:
        if one.size != "absent":
            try:
                one.load(0)
            except ConfigError as problem:
                problems.append(str(problem))

    assert problems == []


def test_run_folders_of_shipped_tables_have_names_that_a_config_accepts() -> None:
    folders = [f"runs/reproduce/{one.table}/{one.slug}/0" for t in SHIPPED for one in t.cells]

    assert len(set(folders)) == len(folders)
    assert max(map(len, folders)) < 200
