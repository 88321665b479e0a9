"""Reduced costs of what every run computes and few tests check.

Tests that need the costs of users ask for the fixture ``costs_of_users`` or
``costs_of_users_in_file``.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from accounting import verify
from privssl.privacy import card_numbers, row_bits
from privssl.reporting import figures, generator_quality
from privssl.runs import forecast

Constants = Mapping[tuple[Any, str], float | tuple[float, ...]]

SMALL: Constants = {
    (generator_quality, "SAMPLES"): 50,  # judged rows: a tenth of the time of a short run
    (generator_quality, "LEAST_STEPS"): 20,  # training steps of a judge
    (generator_quality, "MOST_STEPS"): 20,
    (figures, "SAMPLES"): 1,  # per class on a contact sheet
    (figures, "TILE"): 8,  # pixels of a row in a picture
    (row_bits, "SCALES"): (1.0,),  # scales of weights
    (row_bits, "TRIES"): 1,  # sets of weights per kind of network in the check of rounding
    (verify, "_INTERVAL"): 1e-3,  # grid of privacy losses: coarser bounds on epsilon
    (forecast, "SECONDS"): 0.0,  # timing in a dry run
    (forecast, "LEAST"): 0.0,
    (forecast, "WARM"): 0.0,
}
OF_USERS: Constants = {(module, name): getattr(module, name) for module, name in SMALL}


@contextmanager
def costs_set_to(constants: Constants) -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(_clear_caches)
        for (module, name), value in constants.items():
            stack.enter_context(patch.object(module, name, value))
        _clear_caches()
        yield


def _clear_caches() -> None:
    """Clear caches whose keys do not contain these constants."""
    verify._compose.cache_clear()
    card_numbers._compute_bounds.cache_clear()
    generator_quality._KNOWN.clear()


@pytest.fixture(scope="session", autouse=True)
def small_costs() -> Iterator[None]:
    with costs_set_to(SMALL):
        yield


@pytest.fixture(scope="module")
def costs_of_users_in_file() -> Iterator[None]:
    """The costs of users, from the first test of a file that asks for them to the last test."""
    with costs_set_to(OF_USERS):
        yield


@pytest.fixture
def costs_of_users() -> Iterator[None]:
    with costs_set_to(OF_USERS):
        yield
