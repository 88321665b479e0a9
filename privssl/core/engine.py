"""Engines deliver messages to agents and return their replies, independently of the algorithm.

An engine may run agents in this process, in worker processes, or at sites across a network. The key
of a call (round, agent, step, visit) seeds its repeatable randomness, so every engine computes the
same bits.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from privssl.core.agents import AgentRef, Memory
from privssl.core.messages import Declined, Message, Reply

M_co = TypeVar("M_co", bound=Message, covariant=True)


class Step(Protocol[M_co]):
    """A bound method of an algorithm, marked ``@on_agent``."""

    __name__: str

    def __call__(self, agent: Any, message: Any, ctx: Any, /) -> M_co | Declined: ...


@dataclass(frozen=True)
class Call:
    """One step of one agent. ``visit`` counts its calls of this step in this round, from 1."""

    to: AgentRef
    step: Step[Message]
    message: Message
    round: int
    visit: int = 1

    @property
    def key(self) -> str:
        """Unique in a run: the same key is never charged or drawn twice."""
        return visit_key(self.round, self.to.id, self.step.__name__, self.visit)


def visit_key(round_number: int, agent: str, step: str, visit: int) -> str:
    """Return ``Call.key`` from its parts."""
    return f"{round_number}/{agent}/{step}/{visit}"


class Engine(Protocol):
    """The interface of engines."""

    def roster(self) -> Sequence[AgentRef]:
        """Return all agents in natural order."""
        ...

    def deliver(self, calls: Sequence[Call]) -> Iterable[Reply[Any]]:
        """Yield one reply per call in the order of the calls, each as soon as possible. Ending the
        iteration early cancels the delivery; deliveries may not overlap."""
        ...

    def memories(self) -> Mapping[str, Memory]:
        """Return a snapshot of every agent's memory."""
        ...

    def restore(self, memories: Mapping[str, Memory]) -> None:
        """Restore memories, before the first call of a resumed run."""
        ...

    def close(self) -> None:
        """End workers and release accounts. May be called twice."""
        ...
