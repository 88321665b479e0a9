"""Cells on SVHN, which is not available here: configs load, and run on files of its format."""

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from privssl.experiment.config import load_config
from privssl.experiment.prepare import prepare
from privssl.reproduce.tables import Cell
from tests.support.table_clone import shipped_tables
from tests.support.toy_worlds import finite, same_bits, simulate

ROOT = Path(__file__).parents[2]
TABLES = [
    table for table in shipped_tables()
    if table.name.startswith(("fedtrinet-table", "fedseal-table-a", "semifl-table-1"))
]  # fmt: skip
CELLS = [
    cell for table in TABLES for cell in table.cells
    if cell.size == "absent" and cell.config.is_file()
]  # fmt: skip
#: One cell of each network and method; the rest differ in numbers.
RUN = (
    ("fedtrinet-table-1", "FedTriNet/SVHN, 1000 labels"),
    ("fedtrinet-table-2", "FedSem/SVHN, 1000 labels"),
    ("fedtrinet-table-2", "FedMatch/SVHN, 1000 labels"),
    ("fedseal-table-a7", "FedSEAL/Dir(0.1)"),
    ("fedseal-table-a10", "FedSEAL/IID"),
    ("fedseal-table-a10", "FedAvg-UDA/IID"),
    ("semifl-table-1", "MixMatch/SVHN, 250 labels"),
    ("semifl-table-1", "Pseudo-Labeling/SVHN, 250 labels"),
)
#: Width 1: the networks themselves at full size are counted in tests/models.
SMALL = {
    "data.labelled": 40, "data.unlabelled": 60, "model.width": 1, "run.precision": "float32",
    "algorithm.rounds": 2, "algorithm.batch_size": 20,
}  # fmt: skip
OF_METHOD = {
    "fedtrinet": {
        "algorithm.warm_up": 1, "algorithm.local_epochs": 1, "algorithm.fine_tune_epochs": 1,
    },
    "fedsem": {"algorithm.warm_up": 1, "algorithm.local_epochs": 1},
    "fedmatch": {"algorithm.epochs": 1},
    "fedseal": {
        "algorithm.validation_rows": 20, "algorithm.bootstrap_epochs": 1, "agents.query": 4,
        "algorithm.query_per_round": 2, "algorithm.client_epochs": 1, "algorithm.server_epochs": 1,
    },
    "remixmatch": {"algorithm.ramp_up": 1},
    "fixmatch": {"algorithm.threshold": 0},
    "uda": {"agents.query": 4, "algorithm.agents_per_round": 2, "algorithm.local_epochs": 1},
}  # fmt: skip


def cell(table: str, title: str) -> Cell:
    return next(c for c in CELLS if (c.table, c.title) == (table, title))


@pytest.fixture(scope="module")
def svhn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files of SVHN's format: X (32, 32, 3, N), y (N, 1) with 10 for the digit 0."""
    folder = tmp_path_factory.mktemp("svhn")
    rng = np.random.RandomState(0)
    for part, rows in (("train", 200), ("test", 20)):
        x = rng.randint(0, 256, (32, 32, 3, rows)).astype(np.uint8)
        y = (np.arange(rows) % 10 + 1).astype(np.uint8)[:, None]
        savemat(folder / f"{part}_32x32.mat", {"X": x, "y": y})
    return folder


def test_every_cell_without_data_has_a_reason_and_a_config_of_the_papers_size() -> None:
    assert len(CELLS) > 50
    for one in CELLS:
        loaded = one.load(0)
        data, agents = loaded.data, loaded.agents
        assert data.name == "svhn", one.title
        assert "SVHN is not at hand" in str(one.differs), one.title
        assert loaded.model.name in ("trinet_svhn", "lenet32", "resnet9", "wresnet28x2")
        if one.table.startswith("semifl"):
            labels = int(one.column.split()[1]) if one.row != "Fully Supervised" else 73_257
            assert (data.labelled, data.unlabelled) == (labels, None)
            assert not loaded.algorithm.flip
        elif one.table.startswith("fedtrinet"):
            assert (data.unlabelled, agents.mixed) == (None, 10)  # all of 73,257
        elif "FedAvg-SL" in one.row:
            assert (data.labelled, agents.support) == (49_000, 100)
        else:
            assert (data.unlabelled, agents.query) == (49_000, 100)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("table", "title"), RUN)
def test_a_cell_runs_if_the_files_are_present(
    table: str, title: str, svhn: Path, tmp_path: Path
) -> None:
    one = cell(table, title)
    small = {**SMALL, **OF_METHOD[one.load(0).algorithm.name], "data.root": svhn}
    given = dict(override.split("=", 1) for override in one.overrides)
    overrides = [f"{key}={value}" for key, value in (given | small).items()]
    prepared = prepare(load_config(one.config, [*overrides, f"run.output={tmp_path / 'run'}"]))
    assert prepared.federated_data.dataset.shape == (3, 32, 32)
    after = simulate(prepared.algorithm, prepared.federated_data, 2)
    assert finite(after.state)
    assert not same_bits(after.begun, after.state)
