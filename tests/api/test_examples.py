"""The Python of README.md and docs/python.md runs as it stands there."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def ran(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the Python blocks of a page print, one after another, as a notebook's cells."""
    (folder / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(folder)
    printed, cells = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(printed):
        for number, cell in enumerate(BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))):
            exec(compile(cell, f"{page}, block {number + 1}", "exec"), cells)  # noqa: S102
    return printed.getvalue()


def test_the_example_of_the_readme_runs_as_it_stands_in_ten_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [cell] = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(cell.splitlines()) <= 10
    text = ran("README.md", tmp_path, monkeypatch)
    found = re.fullmatch(r"\[(?:'\d' ?){5}\] (0\.\d+)\n", text)
    assert found is not None, text
    assert float(found[1]) > 0.6  # ten classes; it learns something


def test_the_python_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran("docs/python.md", tmp_path, monkeypatch) != ""
