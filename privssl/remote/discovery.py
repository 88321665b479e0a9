"""Find the sites of a run by sending every address an identification request.

    a known name, the run's config and role    the site takes part
    two responsive sites with one name         the run stops
    another version or config                  the run stops
    a name that is not its key's               no steps are sent there; see remote/node_keys.py
    a key of no agent                          no request is sent there

A site that restarts is found again at its new address.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from privssl import __version__
from privssl.core.agents import AgentRef
from privssl.errors import UserError
from privssl.remote import protocol
from privssl.remote.protocol import IdentifyRequest, Identity, StepResponse, WireError
from privssl.runtime.code_version import python_fingerprint

log = logging.getLogger("privssl")

#: Error codes that the coordinator itself sets.
OWN_ERROR_CODES: Mapping[str, str] = {
    "gone": "no reply came before the deadline. The step may still have been run",
    "garbled": "its reply is not a valid one to this request. Check who has its key",
}
STOP = ("version", "config")  # errors that stop a run whatever its config


class SiteError(UserError):
    """A site cannot take part, or a missing reply stops the run."""


class Transport(Protocol):
    """Message transport. It defines addresses; a site's restart may change its address."""

    def addresses(self) -> Sequence[str]:
        """Return all addresses that are reachable now."""
        ...

    def exchange(self, frames: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        """Send each message to its address and wait at most ``seconds``.

        Returns:
            address -> answer, for those that came.
        """
        ...

    def close(self) -> None:
        """Release everything. May be called twice."""
        ...


@dataclass(frozen=True, kw_only=True)
class RemoteTimeouts:
    """How long to wait, and when to continue without an agent."""

    join_seconds: float = 120.0  # for all sites to join
    visit_seconds: float = 600.0  # for one step, from the request to the reply
    hello_seconds: float = 30.0  # for an identity; an unresponsive site must not delay the others
    retry_interval: float = 1.0  # seconds between two requests to an unresponsive site
    absent: Literal["stop", "skip"] = "stop"  # when a sequential call has no reply
    quorum: float = 1.0  # share of a parallel step's calls that must have a reply, in (0, 1]


DEFAULT_TIMEOUTS = RemoteTimeouts()


class SiteDirectory:
    """The sites of a run; ``address`` maps agent -> address."""

    def __init__(
        self,
        transport: Transport,
        expected: Sequence[AgentRef],
        *,
        agreement: str,
        ledgers: Sequence[str],
        timeouts: RemoteTimeouts,
        key_owner: Callable[[str], str] | None = None,
        task: str = "",
    ) -> None:
        """Set the expected sites.

        Args:
            expected: agents whose sites take part.
            agreement: ``config.compatibility_hash`` of this run.
            ledgers: agents whose journals are needed at the end.
            key_owner: maps an address to the agent with its key, or to an empty string; None:
                sites are not authenticated.
            task: classes and shape of a row here, for errors.
        """
        self.address: dict[str, str] = {}
        self._transport, self._timeouts, self._key_owner = transport, timeouts, key_owner
        self._expected = {agent.id: agent for agent in expected}
        self._compatibility_hash, self._ledgers = agreement, ledgers
        self._own = f"Here the hash is {agreement[:12]}, of {task or 'this task'}"
        self._rejected: set[str] = set()
        self._refused: dict[str, str] = {}  # address -> why it gets no steps
        self._other_code: set[tuple[str, str]] = set()  # agents and code that were warned of

    def wait_for_sites(self) -> None:
        """Wait until all sites have joined. Raises SiteError."""
        deadline = time.monotonic() + self._timeouts.join_seconds
        while True:
            self.poll(min(self._timeouts.join_seconds, self._timeouts.visit_seconds))
            missing = [name for name in self._expected if name not in self.address]
            if not missing:
                log.info("All %d sites have joined", len(self._expected))
                return
            if time.monotonic() > deadline:
                refused = "".join(f". {text}" for text in sorted(self._refused.values()))
                raise SiteError(
                    f"{len(missing)} of {len(self._expected)} sites are not there after "
                    f"{self._timeouts.join_seconds:g} s: {', '.join(missing)}{refused}. Start "
                    "them, and look at their logs"
                )
            time.sleep(self._timeouts.retry_interval)

    def poll(self, seconds: float) -> None:
        """Identify all new addresses. Raises SiteError."""
        reachable = self._transport.addresses()
        self.address = {name: a for name, a in self.address.items() if a in reachable}
        known = {*self.address.values(), *self._rejected}
        new = [address for address in reachable if address not in known and self._has_key(address)]
        if not new:
            return
        limit = min(seconds, self._timeouts.hello_seconds)
        request = protocol.to_bytes(IdentifyRequest())
        answers = self._transport.exchange(dict.fromkeys(new, request), limit)
        for address in sorted(answers):
            self._identify(address, answers[address])

    def _has_key(self, address: str) -> bool:
        """Return whether requests may be sent there; if names are pinned, only to agents' keys."""
        if self._key_owner is None or self._key_owner(address):
            return True
        log.warning("A site whose key is not in run.keys is ignored")
        self._rejected.add(address)
        return False

    def _identify(self, address: str, data: bytes) -> None:
        try:
            reply = protocol.from_bytes(data, Identity, StepResponse)
        except WireError as error:
            self._report_error(address, error.error_code, f" ({error})")
            return
        if isinstance(reply, StepResponse):
            self._report_error(address, reply.error)
        elif self._key_owner is not None and (key := self._key_owner(address)) != reply.agent:
            self._refuse(
                address,
                f"A site with the key of {key} says that it is {reply.agent}, and gets no "
                f"requests: its operator must name {key} in SITE.yaml, or use its own key",
            )
        elif reply.agent not in self._expected:
            log.warning("A site has the name %s, which this run does not have", reply.agent)
            self._rejected.add(address)
        elif self._is_responding(reply.agent):
            raise SiteError(f"Two sites call themselves {reply.agent}. Stop the wrong one")
        elif reply.agreement != self._compatibility_hash:
            raise SiteError(
                f"{reply.agent}: {describe_error('config')}. {self._own}; its operator sees the "
                f"same of its site (hash {reply.agreement[:12]}): python -m privssl.site SITE.yaml"
            )
        elif reply.role != self._expected[reply.agent].role:
            raise SiteError(
                f"{reply.agent} is a {reply.role} agent there and "
                f"{self._expected[reply.agent].role} here. Compare the two configs"
            )
        elif reply.agent in self._ledgers and not reply.shows_ledger:
            raise SiteError(
                f"{reply.agent} does not share its ledger, which the privacy card needs. Its "
                "operator must set site.share_ledger: true"
            )
        else:
            self._refused.pop(address, None)
            self.address[reply.agent] = address
            self._warn_of_other_code(reply)

    def _warn_of_other_code(self, identity: Identity) -> None:
        """Warn once for each agent whose site runs other sources of the same version."""
        own_code = python_fingerprint()
        if identity.code != own_code and (identity.agent, identity.code) not in self._other_code:
            self._other_code.add((identity.agent, identity.code))
            log.warning(
                "%s runs other code of privssl %s (sources %s, here %s), so results may differ. "
                "Install the same checkout on both sides",
                identity.agent, __version__, identity.code, own_code,
            )  # fmt: skip

    def _is_responding(self, name: str) -> bool:
        """Return whether the known site of this name responds.

        Flower lists a dead SuperNode for a minute beside its replacement.
        """
        former = self.address.get(name)
        if former is None:
            return False
        request = {former: protocol.to_bytes(IdentifyRequest())}
        if self._transport.exchange(request, self._timeouts.hello_seconds):
            return True
        log.warning("%s has moved to another address; its previous one does not respond", name)
        self._rejected.add(former)
        return False

    def _refuse(self, address: str, text: str) -> None:
        """Log once why an address gets no steps. It is identified again at the next poll."""
        if self._refused.get(address) != text:
            log.warning("%s", text)
            self._refused[address] = text

    def _report_error(self, address: str, code: str, detail: str = "") -> None:
        owner = "" if self._key_owner is None else f" (with the key of {self._key_owner(address)})"
        if code in STOP:
            raise SiteError(
                f"A site that wants to take part{owner} cannot: {describe_error(code)}{detail}"
            )
        log.warning("A site%s cannot take part yet: %s", owner, describe_error(code))


def describe_error(code: str) -> str:
    """Explain an error code to the coordinator's operator."""
    return {**protocol.ERROR_CODES, **OWN_ERROR_CODES}.get(code, code)
