"""The Unix socket of a site, with messages as in ``remote/framing.py``.

The relay of messages (Flower's SuperNode and the code that its server sends) is thereby separate
from the process with rows, budget and ledger. It may run as another system user that cannot read
the site's folder.

Each connection has a thread. At most ``MAX_CONNECTIONS`` messages are read at a time, so that no
client can exhaust the memory. The handler runs one step at a time and answers others ``busy``.
"""

import logging
import os
import socket
import socketserver
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from privssl.errors import UserError
from privssl.remote.framing import receive, send

MAX_CONNECTIONS = 4  # a step, its repetition, an identification request
LONGEST_PATH = 100  # of a socket's path; the system's limit is 108 bytes
READ_SECONDS = 60.0  # for the next bytes of a message

log = logging.getLogger("privssl")


def serve(
    door: Path, handle: Callable[[bytes], bytes], ready: Callable[[], None] = lambda: None
) -> None:
    """Answer messages on the socket ``door`` until KeyboardInterrupt, which is re-raised.

    ``ready`` is called once this process owns the socket. Raises UserError if the socket cannot be
    created, or another process serves this site.
    """
    with _lock_socket(door), _make_server(door, handle) as server:
        try:
            ready()
            server.serve_forever(poll_interval=0.2)
        finally:
            door.unlink(missing_ok=True)


def _make_server(door: Path, handle: Callable[[bytes], bytes]) -> "_Server":
    try:
        server = _Server(str(door), handle)
        door.chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IWGRP)
        return server
    except OSError as error:
        raise UserError(
            f"{door}: no socket can be made here: {error.strerror}. Give site.door a path on a "
            "local disk with free space"
        ) from None


@contextmanager
def _lock_socket(door: Path) -> Iterator[None]:
    """Lock the socket's path, and remove a socket left by a killed process."""
    if len(os.fsencode(door)) > LONGEST_PATH:
        raise UserError(
            f"{door}: longer than a socket's path may be ({LONGEST_PATH} bytes). Give site.door a "
            "shorter path"
        )
    try:
        door.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(f"{door}.lock", timeout=0, mode=0o600).acquire()
    except Timeout:
        raise UserError(f"{door}: another process serves this site. Stop it first") from None
    except OSError as error:
        raise UserError(
            f"{door.parent}: cannot be written: {error.strerror}. Correct its rights, or site.door"
        ) from None
    with lock:
        if os.path.lexists(door) and not door.is_socket():
            raise UserError(f"{door}: exists and is not a socket. Give site.door another path")
        door.unlink(missing_ok=True)
        yield


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True  # a running step ends with the process; it has been charged
    request_queue_size = 16

    def __init__(self, door: str, handle: Callable[[bytes], bytes]) -> None:
        super().__init__(door, _RequestHandler)
        self.answer, self._free = handle, threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: object, client_address: object) -> None:
        self._free.acquire()  # further connections wait in the system's queue
        try:
            super().process_request(request, client_address)  # type: ignore[arg-type]
        except BaseException:  # starting a thread failed
            self._free.release()
            raise

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        log.warning("A message was incomplete", exc_info=log.isEnabledFor(logging.DEBUG))


class _RequestHandler(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def handle(self) -> None:
        self.request.settimeout(READ_SECONDS)
        answer = self.server.answer(receive(self.request))
        with suppress(OSError):  # the client has disconnected; the reply is stored
            send(self.request, answer)
