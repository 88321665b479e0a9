"""Certificates of a time that is over, and servers that have one. Not a test itself."""

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from privssl.site import keys

LONG_AGO = ("20200101000000Z", "20200201000000Z")
_CONFIG = """\
[ca]
default_ca = own
[own]
database = {folder}/index.txt
serial = {folder}/serial
new_certs_dir = {folder}
policy = any
[any]
commonName = supplied
[link]
subjectAltName = IP:127.0.0.1
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
[root]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
"""


def with_expired_link(folder: Path, *names: str) -> Path:
    """As ``keys.make``, for 127.0.0.1, with a SuperLink's certificate that has expired."""
    keys.make(folder, "127.0.0.1", names)
    work = folder / "ca"
    work.mkdir()
    key = work / "ca.key"
    keys._curve_key(key)
    keys._openssl(
        "req", "-x509", "-new", "-key", key, "-sha384", "-days", 90, "-subj", "/CN=own",
        "-out", folder / "ca.crt", "-addext", "basicConstraints=critical,CA:TRUE",
        "-addext", "keyUsage=critical,keyCertSign",
    )  # fmt: skip
    _signed(work, folder / "link.key", key, folder / "ca.crt", folder / "link.crt", "link")
    return folder


def expired_root(folder: Path) -> Path:
    """The certificate of an authority, of a time that is over."""
    folder.mkdir()
    key, current = folder / "ca.key", folder / "current.crt"
    keys._curve_key(key)
    keys._openssl(
        "req", "-x509", "-new", "-key", key, "-days", 90, "-subj", "/CN=own", "-out", current
    )
    _signed(folder, key, key, current, folder / "ca.crt", "root")
    return folder / "ca.crt"


def _signed(work: Path, key: Path, by: Path, issuer: Path, to: Path, kind: str) -> None:
    """A certificate with dates of our own, which only ``openssl ca`` gives."""
    (work / "index.txt").write_text("")
    (work / "serial").write_text("01\n")
    (work / "config").write_text(_CONFIG.format(folder=work))
    keys._openssl("req", "-new", "-key", key, "-subj", "/CN=own", "-out", work / "request")
    keys._openssl(
        "ca", "-batch", "-config", work / "config", "-in", work / "request", "-cert", issuer,
        "-keyfile", by, "-out", to, "-startdate", LONG_AGO[0], "-enddate", LONG_AGO[1],
        "-notext", "-md", "sha384", "-extensions", kind,
    )  # fmt: skip


@contextlib.contextmanager
def listening(folder: Path | None) -> Iterator[str]:
    """A server on loopback, with TLS by the certificate of a folder; its address."""
    stopped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)

        def answer() -> None:
            while not stopped.is_set():
                with contextlib.suppress(OSError):
                    line, _ = server.accept()
                    line.settimeout(5)
                    with line:
                        if folder is None:
                            line.recv(10)
                            line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                        else:
                            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                            context.load_cert_chain(folder / "link.crt", folder / "link.key")
                            context.wrap_socket(line, server_side=True).close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            stopped.set()
            thread.join()


def skip_without_openssl() -> None:
    """For the top of a test module."""
    for program in ("openssl", "ssh-keygen"):
        try:
            subprocess.run([program], capture_output=True, stdin=subprocess.DEVNULL, check=False)
        except OSError:
            pytest.skip(f"{program} is not installed", allow_module_level=True)
