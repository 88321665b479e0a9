"""The notebooks of docs/tutorials run as they stand, and are kept without outputs."""

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
#: Output of each tutorial, so that a cell that computes nothing useful is detected.
SHOWN = {
    "first_run": "test accuracy 0.",
    "own_data": "pipeline_tag: image-classification",
    "private_run": "violated",
    "own_method": "breaks 'determinism'",
    "several_sites": "finished",
}
NEEDS = {"several_sites": "flwr", "own_method": "privssl.testing"}


def cells(path: Path, kind: str) -> list[str]:
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def run(path: Path) -> str:
    """The output of the code cells, run in one namespace like a notebook's kernel."""
    printed, names = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(printed):
        for number, cell in enumerate(cells(path, "code")):
            exec(compile(cell, f"{path.name}, cell {number + 1}", "exec"), names)  # noqa: S102
    return printed.getvalue()


@pytest.fixture
def unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the process: a tutorial may extend the path and import its own files."""
    known = set(sys.modules)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.flower] if name == "several_sites" else [])
        for name in SHOWN
    ],
)
def test_a_tutorial_runs_and_prints_its_expected_output(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    assert SHOWN[name] in run(TUTORIALS / f"{name}.ipynb")


def test_every_notebook_is_run() -> None:
    assert sorted(path.stem for path in TUTORIALS.glob("*.ipynb")) == sorted(SHOWN)


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_starts_with_its_title(path: Path) -> None:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
    assert cells(path, "markdown")[0].startswith("# ")


def test_a_failing_cell_fails_the_test(tmp_path: Path) -> None:
    """Negative control."""
    wrong = {"cells": [{"cell_type": "code", "source": ["x = 1\n", "assert x == 2"]}]}
    (tmp_path / "a.ipynb").write_text(json.dumps(wrong))
    with pytest.raises(AssertionError):
        run(tmp_path / "a.ipynb")
