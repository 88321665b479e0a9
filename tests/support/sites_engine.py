"""A site that only identifies itself, for tests of the engine over sites."""

from collections.abc import Callable
from typing import Any

from privssl.remote import protocol
from privssl.remote.protocol import Identity
from privssl.runtime.code_version import python_fingerprint
from tests.support.transports import AGREEMENT


def site_named(
    name: str, role: Any = "query", agreement: str = AGREEMENT, code: str | None = None
) -> Callable[[bytes], bytes]:
    """A handler that replies to everything with this identity."""
    found = Identity(name, role, agreement, False, code or python_fingerprint())
    return lambda frame: protocol.to_bytes(found)
