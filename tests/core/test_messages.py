"""What leaves an agent: the average that a server takes, and the bytes that a network carries."""

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


def silent(sender: str) -> Reply[Note]:
    return Reply(AgentRef(sender, "query"), Declined("nothing to say"), weight=100.0)


NOBODY = {"w": torch.tensor([7.0])}


# The average --------------------------------------------------------------------------------


def test_the_average_weighs_every_agent_by_its_share() -> None:
    mean = average([reply("a", [2.0, 0.0], 1), reply("b", [6.0, 4.0], 3)], "w", otherwise=NOBODY)
    assert torch.equal(mean["w"], torch.tensor([5.0, 3.0]))  # (2 + 3 * 6) / 4, (0 + 3 * 4) / 4


@pytest.mark.parametrize("shape", [(), (0,), (4,), (3, 3), (2, 3, 2, 2)])
def test_the_average_of_a_weight_of_any_size_and_layout_has_all_of_its_numbers(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(averages, "PIECE", 4)  # as many as a piece, fewer, more, no multiple
    plain = [torch.arange(math.prod(shape)).reshape(shape) * factor + 1.0 for factor in (1, 5)]
    sent = [w.to(memory_format=torch.channels_last) if w.dim() == 4 else w for w in plain]
    replies = [reply(name, w) for name, w in zip("ab", sent, strict=True)]
    expected = (plain[0] + plain[1]) / 2
    assert torch.equal(average(replies, "w", otherwise=NOBODY)["w"], expected)


def test_fields_are_averaged_each_by_itself_however_many_are_done_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(averages, "PIECE", 4)  # several fields, parts of one, or one alone
    sizes = {"a": 1, "b": 2, "none": 0, "c": 6, "d": 4, "e": 1}
    sent = [
        {name: (torch.arange(count) + at) * 10.0**at for name, count in sizes.items()}
        for at in (1, 2)
    ]
    sent = [{**one, "steps": torch.tensor([at])} for at, one in zip((2, 6), sent, strict=True)]
    replies = [
        Reply(AgentRef(name, "query"), Note(one)) for name, one in zip("ab", sent, strict=True)
    ]
    found = average(replies, "w", otherwise=NOBODY)
    assert list(found) == [*sizes, "steps"]
    for name in sizes:
        assert torch.equal(found[name], (sent[0][name] + sent[1][name]) / 2)
    assert found["steps"].dtype == torch.int64 and found["steps"].tolist() == [4]


def test_a_rule_for_weights_takes_the_place_of_the_share() -> None:
    replies = [reply("a", [2.0], 1), reply("b", [6.0], 3)]
    mean = average(replies, "w", otherwise=NOBODY, weight=lambda r: 1.0)
    assert torch.equal(mean["w"], torch.tensor([4.0]))


def test_silent_agents_and_those_that_sent_nothing_count_nothing() -> None:
    replies = [silent("a"), reply("b", [2.0]), reply("c", None, 50.0), reply("d", [9.0], 0.0)]
    assert torch.equal(average(replies, "w", otherwise=NOBODY)["w"], torch.tensor([2.0]))


@pytest.mark.parametrize(
    "replies", [[], [silent("a")], [reply("a", None)], [reply("a", [1.0], 0.0)]]
)
def test_the_caller_decides_what_it_means_that_nobody_sent_anything(replies: Any) -> None:
    assert average(replies, "w", otherwise=NOBODY) is NOBODY


def test_shares_that_are_numbers_one_by_one_and_none_together_take_no_mean_away() -> None:
    replies = [reply("a", [1.0], 1e308), reply("b", [2.0], 1.2e308), reply("c", [3.0], 10.0)]
    with pytest.raises(MessageError, match=r"overflows: b has 1.2e\+308"):
        average(replies, "w", otherwise=NOBODY)
    assert float(average(replies[1:], "w", otherwise=NOBODY)["w"]) == 2.0  # the control


def test_the_order_of_arrival_changes_no_bit_of_the_average() -> None:
    # In float64 (1e20 + 1) - 1e20 is 0, but (1e20 - 1e20) + 1 is 1: sums depend on their order.
    values = {"q2": 1e20, "q9": 1.0, "q10": -1e20}
    means = {
        float(
            average(
                [reply(q, torch.tensor([values[q]], dtype=torch.float64)) for q in arrived],
                "w", otherwise=NOBODY,
            )["w"]
        )
        for arrived in itertools.permutations(values)
    }  # fmt: skip
    assert len(means) == 1
    # Not by sum(), which carries what is rounded off along from Python 3.12 on.
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
def test_agents_that_agree_keep_what_they_agree_on(
    value: float, count: int, weights: list[float]
) -> None:
    sent = {"w": torch.tensor([value]), "batches": torch.tensor(count)}
    replies = [Reply(AgentRef(f"q{i}", "query"), Note(sent), w) for i, w in enumerate(weights)]
    assert same_bits(average(replies, "w", otherwise=NOBODY), sent)


def test_a_small_part_survives_beside_a_thousand_others() -> None:
    # In float32 1000 + 1e-5 is 1000, and the last agent would be lost.
    replies = [reply(f"q{i}", [1.0]) for i in range(1000)] + [reply("s0", [1.0 + 2.0**-10])]
    mean = float(average(replies, "w", otherwise=NOBODY)["w"])
    assert mean == pytest.approx(1 + 2.0**-10 / 1001, abs=2**-23)
    assert mean != 1.0


def test_a_mean_over_many_agents_is_rounded_once() -> None:
    sent = torch.rand(500, 50, generator=torch.Generator().manual_seed(0))
    replies = [reply(f"q{i}", row.tolist()) for i, row in enumerate(sent)]
    mean = average(replies, "w", otherwise=NOBODY)["w"]
    assert torch.equal(mean, sent.double().mean(dim=0).float())


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.ones(1)},  # would be broadcast over both numbers
        {"w": torch.ones(2, dtype=torch.float64)},
        {"v": torch.ones(2)},
        {"w": torch.ones(2), "v": torch.ones(2)},
    ],
)
def test_weights_of_another_form_are_not_averaged(other: StateDict) -> None:
    mean = WeightedMean("w")
    mean.add(reply("q0", [1.0, 2.0]))
    with pytest.raises(MessageError, match="q1 and q0 sent w in unlike forms"):
        mean.add(Reply(AgentRef("q1", "query"), Note(other)))


@pytest.mark.parametrize("share", [-1.0, math.nan, math.inf])
def test_a_share_that_is_no_number_from_0_is_refused(share: float) -> None:
    with pytest.raises(MessageError, match="q0 has the weight"):
        WeightedMean("w").add(reply("q0", [1.0], share))


def test_a_mean_lets_go_of_what_it_was_given() -> None:
    sent, mean = reply("q0", [4.0], 3.0), WeightedMean("w")
    left = mean.consume(sent)
    assert (left.sender, left.weight, left.content) == (sent.sender, 3.0, Ack())
    assert mean.consume(silent("q1")) == silent("q1")
    mean.consume(reply("q2", [8.0], 1.0))
    assert torch.equal(mean.value_or(NOBODY)["w"], torch.tensor([5.0]))  # (3 * 4 + 8) / 4
    assert WeightedMean("w").value_or(NOBODY) is NOBODY


# Replies ------------------------------------------------------------------------------------


def test_the_content_of_a_silent_reply_cannot_be_read_by_mistake() -> None:
    assert silent("q3").declined and not reply("q3", [1.0]).declined
    with pytest.raises(NoPayloadError, match="q3 declined: nothing to say"):
        _ = silent("q3").payload


# Bytes --------------------------------------------------------------------------------------


def test_payload_counts_tensors_texts_and_numbers() -> None:
    note = Note({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.uint8)}, torch.zeros(()))
    # 6 x 4 and 5 x 1 bytes, one float32 of 4; number None 0; count and flag 8 each; no text
    assert payload_bytes(note) == 24 + 5 + 4 + 0 + 8 + 8 + 0
    assert payload_bytes(Declined("né")) == 3  # é takes two bytes in UTF-8
    assert payload_bytes(Ack()) == 0


def kinds_of_messages() -> list[type[Message]]:
    """Every message class of the product: importing all algorithms has defined them."""
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
    """Messages of a class, each field filled by what its annotation allows."""
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: _values(hint) for name, hint in hints.items()})


def _values(hint: Any) -> st.SearchStrategy[Any]:
    parts = typing.get_args(hint) if hint not in VALUES else (hint,)
    return st.one_of([VALUES[part] for part in parts])


@pytest.mark.parametrize("kind", [*kinds_of_messages(), Note], ids=lambda kind: kind.__qualname__)
@given(data=st.data())
def test_every_message_comes_out_of_bytes_as_it_went_in(
    kind: type[Message], data: st.DataObject
) -> None:
    message = data.draw(any_of(kind))
    back = deserialize(kind, serialize(message))
    assert type(back) is kind
    assert same_bits(message, back)
    for name, value in vars(message).items():
        assert isinstance(getattr(back, name), Mapping) == isinstance(value, Mapping)


def test_a_flipped_bit_on_the_way_is_not_the_same_message() -> None:
    note = Note({"w": torch.tensor([1.0])})
    data = bytearray(serialize(note))
    data[-1] ^= 1
    assert not same_bits(note, deserialize(Note, bytes(data)))


def test_tensors_may_share_memory_and_lie_in_any_order() -> None:
    shared = torch.arange(16.0).view(1, 4, 2, 2)
    lying = shared.to(memory_format=torch.channels_last)
    note = Note({"F": shared, "teacher": shared, "half": shared[:, :2], "last": lying})
    assert same_bits(note, deserialize(Note, serialize(note)))


def test_bytes_do_not_choose_what_is_built_of_them() -> None:
    assert deserialize(Ack, serialize(Note({"w": torch.ones(2)}, text="rm"))) == Ack()


@dataclass(frozen=True)
class Numbered(Message):
    text: float


def test_a_field_of_another_type_than_declared_is_refused() -> None:
    data = serialize(Note(None, text="rm"))
    with pytest.raises(MessageError, match=r"Numbered\.text came as a str"):
        deserialize(Numbered, data)


def test_numbers_of_a_type_that_no_network_has_are_refused() -> None:
    with pytest.raises(MessageError, match="complex64"):
        check_numbers("F", torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize("value", [[1.0], (1, 2), b"x", {1}, object()])
def test_what_is_no_tensor_number_or_text_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"Note\.text is a {type(value).__name__}"):
        serialize(Note(None, text=value))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_numbers_pass_whatever_their_sum_and_others_never_do(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    check_numbers("F", torch.tensor([most, most, most], dtype=dtype))  # the sum is infinite
    check_numbers("F", torch.empty(0, dtype=dtype))
    inf, nan = float("inf"), float("nan")
    for bad in ([inf, -inf], [nan, 1.0], [inf, 0.0], [1.0, -inf], [most, most, nan]):
        with pytest.raises(MessageError, match="F has numbers that are not finite"):
            check_numbers("F", torch.tensor(bad, dtype=dtype))
