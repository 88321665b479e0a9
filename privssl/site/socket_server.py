"""The door of a site: a Unix socket through which letters come and answers go.

    8 bytes   how many follow, little-endian
    the rest  a letter; the answer comes back in the same form

Who carries letters (a SuperNode of Flower and the code that its server sends) is thereby another
process than the one that has rows, budget and ledger, and may be another user of the system, one
that cannot read the site's folder. It can bring letters and take answers, nothing else. It needs
neither torch nor any other part of privssl than this file.

A letter has a thread of its own, and the desk lets one visit be done at a time: the others are
told ``busy``, and a greeting is answered at once. No more than ``AT_ONCE`` letters are read at a
time, so that whoever reaches the door cannot fill the site's memory with them.
"""

import fcntl
import logging
import os
import socket
import socketserver
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from privssl.errors import UserError
from privssl.remote.framing import receive, send

AT_ONCE = 4  # letters in memory: a visit, its repetition, a greeting
LONGEST_PATH = 100  # of a socket; the system's own limit is 108 bytes
PATIENCE = 60.0  # seconds in which a carrier must go on with a letter it has begun

log = logging.getLogger("privssl")


def send_request(door: Path, frame: bytes, seconds: float) -> bytes:
    """Bring a letter and take the answer.

    Args:
        seconds: to wait for the answer at most, > 0.

    Raises:
        OSError: nobody is behind the door, or the answer did not come in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wire:
        wire.settimeout(seconds)
        wire.connect(str(door))
        send(wire, frame)
        return receive(wire)


def serve(door: Path, handle: Callable[[bytes], bytes]) -> None:
    """Answer letters until the process is told to stop (KeyboardInterrupt, which passes on).

    Raises:
        UserError: the socket cannot be made, or another process serves this site.
    """
    with _hold_socket(door), _Server(str(door), handle) as server:
        door.chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IWGRP)
        try:
            server.serve_forever(poll_interval=0.2)
        finally:
            door.unlink(missing_ok=True)


@contextmanager
def _hold_socket(door: Path) -> Iterator[None]:
    """Inside, no other process serves here; what a killed one left is removed."""
    if len(os.fsencode(door)) > LONGEST_PATH:
        raise UserError(
            f"{door}: too long for the name of a socket ({LONGEST_PATH} bytes). Give site.door a "
            "shorter path"
        )
    try:
        door.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{door}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"{door.parent}: cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{door}: another process serves this site. Stop it first") from None
        if os.path.lexists(door) and not door.is_socket():
            raise UserError(f"{door}: is there, and is no socket. Give site.door a path of its own")
        door.unlink(missing_ok=True)
        yield
    finally:
        os.close(lock)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True  # a visit that is under way ends with the process: it was charged
    request_queue_size = 16

    def __init__(self, door: str, handle: Callable[[bytes], bytes]) -> None:
        super().__init__(door, _RequestHandler)
        self.answer, self._free = handle, threading.BoundedSemaphore(AT_ONCE)

    def process_request(self, request: object, client_address: object) -> None:
        self._free.acquire()  # the next ones wait outside, in the system's queue
        try:
            super().process_request(request, client_address)  # type: ignore[arg-type]
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A carrier that went away in the middle of a letter is no event."""
        log.warning("A letter broke off", exc_info=log.isEnabledFor(logging.DEBUG))


class _RequestHandler(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def handle(self) -> None:
        self.request.settimeout(PATIENCE)
        answer = self.server.answer(receive(self.request))
        with suppress(OSError):  # who asked is gone; the reply is stored
            send(self.request, answer)
