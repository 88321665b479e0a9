"""Pages contain what the store has, and nothing else. Entries here are made up."""

import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from privssl.errors import ConfigError
from privssl.reproduce import figure
from privssl.reproduce.pages import former_pages, render, rendered_pages
from privssl.reproduce.store import Store
from privssl.reproduce.table_page import Measurements
from tests.support.product import ROOT
from tests.support.table_clone import Clone, make_clone, shipped_tables

FORTY, TWENTY = "40 labels, 2 + 2", "20 labels"
PSEUDO = "Pseudo (all)"


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return make_clone(tmp_path)


def page(clone: Clone, name: str = "results/small.md") -> str:
    return rendered_pages(clone.tables, clone.store, clone.root).texts[Path("docs") / name]


def lines_with(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]


# Numbers ----------------------------------------------------------------------------------------


def test_a_cell_has_mean_deviation_seeds_the_papers_value_and_the_difference(clone: Clone) -> None:
    clone.put("Supervise", FORTY, 0, 0.50)
    clone.put("Supervise", FORTY, 1, 0.54)
    text = page(clone)

    # Mean 52; squares 4 + 4, / (2 - 1): root of 8 = 2.83; the paper prints 50; 60 CPU seconds.
    assert lines_with(text, "| Supervise |", "paper") == [
        f"| {FORTY} | Supervise | 52.00 ± 2.83 | 2 | 50.0 | +2.0 | paper | 1.0 |"
    ]
    assert "\n| Supervise | 52.00 ± 2.83 / 50.0 | - / 40.25 |\n" in text
    assert "| Pseudo (all) | - / 60.0 | - |" in text


def test_gpu_seconds_and_cpu_seconds_are_not_plotted_together(clone: Clone) -> None:
    def drawn() -> set[str]:
        return {against for against, _ in figure.panels(Measurements.of(clone.table, clone.store))}

    curve = {"round": [1, 2], "test_accuracy": [0.1, 0.5], "seconds": [3.0, 6.0]}
    clone.put("Supervise", FORTY, 0, 0.50, curve=curve, gpu="GPU X")
    assert "| paper | 1.0 (GPU) |" in page(clone) and "seconds" in drawn()
    clone.put(PSEUDO, FORTY, 0, 0.50, curve=curve)
    assert "they are of unlike devices:\n  - 40 labels" in page(clone)
    assert drawn() == {"round"}
    clone.put(PSEUDO, FORTY, 0, 0.50, curve=curve, gpu="GPU X")  # the control: the same device
    assert "unlike devices" not in page(clone) and "seconds" in drawn()


@pytest.mark.parametrize(("gpu", "expected"), [(None, (30.0, 60.0)), ("GPU X", (3.0, 5000.0))])
def test_a_pause_of_the_machine_is_not_plotted_as_seconds_of_a_cpu(
    clone: Clone, gpu: str | None, expected: tuple[float, ...]
) -> None:
    # the run ends in round 2, after 60 CPU seconds
    curve = {"round": [1, 2], "test_accuracy": [0.1, 0.5], "seconds": [3.0, 5000.0]}
    clone.put("Supervise", FORTY, 0, 0.50, curve=curve, gpu=gpu)
    drawn = figure.panels(Measurements.of(clone.table, clone.store))
    assert drawn["seconds", FORTY]["Supervise"] == (expected, (0.1, 0.5))


def test_one_seed_has_no_deviation_and_a_reduced_cell_has_its_reason(clone: Clone) -> None:
    clone.put("Supervise", TWENTY, 0, 0.3925)
    text = page(clone)

    assert f"| {TWENTY} | Supervise | 39.25 | 1 | 40.25 | -1.0 | reduced | 1.0 |" in text
    assert "39.25‡ / 40.25" in text
    assert "has one seed" in text
    assert "- All rows:\n  - of 20 labels\n  - reduced\n  - half the labels\n" in text
    assert "compare orders, not numbers" in text


def test_an_old_entry_counts_only_if_there_is_no_newer_one(clone: Clone) -> None:
    clone.put("Supervise", FORTY, 0, 0.1, sources="of former code")
    clone.put(PSEUDO, FORTY, 0, 0.3, sources="of former code")
    clone.put("Supervise", FORTY, 1, 0.5)
    text = page(clone)

    assert "| Supervise | 50.00 / 50.0 |" in text
    assert "| Pseudo (all) | 30.00† / 60.0 |" in text
    assert "- † Measured before a change, to be run again:\n  - its method has changed\n" in text


def test_the_epsilon_of_a_cell_is_the_largest_over_seeds(clone: Clone) -> None:
    claim = {"kind": "guarantee", "epsilon": 7.25, "delta": 1e-5, "covers": ["F"]}
    clone.put("Supervise", FORTY, 0, 0.5, privacy=claim)
    clone.put("Supervise", FORTY, 1, 0.5, privacy=claim | {"epsilon": 7.91234})
    assert "| guarantee 7.9124 (delta 1e-05) |" in page(clone)
    assert "a repetition of a private run differs" in page(clone)

    clone.put("Supervise", FORTY, 1, 0.5, privacy=claim | {"kind": "nominal", "epsilon": 8.0})
    assert "| NOMINAL 8.0000 (delta 1e-05) |" in page(clone)
    assert "guarantees nothing" in page(clone)


def test_rows_of_a_column_with_other_splits_are_reported(clone: Clone) -> None:
    clone.put("Supervise", FORTY, 0, 0.5)
    path = clone.put(PSEUDO, FORTY, 0, 0.6)
    assert "all rows had the same split in each seed" in page(clone)

    path.write_text(path.read_text().replace(f"split {FORTY} 0", "another"))
    text = page(clone)
    told = f"- Other rows, labels or agents than Supervise, {FORTY}:\n  - Pseudo (all) "
    assert f"{told}(the rows of the data set)\n" in text
    assert "all rows had the same split" not in text
    path.write_text(path.read_text().replace('"labelled": 40', '"labelled": 30'))
    assert f"{told}(data.labelled)\n" in page(clone)


def test_a_private_run_stores_no_split_hash_and_is_compared_by_its_settings(clone: Clone) -> None:
    clone.put("Supervise", FORTY, 0, 0.5)
    path = clone.put(PSEUDO, FORTY, 0, 0.6, split_hash="withheld")
    assert "all rows had the same split in each seed" in page(clone)
    path.write_text(path.read_text().replace('"labelled": 40', '"labelled": 30'))
    assert f"than Supervise, {FORTY}:\n  - Pseudo (all) (data.labelled)\n" in page(clone)


# Claims -----------------------------------------------------------------------------------------


def answer(clone: Clone, better: list[float], other: list[float]) -> str:
    """The outcome of the claim "Pseudo is above Supervise" in the first column."""
    for row, values in ((PSEUDO, better), ("Supervise", other)):
        for seed, value in enumerate(values):
            clone.put(row, FORTY, seed, value)
    (line,) = lines_with(page(clone), "Pseudo is above Supervise", FORTY)
    return line.split(" | ")[2]


@pytest.mark.parametrize(
    ("better", "other", "expected"),
    [
        ([0.6, 0.7], [0.5, 0.6], "holds in every seed"),
        ([0.6, 0.7], [0.61, 0.5], "holds in the mean only"),
        ([0.6, 0.7], [0.65, 0.7], "does not hold"),
        ([0.6], [0.6], "does not hold"),  # equal is not above
        ([0.6, 0.1], [0.5], "holds in one seed"),  # on the seeds of both
        ([0.6], [], "not tested yet"),
        ([], [0.6], "not tested yet"),
    ],
)
def test_an_order_is_compared_seed_by_seed(
    clone: Clone, better: list[float], other: list[float], expected: str
) -> None:
    assert answer(clone, better, other) == expected


def test_a_claim_about_a_missing_row_cannot_be_tested(clone: Clone) -> None:
    clone.change("supervise}}", "supervise}, size: absent, differs: no data}")
    clone.put(PSEUDO, FORTY, 0, 0.6)

    (line,) = lines_with(page(clone), "Pseudo is above Supervise", FORTY)
    assert "| cannot be tested | no Supervise |" in line


def test_a_claim_fails_if_one_of_several_rows_is_above(clone: Clone) -> None:
    clone.change("columns:\n", "  - {name: Third}\ncolumns:\n")
    clone.change("than: [Supervise]", "than: [Third, Supervise]")
    assert answer(clone, [0.6], [0.5]) == "not tested yet"
    assert answer(clone, [0.6], [0.7]) == "does not hold"


def test_the_summary_has_a_line_per_claim_and_table_and_counts_cells(clone: Clone) -> None:
    assert answer(clone, [0.6], [0.5]) == "holds in one seed"
    clone.put("Supervise", TWENTY, 0, 0.5)
    clone.put(PSEUDO, TWENTY, 0, 0.4)
    text = page(clone, "results.md")

    link = "[fedssl, Table 9](results/small.md)"
    assert (
        f"| {link} | Pseudo is above Supervise | holds in 1 of 2 columns | reduced | "
        "does not hold in 1, holds in one seed in 1 of 2 columns |" in text
    )
    assert f"| {link} | A small table | 4 of 4 | 2 | 0 of 1 |" in text
    # Three numbers are printed: two of them at the paper's size, one reduced.
    assert "| FedSSL (Fan, Hu, Huang, IJCAI 2022) | 112 | 2 | 1 | 0 |" in text
    assert "| all | 467 | 2 | 1 | 0 |" in text


def test_open_claims_have_their_own_page_if_the_summary_would_be_too_long(
    clone: Clone,
) -> None:
    more = "".join(
        f'  - {{claim: "Claim {n}", better: Supervise, than: ["{PSEUDO}"]}}\n' for n in range(180)
    )
    clone.file.write_text(clone.file.read_text() + more)

    assert page(clone, "results.md").count("\n") < 200
    assert "open_claims.md" in page(clone, "results.md")
    with pytest.raises(ConfigError, match="Divide its table into two files"):
        answer(clone, [0.6], [0.5])


# Files ------------------------------------------------------------------------------------------


def test_render_writes_pages_figures_and_blocks_once(clone: Clone) -> None:
    clone.put("Supervise", FORTY, 0, 0.5)
    readme = clone.root / "README.md"
    readme.write_text("Before.\n\n<!-- results: small -->\nold\n<!-- end -->\n\nAfter.\n")
    (clone.root / "docs" / "results").mkdir()
    (clone.root / "docs" / "results" / "former.md").write_text("no table has it any more")

    written = {str(path) for path in render(clone.tables, clone.store, clone.root)}

    assert written == {
        "docs/results/small.md", "docs/results/small.png", "docs/results.md", "README.md"
    }  # fmt: skip
    assert not (clone.root / "docs" / "results" / "former.md").exists()
    text = readme.read_text()
    assert "| Supervise | 50.00 / 50.0 |" in text and "(docs/results/small.md)" in text
    assert text.startswith("Before.\n") and text.endswith("<!-- end -->\n\nAfter.\n")
    assert render(clone.tables, clone.store, clone.root) == []


def block(clone: Clone) -> str:
    """The block of the small table on a page, rendered."""
    (clone.root / "docs" / "x.md").write_text("<!-- results: small -->\nold\n<!-- end -->\n")
    return page(clone, "x.md").removeprefix("<!-- results: small -->\n").split("\n\n<!-- end")[0]


def test_a_block_lists_missing_measurements_and_their_run_time(clone: Clone) -> None:
    clone.change("minutes: 0.1", "minutes: 20")
    # Four cells of 20 minutes, two seeds: 160 minutes; three of them are two hours.
    assert block(clone).strip() == "Not measured yet: 4 cells, about 3 hours."
    clone.put("Supervise", FORTY, 0, 0.5)
    assert block(clone).endswith(
        "results/small.md). Not measured yet: 3 of 4 cells, about 2 hours."
    )
    for row, column in ((PSEUDO, FORTY), (PSEUDO, TWENTY), ("Supervise", TWENTY)):
        clone.put(row, column, 0, 0.5)
    assert block(clone).endswith("[Each cell, and what differs](results/small.md).")


def test_a_link_block_has_the_link_and_no_table(clone: Clone) -> None:
    text = "<!-- results: small link -->\nold\n<!-- end -->\n"
    (clone.root / "docs" / "x.md").write_text(text)
    clone.put("Supervise", FORTY, 0, 0.5)
    line = (
        "[Each cell, and what differs](results/small.md). Not measured yet: 3 of 4 cells, about 1"
    )
    assert page(clone, "x.md") == text.replace("old", f"{line} minutes.")


def test_a_block_without_data_gives_the_reason(clone: Clone) -> None:
    clone.change("size: paper\n", 'size: absent\ndiffers: "no tweets"\n')
    clone.change(", size: reduced", "")
    assert block(clone).startswith("\nCannot be measured: no tweets")


def test_a_block_of_an_unknown_table_is_refused(clone: Clone) -> None:
    (clone.root / "docs" / "x.md").write_text("<!-- results: nothing -->\n<!-- end -->\n")
    with pytest.raises(ConfigError, match="names no file of configs/tables"):
        render(clone.tables, clone.store, clone.root)


def test_a_figure_is_drawn_again_when_a_curve_changes(clone: Clone) -> None:
    clone.put("Supervise", FORTY, 0, 0.5)
    render(clone.tables, clone.store, clone.root)
    path = clone.put("Supervise", FORTY, 0, 0.5)
    path.write_text(path.read_text().replace('"value": 0.5', '"value": 0.6'))
    assert Path("docs/results/small.png") not in render(clone.tables, clone.store, clone.root)
    clone.put("Supervise", FORTY, 0, 0.6)
    assert Path("docs/results/small.png") in render(clone.tables, clone.store, clone.root)


@pytest.mark.parametrize(("name", "width"), [("short", 288), ("a long name of a row " * 4, 544)])
def test_the_legend_of_a_figure_is_not_cut_off(name: str, width: int) -> None:
    line = ((1.0, 2.0), (0.5, 0.6))
    picture = Image.open(io.BytesIO(figure.draw({("round", "column"): {name: line}}, [name])))
    assert picture.width == width  # 80 dots an inch: 3.6 inches, or 0.075 a letter and 0.5
    assert np.asarray(picture.convert("L"))[:, [0, -1]].min() == 255  # nothing at either edge


@pytest.mark.slow
def test_a_figure_has_no_space_for_missing_panels() -> None:
    def height(*, in_seconds: int) -> int:
        line = {"row": ((1.0, 2.0), (0.5, 0.6))}
        shown = {("round", str(column)): line for column in range(1)}
        shown |= {("seconds", str(column)): line for column in range(in_seconds)}
        return Image.open(io.BytesIO(figure.draw(shown, ["row"]))).height

    a_line = 224  # 2.8 inches of 80 dots, for three panels
    assert height(in_seconds=4) - height(in_seconds=3) == a_line
    assert height(in_seconds=3) == height(in_seconds=1)


# Committed files --------------------------------------------------------------------------------


def differences(root: Path, store: Store) -> list[str]:
    """Committed files that differ from what the store gives."""
    rendered = rendered_pages(list(shipped_tables()), store, root)
    found = [
        str(path)
        for path, text in rendered.texts.items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]
    found += [
        str(path)
        for path, of in rendered.figures.items()
        if figure.hash_in(root / path) != figure.data_hash(figure.panels(of))
    ]
    return found + [str(path.relative_to(root)) for path in former_pages(rendered, root)]


@cache
def committed() -> Store:
    """Cache what is computed of code and configs."""
    return Store(ROOT)


def test_the_committed_pages_equal_those_of_the_committed_store() -> None:
    assert differences(ROOT, committed()) == [], "run: python -m privssl.reproduce --render"


def test_control_a_changed_entry_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    first = min((ROOT / "results").glob("*/*/0.json"))
    real = Store.read

    def read(self: Store, cell: Any, seed: int) -> Any:
        entry = real(self, cell, seed)
        same = self.path(cell, seed) == first
        return {**entry, "value": 0.123} if same and entry is not None else entry

    monkeypatch.setattr(Store, "read", read)
    assert f"docs/results/{first.parts[-3]}.md" in differences(ROOT, committed())


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_keeps_its_length_limit_when_all_its_tables_are_measured(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    rows = {table.name: len(table.file.rows) for table in shipped_tables()}
    named = re.findall(r"^<!-- results: (\S+) -->$", text, re.MULTILINE)
    around = re.sub(r"^<!-- results: \S+ -->\n.*?^<!-- end -->\n", "", text, flags=re.S | re.M)
    # Two markers, two blank lines inside, the heading's two lines, a blank line and the link.
    blocks = sum(rows[name] + 8 for name in named)
    assert around.count("\n") + blocks <= (130 if page.name == "README.md" else 200)


def test_every_entry_of_the_store_belongs_to_a_cell_of_a_table() -> None:
    store = Store(ROOT)
    known = {
        store.path(cell, seed)
        for table in shipped_tables()
        for cell in table.cells
        for seed in table.file.seeds
    }
    stray = [path for path in (ROOT / "results").glob("*/*/*.json") if path not in known]
    assert [str(path.relative_to(ROOT)) for path in stray] == []


def test_no_entry_contains_a_local_path() -> None:
    found = [
        path.name
        for path in (ROOT / "results").rglob("*.json")
        if re.search(r'"/(root|home|work|tmp|Users)/', path.read_text(encoding="utf-8"))
    ]
    assert found == []
