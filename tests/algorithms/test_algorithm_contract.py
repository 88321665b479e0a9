"""The promises of every algorithm (``privssl/testing/promises.py``), and engines that break one on
purpose. Methods that break one: tests/testing/test_check_algorithm.py.

An algorithm is tested if it is listed in ALGORITHMS. Settings beside ``federations.QUICK`` that
make it quick, and let it reach all its steps within three rounds on toy rows, are in NEEDS.
Variants that take other paths through the same code are listed in CASES.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from privssl.algorithms import ALGORITHMS
from privssl.core.messages import Message, MessageError
from privssl.engines.local import LocalEngine
from privssl.testing import check_algorithm
from privssl.testing.promises import PLACES, PROMISES
from tests.support.algorithm_contract import CASES, algorithm, rows_of
from tests.support.toy_worlds import (
    Lossy,
    PlainLayoutEngine,
    RecordingEngine,
    SharedMemoryEngine,
    SharedMemoryReverseEngine,
    Simulation,
    apart,
    federated_data,
    rounds_to_simulate,
    same_bits,
    simulate,
    through_disk,
)

#: What is sent beside weights. label_census: moments of patches of 9 pixels, and 8 centroids;
#: moments of 32 responses; the sum of all 32 features and their number; sums, counts, neighbours
#: and clusters of 12 cells; the census of 5 clusters.
CENSUS_SHAPES = (
    (9, 9), (1,), (8, 9), (8,), (8, 1, 3, 3), (32,), (32, 32), (1, 32), (12, 32), (12,), (12, 12),
    (5, 10),
)  # fmt: skip
#: For vectors of 64 numbers and sequences of 8: sums and cells.
VECTOR_SHAPES = ((1, 1), (64,), (1, 64), (12, 64), (8,), (1, 8), (12, 8))
IN_SEQUENCE = ("fedssl, one after the other", "fedmatch_mixup, in sequence")
ALSO_SENT = {"label_census": CENSUS_SHAPES + VECTOR_SHAPES}
#: The promises that are checked here for each algorithm. ``labels`` has its own test, for each
#: place of labels; tests/privacy checks ``privacy`` for each mechanism.
EVERY = set(PROMISES) - {"labels", "privacy"}
#: Promises in which a variant may differ from its algorithm; slow tests check the others.
OF_VARIANTS = {"learns", "metrics", "order", "fields", "rows"}
#: Variants with other state or other arithmetic; resuming and messages are the same in the rest.
OTHER_STATE = (
    "fedssl, F by SGD", "fedssl, bfloat16", "fedmatch, bfloat16", "pseudo, batch norm",
    "fedmatch, every row sure", "fedmatch, as printed", "semifl, static norm",
)  # fmt: skip
STATE = {"determinism", "resume"}
PUBLISHED = {"fedssl", "fedseal", "semifl", "fedmatch", "fedtrinet", "label_census"}
#: For controls of an engine, not of an algorithm: four kinds of state and messages.
a_few = pytest.mark.parametrize("case", ["fedssl", "fedmatch", "semifl", "fedavg"])
#: Fast for the published methods, FedAvg and (FL)^2, each with its labels at one place.
OFTEN = PUBLISHED | {"fedavg", "fl2"}
EACH = [pytest.param(case, marks=() if case in OFTEN else pytest.mark.slow) for case in ALGORITHMS]
ALGORITHMS_AND_PLACES = [
    pytest.param(
        case, place, marks=() if case in OFTEN and (first + second) % 3 == 0 else pytest.mark.slow
    )
    for first, case in enumerate(ALGORITHMS)
    for second, place in enumerate(PLACES)
]
OF_ROWS = [
    pytest.param(case, marks=() if case.startswith("fedssl") else pytest.mark.slow)
    for case in CASES
    if CASES[case][1].get("rows")
]


def check(case: str, promises: set[str], labels: str = "support") -> None:
    name, settings = CASES[case]
    skipped = check_algorithm(
        ALGORITHMS[name], settings, labels=labels, promises=promises,
        also_sent=ALSO_SENT.get(name, ()), sequential=case in IN_SEQUENCE,
        sparse=case == "fedmatch, as printed",
    )  # fmt: skip
    assert skipped.keys() <= {"order"}


@pytest.mark.parametrize("case", EACH)
def test_an_algorithm_keeps_its_promises(case: str) -> None:
    # Sites also take a new algorithm object for each visit, so ``workers`` rarely adds anything.
    check(case, EVERY if case in PUBLISHED else EVERY - {"workers"})


@pytest.mark.fast_cases("fedssl, gate open")
@pytest.mark.parametrize("case", [case for case in CASES if case not in ALGORITHMS])
def test_a_variant_keeps_the_promises_in_which_it_may_differ(case: str) -> None:
    # they do not change the order of agents
    own_rows = {"order"} if "rows" in CASES[case][1] else set()
    check(case, OF_VARIANTS - own_rows | (STATE if case in OTHER_STATE else set()))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in PUBLISHED])
def test_every_case_keeps_all_promises(case: str) -> None:
    check(case, EVERY)


@pytest.mark.parametrize(("case", "place"), ALGORITHMS_AND_PLACES)
def test_hidden_labels_change_no_bit_and_given_labels_do(case: str, place: str) -> None:
    check(case, {"labels"}, place)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("case", OF_ROWS)
def test_hidden_labels_of_vectors_and_sequences_change_no_bit(case: str) -> None:
    check(case, {"labels"})


# Engines that break a promise --------------------------------------------------------------------


def simulated(case: str, **how: Any) -> Simulation:
    """A simulation, cached for all tests with the same arguments."""
    if "resume" in how:
        return simulate(algorithm(case), federated_data(dataset=rows_of(case)), **how)
    if how.get("rounds") in (None, rounds_to_simulate(algorithm(case))):
        how.pop("rounds", None)
    return _simulated_once(case, tuple(sorted({"engine": RecordingEngine, **how}.items())))


@cache
def _simulated_once(case: str, how: tuple[tuple[str, Any], ...]) -> Simulation:
    return simulate(algorithm(case), federated_data(dataset=rows_of(case)), **dict(how))


def has_memory(after: Simulation) -> bool:
    """Whether an agent keeps anything from one visit to the next."""
    return any(after.engine.memories().values())


@pytest.mark.fast_cases("fedmatch", "fedavg")
@a_few
def test_the_order_check_detects_agents_that_see_each_others_memory(case: str) -> None:
    forwards, backwards = (
        simulated(case, engine=engine) for engine in (SharedMemoryEngine, SharedMemoryReverseEngine)
    )
    # without memory there is nothing to detect
    assert (apart(forwards.state, backwards.state) > 1e-6) == has_memory(forwards)


@pytest.mark.ci
def test_the_resume_check_detects_networks_in_another_memory_layout() -> None:
    # Only some cases differ, by torch version and processor: another layout need not round
    # differently everywhere.
    assert any(
        not same_bits(simulated(case).state, simulated(case, engine=PlainLayoutEngine).state)
        for case in CASES
        if case.startswith("fedssl, ")
    )


@pytest.mark.fast_cases("fedmatch", "fedavg")
@a_few
def test_the_transport_check_detects_a_transport_that_loses_bits(case: str) -> None:
    assert not same_bits(simulated(case).state, simulated(case, engine=Lossy).state)


@pytest.mark.fast_cases("fedmatch", "fedavg")
@a_few
def test_the_resume_check_detects_agents_without_their_memory(case: str) -> None:
    last = rounds_to_simulate(algorithm(case)) + 1
    whole = simulated(case, rounds=last)
    saved = through_disk(simulated(case, rounds=last - 1), last - 1)
    rest = simulated(case, rounds=last, resume=dataclasses.replace(saved, memories={}))
    assert same_bits(whole.state, rest.state) != has_memory(whole)


class Poisoned(LocalEngine):
    """A fault: all floating-point numbers in messages are NaN."""

    def _copy_message(self, message: Message) -> Message:
        return type(message)(
            **{k: _poisoned(v) for k, v in vars(super()._copy_message(message)).items()}
        )


def _poisoned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.full_like(value, math.nan) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _poisoned(item) for key, item in value.items()}
    return value


@a_few
def test_weights_that_are_not_finite_are_refused(case: str) -> None:
    with pytest.raises(MessageError, match="not finite"):
        simulated(case, engine=Poisoned)
