"""The privacy card of a run: its guarantee, the reasons for it, and its limits.

``privacy.json`` is for machines and ``privssl.audit``; ``card_text.py`` renders it as text. Every
number comes from the agents' ledgers, every sentence from the scope. Under the published scheme
(scope ``as_published``) there is no guarantee: ``kind`` and every epsilon are nominal.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Literal

from accounting.account_plan import AccountPlan, Scope
from accounting.accountants import ZERO_COST
from accounting.budget import Span, Unit
from accounting.events import Event
from privssl import __version__
from privssl.errors import PrivacyError
from privssl.privacy.card_numbers import agent_entry, fixed_beforehand, paper_sum
from privssl.privacy.card_schema import (
    SCHEMA,
    AgentEntry,
    Claim,
    EncoderEntry,
    FormerLedger,
    Headline,
    Kind,
    PrivacyCard,
    Status,
    TaskEntry,
)
from privssl.privacy.card_text import encoder_sentence, guarantee_sentence, network_sentence
from privssl.privacy.label_histogram import CENSUS
from privssl.settings.names import ALGORITHMS

#: Agent id, its plan, one event per charged visit, hash of its ledger's last line.
AgentSpend = tuple[str, AccountPlan, Sequence[Event], str]
#: Name of a release of a support agent, whether the guarantee covers it, why.
Release = tuple[str, Status, str]

_version = cache(version)  # ``version`` reads a file
_ROUNDING: Mapping[Unit, str] = {
    "record": "Rounding: arithmetic is floating point. One row moves a sum by at most 1 + 1e-6 "
    "clip norms, for batches of up to 65,536 rows.",
    "person": "Rounding: arithmetic is floating point. One person moves a sum by at most 1 + 1e-6 "
    "clip norms, for batches of up to 65,536 persons.",
}
_IDEAL_BITS = (
    "Random bits: delta 0 is for ideal ones; those of the operating system are as good as its "
    "generator.",
)
_UNLABELLED = "Unlabelled rows: query agents train on them without noise."
_PEOPLE: Mapping[Unit, str] = {
    "record": "People with more than one record: the bound is for one record and grows with their "
    "number.",
    "person": "People with records at more than one agent, or under more than one name: the bound "
    "is for one agent and one name, and grows with their number.",
}
_NOT_PROTECTED = (
    "Timing, memory use and other side channels, and files on an agent's own disk.",
    "Validation and test rows: metrics on them have no noise.",
    "Choices made by looking at labelled rows before the run: settings, classes, a split by class.",
)
_NOT_SENT = (
    "losses, accuracies or gradient norms of labelled rows",
    "sizes or members of sampled batches, sampling masks, noise",
    "optimiser state, or buffers of networks trained with noise: they have none",
)
_NOT_SENT_IN_CENSUS = (
    "counts without noise, or the noise",
    "labelled rows, their features, or the cluster of any one of them",
    "networks trained on labelled rows: there are none",
)
_AS_PUBLISHED = (
    "Every labelled record: networks trained on it without noise leave its agent in every round.",
)
_OWN_ALGORITHM = (
    "Mistakes of the algorithm {} that privssl cannot see: its code is not of privssl, and its "
    "author is trusted."
)


def privacy_card(
    accounts: Sequence[AgentSpend],
    *,
    scope: Scope,
    delta: float,
    releases: Sequence[Release],
    algorithm: str,
    dataset: str,
    task: TaskEntry | None = None,
    encoder: EncoderEntry | None = None,
    network: Mapping[Literal["name", "weights"], str] | None = None,
    this_run: Mapping[str, float] | None = None,
    planned: int | None = None,
    promised: Mapping[str, float] | None = None,
    former: Sequence[FormerLedger] = (),
    ledger_problems: Sequence[str] = (),
    weights: Mapping[Literal["file", "sha256"], str] | None = None,
    clip_norm: float | None = None,
) -> PrivacyCard:
    """Return the card of a private run.

    Args:
        accounts: every support agent that has an account, once.
        scope: "sound" or "as_published". delta: in (0, 1). Both as in each agent's plan.
        releases: everything that leaves a support agent. Under "sound", nothing that an agent
            updates may be "not covered"; under "as_published" nothing may be "covered".
        task: classes and shape of a row, to attack the plan without the data.
        encoder: the frozen public encoder, if any.
        network: an own classifier, or one with initial weights; None: neither.
        this_run: agent -> epsilon of this run alone, if accounts outlive runs.
        planned: planned visits of each agent; None if the run was stopped. promised: agent -> the
            initial budget of its account, if it was lowered later. former: spending of replaced
            runs of the same folder; see ``privacy/former_ledgers.py``.
        ledger_problems: damage to ledgers, each with its agent; it forbids a guarantee.
        weights: the released weights; None if the run was stopped.
        clip_norm: largest norm of one row's gradient; None for a census.

    Raises:
        PrivacyError: the inputs contradict each other, so that no true card exists.
    """
    _check_inputs(accounts, scope, delta, releases)
    claims = scope == "sound" and not ledger_problems
    kind: Kind = "guaranteed" if claims else "nominal" if scope == "as_published" else "charged"
    spending = [(p, events) for _, p, events, _ in accounts]
    fixed = fixed_beforehand(spending, planned, shared=this_run is not None) and not ledger_problems
    initial = {name: p.budget.epsilon for name, p, _, _ in accounts} | dict(promised or {})
    plan, total = accounts[0][1], sum((p.cost(events) for p, events in spending), ZERO_COST)
    # A guarantee is pure if that of each agent is.
    claimed_delta = max(p.delta_of(p.cost(events)) for p, events in spending)
    # A pure sum bounds every path; another sum only if no choice depended on results.
    bounds = fixed or claimed_delta == 0
    sum_kind: Kind = "charged" if kind == "guaranteed" and not bounds else kind
    agents = [agent_entry(*a, sum_kind, fixed=fixed, promised=initial[a[0]]) for a in accounts]
    overall = max(entry["epsilon"]["value"] for entry in agents)
    bound = overall if bounds else max(overall, *initial.values())
    census = plan.update == (CENSUS,)
    span: Span = "this run and the earlier runs of its account"
    guarantee: Claim = {
        "epsilon": bound, "delta": claimed_delta, "unit": plan.unit, "neighbours": plan.adjacency,
        "covers": [name for name, status, _ in releases if status == "covered"],
        "rule": "largest agent", "span": "this run" if this_run is None else span,
    }  # fmt: skip
    card: PrivacyCard = {
        "schema": SCHEMA,
        "algorithm": algorithm,
        "dataset": dataset,
        "task": task,
        "encoder": encoder,
        "network": None if network is None else dict(network),
        "scope": scope,
        "kind": kind,
        "guarantee": guarantee if claims else None,
        "nominal_epsilon": overall if scope == "as_published" else None,
        "unit": plan.unit,
        "adjacency": plan.adjacency,
        "delta": delta,
        "record_counts": plan.record_counts,
        "clip_norm": clip_norm,
        "update": list(plan.update),
        "protect": list(plan.protect),
        "agents": agents,
        "planned_visits": planned,
        "this_run": None if this_run is None else dict(this_run),
        "former_ledgers": list(former),
        "ledger_problems": list(ledger_problems),
        "weights": None if weights is None else dict(weights),
        "epsilon": {
            "kind": sum_kind,
            "overall": overall,
            "person_across_agents": max(overall, total.epsilon(claimed_delta)),
            "paper_sum": paper_sum(spending, agents, claimed_delta),
        },
        "releases": [{"name": n, "status": status, "why": why} for n, status, why in releases],
        "not_sent": list(_NOT_SENT_IN_CENSUS if census else _NOT_SENT),
        "not_protected": [
            *(_AS_PUBLISHED if scope == "as_published" else ()),
            _UNLABELLED,
            _PEOPLE[plan.unit],
            *_NOT_PROTECTED,
            *(() if encoder is None else (encoder_sentence(encoder),)),
            *(() if network is None else (network_sentence(network),)),
            *(() if algorithm in ALGORITHMS else (_OWN_ALGORITHM.format(algorithm),)),
            *(_IDEAL_BITS if census and claimed_delta == 0 else (_ROUNDING[plan.unit],)),
        ],
        "attack_bounds": attack_bounds(bound, claimed_delta) if claims else None,
        "versions": {
            "privssl": __version__,
            **{name: _version(name) for name in ("opacus", "torch", "scipy")},
        },
        "headline": _build_headline(agents, kind) if fixed else None,
        "sentence": "",
    }
    return {**card, "sentence": guarantee_sentence(card)}


def _build_headline(agents: Sequence[AgentEntry], kind: Kind) -> Headline | None:
    """Return the tightest epsilon of the agent that spent most; None if an agent has no bound."""
    tightest = []
    for entry in agents:
        numbers = entry["epsilon"]
        bounds = [(numbers["pld_upper"], "PLD"), (numbers["prv"], "PRV")]
        available = [(value, method) for value, method in bounds if value is not None]
        if not available:
            return None
        tightest.append(min(*available, (numbers["value"], "RDP or exact")))
    epsilon, method = max(tightest)
    return {"kind": kind, "epsilon": epsilon, "by": method}


def attack_bounds(epsilon: float, delta: float) -> dict[str, float]:
    """Return upper bounds on any membership attack that sees all messages.

    Returns:
        ``balanced_accuracy`` in [0.5, 1], for equally many members and non-members, and
        ``tpr_at_1_percent_fpr`` in [0.01, 1]. Both follow from (epsilon, delta)-DP as a limit on
        hypothesis tests (arXiv:1311.0776, Theorem 2.1).

    >>> {name: round(bound, 3) for name, bound in attack_bounds(4.0, 1e-5).items()}
    {'balanced_accuracy': 0.982, 'tpr_at_1_percent_fpr': 0.546}
    """
    gain = math.exp(min(epsilon, 700.0))
    false_positives = 0.01
    by_ratio = gain * false_positives + delta
    by_complement = 1 - (1 - delta - false_positives) / gain
    return {
        "balanced_accuracy": min(1.0, (gain + delta) / (1 + gain)),
        "tpr_at_1_percent_fpr": min(by_ratio, by_complement, 1.0),
    }


def _check_inputs(
    accounts: Sequence[AgentSpend], scope: Scope, delta: float, releases: Sequence[Release]
) -> None:
    """Raise PrivacyError if no true card can follow from the inputs."""
    ids = [agent for agent, _, _, _ in accounts]
    if not ids or len(set(ids)) != len(ids):
        raise PrivacyError(f"a card needs every account once; it was given {ids}")
    for agent, plan, _, _ in accounts:
        if (plan.agent, plan.scope, plan.budget.delta) != (agent, scope, delta):
            raise PrivacyError(
                f"{agent}: the account is {plan.agent}'s, scope {plan.scope}, delta "
                f"{plan.budget.delta:g}; the card is scope {scope}, delta {delta:g}"
            )
    settings = {
        (p.update, p.protect, p.unit, p.adjacency, p.record_counts) for _, p, _, _ in accounts
    }
    if len(settings) > 1:
        raise PrivacyError(
            "agents differ in their unit, or in what they train, protect or publish: one card each"
        )
    statuses = {name: status for name, status, _ in releases}
    updated = set(accounts[0][1].update)
    unprotected = sorted(name for name in updated if statuses.get(name) == "not covered")
    if scope == "sound" and (unprotected or set(statuses.values()) <= {"not covered"}):
        raise PrivacyError(
            f"scope sound, but of what leaves an agent {unprotected or 'all'} is not covered"
        )
    if scope == "as_published" and "covered" in statuses.values():
        raise PrivacyError("scope as_published guarantees nothing, so nothing it sends is covered")
