"""Engines deliver messages to agents and bring replies back; they know no algorithm.

An engine may run agents in this process, in worker processes or at sites across a network. A
call is one whole visit of one agent, and its key (round, agent, step, visit) seeds all its
repeatable randomness, so that every engine computes the same bits.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from privssl.core.agents import AgentRef, Memory
from privssl.core.messages import Declined, Message, Reply

M_co = TypeVar("M_co", bound=Message, covariant=True)


class Step(Protocol[M_co]):
    """A bound method of an algorithm, marked ``@on_agent``: it runs where the data is."""

    __name__: str

    def __call__(self, agent: Any, message: Any, ctx: Any, /) -> M_co | Declined: ...


@dataclass(frozen=True)
class Call:
    """One visit: which agent does which step, with what message.

    ``visit`` counts how often this agent was asked for this step in this round, from 1.
    """

    to: AgentRef
    step: Step[Message]
    message: Message
    round: int
    visit: int = 1

    @property
    def key(self) -> str:
        """Names this visit in the whole run: the same key is never charged or drawn twice."""
        return visit_key(self.round, self.to.id, self.step.__name__, self.visit)


def visit_key(round_number: int, agent: str, step: str, visit: int) -> str:
    """``Call.key``, for who knows a call by its names."""
    return f"{round_number}/{agent}/{step}/{visit}"


class Engine(Protocol):
    """What a run needs of an engine."""

    def roster(self) -> Sequence[AgentRef]:
        """All agents in natural order."""
        ...

    def deliver(self, calls: Sequence[Call]) -> Iterable[Reply[Any]]:
        """One reply per call, in the order of the calls, each as soon as it and those before it
        are there: who takes them one by one has one of them in memory. Until all are taken, no
        other delivery may begin; one that is left unfinished is broken off.
        """
        ...

    def memories(self) -> Mapping[str, Memory]:
        """What every agent remembers now; later visits leave the returned value as it is."""
        ...

    def restore(self, memories: Mapping[str, Memory]) -> None:
        """Put remembered values back, before the first call of a resumed run."""
        ...

    def close(self) -> None:
        """End workers and release accounts. May be called twice."""
        ...
