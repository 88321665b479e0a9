"""The engine for one machine: all agents live in this process and work in sequence.

Messages are copied between server and agent, so that neither can write into the other's tensors;
with ``check_wire`` they are also serialised, as for a network.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import NotRequired, TypedDict, Unpack

from privssl.core.agents import Agent, AgentRef, Memory, natural_order
from privssl.core.engine import Call
from privssl.core.messages import (
    Declined,
    M,
    Message,
    MessageError,
    Reply,
    check,
    deserialize,
    serialize,
)
from privssl.core.step_runner import run_step
from privssl.core.task import Context, LabelMeter
from privssl.remote.step_lookup import check_declared
from privssl.runtime.randomness import seeded
from privssl.storage.spill_store import SpillStore
from privssl.training import local_training


class PseudoLabelBuffer:
    """A meter for the time of a step, so that no step can reach the real meter's true labels."""

    def __init__(self, seen: Sequence[Tensor] = ()) -> None:
        self.seen = list(seen)  # ids, labels, kept of each batch

    def observe(self, ids: Tensor, labels: Tensor, kept: Tensor) -> None:
        self.seen += [ids, labels, kept]

    def flush(self, meter: LabelMeter) -> None:
        for ids, labels, kept in zip(self.seen[::3], self.seen[1::3], self.seen[2::3], strict=True):
            meter.observe(ids, labels, kept)


class EngineOptions(TypedDict):
    """Options common to the engines of one machine."""

    seed: int
    device: torch.device
    meter: NotRequired[LabelMeter | None]
    check_wire: NotRequired[bool]
    spill_store: NotRequired[SpillStore | None]  # stores memories; default: all in RAM


class LocalEngine:
    """Delivers calls in sequence in this process."""

    def __init__(self, agents: Sequence[Agent], **options: Unpack[EngineOptions]) -> None:
        self._agents = {a.id: a for a in sorted(agents, key=lambda a: natural_order(a.id))}
        self._seed = options["seed"]
        self._device = options["device"]
        self._meter = options.get("meter")
        self._check_wire = options.get("check_wire", False)
        self._session_id = os.urandom(6).hex()
        self._spill_store = options.get("spill_store") or SpillStore()

    def roster(self) -> Sequence[AgentRef]:
        return [agent.ref for agent in self._agents.values()]

    def deliver(self, calls: Sequence[Call]) -> Iterable[Reply[Any]]:
        """See ``Engine.deliver``. Calls are run lazily, as replies are taken."""
        return self._run_calls(calls)

    def _run_calls(self, calls: Sequence[Call]) -> Iterator[Reply[Any]]:
        """Yield the replies of ``deliver``; other engines override this and give the same bits."""
        return map(self._run_call, calls)

    def _run_call(self, call: Call) -> Reply[Any]:
        buffer = None if self._meter is None else PseudoLabelBuffer()
        reply = self._run_on_agent(call, self._copy_message(call.message), buffer)
        if self._meter is not None and buffer is not None:
            buffer.flush(self._meter)
        self._set_memory(call.to.id, self._agents[call.to.id].memory)
        with named_in_errors(call):
            return dataclasses.replace(reply, content=self._copy_message(reply.content))

    def _run_on_agent(
        self, call: Call, message: Message, buffer: PseudoLabelBuffer | None
    ) -> Reply[Any]:
        """Run the step. Nothing is copied: the caller must copy the reply before the next step."""
        agent = self._agents[call.to.id]
        ctx = Context(
            seed=self._seed,
            round=call.round,
            agent=agent.id,
            visit_key=call.key,
            session_id=self._session_id,
            device=self._device,
            # a guarantee covers rows with an account, and metrics would bypass it
            telemetry=agent.account is None,
            meter=buffer,
        )
        # Dropout draws from torch's global generator.
        with seeded(ctx.rng("torch")), local_training.copy_once():
            content = run_step(agent, call.step, message, ctx)
        check_declared(call.step, message, content)
        return Reply(agent.ref, content, weight=ctx.weight, metrics=dict(ctx.metrics))

    def _copy_message(self, message: Message) -> Message:
        if self._check_wire:
            return roundtrip(message)
        if isinstance(message, Declined):
            return message
        check(message)  # a diverged run must stop with an error
        return type(message)(**{name: _copy_value(value) for name, value in vars(message).items()})

    def _set_memory(self, agent: str, memory: Memory) -> None:
        self._agents[agent].memory = self._spill_store.put(memory)

    def memories(self) -> Mapping[str, Memory]:
        return {agent.id: agent.memory for agent in self._agents.values()}

    def restore(self, memories: Mapping[str, Memory]) -> None:
        for agent in self._agents:
            self._set_memory(agent, memories.get(agent, {}))

    def close(self) -> None:
        for agent in self._agents.values():
            if agent.account is not None:
                agent.account.close()


@contextmanager
def named_in_errors(call: Call) -> Iterator[None]:
    """Add agent and step to a MessageError about a reply."""
    try:
        yield
    except MessageError as error:
        raise MessageError(f"{call.step.__name__} of {call.to.id}: {error}") from None


def roundtrip(message: M) -> M:
    """Serialise and deserialise a message. Raises MessageError as ``deserialize`` does."""
    return deserialize(type(message), serialize(message))


def _copy_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()  # messages carry values, not graphs
    if isinstance(value, Mapping):
        return {key: _copy_value(item) for key, item in value.items()}
    return value


def roundtrip_calls(calls: Sequence[Call]) -> list[Call]:
    """Apply ``roundtrip`` to the messages of calls; a message shared by calls stays shared."""
    sent = {id(call.message): call.message for call in calls}
    arrived = {key: roundtrip(message) for key, message in sent.items()}
    return [dataclasses.replace(call, message=arrived[id(call.message)]) for call in calls]
