"""``python -m privssl.doctor``: check the installation and print advice for each problem.

Downloads nothing, writes nothing and trains nothing. Exit status: 0 no problem, 1 a problem, 2 a
usage error.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from privssl.installation.finding import Check, Finding

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m privssl.doctor",
        description="Check the installation and print advice for each problem.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(argv)
    try:  # the imports of the commands need packages themselves
        from privssl.installation import software  # noqa: F401
        from privssl.runtime.command import run_command
    except ImportError as error:
        print(f"problem: {error}. Run pip install -e . in the checkout.", file=sys.stderr)
        return 1
    return run_command(
        partial(_print_findings, options.json), json=options.json, interrupted="Interrupted."
    )


def _print_findings(as_json: bool, console: Any, _: ExitStack) -> int:
    from privssl.runtime.console import results_to_standard_output

    findings = find()
    problems = sum(finding.status == "problem" for finding in findings)
    if as_json:
        lines = [finding._asdict() for finding in findings]
        results_to_standard_output(json.dumps({"ok": not problems, "checks": lines}, indent=2))
    else:
        for finding in findings:
            status = f"[{STYLES[finding.status]}]{finding.status:8}[/]"
            console.print(status, end="")
            console.print(f"{finding.name}: {finding.text}", markup=False)
            if finding.advice:
                console.print(f"{'':10}{finding.advice}", markup=False)
        notes = sum(finding.status == "note" for finding in findings)
        console.print(f"{problems} problems, {notes} notes.")
    return 1 if problems else 0


def find() -> list["Finding"]:
    """Return all findings, with the checks that need torch last."""
    from privssl.installation import machine, software
    from privssl.installation.finding import run_checks

    checks: list[Check] = [
        software.check_python, software.check_packages, software.check_optional_packages,
        machine.check_cores, machine.check_threads, machine.check_memory, machine.check_disk,
        machine.check_text_and_clock, check_torch,
    ]  # fmt: skip
    return list(run_checks(checks))


def check_torch() -> list["Finding"]:
    """Run the checks that need torch, which may be missing or broken."""
    from privssl.installation.finding import run_checks
    from privssl.runtime.process import gc_paused, in_one_thread

    with gc_paused():
        from privssl.installation import computing

        in_one_thread()
    checks: list[Check] = [
        computing.check_kernels, computing.check_bfloat16, computing.check_gpu,
        computing.check_data_sets,
    ]  # fmt: skip
    return list(run_checks(checks))


if __name__ == "__main__":
    sys.exit(main())
