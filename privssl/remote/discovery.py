"""Which site is at which address: found by asking, and by the key where names are pinned.

    answers with its name           it has that name, if its config and its role are the run's
    two sites with one name         the run stops: nobody could say which of them was right (one
                                    that does not answer any more is not counted)
    another version or config       the run stops: no visit was made
    a name that is not its key's    it gets no visit, and both names are said; see
    ``remote/node_keys.py``
    a key that is nobody's          it is not even asked

Addresses come and go: a site that was restarted is found again, at whatever address.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from privssl.core.agents import AgentRef
from privssl.errors import UserError
from privssl.remote import protocol
from privssl.remote.protocol import IdentifyRequest, Identity, StepResponse, WireError

log = logging.getLogger("privssl")

#: What this side says where no word came, or none that can be used.
OWN_ERROR_CODES: Mapping[str, str] = {
    "gone": "no answer came before the deadline. It may have done the visit all the same",
    "garbled": "its answer is not one to this visit. Look at who has its key",
}
STOP = ("version", "config")  # no visit can ever be made: nothing to go on with


class SiteError(UserError):
    """A site cannot take part, or a visit has no reply and the run may not go on without it."""


class Transport(Protocol):
    """Carries letters. An address is its own affair, and may change with a restart."""

    def addresses(self) -> Sequence[str]:
        """All that can be reached now."""
        ...

    def exchange(self, frames: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        """Send each letter to its address and wait for the answers at most so long.

        Returns:
            address -> answer, for those that came; a letter whose carrier failed has none.
        """
        ...

    def close(self) -> None:
        """Let go. May be called twice."""
        ...


@dataclass(frozen=True, kw_only=True)
class RemoteTimeouts:
    """How long to wait, and when to go on without an agent."""

    join_seconds: float = 120.0  # for all sites to be there
    visit_seconds: float = 600.0  # for one visit, from the letter to the answer
    hello_seconds: float = 30.0  # for who is there: one that is mute holds up no visit of others
    retry_interval: float = 1.0  # seconds between two letters to a site that does not answer
    absent: Literal["stop", "skip"] = "stop"  # a call in sequence that has no reply
    quorum: float = 1.0  # share of a parallel step's calls that must have one, in (0, 1]


DEFAULT_TIMEOUTS = RemoteTimeouts()


class SiteDirectory:
    """The sites of a run: agent -> address, in ``address``."""

    def __init__(
        self,
        post: Transport,
        expected: Sequence[AgentRef],
        *,
        agreement: str,
        ledgers: Sequence[str],
        terms: RemoteTimeouts,
        key_owner: Callable[[str], str] | None = None,
    ) -> None:
        """
        Args:
            expected: agents whose sites are wanted.
            agreement: ``config.agreement`` of this run.
            ledgers: agents whose journals are wanted at the end.
            holder: the agent whose key the one at an address has, empty for nobody; None: names
                are pinned to no keys, and sites are believed.
        """
        self.address: dict[str, str] = {}
        self._post, self._terms, self._holder = post, terms, key_owner
        self._expected = {agent.id: agent for agent in expected}
        self._compatibility_hash, self._ledgers = agreement, ledgers
        self._rejected: set[str] = set()
        self._refused: dict[str, str] = {}  # address -> why the site there gets no visit

    def wait_for_sites(self) -> None:
        """Wait until all are there. Raises SiteError."""
        end = time.monotonic() + self._terms.join_seconds
        while True:
            self.poll(min(self._terms.join_seconds, self._terms.visit_seconds))
            missing = [name for name in self._expected if name not in self.address]
            if not missing:
                log.info("All %d sites are there", len(self._expected))
                return
            if time.monotonic() > end:
                refused = "".join(f". {text}" for text in sorted(self._refused.values()))
                raise SiteError(
                    f"{len(missing)} of {len(self._expected)} sites are not there after "
                    f"{self._terms.join_seconds:g} s: {', '.join(missing)}{refused}. Start them, "
                    "and look at their logs"
                )
            time.sleep(self._terms.retry_interval)

    def poll(self, seconds: float) -> None:
        """Ask every address that is not known who it is. Raises SiteError."""
        now = self._post.addresses()
        self.address = {name: a for name, a in self.address.items() if a in now}
        known = {*self.address.values(), *self._rejected}
        new = [address for address in now if address not in known and self._is_ours(address)]
        if not new:
            return
        limit = min(seconds, self._terms.hello_seconds)
        came = self._post.exchange(dict.fromkeys(new, protocol.to_bytes(IdentifyRequest())), limit)
        for address in sorted(came):
            self._meet(address, came[address])

    def _is_ours(self, address: str) -> bool:
        """Whether the one there may be asked: where names are pinned, by the key."""
        if self._holder is None or self._holder(address):
            return True
        log.warning("A site whose key is none of run.keys wants to take part. It is not asked")
        self._rejected.add(address)
        return False

    def _meet(self, address: str, data: bytes) -> None:
        try:
            found = protocol.from_bytes(data, Identity, StepResponse)
        except WireError as error:
            self._reject(address, error.error_code)
            return
        if isinstance(found, StepResponse):
            self._reject(address, found.error)
        elif self._holder is not None and (key := self._holder(address)) != found.agent:
            self._refuse(
                address,
                f"A site with the key of {key} says that it is {found.agent}, and gets no visit: "
                f"its operator must name {key} in SITE.yaml, or has the key of another",
            )
        elif found.agent not in self._expected:
            log.warning("A site calls itself %s, which this run does not have", found.agent)
            self._rejected.add(address)
        elif self._still_there(found.agent):
            raise SiteError(
                f"Two sites call themselves {found.agent}. Stop one of them: nobody can say which "
                "of them is right"
            )
        elif found.agreement != self._compatibility_hash:
            raise SiteError(f"{found.agent}: {describe_error('config')}")
        elif found.role != self._expected[found.agent].role:
            raise SiteError(
                f"{found.agent} is a {found.role} agent there and "
                f"{self._expected[found.agent].role} here. Compare the two configs"
            )
        elif found.agent in self._ledgers and not found.shows_ledger:
            raise SiteError(
                f"{found.agent} does not show its ledger (site.share_ledger), so that nothing "
                "could be claimed at the end. Its operator can set share_ledger: true"
            )
        else:
            self._refused.pop(address, None)
            self.address[found.agent] = address

    def _still_there(self, name: str) -> bool:
        """Whether the one that has the name answers. Flower lists a dead SuperNode for a minute,
        and the one that its site has started since is no second site."""
        before = self.address.get(name)
        if before is None:
            return False
        hello = {before: protocol.to_bytes(IdentifyRequest())}
        if self._post.exchange(hello, self._terms.hello_seconds):
            return True
        log.warning("%s is at another address now: nobody answers at the one before", name)
        self._rejected.add(before)
        return False

    def _refuse(self, address: str, text: str) -> None:
        """Say once that the one at an address gets no visit. It is asked again: it may mend it."""
        if self._refused.get(address) != text:
            log.warning("%s", text)
            self._refused[address] = text

    def _reject(self, address: str, word: str) -> None:
        whose = "" if self._holder is None else f" (with the key of {self._holder(address)})"
        if word in STOP:
            raise SiteError(f"A site that wants to take part{whose} cannot: {describe_error(word)}")
        log.warning("A site that wants to take part%s cannot yet: %s", whose, describe_error(word))


def describe_error(word: str) -> str:
    """What a word means to whoever runs the coordinator."""
    return {**protocol.ERROR_CODES, **OWN_ERROR_CODES}.get(word, word)
