"""docs/privacy_tests.md names tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parents[1]
PAGE = HERE.parent / "docs" / "privacy_tests.md"


def missing(page: str) -> set[str]:
    """Tests and test files that the page names and that do not exist."""
    written = "\n".join(path.read_text() for path in HERE.rglob("test_*.py"))
    names = set(re.findall(r"`(test_\w+)`", page))
    files = set(re.findall(r"`(?:tests/)?(test_\w+\.py)`", page))
    return {name for name in names if f"def {name}(" not in written} | {
        file for file in files if not any(HERE.rglob(file))
    }


def test_every_test_on_the_page_exists() -> None:
    assert missing(PAGE.read_text()) == set()


def test_the_check_detects_a_test_that_does_not_exist() -> None:
    assert missing("`test_of_nothing` and `test_nowhere.py`") == {
        "test_of_nothing",
        "test_nowhere.py",
    }
