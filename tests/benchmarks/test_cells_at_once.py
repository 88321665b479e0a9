"""Cells in forks side by side leave what cells one after the other leave."""

from pathlib import Path

import pytest

from benchmarks import cells_at_once
from tests.support.table_clone import make_clone, runner

pytestmark = pytest.mark.slow


def test_cells_at_once_leave_the_entries_of_cells_one_after_the_other(
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
        assert other["dirty"] is None  # nobody looked whether the code is that of the commit
    assert cells_at_once.main(asked) == 0  # nothing is missing any more
    assert capsys.readouterr().out.startswith("0 runs")
