"""What an account charges when later visits may depend on what earlier ones released.

The rule must be fixed before the first release: ``Cost.account_epsilon``. Visits of one kind cost
the same as a fixed plan. Each rule for several kinds has a too generous count as its control.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import ndtr

from accounting.account_plan import AccountPlan
from accounting.accountants import (
    ORDERS,
    cost_of,
    epsilon,
    gaussian_epsilon,
    rdp_epsilon,
    rdp_to_epsilon,
)
from accounting.budget import Budget
from accounting.canonical_json import real
from accounting.errors import BudgetExhausted
from accounting.events import ComposedEvent, Event, PoissonSampledGaussianEvent, PureDpEvent
from accounting.ledger import Account, read_journal
from privssl.privacy.card_numbers import agent_entry, paper_sum
from tests.support.ledger import plan, rebuilt

DELTA = 1e-5
LOUD = PoissonSampledGaussianEvent(noise_multiplier=4.0, sample_rate=0.1, steps=100)
QUIET = PoissonSampledGaussianEvent(noise_multiplier=2.0, sample_rate=0.25, steps=10)
RARE = PoissonSampledGaussianEvent(noise_multiplier=0.6, sample_rate=0.01, steps=10)
FULL = PoissonSampledGaussianEvent(noise_multiplier=4.0, sample_rate=1.0, steps=2)
PURE = PureDpEvent(0.5, 1)
BOTH = ComposedEvent((PURE, QUIET))


@pytest.mark.parametrize("event", [LOUD, QUIET, FULL, PURE, BOTH], ids=str)
@pytest.mark.parametrize("budget", [0.5, 8.0])
def test_visits_of_one_kind_cost_exactly_what_a_fixed_plan_costs(
    event: Event, budget: float
) -> None:
    spent = cost_of([event] * 7)
    assert spent.account_epsilon(DELTA, budget) == epsilon([event] * 7, DELTA)
    if isinstance(event, PoissonSampledGaussianEvent):  # fewer steps of the same noise and rate
        shorter = replace(event, steps=1)
        assert len(cost_of([event, shorter]).kinds) == 1
        mixed = cost_of([event, shorter]).account_epsilon(DELTA, budget)
        assert mixed == epsilon([event, shorter], DELTA)
    other = replace(QUIET, noise_multiplier=3.0)  # the control: another kind
    assert (spent + cost_of([other])).account_epsilon(DELTA, budget) > epsilon(
        [event] * 7 + [other], DELTA
    )


def order_that_fits_every_count(unit: Event, budget: float) -> tuple[float, int]:
    """The reference: the order at which the largest number of visits fits, and that number."""
    once, most = cost_of([unit]), 0
    while (fitting := once.times(most + 1)).epsilon(DELTA) <= budget:
        most += 1
        added = [rdp_to_epsilon(fitting.rdp[at : at + 1], DELTA, (o,)) for at, o in ORDERED]
    return ORDERS[int(np.argmin(added))], most


ORDERED = tuple(enumerate(ORDERS))
UNITS: dict[Event, Event] = {QUIET: replace(QUIET, steps=1), BOTH: BOTH}


@pytest.mark.parametrize("first", UNITS, ids=str)
def test_beside_a_sampled_kind_other_events_count_at_the_order_fixed_by_that_kind(
    first: Event,
) -> None:
    budget = 8.0
    then: list[Event] = [LOUD, FULL]
    order, most = order_that_fits_every_count(UNITS[first], budget)
    spent = cost_of([first, first, *then])
    assert spent.account_epsilon(DELTA, budget) == pytest.approx(
        rdp_epsilon([first, first, *then], DELTA, (order,)), rel=1e-12
    )
    # So the rule refuses no sequence of the first kind alone: one rule holds for all sequences.
    at, unit = ORDERS.index(order), cost_of([UNITS[first]])
    assert rdp_to_epsilon(unit.times(most).rdp[at : at + 1], DELTA, (order,)) <= budget
    # The control: the best order for the spent events refuses some, and would be a second rule.
    other = int(np.argmin([rdp_epsilon([first], DELTA, (o,)) for o in ORDERS]))
    found = rdp_to_epsilon(unit.times(most).rdp[other : other + 1], DELTA, (ORDERS[other],))
    assert found > budget


def test_full_batches_cost_the_exact_epsilon_and_later_events_count_as_full_batches() -> None:
    quieter = replace(FULL, noise_multiplier=8.0)
    mu = math.sqrt(2 / 16 + 2 / 64)
    found = cost_of([FULL, quieter]).account_epsilon(DELTA, 8.0)
    assert found == pytest.approx(gaussian_epsilon(mu, DELTA), rel=1e-12)
    sampled = replace(FULL, sample_rate=0.2)
    assert cost_of([FULL, sampled]).account_epsilon(DELTA, 8.0) == epsilon([FULL, FULL], DELTA)
    pure = cost_of([FULL, PURE]).account_epsilon(DELTA, 8.0)
    assert pure == pytest.approx(gaussian_epsilon(math.sqrt(2 / 16 + math.pi / 8), DELTA), rel=1e-9)


def test_a_pure_release_costs_at_most_the_full_batch_that_replaces_it() -> None:
    # The corner of the trade-off curve of epsilon-DP lies above that of the Gaussian mechanism.
    for each in (1e-3, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0):
        mu = math.sqrt(cost_of([PureDpEvent(each, 1)]).as_full)
        assert ndtr(-mu / 2) <= 1 / (1 + math.exp(each))
        small = 0.1
        assert ndtr(-0.99 * small * math.sqrt(math.pi / 2) / 2) > 1 / (1 + math.exp(small))


def test_after_pure_releases_every_order_counts_at_its_share_of_delta() -> None:
    events: list[Event] = [PURE, PURE, QUIET]
    shared = rdp_epsilon(events, DELTA / len(ORDERS))
    assert cost_of(events).account_epsilon(DELTA, 8.0) == pytest.approx(shared, rel=1e-12)
    assert shared > rdp_epsilon(events, DELTA)
    # Pure releases alone cost their sum in every sequence.
    assert cost_of([PURE, PureDpEvent(0.25, 4)]).account_epsilon(DELTA, 8.0) == 1.5


@pytest.mark.parametrize("events", [(QUIET, LOUD), (FULL, QUIET), (PURE, QUIET), (BOTH, FULL)])
def test_the_epsilon_of_an_account_never_decreases(events: tuple[Event, ...]) -> None:
    spent, before = cost_of([]), 0.0
    for event in [events[0]] * 3 + [events[1]] * 3 + [events[0]] * 2:
        spent = spent + cost_of([event])
        now = spent.account_epsilon(DELTA, 8.0)
        assert now >= before
        assert now >= spent.epsilon(DELTA) - 1e-9
        before = now


# --- accounts -----------------------------------------------------------------------------------


def promise(event: Event, budget: float) -> AccountPlan:
    return plan(budget=Budget(budget, DELTA), event=event)


def spend(path: Path, event: Event, budget: float, most: int, run: str = "") -> int:
    """Spend visits until the account refuses, at most ``most``. Returns their number."""
    plan = promise(event, budget)
    account = Account.open(path / "s0.jsonl", plan, resume=path.exists(), run=run)
    try:
        for number in range(most):
            with account.spend(event, visit=f"{run}{number}"):
                pass
        return most
    except BudgetExhausted:
        return number
    finally:
        account.close()


def by_the_best_order(spent: Sequence[Event], event: Event, budget: float) -> int:
    """How many more visits would fit if all had been fixed in advance."""
    return sum(epsilon([*spent, *[event] * n], DELTA) <= budget for n in range(1, 100))


@pytest.mark.parametrize(("first", "count", "then"), [(PURE, 1, QUIET), (QUIET, 3, RARE)], ids=str)
def test_an_account_of_several_kinds_stops_before_the_best_order_would(
    tmp_path: Path, first: Event, count: int, then: Event
) -> None:
    budget = 8.0
    assert spend(tmp_path / "ledger", first, budget, count, "one") == count
    found = spend(tmp_path / "ledger", then, budget, 100, "two")
    assert 0 < found < by_the_best_order([first] * count, then, budget)
    journal = read_journal(tmp_path / "ledger/s0.jsonl")
    assert journal.problems == []
    assert epsilon(journal.events, DELTA) < journal.epsilon <= budget
    assert journal.cost.account_epsilon(DELTA, budget) == journal.epsilon
    # The control: with one kind of visit the count is that of a fixed plan.
    alone = spend(tmp_path / "alone", then, budget, 100, "two")
    assert alone == min(100, by_the_best_order([], then, budget))


def test_lowering_a_budget_does_not_change_the_order(tmp_path: Path) -> None:
    spend(tmp_path / "ledger", QUIET, 8.0, 3, "one")
    spend(tmp_path / "ledger", LOUD, 6.0, 2, "two")
    journal = read_journal(tmp_path / "ledger/s0.jsonl")
    assert (journal.promised, journal.plan.budget.epsilon) == (8.0, 6.0)
    assert journal.epsilon == journal.cost.account_epsilon(DELTA, 8.0)
    assert journal.epsilon != journal.cost.account_epsilon(DELTA, 6.0)  # the control


def test_ledgers_of_earlier_versions_are_read_and_recounted(tmp_path: Path) -> None:
    path = tmp_path / "ledger/s0.jsonl"
    spend(path.parent, QUIET, 8.0, 2, "one")
    spend(path.parent, LOUD, 8.0, 1, "two")
    true = read_journal(path).epsilon
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    former = epsilon([QUIET, QUIET, LOUD], DELTA)
    for written, problems in ((former, 0), (0.99 * former, 1)):
        lines[-2]["eps_after"] = real(written)
        path.write_bytes(rebuilt(lines))
        journal = read_journal(path)
        assert len(journal.problems) == problems
        assert problems or journal.epsilon == true > former


def test_the_sum_as_in_the_paper_is_never_below_the_epsilon_of_the_account() -> None:
    events: list[Event] = [*[QUIET] * 5, PureDpEvent(0.001, 1), FULL]
    plan = promise(QUIET, 50.0)
    entry = agent_entry("s0", plan, events, "", "guaranteed", fixed=False, promised=50.0)
    counted = entry["epsilon"]["value"]
    assert counted == cost_of(events).account_epsilon(DELTA, 50.0)
    assert paper_sum([(plan, events)], [entry], DELTA) >= counted
    tiny: list[Event] = [PureDpEvent(0.001, 1), QUIET]
    entry = agent_entry("s0", plan, tiny, "", "guaranteed", fixed=False, promised=50.0)
    added = sum(cost_of([e]).summable_epsilon(DELTA) for e in tiny)
    assert added < entry["epsilon"]["value"]  # the control: the plain sum is lower
    assert paper_sum([(plan, tiny)], [entry], DELTA) == pytest.approx(entry["epsilon"]["value"])
