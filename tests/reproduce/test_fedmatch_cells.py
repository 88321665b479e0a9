"""Cells of FedMatch's tables: settings that the paper's Table 4 gives for all of them."""

from dataclasses import replace

import pytest

from privssl.reproduce.tables import Cell
from tests.support.table_clone import shipped_tables

TABLES = [table for table in shipped_tables() if table.name.startswith("fedmatch-table")]
FEDPROX = [cell for table in TABLES for cell in table.cells if cell.row.startswith("FedProx")]


def pull(cell: Cell) -> float:
    """The share of its distance by which a FedProx step moves back to the global weights."""
    algorithm = cell.load(0).algorithm
    return float(algorithm.learning_rate * algorithm.proximal)


@pytest.mark.parametrize("cell", FEDPROX, ids=lambda cell: f"{cell.table}, {cell.title}")
def test_every_fedprox_row_has_the_proximal_strength_of_table_4(cell: Cell) -> None:
    # Rate 1e-3, mu 1e-2 beside a labelled loss with weight 10. SL: rate 1e-2, weight 1, mu 1e-3.
    assert pull(cell) == pytest.approx(1e-5)


def test_control_with_the_default_mu_a_row_with_all_labels_is_pulled_ten_times_as_strongly() -> (
    None
):
    cell = next(cell for cell in FEDPROX if cell.title == "FedProx-SL/labels at clients")
    default = tuple(text for text in cell.overrides if "proximal" not in text)
    assert len(default) < len(cell.overrides)
    assert pull(replace(cell, overrides=default)) == pytest.approx(1e-4)


def test_the_two_halves_of_table_1_differ_only_in_the_partition_of_rows() -> None:
    halves = [
        {
            cell.title: {text for text in cell.overrides if "partition" not in text}
            for cell in next(
                table for table in TABLES if table.name == f"fedmatch-table-1-{half}"
            ).cells
        }
        for half in ("iid", "noniid")
    ]
    assert halves[1], "no cells"
    assert {title: halves[0][title] for title in halves[1]} == halves[1]
