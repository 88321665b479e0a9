"""What test_engine_conformance.py shares with other tests."""

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
class Told(Message):
    """What a step found, and what it is told."""

    text: str = ""
    number: float = 0.0
    t: Tensor = field(default_factory=lambda: torch.zeros(3))
    w: StateDict = field(default_factory=lambda: {"a": torch.ones(2)})


class Steps:
    """Stands for an algorithm. ``text`` of a message is a file, where a step needs one."""

    plan = cfg = None
    buffer = torch.zeros(3)

    @classmethod
    def missing_reply_policy_for(cls, cfg: object, *, private: bool) -> MissingReplyPolicy:
        return MissingReplyPolicy(
            quorum=("draw", "hush"), skip=("count",), needed_because="All are needed"
        )

    @on_agent
    def draw(self, agent: Agent, msg: Told, ctx: Context) -> Told:
        """All that a reply has: content, weight, notes; and all the randomness of a visit."""
        ctx.weight = float(len(agent.unlabelled))
        ctx.log_metric("train/loss", msg.number / 3)
        drawn = torch.rand(3, generator=ctx.rng("z")) + torch.rand(3)  # the second is dropout's
        wide = {"a": drawn.bfloat16(), "b": drawn[:0], "c": torch.tensor(7)}
        return Told(agent.id, msg.number, drawn, wide)

    @on_agent
    def count(self, agent: Agent, msg: Told, ctx: Context) -> Told:
        seen = agent.memory.get("n", torch.zeros(())) + 1
        # Not in the order of the alphabet, of equal content, and with a number that is none.
        agent.memory = {"z": torch.tensor(float("inf")), "n": seen, "a": seen}
        return Told(" ".join(agent.memory), float(seen))

    @on_agent
    def look(self, agent: Agent, msg: Told, ctx: Context) -> Told:
        """Remembers nothing new."""
        return Told(" ".join(agent.memory))

    @on_agent
    def recall(self, agent: Agent, msg: Told, ctx: Context) -> Told:
        return Told(w=agent.memory)

    @on_agent
    def scribble(self, agent: Agent, msg: Told, ctx: Context) -> Told:
        """Writes into what it was given, keeps it, and sends it back."""
        msg.w["a"].fill_(9.0)
        msg.t.fill_(9.0)
        agent.memory = {"a": msg.w["a"], "t": msg.t}
        return msg

    @on_agent
    def add_one(self, agent: Agent, msg: Told, ctx: Context) -> Told:
        """Writes into what it was given, in ways that torch has for it."""
        msg.t.add_(1)
        torch._foreach_add_([msg.w["a"].requires_grad_().detach()[:1]], 1)
        return Told(t=msg.t, w={"a": msg.w["a"].detach()})

    @on_agent
    def fill(self, agent: Agent, msg: Told, ctx: Context) -> Told:
        """Sends what it will write over in the next visit."""
        return Told(t=self.buffer.fill_(len(agent.unlabelled)), w={"a": self.buffer[:2]})

    @on_agent
    def hush(self, agent: Agent, msg: Told, ctx: Context) -> Told | Declined:
        return Declined(f"{agent.id} has nothing to say") if agent.id != "q1" else Told("speaks")

    @on_agent
    def fail(self, agent: Agent, msg: Told, ctx: Context) -> Told:
        if agent.id == "q0":
            raise DataError("q0 has no such file")
        if agent.id == "q1":
            raise KeyError("of q1")
        return Told(agent.id)

    @on_agent
    def diverge(self, agent: Agent, msg: Told, ctx: Context) -> Told:
        return Told(t=torch.full((3,), float("nan")))

    @on_agent
    def die_once(self, agent: Agent, msg: Told, ctx: Context) -> Told:
        if agent.id == "q1" and not os.path.exists(msg.text):
            Path(msg.text).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.draw(agent, msg, ctx)


STEPS: Any = Steps()


def agents(*sizes: int) -> list[Agent]:
    """q0, q1 and so on, with so many rows each: 4, 7 and 5 unless told otherwise."""
    return [
        Agent(id=f"q{i}", held_unlabelled=UnlabelledRows(torch.zeros(n, 1, 8, 8), torch.arange(n)))
        for i, n in enumerate(sizes or (4, 7, 5))
    ]


# Engines -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Under:
    """An engine under test.

    ``make(agents, algorithm, seed, folder)`` gives one; ``folder`` is empty, and its own.
    ``errors`` are those that it raises for a DataError and for a KeyError in a step, and for
    numbers that are not finite. ``survives`` says whether an agent's process can be lost, and
    ``rare`` that this one is a variant, tested among the slow ones.
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


ENGINES: dict[str, Under] = {
    "local": Under(_local),
    "local, as bytes": Under(_wire),
    "2 workers": Under(_workers, survives=True),
    "1 worker": Under(functools.partial(_workers, workers=1), rare=True),
    "4 workers": Under(functools.partial(_workers, workers=4), survives=True, rare=True),
    "sites": Under(transports.engine, (SiteError,) * 3),
    "sites in processes": Under(
        functools.partial(transports.engine, transport=transports.ForkedTransport),
        (SiteError,) * 3,
        survives=True,
    ),
}


@contextlib.contextmanager
def made(name: str, parties: Sequence[Agent] = (), algorithm: Any = STEPS) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        there = ENGINES[name].make(parties or agents(), algorithm, 3, Path(folder))
        with contextlib.closing(there):
            yield there


def ask(
    there: Engine, step: Any, message: Message | None = None, whom: str = "", number: int = 1
) -> list[Reply[Any]]:
    """All agents, or those named, do one step with the same message."""
    roster = {agent.id: agent for agent in there.roster()}
    names, what = whom.split() or list(roster), message or Told()
    return list(there.deliver([Call(roster[name], step, what, number) for name in names]))


def same(one: Reply[Any], other: Reply[Any]) -> bool:
    """Whether two replies agree in sender, weight, notes, and every bit of content."""
    about = [(r.sender, r.weight, dict(r.metrics), type(r.content)) for r in (one, other)]
    return about[0] == about[1] and same_bits(one.content, other.content)


def all_same(some: Sequence[Reply[Any]], others: Sequence[Reply[Any]]) -> bool:
    return len(some) == len(others) and all(map(same, some, others))
