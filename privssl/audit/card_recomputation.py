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
    for key in files.unknown_keys:
        yield f"the card has the key {key:.80}, which this version does not know"
    journals = [at_card.get(entry["agent"]) for entry in card["agents"]]
    usable = [journal for journal in journals if journal is not None and journal.plans]
    if not usable or len(usable) < len(journals):
        return  # reported for that agent already
    yield from _find_release_problems(files.config, card, usable[0].plan)
    if card["this_run"] is None and files.accounts is not None:
        yield "the accounts outlive the run, but the card has no this_run"
    former = former_ledgers(files.run, at_card)
    names = {entry["ledger"] for entry in former}
    stated = [entry for entry in card["former_ledgers"] if entry["ledger"] in names]
    if path := _find_difference("former_ledgers", stated, former):
        yield f"the card's {path} is not what the ledgers of replaced runs say"
    try:
        recomputed = privacy_card(
            [
                (entry["agent"], journal.plan, tuple(journal.events), entry["ledger_head"])
                for entry, journal in zip(card["agents"], usable, strict=True)
            ],
            scope=card["scope"], delta=card["delta"], releases=_list_releases(card),
            algorithm=card["algorithm"], dataset=card["dataset"],
            task=card["task"], encoder=card["encoder"],
            network=card["network"],
            this_run=card["this_run"], planned=card["planned_visits"],
            promised={e["agent"]: j.promised for e, j in zip(card["agents"], usable, strict=True)},
            former=card["former_ledgers"], ledger_problems=card["ledger_problems"],
            weights=card["weights"], clip_norm=card["clip_norm"],
        )  # fmt: skip
    except PrivacyError as error:
        yield f"no true card follows from the ledgers: {error}"
        return
    if recomputed["agents"][0]["epsilon"]["why_no_bounds"] == NOT_FIXED:
        yield from _find_stopped_card_problems(card, recomputed)
    recomputed_json: Mapping[str, Any] = json.loads(json.dumps(recomputed))
    card_json: Mapping[str, Any] = {**card}
    for name in _DERIVED:
        if path := _find_difference(name, card_json[name], recomputed_json[name]):
            yield f"the card's {path} is not what follows from the ledgers"
    for entry, expected in zip(card["agents"], recomputed["agents"], strict=True):
        lowest = min(_upper_bounds(expected), default=0.0) - _BETWEEN_METHODS
        if any(bound < lowest for bound in _upper_bounds(entry)):
            yield f"the card's numeric bound of {entry['agent']} is below what its visits cost"
    if not _is_same_headline(card, recomputed):
        yield "the card's headline is not what follows from the ledgers"


def _find_stopped_card_problems(card: PrivacyCard, recomputed: PrivacyCard) -> Iterator[str]:
    """Yield statements that need visits fixed beforehand; former versions made them for all."""
    claim, expected = card["guarantee"], recomputed["guarantee"]
    if claim and expected and claim["epsilon"] < expected["epsilon"] * (1 - _TOLERANCE):
        yield (
            f"the card claims epsilon {claim['epsilon']:.6f}, but {NOT_FIXED}, so its accounts "
            f"guarantee their budget, {expected['epsilon']:.6f}. (Former versions claimed what was "
            "charged: remove privacy.json and results.json, and --resume writes them anew.)"
        )
    if claim and _has_bounds(card):
        yield f"the card has numeric bounds, but {NOT_FIXED}"


def _find_difference(path: str, stated: Any, expected: Any) -> str | None:
    """Return the place of the first difference between two JSON values; None if they agree."""
    key = path.split(".")[-1]
    if key == "why_no_bounds" or (key in _NUMERIC and (stated is None or expected is None)):
        return None  # depends on the machine
    if isinstance(stated, dict) and isinstance(expected, dict) and stated.keys() >= expected.keys():
        differences = [
            _find_difference(f"{path}.{key}", stated[key], expected[key]) for key in expected
        ]
        return next(filter(None, differences), None)
    if isinstance(stated, list) and isinstance(expected, list) and len(stated) == len(expected):
        pairs = enumerate(zip(stated, expected, strict=True))
        return next(
            filter(None, (_find_difference(f"{path}.{i}", *pair) for i, pair in pairs)), None
        )
    if isinstance(expected, float) and isinstance(stated, int | float) and type(stated) is not bool:
        relative, absolute = (_NUMERIC_TOLERANCE,) * 2 if key in _NUMERIC else (_TOLERANCE, 1e-12)
        return None if math.isclose(stated, expected, rel_tol=relative, abs_tol=absolute) else path
    return None if type(stated) is type(expected) and stated == expected else path


def _is_same_headline(card: PrivacyCard, recomputed: PrivacyCard) -> bool:
    """Return whether the headline is right, as far as numeric bounds available here can tell."""
    stated, expected = card["headline"], recomputed["headline"]
    planned, visits = card["planned_visits"], [entry["visits"] for entry in recomputed["agents"]]
    as_planned = card["this_run"] is None and all(count == planned for count in visits)
    if stated is not None and not (as_planned and _has_bounds(card)):
        return False
    if stated is None or expected is None:
        # A machine without the libraries has no bounds; with them, both cards have them.
        return bool(stated == expected) or not (_has_bounds(card) and _has_bounds(recomputed))
    if stated["kind"] != expected["kind"]:
        return False
    # Upper bounds by two methods differ by their rounding terms.
    slack = _NUMERIC_TOLERANCE if stated["by"] == expected["by"] else _BETWEEN_METHODS
    return math.isclose(stated["epsilon"], expected["epsilon"], rel_tol=slack, abs_tol=slack)


def _has_bounds(card: PrivacyCard) -> bool:
    """Return whether every agent has an upper bound by numeric composition."""
    return all(map(_upper_bounds, card["agents"]))


def _upper_bounds(entry: AgentEntry) -> list[float]:
    """Return an agent's upper bounds of epsilon by numeric composition."""
    bounds = (entry["epsilon"]["pld_upper"], entry["epsilon"]["prv"])
    return [bound for bound in bounds if bound is not None]


def _list_releases(card: PrivacyCard) -> list[Any]:
    return [(r["name"], r["status"], r["why"]) for r in card["releases"]]


def _find_release_problems(
    config: Config | None, card: PrivacyCard, plan: AccountPlan
) -> Iterator[str]:
    """Yield differences between the releases on the card and the plan's protected networks."""
    stated = _list_releases(card)
    statuses = {name: status for name, status, _ in stated}
    if len(statuses) < len(stated):
        yield "releases: one of them is listed twice"
    covered = {name for name, status in statuses.items() if status == "covered"}
    if unknown := sorted(covered - set(plan.protect)):
        yield f"releases: {', '.join(unknown)} is called covered, but not trained with noise"
    expected = "covered" if plan.scope == "sound" else "not covered"
    for name in plan.update:
        if statuses.get(name) != expected:
            yield f"releases: {name} is trained on labelled rows, so it is {expected}"
    # Reads only update and protect, which both kinds of plan have.
    if config is not None and stated != releases(plan, config):
        yield "releases: not those of the config and the ledger's plan"
