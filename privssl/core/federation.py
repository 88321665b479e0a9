"""The server's view: who is there, and the four verbs of every algorithm.

``call`` sends one step to one agent, ``call_all`` the same to several at once, ``sample`` draws
who takes part, ``rng`` gives randomness of the server's own. *In sequence* is a loop around
``call``; *in parallel* is ``call_all``. The world sees references and replies, never an agent.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from privssl.core.agents import AgentLocation, AgentRef
from privssl.core.aggregation import WeightedMean
from privssl.core.engine import Call, Engine, Step
from privssl.core.messages import BUDGET_EXHAUSTED, Message, NoReply, Reply, payload_bytes
from privssl.runtime.randomness import stream

Roster = tuple[AgentRef, ...]
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Round:
    """Where a run is. Numbers count from 1; round 0 is the start, before the first."""

    number: int
    phase: str = "train"
    number_in_phase: int = 0
    saved: bool = False  # whether a checkpoint follows it in any case


@dataclass(frozen=True)
class Traffic:
    """Bytes of messages since the last round began: up from the agents, down to them.

    A labelled server that asks itself sends nothing anywhere, so that is not counted.
    """

    up: int = 0
    down: int = 0


class Federation:
    """Rosters and verbs for one run over one engine."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._seed = seed
        self.agents: Roster = tuple(engine.roster())
        self.server = next((a for a in self.agents if a.location is AgentLocation.SERVER), None)
        # A labelled server is a support agent that sits at the server.
        labelled = ("support", "mixed", "server")
        self.support: Roster = tuple(a for a in self.agents if a.role in labelled)
        self.query: Roster = tuple(a for a in self.agents if a.role in ("query", "mixed"))
        self.begin(Round(0))

    def begin(self, now: Round) -> None:
        """Enter a round: visits are counted, and notes and traffic collected, from here."""
        self.round = now
        self.traffic = Traffic()
        self.declines = self.refusals = self.absences = 0
        self.metrics: dict[str, list[float]] = {}
        self._visits: Counter[tuple[str, str]] = Counter()

    def call(self, whom: AgentRef, step: Step[M], message: Message) -> Reply[M]:
        """One agent does one step."""
        return self.call_all((whom,), step, message)[0]

    def call_all(
        self,
        whom: Sequence[AgentRef],
        step: Step[M],
        message: Message | Callable[[AgentRef], Message],
        aggregator: WeightedMean | None = None,
    ) -> list[Reply[M]]:
        """Several agents do one step, in parallel where the engine can.

        Args:
            message: one for all, or a function from the agent to its own.
            into: takes each reply as it comes; that it spoke is then all that is left of it.

        Returns:
            Replies in the order of ``whom``, silences included.
        """
        calls = []
        for agent in whom:
            self._visits[agent.id, step.__name__] += 1
            content = message if isinstance(message, Message) else message(agent)
            visit = self._visits[agent.id, step.__name__]
            calls.append(Call(agent, step, content, self.round.number, visit))
        replies: list[Reply[M]] = []
        up = 0
        for reply in self._engine.deliver(calls):
            up += payload_bytes(reply.content) if _travels(reply.sender) else 0
            self.declines += reply.declined and not isinstance(reply.content, NoReply)
            self.refusals += reply.content == BUDGET_EXHAUSTED
            self.absences += isinstance(reply.content, NoReply)
            for name, value in reply.metrics.items():
                self.metrics.setdefault(name, []).append(value)
            replies.append(reply if aggregator is None else aggregator.consume(reply))
        down = sum(payload_bytes(c.message) for c in calls if _travels(c.to))
        self.traffic = Traffic(self.traffic.up + up, self.traffic.down + down)
        return replies

    def sample(self, roster: Roster, n: int | None) -> Roster:
        """n agents without replacement, in roster order; all when n is None or larger."""
        if n is None:
            return roster
        chosen = torch.randperm(len(roster), generator=self.rng("sample"))[:n].tolist()
        return tuple(roster[i] for i in sorted(chosen))

    def rng(self, purpose: str) -> torch.Generator:
        """The server's generator for one purpose in this round."""
        return stream(self._seed, self.round.number, "world", purpose)

    def mean_metrics(self) -> Mapping[str, float]:
        """What agents noted in this round, averaged over those who noted it."""
        return {name: sum(v) / len(v) for name, v in sorted(self.metrics.items())}


def _travels(other: AgentRef) -> bool:
    """Whether messages to and from this agent leave the server."""
    return other.location is not AgentLocation.SERVER
