"""The server's weighted average, and messages as bytes."""

import functools
import itertools
import math
import operator
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from privssl.algorithms import ALGORITHMS
from privssl.core import aggregation as averages
from privssl.core.agents import AgentRef
from privssl.core.aggregation import WeightedMean, average
from privssl.core.messages import (
    Ack,
    Declined,
    Message,
    MessageError,
    NoPayloadError,
    Reply,
    StateDict,
    check_numbers,
    deserialize,
    payload_bytes,
    serialize,
)
from tests.support.messages import Note, reply
from tests.support.toy_worlds import same_bits


def declined_reply(sender: str) -> Reply[Note]:
    return Reply(AgentRef(sender, "query"), Declined("nothing to say"), weight=100.0)


OTHERWISE = {"w": torch.tensor([7.0])}


# The average --------------------------------------------------------------------------------


def test_the_average_weighs_every_agent_by_its_weight() -> None:
    mean = average([reply("a", [2.0, 0.0], 1), reply("b", [6.0, 4.0], 3)], "w", otherwise=OTHERWISE)
    assert torch.equal(mean["w"], torch.tensor([5.0, 3.0]))  # (2 + 3 * 6) / 4, (0 + 3 * 4) / 4


@pytest.mark.parametrize("shape", [(), (0,), (4,), (3, 3), (2, 3, 2, 2)])
def test_tensors_of_any_size_and_layout_are_averaged_completely(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(
        averages, "PIECE", 4
    )  # sizes of one piece, less, more, and no multiple of it
    plain = [torch.arange(math.prod(shape)).reshape(shape) * factor + 1.0 for factor in (1, 5)]
    sent = [w.to(memory_format=torch.channels_last) if w.dim() == 4 else w for w in plain]
    replies = [reply(name, w) for name, w in zip("ab", sent, strict=True)]
    expected = (plain[0] + plain[1]) / 2
    assert torch.equal(average(replies, "w", otherwise=OTHERWISE)["w"], expected)


def test_tensors_are_averaged_one_by_one_however_they_are_grouped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        averages, "PIECE", 4
    )  # a group has several tensors, a part of one, or one tensor
    sizes = {"a": 1, "b": 2, "none": 0, "c": 6, "d": 4, "e": 1}
    sent = [
        {name: (torch.arange(count) + at) * 10.0**at for name, count in sizes.items()}
        for at in (1, 2)
    ]
    sent = [{**one, "steps": torch.tensor([at])} for at, one in zip((2, 6), sent, strict=True)]
    replies = [
        Reply(AgentRef(name, "query"), Note(one)) for name, one in zip("ab", sent, strict=True)
    ]
    found = average(replies, "w", otherwise=OTHERWISE)
    assert list(found) == [*sizes, "steps"]
    for name in sizes:
        assert torch.equal(found[name], (sent[0][name] + sent[1][name]) / 2)
    assert found["steps"].dtype == torch.int64 and found["steps"].tolist() == [4]


def test_a_weight_function_replaces_the_weights_of_the_replies() -> None:
    replies = [reply("a", [2.0], 1), reply("b", [6.0], 3)]
    mean = average(replies, "w", otherwise=OTHERWISE, weight=lambda r: 1.0)
    assert torch.equal(mean["w"], torch.tensor([4.0]))


def test_declined_replies_empty_messages_and_zero_weights_are_ignored() -> None:
    replies = [
        declined_reply("a"),
        reply("b", [2.0]),
        reply("c", None, 50.0),
        reply("d", [9.0], 0.0),
    ]
    assert torch.equal(average(replies, "w", otherwise=OTHERWISE)["w"], torch.tensor([2.0]))


@pytest.mark.parametrize(
    "replies", [[], [declined_reply("a")], [reply("a", None)], [reply("a", [1.0], 0.0)]]
)
def test_without_any_contribution_the_average_is_the_callers_default(replies: Any) -> None:
    assert average(replies, "w", otherwise=OTHERWISE) is OTHERWISE


def test_weights_whose_sum_overflows_are_refused() -> None:
    replies = [reply("a", [1.0], 1e308), reply("b", [2.0], 1.2e308), reply("c", [3.0], 10.0)]
    with pytest.raises(MessageError, match=r"overflows: b has 1.2e\+308"):
        average(replies, "w", otherwise=OTHERWISE)
    assert float(average(replies[1:], "w", otherwise=OTHERWISE)["w"]) == 2.0  # the control


def test_the_average_does_not_depend_on_the_order_of_arrival() -> None:
    # In float64 (1e20 + 1) - 1e20 is 0, but (1e20 - 1e20) + 1 is 1: sums depend on their order.
    values = {"q2": 1e20, "q9": 1.0, "q10": -1e20}
    means = {
        float(
            average(
                [reply(q, torch.tensor([values[q]], dtype=torch.float64)) for q in arrived],
                "w", otherwise=OTHERWISE,
            )["w"]
        )
        for arrived in itertools.permutations(values)
    }  # fmt: skip
    assert len(means) == 1
    # Not sum(), which compensates rounding errors since Python 3.12.
    plain = {
        functools.reduce(operator.add, (values[q] / 3 for q in arrived))
        for arrived in itertools.permutations(values)
    }
    assert len(plain) > 1  # the control: a sum in order of arrival would be seen


@given(
    value=st.floats(width=32, allow_nan=False, allow_infinity=False),
    count=st.integers(-(2**40), 2**40),
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=7),
)
def test_the_average_of_equal_tensors_is_the_same_tensor_bit_for_bit(
    value: float, count: int, weights: list[float]
) -> None:
    sent = {"w": torch.tensor([value]), "batches": torch.tensor(count)}
    replies = [Reply(AgentRef(f"q{i}", "query"), Note(sent), w) for i, w in enumerate(weights)]
    assert same_bits(average(replies, "w", otherwise=OTHERWISE), sent)


def test_a_small_difference_survives_in_the_mean_of_a_thousand_agents() -> None:
    # In float32 1000 + 1e-5 is 1000: the last agent's contribution would be lost.
    replies = [reply(f"q{i}", [1.0]) for i in range(1000)] + [reply("s0", [1.0 + 2.0**-10])]
    mean = float(average(replies, "w", otherwise=OTHERWISE)["w"])
    assert mean == pytest.approx(1 + 2.0**-10 / 1001, abs=2**-23)
    assert mean != 1.0


def test_a_mean_over_many_agents_is_rounded_once() -> None:
    sent = torch.rand(500, 50, generator=torch.Generator().manual_seed(0))
    replies = [reply(f"q{i}", row.tolist()) for i, row in enumerate(sent)]
    mean = average(replies, "w", otherwise=OTHERWISE)["w"]
    assert torch.equal(mean, sent.double().mean(dim=0).float())


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.ones(1)},  # would be broadcast to both numbers
        {"w": torch.ones(2, dtype=torch.float64)},
        {"v": torch.ones(2)},
        {"w": torch.ones(2), "v": torch.ones(2)},
    ],
)
def test_tensors_of_unlike_shapes_dtypes_or_names_are_not_averaged(other: StateDict) -> None:
    mean = WeightedMean("w")
    mean.add(reply("q0", [1.0, 2.0]))
    with pytest.raises(MessageError, match="q1 and q0 sent w in unlike forms"):
        mean.add(Reply(AgentRef("q1", "query"), Note(other)))


@pytest.mark.parametrize("share", [-1.0, math.nan, math.inf])
def test_a_negative_or_infinite_weight_is_refused(share: float) -> None:
    with pytest.raises(MessageError, match="q0 has the weight"):
        WeightedMean("w").add(reply("q0", [1.0], share))


def test_a_consumed_reply_no_longer_holds_its_tensors() -> None:
    sent, mean = reply("q0", [4.0], 3.0), WeightedMean("w")
    left = mean.consume(sent)
    assert (left.sender, left.weight, left.content) == (sent.sender, 3.0, Ack())
    assert mean.consume(declined_reply("q1")) == declined_reply("q1")
    mean.consume(reply("q2", [8.0], 1.0))
    assert torch.equal(mean.value_or(OTHERWISE)["w"], torch.tensor([5.0]))  # (3 * 4 + 8) / 4
    assert WeightedMean("w").value_or(OTHERWISE) is OTHERWISE


# Replies ------------------------------------------------------------------------------------


def test_reading_the_payload_of_a_declined_reply_raises() -> None:
    assert declined_reply("q3").declined and not reply("q3", [1.0]).declined
    with pytest.raises(NoPayloadError, match="q3 declined: nothing to say"):
        _ = declined_reply("q3").payload


# Bytes --------------------------------------------------------------------------------------


def test_payload_counts_tensors_texts_and_numbers() -> None:
    note = Note({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.uint8)}, torch.zeros(()))
    # 6 x 4 and 5 x 1 bytes, one float32 of 4; number None 0; count and flag 8 each; no text
    assert payload_bytes(note) == 24 + 5 + 4 + 0 + 8 + 8 + 0
    assert payload_bytes(Declined("né")) == 3  # é takes two bytes in UTF-8
    assert payload_bytes(Ack()) == 0


def kinds_of_messages() -> list[type[Message]]:
    """All message classes of the package: importing the algorithms defines them."""
    assert list(ALGORITHMS.values())
    found: list[type[Message]] = []
    for kind in Message.__subclasses__():
        if kind.__module__.startswith("privssl."):
            found.append(kind)
    return found


_tensors = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).view(shape).to(dtype),
    st.sampled_from([(2, 3), (), (2, 3, 2, 2), (0,)]),
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16]),
)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    Tensor: _tensors,
    StateDict: st.dictionaries(st.text("ab./é_", max_size=5), _tensors, max_size=3),
    float: st.floats(allow_nan=False),
    int: st.integers(-(2**53), 2**53),
    bool: st.booleans(),
    str: st.text(),
    type(None): st.none(),
}


def any_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of a class, with random values of each field's annotated type."""
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: _values(hint) for name, hint in hints.items()})


def _values(hint: Any) -> st.SearchStrategy[Any]:
    parts = typing.get_args(hint) if hint not in VALUES else (hint,)
    return st.one_of([VALUES[part] for part in parts])


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("kind", [*kinds_of_messages(), Note], ids=lambda kind: kind.__qualname__)
@given(data=st.data())
def test_every_message_class_survives_serialisation(
    kind: type[Message], data: st.DataObject
) -> None:
    message = data.draw(any_of(kind))
    back = deserialize(kind, serialize(message))
    assert type(back) is kind
    assert same_bits(message, back)
    for name, value in vars(message).items():
        assert isinstance(getattr(back, name), Mapping) == isinstance(value, Mapping)


def test_control_a_flipped_bit_changes_the_message() -> None:
    note = Note({"w": torch.tensor([1.0])})
    data = bytearray(serialize(note))
    data[-1] ^= 1
    assert not same_bits(note, deserialize(Note, bytes(data)))


def test_tensors_may_share_memory_and_lie_in_any_order() -> None:
    shared = torch.arange(16.0).view(1, 4, 2, 2)
    channels_last = shared.to(memory_format=torch.channels_last)
    note = Note({"F": shared, "teacher": shared, "half": shared[:, :2], "last": channels_last})
    assert same_bits(note, deserialize(Note, serialize(note)))


def test_the_receiver_chooses_the_message_class_and_not_the_bytes() -> None:
    assert deserialize(Ack, serialize(Note({"w": torch.ones(2)}, text="rm"))) == Ack()


@dataclass(frozen=True)
class Numbered(Message):
    text: float


def test_a_field_of_another_type_than_declared_is_refused() -> None:
    data = serialize(Note(None, text="rm"))
    with pytest.raises(MessageError, match=r"Numbered\.text came as a str"):
        deserialize(Numbered, data)


def test_tensors_of_unsupported_dtypes_are_refused() -> None:
    with pytest.raises(MessageError, match="complex64"):
        check_numbers("F", torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize("value", [[1.0], (1, 2), b"x", {1}, object()])
def test_a_field_that_is_no_tensor_number_or_string_is_not_serialised(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"Note\.text is a {type(value).__name__}"):
        serialize(Note(None, text=value))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_numbers_pass_even_if_their_sum_overflows_and_others_never_pass(
    dtype: torch.dtype,
) -> None:
    largest = torch.finfo(dtype).max
    check_numbers(
        "F", torch.tensor([largest, largest, largest], dtype=dtype)
    )  # the sum is infinite
    check_numbers("F", torch.empty(0, dtype=dtype))
    inf, nan = float("inf"), float("nan")
    for bad in ([inf, -inf], [nan, 1.0], [inf, 0.0], [1.0, -inf], [largest, largest, nan]):
        with pytest.raises(MessageError, match="F has numbers that are not finite"):
            check_numbers("F", torch.tensor(bad, dtype=dtype))
