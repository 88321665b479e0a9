"""``python -m privssl.site SITE.yaml``: check a site, and print its rows and spent epsilon.

    --serve                  answer requests on the site's socket until stopped
    --superlink HOST:PORT    as --serve, and keep a SuperNode running that relays Flower's messages

Exit status: 0; 2 operator error, with file, line and advice; 130 stopped while serving. A stopped
site can be started again at any time.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from privssl.errors import UserError
from privssl.runtime.command import run_command
from privssl.runtime.console import Terminal
from privssl.runtime.process import LogFile, in_one_thread, logging_to, private_umask, tune_malloc

if TYPE_CHECKING:
    from privssl.site.request_handler import SiteRequestHandler
    from privssl.site.settings import SiteConfig

log = logging.getLogger("privssl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    options = _build_parser().parse_args(argv)

    def run(console: Terminal, stack: ExitStack) -> int:
        stack.enter_context(private_umask())
        return _run_site(options, console, stack)

    return run_command(run, json=False, interrupted="Stopped. The same command starts it again.")


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m privssl.site",
        description="Check one agent's site, and print its rows and spent epsilon. Nothing is "
        "sent without --serve or --superlink.",
    )
    parser.add_argument("site", type=Path, help="YAML file with sections site, rows and budget")
    parser.add_argument("--serve", action="store_true", help="answer requests on a Unix socket")
    parser.add_argument(
        "--superlink", metavar="HOST:PORT",
        help="as --serve, and keep a SuperNode running that connects the site to this SuperLink",
    )  # fmt: skip
    parser.add_argument(
        "--certificate", default="", metavar="FILE",
        help="root certificate of the SuperLink; required unless it is on this machine",
    )  # fmt: skip
    parser.add_argument(
        "--key", default="", metavar="FILE",
        help="private key of this site (OpenSSH, ECDSA, no password), for a SuperLink with TLS",
    )  # fmt: skip
    return parser


def _run_site(options: argparse.Namespace, console: Terminal, stack: ExitStack) -> int:
    from privssl.site import settings, socket_server
    from privssl.site.startup import open_site
    from privssl.site.supernode import SuperNode, check_files

    site = settings.load_site_config(options.site)
    check_files(options.certificate, options.key)
    tune_malloc()
    handler = open_site(site)
    key = (Path(options.key),) if options.key else ()  # a reader could pose as this site
    for path in filter(_is_readable_by_others, (*site.secrets, *key)):
        log.warning(
            "Other users of this system can read %s. Remove their rights: chmod -R go=", path
        )
    lines = _describe_site(site, handler)
    for line in lines:
        console.print(line, markup=False)
    if options.serve or options.superlink:
        try:
            site.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{site.folder}: cannot be written: {error.strerror}. Free space, or correct its "
                "rights or site.folder"
            ) from None
        stack.enter_context(logging_to(LogFile(site.folder / "site.log")))
        node = None
        if options.superlink:
            node = SuperNode(
                site.door, site.folder / "flower", options.superlink, options.certificate,
                options.key, site.secrets,
            )  # fmt: skip
            stack.callback(node.stop)

        def begin() -> None:  # not earlier: another process may serve this site with the same key
            log.info("Serving: %s", " ".join(lines))
            if node is not None:
                node.start()
            console.print(f"Serving on {site.door}. Ctrl-C stops it.", markup=False)

        socket_server.serve(site.door, lambda frame: _handle_in_one_thread(handler, frame), begin)
    return 0


def _is_readable_by_others(path: Path) -> bool:
    """Whether other system users, such as a SuperNode's, can read a file or folder."""
    path = path.resolve()
    if not path.exists() or not path.stat().st_mode & 0o044:
        return False
    return all(parent.stat().st_mode & 0o011 for parent in path.parents)


def _handle_in_one_thread(handler: "SiteRequestHandler", frame: bytes) -> bytes:
    in_one_thread()  # applies to the calling thread
    return handler.handle(frame)


def _describe_site(site: "SiteConfig", handler: "SiteRequestHandler") -> list[str]:
    """Summary for the operator; it does not leave the machine."""
    counts = " and ".join(
        f"{len(rows)} {kind}"
        for kind, rows in (
            ("labelled", handler.agent.held_labelled),
            ("unlabelled", handler.agent.held_unlabelled),
        )
        if rows is not None
    )
    return [
        f"{handler.agent.id}, a {handler.agent.role} agent with {counts} rows.",
        f"Takes part in {site.path(site.site.config)}, hash {handler.agreement[:12]}: a "
        f"coordinator with another one is refused. {handler.task}.",
        _describe_spending(site),
        f"Replies, memories and log: {site.folder}.",
    ]


def _describe_spending(site: "SiteConfig") -> str:
    from accounting.ledger import read_journal

    if site.site.role == "query":
        return "No labels: its rows have no privacy budget."
    if site.budget is None:
        return "No budget: its labelled rows are used without protection."
    journal = read_journal(site.ledger / f"{site.site.agent}.jsonl")
    steps = len(journal.events)
    return (
        f"Epsilon {journal.epsilon:.4f} of {site.budget.epsilon:g} spent (delta "
        f"{site.budget.delta:g}) in {steps} step{'s' * (steps != 1)}. Ledger: {site.ledger}."
    )


if __name__ == "__main__":
    sys.exit(main())
