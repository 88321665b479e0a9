"""The engine for one machine: every agent lives in this process and works in turn.

Tensors are copied at the border, so that an agent cannot write into the server's state; with
``check_wire`` each message also goes to bytes and back, as it would across a network.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from privssl.core.agents import Agent, AgentRef, Memory, natural_order
from privssl.core.engine import Call
from privssl.core.messages import Declined, M, Message, Reply, check, deserialize, serialize
from privssl.core.step_runner import run_step
from privssl.core.task import Context, LabelMeter
from privssl.runtime.randomness import seeded
from privssl.storage.spill_store import SpillStore
from privssl.training import local_training


class PseudoLabelBuffer:
    """Takes a meter's place in a step, which so cannot reach what the meter knows to be true."""

    def __init__(self, seen: Sequence[Tensor] = ()) -> None:
        self.seen = list(seen)  # ids, labels and kept of one batch after the other

    def observe(self, ids: Tensor, labels: Tensor, kept: Tensor) -> None:
        self.seen += [ids, labels, kept]

    def flush(self, meter: LabelMeter) -> None:
        for ids, labels, kept in zip(self.seen[::3], self.seen[1::3], self.seen[2::3], strict=True):
            meter.observe(ids, labels, kept)


class LocalEngine:
    """Delivers calls one after the other in this process."""

    def __init__(
        self,
        agents: Sequence[Agent],
        *,
        seed: int,
        device: torch.device,
        meter: LabelMeter | None = None,
        check_wire: bool = False,
        spill_store: SpillStore | None = None,
    ) -> None:
        """``spill_store``: where memories lie; absent, one of this engine's own, all of it in
        RAM."""
        self._agents = {a.id: a for a in sorted(agents, key=lambda a: natural_order(a.id))}
        self._seed = seed
        self._device = device
        self._meter = meter
        self._check_wire = check_wire
        self._session_id = os.urandom(6).hex()
        self._spill_store = spill_store or SpillStore()

    def roster(self) -> Sequence[AgentRef]:
        return [agent.ref for agent in self._agents.values()]

    def deliver(self, calls: Sequence[Call]) -> Iterable[Reply[Any]]:
        """See ``Engine.deliver``. Nothing is done before the first reply is asked for."""
        return self._run_calls(calls)

    def _run_calls(self, calls: Sequence[Call]) -> Iterator[Reply[Any]]:
        """What ``deliver`` answers; ``engines/process_pool.py`` has another way to the same
        bits."""
        return map(self._visit, calls)

    def _visit(self, call: Call) -> Reply[Any]:
        heard = None if self._meter is None else PseudoLabelBuffer()
        reply = self._run_on_agent(call, self._across(call.message), heard)
        if self._meter is not None and heard is not None:
            heard.flush(self._meter)
        self._remember(call.to.id, self._agents[call.to.id].memory)
        return dataclasses.replace(reply, content=self._across(reply.content))

    def _run_on_agent(
        self, call: Call, message: Message, heard: PseudoLabelBuffer | None
    ) -> Reply[Any]:
        """The step itself. What comes in and what goes out is not copied here: the caller copies
        the reply before another step is taken."""
        agent = self._agents[call.to.id]
        ctx = Context(
            seed=self._seed,
            round=call.round,
            agent=agent.id,
            visit_key=call.key,
            session_id=self._session_id,
            device=self._device,
            # An account means that these rows are under a claim: no curve may leave beside it.
            telemetry=agent.account is None,
            meter=heard,
        )
        # dropout asks torch's own generator, which nobody seeded
        with seeded(ctx.rng("torch")), local_training.copy_once():
            content = run_step(agent, call.step, message, ctx)
        return Reply(agent.ref, content, weight=ctx.weight, metrics=dict(ctx.metrics))

    def _across(self, message: Message) -> Message:
        if self._check_wire:
            return roundtrip(message)
        if isinstance(message, Declined):
            return message
        check(message)  # a run that diverged must say so, not go on
        return type(message)(**{name: _copy(value) for name, value in vars(message).items()})

    def _remember(self, agent: str, memory: Memory) -> None:
        self._agents[agent].memory = self._spill_store.put(memory)

    def memories(self) -> Mapping[str, Memory]:
        return {agent.id: agent.memory for agent in self._agents.values()}

    def restore(self, memories: Mapping[str, Memory]) -> None:
        for agent in self._agents:
            self._remember(agent, memories.get(agent, {}))

    def close(self) -> None:
        for agent in self._agents.values():
            if agent.account is not None:
                agent.account.close()


def roundtrip(message: M) -> M:
    """What would arrive of a message across a network. Raises MessageError as ``unpack`` does."""
    return deserialize(type(message), serialize(message))


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return value


def roundtrip_calls(calls: Sequence[Call]) -> list[Call]:
    """The calls as a network would bring them. What shared a message shares one."""
    sent = {id(call.message): call.message for call in calls}
    arrived = {key: roundtrip(message) for key, message in sent.items()}
    return [dataclasses.replace(call, message=arrived[id(call.message)]) for call in calls]
