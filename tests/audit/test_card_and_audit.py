"""The privacy card is true, and the audit detects a false one.

Real accounts write real ledgers here; only the training is missing, with the files it writes, so
that the best verdict is INCONCLUSIVE (test_audit_tampering.py has complete folders). Each false
card has the true card as its control.
"""

import json
import math
import runpy
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import verify
from accounting.accountants import ZERO_COST, cost_of, epsilon, rdp_epsilon
from accounting.budget import Budget, Guarantee, Nominal, round_up
from accounting.canonical_json import encode, real
from accounting.events import (
    ComposedEvent,
    Event,
    NonPrivateEvent,
    PoissonSampledGaussianEvent,
    PureDpEvent,
)
from accounting.ledger import Account, AccountPlan, read_journal
from privssl.audit import claim_verification
from privssl.audit.__main__ import audit, main
from privssl.errors import PrivacyError
from privssl.privacy.card_text import guarantee_sentence, headline_sentence, render_markdown
from privssl.privacy.former_ledgers import former_ledgers, former_sentences
from privssl.privacy.privacy_card import AgentSpend, Release, attack_bounds
from tests.support.card_and_audit import (
    RELEASES,
    VISIT,
    card_of,
    plan,
    write_card,
    write_run,
)
from tests.support.command_line import tree
from tests.support.ledger import rebuilt

UNREFUTED = 3  # ledgers and card agree, but there is no witness


def as_published(agent: str) -> AccountPlan:
    event = ComposedEvent((VISIT, NonPrivateEvent("F and D are trained without noise")))
    return plan(agent, scope="as_published", update=("F", "D", "G"), protect=("G",), event=event)


def write_traces(run: Path, card: dict[str, Any], status: str = "finished") -> None:
    """The files beside the card: results, the page for people, and a checkpoint."""
    claim = {name: card[name] for name in ("guarantee", "nominal_epsilon", "scope")}
    (run / "results.json").write_text(json.dumps({"status": status, "privacy": claim}))
    (run / "privacy.md").write_text(render_markdown(card))
    extra: dict[str, Any] = {"round": 3}
    for path in (run / "ledger").glob("*.jsonl"):
        journal = read_journal(path)
        extra[f"ledger_seq/{path.stem}"] = journal.seq
        extra[f"ledger_head/{path.stem}"] = journal.head
    folder = run / "checkpoints" / "round_00003"
    folder.mkdir(parents=True)
    about = {"format": 1, "round": 3, "extra": {"mapping": extra}}
    (folder / "snapshot.json").write_text(json.dumps(about))


# --- the card ----------------------------------------------------------------------------------


def test_the_claim_is_the_largest_epsilon_of_an_agent_and_never_a_sum() -> None:
    short = replace(VISIT, steps=1)
    card = card_of(
        [
            ("s0", plan("s0"), [VISIT] * 3, "a" * 64),
            ("s1", plan("s1", event=short), [short] * 3, "b" * 64),
        ],
        planned=3,
    )
    more, less = epsilon([VISIT] * 3, 1e-5), epsilon([short] * 3, 1e-5)
    assert [entry["epsilon"]["value"] for entry in card["agents"]] == pytest.approx([more, less])
    assert card["guarantee"]["epsilon"] == card["epsilon"]["overall"] == pytest.approx(more)
    assert card["guarantee"]["covers"] == ["F"]  # other networks are not named
    all_of_them = epsilon([VISIT, short] * 3, 1e-5)
    assert card["epsilon"]["person_across_agents"] == pytest.approx(all_of_them)
    each = [rdp_epsilon([event], 1e-5) for event in (VISIT, short)]
    assert card["epsilon"]["paper_sum"] == pytest.approx(3 * sum(each))
    assert card["nominal_epsilon"] is None
    assert card["agents"][0]["visits"] == 3
    json.dumps(card, allow_nan=False)


@pytest.mark.usefixtures("costs_of_users")
def test_a_plan_fixed_in_advance_has_a_tighter_headline_and_another_plan_has_none() -> None:
    event = PoissonSampledGaussianEvent(noise_multiplier=2.0, sample_rate=16 / 34, steps=20)
    usual = plan("s0", event=event, budget=Budget(20.0, 1e-5))
    card = card_of([("s0", usual, [event], "a" * 64)], planned=1)
    # specification, section 2.6: 5.3484 by PLD, 5.8648 by RDP at Opacus' orders
    assert card["guarantee"]["epsilon"] == pytest.approx(5.8648, abs=0.01)
    if verify.available():
        assert card["headline"] == {
            "kind": "guaranteed", "epsilon": pytest.approx(5.3484, abs=1e-3), "by": "PLD",
        }  # fmt: skip
        assert "epsilon is 5.3484" in (headline_sentence(card) or "")
    smaller = replace(event, steps=10)  # an interrupted visit: the plan did not fix it
    cut_short = card_of([("s0", usual, [event, smaller], "a" * 64)], planned=2)
    assert cut_short["headline"] is None
    assert card_of([("s0", usual, [event], "a" * 64)], planned=2)["headline"] is None  # stopped
    assert card_of([("s0", usual, [event], "a" * 64)])["headline"] is None
    shared = card_of([("s0", usual, [event], "a" * 64)], planned=1, this_run={"s0": 1.0})
    assert shared["headline"] is None  # other runs may have been planned after looking at results
    assert headline_sentence(shared) is None


@pytest.mark.usefixtures("costs_of_users")
def test_the_three_sums_of_epsilons_equal_those_of_the_specification() -> None:
    # docs/privacy.md: q 16/34, sigma 4, 10 steps, 3 agents, 20 rounds: the paper's sum is
    # 103.4; one agent composed is 8.21 by PLD and 8.95 by RDP at dp-accounting's orders; all
    # composed as one data set 16.1 and 17.8. Opacus' fractional orders are tighter.
    event = PoissonSampledGaussianEvent(noise_multiplier=4.0, sample_rate=16 / 34, steps=10)
    generous = Budget(epsilon=200.0, delta=1e-5)
    card = card_of(
        [
            (a, plan(a, event=event, budget=generous), [event] * 20, "a" * 64)
            for a in ("s0", "s1", "s2")
        ],
        planned=20,
    )
    assert 8.21 < card["guarantee"]["epsilon"] < 8.95
    assert 16.1 < card["epsilon"]["person_across_agents"] < 17.8
    assert card["epsilon"]["paper_sum"] == pytest.approx(103.4, abs=0.05)
    if verify.available():  # by PLD 8.21
        assert card["agents"][0]["epsilon"]["pld_lower"] == pytest.approx(8.21, abs=0.02)
        assert card["agents"][0]["epsilon"]["pld_upper"] == pytest.approx(8.21, abs=0.01)


def test_the_sentence_of_a_guarantee_names_unit_neighbours_observer_and_exclusions() -> None:
    accounts = [("s0", plan("s0"), [VISIT] * 3, "a" * 64)]
    sentence = guarantee_sentence(card_of(accounts, planned=3))
    three = epsilon([VISIT] * 3, 1e-5)
    assert f"({round_up(three)}, 1e-05)-DP" in sentence
    for words in (
        "for every support agent",
        "one labelled record",
        "controls the server, all query agents and all other support agents",
        "no trusted aggregator",
        "Not covered: data of query agents, people with more than one record, timing",
    ):
        assert words in sentence


def test_a_printed_epsilon_is_never_rounded_down() -> None:
    for number in (0.0, 1e-9, 7.61231, 7.6123, 1.00005, 12.99995, 1 / 3):
        assert number <= float(round_up(number)) <= number + 1e-4 + 1e-9


def test_a_printed_delta_is_never_rounded_down() -> None:
    claim = Guarantee(8.0, 1e-5, "record", "zero_out", ("F",), "largest agent")
    for delta in (1e-5, 1.0000004e-5, 9.9999951e-6, 1 / 3e5):
        stated = str(replace(claim, delta=delta)).split("(8.0000, ")[1].split(")-DP")[0]
        nominal = str(Nominal(8.0, delta, ("G",), ("F",))).split("(delta ")[1].split(")")[0]
        assert delta <= float(stated) == float(nominal) <= delta * (1 + 1e-5)
    assert "(8.0000, 1e-05)-DP" in str(claim)
    assert float(f"{1.0000004e-5:g}") < 1.0000004e-5  # the control: six digits are too few


def test_a_card_lists_held_out_rows_and_the_split_as_not_protected() -> None:
    listed = " ".join(card_of([("s0", plan("s0"), [VISIT], "a" * 64)])["not_protected"])
    assert "Validation and test rows: metrics on them have no noise." in listed
    assert "before the run: settings, classes, a split by class." in listed


def test_the_published_scheme_gets_a_nominal_number_and_no_guarantee() -> None:
    published = as_published("s0")
    card = card_of([("s0", published, [published.event] * 3, "a" * 64)])
    nominal = epsilon([VISIT] * 3, 1e-5)
    assert card["guarantee"] is None
    assert card["nominal_epsilon"] == pytest.approx(nominal)
    assert card["attack_bounds"] is None
    assert card["kind"] == card["agents"][0]["epsilon"]["kind"] == "nominal"
    sentence = guarantee_sentence(card)
    assert sentence.startswith(f"NOMINAL epsilon = {round_up(nominal)}")
    assert sentence.endswith("There is no differential-privacy guarantee for any record.")
    assert "F and D are trained on the labelled records without noise" in sentence
    page = render_markdown(card)
    assert "GUARANTEE:" not in page
    assert "is right at most" not in page
    for line in page.splitlines():  # every epsilon on the page is called nominal
        assert "epsilon" not in line.lower() or "nominal" in line.lower()


def test_a_run_without_privacy_states_that_nothing_is_guaranteed() -> None:
    assert "nothing is guaranteed for any record" in guarantee_sentence(None)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"releases": [("F", "not covered", "")]}, "not covered"),
        ({"releases": []}, "not covered"),
        ({"scope": "as_published"}, "scope sound"),
        ({"delta": 1e-6}, "delta"),
    ],
)
def test_a_card_that_contradicts_its_accounts_is_refused(changes: Any, why: str) -> None:
    with pytest.raises(PrivacyError, match=why):
        card_of([("s0", plan("s0"), [VISIT], "a" * 64)], **changes)


def test_a_card_names_each_agent_once_and_has_one_kind_of_plan() -> None:
    account: AgentSpend = ("s0", plan("s0"), [VISIT], "a" * 64)
    for accounts in ([], [account, account], [("s1", *account[1:])]):
        with pytest.raises(PrivacyError):
            card_of(accounts)
    other = plan("s1", update=("G",), protect=("G",))
    with pytest.raises(PrivacyError, match="differ"):
        card_of([account, ("s1", other, [VISIT], "b" * 64)])
    published = as_published("s0")
    with pytest.raises(PrivacyError, match="nothing it sends is covered"):
        card_of([("s0", published, [], "a" * 64)], releases=[("G", "covered", "noise")])


def test_the_bounds_on_attacks_equal_those_of_the_specification() -> None:
    # docs/privacy.md: epsilon 4, 8, 16 at delta 1e-5.
    for eps, accuracy, rate in [(4.0, 0.982, 0.55), (8.0, 0.9997, 1.0), (16.0, 1.0, 1.0)]:
        bounds = attack_bounds(eps, 1e-5)
        assert bounds["balanced_accuracy"] == pytest.approx(accuracy, abs=5e-4)
        assert bounds["tpr_at_1_percent_fpr"] == pytest.approx(rate, abs=5e-3)
    nothing = attack_bounds(0.0, 1e-5)  # epsilon 0: right half of the time, 1% at 1%
    assert nothing["balanced_accuracy"] == pytest.approx(0.5, abs=1e-5)
    assert nothing["tpr_at_1_percent_fpr"] == pytest.approx(0.01, abs=2e-5)
    assert attack_bounds(math.inf, 1e-5)["balanced_accuracy"] == 1.0


def test_the_page_for_people_contains_every_release_and_every_exclusion() -> None:
    releases: list[Release] = [*RELEASES, ("log | line", "not covered", "a\nb")]
    card = card_of([("s0", plan("s0"), [VISIT], "a" * 64)], releases=releases)
    page = render_markdown(card)
    assert card["sentence"] in page
    assert "| log / line | not covered | a b |" in page
    assert all(sentence in page for sentence in card["not_protected"])
    assert "% of the members at 1% false alarms" in page


def test_without_the_second_library_the_card_gives_the_reason_for_missing_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify, "available", lambda: False)
    event = PoissonSampledGaussianEvent(noise_multiplier=2.0, sample_rate=16 / 34, steps=1)
    card = card_of([("s0", plan("s0", event=event), [event], "a" * 64)], planned=1)
    numbers = card["agents"][0]["epsilon"]
    assert numbers["pld_lower"] is None
    assert "pip install dp-accounting" in numbers["why_no_bounds"]
    assert 1.30248870 <= numbers["prv"] <= 1.30248870 + 0.02  # exact value of one sampled step


# --- the audit ---------------------------------------------------------------------------------


def test_honest_ledgers_and_their_card_are_not_refuted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = write_run(tmp_path, {"s0": 3, "s1": 2})
    assert main([str(tmp_path)]) == UNREFUTED
    shown = capsys.readouterr().out
    assert "INCONCLUSIVE" in shown
    assert round_up(card["guarantee"]["epsilon"]) in shown


def test_honest_mixed_events_are_not_refuted(tmp_path: Path) -> None:
    census = ComposedEvent((PureDpEvent(0.5, 1), PoissonSampledGaussianEvent(4.0, 0.4, 5)))
    write_run(tmp_path, {"s0": 2}, lambda agent: plan(agent, event=census))
    assert main([str(tmp_path)]) == UNREFUTED


def test_epsilon_zero_of_a_run_that_read_no_row_is_not_refuted(tmp_path: Path) -> None:
    card = write_run(tmp_path, {"s0": 0}, lambda a: plan(a, budget=Budget(0.0, 1e-5)))
    assert card["guarantee"]["epsilon"] == 0
    assert main([str(tmp_path)]) == UNREFUTED


def test_the_json_report_is_for_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"s0": 3})
    assert main([str(tmp_path), "--json"]) == UNREFUTED
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "inconclusive"
    assert any("config.yaml" in doubt for doubt in report["doubts"])
    [agent] = report["agents"]
    assert agent["recomputed"] == pytest.approx(epsilon([VISIT] * 3, 1e-5))
    assert agent["method"] == "exact"
    assert agent["problems"] == []
    if verify.available():
        assert agent["pld_lower"] <= agent["recomputed"]
        # the card does not state that visits were fixed in advance
        assert agent["pld_upper"] is None
        planned_run(tmp_path / "planned", s0=3)
        main([str(tmp_path / "planned"), "--json"])
        [agent] = json.loads(capsys.readouterr().out)["agents"]
        assert agent["pld_lower"] <= agent["recomputed"] <= agent["pld_upper"] + 1e-3


def lie(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda card: card.update(changes)


def lower_all_claims(card: dict[str, Any]) -> None:
    """Claim 1% less everywhere, with a matching sentence: only recomputation can detect it."""
    for entry in card["agents"]:
        entry["epsilon"]["value"] *= 0.99
    card["epsilon"]["overall"] *= 0.99
    card["guarantee"]["epsilon"] *= 0.99
    card["sentence"] = guarantee_sentence(card)


FALSE_CLAIMS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "claims one percent less": (lower_all_claims, "the card claims"),
    "claims a little less for the agent that spent less": (
        lambda card: card["agents"][1]["epsilon"].update(value=0.9995 * epsilon([VISIT] * 2, 1e-5)),
        "s1: the card claims epsilon",
    ),
    "says a smaller number in words": (lie(sentence="GUARANTEE: (0.1, 1e-05)-DP"), "sentence"),
    "claims less for all than for one": (
        lambda card: card["epsilon"].update(overall=0.1),
        "for all",
    ),
    "names another delta": (lie(delta=1e-9), "delta"),
    "names another scope": (lie(scope="as_published"), "contradict"),
    "guarantees a person": (lambda card: card["guarantee"].update(unit="person"), "unit"),
    "names another ledger": (
        lambda c: c["agents"][0].update(ledger_head="f" * 64),
        "another ledger",
    ),
    "leaves an agent out": (lambda card: card["agents"].pop(), "does not name it"),
    "names an agent without ledger": (
        lambda card: card["agents"].append({**card["agents"][0], "agent": "s9"}),
        "its ledger is missing",
    ),
    "forgets a network": (lie(update=["F", "G"]), "update"),
    "has a headline below the certified bound": (
        lambda card: card.update(headline={"kind": "guaranteed", "epsilon": 0.1, "by": "PLD"}),
        "the headline is below",
    ),
    "drops the guarantee": (lie(guarantee=None, nominal_epsilon=1.0), "contradict"),
}


@pytest.mark.parametrize("how", FALSE_CLAIMS)
def test_a_card_with_a_false_claim_is_violated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    card = write_run(tmp_path, {"s0": 3, "s1": 2})
    change, why = FALSE_CLAIMS[how]
    change(card)
    write_card(tmp_path, card)
    assert main([str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "VIOLATED" in shown
    assert why in shown


def test_a_card_that_omits_a_visit_is_violated(tmp_path: Path) -> None:
    write_run(tmp_path, {"s0": 3}, card_events=lambda events: events[:-1])
    assert main([str(tmp_path)]) == 1


def shrink(record: dict[str, Any], field: str) -> dict[str, Any]:
    """A ledger line in which the noise or the rate of each event is one percent smaller."""
    if "event" not in record:
        return record
    event = dict(record["event"])
    event[field] = real(0.99 * float.fromhex(event[field]["hex"]))
    return {**record, "event": event}


def honest_sums(
    lines: list[dict[str, Any]], event: PoissonSampledGaussianEvent
) -> list[dict[str, Any]]:
    """The lines with the epsilon that this many events cost."""
    done, out = 0, []
    for line in lines:
        done += line["type"] == "reserve"
        after = {"eps_after": real(epsilon([event] * done, 1e-5))} if "eps_after" in line else {}
        out.append({**line, **after})
    return out


@pytest.mark.parametrize("how", ["edited", "chain rebuilt", "chain and sums rebuilt"])
@pytest.mark.parametrize("field", ["noise_multiplier", "sample_rate"])
def test_reduced_noise_in_a_ledger_is_violated_and_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    how: str,
) -> None:
    monkeypatch.setattr(verify, "available", lambda: False)  # the second library is not needed
    event = PoissonSampledGaussianEvent(noise_multiplier=4.0, sample_rate=0.25, steps=5)
    write_run(tmp_path, {"s0": 3}, lambda agent: plan(agent, event=event))
    assert main([str(tmp_path)]) == 3  # not refuted, but there is no config to compare with
    path = tmp_path / "ledger/s0.jsonl"
    lines = [shrink(json.loads(text), field) for text in path.read_bytes().splitlines()]
    if how == "edited":
        path.write_bytes(b"".join(encode(line) + b"\n" for line in lines))
    elif how == "chain rebuilt":
        path.write_bytes(rebuilt(lines))
    else:
        less = replace(event, **{field: 0.99 * getattr(event, field)})
        path.write_bytes(rebuilt(honest_sums(lines, less)))
        # The ledger is that of another run, so only other files can contradict it.
        assert read_journal(path).problems == []

    capsys.readouterr()
    assert main([str(tmp_path)]) == 1
    assert how != "edited" or "s0: ledger, line 2: " in capsys.readouterr().out


def test_a_disagreement_of_the_second_library_is_violated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"s0": 3})
    truth = rdp_epsilon([VISIT] * 3, 1e-5)
    monkeypatch.setattr(verify, "available", lambda: True)
    monkeypatch.setattr(verify, "rdp_epsilon", lambda *_: rdp_epsilon([VISIT] * 3, 1e-5, (2.0,)))
    monkeypatch.setattr(verify, "pld_bracket", lambda *_: (truth + 0.1, truth + 0.2))
    assert main([str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "by dp-accounting" in shown
    assert "certified lower bound" in shown


def test_ctrl_c_ends_an_audit_without_a_verdict_or_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"s0": 3})
    before = tree(tmp_path)
    monkeypatch.setattr(
        claim_verification, "check_claim", lambda _: signal.raise_signal(signal.SIGINT)
    )
    assert main([str(tmp_path)]) == 130
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "Interrupted; nothing was changed. There is no verdict.\n"
    assert tree(tmp_path) == before


def test_the_published_scheme_has_no_guarantee_to_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"s0": 3}, as_published)
    assert main([str(tmp_path)]) == 4
    assert "NOMINAL epsilon" in capsys.readouterr().out
    ledger = tmp_path / "ledger" / "s0.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b"round 0", b"round 9"))
    assert main([str(tmp_path)]) == 1  # a damaged ledger is worse


def test_a_run_without_privacy_has_no_guarantee_to_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text("{}")
    assert main([str(tmp_path)]) == 4
    assert "nothing is guaranteed" in capsys.readouterr().out


def test_a_run_without_a_written_claim_is_inconclusive(tmp_path: Path) -> None:
    write_run(tmp_path, {"s0": 3})
    (tmp_path / "privacy.json").unlink()
    assert main([str(tmp_path)]) == 3


def test_an_unfinished_line_that_would_exceed_the_budget_is_inconclusive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Four visits cost less than the budget and five more: half a line of the fifth is written.
    budget = Budget((epsilon([VISIT] * 4, 1e-5) + epsilon([VISIT] * 5, 1e-5)) / 2, 1e-5)
    write_run(tmp_path, {"s0": 4}, lambda a: plan(a, budget=budget))
    with (tmp_path / "ledger" / "s0.jsonl").open("ab") as file:
        file.write(b'{"prev":"')
    assert main([str(tmp_path)]) == 3
    assert "unfinished line" in capsys.readouterr().out


def damaged(text: str) -> Callable[[Path], object]:
    return lambda run: (run / "privacy.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda run: None, "not the folder of a run"),
        (damaged("{"), "cannot be read"),
        (damaged('{"a":NaN}'), "NaN"),
        (damaged('{"a":1,"a":1}'), "twice"),
        (damaged("{}"), "not a privacy card"),
        (damaged('{"scope":"sound","guarantee":3,"delta":1,"sentence":""}'), "not a privacy card"),
    ],
)
def test_a_folder_that_cannot_be_audited_is_a_user_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object], why: str
) -> None:
    damage(tmp_path)
    assert main([str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert why in shown.err
    assert "Traceback" not in shown.err + shown.out


# --- false cards ---------------------------------------------------------------------------------


def entry_twice(card: dict[str, Any]) -> None:
    card["agents"].append(dict(card["agents"][0]))


def small_bound(card: dict[str, Any]) -> None:
    """A bound by another method, which the audit does not compute and so cannot compare."""
    for entry in card["agents"]:
        entry["epsilon"].update(prv=None if entry["epsilon"]["prv"] else 0.1, pld_lower=None)
        entry["epsilon"]["pld_upper"] = None if entry["epsilon"]["prv"] else 0.1


def another_headline(card: dict[str, Any]) -> None:
    truth = max(entry["epsilon"]["value"] for entry in card["agents"])
    card["headline"] = {"kind": "guaranteed", "epsilon": 1.5 * truth, "by": "PLD"}


def widened(card: dict[str, Any]) -> None:
    card["guarantee"]["covers"].append("the data of query agents")
    card["sentence"] = guarantee_sentence(card)


def release_widened(card: dict[str, Any]) -> None:
    card["releases"].append({"name": "all of it", "status": "covered", "why": "so I say"})
    card["guarantee"]["covers"].append("all of it")
    card["sentence"] = guarantee_sentence(card)


def within(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(card: dict[str, Any]) -> None:
        place: Any = card
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return change


#: Page and results repeat each false card, so only the ledgers can contradict it.
FALSE_CARDS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "covers more": (widened, "guarantee.covers"),
    "calls a new release covered": (release_widened, "all of it is called covered"),
    "calls the network post-processing": (
        within("releases", 0, "status", value="post-processing"),
        "F is trained on labelled rows",
    ),
    "lists a release twice": (
        lambda card: card["releases"].append(card["releases"][1]),
        "listed twice",
    ),
    "bounds a person lower": (
        within("epsilon", "person_across_agents", value=0.1),
        "epsilon.person_across_agents",
    ),
    "adds up to less": (within("epsilon", "paper_sum", value=0.1), "epsilon.paper_sum"),
    "bounds attacks lower": (
        within("attack_bounds", "balanced_accuracy", value=0.5),
        "attack_bounds.balanced_accuracy",
    ),
    "counts fewer visits": (within("agents", 0, "visits", value=1), "agents.0.visits"),
    "has more visits left": (within("agents", 1, "visits_left", value=99), "agents.1.visits_left"),
    "has a larger budget": (within("agents", 0, "budget", "epsilon", value=80.0), "budget.epsilon"),
    "excludes nothing": (within("not_protected", value=[]), "not_protected"),
    "sends less": (
        lambda card: card["not_sent"].append("anything at all"),
        "not_sent",
    ),
    "hides row counts": (within("record_counts", value="private"), "record_counts"),
    "names an agent twice": (entry_twice, "needs every account once"),
    "has a headline that is not its own": (another_headline, "headline"),
    "has a numeric bound below its costs": (small_bound, "numeric bound of s0 is below"),
    "has a headline of visits that nobody planned": (
        within("planned_visits", value=None),
        "headline",
    ),
    "says that other runs spent the rest": (
        within("this_run", value={"s0": 0.1, "s1": 0.1}),
        "this run alone spent",
    ),
}


def planned_run(run: Path, **visits: int) -> dict[str, Any]:
    """A run that finished as planned, with a headline and all its files."""
    write_run(run, visits)
    accounts: list[AgentSpend] = []
    for agent in visits:
        journal = read_journal(run / "ledger" / f"{agent}.jsonl")
        accounts.append((agent, journal.plan, journal.events, journal.head))
    card = card_of(accounts, planned=max(visits.values()))
    write_card(run, card)
    write_traces(run, card)
    return card


def test_a_page_results_and_a_checkpoint_that_agree_are_not_refuted(tmp_path: Path) -> None:
    card = planned_run(tmp_path, s0=2, s1=2)  # the control of all tests that follow
    if verify.available():
        assert card["headline"] is not None
    assert main([str(tmp_path)]) == UNREFUTED


@pytest.mark.parametrize("how", FALSE_CARDS)
def test_a_card_that_does_not_follow_from_its_ledgers_is_violated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    if "headline" in how and not verify.available():
        pytest.skip("without dp-accounting full batches have no headline")
    card = planned_run(tmp_path, s0=2, s1=2)
    change, why = FALSE_CARDS[how]
    change(card)
    shutil.rmtree(tmp_path / "checkpoints")
    write_card(tmp_path, card)
    write_traces(tmp_path, card)
    assert main([str(tmp_path)]) == 1
    assert why in " ".join(capsys.readouterr().out.split())


def rewrite_card(run: Path) -> None:
    """Write card, page and results for the present ledgers; checkpoints stay."""
    accounts: list[AgentSpend] = []
    for path in sorted((run / "ledger").glob("*.jsonl")):
        journal = read_journal(path)
        accounts.append((path.stem, journal.plan, journal.events, journal.head))
    card = card_of(accounts)
    kept = (run / "checkpoints").rename(run / "kept")
    write_card(run, card)
    write_traces(run, card)
    shutil.rmtree(run / "checkpoints")
    kept.rename(run / "checkpoints")


def cut_to_the_first_visit(run: Path) -> None:
    for path in (run / "ledger").glob("*.jsonl"):
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))


def without_an_agent(run: Path) -> None:
    (run / "ledger" / "s1.jsonl").unlink()


def with_another_history(run: Path) -> None:
    """A ledger with as many lines and another history."""
    path = run / "ledger" / "s1.jsonl"
    path.unlink()
    account = Account.open(path, plan("s1"), resume=False)
    for number in range(2):
        with account.spend(replace(VISIT, steps=1), visit=f"round {number}"):
            pass
    account.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (cut_to_the_first_visit, "the ledger of s0 was cut or replaced: checkpoint round_00003"),
        (without_an_agent, "the ledger of s1 is missing: checkpoint round_00003 records entry 4"),
        (with_another_history, "the ledger of s1 was cut or replaced"),
    ],
)
def test_a_checkpoint_contradicts_a_cut_ledger_with_a_rewritten_card(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
    why: str,
) -> None:
    planned_run(tmp_path, s0=2, s1=2)
    rewrite_card(tmp_path)
    assert main([str(tmp_path)]) == UNREFUTED  # the control: a rewritten card alone is true
    change(tmp_path)
    rewrite_card(tmp_path)
    assert main([str(tmp_path)]) == 1
    assert why in " ".join(capsys.readouterr().out.split())
    shutil.rmtree(tmp_path / "checkpoints")
    assert main([str(tmp_path)]) == UNREFUTED  # the control: no other file contradicts it


def test_a_run_without_ledgers_and_card_is_violated(tmp_path: Path) -> None:
    planned_run(tmp_path, s0=2)
    shutil.rmtree(tmp_path / "ledger")
    (tmp_path / "privacy.json").unlink()
    assert main([str(tmp_path)]) == 1


def test_an_unreadable_checkpoint_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned_run(tmp_path, s0=2)
    (tmp_path / "checkpoints" / "round_00003" / "snapshot.json").write_text('{"extra": NaN}')
    assert main([str(tmp_path)]) == UNREFUTED
    assert "in doubt: checkpoint round_00003 cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("privacy.md", "Nothing was leaked.", "privacy.md is not what privacy.json says"),
        (
            "results.json",
            '{"status": "finished", "privacy": {"guarantee": null, "scope": "none"}}',
            "results.json claims something else",
        ),
        ("results.json", '{"status": "interrupted"}', "all planned visits took place"),
    ],
)
def test_a_page_or_results_that_differ_from_the_card_are_violated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, why: str
) -> None:
    planned_run(tmp_path, s0=2)
    (tmp_path / name).write_text(text)
    assert main([str(tmp_path)]) == 1
    assert why in " ".join(capsys.readouterr().out.split())


def visits_after_the_card(run: Path, count: int, status: str | None) -> dict[str, Any]:
    """A run whose first agent was charged for more visits after its card was written."""
    card = write_run(run, {"s0": 3, "s1": 3})
    account = Account.open(run / "ledger" / "s0.jsonl", plan("s0"), resume=True)
    for number in range(count):
        with account.spend(VISIT, visit=f"later {number}"):
            pass
    account.close()
    if status is not None:
        claim = {name: card[name] for name in ("guarantee", "nominal_epsilon", "scope")}
        (run / "results.json").write_text(json.dumps({"status": status, "privacy": claim}))
    return card


@pytest.mark.parametrize("status", ["interrupted", None])  # None: stopped before its results
def test_a_stopped_run_with_visits_after_its_card_is_inconclusive_and_should_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str | None
) -> None:
    visits_after_the_card(tmp_path, 2, status)
    assert main([str(tmp_path)]) == 3
    shown = " ".join(capsys.readouterr().out.split())
    all_of_them = epsilon([VISIT] * 5, 1e-5)
    assert f"after the card was written; all of them cost epsilon {all_of_them:.6f}" in shown
    assert "Resume the run: it writes a new card" in shown
    assert "INCONCLUSIVE" in shown


@pytest.mark.parametrize("status", ["finished", "budget_exhausted"])
def test_a_finished_run_with_visits_after_its_card_is_violated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str
) -> None:
    visits_after_the_card(tmp_path, 2, status)
    assert main([str(tmp_path)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "violated: s0: 2 visits were charged after the card was written" in shown
    assert "Resume" not in shown


@pytest.mark.parametrize("status", ["finished", "interrupted", None])
def test_a_run_without_visits_after_its_card_is_not_refuted_however_it_ended(
    tmp_path: Path, status: str | None
) -> None:
    visits_after_the_card(tmp_path, 0, status)
    assert main([str(tmp_path)]) == UNREFUTED


def test_the_card_of_a_stopped_run_is_checked_against_the_ledger_of_its_time(
    tmp_path: Path,
) -> None:
    # Later visits are no excuse.
    card = visits_after_the_card(tmp_path, 2, "interrupted")
    lower_all_claims(card)
    write_card(tmp_path, card)
    assert main([str(tmp_path)]) == 1


def test_the_command_runs_as_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["privssl.audit", str(tmp_path), "--empirical"])
    monkeypatch.delitem(sys.modules, "privssl.audit.__main__")  # `python -m` imports it again
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("privssl.audit", run_name="__main__", alter_sys=True)
    assert ended.value.code == 2
    assert "not the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--prove-it"], ["--dp-event", "--json"]])
def test_unknown_or_conflicting_flags_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), *flags])
    assert ended.value.code == 2
    assert flags[-1] in capsys.readouterr().err


def test_a_guarantee_needs_a_known_neighbour_relation() -> None:
    with pytest.raises(KeyError):
        str(Guarantee(1.0, 1e-5, "record", "replace_one", ("F",), "largest agent"))  # type: ignore[arg-type]


# --- the sum as in the paper -------------------------------------------------------------------

# 20 full batches of little noise, at a delta at which one alone has epsilon 0.
QUIET = PoissonSampledGaussianEvent(noise_multiplier=40.0, sample_rate=1.0, steps=1)
LARGE_DELTA = 0.019


def test_the_sum_as_in_the_paper_is_at_least_the_composed_epsilon_at_a_large_delta() -> None:
    loud = plan("s0", budget=Budget(8.0, LARGE_DELTA), event=QUIET)
    card = card_of([("s0", loud, [QUIET] * 20, "a" * 64)], delta=LARGE_DELTA)
    composed = card["epsilon"]["overall"]
    assert card["epsilon"]["paper_sum"] >= composed > 0
    assert 20 * epsilon([QUIET], LARGE_DELTA) < composed  # control: exact values added up


@given(
    events=st.lists(
        st.one_of(
            st.builds(
                PoissonSampledGaussianEvent,
                st.floats(0.5, 100.0),
                st.sampled_from([0.01, 0.3, 1.0]),
                st.integers(1, 20),
            ),
            st.builds(PureDpEvent, st.floats(0.001, 2.0), st.integers(1, 3)),
        ),
        max_size=5,
    ),
    repeats=st.integers(1, 20),
    delta=st.sampled_from([1e-9, 1e-5, 1e-3, 0.019, 0.3]),
)
@settings(max_examples=60)
def test_no_list_of_releases_sums_to_less_than_its_composed_epsilon(
    events: list[Event], repeats: int, delta: float
) -> None:
    total = math.fsum(cost_of([e]).summable_epsilon(delta) for e in events * repeats)
    assert total >= epsilon(events * repeats, delta) * (1 - 1e-9)


def test_pure_releases_have_their_sum_as_epsilon_at_delta_zero() -> None:
    once = cost_of([PureDpEvent(0.25, 1)])
    assert once.summable_epsilon(0) == 0.25
    assert (once + once).summable_epsilon(0) == (once + once).epsilon(0) == 0.5
    assert ZERO_COST.summable_epsilon(1e-5) == 0


# --- ledgers of replaced runs ------------------------------------------------------------------


def ledger_beside(run: Path, number: int, agent: str, visits: int) -> Path:
    """The ledger of a replaced run, as run.overwrite=true keeps it."""
    path = run.with_name(f"{run.name}.ledger-{number:03d}") / f"{agent}.jsonl"
    account = Account.open(path, plan(agent), resume=False, run=f"former{number}")
    for visit in range(visits):
        with account.spend(VISIT, visit=f"round {visit}"):
            pass
    account.close()
    return path


@pytest.fixture
def replacing(tmp_path: Path) -> Path:
    """A run in a folder that held two runs before; its card names their ledgers."""
    run = tmp_path / "run"
    ledger_beside(run, 1, "s0", 3)
    ledger_beside(run, 2, "s0", 1)
    write_run(run, {"s0": 2})
    journal = read_journal(run / "ledger/s0.jsonl")
    known = {"s0": journal}
    spend = [("s0", journal.plan, journal.events, journal.head)]
    card = card_of(spend, former=former_ledgers(run, known), planned=2)
    write_card(run, card)
    write_traces(run, card)
    return run


def test_the_card_names_former_ledgers_with_their_spent_epsilon(replacing: Path) -> None:
    card = json.loads((replacing / "privacy.json").read_text())
    found = {
        entry["ledger"]: (entry["agent"], entry["epsilon"]) for entry in card["former_ledgers"]
    }
    assert found == {
        "run.ledger-001": ("s0", pytest.approx(epsilon([VISIT] * 3, 1e-5))),
        "run.ledger-002": ("s0", pytest.approx(epsilon([VISIT], 1e-5))),
    }
    page = (replacing / "privacy.md").read_text()
    three = round_up(epsilon([VISIT] * 3, 1e-5))
    assert f"run.ledger-001: s0 epsilon {three} of 8 at delta 1e-05" in page
    assert [entry["budget"] for entry in card["former_ledgers"]] == [8.0, 8.0]
    assert "epsilons and deltas add up" in page
    assert "all it sends in this run (F)" in card["sentence"]
    assert audit(replacing).problems == []


def omit(card: dict[str, Any]) -> None:
    del card["former_ledgers"][0]


def halve(card: dict[str, Any]) -> None:
    card["former_ledgers"][0]["epsilon"] /= 2


@pytest.mark.parametrize("lie", [omit, halve])
def test_the_audit_recomputes_former_ledgers(
    replacing: Path, lie: Callable[[dict[str, Any]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    card = json.loads((replacing / "privacy.json").read_text())
    lie(card)
    write_card(replacing, card)
    (replacing / "privacy.md").write_text(render_markdown(card))
    assert main([str(replacing)]) == 1
    assert "what the ledgers of replaced runs say" in " ".join(capsys.readouterr().out.split())


def test_a_missing_former_ledger_is_noted(
    replacing: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(replacing.with_name("run.ledger-001"))
    assert main([str(replacing)]) != 1
    assert "run.ledger-001, the ledger of a replaced run, is not" in capsys.readouterr().out


def test_a_damaged_former_ledger_has_no_epsilon(tmp_path: Path) -> None:
    path = ledger_beside(tmp_path / "run", 1, "s0", 2)
    path.write_bytes(path.read_bytes().replace(b"round 0", b"round 7"))
    [entry] = former_ledgers(tmp_path / "run", {})
    assert entry["epsilon"] is entry["delta"] is entry["budget"] is None
    card = card_of([("s0", plan("s0"), [VISIT], "a" * 64)], former=[entry])
    assert "s0 damaged, so what it spent is unknown" in render_markdown(card)


def test_a_nominal_epsilon_of_a_replaced_run_is_not_added_to_a_guarantee() -> None:
    def said(kind: str) -> str:
        entry = {"ledger": "run.ledger-001", "agent": "s0", "kind": kind, "delta": 1e-5}
        (sentence,) = former_sentences([{**entry, "epsilon": 8.0, "budget": 8.0}], "record")
        return sentence

    assert "add up" not in said("nominal")
    assert "s0 nominal epsilon 8.0000 of 8" in said("nominal")
    assert said("nominal").endswith("for a row that both runs used no sum is a bound.")
    # The control: a guarantee adds up, for rows whose labels both runs protected.
    assert "For a row with its label in both runs, epsilons and deltas add up" in said("guaranteed")
    assert said("guaranteed").endswith("used without its label had no noise there.")


def test_a_former_ledger_that_the_account_continues_is_counted_once(tmp_path: Path) -> None:
    path = ledger_beside(tmp_path / "run", 1, "s0", 2)
    journal = read_journal(path)
    assert former_ledgers(tmp_path / "run", {"s0": journal}) == []
    assert len(former_ledgers(tmp_path / "run", {})) == 1  # control
    ledger_beside(tmp_path / "other run", 1, "s0", 2)
    # ledgers of other folders are not counted
    assert len(former_ledgers(tmp_path / "run", {})) == 1


def test_a_claim_of_an_account_shared_by_several_runs_covers_all_of_them() -> None:
    card = card_of([("s0", plan("s0"), [VISIT], "a" * 64)], this_run={"s0": 1.0})
    assert "all it sends in this run and the earlier runs of its account (F)" in card["sentence"]


def test_a_card_of_another_version_is_refused_by_the_audit(
    replacing: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = json.loads((replacing / "privacy.json").read_text())
    write_card(replacing, {**card, "schema": 1})
    assert main([str(replacing)]) == 2
    assert "Audit it with that version" in capsys.readouterr().err
