"""What test_remote_engine.py shares with other tests."""

from collections.abc import Callable
from typing import Any

from privssl.remote import protocol
from privssl.remote.protocol import Identity
from privssl.runtime.code_version import python_fingerprint
from tests.support.transports import AGREED


def says(
    name: str, role: Any = "query", agreement: str = AGREED, code: str | None = None
) -> Callable[[bytes], bytes]:
    found = Identity(name, role, agreement, False, code or python_fingerprint())
    return lambda frame: protocol.to_bytes(found)
