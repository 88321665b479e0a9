"""What test_ledger.py shares with other tests."""

from typing import Any

from accounting.accountants import max_repeats
from accounting.canonical_json import encode
from accounting.journal import FIRST_PREV, line_hash
from accounting.ledger import Account

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
