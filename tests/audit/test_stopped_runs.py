"""A run whose visits were not exactly those planned guarantees its budget, not its composed cost.

Otherwise stopping could depend on the charges, and the claim would be too small. Controls: a run
that did what was planned claims its cost, and pure releases claim their sum.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accounting import verify
from accounting.accountants import epsilon, gaussian_epsilon
from accounting.budget import Budget, round_up
from accounting.events import PoissonSampledGaussianEvent, PureDpEvent
from accounting.ledger import Account, read_journal
from privssl.audit.__main__ import main
from privssl.privacy.card_numbers import NOT_FIXED
from privssl.privacy.card_text import guarantee_sentence, render_markdown
from privssl.privacy.privacy_card import attack_bounds
from tests.support.card_and_audit import VISIT, card_of, plan, write_card, write_run

THREE = epsilon([VISIT] * 3, 1e-5)
UNREFUTED = 3  # ledgers and card agree, but there is no witness


@pytest.fixture(autouse=True)
def without_the_second_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "available", lambda: False)  # it takes a second


def stopped(**changes: Any) -> dict[str, Any]:
    return card_of([("s0", plan("s0"), [VISIT] * 3, "a" * 64)], **changes)


def kinds_of(card: dict[str, Any]) -> set[str]:
    return {card["epsilon"]["kind"], *(entry["epsilon"]["kind"] for entry in card["agents"])}


def test_stopping_by_the_privacy_loss_leaks_more_than_was_charged() -> None:
    # Full batches with mu 0.15 each, and an adversary who stops as soon as the privacy loss exceeds
    # the charged epsilon. Losses are drawn by importance sampling.
    mu, steps, delta, margin, shift, runs = 0.15, 100, 1e-5, 0.2, 0.05, 20_000
    charged = [gaussian_epsilon(mu * math.sqrt(t), delta) for t in range(1, steps + 1)]
    rng, mean, variance = np.random.default_rng(1), mu**2 / 2, mu**2
    loss, alive, exceeds = np.zeros(runs), np.ones(runs, bool), {"charged": 0.0, "budget": 0.0}
    for t, now in enumerate(charged, 1):
        loss += mean + shift + mu * rng.standard_normal(runs)
        stops = alive & (loss > now + margin)
        at = loss[stops]
        weight = np.exp(-(shift / variance) * (at - mean * t) + shift**2 * t / (2 * variance))
        for what, bound in (("charged", now), ("budget", charged[-1])):
            exceeds[what] += float((np.maximum(1 - np.exp(bound - at), 0) * weight).sum()) / runs
        alive &= ~stops
    assert exceeds["charged"] > 3 * delta
    assert exceeds["budget"] <= delta  # the filter


def test_a_stopped_run_guarantees_the_budget_and_reports_the_charged_epsilon() -> None:
    card = stopped()
    assert card["guarantee"]["epsilon"] == 8.0
    assert card["epsilon"]["overall"] == card["agents"][0]["epsilon"]["value"] == THREE
    assert "(8.0000, 1e-05)-DP" in card["sentence"]
    assert card["attack_bounds"] == attack_bounds(8.0, 1e-5)
    assert card["headline"] is None
    page = render_markdown(card)
    assert f"charged epsilon {round_up(THREE)}" in page
    assert "The claim is the budget: visits were not exactly those fixed beforehand" in page
    assert f" epsilon {round_up(THREE)}" not in page.replace("charged epsilon", "")


def test_a_run_that_did_what_was_planned_guarantees_its_cost() -> None:
    card = stopped(planned=3)  # the control of the test above
    assert card["guarantee"]["epsilon"] == THREE
    assert kinds_of(card) == {"guaranteed"}
    page = render_markdown(card)
    assert "charged" not in page and "The claim is the budget" not in page


@pytest.mark.parametrize(
    "changes", [{"planned": 4}, {"planned": 3, "this_run": {"s0": 1.0}}], ids=["resumed", "shared"]
)
def test_with_other_visits_than_planned_or_shared_accounts_the_claim_is_the_budget(
    changes: Any,
) -> None:
    card = stopped(**changes)
    assert card["guarantee"]["epsilon"] == 8.0
    assert kinds_of(card) == {"charged"}  # no smaller number is called guaranteed


def test_the_charged_epsilon_is_labelled_charged_even_if_it_equals_the_budget() -> None:
    whole = plan("s0", budget=Budget(THREE, 1e-5))
    card = card_of([("s0", whole, [VISIT] * 3, "a" * 64)])
    assert card["guarantee"]["epsilon"] == card["epsilon"]["overall"] == THREE
    assert kinds_of(card) == {"charged"}  # no bound for a person with a record at every agent
    assert "composed: charged epsilon" in render_markdown(card)


def test_the_claim_is_the_largest_budget_and_never_less_than_the_charged_epsilon() -> None:
    less = plan("s1", budget=Budget(5.0, 1e-5))
    accounts = [("s0", plan("s0"), [VISIT], "a" * 64), ("s1", less, [VISIT] * 2, "b" * 64)]
    assert card_of(accounts)["guarantee"]["epsilon"] == 8.0
    assert card_of(accounts, promised={"s1": 9.0})["guarantee"]["epsilon"] == 9.0
    # A torn line is charged, and may raise an account above its budget.
    torn = plan("s0", budget=Budget(THREE - 0.1, 1e-5))
    card = card_of([("s0", torn, [VISIT] * 3, "a" * 64)])
    assert card["guarantee"]["epsilon"] == THREE


def test_pure_releases_guarantee_their_sum_whenever_they_stop() -> None:
    pure = plan("s0", event=PureDpEvent(0.5, 1), update=("F",))
    card = card_of([("s0", pure, [PureDpEvent(0.5, 1)] * 3, "a" * 64)])
    assert (card["guarantee"]["epsilon"], card["guarantee"]["delta"]) == (1.5, 0.0)
    assert kinds_of(card) == {"guaranteed"}
    assert "charged" not in render_markdown(card)


def test_numeric_bounds_are_given_only_for_visits_that_were_fixed_in_advance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify, "available", lambda: True)
    monkeypatch.setattr(verify, "pld_bracket", lambda *_: (1.0, 2.0))
    event = PoissonSampledGaussianEvent(2.0, 0.25, 7)  # not used in other tests: bounds are cached
    for planned, upper in ((2, 2.0), (3, None)):
        card = card_of([("s0", plan("s0", event=event), [event] * 2, "a" * 64)], planned=planned)
        numbers = card["agents"][0]["epsilon"]
        assert numbers["pld_upper"] == upper
        assert (numbers["why_no_bounds"] == NOT_FIXED) == (upper is None)


# --- the audit ----------------------------------------------------------------------------------


def claim(card: dict[str, Any], number: float) -> None:
    card["guarantee"]["epsilon"] = number
    card["attack_bounds"] = attack_bounds(number, 1e-5)
    card["sentence"] = guarantee_sentence(card)


def test_an_audit_of_a_stopped_run_refutes_the_charged_epsilon_as_a_claim_but_not_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = write_run(tmp_path, {"s0": 3})
    assert main([str(tmp_path)]) == UNREFUTED
    assert "(8.0000, 1e-05)-DP" in capsys.readouterr().out
    for number in (THREE, 7.99):  # the first is what earlier versions wrote
        claim(card, number)
        write_card(tmp_path, card)
        assert main([str(tmp_path)]) == 1
        shown = " ".join(capsys.readouterr().out.split())
        assert f"the card claims epsilon {number:.6f}, but visits were not exactly" in shown
        assert "guarantee their budget, 8.000000" in shown
    card["planned_visits"] = 3  # the control: planned visits guarantee their cost
    for numbers in (card["epsilon"], *(entry["epsilon"] for entry in card["agents"])):
        numbers["kind"] = "guaranteed"
    claim(card, THREE)
    write_card(tmp_path, card)
    assert main([str(tmp_path)]) == UNREFUTED


def test_numeric_bounds_on_the_card_of_a_stopped_run_are_violated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = write_run(tmp_path, {"s0": 3})
    card["agents"][0]["epsilon"] |= {"pld_lower": 1.0, "pld_upper": 2.0}
    write_card(tmp_path, card)
    assert main([str(tmp_path)]) == 1
    assert "the card has numeric bounds, but visits" in " ".join(capsys.readouterr().out.split())


def test_the_claim_is_the_highest_budget_even_after_it_was_lowered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"s0": 2})
    path = tmp_path / "ledger/s0.jsonl"
    fallen = plan("s0", budget=Budget(4.0, 1e-5))
    account = Account.open(path, fallen, resume=True)
    account.close()
    journal = read_journal(path)
    spent = [("s0", journal.plan, journal.events, journal.head)]
    for promised, status in ((8.0, UNREFUTED), (4.0, 1)):
        write_card(tmp_path, card_of(spent, promised={"s0": promised}))
        assert main([str(tmp_path)]) == status
    assert "their budget, 8.000000" in " ".join(capsys.readouterr().out.split())


def test_the_program_for_auditors_states_that_its_epsilon_is_no_bound_for_a_stopped_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = write_run(tmp_path, {"s0": 3})
    words = "# Visits were not exactly those fixed beforehand, so the claim is the budget"
    main([str(tmp_path), "--dp-event"])
    assert words in capsys.readouterr().out
    card = card_of([("s0", plan("s0"), [VISIT] * 3, card["agents"][0]["ledger_head"])], planned=3)
    write_card(tmp_path, json.loads(json.dumps(card)))
    main([str(tmp_path), "--dp-event"])
    assert words not in capsys.readouterr().out
