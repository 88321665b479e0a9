"""Privacy cards and run folders that test_card_and_audit.py shares with other tests."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accounting.budget import Budget
from accounting.events import Event
from accounting.ledger import Account, AccountPlan
from privssl.privacy.privacy_card import AgentSpend, Release, privacy_card
from tests.support import ledger

VISIT = ledger.VISIT
RELEASES: list[Release] = [
    ("F", "covered", "trained with clipping and noise"),
    ("row count", "post-processing", "public under zero_out"),
]
AS_PUBLISHED: list[Release] = [
    ("F", "not covered", "trained without noise"),
    ("D", "not covered", "trained without noise"),
    ("G", "not covered", "its gradients flow | through F"),
]


def plan(agent: str, **changes: Any) -> AccountPlan:
    usual = {"budget": Budget(epsilon=8.0, delta=1e-5), "update": ("F",), "protect": ("F",)}
    return ledger.plan(**{"agent": agent, **usual, **changes})


def card_of(accounts: Sequence[AgentSpend], **changes: Any) -> dict[str, Any]:
    scope = accounts[0][1].scope if accounts else "sound"
    usual: dict[str, Any] = {
        "scope": scope,
        "delta": 1e-5,
        "releases": RELEASES if scope == "sound" else AS_PUBLISHED,
        "algorithm": "fedssl",
        "dataset": "digits",
    }
    card: Any = privacy_card(accounts, **{**usual, **changes})
    return dict(card)


def write_run(
    run: Path,
    visits: dict[str, int],
    make_plan: Callable[[str], AccountPlan] = plan,
    card_events: Callable[[tuple[Event, ...]], Sequence[Event]] = tuple,
) -> dict[str, Any]:
    """Write a run folder: a ledger per agent with this number of visits, and the card."""
    accounts: list[AgentSpend] = []
    for agent, count in visits.items():
        account = Account.open(run / "ledger" / f"{agent}.jsonl", make_plan(agent), resume=False)
        for number in range(count):
            with account.spend(account.plan.event, visit=f"round {number}"):
                pass
        accounts.append((agent, account.plan, card_events(account.events), account.head))
        account.close()
    card = card_of(accounts)
    write_card(run, card)
    return card


def write_card(run: Path, card: dict[str, Any]) -> None:
    (run / "privacy.json").write_text(json.dumps(card, allow_nan=False))
