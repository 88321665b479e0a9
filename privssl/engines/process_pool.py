"""The engine for several cores: agents of a parallel step work in worker processes.

Workers are forked before training, so rows are shared and never copied or sent. Each has its own
networks and one intra-op thread, so any number of workers gives the same bits.

A call is sent as the names of agent, step and message class, the message's fields and the agent's
memory. This process owns all memories, so any worker can serve any agent: the agent with most rows
first, then each next agent to an idle worker. Names and numbers go through a pipe; tensors through
shared memory, one buffer for a message to all agents and one for each worker.

Single calls (a sequential pass) and agents with a privacy account stay in this process, so
journals, locks and private noise belong to one process. Workers have no true labels: their
pseudo-labels come with the reply and are reported to the meter here, in the order of the calls.

A worker is killed when the engine closes or a delivery is aborted, so that no late reply is
mistaken for one of the next delivery. It exits when this process ends.

Workers need Linux, no visible accelerator and no torch.compile before the first backward pass: else
autograd has threads, and refuses to work in a fork. A replacement may be forked beside threads of
trackers, which is safe: workers take none of their locks, and Python, libc and OpenBLAS reset
theirs after a fork.
"""

import json
import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from privssl.algorithms.base import Algorithm
from privssl.core.agents import Agent
from privssl.core.engine import Call
from privssl.core.messages import Reply, check, from_parts, to_parts
from privssl.engines.local import (
    EngineOptions,
    LocalEngine,
    PseudoLabelBuffer,
    named_in_errors,
    roundtrip,
    roundtrip_calls,
)
from privssl.engines.worker_process import (
    SharedBuffer,
    Worker,
    WorkerError,
    decode_error,
    encode_error,
    pending_signals,
    pin_to_core,
)
from privssl.remote.step_lookup import input_type, output_type

TRIES = 2  # workers that may die during a call before the run stops
UNUSED = 3  # workers per slot that may die before their first call before the run stops

log = logging.getLogger("privssl")


def unsupported_reason(device: torch.device) -> str | None:
    """Return why worker processes are impossible with this device, or None.

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
    if _has_autograd_threads():
        return (
            "autograd has threads in this process, so it cannot train in worker processes (they "
            "begin with torch.compile or torch.export: train before, or in another process)"
        )
    return None


def _has_autograd_threads() -> bool:
    """Return whether autograd has threads in this process, so that torch refuses a backward pass in
    a fork."""
    torch.autograd.backward(torch.zeros((), requires_grad=True))  # starts them, if ever
    for name in Path("/proc/self/task").glob("*/comm"):  # empty without /proc
        with suppress(OSError):  # the thread has ended
            if name.read_text().startswith("pt_autograd"):
                return True
    return False


def resolve_worker_count(
    requested: int | Literal["auto"], agents: Sequence[Agent], device: torch.device
) -> int:
    """Return the number of worker processes, >= 1; 1: all agents work in this process.

    ``auto`` is the number of usable cores, or 1 if workers are impossible or torch uses several
    intra-op threads, which would sum in another order. It is at most the number of agents without
    an account.
    """
    if requested == "auto":
        single = unsupported_reason(device) or torch.get_num_threads() > 1
        requested = 1 if single else len(os.sched_getaffinity(0))
    return max(1, min(requested, sum(agent.account is None for agent in agents)))


@dataclass
class _Delivery:
    """The state of one delivery. Calls are identified by their index in ``calls``."""

    calls: Sequence[Call]
    local_calls: deque[int]  # calls of this process, in order
    agent_queues: deque[deque[int]]  # calls of workers, by agent; the largest agent first
    request: dict[str, Any] | None = None  # layout of the message that all calls share
    running: dict[Connection, tuple[Worker, deque[int]]] = field(default_factory=dict)
    deaths: Counter[int | None] = field(default_factory=Counter)  # number of dead workers, by call
    replies: dict[int, Reply[Any]] = field(default_factory=dict)
    pseudo_labels: dict[int, list[Tensor]] = field(default_factory=dict)  # for the meter
    failed: dict[int, Exception] = field(default_factory=dict)

    def matters(self, index: int) -> bool:
        """Return whether a call can still determine the outcome, which is the first failure."""
        return index < min(self.failed, default=len(self.calls))

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
        **options: Unpack[EngineOptions],
    ) -> None:
        """Fork ``workers`` >= 1 processes for steps of ``algorithm``. ``unsupported_reason`` must
        be None.

        Raises:
            WorkerError: the system cannot start more processes.
        """
        super().__init__(agents, **options)
        self._algorithm = algorithm
        self._common_buffer = SharedBuffer()
        self._workers: list[Worker | None] = [None] * workers
        try:
            self._start_workers()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        workers, self._workers = self._workers, []
        for worker in filter(None, workers):
            worker.end()
        self._common_buffer.close()
        super().close()

    # One delivery --------------------------------------------------------------------------

    def _run_calls(self, calls: Sequence[Call]) -> Iterator[Reply[Any]]:
        delivery = self._plan_delivery(roundtrip_calls(calls) if self._check_wire else calls)
        if (
            not self._workers
            or len(delivery.agent_queues) + len(delivery.local_calls) < 2
            or not delivery.agent_queues
        ):
            yield from super()._run_calls(calls)
            return
        self._start_workers()
        try:
            yield from self._deliver_in_order(delivery)
        finally:
            for worker, _ in delivery.running.values():
                self._stop_worker(worker)
        if delivery.failed:
            raise delivery.failed[min(delivery.failed)]

    def _plan_delivery(self, calls: Sequence[Call]) -> _Delivery:
        queues: dict[str, deque[int]] = {}
        for index, call in enumerate(calls):
            queues.setdefault(call.to.id, deque()).append(index)
        local = {call.to.id for call in calls if not self._can_run_in_worker(call)}
        pooled = sorted(
            queues.keys() - local, key=lambda name: (-self._count_rows(name), queues[name][0])
        )
        delivery = _Delivery(
            calls,
            local_calls=deque(index for index, call in enumerate(calls) if call.to.id in local),
            agent_queues=deque(queues[name] for name in pooled),
        )
        if len({id(call.message) for call in calls}) == 1 and len(pooled) > 1 and self._workers:
            check(calls[0].message)  # once, not in every worker
            [delivery.request] = self._common_buffer.write(to_parts(calls[0].message)[1])
        return delivery

    def _can_run_in_worker(self, call: Call) -> bool:
        own_step = getattr(self._algorithm, call.step.__name__, None)
        return self._agents[call.to.id].account is None and bool(own_step == call.step)

    def _count_rows(self, name: str) -> int:
        agent = self._agents[name]
        return sum(len(rows) for rows in (agent.held_labelled, agent.held_unlabelled) if rows)

    def _deliver_in_order(self, delivery: _Delivery) -> Iterator[Reply[Any]]:
        for index in range(len(delivery.calls)):
            while index not in delivery.replies:
                if not delivery.matters(index):
                    return
                self._advance(delivery)
            if self._meter is not None:
                PseudoLabelBuffer(delivery.pseudo_labels.pop(index, [])).flush(self._meter)
            yield delivery.replies.pop(index)

    def _advance(self, delivery: _Delivery) -> None:
        """Give every idle worker a call, run one here, and collect replies."""
        self._assign_calls(delivery)
        if delivery.local_calls:
            index = delivery.local_calls.popleft()
            if delivery.matters(index):
                try:
                    delivery.replies[index] = self._run_call(delivery.calls[index])
                except Exception as error:
                    delivery.failed[index] = error
        busy = list(delivery.running)
        for pipe in wait(busy, timeout=0 if delivery.local_calls or not busy else None):
            self._receive_reply(*delivery.running[pipe], delivery)  # type: ignore[index]
        self._assign_calls(delivery)

    def _assign_calls(self, delivery: _Delivery) -> None:
        for worker in filter(None, list(self._workers)):
            if worker.pipe not in delivery.running and (queue := delivery.next_queue()):
                self._send_call(worker, queue, delivery)

    def _send_call(self, worker: Worker, queue: deque[int], delivery: _Delivery) -> None:
        call, memory = delivery.calls[queue[0]], self._agents[delivery.calls[queue[0]].to.id].memory
        fields, tensors = to_parts(call.message)
        own_parts = [] if delivery.request is not None else [tensors]
        request = {
            "agent": call.to.id,
            "step": call.step.__name__,
            "round": call.round,
            "visit": call.visit,
            "kind": type(call.message).__name__,
            "fields": fields,
            "common": delivery.request,
            "own": worker.shared_buffer.write(*own_parts, dict(memory)),
        }
        delivery.running[worker.pipe] = worker, queue
        try:
            worker.pipe.send_bytes(json.dumps(request).encode())
        except OSError:
            self._handle_exit(worker, queue, delivery, started=False)

    def _receive_reply(self, worker: Worker, queue: deque[int], delivery: _Delivery) -> None:
        try:
            response = json.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            return self._handle_exit(worker, queue, delivery, started=True)
        index = queue.popleft()
        try:
            delivery.replies[index], delivery.pseudo_labels[index] = self._read_reply(
                delivery.calls[index], worker, response
            )
        except Exception as error:
            delivery.failed[index] = error
        del delivery.running[worker.pipe]
        if queue:
            delivery.agent_queues.appendleft(queue)

    def _read_reply(
        self, call: Call, worker: Worker, response: dict[str, Any]
    ) -> tuple[Reply[Any], list[Tensor]]:
        """Return a worker's reply and pseudo-labels; raise the error of its step."""
        if "error" in response:
            raise decode_error(response)
        tensors, memory, pseudo_labels = worker.shared_buffer.read(response["own"])
        message = from_parts(output_type(call.step, response["kind"]), response["fields"], tensors)
        message = roundtrip(message) if self._check_wire else message
        if response["memory_changed"]:
            self._set_memory(call.to.id, memory)
        reply = Reply(call.to, message, response["weight"], response["metrics"])
        return reply, list(pseudo_labels.values())

    # Starting and ending workers -----------------------------------------------------------

    def _start_workers(self) -> None:
        for slot in [slot for slot, worker in enumerate(self._workers) if worker is None]:
            serve = partial(self._serve_calls, slot)
            try:
                with pending_signals():
                    self._workers[slot] = Worker.fork(serve, [self._common_buffer])
            except OSError as error:
                raise WorkerError(
                    f"The system starts no worker process: {error.strerror}. Set run.workers=1, "
                    "and all agents work in one process"
                ) from error

    def _stop_worker(self, worker: Worker) -> str:
        self._workers = [None if other is worker else other for other in self._workers]
        return worker.end()

    def _handle_exit(
        self, worker: Worker, queue: deque[int], delivery: _Delivery, *, started: bool
    ) -> None:
        """Replace a dead worker, and run its call again unless too many have died."""
        ending, index = self._stop_worker(worker), queue[0]
        del delivery.running[worker.pipe]
        step = f"{delivery.calls[index].step.__name__} of {delivery.calls[index].to.id}"
        cause, limit = (index, TRIES) if started else (None, UNUSED * len(self._workers))
        delivery.deaths[cause] += 1
        if delivery.deaths[cause] < limit:
            when = f"during {step}, which is run again" if started else "between steps"
            log.warning("A worker process %s %s.", ending, when)
            delivery.agent_queues.appendleft(queue)
        else:
            ended = f"in turn did not survive {step}" if started else "ended before they had a call"
            hint = "SIGKILL is how the system takes memory back. " if "SIGKILL" in ending else ""
            delivery.failed[index] = WorkerError(
                f"{limit} worker processes {ended}: the last {ending}. {hint}Set run.workers=1, so "
                f"that all agents work in one process{hint and ', or give the run more memory'}"
            )
        self._start_workers()

    # In the worker -------------------------------------------------------------------------

    def _serve_calls(self, slot: int, pipe: Connection, shared_buffer: SharedBuffer) -> None:
        pin_to_core(slot, len(self._workers))
        if self._meter is not None:  # the real meter has true labels
            self._meter = PseudoLabelBuffer()
        for other in filter(None, self._workers):  # a fork must not keep their buffers alive
            other.shared_buffer.unmap()
        while True:
            try:
                request = json.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                return
            try:
                response = json.dumps(self._answer_call(request, shared_buffer))
            except BaseException as error:
                response = json.dumps(encode_error(error))
            try:
                pipe.send_bytes(response.encode())
            except OSError:  # the engine's process has ended
                return

    def _answer_call(self, request: dict[str, Any], shared_buffer: SharedBuffer) -> dict[str, Any]:
        """Run one step; leave its tensors in the shared buffer."""
        *own_parts, memory = shared_buffer.read(request["own"])
        [tensors] = own_parts or self._common_buffer.read([request["common"]])
        step = getattr(self._algorithm, request["step"])
        message = from_parts(input_type(step, request["kind"]), request["fields"], tensors)
        if own_parts:
            check(message)
        agent = self._agents[request["agent"]]
        buffer = None if self._meter is None else PseudoLabelBuffer()
        agent.memory = memory
        call = Call(agent.ref, step, message, request["round"], request["visit"])
        reply = self._run_on_agent(call, message, buffer)
        with named_in_errors(call):
            check(reply.content)
        new_memory, agent.memory = agent.memory, {}
        changed = new_memory is not memory
        fields, tensors = to_parts(reply.content)
        pseudo_labels = {
            str(index): tensor for index, tensor in enumerate(buffer.seen if buffer else ())
        }
        return {
            "kind": type(reply.content).__name__,
            "fields": fields,
            "weight": reply.weight,
            "metrics": dict(reply.metrics),
            "memory_changed": changed,
            "own": shared_buffer.write(tensors, new_memory if changed else {}, pseudo_labels),
        }
