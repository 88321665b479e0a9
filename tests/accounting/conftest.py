"""Bounds here are those of users; tests of other packages make rough ones (tests/conftest.py)."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from accounting import verify

INTERVAL = verify._INTERVAL


@pytest.fixture(scope="package", autouse=True)
def second_opinions_are_those_of_users() -> Iterator[None]:
    verify._compose.cache_clear()  # it does not ask how wide a cell is
    with patch.object(verify, "_INTERVAL", INTERVAL):
        yield
    verify._compose.cache_clear()
