"""The sentences of the privacy card, and its page ``privacy.md``.

The text is a function of the fields of the card (``privacy/card_schema.py``), so an audit writes
the same page from ``privacy.json``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from accounting.budget import NO_GUARANTEE, Guarantee, Nominal, Unit, delta_up, round_up
from privssl.privacy.card_schema import AgentEntry, EncoderEntry
from privssl.privacy.former_ledgers import former_sentences
from privssl.privacy.label_histogram import CENSUS
from privssl.settings.names import is_outside

_CHARGED = (
    "- The claim is the budget: visits were not exactly those fixed beforehand, so who saw results "
    "may have chosen when to stop, and what was charged is no bound."
)


def guarantee_sentence(card: Mapping[str, Any] | None) -> str:
    """Return the guarantee in words, from the card's numbers; None if the run is not private."""
    if card is None:
        return NO_GUARANTEE
    if card.get("ledger_problems"):
        return (
            f"NO GUARANTEE: the ledger is not the one that this run wrote "
            f"({'; '.join(card['ledger_problems'])}). The run was charged {_name_of_epsilon(card)} "
            f"{round_up(card['epsilon']['overall'])} (delta {delta_up(card['delta'])}). Nothing is "
            f"guaranteed for any record. Put the true ledger back and end the run with --resume."
        )
    if card["guarantee"] is None:
        unprotected = tuple(name for name in card["update"] if name not in card["protect"])
        return str(
            Nominal(card["nominal_epsilon"], card["delta"], tuple(card["protect"]), unprotected)
        )
    claim = card["guarantee"]
    return str(Guarantee(**{**claim, "covers": tuple(claim["covers"])}))


def headline_sentence(card: Mapping[str, Any] | None) -> str | None:
    """Return the tighter epsilon in words, or None if there is none.

    It holds for the same unit, neighbours, observer and exclusions as the card's sentence.
    """
    headline = None if card is None else card.get("headline")
    if headline is None:
        return None
    nominal = "" if headline["kind"] == "guaranteed" else "nominal "
    return (
        f"By numeric composition ({headline['by']}), valid because every visit was fixed "
        f"beforehand, {nominal}epsilon is {round_up(headline['epsilon'])} at the same delta."
    )


def encoder_sentence(encoder: EncoderEntry) -> str:
    """State that the guarantee does not cover the data of an encoder."""
    return (
        f"What the frozen encoder {encoder['name']} was trained on, which is taken as public: "
        f"{encoder['trained_on']}. Fine-tuning it on private rows would be outside of the claim."
    )


def network_sentence(network: Mapping[Literal["name", "weights"], str]) -> str:
    """State that the guarantee covers neither a network's code nor the data of its weights."""
    file = f" (model.weights, SHA-256 {network['weights']})" if network["weights"] else ""
    outside = is_outside(network["name"])
    code = " Its code is not of privssl and was tried, not proved." if outside else ""
    return (
        f"What the initial weights of {network['name']}{file} were trained on: they are taken as "
        f"public. Weights that have seen the private rows break the claim.{code}"
    )


def render_markdown(card: Mapping[str, Any]) -> str:
    """Render the card as the page ``privacy.md``."""
    number, sums, looser = _name_of_epsilon(card), card["epsilon"], "bound"
    if card["guarantee"] and sums["kind"] == "charged":
        number, looser = "charged epsilon", "number"
    trained = f"Trained on labelled rows: {_format_names(card['update'])}; with noise: "
    if card["update"] == [CENSUS]:
        trained = "No network is trained on labelled rows. Released about them, with noise: "
    delta, clip_norm = delta_up(card["delta"]), card["clip_norm"]
    if (card["guarantee"] or {}).get("delta") == 0:
        delta = f"0 (pure epsilon; {delta} in the accounts)"
    one, record = {
        "record": ("one row's", "one record"), "person": ("one person's", "records"),
    }[card["unit"]]  # fmt: skip
    tighter, weights, bounds = headline_sentence(card), card["weights"], card["attack_bounds"]
    lines = [
        f"# Privacy card: {_escape_cell(card['algorithm'])} on {_escape_cell(card['dataset'])}",
        "",
        f"**{card['sentence']}**",
        "",
        *([f"- {tighter}"] if tighter else []),
        f"- Scope: {card['scope']}. {trained}{_format_names(card['protect'])}.",
        f"- Unit: one {card['unit']}; neighbours: {card['adjacency']}; delta: {delta}; "
        f"row counts: {card['record_counts']}.",
        *([] if clip_norm is None else [f"- Clip norm of {one} gradient: {clip_norm:g}."]),
        f"- Overall, the agent that spent most ({card['unit']}s are disjoint): {number} "
        f"{round_up(sums['overall'])}.",
        *([_CHARGED] if number == "charged epsilon" else []),
        f"- Someone with {record} at every agent, composed: {number} "
        f"{round_up(sums['person_across_agents'])}.",
        *_format_this_run(card["this_run"], number),
        f"- The paper's running sum over visits and agents, a looser {looser}: {number} "
        f"{round_up(sums['paper_sum'])}.",
        *(f"- {sentence}" for sentence in former_sentences(card["former_ledgers"], card["unit"])),
        "",
        f"| agent | {number} | budget | numeric bounds | visits | visits left | ledger |",
        "|---|---|---|---|---|---|---|",
        *(_format_agent_row(entry) for entry in card["agents"]),
        "",
        "## What leaves a support agent",
        "",
        "| what | claim | why |",
        "|---|---|---|",
        *(
            f"| {_escape_cell(entry['name'])} | {entry['status']} | {_escape_cell(entry['why'])} |"
            for entry in card["releases"]
        ),
        "",
        f"Not sent: {'; '.join(card['not_sent'])}.",
        "",
        "## What is not protected",
        "",
        *(f"- {sentence}" for sentence in card["not_protected"]),
        "",
        *([] if bounds is None else [_format_attack_sentence(bounds, card["unit"]), ""]),
        *([f"Released weights: {weights['file']}, SHA-256 {weights['sha256']}.", ""]
          if weights else []),
        f"Versions: {', '.join(f'{name} {text}' for name, text in card['versions'].items())}.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _name_of_epsilon(card: Mapping[str, Any]) -> str:
    return "nominal epsilon" if card["kind"] == "nominal" else "epsilon"


def _format_agent_row(entry: AgentEntry) -> str:
    numbers = entry["epsilon"]
    if numbers["pld_upper"] is not None:
        bounds = f"{numbers['pld_lower']:.4f} to {round_up(numbers['pld_upper'])}"
    else:
        bounds = "none" if numbers["prv"] is None else f"at most {round_up(numbers['prv'])}"
    return (
        f"| {entry['agent']} | {round_up(numbers['value'])} | {entry['budget']['epsilon']:g} | "
        f"{bounds} | {entry['visits']} | {entry['visits_left']} | {entry['ledger_head'][:12]} |"
    )


def _format_this_run(spent: Mapping[str, float] | None, number: str) -> list[str]:
    if spent is None:
        return []
    agents = ", ".join(f"{agent} {round_up(value)}" for agent, value in spent.items())
    return [
        f"- The accounts outlive this run: every number here counts all runs that drew from them. "
        f"Of this run alone, {number}: {agents}."
    ]


def _format_attack_sentence(bounds: Mapping[str, float], unit: Unit) -> str:
    return (
        f"An attacker who sees everything and guesses whether a {unit} took part is right at most "
        f"{_format_percent(bounds['balanced_accuracy'])} of the time when half of the {unit}s "
        f"asked about did, and finds at most {_format_percent(bounds['tpr_at_1_percent_fpr'])} of "
        f"the members at 1% false alarms."
    )


def _format_percent(share: float) -> str:
    """Format a share as a percentage, rounded up, at most 100%.

    >>> _format_percent(0.98201)
    '98.21%'
    """
    return f"{min(100.0, math.ceil(1e4 * share - 1e-9) / 100):.2f}%"


def _format_names(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def _escape_cell(text: str) -> str:
    """Escape text for a table cell or a heading."""
    return " ".join(text.replace("|", "/").split())
