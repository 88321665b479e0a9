"""Roles and their rows; calls of the server; random streams by (seed, round, agent, purpose)."""

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
from privssl.core.messages import BUDGET_EXHAUSTED, Ack, Declined, Message, Reply, StateDict
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


def test_an_agent_reads_all_rows_that_it_holds() -> None:
    assert support("s0").labelled is server().labelled is mixed("m0").labelled is LABELLED
    assert query("q0").unlabelled is mixed("m0").unlabelled is UNLABELLED
    assert (len(LABELLED), len(UNLABELLED)) == (3, 4)


def test_an_agent_reference_has_only_id_role_and_location() -> None:
    assert mixed("m0").ref == AgentRef("m0", "mixed", AgentLocation.EDGE)
    assert vars(server().ref) == {
        "id": "server",
        "role": "server",
        "location": AgentLocation.SERVER,
    }


@given(st.lists(st.integers(0, 10**6), unique=True))
def test_agent_names_sort_by_their_numbers(numbers: list[int]) -> None:
    names = [f"q{n}" for n in numbers]
    assert sorted(names, key=natural_order) == [f"q{n}" for n in sorted(numbers)]


# The federation -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Text(Message):
    text: str


def echo(agent: Agent, message: Text, ctx: Any) -> Text | Declined:
    """Return the visit key and the text, log the text's length; decline at q1."""
    ctx.log_metric("length", float(len(message.text)))
    if agent.id == "q1":
        return Declined("no")
    return Text(f"{ctx.visit_key}:{message.text}")


def federation(*agents: Agent, seed: int = 0) -> Federation:
    members = agents or (query("q10"), support("s0"), query("q1"), query("q2"), support("s1"))
    return Federation(LocalEngine(members, seed=seed, device=torch.device("cpu")), seed)


def ids(roster: Iterable[AgentRef]) -> list[str]:
    return [agent.id for agent in roster]


def test_rosters_are_in_natural_order() -> None:
    fed = federation()
    assert ids(fed.agents) == ["q1", "q2", "q10", "s0", "s1"]
    assert (ids(fed.support), ids(fed.query)) == (["s0", "s1"], ["q1", "q2", "q10"])
    assert fed.server is None


def test_a_mixed_agent_is_in_the_support_roster_and_in_the_query_roster() -> None:
    fed = federation(mixed("m0"), mixed("m1"), query("q0"))
    assert (ids(fed.support), ids(fed.query)) == (["m0", "m1"], ["m0", "m1", "q0"])


def test_a_labelled_server_is_a_support_agent_located_at_the_server() -> None:
    fed = federation(server(), query("q0"))
    assert (ids(fed.support), ids(fed.query)) == (["server"], ["q0"])
    assert fed.server is not None and fed.server.id == "server"


def test_replies_come_in_the_order_of_the_calls_including_declined_ones() -> None:
    fed = federation()
    asked = fed.query[::-1]
    replies = fed.call_all(asked, echo, Text("hello"))
    assert [r.sender.id for r in replies] == ["q10", "q2", "q1"]
    assert [r.declined for r in replies] == [False, False, True]


def test_only_a_spent_budget_counts_as_a_refusal() -> None:
    def decline_for_budget(agent: Agent, message: Text, ctx: Any) -> Declined:
        return BUDGET_EXHAUSTED if agent.id == "s0" else Declined("no row is sure enough")

    fed = federation()
    replies: list[Reply[Text]] = fed.call_all(fed.agents, decline_for_budget, Text("hello"))
    assert (sum(r.declined for r in replies), fed.budget_declines) == (5, 1)
    fed.begin(Round(2))
    assert fed.budget_declines == 0


def test_every_agent_can_get_its_own_message() -> None:
    fed = federation()
    replies = fed.call_all(fed.support, echo, lambda agent: Text(agent.id * 2))
    assert [r.payload.text for r in replies] == ["0/s0/echo/1:s0s0", "0/s1/echo/1:s1s1"]


def test_visits_are_numbered_per_agent_and_step_in_each_round() -> None:
    fed = federation()
    s0 = fed.support[0]
    fed.begin(Round(4))
    texts = [fed.call(s0, echo, Text("")).payload.text for _ in range(2)]
    fed.begin(Round(5))
    texts.append(fed.call(s0, echo, Text("")).payload.text)
    assert texts == ["4/s0/echo/1:", "4/s0/echo/2:", "5/s0/echo/1:"]


def test_traffic_counts_the_bytes_in_both_directions_of_the_current_round() -> None:
    fed = federation()
    fed.call_all(fed.support, echo, Text("abc"))
    # down 2 x 3 bytes; up "0/s0/echo/1:abc" twice, 15 bytes each
    assert fed.traffic == Traffic(up=30, down=6)
    fed.begin(Round(1))
    assert fed.traffic == Traffic(0, 0)


@dataclass(frozen=True)
class Weights(Message):
    w: StateDict


def send(agent: Agent, message: Text, ctx: Any) -> Weights | Declined:
    if agent.id == "q10":
        return Declined("nothing to say")
    ctx.log_metric("sent", 2.0)
    return Weights({"w": torch.full((3,), float(len(agent.id)))})


def test_aggregated_replies_are_counted_like_all_others() -> None:
    fed, mean = federation(support("s0"), support("s11"), query("q10")), WeightedMean("w")
    replies = fed.call_all(fed.agents, send, Text("abc"), aggregator=mean)
    texts = [(r.sender.id, type(r.content).__name__) for r in replies if not r.declined]
    assert texts == [("s0", "Ack"), ("s11", "Ack")]
    assert mean.value_or({})["w"].tolist() == [2.5, 2.5, 2.5]  # (len("s0") + len("s11")) / 2
    # up: two times 3 floats, and the reason of the declined reply
    assert fed.traffic == Traffic(up=24 + len("nothing to say"), down=9)
    assert (fed.absences, fed.mean_metrics()) == (0, {"sent": 2.0})


def test_messages_to_a_labelled_server_are_not_traffic() -> None:
    fed = federation(server(), query("q0"))
    assert fed.server is not None
    fed.call(fed.server, echo, Text("abc"))
    assert fed.traffic == Traffic(0, 0)
    fed.call_all(fed.agents, echo, Text("abc"))
    # only the agent's traffic: down 3 bytes, up "0/q0/echo/1:abc"
    assert fed.traffic == Traffic(up=15, down=3)


def test_control_messages_to_a_support_agent_named_server_are_traffic() -> None:
    fed = federation(support("server"), query("q0"))  # the location decides, not the name
    fed.call_all(fed.support, echo, Text("abc"))
    assert fed.traffic == Traffic(up=len("0/server/echo/1:abc"), down=3)


def test_metrics_are_averaged_over_the_agents_that_logged_them() -> None:
    fed = federation()
    fed.call(fed.support[0], echo, Text("a"))
    fed.call(fed.support[1], echo, Text("abc"))
    assert fed.mean_metrics() == {"length": 2.0}
    fed.begin(Round(1))
    assert fed.mean_metrics() == {}


def acknowledge(agent: Agent, message: Text, ctx: Any) -> Ack:
    return Ack()


def test_an_acknowledgement_does_not_count_as_declined() -> None:
    fed = federation()
    reply = fed.call(fed.support[0], acknowledge, Text(""))
    assert (reply.payload, reply.declined) == (Ack(), False)


@given(n=st.integers(1, 20), number=st.integers(0, 50))
def test_a_sample_is_without_replacement_in_roster_order(n: int, number: int) -> None:
    fed = federation(*(query(f"q{i}") for i in range(12)))
    fed.begin(Round(number))
    chosen = fed.sample(fed.query, n)
    assert len(set(chosen)) == len(chosen) == min(n, 12)
    assert list(chosen) == [agent for agent in fed.query if agent in chosen]
    assert chosen == fed.sample(fed.query, n)  # the same round draws the same agents


def test_sampled_agents_differ_between_rounds_and_all_are_sampled_equally_often() -> None:
    fed = federation(*(query(f"q{i}") for i in range(6)))
    counts = dict.fromkeys(ids(fed.query), 0)
    for number in range(1, 301):
        fed.begin(Round(number))
        for agent in fed.sample(fed.query, 2):
            counts[agent.id] += 1
    # 300 draws with chance 1/3 each: 100 on average, standard deviation 8.2
    assert all(60 < count < 140 for count in counts.values())
    assert fed.sample(fed.query, None) == fed.query


# Randomness ---------------------------------------------------------------------------------


def first_numbers(*key: Any) -> tuple[float, ...]:
    return tuple(torch.rand(2, generator=randomness.stream(*key)).tolist())


def test_streams_differ_for_every_seed_round_agent_and_purpose() -> None:
    keys = [
        (seed, number, agent, purpose)
        for seed in (0, 1, 10)
        for number in (0, 1, 2, 11)
        for agent in ("s0", "q1", "q11", "world")
        for purpose in ("rows", "z", "1/q1/query_pass/1:z", "1/q1/query_pass/11:z")
    ]
    assert len({first_numbers(*key) for key in keys}) == len(keys)
    assert first_numbers(*keys[0]) == first_numbers(
        *keys[0]
    )  # the control: equal keys give equal numbers


def test_seeded_code_leaves_the_global_generator_unchanged() -> None:
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
