"""The Python examples of README.md and docs/python.md run unchanged."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def output_of_blocks(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the Python blocks of a page in order, as cells of a notebook; return their output."""
    (folder / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(folder)
    printed, cells = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(printed):
        for number, cell in enumerate(BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))):
            exec(compile(cell, f"{page}, block {number + 1}", "exec"), cells)  # noqa: S102
    return printed.getvalue()


@pytest.mark.ci
def test_the_readme_example_runs_and_has_at_most_ten_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [cell] = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(cell.splitlines()) <= 10
    text = output_of_blocks("README.md", tmp_path, monkeypatch)
    found = re.fullmatch(r"\[(?:'\d' ?){5}\] (0\.\d+)\n", text)
    assert found is not None, text
    assert float(found[1]) > 0.6  # above chance for ten classes


def test_the_code_of_the_python_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert output_of_blocks("docs/python.md", tmp_path, monkeypatch) != ""
