"""The promises that every algorithm keeps, each with a case that breaks it on purpose.

A new algorithm is tested by standing in ALGORITHMS. What it needs beside ``toy_worlds.QUICK`` to
be quick, and to walk all of its steps within three rounds on toy rows, is told in NEEDS; variants
that take other paths through the same code are listed in CASES.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from privssl.algorithms import ALGORITHMS
from privssl.algorithms.base import Algorithm
from privssl.core.messages import Message, MessageError
from privssl.data import FederatedDataset
from privssl.engines.local import LocalEngine
from privssl.remote.protocol import NOTE
from tests.support.algorithm_contract import CASES, algorithm, relabelled, rows_of
from tests.support.toy_worlds import (
    Backwards,
    Lossy,
    Mute,
    OneMemory,
    OneMemoryBackwards,
    Overheard,
    Played,
    Unused,
    UnusedAndPlain,
    apart,
    at_clients,
    at_server,
    federated_data,
    finite,
    held_as_in,
    play,
    rounds_played,
    same_bits,
    through_disk,
)

#: What travels beside weights. label_census: of patches of 9 pixels their moments, and 8 centroids;
#: of 32 responses their moments; the sum of all 32 features and their number; of 12 cells sums,
#: counts, neighbours and clusters; of 5 clusters the census.
CENSUS_SHAPES = (
    (9, 9), (1,), (8, 9), (8,), (8, 1, 3, 3), (32,), (32, 32), (1, 32), (12, 32), (12,), (12, 12),
    (5, 10),
)  # fmt: skip
#: And of vectors of 64 numbers, or of sequences of 8, sums and cells.
VECTOR_SHAPES = ((1, 1), (64,), (1, 64), (12, 64), (8,), (1, 8), (12, 8))
ALSO_SENT = {"label_census": {torch.Size(shape) for shape in CENSUS_SHAPES + VECTOR_SHAPES}}
PARALLEL = [case for case in CASES if case != "fedssl, one after the other"]
PLACES = {"support": federated_data, "labels-at-server": at_server, "labels-at-client": at_clients}

every_case = pytest.mark.parametrize("case", CASES)
every_algorithm = pytest.mark.parametrize("case", ALGORITHMS)
#: Controls of an engine here, not of an algorithm: of four kinds of state and messages.
a_few = pytest.mark.parametrize("case", ["fedssl", "fedmatch", "semifl", "fedavg"])
#: Variants with other state or other arithmetic; what resumes and travels is alike in the rest.
OTHER_STATE = (
    "fedssl, F by SGD", "fedssl, bfloat16", "fedmatch, bfloat16", "pseudo, batch norm",
    "fedmatch, every row sure", "fedmatch, as printed", "semifl, static norm",
)  # fmt: skip
#: Where variants of an algorithm do not differ from it: they are tried in slow tests.
variants_slowly = pytest.mark.parametrize(
    "case",
    [case if case in ALGORITHMS else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
other_states = pytest.mark.parametrize(
    "case",
    [
        case if case in (*ALGORITHMS, *OTHER_STATE) else pytest.param(case, marks=pytest.mark.slow)
        for case in CASES
    ],
)
#: Each algorithm with its rows at one place, each place with a third of the algorithms; the rest of
#: the grid is slow.
ALGORITHMS_AND_PLACES = [
    pytest.param(case, place, marks=() if (first + second) % 3 == 0 else pytest.mark.slow)
    for first, case in enumerate(ALGORITHMS)
    for second, place in enumerate(PLACES)
]


def played(case: str, parties: FederatedDataset | None = None, **how: Any) -> Played:
    """The same rounds are played once for all tests, which read what came of them."""
    if parties is not None or "resume" in how:
        return play(algorithm(case), parties or federated_data(dataset=rows_of(case)), **how)
    if how.get("rounds") in (None, rounds_played(algorithm(case))):
        how.pop("rounds", None)
    return _played_once(case, tuple(sorted({"engine": Overheard, **how}.items())))


@cache
def _played_once(case: str, how: tuple[tuple[str, Any], ...]) -> Played:
    return play(algorithm(case), federated_data(dataset=rows_of(case)), **dict(how))


def remembers(after: Played) -> bool:
    """Whether any agent keeps something from one visit to the next."""
    return any(after.engine.memories().values())


def said_and_heard(after: Played) -> list[Message]:
    """All that crossed the border, in either direction; silence is a message too."""
    assert isinstance(after.engine, Overheard)
    return [m for call, reply in after.engine.heard for m in (call.message, reply.content)]


# A round does something ----------------------------------------------------------------------


@every_case
def test_a_round_changes_the_released_classifier(case: str) -> None:
    first = None if len(algorithm(case).phases()) > 1 else 1  # in some phase, where there are any
    after = played(case, rounds=first)
    assert not same_bits(after.algorithm.classifier(after.begun), after.classifier)


@every_case
def test_what_agents_note_has_names_that_a_site_would_send(case: str) -> None:
    after = played(case)
    assert isinstance(after.engine, Overheard)
    named = {name for _, reply in after.engine.heard for name in reply.metrics}
    assert named
    assert [name for name in named if not re.fullmatch(NOTE, name)] == []


@variants_slowly
def test_a_round_in_which_all_are_silent_changes_no_weight(case: str) -> None:
    # Also the control of the test above: what changes the classifier is what agents send.
    after = played(case, rounds=1, engine=Mute)
    assert same_bits(weights_in(after.begun), weights_in(after.state))
    assert after.federation.declines > 0


def weights_in(state: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(state).items() if isinstance(value, Mapping)}


# Nothing is left to chance -------------------------------------------------------------------


@other_states
def test_the_same_seed_gives_the_same_bits_whatever_the_global_generator_is_at(case: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20_241)  # nobody else's
        # not ``played``, which remembers
        parties = federated_data(dataset=rows_of(case))
        again = play(algorithm(case), parties).state
        other = play(algorithm(case), parties, 1, seed=1).state
    assert same_bits(played(case).state, again)
    # the control: another seed is another run
    assert not same_bits(played(case, rounds=1).state, other)


@pytest.mark.parametrize("case", PARALLEL)
def test_agents_of_a_parallel_step_may_work_in_any_order(case: str) -> None:
    forwards, backwards = played(case).state, played(case, engine=Backwards).state
    assert apart(forwards, backwards) <= 1e-6


@a_few
def test_order_would_be_noticed_if_agents_saw_each_others_memory(case: str) -> None:
    forwards, backwards = (
        played(case, engine=engine) for engine in (OneMemory, OneMemoryBackwards)
    )
    # where nothing is remembered there is nothing to see
    assert (apart(forwards.state, backwards.state) > 1e-6) == remembers(forwards)


@other_states
def test_a_visit_depends_neither_on_what_its_process_did_nor_on_messages_that_are_not_bytes(
    case: str,
) -> None:
    fresh = played(case, engine=Unused, check_wire=True)
    assert same_bits(played(case).state, fresh.state)


def test_networks_that_are_laid_out_anew_in_each_visit_would_be_noticed() -> None:
    # In which case depends on torch's version and on the processor: another layout need not round
    # differently everywhere.
    assert any(
        not same_bits(played(case).state, played(case, engine=UnusedAndPlain).state)
        for case in CASES
        if case.startswith("fedssl, ")
    )


# What travels --------------------------------------------------------------------------------


@a_few
def test_a_wire_that_loses_bits_would_be_noticed(case: str) -> None:
    assert not same_bits(played(case).state, played(case, engine=Lossy).state)


@every_case
def test_only_declared_fields_travel(case: str) -> None:
    for message in said_and_heard(played(case)):
        assert dataclasses.is_dataclass(message)
        assert list(vars(message)) == [field.name for field in dataclasses.fields(message)]
        with pytest.raises(dataclasses.FrozenInstanceError):
            message.smuggled = None  # type: ignore[attr-defined]


@every_case
def test_no_row_of_an_agent_travels(case: str) -> None:
    after = played(case)
    known = {tensor.shape for tensor in _weights(after.algorithm)} | ALSO_SENT.get(
        case.partition(",")[0], set()
    )
    sent = [tensor for message in said_and_heard(after) for tensor in _tensors(vars(message))]
    assert sent
    if case == "fedmatch, as printed":  # a sparse form is flat, and no row is
        sent = [tensor for tensor in sent if tensor.dim() > 1]
    assert {tensor.shape for tensor in sent} <= known
    assert torch.Size([6, 1, 8, 8]) not in known  # the control: a batch would be noticed


def _weights(algorithm: Algorithm[Any]) -> list[Tensor]:
    networks = [*algorithm.networks().values(), algorithm.task.new_classifier()]
    return [tensor for network in networks for tensor in network.state_dict().values()]


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [t for item in tree.values() for t in _tensors(item)] if isinstance(tree, dict) else []


# Stopping and going on -----------------------------------------------------------------------


@other_states
def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(case: str) -> None:
    last = rounds_played(algorithm(case)) + 1
    whole = played(case, rounds=last)
    saved = through_disk(played(case, rounds=last - 1), last - 1)
    rest = played(case, rounds=last, resume=saved)
    assert same_bits(whole.state, rest.state)
    assert same_bits(whole.engine.memories(), rest.engine.memories())


@a_few
def test_a_resumed_run_whose_agents_forgot_everything_would_be_noticed(case: str) -> None:
    last = rounds_played(algorithm(case)) + 1
    whole = played(case, rounds=last)
    saved = through_disk(played(case, rounds=last - 1), last - 1)
    rest = played(case, rounds=last, resume=dataclasses.replace(saved, memories={}))
    assert same_bits(whole.state, rest.state) != remembers(whole)


@pytest.mark.parametrize(("case", "place"), ALGORITHMS_AND_PLACES)
def test_hidden_labels_change_no_bit_and_given_labels_do(
    case: str, place: str, tmp_path: Path
) -> None:
    parties = PLACES[place]()
    reference = played(case, parties).state
    hidden = PLACES[place](**held_as_in(parties, relabelled(parties, labelled=False), tmp_path))
    assert not torch.equal(hidden.true_labels, parties.true_labels)
    assert same_bits(reference, played(case, hidden).state)
    # The control, and the proof that wherever the labels are, somebody learns from them.
    given = PLACES[place](**held_as_in(parties, relabelled(parties, labelled=True), tmp_path))
    assert not same_bits(reference, played(case, given).state)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.startswith("fedssl") else pytest.mark.slow)
        for case in CASES
        if CASES[case][1].get("rows")
    ],
)
def test_hidden_labels_of_rows_that_are_no_images_change_no_bit_either(
    case: str, tmp_path: Path
) -> None:
    rows = rows_of(case)
    parties = federated_data(dataset=rows)
    reference = played(case, parties).state
    for labelled in (False, True):  # the second is the control
        moved = relabelled(parties, labelled=labelled, rows=rows)
        other = federated_data(**held_as_in(parties, moved, tmp_path))
        assert same_bits(reference, played(case, other).state) != labelled


# Unusual parties -----------------------------------------------------------------------------


class Poisoned(LocalEngine):
    """Breaks a promise: what crosses the border is no number any more."""

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


@variants_slowly
def test_one_agent_of_each_kind_is_enough(case: str) -> None:
    after = played(case, federated_data(support=1, query=1, dataset=rows_of(case)))
    assert finite(after.state)
    assert not same_bits(after.begun, after.state)


@variants_slowly
def test_agents_that_know_a_single_class_give_finite_weights(case: str) -> None:
    cell: dict[str, Any] = {"partition": "classes_per_agent", "k": 1, "support": 10, "query": 10}
    parties = federated_data(dataset=rows_of(case), **cell)
    assert all(len(set(a.labelled.y.tolist())) == 1 for a in parties.agents if a.role == "support")
    assert finite(played(case, parties, rounds=1).state)


@a_few
def test_weights_that_are_not_finite_would_be_noticed(case: str) -> None:
    with pytest.raises(MessageError, match="not finite"):
        played(case, engine=Poisoned)
