"""Sites without a network, for tests: requests are delivered by a function call, or by a fork.

``InProcessTransport`` hands a request to the handler in this process; ``ForkedTransport`` to a
process of its own for each request, as Flower does, which a test can have killed at a chosen
moment. Not a test itself.
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
AGREED = "a" * 64
#: So short that a test of a site that never answers takes no second.
SOON = RemoteTimeouts(join_seconds=0.3, visit_seconds=20.0, retry_interval=0.01)

Handler = Callable[[bytes], bytes | None]


class InProcessTransport:
    """A transport whose addresses are functions. ``sent`` has every request that was sent."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.handlers = dict(handlers)
        self.sent: list[tuple[str, bytes]] = []
        self.closed = 0

    def addresses(self) -> Sequence[str]:
        return list(self.handlers)

    def exchange(self, frames: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        self.sent += frames.items()
        came = {address: self.deliver(address, frame) for address, frame in frames.items()}
        return {address: answer for address, answer in came.items() if answer is not None}

    def deliver(self, address: str, frame: bytes) -> bytes | None:
        if address not in self.handlers:
            return None
        return self.handlers[address](frame)

    def close(self) -> None:
        self.closed += 1


class ForkedTransport(InProcessTransport):
    """Each request is answered by a process of its own; one that ends otherwise has no answer."""

    def deliver(self, address: str, frame: bytes) -> bytes | None:
        return in_a_fork(lambda: self.handlers[address](frame) or b"")


def fork() -> int:
    """``os.fork``, without its warning of threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def open_files() -> set[str]:
    """The files that this process has open, by number. Garbage that earlier tests left may hold
    some, and would close them at any moment: it is collected first."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def in_a_fork(work: Callable[[], bytes]) -> bytes | None:
    """What ``work`` gives in a process of its own; None where that process ended before."""
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
        said = pipe.read()
    os.waitpid(child, 0)
    return said[1:] if said else None


@contextlib.contextmanager
def beside(work: Callable[[Callable[[], None]], None]) -> Iterator[Callable[[], None]]:
    """A process of its own at work, from when it has called what ``work`` is given; yields what
    kills it."""
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
            assert pipe.read(1) == b"!", "it ended before"
        yield kill
    finally:
        kill()


def make_handler(
    agent: Agent, algorithm: Any, folder: Path, *, seed: int = 3, **own: Any
) -> SiteRequestHandler:
    """A site for an agent whose rows are under no account, unless ``own`` says so."""
    how: dict[str, Any] = {
        "agreement": AGREED, "store": Store(folder / agent.id, 64), "device": CPU,
        "open_account": None, "share_notes": True,
    }  # fmt: skip
    return SiteRequestHandler(
        agent=agent, algorithm=copy.deepcopy(algorithm), seed=seed, **(how | own)
    )


def engine(
    parties: Sequence[Agent], algorithm: Any, seed: int, folder: Path, *,
    transport: type[InProcessTransport] = InProcessTransport, terms: RemoteTimeouts = SOON,
) -> SitesEngine:  # fmt: skip
    """An engine over a site for each agent; a labelled server stays at home."""
    sites = {a.id: make_handler(a, algorithm, folder, seed=seed) for a in parties if not _here(a)}
    home = LocalEngine([a for a in parties if _here(a)], seed=seed, device=CPU)
    return SitesEngine(
        transport({f"at {name}": site.handle for name, site in sites.items()}),
        [agent.ref for agent in parties],
        algorithm=algorithm, agreement=AGREED, home=home, timeouts=terms,
    )  # fmt: skip


def _here(agent: Agent) -> bool:
    return agent.location is AgentLocation.SERVER


@contextlib.contextmanager
def at_moment(owner: Any, name: str, action: Callable[..., Any]) -> Any:
    """Inside, ``owner.name`` is ``action(the old one, ...)``."""
    old = getattr(owner, name)
    setattr(owner, name, lambda *given, **named: action(old, *given, **named))
    try:
        yield
    finally:
        setattr(owner, name, old)
