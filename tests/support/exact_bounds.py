"""Bounds on epsilon as users get them; elsewhere in tests they are rough (tests/conftest.py)."""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from accounting import verify

INTERVAL = verify._INTERVAL


@contextlib.contextmanager
def exact() -> Iterator[None]:
    verify._compose.cache_clear()  # it does not ask how wide a cell is
    with patch.object(verify, "_INTERVAL", INTERVAL):
        yield
    verify._compose.cache_clear()


@pytest.fixture
def exact_bounds() -> Iterator[None]:
    with exact():
        yield
