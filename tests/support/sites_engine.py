"""What test_remote_engine.py shares with other tests."""

from collections.abc import Callable
from typing import Any

from privssl.remote import protocol
from privssl.remote.protocol import Identity
from tests.support.posts import AGREED


def says(name: str, role: Any = "query", agreement: str = AGREED) -> Callable[[bytes], bytes]:
    return lambda letter: protocol.to_bytes(Identity(name, role, agreement, False))
