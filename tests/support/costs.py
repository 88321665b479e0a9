"""What each run pays for and few tests ask about is small in tests, unless they say
``usefixtures("costs_of_users")``, or ``"costs_of_users_in_file"``."""

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
    (generator_quality, "SAMPLES"): 50,  # rows that are judged: a tenth of a short run
    (generator_quality, "LEAST_STEPS"): 20,  # in which a judge learns
    (generator_quality, "MOST_STEPS"): 20,
    (figures, "SAMPLES"): 1,  # of each class on a contact sheet
    (figures, "TILE"): 8,  # pixels of a row in a picture
    (row_bits, "SCALES"): (1.0,),  # of weights, and
    (row_bits, "TRIES"): 1,  # weights with which rounding is checked, of each kind of network
    (verify, "_INTERVAL"): 1e-3,  # of privacy losses: bounds on epsilon are rougher
    (forecast, "SECONDS"): 0.0,  # of timing in a dry run, and what a visit may take
    (forecast, "LEAST"): 0.0,
    (forecast, "WARM"): 0.0,
}
OF_USERS: Constants = {(module, name): getattr(module, name) for module, name in SMALL}


@contextmanager
def costs_set_to(constants: Constants) -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(_forget)
        for (module, name), value in constants.items():
            stack.enter_context(patch.object(module, name, value))
        _forget()
        yield


def _forget() -> None:
    """Caches do not ask how wide a cell is, or how long a judge was trained."""
    verify._compose.cache_clear()
    card_numbers._numeric_bounds.cache_clear()
    generator_quality._KNOWN.clear()


@pytest.fixture(scope="session", autouse=True)
def small_costs() -> Iterator[None]:
    with costs_set_to(SMALL):
        yield


@pytest.fixture(scope="module")
def costs_of_users_in_file() -> Iterator[None]:
    """From the first test of a file that asks, to the last of the file."""
    with costs_set_to(OF_USERS):
        yield


@pytest.fixture
def costs_of_users() -> Iterator[None]:
    with costs_set_to(OF_USERS):
        yield
