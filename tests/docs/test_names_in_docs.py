"""Files, modules and code names that the pages mention exist."""

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
PLACES = (
    "privssl",
    "accounting",
    "generators",
    "benchmarks",
    "tests",
    "configs",
    "docs",
    "examples",
)
#: Names of papers' formulas and codes, of files that a reader writes or that style forbids, and of
#: curves whose names are built in code.
FOREIGN = {"sigma_a", "psi_a", "main_fed", "main_fed.py", "check.py", "utils.py"}
FOREIGN |= {"loss_sigma", "loss_psi", "accuracy_averaged"}
FOREIGN |= {"configs/mine.yaml", "configs/tables/mine.yaml", "mine/method.py"}


@cache
def files() -> list[str]:
    """Every file and folder of the sources, from the root."""
    found = [*ROOT.glob("*"), *(path for name in PLACES for path in (ROOT / name).rglob("*"))]
    return [str(path.relative_to(ROOT)) for path in found]


@cache
def words() -> set[str]:
    """Every word of the sources except this file, and every file name without its suffix."""
    texts = [path for name in files() if (path := ROOT / name).suffix in (".py", ".cpp", ".yaml")]
    read = "\n".join(path.read_text("utf-8") for path in texts if path != Path(__file__))
    return {*re.findall(r"\w+", read), *(Path(name).stem for name in files())}


def missing(text: str) -> Iterator[str]:
    """Names in backticks, or in a drawing beside code, that the sources do not contain."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    for span in [*re.findall(r"`([^`]+)`", text), *blocks]:
        for word in set(re.findall(r"\w+", re.sub(r"[\w*./-]*[/*][\w*./-]*|\w+\.\w+", "", span))):
            if re.search(r"[a-z]_[a-z]|[a-z][A-Z]", word) and word not in words() | FOREIGN:
                yield word
        for part in re.findall(r"(?<=\w\.)\w*_\w+", span):
            if part not in words():
                yield part
        for name in re.findall(r"[\w./*-]+", span):
            ours = name.split("/")[0] in PLACES and "/" in name
            if not ours and not re.fullmatch(r"[a-z][\w/]*\.(py|cpp|hpp)", name):
                continue
            if any(part.isupper() for part in re.split(r"[/._]", name)) or name in FOREIGN:
                continue  # a placeholder: configs/NAME.yaml
            if not any(fnmatch(f"/{file}", f"*/{name.strip('/.')}") for file in files()):
                yield name
        for module in re.findall(r"-m ((?:privssl|benchmarks|tests)(?:\.[a-z_]+)*)", span):
            if not {module.replace(".", "/") + end for end in ("", ".py")} & set(files()):
                yield module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_things_that_exist(page: Path) -> None:
    assert list(missing(page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("the step is in `privssl/core/visits.py`", "privssl/core/visits.py"),
        ("rounds are in `algorithm.py`, votes in `three_players.py`", "three_players.py"),
        ("`losses.row_losses_of` has the losses", "row_losses_of"),
        ("`NoSuchMean` is the average", "NoSuchMean"),
        ("run `python -m privssl.nothing`", "privssl.nothing"),
        ("```\nround    ask_each_agent\n```\n", "ask_each_agent"),
    ],
)
def test_the_check_detects_names_that_do_not_exist(text: str, name: str) -> None:
    assert list(missing(text)) == [name]
