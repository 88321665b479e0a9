"""Measured numbers on pages come from the store or from a benchmark; none is typed by hand.

Numbers are in generated blocks (``<!-- results: TABLE -->``), or after a marker with their source:
``<!-- numbers: python -m benchmarks.NAME -->``, or ``<!-- numbers: paper, PLACE -->`` for what a
paper prints or sets. A marker covers the next table or paragraph.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = {ROOT / "docs" / "results.md", *(ROOT / "docs").glob("config*.md")}
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md")} - GENERATED)]

_BLOCK = re.compile(r"^<!-- results: \S+( link)? -->\n.*?^<!-- end -->\n", re.DOTALL | re.MULTILINE)
_MARKER = re.compile(r"^<!-- numbers: (.*?) -->\n", re.MULTILINE)
_COVERED = re.compile(rf"{_MARKER.pattern}\n*(.+\n)*", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```|`[^`]+`", re.DOTALL | re.MULTILINE)
_SETTING = re.compile(r"(?<![\w.])(?!\w*accuracy)[\w.]+(=|: )-?[\d.e,-]+")
#: Patterns of measurements: accuracies as fractions, percent with a decimal, differences in points.
_ANYWHERE = re.compile(
    r"(?<![\d.])(0\.\d{3,4}|\d{1,3}\.\d+ ?%|\d+\.\d+ (percentage )?points)(?!\d)"
)
_IN_TABLES = re.compile(r"(?<![\d.:])\d\d\.\d{1,2}(?!\.?\d)")
_OF_ACCURACY = re.compile(r"(?<![\d.:])(0\.\d\d|\d\d\.\d{1,2})(?!\.?\d)")


def typed_numbers(text: str) -> list[str]:
    """Numbers that look measured, outside of generated blocks and without a marker."""
    for pattern in (_BLOCK, _COVERED):
        text = pattern.sub("\n", text)
    text = _CODE.sub(lambda code: _SETTING.sub("", code[0]), text)
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        patterns = [_ANYWHERE]
        patterns += [_IN_TABLES] if paragraph.startswith("|") else []
        prose = re.sub(r"`.*?`", "", paragraph)
        patterns += [_OF_ACCURACY] if re.search(r"accura|\bmedian\b", prose) else []
        for pattern in patterns:
            found += [match[0] for match in pattern.finditer(paragraph)]
    return found


def unknown_sources(text: str) -> Iterator[str]:
    """Markers that name neither a paper nor an existing benchmark."""
    for source in _MARKER.findall(text):
        names = re.findall(r"python -m benchmarks\.(\w+)", source)
        exist = [(ROOT / "benchmarks" / f"{name}.py").is_file() for name in names]
        if not (all(exist) if names else source.startswith("paper, ")):
            yield source


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_number_of_a_page_is_typed_by_hand(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert typed_numbers(text) == [], "make it a cell of configs/tables, or name its benchmark"
    assert list(unknown_sources(text)) == []


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("It reached a median of 0.933 over 19 runs.", ["0.933"]),
        ("| FedSSL | 0.9720 / 0.9791 | - |", ["0.9720", "0.9791"]),
        ("| label | row |\n|---|---|\n| FedSSL | 97.35 ± 0.6 |", ["97.35"]),
        ("It is better by 2.5% and by 3.9 points.", ["2.5%", "3.9 points"]),
        ("The test accuracy was 0.92.", ["0.92"]),
        ("The mean accuracy was 97.3 with `accuracy: 0.951`.", ["0.951", "97.3"]),
        ("<!-- results: x -->\n| 97.35 |\n\n<!-- end -->\n\n0.951", ["0.951"]),
        ("<!-- numbers: paper, Table 2 -->\n\n| 0.951 |\n\n0.952", ["0.952"]),
        ("Text\n<!-- numbers: paper, Table 2 -->\n| 0.951 |\n\n| 0.952 |", ["0.952"]),
        ("`learning_rate=0.001`, `weight: 0.0125`, arXiv:2106.01432, threshold 0.85", []),
        ("see `train/accuracy`: alpha is 0.93, 127.0.0.1, 10.3 s", []),
    ],
)
def test_a_planted_number_is_found_and_a_setting_is_not(planted: str, found: list[str]) -> None:
    assert typed_numbers(planted) == found


@pytest.mark.parametrize("page", ["docs/performance.md", "docs/label_census.md"])
def test_without_its_markers_a_page_of_benchmarks_has_typed_numbers(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert typed_numbers(_MARKER.sub("", text)) != []


def test_a_marker_names_a_paper_or_an_existing_benchmark() -> None:
    markers = {
        "paper, Table 2": True,
        "python -m benchmarks.scale": True,
        "python -m benchmarks.scale, python -m benchmarks.nothing": False,
        "python -m benchmarks.nothing": False,
        "measured once": False,
    }
    for source, known in markers.items():
        assert (list(unknown_sources(f"<!-- numbers: {source} -->\n")) == []) is known, source
