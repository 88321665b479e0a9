"""Accounts for tests: a plan, the number of visits that it allows, and tampered journals."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

from accounting.accountants import max_repeats
from accounting.budget import Budget
from accounting.canonical_json import encode
from accounting.errors import BudgetExhausted
from accounting.events import PoissonSampledGaussianEvent
from accounting.journal import FIRST_PREV, line_hash
from accounting.ledger import Account, AccountPlan

# Full batches have a closed form, so tests need no slow accountant. One visit costs about 1.0.
VISIT = PoissonSampledGaussianEvent(noise_multiplier=8.0, sample_rate=1.0, steps=5)


def plan(**changes: Any) -> AccountPlan:
    usual = AccountPlan(
        agent="s0",
        budget=Budget(epsilon=4.0, delta=1e-5),
        scope="sound",
        update=("F", "G"),
        protect=("F", "G"),
        event=VISIT,
        n_public=34,
    )
    return replace(usual, **changes)


# --- tampering ---------------------------------------------------------------------------------


def rebuilt(lines: list[dict[str, Any]]) -> bytes:
    """The lines with a new valid hash chain, as anyone with write access can make it."""
    out, previous = b"", FIRST_PREV
    for number, line in enumerate(lines):
        record = {**line, "seq": number, "prev": previous}
        text = encode(record)
        previous = line_hash(text)
        out += text + b"\n"
    return out


def visits_left(account: Account) -> int:
    """The number of further visits that the budget allows."""
    plan, spent = account.plan, account.balance().journal.cost
    budget, delta = plan.budget.epsilon, plan.delta_of(spent)
    return max_repeats(plan.visit_cost, budget=budget, delta=delta, spent=spent)


def spend_all(path: Path, promise: AccountPlan) -> int:
    """Spend until the account refuses; return the number of visits."""
    account = Account.open(path / f"{promise.agent}.jsonl", promise, resume=False)
    try:
        for number in itertools.count():
            try:
                with account.spend(promise.event, visit=f"round {number}"):
                    pass
            except BudgetExhausted:
                return number
    finally:
        account.close()
    raise AssertionError("unreachable")
