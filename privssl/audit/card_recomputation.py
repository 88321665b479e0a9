"""The privacy card made a second time, from the ledgers as the first one knew them.

What follows from the ledgers must come out the same, field by field: within rounding, and for
bounds by numeric composition within what two versions of a library differ by. What does not
follow from them (names, releases, how many visits were planned) is taken from the card, and held
against the plan and the config where they say something about it.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accounting.account_plan import AccountPlan
from accounting.journal_reader import Journal
from privssl.audit.cross_checks import shared_accounts
from privssl.errors import PrivacyError
from privssl.experiment.config import Config
from privssl.privacy.former_ledgers import former_ledgers
from privssl.privacy.privacy_card import privacy_card
from privssl.runs.accounts import releases

Card = dict[str, Any]

_TOLERANCE = 1e-6  # relative: another version of a numeric library may round elsewhere
_NUMERIC = ("pld_lower", "pld_upper", "prv")  # which of them there are depends on the machine
_NUMERIC_TOLERANCE = 1e-3
_BETWEEN_METHODS = 0.05  # epsilon: PRV adds its error of 0.01 and some, PLD half a grid cell
_DERIVED = (
    *("kind", "guarantee", "nominal_epsilon", "unit", "adjacency", "delta", "record_counts"),
    *("update", "protect", "agents", "epsilon", "not_sent", "not_protected", "attack_bounds"),
)


def card_problems(
    run: Path, config: Config | None, card: Card, known: Mapping[str, Journal]
) -> Iterator[str]:
    """Where the card is not the one that follows from the ledgers as it knew them.

    Args:
        card: of the shape that ``audit/claim_verification.py`` has made sure of.
        known: by agent, the journal up to the line that the card names.
    """
    journals = [known.get(entry["agent"]) for entry in card["agents"]]
    found = [journal for journal in journals if journal is not None and journal.plans]
    if not found or len(found) < len(journals):
        return  # a problem of that agent already
    yield from _release_problems(config, card, found[0].plan)
    if card.get("this_run") is None and shared_accounts(run, config) is not None:
        yield "the accounts outlive the run, but the card has no this_run"
    here = former_ledgers(run, known)
    found_here = {entry["ledger"] for entry in here}
    said = [entry for entry in card["former_ledgers"] if entry["ledger"] in found_here]
    if where := _difference("former_ledgers", said, here):
        yield f"the card's {where} is not what the ledgers of replaced runs say"
    task, weights = card.get("task"), card.get("weights")
    try:
        made = privacy_card(
            [
                (entry["agent"], journal.plan, tuple(journal.events), entry["ledger_head"])
                for entry, journal in zip(card["agents"], found, strict=True)
            ],
            scope=card["scope"],
            delta=card["delta"],
            releases=[(r["name"], r["status"], r["why"]) for r in card["releases"]],
            algorithm=card.get("algorithm", ""),
            dataset=card.get("dataset", ""),
            task=None if task is None else (task["classes"], tuple(task["shape"])),
            this_run=card.get("this_run"),
            planned=card.get("planned_visits"),
            former=card["former_ledgers"],
            ledger_problems=card["ledger_problems"],
            weights=weights
            if isinstance(weights, dict)
            else None,  # asked in ``audit/witnesses.py``
        )
    except PrivacyError as error:
        yield f"no true card follows from the ledgers: {error}"
        return
    made = json.loads(json.dumps(made))
    yield from _unknown_keys(card, made)
    for name in _DERIVED:
        if where := _difference(name, card.get(name), made[name]):
            yield f"the card's {where} is not what follows from the ledgers"
    if not _same_headline(card, made):
        yield "the card's headline is not what follows from the ledgers"


def _unknown_keys(card: Card, made: Card) -> Iterator[str]:
    """Fields that no card has: whoever reads them would take for checked what nobody checks."""
    for where, said, known in (
        ("the card", card, made),
        ("the card's task", card.get("task"), ("classes", "shape")),
        ("the card's headline", card.get("headline"), ("kind", "epsilon", "by")),
        *(("a release", release, ("name", "status", "why")) for release in card["releases"]),
    ):
        if isinstance(said, dict) and (strange := sorted(said.keys() - set(known))):
            yield f"{where} says {', '.join(strange):.80}, which this version knows no meaning of"


def _difference(where: str, said: Any, true: Any) -> str | None:
    """The place of the first difference between two values of JSON; None when they agree."""
    if where.endswith(".why_no_bounds"):
        return None  # speaks of the machine
    if where.split(".")[-1] in _NUMERIC and (said is None or true is None):
        return None
    if isinstance(said, dict) and isinstance(true, dict) and said.keys() == true.keys():
        parts = [_difference(f"{where}.{key}", said[key], true[key]) for key in true]
        return next(filter(None, parts), None)
    if isinstance(said, list) and isinstance(true, list) and len(said) == len(true):
        pairs = enumerate(zip(said, true, strict=True))
        return next(filter(None, (_difference(f"{where}.{i}", *pair) for i, pair in pairs)), None)
    if isinstance(true, float) and isinstance(said, int | float) and not isinstance(said, bool):
        if where.split(".")[-1] in _NUMERIC:
            same = math.isclose(said, true, rel_tol=_NUMERIC_TOLERANCE, abs_tol=_NUMERIC_TOLERANCE)
        else:
            same = math.isclose(said, true, rel_tol=_TOLERANCE, abs_tol=1e-12)
        return None if same else where
    return None if type(said) is type(true) and said == true else where


def _same_headline(card: Card, made: Card) -> bool:
    """Whether the headline is the true one, as far as the numeric bounds known here can tell."""
    said, true = card.get("headline"), made["headline"]
    planned, visits = card.get("planned_visits"), [entry["visits"] for entry in made["agents"]]
    as_planned = card.get("this_run") is None and all(count == planned for count in visits)
    if said is not None and not (as_planned and _has_bounds(card)):
        return False
    if said is None or true is None:
        # A machine without the libraries has none; of two that could have one, both have.
        return bool(said == true) or not (_has_bounds(card) and _has_bounds(made))
    if said["kind"] != true["kind"]:
        return False
    # Upper bounds by two methods differ by what they add for their own rounding.
    slack = _NUMERIC_TOLERANCE if said["by"] == true["by"] else _BETWEEN_METHODS
    return math.isclose(said["epsilon"], true["epsilon"], rel_tol=slack, abs_tol=slack)


def _has_bounds(card: Card) -> bool:
    """Whether every agent has an upper bound by numeric composition."""
    keys = ("pld_upper", "prv")
    return all(any(e["epsilon"].get(key) is not None for key in keys) for e in card["agents"])


def _release_problems(config: Config | None, card: Card, plan: AccountPlan) -> Iterator[str]:
    """What the card says leaves an agent, held against what its plan trains with noise."""
    listed = [(r["name"], r["status"], r["why"]) for r in card["releases"]]
    statuses = {name: status for name, status, _ in listed}
    if len(statuses) < len(listed):
        yield "releases: one of them is listed twice"
    covered = {name for name, status in statuses.items() if status == "covered"}
    if unknown := sorted(covered - set(plan.protect)):
        yield f"releases: {', '.join(unknown)} is called covered, but not trained with noise"
    true = "covered" if plan.scope == "sound" else "not covered"
    for name in plan.update:
        if statuses.get(name) != true:
            yield f"releases: {name} is trained on labelled rows, so it is {true}"
    # Only update and protect are read, which both kinds of plan have.
    if config is not None and listed != releases(plan, config):
        yield "releases: not those of the config and the ledger's plan"
