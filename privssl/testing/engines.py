"""Engines that vary what algorithms must not rely on, and sites in one process."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from privssl.core.agents import Agent, AgentLocation
from privssl.core.engine import Call
from privssl.core.messages import Declined, Message, Reply
from privssl.engines.local import LocalEngine, PseudoLabelBuffer
from privssl.engines.remote import SitesEngine
from privssl.remote.discovery import RemoteTimeouts
from privssl.site.request_handler import SiteRequestHandler
from privssl.site.storage import Store

AGREED = "a" * 64
CPU = torch.device("cpu")


class UnusedAlgorithmEngine(LocalEngine):
    """Run every visit with a new algorithm object, as in a separate process."""

    layout: torch.memory_format | None = None  # of all networks, before each visit
    _first: Any = None

    def _run_on_agent(
        self, call: Call, message: Message, buffer: PseudoLabelBuffer | None
    ) -> Reply[Any]:
        self._first = self._first or copy.deepcopy(call.step.__self__)  # type: ignore[attr-defined]
        fresh = copy.deepcopy(self._first)
        for network in fresh.networks().values() if self.layout else ():
            network.to(memory_format=self.layout)
        step = getattr(fresh, call.step.__name__)
        return super()._run_on_agent(dataclasses.replace(call, step=step), message, buffer)


class ReverseOrderEngine(LocalEngine):
    """Run the agents of a parallel step in reverse order."""

    def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        return list(super().deliver(calls[::-1]))[::-1]


class DecliningEngine(LocalEngine):
    """Decline every call at every agent."""

    def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        return [Reply(call.to, Declined("it does not take part")) for call in calls]


class RecordingEngine(LocalEngine):
    """Record all messages: ``recorded`` has every call and its reply."""

    def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        replies = list(super().deliver(calls))
        self.recorded = [*getattr(self, "recorded", []), *zip(calls, replies, strict=True)]
        return replies


class _InProcessTransport:
    """Deliver frames to sites in this process, as Flower does between machines."""

    def __init__(self, sites: Mapping[str, Callable[[bytes], bytes | None]]) -> None:
        self._sites = dict(sites)

    def addresses(self) -> Sequence[str]:
        return list(self._sites)

    def exchange(self, frames: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        replies = {address: self._sites[address](frame) for address, frame in frames.items()}
        return {address: reply for address, reply in replies.items() if reply is not None}

    def close(self) -> None:
        return


def sites_engine(agents: Sequence[Agent], algorithm: Any, seed: int, folder: Path) -> SitesEngine:
    """Create an engine over a site for each agent, in this process; a labelled server has none.

    Each visit uses a new algorithm object. ``folder``: of the sites' memories.
    """

    def make_site(agent: Agent) -> Callable[[bytes], bytes | None]:
        handler = SiteRequestHandler(
            agent=agent, algorithm=algorithm, seed=seed, agreement=AGREED,
            store=Store(folder / agent.id, 64), device=CPU, open_account=None, share_notes=True,
        )  # fmt: skip

        def handle(frame: bytes) -> bytes | None:
            new = dataclasses.replace(handler, algorithm=copy.deepcopy(unused))
            return new.handle(frame)

        return handle

    unused = copy.deepcopy(algorithm)
    at_server = [agent for agent in agents if agent.location is AgentLocation.SERVER]
    sites = {f"at {a.id}": make_site(a) for a in agents if a not in at_server}
    return SitesEngine(
        _InProcessTransport(sites), [agent.ref for agent in agents], algorithm=algorithm,
        agreement=AGREED, home=LocalEngine(at_server, seed=seed, device=CPU),
        timeouts=RemoteTimeouts(join_seconds=5.0, visit_seconds=60.0, retry_interval=0.01),
    )  # fmt: skip
