"""The engine for several machines: each agent is a site, and a call is a letter to it.

Who carries the letters is not known here: a ``Transport`` takes bytes to addresses and brings bytes
back (``remote/flower_app.py``; in tests, a function). All that can go wrong on the way has its
outcome here:

    a site answers with a word        it counts as absent, with that word (wire.ERRORS)
    no answer, or ``busy``            the same letter again, until the visit's deadline: done once

Who is at which address, and who is not believed, is for ``remote/discovery.py`` to say.

Whether a run goes on without an agent is for its algorithm to bear (``MissingReplyPolicy``), and
for its
config to want (``run.absent``, ``run.quorum``): a mean over whoever happened to answer is not what
was asked for. A deadline that has passed is not
a cancellation: the visit may have been done and charged all the same, and its reply, stored at
the site, is what a run that is resumed gets for the same letter.

What agents remember stays with them. Here are only tokens: the visit after which a site is to
take up its memory. They are in checkpoints, so that a run that goes on from an older round finds
each agent as it was then. A labelled server is no site: it works in this process.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from privssl.algorithms.base import Algorithm
from privssl.core.agents import AgentLocation, AgentRef, Memory, natural_order
from privssl.core.engine import Call
from privssl.core.messages import MessageError, NoReply, Reply, check, deserialize, serialize
from privssl.engines.local import LocalEngine
from privssl.errors import RunFolderError
from privssl.remote import protocol
from privssl.remote.discovery import (
    DEFAULT_TIMEOUTS,
    STOP,
    RemoteTimeouts,
    SiteDirectory,
    SiteError,
    Transport,
    describe_error,
)
from privssl.remote.protocol import CHARGE_ID_DIGITS, StepRequest, StepResponse, WireError
from privssl.remote.step_lookup import StepError, output_type

log = logging.getLogger("privssl")


@dataclass
class RemoteTraffic:
    """What was carried since it was last asked for."""

    up: int = 0  # bytes of answers
    down: int = 0  # bytes of letters, repeated ones too
    frames: int = 0
    again: int = 0  # letters that were sent once more
    seconds: list[float] = field(default_factory=list)  # of each visit, letter to answer


class SitesEngine:
    """Delivers calls to sites."""

    def __init__(
        self,
        post: Transport,
        expected: Sequence[AgentRef],
        *,
        algorithm: Algorithm[Any],
        agreement: str,
        home: LocalEngine,
        ledgers: Sequence[str] = (),
        terms: RemoteTimeouts = DEFAULT_TIMEOUTS,
        holder: Callable[[str], str] | None = None,
    ) -> None:
        """Finds the sites.

        Args:
            expected: every agent of the run; one whose seat is at the server is in ``home``.
            agreement: ``config.agreement`` of this run.
            home: engine of the agents that sit here.
            ledgers: agents whose journals are wanted at the end.
            holder: the agent whose key the one at an address has; see ``Roster``.

        Raises:
            SiteError: not all are there in time, two have one name, or one has another config.
        """
        self._post, self._terms = post, terms
        self._algorithm, self._compatibility_hash, self._home = algorithm, agreement, home
        self._expected = {a.id: a for a in sorted(expected, key=lambda a: natural_order(a.id))}
        sites = [agent for agent in expected if agent.location is not AgentLocation.SERVER]
        self._remote = [agent.id for agent in sites]
        self._ledgers = tuple(ledgers)
        self._without = algorithm.missing_reply_policy_for(
            algorithm.cfg, private=algorithm.plan is not None
        )
        self.run = os.urandom(8).hex()
        self._tokens = dict.fromkeys(self._remote, "")
        self._receipts = dict.fromkeys(self._remote, "")  # of the replies that were charged
        self._carried = RemoteTraffic()
        self._sites = SiteDirectory(
            post, sites, agreement=agreement, ledgers=ledgers, terms=terms, key_owner=holder
        )
        self._sites.wait_for_sites()

    def roster(self) -> Sequence[AgentRef]:
        return list(self._expected.values())

    def memories(self) -> Mapping[str, Memory]:
        here = self._home.memories()
        there = {
            name: {
                "run": _letters(self.run),
                "visit": _letters(token),
                "charged": _letters(self._receipts[name]),
            }
            for name, token in self._tokens.items()
        }
        return {name: here[name] if name in here else there[name] for name in self._expected}

    def restore(self, memories: Mapping[str, Memory]) -> None:
        remote = {name: memories.get(name, {}) for name in self._remote}
        if not all(is_name(memory) for memory in remote.values() if memory):
            raise RunFolderError(
                "This checkpoint has what agents remember, so its run was not one of sites, which "
                "keep that themselves. Go on with it with run.engine=local"
            )
        for name, memory in remote.items():
            self._tokens[name] = _text(memory["visit"]) if memory else ""
            self._receipts[name] = _text(memory["charged"]) if memory else ""
        self.run = next((_text(memory["run"]) for memory in remote.values() if memory), self.run)
        self._home.restore(memories)

    def missing_charges(self, agent: str, visits: Iterable[str]) -> int:
        """How many replies that an agent said were charged are not among its ledger's visits."""
        has, told = {visit.rpartition("@")[2] for visit in visits}, self._receipts[agent]
        return sum(
            told[at : at + CHARGE_ID_DIGITS] not in has
            for at in range(0, len(told), CHARGE_ID_DIGITS)
        )

    def take_traffic(self) -> RemoteTraffic:
        """What was carried since this was last asked."""
        now, self._carried = self._carried, RemoteTraffic()
        return now

    def end_run(self, *, over: bool) -> Mapping[str, bytes]:
        """Tell all sites that the run stops: agent -> its journal, of those that have one.

        Args:
            over: whether they may forget it. A run that will go on still needs what they keep.

        Raises:
            SiteError: one whose journal is needed does not show it.
        """
        frame = protocol.to_bytes(protocol.EndOfRun(self.run, self._compatibility_hash, over))
        shown = dict[str, bytes]()
        end = time.monotonic() + self._terms.join_seconds
        while True:
            asked = {a: n for n, a in self._sites.address.items() if n not in shown}
            left = max(end - time.monotonic(), 1.0)
            for address, data in self._post.exchange(dict.fromkeys(asked, frame), left).items():
                try:
                    shown[asked[address]] = protocol.from_bytes(data, protocol.LedgerResponse).body
                except WireError as error:
                    log.warning("%s took no leave: %s", asked[address], error)
            missing = [name for name in self._remote if name not in shown]
            if not missing or time.monotonic() > end:
                break
            time.sleep(self._terms.retry_interval)
            self._sites.poll(left)
        needed = [name for name in self._ledgers if not shown.get(name)]
        if needed:
            raise SiteError(
                f"{', '.join(needed)} did not show the ledger, without which nothing can be "
                "claimed. Start the site again, and end the run with --resume"
            )
        for name in missing:
            log.warning("%s could not be told that the run stops", name)
        return {name: journal for name, journal in shown.items() if journal}

    def close(self) -> None:
        self._post.close()
        self._home.close()

    # One delivery ---------------------------------------------------------------------------

    def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        replies: dict[int, Reply[Any]] = {}
        turns: dict[str, list[int]] = {}
        for place, call in enumerate(calls):
            check(call.message)
            if call.to.location is AgentLocation.SERVER:
                [replies[place]] = self._home.deliver([call])
            else:
                turns.setdefault(call.to.id, []).append(place)
        while turns:  # calls of one agent one after the other, of several side by side
            now = {name: places.pop(0) for name, places in turns.items()}
            turns = {name: places for name, places in turns.items() if places}
            replies |= self._run_visits(
                {name: (place, calls[place]) for name, place in now.items()}
            )
        self._check_absences(calls, replies)
        return [replies[place] for place in range(len(calls))]

    def _run_visits(self, calls: Mapping[str, tuple[int, Call]]) -> dict[int, Reply[Any]]:
        """One call each of some agents."""
        begun = time.monotonic()
        deadline = math.ceil(time.time() + self._terms.visit_seconds)
        visits = {name: self._visit(call, deadline) for name, (_, call) in calls.items()}
        answers: dict[str, StepResponse] = {}
        last: dict[str, str] = dict.fromkeys(calls, "gone")
        asked: set[str] = set()
        while waiting := [name for name in calls if name not in answers]:
            left = begun + self._terms.visit_seconds - time.monotonic()
            if left <= 0:
                break
            sent = {self._sites.address[n]: n for n in waiting if n in self._sites.address}
            frames = {a: protocol.to_bytes(visits[name]) for a, name in sent.items()}
            self._carried.frames += len(frames)
            self._carried.again += len(asked.intersection(sent.values()))
            asked |= set(sent.values())
            self._carried.down += sum(map(len, frames.values()))
            for address, data in self._post.exchange(frames, left).items():
                self._carried.up += len(data)
                answer = _answer(data, visits[sent[address]])
                last[sent[address]] = answer.error
                if answer.error != "busy":
                    answers[sent[address]] = answer
                    self._carried.seconds.append(time.monotonic() - begun)
            if len(answers) < len(calls):
                time.sleep(min(self._terms.retry_interval, left))
                self._sites.poll(left)
        return {
            place: self._reply(
                call,
                answers.get(name) or StepResponse("", error=last[name]),
                visits[name].charge_id,
            )
            for name, (place, call) in calls.items()
        }

    def _visit(self, call: Call, deadline: int) -> StepRequest:
        return StepRequest(
            run=self.run, agreement=self._compatibility_hash, agent=call.to.id, round=call.round,
            step=call.step.__name__, visit=call.visit, memory=self._tokens[call.to.id],
            message=type(call.message).__name__, deadline=deadline, body=serialize(call.message),
        )  # fmt: skip

    def _reply(self, call: Call, answer: StepResponse, receipt: str) -> Reply[Any]:
        """The reply in an answer; ``NoReply`` where there is none."""
        word = answer.error
        if not word:
            try:
                content = deserialize(output_type(call.step, answer.message), answer.body)
                self._tokens[call.to.id] = answer.memory
                if answer.charged:
                    self._receipts[call.to.id] += receipt
                return Reply(call.to, content, answer.weight, dict(answer.notes))
            except (MessageError, StepError) as error:
                log.warning("The answer of %s to %s: %s", call.to.id, call.key, error)
                word = "garbled"
        return Reply(call.to, NoReply(word))

    def _check_absences(self, calls: Sequence[Call], replies: Mapping[int, Reply[Any]]) -> None:
        """Raise SiteError where the algorithm does not go on without those that are absent."""
        absent = [n for n in range(len(calls)) if isinstance(replies[n].content, NoReply)]
        words = {place: replies[place].content.reason for place in absent}
        for place, word in words.items():
            log.warning("%s has no reply: %s", calls[place].key, describe_error(word))
        for place in absent:
            step = calls[place].step.__name__
            asked = [n for n, call in enumerate(calls) if call.step.__name__ == step]
            there = sum(n not in words for n in asked)
            way = "" if words[place] in STOP else self._way_on(step, there, len(asked))
            if way is not None:
                raise SiteError(
                    f"{calls[place].to.id} has no reply to {step} in round {calls[place].round} "
                    f"({words[place]}): {describe_error(words[place])}{way}"
                )

    def _way_on(self, step: str, there: int, asked: int) -> str | None:
        """None where the run goes on with those that replied; else how it could."""
        quorum = self._terms.quorum
        if step in self._without.skip:
            if self._terms.absent == "skip":
                return None
            return ". To go on without it: --resume with run.absent=skip"
        if step not in self._without.quorum:
            return f". {self._without.needed_because or 'This step needs all of them'}"
        if there >= quorum * asked:
            return None
        if not there:
            return ". Nobody else replied either, so there is nothing to go on with"
        return (
            f". {there} of {asked} replied, and run.quorum is {quorum:g}. To go on with these: "
            f"--resume with run.quorum={math.floor(1e4 * there / asked) / 1e4:g}"
        )


def is_name(memory: Memory) -> bool:
    """Whether this names what an agent remembers at its site, and is not that itself."""
    return set(memory) == {"run", "visit", "charged"}


def _answer(data: bytes, visit: StepRequest) -> StepResponse:
    """What came, as an answer to this visit and no other."""
    try:
        answer: StepResponse = protocol.from_bytes(data, StepResponse)
    except WireError as error:
        return StepResponse("", error="version" if error.error_code == "version" else "garbled")
    # Without an id: the site could not read the visit, and says so in a word.
    if answer.error and answer.id in ("", visit.id):
        return answer if answer.error in protocol.ERROR_CODES else StepResponse("", error="garbled")
    bounded = 0 <= answer.weight <= protocol.MOST_SHARE  # NaN is not, either
    share = answer.weight == 1.0 if answer.charged else bounded  # else a number of rows, it may be
    if answer.id != visit.id or not share:
        return StepResponse("", error="garbled")
    return answer


def _letters(text: str) -> Tensor:
    """Text of ASCII as a tensor, which is what memories are made of."""
    return torch.tensor(list(text.encode("ascii")), dtype=torch.uint8)


def _text(frames: Tensor) -> str:
    return bytes(frames.tolist()).decode("ascii")
