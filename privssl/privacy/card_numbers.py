"""The numbers of the privacy card: the epsilon of each account, by several accountants."""

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
NOT_FIXED = "visits were not exactly those that the plan had fixed beforehand"


def fixed_beforehand(
    accounts: Iterable[tuple[AccountPlan, Sequence[Event]]], planned: int | None, *, shared: bool
) -> bool:
    """Return whether every account was charged exactly the planned visits.

    Otherwise the stopping time may depend on results. Then the charges are no bound (an odometer
    needs more delta), but the budget is (a filter): arXiv:1605.08294.

    Args:
        planned: visits of each; None if the run was stopped. shared: accounts outlive runs.
    """
    return not shared and all(
        len(spent) == planned and all(event == plan.event for event in spent)
        for plan, spent in accounts
    )


def agent_entry(
    agent: str, plan: AccountPlan, events: Sequence[Event], head: str, kind: Kind,
    *, fixed: bool, promised: float,
) -> AgentEntry:  # fmt: skip
    """Return the card's entry of one agent.

    Args:
        events: one per charged visit. head: hash of its ledger's last line. fixed: whether
        :func:`fixed_beforehand`. promised: the initial budget of its account.
    """
    budget, cost = plan.budget, plan.cost(events)
    delta, value = plan.delta_of(cost), plan.epsilon(cost, promised)
    visit_cost, limit = plan.visit_cost, budget.epsilon
    visits_left = max_repeats(visit_cost, budget=limit, delta=delta, spent=cost, began=promised)
    return {
        "agent": agent,
        "epsilon": {
            "kind": kind, "value": value,
            **(_compute_bounds(tuple(is_protected(events)), delta, value) if fixed else _NO_BOUNDS),
        },
        "budget": {"epsilon": budget.epsilon, "delta": budget.delta},
        "visit": event_to_json(plan.event),
        "visits": len(events),
        "visits_left": visits_left,
        "rows": plan.n_public,
        "ledger_head": head,
    }  # fmt: skip


_NO_BOUNDS: NumericBounds = {
    "pld_lower": None, "pld_upper": None, "prv": None, "why_no_bounds": NOT_FIXED,
}  # fmt: skip


@lru_cache(maxsize=64)  # agents often spend the same amount
def _compute_bounds(events: tuple[Event, ...], delta: float, value: float) -> NumericBounds:
    """Compute bounds by numeric composition, valid because the plan was fixed beforehand."""
    prv, lower, upper, reason = None, None, None, None
    if delta == 0:
        reason = "epsilon is the exact sum of pure releases"
    elif value > BRACKET_LIMIT:
        reason = f"epsilon above {BRACKET_LIMIT:g} takes too long"
    else:
        try:
            lower, upper = verify.pld_bracket(events, delta)
        except AccountingError as error:
            prv, reason = prv_epsilon(events, delta), str(error)
    return {"pld_lower": lower, "pld_upper": upper, "prv": prv, "why_no_bounds": reason}


def paper_sum(
    spent: Iterable[tuple[AccountPlan, Sequence[Event]]],
    entries: Iterable[AgentEntry],
    delta: float,
) -> float:
    """Return the paper's total: the sum of each visit's epsilon over visits and agents.

    Uses the moments accountant, whose values may be summed: never below the composed epsilons.

    Args:
        entries: of the same agents. With several kinds of visits an account's epsilon may exceed
            their sum; then it counts.
    """
    terms = []
    for (plan, events), entry in zip(spent, entries, strict=True):
        visits = [plan.charge(event).summable_epsilon(delta) for event in events]
        terms += visits
        if len(plan.cost(events).kinds) > 1:
            terms.append(max(0.0, entry["epsilon"]["value"] - math.fsum(visits)))
    return math.fsum(terms)
