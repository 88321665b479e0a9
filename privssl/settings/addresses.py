"""Addresses host:port, as of a SuperLink."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def host_of(address: str) -> str:
    """The host of host:port; empty if it is not that, as with https:// before it."""
    host, _, port = address.rpartition(":")
    return host if "/" not in host and port.isdecimal() and 0 < int(port) < 2**16 else ""
