"""Use the error bounds of users for epsilon: tests of other packages use rougher ones."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def exact(costs_of_users_in_file: None) -> None:
    """Apply to every file of this folder."""
