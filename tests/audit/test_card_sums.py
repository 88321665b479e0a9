"""Which epsilons a card may add up."""

import math
from pathlib import Path
from typing import Any

import pytest

from accounting.accountants import epsilon, rdp_epsilon
from accounting.budget import Budget
from accounting.events import (
    ComposedEvent,
    NonPrivateEvent,
    PoissonSampledGaussianEvent,
)
from privssl.privacy.card_text import render_markdown
from tests.support.card_and_audit import VISIT, card_of, plan
from tests.support.ledger import spend_all


def test_the_example_of_the_paper_overspends_by_its_own_rule_and_not_by_ours(
    tmp_path: Path,
) -> None:
    # Specification, 5.2: 1.724 for a visit, three agents, budget 4. One total for all agents.
    event = PoissonSampledGaussianEvent(noise_multiplier=4.0, sample_rate=16 / 34, steps=10)
    each, budget = epsilon([event], 1e-5), Budget(4.0, 1e-5)
    assert each == pytest.approx(1.724, abs=5e-4)
    total, papers = 0.0, 0
    while not total > budget.epsilon:
        total, papers = total + each, papers + 1
    assert papers == 3
    assert total == pytest.approx(5.17, abs=0.01)
    assert math.floor(budget.epsilon / each) == 2  # with the same total, checked in advance

    # Its numbers would be nominal wherever they are printed.
    unsound = ComposedEvent((event, NonPrivateEvent("F and D are trained without noise")))
    scope: dict[str, Any] = {"scope": "as_published", "update": ("F", "D", "G"), "protect": ("G",)}
    names = ("s0", "s1", "s2")
    published = [plan(name, event=unsound, budget=budget, **scope) for name in names]
    card = card_of([(p.agent, p, [unsound], "a" * 64) for p in published])
    assert card["epsilon"]["paper_sum"] == pytest.approx(total)
    assert card["sentence"].startswith("NOMINAL")
    [line] = [row for row in render_markdown(card).splitlines() if "running sum" in row]
    assert "nominal epsilon 5.17" in line

    # Ours: each agent composes its own spending, and checks before it reads.
    fitting = max(t for t in range(1, 50) if epsilon([event] * t, 1e-5) <= budget.epsilon)
    assert fitting > 1
    for name in names:
        assert spend_all(tmp_path, plan(name, event=event, budget=budget)) == fitting


def fields_with(number: float, inside: Any, path: str = "") -> set[str]:
    """The fields of a card with this number."""
    if isinstance(inside, dict):
        return set().union(*(fields_with(number, v, f"{path}/{k}") for k, v in inside.items()), ())
    if isinstance(inside, list):
        return set().union(
            *(fields_with(number, v, f"{path}/{i}") for i, v in enumerate(inside)), ()
        )
    close = isinstance(inside, float) and math.isclose(inside, number, rel_tol=1e-6)
    return {path} if close else set()


def test_only_the_paper_sum_of_a_card_is_a_sum_of_epsilons() -> None:
    card = card_of(
        [("s0", plan("s0"), [VISIT] * 3, "a" * 64), ("s1", plan("s1"), [VISIT], "b" * 64)]
    )
    one, three = epsilon([VISIT], 1e-5), epsilon([VISIT] * 3, 1e-5)

    alone = rdp_epsilon([VISIT], 1e-5)  # exact values must not be added up
    assert fields_with(4 * alone, card) == {"/epsilon/paper_sum"}
    assert fields_with(4 * one, card) == set()
    assert fields_with(one + three, card) == set()  # over agents
    # Records are disjoint: the largest. A person with a record at every agent: composed, and
    # larger.
    assert fields_with(three, card) == {"/epsilon/overall", "/agents/0/epsilon/value"}
    assert card["guarantee"]["epsilon"] == 8.0  # these visits were not planned: the budget
    assert card["epsilon"]["person_across_agents"] > three

    card["guarantee"]["epsilon"] = one + three  # the control
    assert fields_with(one + three, card) == {"/guarantee/epsilon"}
