"""The parties: what each holds, and what its role lets a step read.

There is one ``Agent`` class. Its role follows from what it holds: labelled rows make a
support agent, unlabelled rows a query agent, both a mixed agent, and a labelled server is a
support agent whose seat is at the server. Steps declare the role they need with the
protocols below; asking an agent for rows it does not hold is a ``RoleError``.

Unlabelled rows carry no label at all: the true ones were taken away when the rows were built
and live in ``evaluation.HiddenLabelMeter``, which no step can reach.
"""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, final

from torch import Tensor

from accounting.ledger import Account
from privssl.errors import RoleError

#: What an agent remembers between visits: name -> tensor. Never sent, saved in checkpoints.
#: A step replaces the whole mapping and never writes into its tensors, so that a round which
#: is interrupted leaves the memory of the round before intact.
Memory = Mapping[str, Tensor]


class AgentLocation(enum.Enum):
    """Where an agent sits."""

    EDGE = "edge"
    SERVER = "server"


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Rows with labels. x (N, channels, height, width) uint8 in 0..255 or float32 in [0, 1];
    y (N,) int64 class numbers; ids (N,) int64 row numbers in the training set, at a site in
    its own files."""

    x: Tensor
    y: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class UnlabelledRows:
    """Rows without labels. x and ids as in :class:`LabelledRows`."""

    x: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class AgentRef:
    """The name and role of an agent: all that the server knows of it. Holds no data."""

    id: str
    role: str
    location: AgentLocation = AgentLocation.EDGE


def natural_order(agent_id: str) -> tuple[str | int, ...]:
    """Sort key under which q10 comes after q9.

    >>> sorted(["q10", "q9", "s0"], key=natural_order)
    ['q9', 'q10', 's0']
    """
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", agent_id))


@final
@dataclass(kw_only=True, eq=False)
class Agent:
    """One party: its rows, its memory, and the privacy account of its labelled rows."""

    id: str
    location: AgentLocation = AgentLocation.EDGE
    held_labelled: LabelledRows | None = None
    held_unlabelled: UnlabelledRows | None = None
    account: Account | None = None
    memory: Memory = field(default_factory=dict)

    @property
    def role(self) -> str:
        """support, query, mixed, server (labelled, at the server) or empty."""
        if self.location is AgentLocation.SERVER:
            return "server"
        if self.held_labelled is not None:
            return "mixed" if self.held_unlabelled is not None else "support"
        return "query" if self.held_unlabelled is not None else "empty"

    @property
    def ref(self) -> AgentRef:
        return AgentRef(self.id, self.role, self.location)

    @property
    def labelled(self) -> LabelledRows:
        if self.held_labelled is None:
            raise RoleError(
                f"{self.id} was asked for labelled rows. It is a {self.role} agent and holds "
                f"none. Send this step to federation.support."
            )
        return self.held_labelled

    @property
    def unlabelled(self) -> UnlabelledRows:
        if self.held_unlabelled is None:
            raise RoleError(
                f"{self.id} was asked for unlabelled rows. It is a {self.role} agent and holds "
                f"none. Send this step to federation.query."
            )
        return self.held_unlabelled


class SupportAgent(Protocol):
    """What a step may use of an agent that holds labels."""

    @property
    def id(self) -> str: ...
    @property
    def labelled(self) -> LabelledRows: ...
    @property
    def account(self) -> Account | None: ...

    memory: Memory


class QueryAgent(Protocol):
    """What a step may use of an agent that holds unlabelled rows."""

    @property
    def id(self) -> str: ...
    @property
    def unlabelled(self) -> UnlabelledRows: ...

    memory: Memory


class MixedAgent(SupportAgent, QueryAgent, Protocol):
    """What a step may use of an agent that holds both kinds."""
