"""Cells in parallel forks leave the same entries as cells in sequence."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import cells_at_once
from privssl.reproduce.tables import Cell
from tests.support.table_clone import make_clone, runner

pytestmark = pytest.mark.slow


def test_parallel_cells_leave_the_entries_of_sequential_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")  # put back at the end
    monkeypatch.setenv("PRIVSSL_COMMIT", "c" * 40)
    alone, at_once = make_clone(tmp_path / "alone"), make_clone(tmp_path / "at once")
    asked = ["small", "--root", str(at_once.root), "--at-once", "2"]
    assert cells_at_once.main(asked) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 left"
    for cell in alone.table.cells:
        one, other = runner(alone).run(cell, 0), at_once.store.read(cell, 0)
        assert isinstance(one, dict) and other is not None
        assert one["curve"]["test_accuracy"] == other["curve"]["test_accuracy"]
        assert (one["commit"], other["commit"]) == (None, "c" * 40)
        assert other["dirty"] is None  # the source hash was not compared with the commit
    assert cells_at_once.main(asked) == 0  # no cell is missing
    assert capsys.readouterr().out.startswith("0 runs")


def test_a_cell_is_not_started_if_measured_cells_predict_that_it_cannot_finish(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork(cell: Cell, seed: int, root: Path, answer: int) -> int:
        if pid := os.fork():
            return pid
        time.sleep(cell.minutes / 100)
        os.write(answer, b"0.5\n")
        os._exit(0)

    monkeypatch.setattr(cells_at_once, "run_in_a_fork", fork)
    cell = make_clone(tmp_path).table.cells[0]
    todo = [(replace(cell, minutes=minutes), minutes) for minutes in (80, 300, 450, 400)]
    assert cells_at_once.run_all(todo, tmp_path, at_once=2, minutes=5 / 60) == 1
    ended = [line.split("seed ")[1].split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert ended == ["400", "450", "80"]  # the longest first; 300 would take 3 s of 1 s
