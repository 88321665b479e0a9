"""Roles and what they may read; the server's verbs; randomness by (seed, round, agent, purpose)."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from privssl.core.agents import (
    Agent,
    AgentLocation,
    AgentRef,
    LabelledRows,
    UnlabelledRows,
    natural_order,
)
from privssl.core.aggregation import WeightedMean
from privssl.core.federation import Federation, Round, Traffic
from privssl.core.messages import BUDGET_EXHAUSTED, Ack, Declined, Message, StateDict
from privssl.engines.local import LocalEngine
from privssl.errors import RoleError
from privssl.runtime import randomness

LABELLED = LabelledRows(torch.zeros(3, 1, 8, 8), torch.tensor([0, 1, 2]), torch.arange(3))
UNLABELLED = UnlabelledRows(torch.zeros(4, 1, 8, 8), torch.arange(4))


def support(name: str) -> Agent:
    return Agent(id=name, held_labelled=LABELLED)


def query(name: str) -> Agent:
    return Agent(id=name, held_unlabelled=UNLABELLED)


def mixed(name: str) -> Agent:
    return Agent(id=name, held_labelled=LABELLED, held_unlabelled=UNLABELLED)


def server() -> Agent:
    return Agent(id="server", location=AgentLocation.SERVER, held_labelled=LABELLED)


# Roles --------------------------------------------------------------------------------------


def test_the_role_follows_from_what_an_agent_holds() -> None:
    agents = [support("s0"), query("q0"), mixed("m0"), server(), Agent(id="e0")]
    assert [a.role for a in agents] == ["support", "query", "mixed", "server", "empty"]


def test_a_query_agent_has_no_labels_to_read() -> None:
    with pytest.raises(RoleError, match=r"q3 is a query agent without labelled rows"):
        _ = query("q3").labelled
    assert "y" not in {field.name for field in dataclasses.fields(UnlabelledRows)}


def test_a_support_agent_has_no_unlabelled_rows_to_read() -> None:
    with pytest.raises(RoleError, match=r"s1 is a support agent .*federation\.query"):
        _ = support("s1").unlabelled


def test_whoever_holds_rows_may_read_them() -> None:
    assert support("s0").labelled is server().labelled is mixed("m0").labelled is LABELLED
    assert query("q0").unlabelled is mixed("m0").unlabelled is UNLABELLED
    assert (len(LABELLED), len(UNLABELLED)) == (3, 4)


def test_the_server_knows_an_agent_by_name_role_and_seat_alone() -> None:
    assert mixed("m0").ref == AgentRef("m0", "mixed", AgentLocation.EDGE)
    assert vars(server().ref) == {
        "id": "server",
        "role": "server",
        "location": AgentLocation.SERVER,
    }


@given(st.lists(st.integers(0, 10**6), unique=True))
def test_names_sort_by_their_numbers(numbers: list[int]) -> None:
    names = [f"q{n}" for n in numbers]
    assert sorted(names, key=natural_order) == [f"q{n}" for n in sorted(numbers)]


# The world ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word(Message):
    text: str


def echo(agent: Agent, message: Word, ctx: Any) -> Word | Declined:
    """Says where it was and what it heard, notes its length; q1 will not speak."""
    ctx.log_metric("length", float(len(message.text)))
    if agent.id == "q1":
        return Declined("no")
    return Word(f"{ctx.visit_key}:{message.text}")


def federation(*agents: Agent, seed: int = 0) -> Federation:
    there = agents or (query("q10"), support("s0"), query("q1"), query("q2"), support("s1"))
    return Federation(LocalEngine(there, seed=seed, device=torch.device("cpu")), seed)


def ids(roster: Iterable[AgentRef]) -> list[str]:
    return [agent.id for agent in roster]


def test_rosters_are_in_natural_order() -> None:
    found = federation()
    assert ids(found.agents) == ["q1", "q2", "q10", "s0", "s1"]
    assert (ids(found.support), ids(found.query)) == (["s0", "s1"], ["q1", "q2", "q10"])
    assert found.server is None


def test_an_agent_with_both_kinds_of_rows_stands_in_both_rosters() -> None:
    found = federation(mixed("m0"), mixed("m1"), query("q0"))
    assert (ids(found.support), ids(found.query)) == (["m0", "m1"], ["m0", "m1", "q0"])


def test_a_labelled_server_is_a_support_agent_that_sits_at_the_server() -> None:
    found = federation(server(), query("q0"))
    assert (ids(found.support), ids(found.query)) == (["server"], ["q0"])
    assert found.server is not None and found.server.id == "server"


def test_replies_come_in_the_order_of_asking_silences_included() -> None:
    found = federation()
    asked = found.query[::-1]
    replies = found.call_all(asked, echo, Word("hello"))
    assert [r.sender.id for r in replies] == ["q10", "q2", "q1"]
    assert [r.declined for r in replies] == [False, False, True]
    assert found.declines == 1


def test_only_an_empty_account_counts_as_a_refusal() -> None:
    def spent(agent: Agent, message: Word, ctx: Any) -> Declined:
        return BUDGET_EXHAUSTED if agent.id == "s0" else Declined("no row is sure enough")

    found = federation()
    found.call_all(found.agents, spent, Word("hello"))
    assert (found.declines, found.refusals) == (5, 1)
    found.begin(Round(2))
    assert (found.declines, found.refusals) == (0, 0)


def test_every_agent_can_be_told_something_of_its_own() -> None:
    found = federation()
    replies = found.call_all(found.support, echo, lambda agent: Word(agent.id * 2))
    assert [r.payload.text for r in replies] == ["0/s0/echo/1:s0s0", "0/s1/echo/1:s1s1"]


def test_visits_are_counted_by_agent_and_step_within_a_round() -> None:
    found = federation()
    s0 = found.support[0]
    found.begin(Round(4))
    said = [found.call(s0, echo, Word("")).payload.text for _ in range(2)]
    found.begin(Round(5))
    said.append(found.call(s0, echo, Word("")).payload.text)
    assert said == ["4/s0/echo/1:", "4/s0/echo/2:", "5/s0/echo/1:"]


def test_traffic_is_what_went_either_way_since_the_round_began() -> None:
    found = federation()
    found.call_all(found.support, echo, Word("abc"))
    # down 2 x 3 bytes; up "0/s0/echo/1:abc" twice, 15 bytes each
    assert found.traffic == Traffic(up=30, down=6)
    found.begin(Round(1))
    assert found.traffic == Traffic(0, 0)


@dataclass(frozen=True)
class Weights(Message):
    w: StateDict


def send(agent: Agent, message: Word, ctx: Any) -> Weights | Declined:
    if agent.id == "q10":
        return Declined("nothing to say")
    ctx.log_metric("sent", 2.0)
    return Weights({"w": torch.full((3,), float(len(agent.id)))})


def test_replies_that_go_into_a_mean_are_counted_as_all_others() -> None:
    found, mean = federation(support("s0"), support("s11"), query("q10")), WeightedMean("w")
    replies = found.call_all(found.agents, send, Word("abc"), aggregator=mean)
    said = [(r.sender.id, type(r.content).__name__) for r in replies if not r.declined]
    assert said == [("s0", "Ack"), ("s11", "Ack")]
    assert mean.value_or({})["w"].tolist() == [2.5, 2.5, 2.5]  # (len("s0") + len("s11")) / 2
    # up: two times 3 floats, and what the silent one says
    assert found.traffic == Traffic(up=24 + len("nothing to say"), down=9)
    assert (found.declines, found.absences, found.mean_metrics()) == (1, 0, {"sent": 2.0})


def test_what_a_labelled_server_says_to_itself_is_no_traffic() -> None:
    found = federation(server(), query("q0"))
    assert found.server is not None
    found.call(found.server, echo, Word("abc"))
    assert found.traffic == Traffic(0, 0)
    found.call_all(found.agents, echo, Word("abc"))
    # the agent's alone: down 3 bytes, up "0/q0/echo/1:abc"
    assert found.traffic == Traffic(up=15, down=3)


def test_a_support_agent_at_the_edge_has_traffic_as_the_control() -> None:
    found = federation(support("server"), query("q0"))  # the seat decides, not the name
    found.call_all(found.support, echo, Word("abc"))
    assert found.traffic == Traffic(up=len("0/server/echo/1:abc"), down=3)


def test_notes_are_averaged_over_those_who_noted() -> None:
    found = federation()
    found.call(found.support[0], echo, Word("a"))
    found.call(found.support[1], echo, Word("abc"))
    assert found.mean_metrics() == {"length": 2.0}
    found.begin(Round(1))
    assert found.mean_metrics() == {}


def done(agent: Agent, message: Word, ctx: Any) -> Ack:
    return Ack()


def test_an_agent_that_has_nothing_to_send_was_not_silent() -> None:
    found = federation()
    assert found.call(found.support[0], done, Word("")).payload == Ack()
    assert found.declines == 0


@given(n=st.integers(1, 20), number=st.integers(0, 50))
def test_a_sample_is_without_replacement_in_roster_order(n: int, number: int) -> None:
    found = federation(*(query(f"q{i}") for i in range(12)))
    found.begin(Round(number))
    chosen = found.sample(found.query, n)
    assert len(set(chosen)) == len(chosen) == min(n, 12)
    assert list(chosen) == [agent for agent in found.query if agent in chosen]
    assert chosen == found.sample(found.query, n)  # the same round draws the same agents


def test_samples_differ_between_rounds_and_nobody_is_left_out_for_ever() -> None:
    found = federation(*(query(f"q{i}") for i in range(6)))
    counts = dict.fromkeys(ids(found.query), 0)
    for number in range(1, 301):
        found.begin(Round(number))
        for agent in found.sample(found.query, 2):
            counts[agent.id] += 1
    # 300 draws with chance 1/3 each: 100 on average, standard deviation 8.2
    assert all(60 < count < 140 for count in counts.values())
    assert found.sample(found.query, None) == found.query


# Randomness ---------------------------------------------------------------------------------


def first_numbers(*key: Any) -> tuple[float, ...]:
    return tuple(torch.rand(2, generator=randomness.stream(*key)).tolist())


def test_no_two_purposes_rounds_agents_or_seeds_share_a_stream() -> None:
    keys = [
        (seed, number, agent, purpose)
        for seed in (0, 1, 10)
        for number in (0, 1, 2, 11)
        for agent in ("s0", "q1", "q11", "world")
        for purpose in ("rows", "z", "1/q1/query_pass/1:z", "1/q1/query_pass/11:z")
    ]
    assert len({first_numbers(*key) for key in keys}) == len(keys)
    assert first_numbers(*keys[0]) == first_numbers(*keys[0])  # the control: equal keys do


def test_building_a_network_with_a_generator_leaves_the_global_one_alone() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        with randomness.seeded(randomness.stream(0, 0, "world", "x")):
            inside = torch.rand(2)
        assert torch.equal(torch.rand(2), expected)
        assert not torch.equal(inside, expected)
        with randomness.seeded(randomness.stream(0, 0, "world", "x")):
            assert torch.equal(torch.rand(2), inside)
