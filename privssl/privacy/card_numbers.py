"""The numbers of the privacy card: what each account spent, by several accountants."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from accounting import verify
from accounting.account_plan import AccountPlan
from accounting.accountants import max_repeats, prv_epsilon
from accounting.errors import AccountingError
from accounting.events import Event, event_to_json, is_protected

BRACKET_LIMIT = 40.0  # above this epsilon numeric composition takes many seconds


def agent_entry(
    agent: str, plan: AccountPlan, events: Sequence[Event], head: str, kind: str
) -> dict[str, Any]:
    """The card's row of one agent.

    Args:
        events: one per charged visit. head: hash of its ledger's last line.
        kind: what the epsilons are: "guaranteed", "nominal", or only "charged".
    """
    budget, cost = plan.budget, plan.cost(events)
    counted = tuple(is_protected(events))
    delta = plan.delta_of(cost)
    value, once = cost.epsilon(delta), plan.visit_cost
    return {
        "agent": agent,
        "epsilon": {"kind": kind, "value": value, **_numeric(counted, delta, value)},
        "budget": {"epsilon": budget.epsilon, "delta": budget.delta},
        "visit": event_to_json(plan.event),
        "visits": len(events),
        "visits_left": max_repeats(once, budget=budget.epsilon, delta=delta, spent=cost),
        "rows": plan.n_public,
        "ledger_head": head,
    }


@lru_cache(maxsize=64)  # agents often spend the same
def _numeric(events: tuple[Event, ...], delta: float, value: float) -> dict[str, Any]:
    """Bounds by numeric composition, valid because the plan was fixed beforehand."""
    none = {"pld_lower": None, "pld_upper": None, "prv": None}
    if delta == 0:
        return {**none, "why_no_bounds": "epsilon is the exact sum of pure releases"}
    if value > BRACKET_LIMIT:
        return {**none, "why_no_bounds": f"epsilon above {BRACKET_LIMIT:g} takes too long"}
    try:
        lower, upper = verify.pld_bracket(events, delta)
    except AccountingError as error:
        return {**none, "prv": prv_epsilon(events, delta), "why_no_bounds": str(error)}
    return {**none, "pld_lower": lower, "pld_upper": upper, "why_no_bounds": None}


def paper_sum(spent: Iterable[tuple[AccountPlan, Sequence[Event]]], delta: float) -> float:
    """Epsilon of each visit on its own, added up over visits and agents: the paper's total.

    By the moments accountant, whose values may be added up: never below the composed epsilons.
    """
    return math.fsum(
        plan.charge(event).summable_epsilon(delta) for plan, events in spent for event in events
    )
