"""The engine for one machine with several cores: agents of a parallel step work side by side.

Workers are forked from this process before anything is trained. What a fork has it shares until
somebody writes to it, so no row is ever copied or sent, and each worker has networks of its own
to train, which stay with it. A worker has one intra-op thread and does the arithmetic that this
process would have done: 1, 2 and 4 workers give the same bits.

A call travels as the *names* of agent, step and message class, the fields of the message and the
agent's memory. This process owns all memories and takes the new one from the reply, so any worker
can take any agent: the one with most rows first, the next to whoever is free. Names, numbers and
shapes go through a pipe, on which both sides wait asleep. Tensors lie in memory that both see: one
sheet for a message that goes to everybody, one for each worker. They are copied once in and once
out: made bytes of a file in between, they took nearly twice as long to read.

What stays in this process: a call without company (a sequential pass), and every agent that has
a privacy account. So journals, locks and private noise belong to one process, and nothing has to
be proved about noise after a fork: no worker ever draws any. Workers see no true label, either:
what steps guessed comes with the reply and is told to the meter here, in the order of the calls.

A worker owns nothing that a kill could harm. So it is killed where others would be asked to end:
when the engine is closed, when a delivery breaks off (a late reply then can never be taken for
one of the next delivery), and by itself the moment this process is gone, whatever ended it.

Forks are taken on Linux alone, and where torch sees no accelerator: beside one, autograd refuses
to work in a fork of a process that has trained, as this one has when a worker is replaced, or
when it is the second run of a comparison. Later Pythons warn of forks beside threads. The first
workers are forked before a run starts any (its trackers do); one that replaces another is not.
That is safe for what a worker does: it takes no lock that the threads of trackers take, and
Python, libc and OpenBLAS mend theirs after a fork.
"""

import json
import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch
from torch import Tensor

from privssl.algorithms.base import Algorithm
from privssl.core.agents import Agent
from privssl.core.engine import Call
from privssl.core.messages import Message, Reply, check, from_parts, to_parts
from privssl.core.task import LabelMeter
from privssl.engines.local import LocalEngine, PseudoLabelBuffer, roundtrip, roundtrip_calls
from privssl.engines.worker_process import (
    ParentDeathPipe,
    SharedBuffer,
    Worker,
    WorkerError,
    class_of,
    decode_error,
    encode_error,
    keep_to_core,
    name_of,
    pending_signals,
)
from privssl.storage.spill_store import SpillStore

TRIES = 2  # workers that a call may end before the run stops
UNUSED = 3  # workers for each place that may end in a delivery before they had a call

log = logging.getLogger("privssl")


# How many ------------------------------------------------------------------------------------


def unsupported_reason(device: torch.device) -> str | None:
    """Why there can be no worker processes with this device, as half a sentence; None: there can.

    >>> unsupported_reason(torch.device("cuda"))
    'the device is cuda, and worker processes share the cores of a cpu'
    """
    if device.type != "cpu":
        return f"the device is {device}, and worker processes share the cores of a cpu"
    if sys.platform != "linux":
        return f"worker processes need Linux, and this is {sys.platform}"
    if torch.accelerator.is_available():
        return (
            "torch sees a GPU, and beside one it cannot train in worker processes (hide it: "
            "CUDA_VISIBLE_DEVICES= before the command)"
        )
    return None


def resolve_worker_count(
    asked: int | Literal["auto"], agents: Sequence[Agent], device: torch.device
) -> int:
    """Worker processes for these agents, >= 1. One means none: agents work in this process.

    ``auto`` is the number of cores that this process may use, where workers are possible. With
    more than one intra-op thread (OMP_NUM_THREADS) it is 1: the cores have their work, and sums
    would be taken in another order. Never more than agents that can work side by side.
    """
    if asked == "auto":
        alone = unsupported_reason(device) or torch.get_num_threads() > 1
        asked = 1 if alone else len(os.sched_getaffinity(0))
    return max(1, min(asked, sum(agent.account is None for agent in agents)))


# The engine ----------------------------------------------------------------------------------


@dataclass
class _Delivery:
    """Where the calls of one delivery stand, each by its place in them."""

    calls: Sequence[Call]
    here: deque[int]  # for this process, in order
    agent_queues: deque[
        deque[int]
    ]  # for workers: an agent's calls, in order; the longest agent first
    request: dict[str, Any] | None = None  # where the tensors lie of the message all calls share
    running: dict[Connection, tuple[Worker, deque[int]]] = field(default_factory=dict)
    deaths: Counter[int | None] = field(default_factory=Counter)  # of workers, by their call
    replies: dict[int, Reply[Any]] = field(default_factory=dict)
    seen: dict[int, list[Tensor]] = field(default_factory=dict)  # what the meter is to be told
    failed: dict[int, Exception] = field(default_factory=dict)

    def matters(self, place: int) -> bool:
        """Whether a call can still decide over the outcome: the first that fails does."""
        return place < min(self.failed, default=len(self.calls))

    def next_queue(self) -> deque[int] | None:
        while self.agent_queues:
            queue = self.agent_queues.popleft()
            if self.matters(queue[0]):
                return queue
        return None


class WorkerEngine(LocalEngine):
    """Delivers the calls of a parallel step to worker processes, all others in this process."""

    def __init__(
        self,
        agents: Sequence[Agent],
        *,
        algorithm: Algorithm[Any],
        workers: int,
        seed: int,
        device: torch.device,
        meter: LabelMeter | None = None,
        check_wire: bool = False,
        spill_store: SpillStore | None = None,
    ) -> None:
        """Fork the workers, where ``unsupported_reason`` has no objection.

        Args:
            algorithm: whose steps will be called; a step of anybody else is done here.
            workers: >= 1.

        Raises:
            WorkerError: the system starts no more processes.
        """
        super().__init__(
            agents,
            seed=seed,
            device=device,
            meter=meter,
            check_wire=check_wire,
            spill_store=spill_store,
        )
        self._algorithm = algorithm
        self._letter = SharedBuffer()
        self._lifeline = ParentDeathPipe()
        self._workers: list[Worker | None] = [None] * workers
        try:
            self._fill_places()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        workers, self._workers = self._workers, []
        for worker in filter(None, workers):
            worker.end()
        self._letter.close()
        self._lifeline.close()
        super().close()

    # One delivery --------------------------------------------------------------------------

    def _run_calls(self, calls: Sequence[Call]) -> Iterator[Reply[Any]]:
        now = self._plan_delivery(roundtrip_calls(calls) if self._check_wire else calls)
        if not self._workers or len(now.agent_queues) + len(now.here) < 2 or not now.agent_queues:
            yield from super()._run_calls(calls)
            return
        self._fill_places()
        try:
            yield from self._spread(now)
        finally:
            for worker, _ in now.running.values():
                self._stop_worker(worker)
        if now.failed:
            raise now.failed[min(now.failed)]

    def _plan_delivery(self, calls: Sequence[Call]) -> _Delivery:
        agent_queues: dict[str, deque[int]] = {}
        for place, call in enumerate(calls):
            agent_queues.setdefault(call.to.id, deque()).append(place)
        here = {call.to.id for call in calls if not self._may_leave(call)}
        away = sorted(
            agent_queues.keys() - here, key=lambda name: (-self._rows(name), agent_queues[name][0])
        )
        now = _Delivery(
            calls,
            here=deque(place for place, call in enumerate(calls) if call.to.id in here),
            agent_queues=deque(agent_queues[name] for name in away),
        )
        if len({id(call.message) for call in calls}) == 1 and len(away) > 1 and self._workers:
            check(calls[0].message)  # once, and not by everybody who reads it
            [now.request] = self._letter.write(to_parts(calls[0].message)[1])
        return now

    def _may_leave(self, call: Call) -> bool:
        theirs = getattr(self._algorithm, call.step.__name__, None)
        return self._agents[call.to.id].account is None and bool(theirs == call.step)

    def _rows(self, name: str) -> int:
        agent = self._agents[name]
        return sum(len(rows) for rows in (agent.held_labelled, agent.held_unlabelled) if rows)

    def _spread(self, now: _Delivery) -> Iterator[Reply[Any]]:
        for place in range(len(now.calls)):
            while place not in now.replies:
                if not now.matters(place):
                    return
                self._go_on(now)
            if self._meter is not None:
                PseudoLabelBuffer(now.seen.pop(place, [])).flush(self._meter)
            yield now.replies.pop(place)

    def _go_on(self, now: _Delivery) -> None:
        """Give every worker something to do, and take what comes."""
        self._hand_out(now)
        if now.here:
            self._visit_here(now)
        busy = list(now.running)
        for pipe in wait(busy, timeout=0 if now.here or not busy else None):
            self._receive(*now.running[pipe], now)  # type: ignore[index]
        self._hand_out(now)  # before a reply is taken: nobody waits for that

    def _hand_out(self, now: _Delivery) -> None:
        for worker in filter(None, list(self._workers)):
            if worker.pipe not in now.running and (queue := now.next_queue()):
                self._send(worker, queue, now)

    def _visit_here(self, now: _Delivery) -> None:
        """One call of this process, while workers do theirs."""
        place = now.here.popleft()
        if now.matters(place):
            try:
                now.replies[place] = self._visit(now.calls[place])
            except Exception as error:
                now.failed[place] = error

    def _send(self, worker: Worker, queue: deque[int], now: _Delivery) -> None:
        call, memory = now.calls[queue[0]], self._agents[now.calls[queue[0]].to.id].memory
        fields, tensors = to_parts(call.message)
        own = [] if now.request is not None else [tensors]
        order = {
            "agent": call.to.id,
            "step": call.step.__name__,
            "round": call.round,
            "visit": call.visit,
            "kind": name_of(type(call.message)),
            "fields": fields,
            "letter": now.request,
            "sheet": worker.shared_buffer.write(*own, dict(memory)),
        }
        now.running[worker.pipe] = worker, queue
        try:
            worker.pipe.send_bytes(json.dumps(order).encode())
        except OSError:
            self._handle_exit(worker, queue, now, had_it=False)

    def _receive(self, worker: Worker, queue: deque[int], now: _Delivery) -> None:
        try:
            answer = json.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            return self._handle_exit(worker, queue, now, had_it=True)
        place = queue.popleft()
        try:
            now.replies[place], now.seen[place] = self._take_reply(now.calls[place], worker, answer)
        except Exception as error:
            now.failed[place] = error
        del now.running[worker.pipe]
        if queue:
            now.agent_queues.appendleft(queue)

    def _take_reply(
        self, call: Call, worker: Worker, answer: dict[str, Any]
    ) -> tuple[Reply[Any], list[Tensor]]:
        """A worker's answer as reply and observations; raises what the step raised there."""
        if "error" in answer:
            raise decode_error(answer)
        tensors, memory, seen = worker.shared_buffer.read(answer["sheet"])
        message = from_parts(class_of(Message, *answer["kind"]), answer["fields"], tensors)
        message = roundtrip(message) if self._check_wire else message
        if answer["remembers"]:
            self._remember(call.to.id, memory)
        reply = Reply(call.to, message, answer["weight"], answer["notes"])
        return reply, list(seen.values())

    # Workers come and go -------------------------------------------------------------------

    def _fill_places(self) -> None:
        for place, worker in enumerate(self._workers):
            if worker is None:
                self._start_worker(place)

    def _start_worker(self, place: int) -> None:
        with pending_signals():
            try:
                worker = Worker.fork(partial(self._serve, place), self._lifeline, [self._letter])
            except OSError as error:
                raise WorkerError(
                    f"The system starts no worker process: {error.strerror}. Set run.workers=1, "
                    "and all agents work in one process"
                ) from error
            self._workers[place] = worker

    def _stop_worker(self, worker: Worker) -> str:
        self._workers = [None if other is worker else other for other in self._workers]
        return worker.end()

    def _handle_exit(
        self, worker: Worker, queue: deque[int], now: _Delivery, *, had_it: bool
    ) -> None:
        """A worker has ended, in a visit or before it had the call: somebody else has to do it."""
        how, place = self._stop_worker(worker), queue[0]
        del now.running[worker.pipe]
        visit = f"{now.calls[place].step.__name__} of {now.calls[place].to.id}"
        what, most = (place, TRIES) if had_it else (None, UNUSED * len(self._workers))
        now.deaths[what] += 1
        if now.deaths[what] < most:
            when = f"during {visit}, which is done again" if had_it else "between visits"
            log.warning("A worker process %s %s.", how, when)
            now.agent_queues.appendleft(queue)
        else:
            ended = f"in turn did not survive {visit}" if had_it else "ended before they had a call"
            killed = "SIGKILL is how the system takes memory back. " if "SIGKILL" in how else ""
            now.failed[place] = WorkerError(
                f"{most} worker processes {ended}: the last {how}. {killed}Set run.workers=1, so "
                f"that all agents work in one process{killed and ', or give the run more memory'}"
            )
        self._fill_places()

    # In the worker -------------------------------------------------------------------------

    def _serve(self, place: int, pipe: Connection, shared_buffer: SharedBuffer) -> None:
        keep_to_core(place, len(self._workers))
        self._meter = (
            None if self._meter is None else PseudoLabelBuffer()
        )  # with it true labels are let go
        for other in filter(None, self._workers):  # whose sheets would outlive them here
            other.shared_buffer.unmap()
        while True:
            try:
                order = json.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                return
            try:
                answer = json.dumps(self._answer(order, shared_buffer))
            except BaseException as error:
                answer = json.dumps(encode_error(error))
            try:
                pipe.send_bytes(answer.encode())
            except OSError:  # the other process is gone
                return

    def _answer(self, order: dict[str, Any], shared_buffer: SharedBuffer) -> dict[str, Any]:
        """Do one visit; the content, the memory and the observations are left on the sheet."""
        *own, before = shared_buffer.read(order["sheet"])
        [tensors] = own or self._letter.read([order["letter"]])
        message = from_parts(class_of(Message, *order["kind"]), order["fields"], tensors)
        if own:
            check(message)
        agent = self._agents[order["agent"]]
        heard = None if self._meter is None else PseudoLabelBuffer()
        agent.memory = before
        step = getattr(self._algorithm, order["step"])
        call = Call(agent.ref, step, message, order["round"], order["visit"])
        reply = self._run_on_agent(call, message, heard)
        check(reply.content)
        after, agent.memory = agent.memory, {}
        changed = after is not before
        fields, tensors = to_parts(reply.content)
        seen = {str(place): tensor for place, tensor in enumerate(heard.seen if heard else ())}
        return {
            "kind": name_of(type(reply.content)),
            "fields": fields,
            "weight": reply.weight,
            "notes": dict(reply.metrics),
            "remembers": changed,
            "sheet": shared_buffer.write(tensors, after if changed else {}, seen),
        }
