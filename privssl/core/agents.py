"""Agents: their rows, and the rows that a step may read by role.

An ``Agent``'s role follows from its rows: labelled rows make a support agent, unlabelled rows a
query agent, both a mixed agent; a labelled server is a support agent located at the server. Steps
declare the role they need by the protocols below. Reading rows that an agent lacks raises
``RoleError``.

Unlabelled rows have no labels: the true ones are in ``evaluation.HiddenLabelMeter``, which steps
cannot access.
"""

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

from torch import Tensor

from accounting.ledger import Account
from privssl.errors import RoleError

#: An agent's state between steps: name -> tensor. Never sent, saved in checkpoints. A step replaces
#: the mapping and never writes into its tensors, so an interrupted round leaves it intact.
Memory = Mapping[str, Tensor]


class AgentLocation(enum.Enum):
    """Location of an agent."""

    EDGE = "edge"
    SERVER = "server"


#: Rows before an encoder or a scale, which identify the record to an account: images, or texts.
Origin = Tensor | tuple[str, ...]


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Rows with labels. x (N, *shape) as stored, see ``core/rows.py``; y (N,) int64 classes; ids
    (N,) int64 row numbers in the training set or the site's files; origin x before an encoder,
    which steps do not read; persons (N,) whose rows they are, if the data tell."""

    x: Tensor
    y: Tensor
    ids: Tensor
    origin: Origin | None = None
    persons: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class UnlabelledRows:
    """Rows without labels. x, ids and persons as in :class:`LabelledRows`."""

    x: Tensor
    ids: Tensor
    origin: Origin | None = None
    persons: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class AgentRef:
    """An agent's name and role: all that the server knows of it."""

    id: str
    role: str
    location: AgentLocation = AgentLocation.EDGE


def rows_by_person(persons: Sequence[str]) -> dict[str, list[int]]:
    """Return the row numbers of each person, in the order of their first rows.

    >>> rows_by_person(["ann", "bob", "ann"])
    {'ann': [0, 2], 'bob': [1]}
    """
    rows: dict[str, list[int]] = {}
    for row, person in enumerate(persons):
        rows.setdefault(person, []).append(row)
    return rows


def natural_order(agent_id: str) -> tuple[str | int, ...]:
    """Return a sort key that puts q10 after q9.

    >>> sorted(["q10", "q9", "s0"], key=natural_order)
    ['q9', 'q10', 's0']
    """
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", agent_id))


@final
@dataclass(kw_only=True, eq=False)
class Agent:
    """An agent: its rows, its memory, and the privacy account of its labelled rows."""

    id: str
    location: AgentLocation = AgentLocation.EDGE
    held_labelled: LabelledRows | None = None
    held_unlabelled: UnlabelledRows | None = None
    account: Account | None = None
    memory: Memory = field(default_factory=dict)

    @property
    def role(self) -> str:
        """Return support, query, mixed, server (labelled, at the server) or empty."""
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
                f"{self.id} is a {self.role} agent without labelled rows. Send this step to "
                "federation.support"
            )
        return self.held_labelled

    @property
    def unlabelled(self) -> UnlabelledRows:
        if self.held_unlabelled is None:
            raise RoleError(
                f"{self.id} is a {self.role} agent without unlabelled rows. Send this step to "
                "federation.query"
            )
        return self.held_unlabelled


class SupportAgent(Protocol):
    """The rows and account of an agent with labelled rows, for steps."""

    @property
    def id(self) -> str: ...
    @property
    def labelled(self) -> LabelledRows: ...
    @property
    def account(self) -> Account | None: ...

    memory: Memory


class QueryAgent(Protocol):
    """The rows of an agent with unlabelled rows, for steps."""

    @property
    def id(self) -> str: ...
    @property
    def unlabelled(self) -> UnlabelledRows: ...

    memory: Memory


class MixedAgent(SupportAgent, QueryAgent, Protocol):
    """The rows of an agent with both kinds, for steps."""
