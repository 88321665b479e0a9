"""Check a run's guarantee: ``python -m privssl.audit RUN_DIR [--empirical]``.

Verifies every journal, recomputes epsilon from its events (Renyi accountant, exact formula,
dp-accounting if installed) and compares it with the budget and ``privacy.json``; see
``audit/claim_verification.py``. ``--empirical`` attacks the plan too. Exit status:

    0  consistent        1  violated       2  user error
    3  inconclusive      4  there is no guarantee to check      130  interrupted
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from accounting.budget import round_up
from accounting.events import is_protected
from accounting.verify import dp_event_source
from privssl.runtime.command import ALLOWED_BY_FLAG, add_plugin_flag, run_command
from privssl.runtime.console import Terminal, results_to_standard_output
from privssl.runtime.plugins import imports_allowed
from privssl.runtime.process import gc_paused, in_one_thread

if TYPE_CHECKING:
    from privssl.audit.canary_attack import AttackReport
    from privssl.audit.claim_verification import AgentReport, ClaimCheck


class Verdict(IntEnum):
    """The verdict, which is the exit status."""

    CONSISTENT = 0
    VIOLATED = 1
    INCONCLUSIVE = 3
    NO_GUARANTEE = 4


@dataclass
class Report:
    """The result of an audit. ``problems``, ``doubts`` and ``notes`` are about the run, not one
    agent."""

    run: str
    verdict: Verdict
    claim: str
    agents: "list[AgentReport]"
    problems: list[str]
    doubts: list[str]
    notes: list[str]
    attack: "AttackReport | None" = None


def audit(run: Path, *, empirical: bool = False) -> Report:
    """Check a run folder; with ``empirical`` also attack its plan.

    Raises:
        RunFolderError: it is not a run folder, or its privacy card cannot be read.
        LedgerError: a ledger file cannot be read.
        ConfigError: with ``empirical``: its config.yaml is damaged.
    """
    from privssl.audit.claim_verification import check_claim

    check = check_claim(run)
    report = _build_report(run, check)
    if empirical and (card := check.files.card) is not None and check.journals:
        if report.verdict != Verdict.VIOLATED:
            from privssl.audit.canary_attack import attack
            from privssl.experiment.config import load_config

            config = check.files.config or load_config(run / "config.yaml")  # raises its error
            report.attack = attack(config, card, check.journals)
            report.problems += report.attack.problems
        else:
            report.notes.append("not attacked: what the ledgers say is already wrong")
        report.verdict = _decide_verdict(check, report)
    return report


def _build_report(run: Path, check: "ClaimCheck") -> Report:
    from privssl.privacy.card_text import guarantee_sentence

    card, config = check.files.card, check.files.config
    claim = "no claim was written" if card is None else card["sentence"]
    if card is None and not check.agents and (config is None or config.privacy is None):
        claim = guarantee_sentence(None)
    report = Report(
        str(run), Verdict.CONSISTENT, claim, check.agents, check.problems, check.doubts, check.notes
    )
    report.verdict = _decide_verdict(check, report)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    help_text = "Check the ledgers and the privacy claim of a run."
    parser = argparse.ArgumentParser(prog="python -m privssl.audit", description=help_text)
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="run folder")
    help_text = "attack the run's plan with canaries made here (minutes; needs none of its data)"
    parser.add_argument("--empirical", action="store_true", help=help_text)
    add_plugin_flag(parser)
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print the report as JSON")
    help_text = "print a Python program that recomputes epsilon with dp-accounting alone"
    formats.add_argument("--dp-event", action="store_true", help=help_text)
    options = parser.parse_args(argv)
    return run_command(
        lambda console, stack: _audit(options, stack), json=options.json,
        interrupted="Interrupted; nothing was changed. There is no verdict.",
    )  # fmt: skip


def _audit(options: argparse.Namespace, stack: ExitStack) -> int:
    with gc_paused():  # here, so that --help and usage errors stay fast
        import privssl.audit.claim_verification  # noqa: F401

    in_one_thread()
    stack.enter_context(imports_allowed(options.plugin, ALLOWED_BY_FLAG))
    if options.dp_event:
        return _print_program(options.run)
    report = audit(options.run, empirical=options.empirical)
    if options.json:
        results_to_standard_output(json.dumps(as_json(report), indent=2))
    else:
        _print_report(report)
    return int(report.verdict)


def as_json(report: Report) -> dict[str, Any]:
    """Return the report in the format of ``--json``."""
    return asdict(report) | {"verdict": report.verdict.name.lower()}


def _decide_verdict(check: "ClaimCheck", report: Report) -> Verdict:
    if report.problems or any(agent.problems for agent in check.agents):
        return Verdict.VIOLATED
    if check.files.card is None:
        return Verdict.INCONCLUSIVE if check.agents else Verdict.NO_GUARANTEE
    if check.files.card["guarantee"] is None:
        return Verdict.NO_GUARANTEE
    overdrawn = any((agent.spent or 0.0) > (agent.budget or 0.0) for agent in check.agents)
    if report.doubts or overdrawn or any(agent.open for agent in check.agents):
        return Verdict.INCONCLUSIVE
    if report.attack is not None and report.attack.baseline_only:
        return Verdict.INCONCLUSIVE
    return Verdict.CONSISTENT


def _print_program(run: Path) -> int:
    """Print a program that recomputes epsilon if the ledgers support the guarantee, else the
    reason.

    Returns the exit status of an audit.
    """
    from privssl.audit.claim_verification import check_claim

    check = check_claim(run)
    report = _build_report(run, check)
    if report.verdict == Verdict.VIOLATED:
        why = [
            "No program is printed for ledgers that do not bear out the claim:",
            *_format_problems(report),
        ]
        print("\n".join(why), file=sys.stderr)
    elif report.verdict == Verdict.NO_GUARANTEE:  # a number alone would look like one
        print("#", " ".join(report.claim.split()))  # as a comment: card text must not run
    else:
        results_to_standard_output("\n".join(_format_dp_events(check)))
    return int(report.verdict)


def _format_problems(report: Report) -> Iterator[str]:
    """Yield each problem as a line with its agent."""
    yield from report.problems
    for agent in report.agents:
        yield from (f"{agent.agent}: {problem}" for problem in agent.problems)


def _format_dp_events(check: "ClaimCheck") -> Iterator[str]:
    fixed_agents = {agent.agent for agent in check.agents if agent.fixed}
    for name, journal in check.journals.items():
        if journal.plans:
            yield f"# agent {name}, ledger ending in {journal.head}"
            fixed = name in fixed_agents or journal.plan.delta_of(journal.cost) == 0
            yield from () if fixed else _NOT_FIXED
            yield dp_event_source(is_protected(journal.events), journal.plan.budget.delta)


def _print_report(report: Report) -> None:
    console = Terminal(soft_wrap=True)
    if not console.is_terminal:
        console = Terminal(soft_wrap=True, width=120)  # files and pipes have no width
    if report.agents:
        console.print(_build_ledger_table(report))
    if report.attack is not None:
        console.print(_build_attack_table(report.attack))
    console.print("claim: " + escape(report.claim))
    for problem in _format_problems(report):
        console.print("[red]violated:[/red] " + escape(problem))
    for doubt in report.doubts:
        console.print("[yellow]in doubt:[/yellow] " + escape(doubt))
    for agent in report.agents:
        for note in agent.notes:
            console.print(f"note: {escape(agent.agent)}: {escape(note)}")
    for note in [*report.notes, *(report.attack.notes if report.attack else ())]:
        console.print("note: " + escape(note))
    console.print(f"verdict: [bold]{report.verdict.name}[/bold] ({_MEANING[report.verdict]})")
    if report.attack is not None:
        if report.verdict == Verdict.CONSISTENT:
            console.print(
                "No attack found evidence against the claim. The proof is the accounting."
            )
        console.print("What these attacks cannot see:")
        for kind in report.attack.cannot_see:
            console.print(f"  - {escape(kind)}")


def _build_ledger_table(report: Report) -> Table:
    table = Table(title=f"audit of {escape(report.run)}")
    numbers = ("budget", "claimed", "recomputed")
    # The card has charges per agent; the guarantee is the sentence below.
    headings = ("agent", "budget", "charged", "recomputed", "by", "PLD bounds", "visits", "ledger")
    for column in headings:
        table.add_column(column)
    for agent in report.agents:
        bounds = "-" if agent.pld_lower is None else f"at least {agent.pld_lower:.4f}"
        if agent.pld_upper is not None:
            bounds = f"{agent.pld_lower:.4f}..{agent.pld_upper:.4f}"
        cells = ["-" if (n := getattr(agent, name)) is None else round_up(n) for name in numbers]
        state = "broken" if agent.problems else f"verified, {agent.head[:8]}"
        table.add_row(escape(agent.agent), *cells, agent.method, bounds, str(agent.visits), state)
    return table


def _build_attack_table(attack: "AttackReport") -> Table:
    """Show the bound of each attack, its largest possible bound, and the claimed epsilon."""
    from privssl.audit.mechanism_attack import MechanismAttack
    from privssl.privacy.privacy_card import attack_bounds

    kind = "epsilon" if attack.sound else "NOMINAL epsilon"
    table = Table(title=f"attacks on the plan of {escape(attack.agent)}: {kind} "
                  f"{round_up(attack.epsilon)} at delta {attack.delta:g}")  # fmt: skip
    for column in ("attack", "what was tried", "leaks at least (95%)", "can show at most"):
        table.add_column(column)
    if (mechanism := attack.mechanism) is not None:
        bound, limit = f"epsilon {mechanism.lower_bound:.2f}", f"{mechanism.ceiling:.2f}"
        table.add_row("mechanism", mechanism.trials_run, bound, limit)
        if isinstance(mechanism, MechanismAttack):
            limit = f"{mechanism.sensitivity:.4f} clip norms"
            table.add_row("", "most that one row adds", limit, "")
        for name, p in mechanism.p_values.items():
            table.add_row("", f"{name} as promised", f"p = {p:.2g}", "")
    if (canaries := attack.canaries) is not None:
        trials = (
            f"{canaries.canaries} canaries, {canaries.guesses} guesses, {canaries.correct} right, "
            f"{canaries.visits} visits"
        )
        bound, limit = f"epsilon {canaries.lower_bound:.2f}", f"{canaries.ceiling:.2f}"
        table.add_row("canaries", trials, bound, limit)
        allowed = attack_bounds(attack.epsilon, attack.delta)["tpr_at_1_percent_fpr"]
        bound = f"claim allows {100 * allowed:.1f}%" if attack.sound else "nothing is claimed"
        for name, rates in canaries.rates.items():
            label = f"{name}: members found at 1% false alarms ({bound})"
            auc = f"AUC {rates.auc:.3f} [{rates.auc_low:.3f}, {rates.auc_high:.3f}]"
            table.add_row("", label, f"{100 * rates.tpr_at_1_percent_fpr:.1f}%", auc)
    return table


_NOT_FIXED = (
    "# Visits were not exactly those fixed beforehand, so the claim is the budget of the accounts.",
    "# What follows would be the bound of a plan that had fixed these visits.",
)
_MEANING = {
    Verdict.CONSISTENT: "the ledgers bear out the claim",
    Verdict.VIOLATED: "do not rely on the claim",
    Verdict.INCONCLUSIVE: "nothing refutes the claim, but not all could be put to the test",
    Verdict.NO_GUARANTEE: "there is no guarantee to check",
}


if __name__ == "__main__":
    sys.exit(main())
