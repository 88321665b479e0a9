"""``python -m privssl.site SITE.yaml``: check a site, and say who it is and what it would spend.

    --answer LETTER    answer the letter in a file on standard output, for a carrier of one's own

Exit status: 0; 2 the operator's mistake: what is wrong, where (file and line), what to do.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from accounting.errors import AccountingError
from privssl.errors import UserError
from privssl.process import LogFile, Screen, logging_to, private_files

if TYPE_CHECKING:
    from privssl.site.settings import SiteConfig

log = logging.getLogger("privssl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(argv)
    with ExitStack() as stack:
        stack.enter_context(logging_to(Screen()))
        try:
            return _site(options, stack)
        except (UserError, AccountingError) as problem:
            log.error("%s", problem)
            return problem.exit_status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m privssl.site",
        description="Check the site of one agent, and say what it holds and may spend.",
    )
    parser.add_argument("site", type=Path, help="a YAML file: see docs/deploy.md")
    parser.add_argument(
        "--answer", type=Path, metavar="LETTER",
        help="answer the letter in this file, on standard output",
    )  # fmt: skip
    return parser


def _site(options: argparse.Namespace, stack: ExitStack) -> int:
    from privssl.site import settings

    site = settings.load(options.site)
    if options.answer is not None:
        try:
            letter = options.answer.read_bytes()
        except OSError as error:
            raise UserError(f"{options.answer}: {error.strerror}. --answer names a file") from None
        sys.stdout.buffer.write(answered(site, letter))
        return 0
    stack.enter_context(private_files())
    _describe(site, Console(highlight=False, soft_wrap=True))
    return 0


def answered(site: "SiteConfig", letter: bytes) -> bytes:
    """The answer of a site to one letter. Never an exception: a word, and the rest in its log.

    The site is opened for this letter alone: a carrier may start a process for each.
    """
    from privssl import wire
    from privssl.site.desk import word_for
    from privssl.site.opening import opened

    with ExitStack() as stack:
        try:
            stack.enter_context(private_files())
            site.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(logging_to(LogFile(site.folder / "site.log")))
            _one_thread()
            return opened(site).handle(letter)
        except Exception as error:
            word = word_for(error)
            # What is wrong with its own files is for its operator to mend: it takes no part.
            word = "data" if word == "failed" and isinstance(error, UserError) else word
            log.error("Cannot answer (%s): %s", word, error, exc_info=word == "failed")
            return wire.to_bytes(wire.Answer("", error=word))


def _one_thread() -> None:
    """More threads would change the order of sums, and with it the last bits of a result."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _describe(site: "SiteConfig", console: Console) -> None:
    """What the operator is told. Nothing of it leaves the machine."""
    from privssl.site.opening import opened

    desk = opened(site)
    counts = {
        kind: len(rows)
        for kind, rows in (
            ("labelled", desk.agent.held_labelled), ("unlabelled", desk.agent.held_unlabelled),
        )
        if rows is not None
    }  # fmt: skip
    held = " and ".join(f"{count} {kind}" for kind, count in counts.items())
    lines = [
        f"{desk.agent.id}, a {desk.agent.role} agent with {held} rows.",
        f"Takes part in {site.path(site.site.config)}, agreement {desk.agreement[:12]}: a "
        "coordinator with another one gets no visit.",
        _spending(site, desk),
        f"Keeps ledger, replies, memories and log in {site.folder}.",
    ]
    for line in lines:
        console.print(line, markup=False)


def _spending(site: "SiteConfig", desk: Any) -> str:
    if desk.agent.held_labelled is None:
        return "Holds no labels: nothing is promised for its rows, and nothing spent."
    if desk.open_account is None or site.budget is None:
        return "No budget: its labelled rows are used without protection."
    account = desk.open_account("")
    try:
        spent, visits, more = account.spent(), account.visits(), account.visits_left()
    finally:
        account.close()
    return (
        f"Epsilon {spent:.4f} of {site.budget.epsilon:g} spent (delta {site.budget.delta:g}) in "
        f"{visits} visits; the rest pays for {more} more of the present plan. Ledger in "
        f"{site.ledger}."
    )


if __name__ == "__main__":
    sys.exit(main())
