"""The numbers of the privacy card: what each account spent, by several accountants."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from accounting import verify
from accounting.account_plan import AccountPlan
from accounting.accountants import max_repeats, prv_epsilon
from accounting.errors import AccountingError
from accounting.events import Event, event_to_json, is_protected
from privssl.privacy.card_schema import AgentEntry, Kind, NumericBounds

BRACKET_LIMIT = 40.0  # above this epsilon numeric composition takes many seconds


def agent_entry(
    agent: str, plan: AccountPlan, events: Sequence[Event], head: str, kind: Kind
) -> AgentEntry:
    """The card's row of one agent.

    Args:
        events: one per charged visit. head: hash of its ledger's last line.
    """
    budget, cost = plan.budget, plan.cost(events)
    delta = plan.delta_of(cost)
    value = cost.epsilon(delta)
    left = max_repeats(plan.visit_cost, budget=budget.epsilon, delta=delta, spent=cost)
    return {
        "agent": agent,
        "epsilon": {
            "kind": kind, "value": value,
            **_numeric_bounds(tuple(is_protected(events)), delta, value),
        },
        "budget": {"epsilon": budget.epsilon, "delta": budget.delta},
        "visit": event_to_json(plan.event),
        "visits": len(events),
        "visits_left": left,
        "rows": plan.n_public,
        "ledger_head": head,
    }  # fmt: skip


@lru_cache(maxsize=64)  # agents often spend the same
def _numeric_bounds(events: tuple[Event, ...], delta: float, value: float) -> NumericBounds:
    """Bounds by numeric composition, valid because the plan was fixed beforehand."""
    prv, lower, upper, why = None, None, None, None
    if delta == 0:
        why = "epsilon is the exact sum of pure releases"
    elif value > BRACKET_LIMIT:
        why = f"epsilon above {BRACKET_LIMIT:g} takes too long"
    else:
        try:
            lower, upper = verify.pld_bracket(events, delta)
        except AccountingError as error:
            prv, why = prv_epsilon(events, delta), str(error)
    return {"pld_lower": lower, "pld_upper": upper, "prv": prv, "why_no_bounds": why}


def paper_sum(spent: Iterable[tuple[AccountPlan, Sequence[Event]]], delta: float) -> float:
    """Epsilon of each visit on its own, added up over visits and agents: the paper's total.

    By the moments accountant, whose values may be added up: never below the composed epsilons.
    """
    return math.fsum(
        plan.charge(event).summable_epsilon(delta) for plan, events in spent for event in events
    )
