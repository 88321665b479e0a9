"""The engine for several machines: each agent is a site, and a call is a request to it.

A ``Transport`` carries bytes to addresses and back (``remote/flower_transport.py``; in tests, a
function); ``remote/discovery.py`` finds the sites.

    a site reports an error           no reply, with that error code (protocol.ERROR_CODES)
    no answer, or ``busy``            the same request again until the deadline; it is run once

Whether a run continues without a reply depends on its algorithm (``MissingReplyPolicy``) and its
config (``run.absent``, ``run.quorum``): a mean over the sites that answered is another quantity. A
deadline does not cancel a step. A resumed run gets the stored reply to the same request.

Agents' memories stay at their sites. The coordinator has only the id of the step after which each
memory was stored; checkpoints contain it, so a resumed run finds each agent's memory of that round.
A labelled server works in this process.
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
    """Messages to and from sites since the last call of ``take_traffic``."""

    up: int = 0  # bytes of replies
    down: int = 0  # bytes of requests, repeated ones included
    frames: int = 0  # requests
    again: int = 0  # repeated requests
    seconds: list[float] = field(default_factory=list)  # of each step, request to reply


class SitesEngine:
    """Delivers calls to sites."""

    def __init__(
        self,
        transport: Transport,
        expected: Sequence[AgentRef],
        *,
        algorithm: Algorithm[Any],
        agreement: str,
        home: LocalEngine,
        ledgers: Sequence[str] = (),
        timeouts: RemoteTimeouts = DEFAULT_TIMEOUTS,
        key_owner: Callable[[str], str] | None = None,
        task: str = "",
    ) -> None:
        """Find the sites. ``agreement``, ``ledgers``, ``key_owner``, ``task``: see
        ``SiteDirectory``.

        Args:
            expected: every agent of the run; those at the server are in ``home``.
            home: engine of the agents at the server.

        Raises:
            SiteError: a site is missing, ambiguous, or has another config.
        """
        self._transport, self._timeouts = transport, timeouts
        self._compatibility_hash, self._home = agreement, home
        self._expected = {a.id: a for a in sorted(expected, key=lambda a: natural_order(a.id))}
        sites = [agent for agent in expected if agent.location is not AgentLocation.SERVER]
        self._remote = [agent.id for agent in sites]
        self._ledgers = tuple(ledgers)
        self._policy = algorithm.missing_reply_policy_for(
            algorithm.cfg, private=algorithm.plan is not None
        )
        self.run = os.urandom(8).hex()
        self._memory_versions = dict.fromkeys(self._remote, "")
        self._charges = dict.fromkeys(self._remote, "")  # charge ids of the replies
        self._traffic = RemoteTraffic()
        self._sites = SiteDirectory(
            transport, sites, agreement=agreement, ledgers=ledgers, timeouts=timeouts,
            key_owner=key_owner, task=task,
        )  # fmt: skip
        self._sites.wait_for_sites()

    def roster(self) -> Sequence[AgentRef]:
        return list(self._expected.values())

    def memories(self) -> Mapping[str, Memory]:
        local = self._home.memories()
        remote = {
            name: {
                "run": _to_tensor(self.run),
                "visit": _to_tensor(version),
                "charged": _to_tensor(self._charges[name]),
            }
            for name, version in self._memory_versions.items()
        }
        return {name: local[name] if name in local else remote[name] for name in self._expected}

    def restore(self, memories: Mapping[str, Memory]) -> None:
        remote = {name: memories.get(name, {}) for name in self._remote}
        if not all(is_name(memory) for memory in remote.values() if memory):
            raise RunFolderError(
                "This checkpoint contains agents' memories, so its run did not use sites. Resume "
                "it with run.engine=local"
            )
        for name, memory in remote.items():
            self._memory_versions[name] = _to_text(memory["visit"]) if memory else ""
            self._charges[name] = _to_text(memory["charged"]) if memory else ""
        self.run = next((_to_text(memory["run"]) for memory in remote.values() if memory), self.run)
        self._home.restore(memories)

    def missing_charges(self, agent: str, visits: Iterable[str]) -> int:
        """Count charged replies of an agent that are not among the visits of its ledger."""
        return len(_split_charge_ids(self._charges[agent]) - list_charge_ids(visits))

    def take_traffic(self) -> RemoteTraffic:
        """Return the traffic since the last call, and start counting anew."""
        traffic, self._traffic = self._traffic, RemoteTraffic()
        return traffic

    def end_run(self, *, over: bool) -> Mapping[str, bytes]:
        """Notify all sites that the run stops; return agent -> journal, of those that share one.

        ``over``: sites may delete the run's data. A run that will be resumed needs it.

        Raises:
            SiteError: a required journal was not sent.
        """
        frame = protocol.to_bytes(protocol.EndOfRun(self.run, self._compatibility_hash, over))
        journals = dict[str, bytes]()
        deadline = time.monotonic() + self._timeouts.join_seconds
        warned = False
        while True:
            names = {a: n for n, a in self._sites.address.items() if n not in journals}
            seconds_left = max(deadline - time.monotonic(), 1.0)
            responses = self._transport.exchange(dict.fromkeys(names, frame), seconds_left)
            for address, data in responses.items():
                try:
                    response = protocol.from_bytes(data, protocol.LedgerResponse)
                    journals[names[address]] = response.body
                except WireError as error:
                    log.warning("%s did not confirm the end of the run: %s", names[address], error)
            missing = [name for name in self._remote if name not in journals]
            if not missing or time.monotonic() > deadline:
                break
            if not warned:
                log.warning(
                    "At the end of the run %s did not answer. Waiting up to %.0f s more; Ctrl-C "
                    "ends the wait, and --resume asks again",
                    ", ".join(missing), deadline - time.monotonic(),
                )  # fmt: skip
                warned = True
            time.sleep(self._timeouts.retry_interval)
            self._sites.poll(seconds_left)
        missing_ledgers = [name for name in self._ledgers if not journals.get(name)]
        if missing_ledgers:
            raise SiteError(
                f"{', '.join(missing_ledgers)} did not send the ledger, which the privacy card "
                "needs. Start the site again, and end the run with --resume"
            )
        for name in missing:
            log.warning("%s was not reached at the end of the run", name)
        return {name: journal for name, journal in journals.items() if journal}

    def close(self) -> None:
        self._transport.close()
        self._home.close()

    # One delivery ---------------------------------------------------------------------------

    def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        replies: dict[int, Reply[Any]] = {}
        queues: dict[str, list[int]] = {}
        for index, call in enumerate(calls):
            check(call.message)
            if call.to.location is AgentLocation.SERVER:
                [replies[index]] = self._home.deliver([call])
            else:
                queues.setdefault(call.to.id, []).append(index)
        while queues:  # calls of one agent in sequence, of several agents in parallel
            batch = {name: indices.pop(0) for name, indices in queues.items()}
            queues = {name: indices for name, indices in queues.items() if indices}
            replies |= self._run_calls(
                {name: (index, calls[index]) for name, index in batch.items()}
            )
        self._check_missing_replies(calls, replies)
        return [replies[index] for index in range(len(calls))]

    def _run_calls(self, calls: Mapping[str, tuple[int, Call]]) -> dict[int, Reply[Any]]:
        """Run at most one call per agent."""
        start = time.monotonic()
        deadline = math.ceil(time.time() + self._timeouts.visit_seconds)
        requests = {name: self._build_request(call, deadline) for name, (_, call) in calls.items()}
        responses: dict[str, StepResponse] = {}
        errors: dict[str, str] = dict.fromkeys(calls, "gone")
        contacted: set[str] = set()
        while waiting := [name for name in calls if name not in responses]:
            seconds_left = start + self._timeouts.visit_seconds - time.monotonic()
            if seconds_left <= 0:
                break
            targets = {self._sites.address[n]: n for n in waiting if n in self._sites.address}
            frames = {a: protocol.to_bytes(requests[name]) for a, name in targets.items()}
            self._traffic.frames += len(frames)
            self._traffic.again += len(contacted.intersection(targets.values()))
            contacted |= set(targets.values())
            self._traffic.down += sum(map(len, frames.values()))
            for address, data in self._transport.exchange(frames, seconds_left).items():
                self._traffic.up += len(data)
                response = _parse_response(data, requests[targets[address]])
                errors[targets[address]] = response.error
                if response.error != "busy":
                    responses[targets[address]] = response
                    self._traffic.seconds.append(time.monotonic() - start)
            if len(responses) < len(calls):
                time.sleep(min(self._timeouts.retry_interval, seconds_left))
                self._sites.poll(seconds_left)
        return {
            index: self._build_reply(
                call,
                responses.get(name) or StepResponse("", error=errors[name]),
                requests[name].charge_id,
            )
            for name, (index, call) in calls.items()
        }

    def _build_request(self, call: Call, deadline: int) -> StepRequest:
        return StepRequest(
            run=self.run, agreement=self._compatibility_hash, agent=call.to.id, round=call.round,
            step=call.step.__name__, visit=call.visit, memory=self._memory_versions[call.to.id],
            message=type(call.message).__name__, deadline=deadline, body=serialize(call.message),
        )  # fmt: skip

    def _build_reply(self, call: Call, response: StepResponse, charge_id: str) -> Reply[Any]:
        """Return the reply in a response; ``NoReply`` if there is none."""
        code = response.error
        if not code:
            try:
                content = deserialize(output_type(call.step, response.message), response.body)
                self._memory_versions[call.to.id] = response.memory
                if response.charged:
                    self._charges[call.to.id] += charge_id
                return Reply(call.to, content, response.weight, dict(response.notes))
            except (MessageError, StepError) as error:
                log.warning("The response of %s to %s: %s", call.to.id, call.key, error)
                code = "garbled"
        return Reply(call.to, NoReply(code))

    def _check_missing_replies(
        self, calls: Sequence[Call], replies: Mapping[int, Reply[Any]]
    ) -> None:
        """Raise SiteError if the run may not continue without the missing replies."""
        absent = [n for n in range(len(calls)) if isinstance(replies[n].content, NoReply)]
        codes = {index: replies[index].content.reason for index in absent}
        for index, code in codes.items():
            log.warning("%s has no reply: %s", calls[index].key, describe_error(code))
        for index in absent:
            step = calls[index].step.__name__
            same_step = [n for n, call in enumerate(calls) if call.step.__name__ == step]
            replied = sum(n not in codes for n in same_step)
            remedy = (
                "" if codes[index] in STOP else self._find_remedy(step, replied, len(same_step))
            )
            if remedy is not None:
                raise SiteError(
                    f"{calls[index].to.id} has no reply to {step} in round {calls[index].round} "
                    f"({codes[index]}): {describe_error(codes[index])}{remedy}"
                )

    def _find_remedy(self, step: str, replied: int, total: int) -> str | None:
        """Return None if the run continues without the missing replies; else how to continue."""
        quorum = self._timeouts.quorum
        if step in self._policy.skip:
            if self._timeouts.absent == "skip":
                return None
            return ". To continue without it: --resume with run.absent=skip"
        if step not in self._policy.quorum:
            return f". {self._policy.needed_because or 'This step needs all of them'}"
        if replied >= quorum * total:
            return None
        if not replied:
            return ". Nobody else replied either, so the run cannot continue"
        return (
            f". {replied} of {total} replied, and run.quorum is {quorum:g}. To continue with "
            f"these: --resume with run.quorum={math.floor(1e4 * replied / total) / 1e4:g}"
        )


def is_name(memory: Memory) -> bool:
    """Return whether this identifies a memory stored at a site."""
    return set(memory) == {"run", "visit", "charged"}


def read_charges(memory: Memory) -> tuple[str, set[str]]:
    """Return the run, and the ids of charged replies, that a checkpoint records of a site.

    "" and an empty set for other memories.
    """
    if not is_name(memory):
        return "", set()
    return _to_text(memory["run"]), _split_charge_ids(_to_text(memory["charged"]))


def list_charge_ids(visits: Iterable[str]) -> set[str]:
    """Return the ids of charged replies in the visits of a ledger."""
    return {visit.rpartition("@")[2] for visit in visits}


def _split_charge_ids(text: str) -> set[str]:
    return {text[i : i + CHARGE_ID_DIGITS] for i in range(0, len(text), CHARGE_ID_DIGITS)}


def _parse_response(data: bytes, request: StepRequest) -> StepResponse:
    """Return the response to this very request; anything else becomes an error."""
    try:
        response: StepResponse = protocol.from_bytes(data, StepResponse)
    except WireError as error:
        return StepResponse("", error="version" if error.error_code == "version" else "garbled")
    # The id is empty if the site could not read the request and reports an error.
    if response.error and response.id in ("", request.id):
        return (
            response
            if response.error in protocol.ERROR_CODES
            else StepResponse("", error="garbled")
        )
    # Charged replies have weight 1: another weight could be a number of rows. NaN fails both tests.
    weight_ok = 0 <= response.weight <= protocol.MOST_SHARE
    if response.id != request.id or not (response.weight == 1.0 if response.charged else weight_ok):
        return StepResponse("", error="garbled")
    return response


def _to_tensor(text: str) -> Tensor:
    """Encode ASCII text as a tensor, because memories consist of tensors."""
    return torch.tensor(list(text.encode("ascii")), dtype=torch.uint8)


def _to_text(data: Tensor) -> str:
    return bytes(data.tolist()).decode("ascii")
