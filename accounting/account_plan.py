"""The plan of an account: the budget of one agent's labelled rows and the cost of a visit.

The scope follows from ``update`` (networks trained on labelled rows) and ``protect`` (those trained
with noise): *sound* when everything updated is protected, else *as_published*, whose numbers are
nominal. A plan with another scope is refused.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from accounting.accountants import ZERO_COST, Cost, cost_of
from accounting.budget import NEIGHBOUR_WORDS, Adjacency, Budget, Unit
from accounting.canonical_json import Json, only_keys, read_real, real
from accounting.errors import PlanError
from accounting.events import (
    Event,
    NonPrivateEvent,
    event_from_json,
    event_to_json,
    is_protected,
    leaf_events,
)

Scope = Literal["sound", "as_published"]

_AGENT_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.)){0,63}")
DEVICE_NAMES = re.compile(r"(?i)(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?")  # reserved by Windows
_NETWORK = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class AccountPlan:
    """The budget of one agent's labelled rows, and the largest cost of one visit.

    Args:
        agent: id of the agent: 1 to 64 letters, digits, ``_``, ``-`` and single dots.
        budget: the largest epsilon and the delta.
        scope: "sound" or "as_published"; must agree with ``update`` and ``protect``.
        update, protect: names of networks trained on labelled rows, and of those with noise.
        event: the largest charge of ONE visit.
        record_counts: whether numbers of rows are public.
        n_public: number of labelled rows where public; None where private or unknown.
        unit: what one neighbour differs in: "record", or "person" in a sound scope.
        adjacency: "zero_out" or "add_remove" (needs private counts).

    Raises:
        PlanError: a value is out of range, or no true claim could follow from the combination.
    """

    agent: str
    budget: Budget
    scope: Scope
    update: tuple[str, ...]
    protect: tuple[str, ...]
    event: Event
    n_public: int | None
    record_counts: Literal["public", "private"] = "public"
    unit: Unit = "record"
    adjacency: Adjacency = "zero_out"

    def __post_init__(self) -> None:
        check_agent_id(self.agent)
        self._check_scope()
        self._check_counts()
        if self.unit not in tuple(NEIGHBOUR_WORDS):
            raise PlanError(f"unit is {self.unit!r:.40}; use {' or '.join(NEIGHBOUR_WORDS)}")
        if self.unit == "person" and self.scope != "sound":
            raise PlanError(f"{self.agent}: unit person needs scope sound; this is {self.scope}")
        adjacencies = tuple(NEIGHBOUR_WORDS[self.unit])
        if self.adjacency not in adjacencies:
            raise PlanError(
                f"adjacency is {self.adjacency!r:.40}; use {' or '.join(adjacencies)} "
                f"(replacing one {self.unit} by another costs about twice the epsilon)"
            )
        if self.scope == "sound" and any(
            isinstance(leaf, NonPrivateEvent) for leaf in leaf_events(self.event)
        ):
            raise PlanError(f"{self.agent}: a sound plan cannot contain an unprotected read")

    @property
    def visit_cost(self) -> Cost:
        """Return the largest cost of one visit, counted by this plan's scope."""
        return self.charge(self.event)

    def charge(self, event: Event) -> Cost:
        """Return the cost of an event under this plan.

        In scope as_published unprotected reads do not count, so the sum is only nominal.
        """
        if self.scope == "sound":
            return cost_of([event])
        return cost_of(is_protected([event]))

    def cost(self, events: Iterable[Event]) -> Cost:
        """Return the cost of all these events under this plan."""
        return sum((self.charge(event) for event in events), ZERO_COST)

    def delta_of(self, spent: Cost) -> float:
        """Return the delta of a claim about ``spent``: 0 if all charges and the planned visit are
        pure.

        Pure releases compose to a pure one. A pure epsilon within the budget also holds at the
        budget's delta.
        """
        pure = self.scope == "sound" and self.visit_cost.is_pure and spent.is_pure
        return 0.0 if pure else self.budget.delta

    def epsilon(self, spent: Cost, promised: float | None = None) -> float:
        """Return the epsilon of ``spent`` at :meth:`delta_of`.

        promised: the initial budget, if it was lowered later.
        """
        if self.scope == "sound" and spent.is_pure:
            return spent.pure  # also if a later plan is not pure: it holds on every path
        return spent.account_epsilon(self.delta_of(spent), promised or self.budget.epsilon)

    def _check_scope(self) -> None:
        for name, networks in (("update", self.update), ("protect", self.protect)):
            valid = isinstance(networks, tuple) and all(
                isinstance(network, str) and _NETWORK.fullmatch(network) for network in networks
            )
            if not valid or len(set(networks)) != len(networks):
                raise PlanError(f"{name} is {networks!r:.80}; name each network once, in a tuple")
        unprotected = sorted(set(self.update) - set(self.protect))
        actual_scope = "as_published" if unprotected else "sound"
        if self.scope != actual_scope:
            reason = f"{unprotected} would be trained without noise"
            raise PlanError(
                f"scope is {self.scope!r:.40}, but "
                f"{reason if unprotected else 'all updates are protected'}: it is {actual_scope}"
            )

    def _check_counts(self) -> None:
        if self.record_counts not in ("public", "private"):
            raise PlanError(f"record_counts is {self.record_counts!r:.40}; use public or private")
        if self.adjacency == "add_remove" and self.record_counts == "public":
            raise PlanError("adjacency add_remove hides row counts; set record_counts: private")
        n = self.n_public
        if n is None:
            return
        if self.record_counts == "private":
            raise PlanError("n_public is given, but record_counts is private; leave it out")
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise PlanError(f"n_public is {n!r:.40}; it is a number of rows, 0 or more")
        if n and self.budget.delta >= 1 / n:
            raise PlanError(
                f"{self.agent}: delta {self.budget.delta:g} is not below 1 / {n} rows, so it would "
                f"allow a whole row to be published. Use at most {min(1e-5, 1 / (10 * n)):g}."
            )


def check_agent_id(agent: object) -> None:
    """Raise PlanError unless the id is safe as a file name on every system."""
    if (
        not isinstance(agent, str)
        or not _AGENT_ID.fullmatch(agent)
        or agent.endswith(".")
        or DEVICE_NAMES.fullmatch(agent)
    ):
        raise PlanError(
            f"{agent!r:.40} cannot be an agent id: use 1 to 64 letters, digits, '_', '-' and "
            f"single dots, starting with a letter or digit"
        )


def plan_to_json(plan: AccountPlan) -> Json:
    """Return the plan as the fields of a journal line."""
    return {
        **{name: getattr(plan, name) for name in _PLAIN},
        "epsilon_budget": real(plan.budget.epsilon), "delta": real(plan.budget.delta),
        "update": list(plan.update), "protect": list(plan.protect),
        "event": event_to_json(plan.event),
    }  # fmt: skip


_PLAIN = ("agent", "unit", "adjacency", "scope", "record_counts", "n_public")
PLAN_KEYS = {*_PLAIN, "epsilon_budget", "delta", "update", "protect", "event"}


def plan_from_json(record: Json) -> AccountPlan:
    """Return the plan that :func:`plan_to_json` wrote. Raises PlanError for anything else."""
    only_keys(record, PLAN_KEYS, "plan")
    for name in ("update", "protect"):
        if not isinstance(record[name], list):
            raise PlanError("update and protect are lists of names")
    return AccountPlan(
        budget=Budget(*(read_real(record[name], name) for name in ("epsilon_budget", "delta"))),
        update=tuple(record["update"]), protect=tuple(record["protect"]),
        event=event_from_json(record["event"]), **{name: record[name] for name in _PLAIN},
    )  # fmt: skip


def refuse_change(old: AccountPlan, new: AccountPlan) -> None:
    """Raise PlanError if the new plan may not replace the old one of a running account.

    Noise, steps and protected networks may change, and the budget may fall; old charges stay. A
    larger budget would break the guarantee. Another delta, scope or adjacency would change the
    meaning of old charges.
    """
    fixed_fields = [(n, getattr(old, n), getattr(new, n)) for n in _PLAIN if n != "n_public"]
    for name, before, after in (*fixed_fields, ("delta", old.budget.delta, new.budget.delta)):
        if before != after:
            raise PlanError(
                f"{old.agent}: {name} cannot change from {before} to {after} while an account "
                "runs. Give the former, or use another ledger folder for other rows."
            )
    if new.budget.epsilon > old.budget.epsilon:
        raise PlanError(
            f"{old.agent}: the budget cannot rise from {old.budget.epsilon:g} to "
            f"{new.budget.epsilon:g}: the account promised no more than "
            f"{old.budget.epsilon:g} for its rows. Give that, or less."
        )
