"""Cells of SemiFL's tables: settings that the sources of their printed numbers give."""

from dataclasses import replace

import pytest

from privssl.algorithms import ALGORITHMS
from privssl.experiment.config import Config
from privssl.reproduce.tables import Cell
from tests.support.table_clone import shipped_tables

TABLES = {table.name: table for table in shipped_tables() if table.name.startswith("semifl-table")}
CELLS = [cell for table in TABLES.values() for cell in table.cells]
IN_ONE_PLACE = [cell for cell in CELLS if cell.load(0).agents.mixed == 1]
ALONE = [cell for cell in CELLS if cell.load(0).algorithm.name == "server_sl"]
#: When the losses of unlabelled rows are at full weight, as a share of the run: google-research's
#: code.
RAMP_UP = {"Pi-Model": 2 / 5, "Mean Teacher": 2 / 5, "MixMatch": 1 / 64, "ReMixMatch": 1 / 64}


def grows_for(cell: Cell) -> float:
    """Rounds in which the weight of the losses of unlabelled rows grows."""
    return float(cell.load(0).algorithm.ramp_up)


def trains_on_both_kinds(config: Config) -> bool:
    """Whether an agent trains one network on labelled and unlabelled rows together."""
    return hasattr(ALGORITHMS[config.algorithm.name], "mixed_pass")


@pytest.mark.parametrize("cell", IN_ONE_PLACE, ids=lambda cell: cell.title)
def test_a_method_in_one_place_trains_one_network_on_all_rows(cell: Cell) -> None:
    assert trains_on_both_kinds(cell.load(0))


def test_control_fedssls_pseudo_trains_a_network_on_each_kind_of_rows() -> None:
    fedssl = next(table for table in shipped_tables() if table.name == "fedssl-table-1")
    pseudo = next(cell for cell in fedssl.cells if cell.row == "Pseudo")
    assert not trains_on_both_kinds(pseudo.load(0))
    assert len(IN_ONE_PLACE) == 28


@pytest.mark.parametrize("cell", IN_ONE_PLACE, ids=lambda cell: cell.title)
def test_the_ramp_up_of_unlabelled_losses_has_the_length_in_the_authors_code(
    cell: Cell,
) -> None:
    if cell.row in RAMP_UP:
        rounds = cell.load(0).algorithm.rounds
        assert grows_for(cell) == max(1, round(RAMP_UP[cell.row] * rounds))


def test_control_with_the_ramp_up_of_its_config_remixmatch_would_ramp_beyond_the_run() -> None:
    cell = next(cell for cell in IN_ONE_PLACE if cell.row == "ReMixMatch")
    without = tuple(text for text in cell.overrides if "ramp_up" not in text)
    assert grows_for(replace(cell, overrides=without)) > 60


def test_uda_in_one_place_skips_no_labelled_row_as_in_the_authors_code() -> None:
    uda = [cell.load(0).algorithm for cell in IN_ONE_PLACE if cell.row == "UDA"]
    assert {(one.annealing, one.temperature) for one in uda} == {("none", 0.4)}


@pytest.mark.parametrize("cell", ALONE, ids=lambda cell: f"{cell.table}, {cell.title}")
def test_server_sl_has_400_epochs_and_fully_supervised_training_100(cell: Cell) -> None:
    algorithm = cell.load(0).algorithm
    expected = (100, 1) if cell.row == "Fully Supervised" else (80, 5)
    assert (algorithm.rounds, algorithm.local_epochs) == expected


def test_fedavg_has_the_settings_of_the_two_papers_of_its_columns() -> None:
    found = {
        cell.column: cell.load(0).algorithm
        for cell in TABLES["semifl-table-3"].cells
        if cell.row == "FedAvg"
    }
    settings = {
        column: (one.local_epochs, one.batch_size, one.momentum, one.learning_rate_decay)
        for column, one in found.items()
    }
    assert settings == {"IID": (5, 50, 0.0, 0.99), "non-IID, K = 2": (1, 50, 0.5, 1.0)}
