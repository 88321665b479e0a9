"""Sparse weights in messages: round trips, sizes and refused input."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from privssl.core.messages import Message, MessageError, StateDict, payload_bytes
from privssl.core.sparse_tensors import from_sparse, to_sparse
from tests.support.messages import Note
from tests.support.toy_worlds import same_bits

HELD = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}


def test_changed_entries_are_restored_at_their_positions() -> None:
    new = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([7.0, 8.0, 9.0, 10.0])}
    sent = {"a": torch.tensor([[False, True, False], [False] * 3]), "b": torch.ones(4).bool()}
    sparse = to_sparse(new, sent)
    assert sparse["values"].tolist() == [1, 7, 8, 9, 10]
    # entries 1 and 6 to 9 of ten: bits 2 + 64 + 128 of the first byte, 1 + 2 of the second
    assert sparse["bits"].tolist() == [194, 3]
    back = from_sparse(HELD, sparse)
    assert back["a"].tolist() == [[0, 1, 0], [0, 0, 0]] and torch.equal(back["b"], new["b"])
    assert not HELD["b"].any()  # the stored weights are not changed


@given(entries=st.integers(1, 300), data=st.data())
def test_any_choice_of_entries_round_trips_in_the_documented_number_of_bytes(
    entries: int, data: st.DataObject
) -> None:
    count = data.draw(st.sampled_from([0, 1, entries // 32, entries // 2, entries]))
    where = torch.zeros(entries, dtype=torch.bool)
    where[torch.tensor(data.draw(st.permutations(range(entries)))[:count], dtype=torch.int64)] = (
        True
    )
    new, old = torch.arange(1.0, entries + 1), -torch.ones(entries)
    sparse = to_sparse({"w": new}, {"w": where})
    assert torch.equal(from_sparse({"w": old}, sparse)["w"], torch.where(where, new, old))
    places = 0 if count == entries else min(4 * count, math.ceil(entries / 8))
    assert payload_bytes(Note(sparse)) - payload_bytes(Note({})) == 4 * count + places


def test_empty_weights_have_an_empty_sparse_form() -> None:
    assert to_sparse({}, {}) == {} and from_sparse({}, {}) == {}


def test_sparse_weights_keep_their_dtype() -> None:
    new = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    back = from_sparse(
        {"w": torch.zeros(2, dtype=torch.float64)}, to_sparse(new, {"w": new["w"] > 1})
    )
    assert same_bits(back, {"w": torch.tensor([0.0, 2.0], dtype=torch.float64)})


VALUES, INDICES = torch.tensor([1.0, 2.0]), torch.tensor([0, 9], dtype=torch.int32)
BITS = torch.tensor([1, 2], dtype=torch.uint8)


@pytest.mark.parametrize(("sparse", "what"), [
    ({}, "lack values"),
    ({"values": VALUES.double(), "indices": INDICES}, "lack values of torch.float32"),
    ({"values": VALUES[:, None], "indices": INDICES}, "lack values"),
    ({"values": VALUES}, "2 values for 10 places"),
    ({"values": VALUES[:1], "indices": INDICES}, "1 values for 2 places"),
    ({"values": VALUES, "indices": INDICES.long()}, "ascending int32"),
    ({"values": VALUES, "indices": INDICES.flip(0)}, "ascending int32"),
    ({"values": VALUES, "indices": INDICES * 0}, "ascending int32"),
    ({"values": VALUES, "indices": INDICES + 1}, "outside of 10"),
    ({"values": VALUES, "indices": INDICES - 1}, "outside of 10"),
    ({"values": VALUES, "bits": BITS[:1]}, "do not fit 10"),
    ({"values": VALUES, "bits": BITS.int()}, "do not fit 10"),
    ({"values": VALUES, "bits": torch.tensor([1, 4], dtype=torch.uint8)}, "beyond 10"),
    ({"values": VALUES, "bits": BITS, "indices": INDICES}, "sparse weights have"),
    ({"values": VALUES, "w": INDICES}, "sparse weights have"),
])  # fmt: skip
def test_an_invalid_sparse_form_is_refused(sparse: dict[str, Tensor], what: str) -> None:
    with pytest.raises(MessageError, match=what):
        from_sparse(HELD, sparse)


@pytest.mark.parametrize("place", [{"indices": INDICES}, {"bits": BITS}])
def test_control_valid_sparse_forms_are_accepted(place: dict[str, Any]) -> None:
    back: StateDict = from_sparse(HELD, {"values": VALUES, **place})
    assert (float(back["a"][0, 0]), float(back["b"][3])) == (1.0, 2.0)


def test_payload_bytes_counts_the_bytes_of_a_sparse_form() -> None:
    assert issubclass(Note, Message)
    sparse = to_sparse({"w": torch.ones(3)}, {"w": torch.tensor([True, False, True])})
    assert payload_bytes(Note(sparse)) - payload_bytes(Note({})) == 2 * 4 + 1
