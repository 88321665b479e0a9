"""The engine over sites: what it does when requests, answers or sites go astray.

Sites are those of transports.py, in this process; what is between them and the engine is bent here.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import privssl
from privssl.core.agents import Agent, AgentRef
from privssl.core.engine import Call
from privssl.core.federation import Federation, Round
from privssl.core.messages import Ack, NoReply, serialize
from privssl.engines import remote
from privssl.engines.local import LocalEngine
from privssl.engines.remote import SitesEngine
from privssl.errors import RunFolderError
from privssl.remote import discovery, protocol
from privssl.remote.discovery import SiteError
from privssl.remote.protocol import IdentifyRequest, StepRequest, StepResponse
from tests.support import transports
from tests.support.engine_conformance import STEPS, Told, agents, ask
from tests.support.sites_engine import says
from tests.support.toy_worlds import at_server, make
from tests.support.transports import AGREED, CPU, SOON, InProcessTransport

SKIP = dataclasses.replace(SOON, absent="skip", quorum=0.5)


class Clock:
    """Stands for the module time: time passes where somebody sleeps, however slow the machine."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time() + 3600  # no deadline has passed where a site looks at its own clock

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the engine and its directory of sites look at."""
    clock = Clock()
    for module in (remote, discovery):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path


def engine(folder: Path, terms: Any = SOON, **how: Any) -> SitesEngine:
    return transports.engine(agents(), STEPS, 3, folder, terms=terms, **how)


def transport_of(there: SitesEngine) -> InProcessTransport:
    transport = there._transport
    assert isinstance(transport, InProcessTransport)
    return transport


def bend(there: SitesEngine, name: str, how: Callable[[bytes, Any], bytes | None]) -> None:
    """Let ``how(request, the site)`` answer the visits of an agent."""
    transport, address = transport_of(there), f"at {name}"
    real = transport.handlers[address]

    def handle(frame: bytes) -> Any:
        visit = b'"letter":"Visit"' in frame
        return how(frame, real) if visit else real(frame)

    transport.handlers[address] = handle


def words(replies: Any) -> list[str]:
    return [r.content.reason if isinstance(r.content, NoReply) else "" for r in replies]


def error(word: str) -> Callable[[bytes, Any], bytes]:
    return lambda frame, real: protocol.to_bytes(
        StepResponse(protocol.from_bytes(frame, StepRequest).id, error=word)
    )


def nothing(frame: bytes, real: Any) -> None:
    """The request, or its answer, is lost on the way."""


# Who is there ---------------------------------------------------------------------------------


def meet(handlers: Mapping[str, Callable[[bytes], bytes]], *names: str) -> SitesEngine:
    expected = [AgentRef(name, "query") for name in names]
    home = LocalEngine([], seed=0, device=CPU)
    return SitesEngine(
        InProcessTransport(handlers),
        expected,
        algorithm=STEPS,
        agreement=AGREED,
        home=home,
        timeouts=SOON,
    )


def test_sites_are_found_by_asking_whatever_their_addresses_and_in_whatever_order() -> None:
    there = meet({"x": says("q10"), "y": says("q2"), "z": says("q9")}, "q10", "q9", "q2")
    assert [agent.id for agent in there.roster()] == ["q2", "q9", "q10"]
    assert there._sites.address == {"q10": "x", "q2": "y", "q9": "z"}


@pytest.mark.parametrize(
    ("handlers", "text"),
    [
        ({"x": says("q0")}, r"1 of 2 sites are not there after 0.3 s: q1. Start them"),
        ({"x": says("q0"), "y": says("q9")}, "not there .*: q1"),
        ({"x": says("q0"), "y": says("q1"), "z": says("q1")}, "Two sites call themselves q1"),
        ({"x": says("q0"), "y": says("q1", agreement="0" * 64)}, "q1: .*rows of another shape"),
        ({"x": says("q0"), "y": says("q1", "mixed")}, "q1 is a mixed agent there and query here"),
        ({"x": says("q0"), "y": lambda _: protocol.to_bytes(StepResponse("", error="version"))},
         "another version of privssl"),
        ({"x": says("q0"), "y": lambda frame: b"HTTP/1.1 400"}, "not there .*: q1"),
    ],
    ids=["missing", "stranger", "twice", "config", "role", "version", "no site at all"],
)  # fmt: skip
def test_a_run_does_not_begin_without_the_very_sites_that_it_asks_for(
    handlers: Any, text: str
) -> None:
    with pytest.raises(SiteError, match=text):
        meet(handlers, "q0", "q1")


def test_two_parties_that_do_not_agree_see_what_to_compare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hash and the task, as the site's own command prints them; of a version, both numbers."""
    home = LocalEngine([], seed=0, device=CPU)
    how: dict[str, Any] = {"algorithm": STEPS, "home": home, "timeouts": SOON}
    other = InProcessTransport({"x": says("q0", agreement="0" * 64)})
    with pytest.raises(SiteError) as error:
        SitesEngine(
            other, [AgentRef("q0", "query")], agreement=AGREED, task="2 classes (cat, dog)", **how
        )
    said = str(error.value)
    assert f"Here the hash is {AGREED[:12]}, of 2 classes (cat, dog)" in said
    assert f"hash {'0' * 12}" in said and "python -m privssl.site SITE.yaml" in said
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "__version__", "0.0")
        frame = says("q0")(b"")
    former = InProcessTransport({"x": lambda _: frame})
    with pytest.raises(SiteError, match=f"privssl '0.0', this is {privssl.__version__}"):
        SitesEngine(former, [AgentRef("q0", "query")], agreement=AGREED, **how)


def test_a_site_of_other_code_of_the_same_version_takes_part_and_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = {"x": says("q0", code="0" * 12), "y": says("q1")}
    there = meet(other, "q0", "q1")
    assert set(there._sites.address) == {"q0", "q1"}
    there._sites.address.clear()
    there._sites.poll(1.0)  # as after a restart: not said again
    said = [line for line in caplog.messages if "runs other code" in line]
    assert len(said) == 1 and said[0].startswith("q0 runs other code of privssl")
    assert said[0].endswith("Install the same checkout on both sides")


def test_a_site_that_comes_late_is_waited_for(clock: Clock) -> None:
    def late(frame: bytes) -> bytes:
        ready = clock.now > 0.1
        return says("q0")(frame) if ready else protocol.to_bytes(StepResponse("", error="data"))

    assert meet({"x": late}, "q0")._sites.address == {"q0": "x"}


class Waits(InProcessTransport):
    """As a network: who is there and says nothing is waited for as long as one may."""

    def exchange(self, frames: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        came = super().exchange(frames, seconds)
        if any(address in self.handlers and address not in came for address in frames):
            time.sleep(seconds)
        return came


def test_one_that_is_there_and_says_nothing_costs_no_other_its_visit(here: Path) -> None:
    terms = dataclasses.replace(SOON, hello_seconds=0.1)
    with closing(engine(here, terms, transport=Waits)) as there:
        transport = transport_of(there)
        transport.handlers["mute"] = lambda frame: None
        transport.handlers["elsewhere"] = transport.handlers.pop("at q0")  # q0 was started again
        assert words(ask(there, STEPS.count, whom="q0")) == [""]


def test_a_dead_address_that_is_still_listed_is_no_second_site_of_its_name(here: Path) -> None:
    terms = dataclasses.replace(SOON, hello_seconds=0.1)
    with closing(engine(here, terms, transport=Waits)) as there:
        transport = transport_of(there)
        transport.handlers["elsewhere"] = transport.handlers[
            "at q0"
        ]  # its SuperNode was started again
        transport.handlers["at q0"] = lambda frame: None
        transport.handlers["q1 again"] = transport.handlers.pop("at q1")
        assert words(ask(there, STEPS.count, whom="q1")) == [""]
        assert there._sites.address["q0"] == "elsewhere"
        transport.handlers["q1 twice"] = transport.handlers["q1 again"]  # the control: both answer
        transport.handlers["q2 again"] = transport.handlers.pop("at q2")
        with pytest.raises(SiteError, match="Two sites call themselves q1"):
            ask(there, STEPS.count, whom="q2", number=2)


def test_no_visit_is_made_before_all_are_there() -> None:
    heard = []

    def listens(frame: bytes) -> bytes:
        heard.append(type(protocol.from_bytes(frame, IdentifyRequest, StepRequest)))
        return says("q0")(frame)

    with pytest.raises(SiteError):
        meet({"x": listens}, "q0", "q1")
    assert set(heard) == {IdentifyRequest}


# Requests and answers that go astray -------------------------------------------------------------


def test_a_request_or_an_answer_that_is_lost_is_sent_again_and_the_visit_done_once(
    here: Path,
) -> None:
    there, tries = engine(here), []

    def first_two_lost(frame: bytes, real: Any) -> bytes | None:
        tries.append(frame)
        if len(tries) == 1:
            return None  # the request is lost
        answer: bytes = real(frame)
        return None if len(tries) == 2 else answer  # the answer is lost

    bend(there, "q1", first_two_lost)
    replies = ask(there, STEPS.count)
    assert [reply.payload.number for reply in replies] == [1.0, 1.0, 1.0]
    assert len(tries) == 3 and len(set(tries)) == 1
    assert [r.payload.number for r in ask(there, STEPS.count, number=2)] == [2.0, 2.0, 2.0]
    carried = there.take_traffic()
    assert (carried.frames, carried.again, len(carried.seconds)) == (8, 2, 6)


def test_a_site_that_is_busy_is_asked_again(here: Path) -> None:
    there, tries = engine(here), []

    def busy_once(frame: bytes, real: Any) -> bytes:
        tries.append(frame)
        busy = error("busy")(frame, real)
        answer: bytes = busy if len(tries) == 1 else real(frame)
        return answer

    bend(there, "q0", busy_once)
    assert words(ask(there, STEPS.draw)) == ["", "", ""] and len(tries) == 2


def test_a_site_that_comes_back_at_another_address_is_found_again(here: Path) -> None:
    there = engine(here)
    ask(there, STEPS.count)
    transport = transport_of(there)
    transport.handlers["elsewhere"] = transport.handlers.pop("at q1")
    assert [r.payload.number for r in ask(there, STEPS.count, number=2)] == [2.0, 2.0, 2.0]


def test_a_second_site_of_one_name_that_comes_later_stops_the_run(here: Path) -> None:
    there = engine(here)
    transport_of(there).handlers["impostor"] = says("q0")
    bend(there, "q1", nothing)  # so that the engine looks around
    with pytest.raises(SiteError, match="Two sites call themselves q0"):
        ask(there, STEPS.draw)


@pytest.mark.parametrize(
    "answer",
    [
        b"no letter",
        protocol.to_bytes(IdentifyRequest()),
        protocol.to_bytes(StepResponse("f" * 64, message="Told", body=serialize(Told()))),
        protocol.to_bytes(StepResponse("", error="rows: 1, 2")),
    ],
    ids=["noise", "another letter", "to another visit", "a word of its own"],
)
def test_an_answer_that_is_none_to_this_visit_is_not_taken(here: Path, answer: bytes) -> None:
    there = engine(here, SKIP)
    bend(there, "q0", lambda frame, real: answer)
    assert words(ask(there, STEPS.draw)) == ["garbled", "", ""]


@pytest.mark.parametrize(
    "change",
    [
        {"message": "Ack", "body": serialize(Ack())},
        {"message": "Told", "body": b"\x80\x04N."},
        {"message": "Told", "body": serialize(Told(t=torch.full((3,), float("nan"))))},
        {"weight": -1.0},
        {"weight": 1.1e6},
        {"weight": 2.0, "charged": True},
    ],
    ids=[
        *("another class", "bytes", "not finite", "a weight below 0", "more than the rows of any"),
        "a share where it was charged",
    ],
)
def test_a_reply_that_the_step_could_not_have_given_is_not_taken(
    here: Path, change: dict[str, Any]
) -> None:
    there = engine(here, SKIP)
    bend(there, "q0", lambda frame, real: protocol.to_bytes(
        dataclasses.replace(protocol.from_bytes(real(frame), StepResponse), **change)
    ))  # fmt: skip
    assert words(ask(there, STEPS.draw)) == ["garbled", "", ""]


# Going on without ------------------------------------------------------------------------------


@pytest.mark.parametrize("word", sorted(set(protocol.ERROR_CODES) - {"busy", "version", "config"}))
def test_a_run_stops_at_a_word_or_goes_on_without_the_agent_as_its_config_says(
    here: Path, word: str
) -> None:
    strict, lenient = engine(here / "strict"), engine(here / "lenient", SKIP)
    for there in (strict, lenient):
        bend(there, "q1", error(word))
    with pytest.raises(SiteError, match=rf"^q1 has no reply to draw in round 1 \({word}\): "):
        ask(strict, STEPS.draw)
    assert words(ask(lenient, STEPS.draw)) == ["", word, ""]
    with pytest.raises(SiteError, match=r"--resume with run\.absent=skip"):
        ask(strict, STEPS.count, whom="q1")
    assert words(ask(lenient, STEPS.count, whom="q1")) == [word]  # in sequence: skipped


def test_an_agent_is_skipped_only_in_a_pass_from_agent_to_agent(here: Path) -> None:
    there = engine(here, SKIP)
    bend(there, "q1", error("failed"))
    with pytest.raises(SiteError, match="Nobody else replied either"):
        ask(there, STEPS.draw, whom="q1")  # a mean over one, who is away


def test_a_step_that_stands_on_everyone_stops_a_run_whatever_its_config_says(here: Path) -> None:
    there = engine(here, SKIP)
    bend(there, "q1", error("failed"))
    with pytest.raises(SiteError, match=r"q1 has no reply to look .*\. All are needed$"):
        ask(there, STEPS.look)


def test_a_site_that_never_answers_is_gone_at_the_deadline(here: Path, clock: Clock) -> None:
    there = engine(here, SKIP)
    bend(there, "q2", nothing)
    begun = clock.now
    assert words(ask(there, STEPS.draw)) == ["", "", "gone"]
    assert clock.now - begun == pytest.approx(SKIP.visit_seconds)


def test_below_the_quorum_a_parallel_step_stops_the_run(here: Path) -> None:
    there = engine(here, dataclasses.replace(SKIP, quorum=0.6))
    bend(there, "q1", error("failed"))
    assert words(ask(there, STEPS.draw)) == ["", "failed", ""]  # 2 of 3 are enough
    bend(there, "q0", error("lost"))
    way = r"q0 has no reply .*\. 1 of 3 replied, and run\.quorum is 0\.6\. .*run\.quorum=0\.3333$"
    with pytest.raises(SiteError, match=way):
        ask(there, STEPS.draw, number=2)
    lower = engine(here / "lower", dataclasses.replace(SKIP, quorum=0.3333))  # what it said
    for name in ("q0", "q1"):
        bend(lower, name, error("lost"))
    assert words(ask(lower, STEPS.draw)) == ["lost", "lost", ""]


@pytest.mark.parametrize("word", ["version", "config"])
def test_no_run_goes_on_where_no_visit_could_ever_be_made(here: Path, word: str) -> None:
    there = engine(here, SKIP)
    bend(there, "q1", error(word))
    for whom in ("", "q1"):  # all; alone, as in a sequential pass
        with pytest.raises(SiteError):
            ask(there, STEPS.draw, whom=whom)


def test_an_agent_that_is_absent_is_not_counted_among_those_that_declined(here: Path) -> None:
    there = engine(here, SKIP)
    bend(there, "q1", error("lost"))
    federation = Federation(there, 3)
    federation.begin(Round(1))
    federation.call_all(federation.query, STEPS.hush, Told())
    assert (federation.declines, federation.absences) == (2, 1)


# What agents remember ---------------------------------------------------------------------------


def test_memories_are_names_and_no_rows_and_another_engines_are_refused(here: Path) -> None:
    there = engine(here)
    ask(there, STEPS.count, whom="q0")
    kept = there.memories()
    assert {name: set(memory) for name, memory in kept.items()} == {
        name: {"run", "visit", "charged"} for name in ("q0", "q1", "q2")
    }
    assert len(kept["q0"]["visit"]) == 64 and len(kept["q1"]["visit"]) == 0
    with pytest.raises(RunFolderError, match=r"run\.engine=local"):
        there.restore({"q0": {"n": torch.zeros(())}})


def test_a_run_that_goes_on_in_another_process_asks_for_what_was_done_and_gets_it(
    here: Path,
) -> None:
    there = engine(here)
    ask(there, STEPS.count)
    kept = there.memories()
    second = ask(there, STEPS.count, number=2)
    again = engine(here)  # the same sites, another coordinator
    assert again.run != there.run
    again.restore(kept)
    assert again.run == there.run
    assert [r.payload.number for r in ask(again, STEPS.count, number=2)] == [2.0] * 3
    stored = list((here / "q0" / "runs" / there.run).glob("*.answer"))
    assert len(stored) == len(second) - 1 == 2  # nothing was done anew


def test_a_memory_that_a_site_no_longer_has_is_said_and_not_made_up(here: Path) -> None:
    there = engine(here)
    ask(there, STEPS.count)
    for file in (here / "q0" / "runs").rglob("*.memory"):
        file.unlink()
    with pytest.raises(SiteError, match=r"q0 .*\(forgotten\): .*Raise its keep_visits"):
        ask(there, STEPS.count, number=2)


def test_at_the_end_sites_forget_the_run(here: Path) -> None:
    there = engine(here)
    ask(there, STEPS.count)
    assert there.end_run(over=True) == {}
    assert list(here.rglob("*.answer")) == []


def test_a_run_that_waits_at_its_end_says_for_whom_and_how_to_end_the_wait(
    here: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    there = engine(here)
    there.end_run(over=False)
    assert "did not answer" not in caplog.text  # the control
    silent = there.roster()[0].id
    transport_of(there).handlers[f"at {silent}"] = lambda _: None
    there.end_run(over=False)
    said = [line for line in caplog.messages if "did not answer" in line]
    assert len(said) == 1 and f"run {silent} did not answer" in said[0]
    assert "Ctrl-C ends the wait, and --resume asks again" in said[0]


def test_messages_that_are_not_finite_are_not_sent(here: Path) -> None:
    there = engine(here)
    sent = len(transport_of(there).sent)
    roster = there.roster()
    with pytest.raises(Exception, match="not finite"):
        list(
            there.deliver([Call(roster[0], STEPS.draw, Told(t=torch.full((3,), float("nan"))), 1)])
        )
    assert len(transport_of(there).sent) == sent


def test_closing_lets_go_of_the_post(here: Path) -> None:
    there = engine(here)
    there.close()
    assert transport_of(there).closed == 1


def test_agents_of_a_labelled_server_are_no_sites(here: Path) -> None:
    parties = at_server().agents
    there = transports.engine(parties, make("fedssl"), 0, here)
    at_home: list[Agent] = [a for a in parties if a.id == "server"]
    assert len(at_home) == 1 and "server" not in there._sites.address
