"""Addresses of the form host:port, such as a SuperLink's."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def host_of(address: str) -> str:
    """Return the host of host:port; empty for another form, such as with https:// before it."""
    host, _, port = address.rpartition(":")
    return host if "/" not in host and port.isdecimal() and 0 < int(port) < 2**16 else ""
