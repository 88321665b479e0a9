"""Sites without a network, for tests: requests are delivered by a function call, or by a fork.

``InProcessTransport`` calls the handler in this process. ``ForkedTransport`` calls it in a new
process for each request, as Flower does; a test can kill that process. Not a test itself.
"""

import contextlib
import copy
import gc
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from privssl.core.agents import Agent, AgentLocation
from privssl.engines.local import LocalEngine
from privssl.engines.remote import SitesEngine
from privssl.remote.discovery import RemoteTimeouts
from privssl.site.request_handler import SiteRequestHandler
from privssl.site.storage import Store

CPU = torch.device("cpu")
AGREEMENT = "a" * 64
#: Short enough that a test of a site that never replies takes under a second.
SHORT_TIMEOUTS = RemoteTimeouts(join_seconds=0.3, visit_seconds=20.0, retry_interval=0.01)

Handler = Callable[[bytes], bytes | None]


class InProcessTransport:
    """A transport whose addresses are functions. ``sent`` lists every request that was sent."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.handlers = dict(handlers)
        self.sent: list[tuple[str, bytes]] = []
        self.closed = 0

    def addresses(self) -> Sequence[str]:
        return list(self.handlers)

    def exchange(self, frames: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        self.sent += frames.items()
        answers = {address: self.deliver(address, frame) for address, frame in frames.items()}
        return {address: answer for address, answer in answers.items() if answer is not None}

    def deliver(self, address: str, frame: bytes) -> bytes | None:
        if address not in self.handlers:
            return None
        return self.handlers[address](frame)

    def close(self) -> None:
        self.closed += 1


class ForkedTransport(InProcessTransport):
    """A new process handles each request; if it ends early, there is no reply."""

    def deliver(self, address: str, frame: bytes) -> bytes | None:
        return in_a_fork(lambda: self.handlers[address](frame) or b"")


def fork() -> int:
    """``os.fork``, without its warning of threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def open_files() -> set[str]:
    """Descriptors of the open files of this process.

    Garbage of earlier tests may own some and close them at any moment, so it is collected first.
    """
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def in_a_fork(work: Callable[[], bytes]) -> bytes | None:
    """Call ``work`` in a fork and return its result, or None if the fork ended early."""
    ours, theirs = os.pipe()
    if (child := fork()) == 0:
        status = 1
        try:
            os.close(ours)
            with open(theirs, "wb") as pipe:
                pipe.write(b"!" + work())
            status = 0
        finally:
            os._exit(status)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        output = pipe.read()
    os.waitpid(child, 0)
    return output[1:] if output else None


@contextlib.contextmanager
def process_at_work(work: Callable[[Callable[[], None]], None]) -> Iterator[Callable[[], None]]:
    """Run ``work`` in a fork until it calls its argument; yields a function that kills the fork."""
    ours, theirs = os.pipe()
    if (child := fork()) == 0:
        try:
            os.close(ours)

            def is_at_work() -> None:
                os.write(theirs, b"!")

            work(is_at_work)
        finally:
            os._exit(1)
    os.close(theirs)
    killed = False

    def kill() -> None:
        nonlocal killed
        if not killed:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            killed = True

    try:
        with open(ours, "rb") as pipe:
            assert pipe.read(1) == b"!", "it ended early"
        yield kill
    finally:
        kill()


def make_handler(
    agent: Agent, algorithm: Any, folder: Path, *, seed: int = 3, **own: Any
) -> SiteRequestHandler:
    """A site for an agent; without an account, unless ``own`` has one."""
    how: dict[str, Any] = {
        "agreement": AGREEMENT, "store": Store(folder / agent.id, 64), "device": CPU,
        "open_account": None, "share_notes": True,
    }  # fmt: skip
    return SiteRequestHandler(
        agent=agent, algorithm=copy.deepcopy(algorithm), seed=seed, **(how | own)
    )


def engine(
    parties: Sequence[Agent], algorithm: Any, seed: int, folder: Path, *,
    transport: type[InProcessTransport] = InProcessTransport,
    timeouts: RemoteTimeouts = SHORT_TIMEOUTS,
) -> SitesEngine:  # fmt: skip
    """An engine over one site per agent; a labelled server stays in this process."""
    sites = {
        a.id: make_handler(a, algorithm, folder, seed=seed) for a in parties if not _at_server(a)
    }
    home = LocalEngine([a for a in parties if _at_server(a)], seed=seed, device=CPU)
    return SitesEngine(
        transport({f"at {name}": site.handle for name, site in sites.items()}),
        [agent.ref for agent in parties],
        algorithm=algorithm, agreement=AGREEMENT, home=home, timeouts=timeouts,
    )  # fmt: skip


def _at_server(agent: Agent) -> bool:
    return agent.location is AgentLocation.SERVER


@contextlib.contextmanager
def call_replaced(owner: Any, name: str, action: Callable[..., Any]) -> Any:
    """Replace ``owner.name`` by ``action(original, ...)``."""
    old = getattr(owner, name)
    setattr(owner, name, lambda *given, **named: action(old, *given, **named))
    try:
        yield
    finally:
        setattr(owner, name, old)
