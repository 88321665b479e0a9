"""Recompute the privacy card from the ledgers, up to the lines that it names.

Fields that follow from the ledgers must be equal within rounding, or for bounds by numeric
composition within the difference of library versions. Other fields (names, releases, planned
visits) are taken from the card and compared with the plan and the config.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from accounting.account_plan import AccountPlan
from accounting.journal_reader import Journal
from privssl.audit.run_files import RunFiles
from privssl.errors import PrivacyError
from privssl.experiment.config import Config
from privssl.privacy.card_numbers import NOT_FIXED
from privssl.privacy.card_schema import AgentEntry, PrivacyCard
from privssl.privacy.former_ledgers import former_ledgers
from privssl.privacy.privacy_card import privacy_card
from privssl.runs.accounts import releases

_TOLERANCE = 1e-6  # relative: versions of numeric libraries may round differently
_NUMERIC = ("pld_lower", "pld_upper", "prv")  # which of them exist depends on the machine
_NUMERIC_TOLERANCE = 1e-3
_BETWEEN_METHODS = 0.05  # epsilon: PRV adds its error of at least 0.01, PLD half a grid cell
_DERIVED = (
    *("kind", "guarantee", "nominal_epsilon", "unit", "adjacency", "delta", "record_counts"),
    *("update", "protect", "agents", "epsilon", "not_sent", "not_protected", "attack_bounds"),
)


def card_problems(
    files: RunFiles, card: PrivacyCard, at_card: Mapping[str, Journal]
) -> Iterator[str]:
    """Yield differences between the card and the ledgers.

    ``at_card``: by agent, the journal up to the line that the card names.
    """
    for place in files.unknown_keys:
        yield f"the card has the key {place:.80}, which this version does not know"
    journals = [at_card.get(entry["agent"]) for entry in card["agents"]]
    found = [journal for journal in journals if journal is not None and journal.plans]
    if not found or len(found) < len(journals):
        return  # reported for that agent already
    yield from _release_problems(files.config, card, found[0].plan)
    if card["this_run"] is None and files.accounts is not None:
        yield "the accounts outlive the run, but the card has no this_run"
    former = former_ledgers(files.run, at_card)
    names = {entry["ledger"] for entry in former}
    stated = [entry for entry in card["former_ledgers"] if entry["ledger"] in names]
    if where := _difference("former_ledgers", stated, former):
        yield f"the card's {where} is not what the ledgers of replaced runs say"
    try:
        made = privacy_card(
            [
                (entry["agent"], journal.plan, tuple(journal.events), entry["ledger_head"])
                for entry, journal in zip(card["agents"], found, strict=True)
            ],
            scope=card["scope"], delta=card["delta"], releases=_stated_releases(card),
            algorithm=card["algorithm"], dataset=card["dataset"],
            task=card["task"], encoder=card["encoder"],
            network=card["network"],
            this_run=card["this_run"], planned=card["planned_visits"],
            promised={e["agent"]: j.promised for e, j in zip(card["agents"], found, strict=True)},
            former=card["former_ledgers"], ledger_problems=card["ledger_problems"],
            weights=card["weights"], clip_norm=card["clip_norm"],
        )  # fmt: skip
    except PrivacyError as error:
        yield f"no true card follows from the ledgers: {error}"
        return
    if made["agents"][0]["epsilon"]["why_no_bounds"] == NOT_FIXED:
        yield from _stopped_card_problems(card, made)
    ours: Mapping[str, Any] = json.loads(json.dumps(made))
    theirs: Mapping[str, Any] = {**card}
    for name in _DERIVED:
        if where := _difference(name, theirs[name], ours[name]):
            yield f"the card's {where} is not what follows from the ledgers"
    for entry, true in zip(card["agents"], made["agents"], strict=True):
        least = min(_upper_bounds(true), default=0.0) - _BETWEEN_METHODS
        if any(bound < least for bound in _upper_bounds(entry)):
            yield f"the card's numeric bound of {entry['agent']} is below what its visits cost"
    if not _same_headline(card, made):
        yield "the card's headline is not what follows from the ledgers"


def _stopped_card_problems(card: PrivacyCard, made: PrivacyCard) -> Iterator[str]:
    """Yield statements that need visits fixed beforehand; former versions made them for all."""
    claim, true = card["guarantee"], made["guarantee"]
    if claim and true and claim["epsilon"] < true["epsilon"] * (1 - _TOLERANCE):
        yield (
            f"the card claims epsilon {claim['epsilon']:.6f}, but {NOT_FIXED}, so its accounts "
            f"guarantee their budget, {true['epsilon']:.6f}. (Former versions claimed what was "
            "charged: remove privacy.json and results.json, and --resume writes them anew.)"
        )
    if claim and _has_bounds(card):
        yield f"the card has numeric bounds, but {NOT_FIXED}"


def _difference(where: str, stated: Any, true: Any) -> str | None:
    """Return the place of the first difference between two JSON values; None if they agree."""
    key = where.split(".")[-1]
    if key == "why_no_bounds" or (key in _NUMERIC and (stated is None or true is None)):
        return None  # depends on the machine
    if isinstance(stated, dict) and isinstance(true, dict) and stated.keys() >= true.keys():
        parts = [_difference(f"{where}.{key}", stated[key], true[key]) for key in true]
        return next(filter(None, parts), None)
    if isinstance(stated, list) and isinstance(true, list) and len(stated) == len(true):
        pairs = enumerate(zip(stated, true, strict=True))
        return next(filter(None, (_difference(f"{where}.{i}", *pair) for i, pair in pairs)), None)
    if isinstance(true, float) and isinstance(stated, int | float) and type(stated) is not bool:
        relative, least = (_NUMERIC_TOLERANCE,) * 2 if key in _NUMERIC else (_TOLERANCE, 1e-12)
        return None if math.isclose(stated, true, rel_tol=relative, abs_tol=least) else where
    return None if type(stated) is type(true) and stated == true else where


def _same_headline(card: PrivacyCard, made: PrivacyCard) -> bool:
    """Return whether the headline is right, as far as numeric bounds available here can tell."""
    stated, true = card["headline"], made["headline"]
    planned, visits = card["planned_visits"], [entry["visits"] for entry in made["agents"]]
    as_planned = card["this_run"] is None and all(count == planned for count in visits)
    if stated is not None and not (as_planned and _has_bounds(card)):
        return False
    if stated is None or true is None:
        # A machine without the libraries has no bounds; with them, both cards have them.
        return bool(stated == true) or not (_has_bounds(card) and _has_bounds(made))
    if stated["kind"] != true["kind"]:
        return False
    # Upper bounds by two methods differ by their rounding terms.
    slack = _NUMERIC_TOLERANCE if stated["by"] == true["by"] else _BETWEEN_METHODS
    return math.isclose(stated["epsilon"], true["epsilon"], rel_tol=slack, abs_tol=slack)


def _has_bounds(card: PrivacyCard) -> bool:
    """Return whether every agent has an upper bound by numeric composition."""
    return all(map(_upper_bounds, card["agents"]))


def _upper_bounds(entry: AgentEntry) -> list[float]:
    """Return an agent's upper bounds of epsilon by numeric composition."""
    found = (entry["epsilon"]["pld_upper"], entry["epsilon"]["prv"])
    return [bound for bound in found if bound is not None]


def _stated_releases(card: PrivacyCard) -> list[Any]:
    return [(r["name"], r["status"], r["why"]) for r in card["releases"]]


def _release_problems(config: Config | None, card: PrivacyCard, plan: AccountPlan) -> Iterator[str]:
    """Yield differences between the releases on the card and the plan's protected networks."""
    listed = _stated_releases(card)
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
    # Reads only update and protect, which both kinds of plan have.
    if config is not None and listed != releases(plan, config):
        yield "releases: not those of the config and the ledger's plan"
