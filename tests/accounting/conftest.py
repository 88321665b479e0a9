"""Bounds on epsilon are those of users here; tests of other packages make rougher ones."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def exact(costs_of_users_in_file: None) -> None:
    """For each file."""
