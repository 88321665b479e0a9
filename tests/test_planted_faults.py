"""The list of planted faults matches the sources, and every fault is valid Python.

Whether their tests detect them takes minutes: ``python -m tests.planted_faults.run``.
"""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.planted_faults import FAULTS
from tests.planted_faults.fault import ROOT, Fault, StaleFaultError

SLOW = ("slow", "flower", "data")


@cache
def _tree(text: str) -> str:
    """The syntax tree of a file, cached for the faults planted in it."""
    return ast.dump(ast.parse(text))


@cache
def _decorators_of(path: str) -> dict[str, list[str]]:
    """The decorators of each test function of a file, and the marks of the whole file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    of_file = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return {
        node.name: [ast.unparse(mark) for mark in (*of_file, *node.decorator_list)]
        for node in tree.body if isinstance(node, ast.FunctionDef)
    }  # fmt: skip


def test_every_fault_finds_its_text_in_the_present_sources() -> None:
    for fault in FAULTS:
        before, after = fault.sources(ROOT)
        assert before != after, fault.name


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_python_that_does_something_else(fault: Fault) -> None:
    before, after = fault.sources(ROOT)
    for path, text in after.items():
        compile(text, path, "exec")
        assert ast.dump(ast.parse(text)) != _tree(before[path])


def test_every_fault_names_fast_tests_that_exist() -> None:
    assert all(fault.tests for fault in FAULTS)
    for test in {test for fault in FAULTS for test in fault.tests}:
        path, _, name = test.partition("::")
        name, _, case = name.partition("[")
        assert name in _decorators_of(path), test
        for decorator in _decorators_of(path)[name]:
            assert not any(f"mark.{mark}" in decorator for mark in SLOW), test
            if case and "mark.fast_cases" in decorator:
                assert repr(case[:-1]) in decorator, test


def test_there_are_at_least_64_faults_with_unique_names() -> None:
    assert len(FAULTS) >= 64
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1


def test_a_fault_whose_text_is_missing_or_repeated_is_stale(tmp_path: Path) -> None:
    source = tmp_path / "some.py"
    fault = Fault("a sign is lost", (("some.py", "x - 1", "x + 1"),), ("tests/a.py::test_b",))
    source.write_text("y = x - 1\n")
    assert fault.sources(tmp_path) == ({"some.py": "y = x - 1\n"}, {"some.py": "y = x + 1\n"})
    for text in ("y = x - 2\n", "y = x - 1\nz = x - 1\n"):
        source.write_text(text)
        with pytest.raises(StaleFaultError, match="a sign is lost"):
            fault.sources(tmp_path)
