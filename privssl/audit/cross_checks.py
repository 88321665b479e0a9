"""Compare ledgers and card with the other files of the run.

A truncated ledger and a card made from it agree with each other. But checkpoints record number and
hash of each ledger's last line, and metrics.csv the epsilon after each round. results.json,
privacy.md and model_card.md repeat the guarantee. config.yaml determines which agents have a ledger
and the cost of a local step. A forger must edit all of these.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from accounting.account_plan import AccountPlan
from accounting.accountants import ZERO_COST
from accounting.budget import Budget
from accounting.errors import AccountingError
from accounting.events import ComposedEvent, Event, PoissonSampledGaussianEvent, leaf_events
from accounting.journal_reader import Journal
from privssl.audit.run_files import Findings, LedgerRecord, RunFiles
from privssl.data.split import holders
from privssl.engines.remote import list_charge_ids
from privssl.errors import UserError
from privssl.experiment.config import Config
from privssl.experiment.prepare import make_plan
from privssl.privacy.card_schema import PrivacyCard
from privssl.privacy.card_text import render_markdown
from privssl.privacy.former_ledgers import recorded_heads
from privssl.privacy.label_histogram import CENSUS
from privssl.privacy.plan import Plan
from privssl.runs.accounts import FORMER
from privssl.runs.model_card import privacy_section, read_privacy_section
from privssl.runs.resume import other_device
from privssl.runs.run_dir import MODEL_CARD, claim_sentences
from privssl.settings.names import is_outside

_RESUME = "; if the run was killed while it wrote them, resume it: it writes them anew"


def check_records(files: RunFiles, journals: Mapping[str, Journal], findings: Findings) -> None:
    """Check that each ledger has the lines that checkpoints recorded.

    If an account outlives the run and is on this machine, the account itself is compared. In a run
    that has ended its copy is compared too: it was made after the last checkpoint, and the card
    from it.
    """
    uses_copy = files.accounts is not None and files.shared is None
    for agent in sorted({record.agent for record in files.records}):
        records = [record for record in files.records if record.agent == agent]
        journal = (files.shared or {}).get(agent, journals.get(agent))
        last = max(records, key=lambda record: record.seq)
        if journal is None and uses_copy and files.card is None:
            findings.notes.append(f"{agent}: no copy of its ledger was made before the run stopped")
        elif journal is None:
            findings.problems.append(
                f"the ledger of {agent} is missing: {last.checkpoint} records entry {last.seq}"
            )
        else:
            ledgers = [journal, files.own.get(agent, journal)] if files.ended else [journal]
            missing = [r for r in records if not all(_has_record(ledger, r) for ledger in ledgers)]
            # A copy may be older than the checkpoint of a later session that was killed.
            may_lag = uses_copy and not files.ended
            conflicts = [record for record in missing if not (may_lag and record.seq > journal.seq)]
            if conflicts:
                first = min(conflicts, key=lambda record: record.seq)
                findings.problems.append(
                    f"the ledger of {agent} was cut or replaced: {first.checkpoint} records "
                    f"entry {first.seq}"
                )
            elif missing:
                findings.notes.append(
                    f"the copy of {agent}'s ledger is older than {last.checkpoint}"
                )


def _has_record(journal: Journal, record: LedgerRecord) -> bool:
    return record.seq <= journal.seq and journal.hashes[record.seq] == record.head


def check_former_ledgers(
    files: RunFiles, journals: Mapping[str, Journal], findings: Findings
) -> None:
    """Check that the card names the ledgers of replaced runs that checkpoints recorded.

    Ledgers that this run continues are exempt: they contain the earlier charges.
    """
    if files.card is None:
        return
    on_card = {(entry["ledger"], entry["agent"]) for entry in files.card["former_ledgers"]}
    on_card |= {(ledger, "") for ledger, _ in on_card}
    for content in files.snapshots.values():
        for ledger, agent, head in recorded_heads(content["extra"]["mapping"].get(FORMER, "{}")):
            continues = bool(head) and head in journals.get(agent, Journal()).hashes
            if (ledger, agent) not in on_card and not continues:
                findings.problems.append(
                    f"checkpoints record {ledger}, the ledger of a replaced run, and the card does "
                    "not name it"
                )
                return


def check_results(files: RunFiles, findings: Findings) -> None:
    """Compare results.json, privacy.md and model_card.md with the card."""
    card, results = files.card, files.results
    if results is None and (files.run / "results.json").exists():
        findings.doubts.append("results.json cannot be read, so it was not compared")
    claim = None if results is None else results.get("privacy")
    if card is None:
        if isinstance(claim, dict) and claim.get("guarantee") is not None:
            findings.problems.append(
                "results.json claims a guarantee, but there is no privacy.json"
            )
        return
    if results is not None:
        on_card = {"guarantee": card["guarantee"], "nominal_epsilon": card["nominal_epsilon"],
                "scope": card["scope"]}  # fmt: skip
        if not isinstance(claim, dict) or any(claim.get(name) != on_card[name] for name in on_card):
            findings.problems.append(
                f"results.json claims something else than privacy.json{_RESUME}"
            )
        if not isinstance(results.get("rows"), dict):
            findings.doubts.append(
                "results.json does not say what rows there are, so they were not compared"
            )
        else:
            findings.problems += _find_row_differences(results, card)
        if results.get("status") == "interrupted" and card["planned_visits"] is not None:
            findings.problems.append(
                "the run was interrupted, but the card says that all planned visits took place"
            )
    for name, parse, expected in (
        ("privacy.md", str, render_markdown(card)),
        (MODEL_CARD, read_privacy_section, privacy_section(claim_sentences(card))),
    ):
        page = files.run / name
        if page.exists():
            try:
                matches = page.is_file() and parse(page.read_text(encoding="utf-8")) == expected
            except (OSError, ValueError):
                matches = False
            if not matches:
                findings.problems.append(f"{name} is not what privacy.json says{_RESUME}")


def _find_row_differences(results: Mapping[str, Any], card: PrivacyCard) -> Iterator[str]:
    """Yield differences between card and results.json in classes, rows or encoder."""
    rows, names = results["rows"], results.get("class_names")
    classes = len(names) if isinstance(names, list) else None
    if card["task"] != {"classes": classes, "shape": rows.get("shape")}:
        yield "privacy.json has other classes or rows than results.json"
    if card["encoder"] != rows.get("encoder"):
        yield "privacy.json says something else of the encoder than results.json"


def check_config(files: RunFiles, journals: Mapping[str, Journal], findings: Findings) -> None:
    """Check that ledgers and card fit config.yaml.

    Sites have their own accounts and budgets, for several runs: one of the plans must be this
    run's.
    """
    config, card = files.config, files.card
    if config is None:
        findings.doubts.append(
            "config.yaml is missing or cannot be read, so the ledgers were not compared with it"
        )
        return
    if config.privacy is None:
        findings.problems.append(
            "there are ledgers or a card, but config.yaml has no privacy section"
        )
        return
    if doubt := other_device(files.run, config):
        findings.doubts.append(doubt)
    local = config.run.engine == "local"
    labelled = set(holders(config.data.labels, config.agents).labelled)
    if local:
        missing = [
            f"config.yaml gives labels to {agent}, which has no ledger"
            for agent in sorted(labelled - journals.keys())
        ]
        # A run that was killed at its start has not opened all of them.
        (findings.problems if card else findings.doubts).extend(missing)
        findings.problems += [
            f"there is a ledger of {agent}, to which config.yaml gives no labels"
            for agent in sorted(journals.keys() - labelled)
        ]
    # The copy of an account has this run's plan; the account may have another run's.
    checked = journals
    if config.privacy.ledger:
        checked = {agent: files.own[agent] for agent in journals if agent in files.own}
    try:
        plan = make_plan(config, len(labelled))
    except (UserError, AccountingError) as error:
        findings.doubts.append(f"config.yaml was not compared with the ledgers: {error}")
        return
    calibrated = config.privacy.noise_multiplier is None
    noise = _noise_of(plan.event) if calibrated else None
    for agent, journal in checked.items():
        candidates = [
            (list(_find_plan_differences(agent, account_plan, config, plan, noise)), account_plan)
            for account_plan in (journal.plans[-1:] if local else journal.plans)
        ]
        if candidates:
            differences, closest = min(candidates, key=lambda pair: len(pair[0]))
            findings.problems += differences
            findings.doubts += _find_rounding_difference(agent, closest, noise)
            findings.problems += _find_unpaid_charges(agent, journal, closest, files)
    if card is None:
        return
    if card["planned_visits"] not in (None, plan.visits):
        findings.problems.append(
            f"config.yaml plans {plan.visits} visits, the card says {card['planned_visits']}"
        )
    elif card["planned_visits"] is None and files.ended:
        findings.problems.append(
            f"the run has ended, but its card does not plan {plan.visits} visits"
        )
    findings.problems += _find_public_part_differences(config, card)
    clip_norm = None if plan.update == (CENSUS,) else config.privacy.clip_norm
    if card["clip_norm"] != clip_norm:
        findings.problems.append(
            f"config.yaml says clip_norm {clip_norm}, the card {card.get('clip_norm')}"
        )


def _find_unpaid_charges(
    agent: str, journal: Journal, plan: AccountPlan, files: RunFiles
) -> Iterator[str]:
    """Yield charges recorded by checkpoints that a site's ledger lacks under this plan."""
    run, ids = files.charged.get(agent, ("", set()))
    if absent := ids - list_charge_ids(journal.visits):
        yield f"the ledger of {agent} lacks {len(absent)} visits that checkpoints record as charged"
    elif ids and not plan.visit_cost.times(len(ids)).at_most(journal.by_run.get(run, ZERO_COST)):
        yield f"the ledger of {agent} has charged this run less than its {len(ids)} visits cost"


def _find_public_part_differences(config: Config, card: PrivacyCard) -> Iterator[str]:
    """Yield differences between card and config in what the guarantee takes as public."""
    encoder, network, model = card["encoder"], card["network"], config.model
    if (encoder["name"] if encoder else "") != config.data.encoder:
        yield f"config.yaml has the encoder {config.data.encoder or 'none'}, the card another"
    if card["algorithm"] != config.algorithm.name:
        yield f"config.yaml has the algorithm {config.algorithm.name}, the card another"
    if card["dataset"] != config.data.name:
        yield f"config.yaml has the data set {config.data.name}, the card another"
    expected = model.name if is_outside(model.name) or model.weights else ""
    if (network["name"] if network else "") != expected:
        yield f"config.yaml has the network {model.name}, which the card does not say"
    elif network and bool(network["weights"]) != bool(model.weights):
        yield "config.yaml and the card differ in whether the network has initial weights"


def _noise_of(event: Event) -> float | None:
    """Return the noise multiplier of a Gaussian visit; None for a census."""
    gaussians = (e for e in leaf_events(event) if isinstance(e, PoissonSampledGaussianEvent))
    return next((leaf.noise_multiplier for leaf in gaussians), None)


def _find_plan_differences(
    agent: str, plan: AccountPlan, config: Config, run_plan: Plan, noise: float | None
) -> Iterator[str]:
    """Yield differences between a ledger's plan and the plan of the config.

    ``noise``: the calibrated noise multiplier, if calibrated.
    """
    privacy = config.privacy
    assert privacy is not None
    event, budget = plan.event, Budget(privacy.ledger_epsilon or privacy.epsilon, privacy.delta)
    if config.run.engine != "local":
        budget = Budget(plan.budget.epsilon, privacy.delta)  # the site's own budget
    if _is_next_to(_noise_of(event), noise):
        event = _replace_noise(event, noise or 0.0)  # a doubt, see below
    for name, expected, recorded in (
        ("a visit", run_plan.event, event),
        ("a budget", budget, plan.budget),
        ("the networks", run_plan.update, plan.update),
        ("protection", run_plan.protect, plan.protect),
        ("row counts", privacy.record_counts, plan.record_counts),
        ("the unit", privacy.unit, plan.unit),
    ):
        if expected != recorded:
            yield f"config.yaml asks for {name} of {expected}, the ledger of {agent} has {recorded}"


def _find_rounding_difference(agent: str, plan: AccountPlan, noise: float | None) -> Iterator[str]:
    """Yield a difference in calibrated noise: other library versions may find the next value."""
    value = _noise_of(plan.event)
    if value != noise and _is_next_to(value, noise):
        yield f"config.yaml calibrates to noise {noise:g} here, the ledger of {agent} has {value:g}"


def _is_next_to(value: float | None, noise: float | None) -> bool:
    return value is not None and noise is not None and abs(value - noise) < 1.5e-4  # grid: 1e-4


def _replace_noise(event: Event, noise: float) -> Event:
    if isinstance(event, PoissonSampledGaussianEvent):
        return dataclasses.replace(event, noise_multiplier=noise)
    if isinstance(event, ComposedEvent):
        return ComposedEvent(tuple(_replace_noise(part, noise) for part in event.events))
    return event
