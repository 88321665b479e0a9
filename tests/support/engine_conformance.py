"""Steps, engines and comparisons that test_engine_conformance.py shares with other tests."""

import contextlib
import functools
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from privssl.algorithms.base import MissingReplyPolicy
from privssl.core.agents import Agent, UnlabelledRows
from privssl.core.engine import Call, Engine
from privssl.core.messages import Declined, Message, MessageError, Reply, StateDict
from privssl.core.task import Context, on_agent
from privssl.engines.local import LocalEngine
from privssl.engines.process_pool import WorkerEngine
from privssl.errors import DataError
from privssl.remote.discovery import SiteError
from tests.support import transports
from tests.support.toy_worlds import same_bits

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Payload(Message):
    """The content of every request to a conformance step, and of every reply."""

    text: str = ""
    number: float = 0.0
    t: Tensor = field(default_factory=lambda: torch.zeros(3))
    w: StateDict = field(default_factory=lambda: {"a": torch.ones(2)})


class Steps:
    """A minimal algorithm. Steps that need a file get its path as ``text`` of the request."""

    plan = cfg = None
    buffer = torch.zeros(3)

    @classmethod
    def missing_reply_policy_for(cls, cfg: object, *, private: bool) -> MissingReplyPolicy:
        return MissingReplyPolicy(
            quorum=("draw", "decline"), skip=("count",), needed_because="All are needed"
        )

    @on_agent
    def draw(self, agent: Agent, msg: Payload, ctx: Context) -> Payload:
        """Fill every field of a reply, and draw from both sources of randomness of a visit."""
        ctx.weight = float(len(agent.unlabelled))
        ctx.log_metric("train/loss", msg.number / 3)
        drawn = torch.rand(3, generator=ctx.rng("z")) + torch.rand(
            3
        )  # the global generator: dropout
        wide = {"a": drawn.bfloat16(), "b": drawn[:0], "c": torch.tensor(7)}
        return Payload(agent.id, msg.number, drawn, wide)

    @on_agent
    def count(self, agent: Agent, msg: Payload, ctx: Context) -> Payload:
        seen = agent.memory.get("n", torch.zeros(())) + 1
        # Keys out of alphabetical order, two equal values, and one that is not finite.
        agent.memory = {"z": torch.tensor(float("inf")), "n": seen, "a": seen}
        return Payload(" ".join(agent.memory), float(seen))

    @on_agent
    def list_memory(self, agent: Agent, msg: Payload, ctx: Context) -> Payload:
        """Leave memory unchanged and return its keys."""
        return Payload(" ".join(agent.memory))

    @on_agent
    def send_memory(self, agent: Agent, msg: Payload, ctx: Context) -> Payload:
        return Payload(w=agent.memory)

    @on_agent
    def overwrite_input(self, agent: Agent, msg: Payload, ctx: Context) -> Payload:
        """Overwrite the request's tensors, keep them in memory, and send them back."""
        msg.w["a"].fill_(9.0)
        msg.t.fill_(9.0)
        agent.memory = {"a": msg.w["a"], "t": msg.t}
        return msg

    @on_agent
    def add_one(self, agent: Agent, msg: Payload, ctx: Context) -> Payload:
        """Change the request's tensors in place with torch's in-place operations."""
        msg.t.add_(1)
        torch._foreach_add_([msg.w["a"].requires_grad_().detach()[:1]], 1)
        return Payload(t=msg.t, w={"a": msg.w["a"].detach()})

    @on_agent
    def fill(self, agent: Agent, msg: Payload, ctx: Context) -> Payload:
        """Send a buffer that the next visit overwrites."""
        return Payload(t=self.buffer.fill_(len(agent.unlabelled)), w={"a": self.buffer[:2]})

    @on_agent
    def decline(self, agent: Agent, msg: Payload, ctx: Context) -> Payload | Declined:
        return Declined(f"{agent.id} has nothing to say") if agent.id != "q1" else Payload("speaks")

    @on_agent
    def fail(self, agent: Agent, msg: Payload, ctx: Context) -> Payload:
        if agent.id == "q0":
            raise DataError("q0 has no such file")
        if agent.id == "q1":
            raise KeyError("of q1")
        return Payload(agent.id)

    @on_agent
    def diverge(self, agent: Agent, msg: Payload, ctx: Context) -> Payload:
        return Payload(t=torch.full((3,), float("nan")))

    @on_agent
    def die_once(self, agent: Agent, msg: Payload, ctx: Context) -> Payload:
        if agent.id == "q1" and not os.path.exists(msg.text):
            Path(msg.text).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.draw(agent, msg, ctx)


STEPS: Any = Steps()


def agents(*sizes: int) -> list[Agent]:
    """Agents q0, q1 and so on, with these numbers of rows (default: 4, 7 and 5)."""
    return [
        Agent(id=f"q{i}", held_unlabelled=UnlabelledRows(torch.zeros(n, 1, 8, 8), torch.arange(n)))
        for i, n in enumerate(sizes or (4, 7, 5))
    ]


# Engines -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineCase:
    """An engine under test.

    ``make(agents, algorithm, seed, folder)`` creates it; ``folder`` is new and empty.
    ``errors``: what it raises for a DataError in a step, for a KeyError in a step, and for numbers
    that are not finite. ``survives``: whether it repeats a visit whose process was killed.
    ``rare``: a variant that only the slow tests run.
    """

    make: Callable[..., Engine]
    errors: tuple[type[Exception], type[Exception], type[Exception]] = (
        DataError, KeyError, MessageError,
    )  # fmt: skip
    survives: bool = False
    rare: bool = False


def _local(parties: Sequence[Agent], algorithm: Any, seed: int, folder: Path) -> Engine:
    return LocalEngine(parties, seed=seed, device=CPU)


def _wire(parties: Sequence[Agent], algorithm: Any, seed: int, folder: Path) -> Engine:
    return LocalEngine(parties, seed=seed, device=CPU, check_wire=True)


def _workers(
    parties: Sequence[Agent], algorithm: Any, seed: int, folder: Path, *, workers: int = 2
) -> Engine:
    return WorkerEngine(parties, algorithm=algorithm, workers=workers, seed=seed, device=CPU)


ENGINES: dict[str, EngineCase] = {
    "local": EngineCase(_local),
    "local, as bytes": EngineCase(_wire),
    "2 workers": EngineCase(_workers, survives=True),
    "1 worker": EngineCase(functools.partial(_workers, workers=1), rare=True),
    "4 workers": EngineCase(functools.partial(_workers, workers=4), survives=True, rare=True),
    "sites": EngineCase(transports.engine, (SiteError,) * 3),
    "sites in processes": EngineCase(
        functools.partial(transports.engine, transport=transports.ForkedTransport),
        (SiteError,) * 3,
        survives=True,
    ),
}


@contextlib.contextmanager
def running_engine(
    name: str, parties: Sequence[Agent] = (), algorithm: Any = STEPS
) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        engine = ENGINES[name].make(parties or agents(), algorithm, 3, Path(folder))
        with contextlib.closing(engine):
            yield engine


def run_step(
    engine: Engine, step: Any, message: Message | None = None, whom: str = "", number: int = 1
) -> list[Reply[Any]]:
    """Run one step with the same message at all agents, or at those named in ``whom``."""
    roster = {agent.id: agent for agent in engine.roster()}
    names, what = whom.split() or list(roster), message or Payload()
    return list(engine.deliver([Call(roster[name], step, what, number) for name in names]))


def same_reply(one: Reply[Any], other: Reply[Any]) -> bool:
    """Whether two replies have the same sender, weight, metrics and content, bit for bit."""
    about = [(r.sender, r.weight, dict(r.metrics), type(r.content)) for r in (one, other)]
    return about[0] == about[1] and same_bits(one.content, other.content)


def same_replies(some: Sequence[Reply[Any]], others: Sequence[Reply[Any]]) -> bool:
    return len(some) == len(others) and all(map(same_reply, some, others))
