"""The process of a command: threads, memory, log file, signals, file permissions.

Imports no slow module, so that usage errors are reported before torch is loaded.
"""

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from privssl.storage import atomic_files

INTERRUPTED = 130  # exit status
#: Signals after which a command stops at a checkpoint. SIGHUP is sent when a terminal is closed.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS_TO_WIND_UP = 5.0  # during which a second signal counts as the first

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt's, in glibc
KEPT = 2**28  # bytes of freed memory that malloc keeps for reuse

log = logging.getLogger("privssl")


def in_one_thread() -> None:
    """Use one intra-op thread, unless OMP_NUM_THREADS says otherwise.

    More intra-op threads would change the order of sums, and with it the last bits.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Use one intra-op thread: several would split rows by number, and rounding would depend on
    position."""
    import torch

    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection; on exit, exempt the objects created meanwhile (`gc.freeze`).

    For imports and preparation, whose objects live as long as the process: saves a fifth of the
    start-up.
    """
    first_import = "torch" not in sys.modules  # else existing objects may be garbage
    gc.disable()
    try:
        yield
    finally:
        if first_import:
            gc.freeze()
        gc.enable()


def tune_malloc() -> None:
    """Let glibc keep freed memory instead of returning it to the system, page by page.

    With a million weights in a layer, returning it took longer than the arithmetic of a step.
    """
    with suppress(AttributeError, OSError):  # a C library other than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, KEPT)
        mallopt(M_TRIM_THRESHOLD, KEPT)


def without_tensorflow() -> None:
    """Let TensorBoard read and write without TensorFlow, whose import takes seconds.

    TensorBoard looks for the module that is set here (``tensorboard.compat.tf``).
    """
    name = "tensorboard.compat.notf"
    sys.modules.setdefault(name, ModuleType(name))


class LogFile(logging.FileHandler):
    """The handler of train.log.

    A line that cannot be written to a full disk is dropped: the next write of metrics or of a
    checkpoint stops the run with the reason.
    """

    def __init__(self, path: Path) -> None:
        with atomic_files.writing(path):
            super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        """Ignore the error, see the class."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """Send privssl's log to a handler, and not to handlers of libraries."""
    propagates, log.propagate, level = log.propagate, False, log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagates
        log.setLevel(level)
        handler.close()


class _InterruptState:
    """State of the main thread: depth of ``defer_interrupts``, and received signals."""

    depth = 0
    deferred = False  # whether one waits for the end of ``defer_interrupts``
    arrived = False


_state = _InterruptState()


@contextmanager
def interrupt_on_signals(*signals: signal.Signals) -> Iterator[None]:
    """Raise KeyboardInterrupt for each signal, but at most once in 5 seconds.

    Users press Ctrl-C twice, and supervisors send SIGINT with SIGTERM: a second signal must not
    disturb the checkpoint of the first. A SIGHUP that is ignored (nohup) stays ignored.
    """
    stopped = -float("inf")

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        if time.monotonic() - stopped > SECONDS_TO_WIND_UP:
            stopped = time.monotonic()
            _state.arrived = True
            if not _state.depth:
                raise KeyboardInterrupt
            _state.deferred = True

    ignored = {n for n in signals if n == signal.SIGHUP and signal.getsignal(n) == signal.SIG_IGN}
    previous = {number: signal.signal(number, stop) for number in signals if number not in ignored}
    try:
        yield
    finally:
        _state.arrived = False
        for number, handler in previous.items():
            signal.signal(number, handler)


def raise_if_interrupted() -> None:
    """Raise the KeyboardInterrupt of ``interrupt_on_signals`` again if Python dropped it.

    Python prints and drops exceptions in callbacks of the garbage collector and of weak references.
    """
    if _state.arrived:
        raise KeyboardInterrupt


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defer the KeyboardInterrupt of ``interrupt_on_signals`` until the end (main thread).

    For library code that takes locks, and for values that can be obtained only once.
    """
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
        if _state.deferred and not _state.depth:
            _state.deferred = False
            raise KeyboardInterrupt


@contextmanager
def report_full_disk_once() -> Iterator[None]:
    """Suppress tracebacks of threads that could not write.

    TensorBoard's thread raises the same error again at the next flush, which stops the run with
    a message.
    """
    previous = threading.excepthook

    def report(crash: threading.ExceptHookArgs) -> None:
        if not isinstance(crash.exc_value, OSError):
            previous(crash)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = previous


@contextmanager
def private_umask() -> Iterator[None]:
    """Make new files and folders accessible to the user alone."""
    previous = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(previous)
