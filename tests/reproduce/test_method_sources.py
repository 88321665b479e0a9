"""The source hash of a method: code changes it; comments, docstrings and layout do not."""

import functools
import shutil
from pathlib import Path

import pytest

from privssl.algorithms import ALGORITHMS
from privssl.errors import ConfigError
from privssl.reproduce.method_sources import _find_modules, method_hash
from tests.support.product import ROOT

SEMIFL = "privssl/algorithms/semifl/algorithm.py"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "generators", folder / "generators")
    shutil.copytree(ROOT / "privssl" / "algorithms", folder / "privssl" / "algorithms")
    return folder


@functools.cache
def untouched(algorithm: str, sources: Path) -> str:
    """The hash; each test leaves the files unchanged."""
    return method_hash(algorithm, sources)


def after(sources: Path, file: str, old: str, new: str, algorithm: str) -> tuple[str, str]:
    """The hash of a method before and after a change of a file."""
    path = sources / file
    text = path.read_text()
    assert old in text
    before = untouched(algorithm, sources)
    path.write_text(text.replace(old, new, 1))
    try:
        return before, method_hash(algorithm, sources)
    finally:
        path.write_text(text)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (SEMIFL, "import dataclasses\n", "import dataclasses  # a comment\n\n"),
        (SEMIFL, '"""', '"""Other words. '),
        ("privssl/algorithms/base.py", "    def ", "    # a comment\n    def "),
    ],
)
def test_comments_docstrings_and_layout_do_not_change_the_hash(
    sources: Path, file: str, old: str, new: str
) -> None:
    before, now = after(sources, file, old, new, "semifl")
    assert before == now


@pytest.mark.parametrize(
    ("file", "algorithm", "counts"),
    [
        (SEMIFL, "semifl", True),
        ("privssl/algorithms/local_ssl.py", "semifl", True),  # it imports this module
        ("privssl/algorithms/base.py", "semifl", True),
        ("generators/objectives.py", "fedssl", True),
        ("generators/spectral.py", "fedssl", True),  # imported indirectly
        ("privssl/algorithms/fedssl/losses.py", "fedssl", True),
        ("privssl/algorithms/fedssl/losses.py", "semifl", False),
        (SEMIFL, "fedssl", False),
        ("privssl/algorithms/__init__.py", "semifl", False),  # the list of all methods
    ],
)
def test_a_statement_changes_the_hash_of_the_methods_that_import_its_module(
    sources: Path, file: str, algorithm: str, counts: bool
) -> None:
    first = (sources / file).read_text().partition("\n")[0]
    before, now = after(sources, file, first, f"{first}\n", algorithm)
    assert before == now
    path = sources / file
    text = path.read_text()
    path.write_text(f"{text}\nADDED = 1\n")
    try:
        assert (method_hash(algorithm, sources) != before) == counts
    finally:
        path.write_text(text)


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_every_method_counts_its_module_and_its_package(algorithm: str) -> None:
    module = ALGORITHMS[algorithm].__module__
    found = _find_modules(module, ROOT)

    assert {module, "privssl.algorithms.base"} <= found.keys()
    own = (ROOT / module.replace(".", "/")).parent
    if own.name not in ("algorithms", "baselines"):
        stems = {path.stem for path in own.glob("*.py")}
        assert {f"{module.rpartition('.')[0]}.{stem}" for stem in stems} <= {
            *found, f"{module.rpartition('.')[0]}.__init__",
        }  # fmt: skip
    assert all(name.split(".")[0] == "generators" or "algorithms" in name for name in found)


def test_a_folder_without_the_sources_has_no_hash(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no sources of fedssl"):
        method_hash("fedssl", tmp_path)
