"""Expired certificates, and servers that have one. Not a test itself."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from privssl.site import keys

LONG_AGO = (datetime(2020, 1, 1, tzinfo=timezone.utc), datetime(2020, 2, 1, tzinfo=timezone.utc))
NEVER = datetime(2200, 1, 1, tzinfo=timezone.utc)


def with_expired_link(folder: Path, *names: str) -> Path:
    """As ``keys.make`` for 127.0.0.1, but the SuperLink's certificate has expired."""
    keys.make(folder, "127.0.0.1", names)
    authority, link = keys.new_key(), keys.new_key()
    (folder / "ca.crt").write_bytes(keys.certificate(authority, authority, (LONG_AGO[0], NEVER)))
    (folder / "link.crt").write_bytes(keys.certificate(link, authority, LONG_AGO, "127.0.0.1"))
    (folder / "link.key").write_bytes(keys.private_bytes(link, "PKCS8"))
    return folder


def for_host_only(folder: Path, host: str) -> Path:
    """A SuperLink's certificate without 127.0.0.1, as another authority may issue it."""
    keys.make(folder, host, ["s0"])
    authority, link = keys.new_key(), keys.new_key()
    dates = (LONG_AGO[0], NEVER)
    (folder / "ca.crt").write_bytes(keys.certificate(authority, authority, dates))
    (folder / "link.crt").write_bytes(keys.certificate(link, authority, dates, host))
    (folder / "link.key").write_bytes(keys.private_bytes(link, "PKCS8"))
    return folder


def expired_root(folder: Path) -> Path:
    """The certificate of an authority that has expired."""
    folder.mkdir()
    key = keys.new_key()
    (folder / "ca.crt").write_bytes(keys.certificate(key, key, LONG_AGO))
    return folder / "ca.crt"


@contextlib.contextmanager
def listening(folder: Path | None) -> Iterator[str]:
    """Run a server on loopback, with TLS if a folder is given; yields its address."""
    stopped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)

        def answer() -> None:
            while not stopped.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = server.accept()
                    connection.settimeout(5)
                    with connection:
                        if folder is None:
                            connection.recv(10)
                            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                        else:
                            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                            context.load_cert_chain(folder / "link.crt", folder / "link.key")
                            context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            stopped.set()
            thread.join()


def skip_without_cryptography() -> None:
    """Skip a test module without the package cryptography; call it at module level."""
    pytest.importorskip("cryptography", reason="needs pip install '.[flower]'")
