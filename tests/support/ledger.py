"""What test_ledger.py shares with other tests."""

import itertools
from pathlib import Path
from typing import Any

from accounting.accountants import max_repeats
from accounting.canonical_json import encode
from accounting.errors import BudgetExhausted
from accounting.journal import FIRST_PREV, line_hash
from accounting.ledger import Account, AccountPlan

# --- tampering ---------------------------------------------------------------------------------


def rebuilt(lines: list[dict[str, Any]]) -> bytes:
    """The lines with a fresh, valid chain: what somebody with the file in hand can do."""
    out, previous = b"", FIRST_PREV
    for number, line in enumerate(lines):
        record = {**line, "seq": number, "prev": previous}
        text = encode(record)
        previous = line_hash(text)
        out += text + b"\n"
    return out


def visits_left(account: Account) -> int:
    """How many more visits of the plan's size the budget pays for."""
    plan, spent = account.plan, account.balance().journal.cost
    budget, delta = plan.budget.epsilon, plan.delta_of(spent)
    return max_repeats(plan.visit_cost, budget=budget, delta=delta, spent=spent)


def spend_all(path: Path, promise: AccountPlan) -> int:
    """Visits until the account refuses; how many there were."""
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
