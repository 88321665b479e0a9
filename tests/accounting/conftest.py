"""Bounds here are those of users; tests of other packages make rough ones (tests/conftest.py)."""

from collections.abc import Iterator

import pytest

from tests.support.exact_bounds import exact


@pytest.fixture(scope="package", autouse=True)
def bounds_are_exact() -> Iterator[None]:
    with exact():
        yield
