"""The engine over sites when requests, replies or sites are lost or wrong.

Sites run in this process (transports.py). Tests change what passes between them and the engine.
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
from tests.support.engine_conformance import STEPS, Payload, agents, run_step
from tests.support.sites_engine import site_named
from tests.support.toy_worlds import at_server, make
from tests.support.transports import AGREEMENT, CPU, SHORT_TIMEOUTS, InProcessTransport

SKIP = dataclasses.replace(SHORT_TIMEOUTS, absent="skip", quorum=0.5)


class Clock:
    """A replacement of the module ``time`` whose time passes only in ``sleep``."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time() + 3600  # a site's own clock is never past a deadline

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the engine and of its directory of sites."""
    clock = Clock()
    for module in (remote, discovery):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def make_engine(folder: Path, timeouts: Any = SHORT_TIMEOUTS, **how: Any) -> SitesEngine:
    return transports.engine(agents(), STEPS, 3, folder, timeouts=timeouts, **how)


def transport_of(engine: SitesEngine) -> InProcessTransport:
    transport = engine._transport
    assert isinstance(transport, InProcessTransport)
    return transport


def answer_visits_by(
    engine: SitesEngine, name: str, how: Callable[[bytes, Any], bytes | None]
) -> None:
    """Replace the replies to visits of an agent by ``how(request, handler)``."""
    transport, address = transport_of(engine), f"at {name}"
    real = transport.handlers[address]

    def handle(frame: bytes) -> Any:
        visit = b'"letter":"Visit"' in frame
        return how(frame, real) if visit else real(frame)

    transport.handlers[address] = handle


def missing_reasons(replies: Any) -> list[str]:
    return [r.content.reason if isinstance(r.content, NoReply) else "" for r in replies]


def error_reply(word: str) -> Callable[[bytes, Any], bytes]:
    return lambda frame, real: protocol.to_bytes(
        StepResponse(protocol.from_bytes(frame, StepRequest).id, error=word)
    )


def no_reply(frame: bytes, real: Any) -> None:
    """Lose the request or its reply."""


# Finding sites ----------------------------------------------------------------------------------


def engine_over(handlers: Mapping[str, Callable[[bytes], bytes]], *names: str) -> SitesEngine:
    expected = [AgentRef(name, "query") for name in names]
    home = LocalEngine([], seed=0, device=CPU)
    return SitesEngine(
        InProcessTransport(handlers),
        expected,
        algorithm=STEPS,
        agreement=AGREEMENT,
        home=home,
        timeouts=SHORT_TIMEOUTS,
    )


def test_sites_are_found_by_identification_at_any_address_and_in_any_order() -> None:
    engine = engine_over(
        {"x": site_named("q10"), "y": site_named("q2"), "z": site_named("q9")},
        "q10",
        "q9",
        "q2",
    )
    assert [agent.id for agent in engine.roster()] == ["q2", "q9", "q10"]
    assert engine._sites.address == {"q10": "x", "q2": "y", "q9": "z"}


@pytest.mark.parametrize(
    ("handlers", "text"),
    [
        ({"x": site_named("q0")}, r"1 of 2 sites are not there after 0.3 s: q1. Start them"),
        ({"x": site_named("q0"), "y": site_named("q9")}, "not there .*: q1"),
        ({"x": site_named("q0"), "y": site_named("q1"), "z": site_named("q1")},
         "Two sites call themselves q1"),
        ({"x": site_named("q0"), "y": site_named("q1", agreement="0" * 64)},
         "q1: .*rows of another shape"),
        ({"x": site_named("q0"), "y": site_named("q1", "mixed")},
         "q1 is a mixed agent there and query here"),
        ({"x": site_named("q0"),
          "y": lambda _: protocol.to_bytes(StepResponse("", error="version"))},
         "another version of privssl"),
        ({"x": site_named("q0"), "y": lambda frame: b"HTTP/1.1 400"}, "not there .*: q1"),
    ],
    ids=["missing", "stranger", "twice", "config", "role", "version", "no site at all"],
)  # fmt: skip
def test_a_run_does_not_begin_with_missing_duplicate_or_incompatible_sites(
    handlers: Any, text: str
) -> None:
    with pytest.raises(SiteError, match=text):
        engine_over(handlers, "q0", "q1")


def test_the_error_about_an_incompatible_site_shows_both_hashes_or_both_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hash and the task are printed as by the site's own command."""
    home = LocalEngine([], seed=0, device=CPU)
    how: dict[str, Any] = {"algorithm": STEPS, "home": home, "timeouts": SHORT_TIMEOUTS}
    other = InProcessTransport({"x": site_named("q0", agreement="0" * 64)})
    with pytest.raises(SiteError) as error_reply:
        SitesEngine(
            other,
            [AgentRef("q0", "query")],
            agreement=AGREEMENT,
            task="2 classes (cat, dog)",
            **how,
        )
    said = str(error_reply.value)
    assert f"Here the hash is {AGREEMENT[:12]}, of 2 classes (cat, dog)" in said
    assert f"hash {'0' * 12}" in said and "python -m privssl.site SITE.yaml" in said
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "__version__", "0.0")
        frame = site_named("q0")(b"")
    former = InProcessTransport({"x": lambda _: frame})
    with pytest.raises(SiteError, match=f"privssl '0.0', this is {privssl.__version__}"):
        SitesEngine(former, [AgentRef("q0", "query")], agreement=AGREEMENT, **how)


def test_a_site_with_other_code_of_the_same_version_takes_part_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = {"x": site_named("q0", code="0" * 12), "y": site_named("q1")}
    engine = engine_over(other, "q0", "q1")
    assert set(engine._sites.address) == {"q0", "q1"}
    engine._sites.address.clear()
    engine._sites.poll(1.0)  # as after a restart: no second warning
    said = [line for line in caplog.messages if "runs other code" in line]
    assert len(said) == 1 and said[0].startswith("q0 runs other code of privssl")
    assert said[0].endswith("Install the same checkout on both sides")


def test_the_engine_waits_for_a_site_that_starts_late(clock: Clock) -> None:
    def late(frame: bytes) -> bytes:
        ready = clock.now > 0.1
        return (
            site_named("q0")(frame) if ready else protocol.to_bytes(StepResponse("", error="data"))
        )

    assert engine_over({"x": late}, "q0")._sites.address == {"q0": "x"}


class WaitingTransport(InProcessTransport):
    """As over a network: an address that never replies takes all of the time allowed."""

    def exchange(self, frames: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        came = super().exchange(frames, seconds)
        if any(address in self.handlers and address not in came for address in frames):
            time.sleep(seconds)
        return came


def test_an_address_that_never_replies_costs_no_other_site_its_visit(folder: Path) -> None:
    timeouts = dataclasses.replace(SHORT_TIMEOUTS, hello_seconds=0.1)
    with closing(make_engine(folder, timeouts, transport=WaitingTransport)) as engine:
        transport = transport_of(engine)
        transport.handlers["silent"] = lambda frame: None
        transport.handlers["elsewhere"] = transport.handlers.pop("at q0")  # q0 has restarted
        assert missing_reasons(run_step(engine, STEPS.count, whom="q0")) == [""]


def test_a_dead_address_that_is_still_listed_is_not_a_duplicate_site(folder: Path) -> None:
    timeouts = dataclasses.replace(SHORT_TIMEOUTS, hello_seconds=0.1)
    with closing(make_engine(folder, timeouts, transport=WaitingTransport)) as engine:
        transport = transport_of(engine)
        transport.handlers["elsewhere"] = transport.handlers["at q0"]  # its SuperNode has restarted
        transport.handlers["at q0"] = lambda frame: None
        transport.handlers["q1 again"] = transport.handlers.pop("at q1")
        assert missing_reasons(run_step(engine, STEPS.count, whom="q1")) == [""]
        assert engine._sites.address["q0"] == "elsewhere"
        transport.handlers["q1 twice"] = transport.handlers["q1 again"]  # the control: both answer
        transport.handlers["q2 again"] = transport.handlers.pop("at q2")
        with pytest.raises(SiteError, match="Two sites call themselves q1"):
            run_step(engine, STEPS.count, whom="q2", number=2)


def test_no_visit_is_sent_before_all_sites_are_found() -> None:
    heard = []

    def record_and_identify(frame: bytes) -> bytes:
        heard.append(type(protocol.from_bytes(frame, IdentifyRequest, StepRequest)))
        return site_named("q0")(frame)

    with pytest.raises(SiteError):
        engine_over({"x": record_and_identify}, "q0", "q1")
    assert set(heard) == {IdentifyRequest}


# Lost and wrong requests and replies --------------------------------------------------------------


def test_a_lost_request_or_reply_is_resent_and_the_visit_runs_once(
    folder: Path,
) -> None:
    engine, tries = make_engine(folder), []

    def first_two_lost(frame: bytes, real: Any) -> bytes | None:
        tries.append(frame)
        if len(tries) == 1:
            return None  # the request is lost
        answer: bytes = real(frame)
        return None if len(tries) == 2 else answer  # the answer is lost

    answer_visits_by(engine, "q1", first_two_lost)
    replies = run_step(engine, STEPS.count)
    assert [reply.payload.number for reply in replies] == [1.0, 1.0, 1.0]
    assert len(tries) == 3 and len(set(tries)) == 1
    assert [r.payload.number for r in run_step(engine, STEPS.count, number=2)] == [2.0, 2.0, 2.0]
    carried = engine.take_traffic()
    assert (carried.frames, carried.again, len(carried.seconds)) == (8, 2, 6)


def test_a_request_to_a_busy_site_is_resent(folder: Path) -> None:
    engine, tries = make_engine(folder), []

    def busy_once(frame: bytes, real: Any) -> bytes:
        tries.append(frame)
        busy = error_reply("busy")(frame, real)
        answer: bytes = busy if len(tries) == 1 else real(frame)
        return answer

    answer_visits_by(engine, "q0", busy_once)
    assert missing_reasons(run_step(engine, STEPS.draw)) == ["", "", ""] and len(tries) == 2


def test_a_site_that_restarts_at_another_address_is_found_again(folder: Path) -> None:
    engine = make_engine(folder)
    run_step(engine, STEPS.count)
    transport = transport_of(engine)
    transport.handlers["elsewhere"] = transport.handlers.pop("at q1")
    assert [r.payload.number for r in run_step(engine, STEPS.count, number=2)] == [2.0, 2.0, 2.0]


def test_a_duplicate_site_that_appears_later_stops_the_run(folder: Path) -> None:
    engine = make_engine(folder)
    transport_of(engine).handlers["impostor"] = site_named("q0")
    answer_visits_by(engine, "q1", no_reply)  # so that the engine searches again
    with pytest.raises(SiteError, match="Two sites call themselves q0"):
        run_step(engine, STEPS.draw)


@pytest.mark.parametrize(
    "answer",
    [
        b"no message",
        protocol.to_bytes(IdentifyRequest()),
        protocol.to_bytes(StepResponse("f" * 64, message="Payload", body=serialize(Payload()))),
        protocol.to_bytes(StepResponse("", error="rows: 1, 2")),
    ],
    ids=["noise", "another message", "to another visit", "an unknown error code"],
)
def test_bytes_that_are_no_reply_to_this_visit_count_as_no_reply(
    folder: Path, answer: bytes
) -> None:
    engine = make_engine(folder, SKIP)
    answer_visits_by(engine, "q0", lambda frame, real: answer)
    assert missing_reasons(run_step(engine, STEPS.draw)) == ["garbled", "", ""]


@pytest.mark.parametrize(
    "change",
    [
        {"message": "Ack", "body": serialize(Ack())},
        {"message": "Payload", "body": b"\x80\x04N."},
        {"message": "Payload", "body": serialize(Payload(t=torch.full((3,), float("nan"))))},
        {"weight": -1.0},
        {"weight": 1.1e6},
        {"weight": 2.0, "charged": True},
    ],
    ids=[
        *("another class", "bytes", "not finite", "a weight below 0", "more than the rows of any"),
        "a weight in a charged visit",
    ],
)
def test_a_reply_that_the_step_cannot_produce_counts_as_no_reply(
    folder: Path, change: dict[str, Any]
) -> None:
    engine = make_engine(folder, SKIP)
    answer_visits_by(engine, "q0", lambda frame, real: protocol.to_bytes(
        dataclasses.replace(protocol.from_bytes(real(frame), StepResponse), **change)
    ))  # fmt: skip
    assert missing_reasons(run_step(engine, STEPS.draw)) == ["garbled", "", ""]


# Missing replies --------------------------------------------------------------------------------


@pytest.mark.parametrize("word", sorted(set(protocol.ERROR_CODES) - {"busy", "version", "config"}))
def test_run_absent_decides_whether_an_error_code_stops_the_run_or_skips_the_agent(
    folder: Path, word: str
) -> None:
    strict, lenient = make_engine(folder / "strict"), make_engine(folder / "lenient", SKIP)
    for engine in (strict, lenient):
        answer_visits_by(engine, "q1", error_reply(word))
    with pytest.raises(SiteError, match=rf"^q1 has no reply to draw in round 1 \({word}\): "):
        run_step(strict, STEPS.draw)
    assert missing_reasons(run_step(lenient, STEPS.draw)) == ["", word, ""]
    with pytest.raises(SiteError, match=r"--resume with run\.absent=skip"):
        run_step(strict, STEPS.count, whom="q1")
    assert missing_reasons(run_step(lenient, STEPS.count, whom="q1")) == [
        word
    ]  # in sequence: skipped


def test_a_step_with_a_quorum_needs_at_least_one_reply(folder: Path) -> None:
    engine = make_engine(folder, SKIP)
    answer_visits_by(engine, "q1", error_reply("failed"))
    with pytest.raises(SiteError, match="Nobody else replied either"):
        run_step(engine, STEPS.draw, whom="q1")  # a mean of one agent, which is absent


def test_a_missing_reply_to_a_step_that_needs_all_stops_the_run_despite_absent_skip(
    folder: Path,
) -> None:
    engine = make_engine(folder, SKIP)
    answer_visits_by(engine, "q1", error_reply("failed"))
    with pytest.raises(SiteError, match=r"q1 has no reply to list_memory .*\. All are needed$"):
        run_step(engine, STEPS.list_memory)


def test_a_site_that_never_replies_is_gone_at_the_deadline(folder: Path, clock: Clock) -> None:
    engine = make_engine(folder, SKIP)
    answer_visits_by(engine, "q2", no_reply)
    begun = clock.now
    assert missing_reasons(run_step(engine, STEPS.draw)) == ["", "", "gone"]
    assert clock.now - begun == pytest.approx(SKIP.visit_seconds)


def test_below_the_quorum_a_parallel_step_stops_the_run(folder: Path) -> None:
    engine = make_engine(folder, dataclasses.replace(SKIP, quorum=0.6))
    answer_visits_by(engine, "q1", error_reply("failed"))
    assert missing_reasons(run_step(engine, STEPS.draw)) == ["", "failed", ""]  # 2 of 3 are enough
    answer_visits_by(engine, "q0", error_reply("lost"))
    way = r"q0 has no reply .*\. 1 of 3 replied, and run\.quorum is 0\.6\. .*run\.quorum=0\.3333$"
    with pytest.raises(SiteError, match=way):
        run_step(engine, STEPS.draw, number=2)
    lower = make_engine(
        folder / "lower", dataclasses.replace(SKIP, quorum=0.3333)
    )  # the value in the error
    for name in ("q0", "q1"):
        answer_visits_by(lower, name, error_reply("lost"))
    assert missing_reasons(run_step(lower, STEPS.draw)) == ["lost", "lost", ""]


@pytest.mark.parametrize("word", ["version", "config"])
def test_a_site_with_another_version_or_config_stops_the_run_despite_absent_skip(
    folder: Path, word: str
) -> None:
    engine = make_engine(folder, SKIP)
    answer_visits_by(engine, "q1", error_reply(word))
    for whom in ("", "q1"):  # a parallel step; a sequential pass
        with pytest.raises(SiteError):
            run_step(engine, STEPS.draw, whom=whom)


def test_an_absent_agent_is_not_counted_as_declined(folder: Path) -> None:
    engine = make_engine(folder, SKIP)
    answer_visits_by(engine, "q1", error_reply("lost"))
    federation = Federation(engine, 3)
    federation.begin(Round(1))
    replies = federation.call_all(federation.query, STEPS.decline, Payload())
    assert [isinstance(r.content, NoReply) for r in replies] == [False, True, False]
    assert (federation.budget_declines, federation.absences) == (0, 1)


# Memories ---------------------------------------------------------------------------------------


def test_memories_are_names_of_stored_ones_and_those_of_another_engine_are_refused(
    folder: Path,
) -> None:
    engine = make_engine(folder)
    run_step(engine, STEPS.count, whom="q0")
    kept = engine.memories()
    assert {name: set(memory) for name, memory in kept.items()} == {
        name: {"run", "visit", "charged"} for name in ("q0", "q1", "q2")
    }
    assert len(kept["q0"]["visit"]) == 64 and len(kept["q1"]["visit"]) == 0
    with pytest.raises(RunFolderError, match=r"run\.engine=local"):
        engine.restore({"q0": {"n": torch.zeros(())}})


def test_a_resumed_run_gets_the_stored_replies_of_completed_visits(
    folder: Path,
) -> None:
    engine = make_engine(folder)
    run_step(engine, STEPS.count)
    kept = engine.memories()
    second = run_step(engine, STEPS.count, number=2)
    again = make_engine(folder)  # the same sites, another coordinator
    assert again.run != engine.run
    again.restore(kept)
    assert again.run == engine.run
    assert [r.payload.number for r in run_step(again, STEPS.count, number=2)] == [2.0] * 3
    stored = list((folder / "q0" / "runs" / engine.run).glob("*.answer"))
    assert len(stored) == len(second) - 1 == 2  # no visit ran again


def test_a_memory_that_a_site_has_deleted_stops_the_run(folder: Path) -> None:
    engine = make_engine(folder)
    run_step(engine, STEPS.count)
    for file in (folder / "q0" / "runs").rglob("*.memory"):
        file.unlink()
    with pytest.raises(SiteError, match=r"q0 .*\(forgotten\): .*Raise its keep_visits"):
        run_step(engine, STEPS.count, number=2)


def test_sites_delete_stored_replies_at_the_end_of_a_run(folder: Path) -> None:
    engine = make_engine(folder)
    run_step(engine, STEPS.count)
    assert engine.end_run(over=True) == {}
    assert list(folder.rglob("*.answer")) == []


def test_a_run_that_waits_at_its_end_names_the_site_and_how_to_stop_waiting(
    folder: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    engine = make_engine(folder)
    engine.end_run(over=False)
    assert "did not answer" not in caplog.text  # the control
    silent = engine.roster()[0].id
    transport_of(engine).handlers[f"at {silent}"] = lambda _: None
    engine.end_run(over=False)
    said = [line for line in caplog.messages if "did not answer" in line]
    assert len(said) == 1 and f"run {silent} did not answer" in said[0]
    assert "Ctrl-C ends the wait, and --resume asks again" in said[0]


def test_a_request_with_numbers_that_are_not_finite_is_not_sent(folder: Path) -> None:
    engine = make_engine(folder)
    sent = len(transport_of(engine).sent)
    roster = engine.roster()
    with pytest.raises(Exception, match="not finite"):
        list(
            engine.deliver(
                [Call(roster[0], STEPS.draw, Payload(t=torch.full((3,), float("nan"))), 1)]
            )
        )
    assert len(transport_of(engine).sent) == sent


def test_closing_the_engine_closes_the_transport(folder: Path) -> None:
    engine = make_engine(folder)
    engine.close()
    assert transport_of(engine).closed == 1


def test_a_labelled_server_is_not_a_site(folder: Path) -> None:
    parties = at_server().agents
    engine = transports.engine(parties, make("fedssl"), 0, folder)
    at_home: list[Agent] = [a for a in parties if a.id == "server"]
    assert len(at_home) == 1 and "server" not in engine._sites.address
