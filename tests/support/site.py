"""A site's socket, served by a process, for tests."""

import contextlib
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from privssl.remote.framing import receive, send
from privssl.site import socket_server
from tests.support.transports import fork

# The socket -------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(path: Path, handle: Callable[[bytes], bytes]) -> Iterator[None]:
    """Serve a socket from another process, which is killed at the end."""
    child = fork()
    if child == 0:
        try:
            socket_server.serve(path, handle)
        finally:
            os._exit(1)
    try:
        end = time.monotonic() + 120
        while not _open(path) and time.monotonic() < end:
            time.sleep(0.01)
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def send_request(path: Path, frame: bytes, seconds: float) -> bytes:
    """Send a message to a site's socket and return the answer, within ``seconds``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect(str(path))
        send(connection, frame)
        return receive(connection)


def _open(path: Path) -> bool:
    """Whether a process listens: the socket gets its mode only after ``listen``."""
    try:
        return stat.S_IMODE(path.stat().st_mode) == 0o660
    except FileNotFoundError:
        return False
