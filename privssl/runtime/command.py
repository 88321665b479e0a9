"""Common parts of all commands: flags, streams, signals and exit status.

Imports no slow module, so that usage errors are reported before torch is loaded.
"""

import argparse
import logging
from collections.abc import Callable
from contextlib import ExitStack
from difflib import get_close_matches
from typing import NoReturn

from accounting.errors import AccountingError
from privssl.errors import UserError
from privssl.runtime.console import Screen, Terminal, open_standard_streams
from privssl.runtime.process import INTERRUPTED, STOPPING, interrupt_on_signals, logging_to

log = logging.getLogger("privssl")


class ConfigParser(argparse.ArgumentParser):
    """The parser of a command that reads configs; it suggests keys for unknown flags."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            flags = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
            options = self._option_string_actions
            similar = [flag for word in flags for flag in get_close_matches(word, options, 1, 0.8)]
            message += (
                f". Did you mean {similar[0]}?"
                if similar
                else ". A value of the config is section.key=value, such as algorithm.rounds=5"
            )
        super().error(message)


def add_usual_flags(parser: argparse.ArgumentParser, *, dry_run: str, json: str) -> None:
    """Add ``--dry-run``, ``--json`` and ``--quiet``, with the help texts of the first two."""
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    parser.add_argument("--json", action="store_true", help=json)
    parser.add_argument("--quiet", action="store_true", help="do not show progress")


#: How to allow a plug-in for a command that reads a run folder, for errors.
ALLOWED_BY_FLAG = "give --plugin {name}"


def add_plugin_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--plugin``: a run folder must not choose code to import."""
    parser.add_argument(
        "--plugin", action="append", default=[], metavar="NAME",
        help="allow the import of this plug-in, by its name in config.yaml",
    )  # fmt: skip


def run_command(body: Callable[[Terminal, ExitStack], int], *, json: bool, interrupted: str) -> int:
    """Run the body of a command; return its exit status. User errors are printed as messages.

    Args:
        body: gets a console, and a stack for cleanup.
        json: whether standard output is for JSON alone; the console is then standard error.
        interrupted: what to print after Ctrl-C.
    """
    open_standard_streams()
    console = Terminal(stderr=json, highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        stack.enter_context(logging_to(Screen()))
        stack.enter_context(interrupt_on_signals(*STOPPING))
        try:
            return body(console, stack)
        except (UserError, AccountingError) as problem:
            log.error("%s", problem)
            return problem.exit_status
        except KeyboardInterrupt:
            log.error("%s", interrupted)
            return INTERRUPTED
