"""The server's view of a run: its agents, and the four operations of every algorithm.

``call`` sends one step to one agent, ``call_all`` the same to several in parallel, ``sample``
chooses participants, ``rng`` returns the server's generator. A sequential pass is a loop of
``call``. The server sees references and replies, never an ``Agent``.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from privssl.core.agents import AgentLocation, AgentRef
from privssl.core.aggregation import WeightedMean
from privssl.core.engine import Call, Engine, Step
from privssl.core.messages import (
    BUDGET_EXHAUSTED,
    Declined,
    Message,
    NoReply,
    Reply,
    StateDict,
    payload_bytes,
)
from privssl.runtime.randomness import stream

Roster = tuple[AgentRef, ...]
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Round:
    """A round. Numbers count from 1; round 0 is the initialisation."""

    number: int
    phase: str = "train"
    number_in_phase: int = 0
    saved: bool = False  # whether a checkpoint follows, whatever run.checkpoint_every


@dataclass(frozen=True)
class Traffic:
    """Bytes of messages in this round, up from the agents and down to them.

    A labelled server's own messages are not counted.
    """

    up: int = 0
    down: int = 0


class Federation:
    """Agents and operations of one run over one engine."""

    def __init__(
        self, engine: Engine, seed: int, validate: Callable[[StateDict], float | None] | None = None
    ) -> None:
        """Set the engine. ``validate``: the loss of a classifier on ``data.validation``; None: no
        such rows."""
        self._engine = engine
        self._seed = seed
        self._validate = validate
        self.agents: Roster = tuple(engine.roster())
        self.server = next((a for a in self.agents if a.location is AgentLocation.SERVER), None)
        labelled = ("support", "mixed", "server")
        self.support: Roster = tuple(a for a in self.agents if a.role in labelled)
        self.query: Roster = tuple(a for a in self.agents if a.role in ("query", "mixed"))
        self.called_roles: set[str] = set()  # roles that have been called
        self.agents_that_trained: set[str] = set()  # agents that have sent changed tensors
        self.begin(Round(0))

    def begin(self, now: Round) -> None:
        """Enter a round, and reset its counters, metrics and traffic."""
        self.round = now
        self.traffic = Traffic()
        self.budget_declines = self.absences = 0
        self.metrics: dict[str, list[float]] = {}
        self._visits: Counter[tuple[str, str]] = Counter()

    def call(self, agent: AgentRef, step: Step[M], message: Message) -> Reply[M]:
        """Run one step at one agent."""
        return self.call_all((agent,), step, message)[0]

    def call_all(
        self,
        agents: Sequence[AgentRef],
        step: Step[M],
        message: Message | Callable[[AgentRef], Message],
        aggregator: WeightedMean | None = None,
    ) -> list[Reply[M]]:
        """Run one step at several agents, in parallel if the engine can; replies are in the order
        of ``agents``, including declined and missing ones.

        Args:
            message: one for all, or a function from the agent to its message.
            aggregator: consumes each reply; an ``Ack`` replaces its content.
        """
        calls = []
        for agent in agents:
            self._visits[agent.id, step.__name__] += 1
            content = message if isinstance(message, Message) else message(agent)
            visit = self._visits[agent.id, step.__name__]
            calls.append(Call(agent, step, content, self.round.number, visit))
            self.called_roles.add(agent.role)
        replies: list[Reply[M]] = []
        up = 0
        for call, reply in zip(calls, self._engine.deliver(calls), strict=True):
            up += payload_bytes(reply.content) if _is_remote(reply.sender) else 0
            self.budget_declines += reply.content == BUDGET_EXHAUSTED
            self.absences += isinstance(reply.content, NoReply)
            if call.to.id not in self.agents_that_trained and _has_trained(
                call.message, reply.content
            ):
                self.agents_that_trained.add(call.to.id)
            for name, value in reply.metrics.items():
                self.metrics.setdefault(name, []).append(value)
            replies.append(reply if aggregator is None else aggregator.consume(reply))
        down = sum(payload_bytes(c.message) for c in calls if _is_remote(c.to))
        self.traffic = Traffic(self.traffic.up + up, self.traffic.down + down)
        return replies

    def sample(self, roster: Roster, n: int | None) -> Roster:
        """Sample n agents without replacement, in roster order; all if n is None or larger."""
        if n is None:
            return roster
        chosen = torch.randperm(len(roster), generator=self.rng("sample"))[:n].tolist()
        return tuple(roster[i] for i in sorted(chosen))

    def validation_loss(self, classifier: StateDict) -> float | None:
        """Return a classifier's mean cross-entropy on ``data.validation``, rows that no agent
        holds. None without such rows, in private runs, and if no output is finite."""
        return None if self._validate is None else self._validate(classifier)

    def rng(self, purpose: str) -> torch.Generator:
        """Return the server's generator for one purpose in this round."""
        return stream(self._seed, self.round.number, "world", purpose)

    def mean_metrics(self) -> Mapping[str, float]:
        """Return this round's metrics, each averaged over the agents that logged it."""
        return {name: sum(v) / len(v) for name, v in sorted(self.metrics.items())}


def _has_trained(request: Message, reply: Message) -> bool:
    """Return whether an agent trained: it did not decline, and sent networks other than those
    received."""
    if isinstance(reply, Declined):
        return False
    pairs = [
        (value, received)
        for name, value in vars(reply).items()
        if isinstance(value, Mapping)
        and isinstance(received := getattr(request, name, None), Mapping)
    ]
    return not pairs or any(not _are_equal(value, received) for value, received in pairs)


def _are_equal(weights: StateDict, other: StateDict) -> bool:
    return weights.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name])
        for name, tensor in weights.items()
    )


def _is_remote(agent: AgentRef) -> bool:
    """Return whether messages to and from this agent leave the server."""
    return agent.location is not AgentLocation.SERVER


def with_role(roster: Roster, *roles: str) -> Roster:
    """Return agents of a roster that have one of the roles; a labelled server's is ``server``."""
    return tuple(agent for agent in roster if agent.role in roles)
