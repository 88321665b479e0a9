"""The committed generated pages equal what the code generates."""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest

import privssl
from privssl.algorithms import ALGORITHMS

DOCS = Path(__file__).parents[2] / "docs"
GENERATOR: dict[str, Any] = runpy.run_path(str(DOCS / "generate_reference.py"))


@pytest.mark.parametrize("name", sorted(GENERATOR["PAGES"]))
def test_a_committed_page_equals_what_the_code_generates(name: str) -> None:
    expected = (DOCS / name).read_text(encoding="utf-8")
    assert GENERATOR["PAGES"][name]() == expected, "run: python docs/generate_reference.py"


def test_the_python_reference_follows_from_docstrings() -> None:
    generator = runpy.run_path(str(DOCS / "generate_python_reference.py"))
    expected = (DOCS / "python_reference.md").read_text(encoding="utf-8")
    assert generator["page"]() == expected, "run: python docs/generate_python_reference.py"
    for name in privssl.__all__:
        assert name in expected or name == "__version__"

    def documented(x: int, *, rows: int = 3) -> None:
        """Do it.

        Args:
            x, rows: both of
                ``f``.

        Raises:
            E: no.
        """

    assert generator["heading"]("do", documented) == "`do(x, *, rows=3)`"
    text = "Do it.\n\n- `x`, `rows`: both of `f`.\n- raises `E`: no.\n"
    assert generator["prose"](documented) == text


def test_the_sizes_of_networks_follow_from_arithmetic() -> None:
    generator = runpy.run_path(str(DOCS / "generate_networks.py"))
    expected = (DOCS / generator["PAGE"]).read_text(encoding="utf-8")
    assert generator["page"]() == expected, "run: python docs/generate_networks.py"
    # LeNet: 5x5 convolutions to 6x28x28 and 16x10x10, then 400 -> 120 -> 84 -> 10.
    products = 25 * 6 * 28**2 + 25 * 6 * 16 * 10**2 + 400 * 120 + 120 * 84 + 84 * 10
    row = next(line for line in expected.splitlines() if line.startswith("| `lenet` |"))
    assert row.split(" | ")[3] == f"{2 * products:,}"


def test_every_key_of_every_section_has_a_description() -> None:
    sections = [*GENERATOR["SECTIONS"].values(), *GENERATOR["SITE_SECTIONS"].values()]
    sections += [algorithm.Config for algorithm in ALGORITHMS.values()]
    keys = [(section, key) for section in sections for key in GENERATOR["keys"](section)]
    assert [f"{section.__name__}.{key.name}" for section, key in keys if not key.text] == []


def test_every_algorithm_has_a_table() -> None:
    pages = [GENERATOR[page] for page in ("METHODS", "BASELINES", "COMPARATORS")]
    listed = [name for page in pages for group in page for name in group]
    assert sorted(listed) == sorted(ALGORITHMS)


def test_a_changed_default_and_a_new_key_change_the_page() -> None:
    @dataclasses.dataclass(frozen=True)
    class Section:
        """A section with two keys."""

        rate: float = 0.5  # of learning
        rows: int = 3
        """Rows in a batch."""

    assert GENERATOR["table"](GENERATOR["keys"](Section)).splitlines()[2:] == [
        "| `rate` | a number | `0.5` | of learning |",
        "| `rows` | a whole number | `3` | Rows in a batch. |",
    ]
