"""The process of a command: its threads and memory, its log, what stops it, whose its files are.

Needs nothing heavy, so that a typo in a command is told before torch is loaded.
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
#: What stops a command in good order. The last is sent when a terminal is closed.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS_TO_WIND_UP = 5.0  # in which a second Ctrl-C is taken for the first

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt's, in glibc
KEPT = 2**28  # bytes of freed memory that malloc keeps for what is asked for next

log = logging.getLogger("privssl")


def in_one_thread() -> None:
    """Let the calling thread compute alone, unless OMP_NUM_THREADS says otherwise.

    More intra-op threads would change the order of sums, and with it the last bits.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Inside, Python's garbage collector rests, and it never looks at what was made there.

    For imports and preparing, whose objects live as long as the process. It would look again and
    again through all of torch's modules, of which nearly all stays in any case: a fifth of the
    time, and a tenth more when it is let in again.
    """
    anew = "torch" not in sys.modules  # else what there is may be somebody's garbage
    gc.disable()
    try:
        yield
    finally:
        if anew:
            gc.freeze()
        gc.enable()


def tune_malloc() -> None:
    """Let this process and its forks use memory again that they freed, where the C library can.

    glibc gives larger pieces back to the system at once and gets them anew, page by page and
    filled with zeros: where a layer has a million weights, that took longer than the arithmetic
    of its step.
    """
    with suppress(AttributeError, OSError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, KEPT)
        mallopt(M_TRIM_THRESHOLD, KEPT)


def without_tensorflow() -> None:
    """Let TensorBoard write and read by its own means where TensorFlow is installed, too.

    It would import it, which takes seconds, and a full disk would be an error of TensorFlow's. The
    module that says so is what TensorBoard looks for (``tensorboard.compat.tf``).
    """
    name = "tensorboard.compat.notf"
    sys.modules.setdefault(name, ModuleType(name))


class LogFile(logging.FileHandler):
    """train.log. A line that a full disk does not take is dropped: the next write of metrics or
    of a checkpoint stops the run, and says why."""

    def __init__(self, path: Path) -> None:
        with atomic_files.writing(path):
            super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        """See the head of the class."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """Inside, what privssl logs goes to the handler, and not to those that libraries set up."""
    propagates, log.propagate = log.propagate, False
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagates
        handler.close()


@contextmanager
def interrupt_on_signals(*signals: signal.Signals) -> Iterator[None]:
    """Inside, each signal is a KeyboardInterrupt; another one soon after it is not a second.

    People press Ctrl-C twice, and supervisors send SIGINT with SIGTERM: neither may disturb the
    checkpoint that the first one asked for. A SIGHUP that is ignored (nohup) stays so.
    """
    stopped = -float("inf")

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        if time.monotonic() - stopped > SECONDS_TO_WIND_UP:
            stopped = time.monotonic()
            _whole.asked = True
            if _whole.depth:
                _whole.stopped = True
            else:
                raise KeyboardInterrupt

    ignored = {n for n in signals if n == signal.SIGHUP and signal.getsignal(n) == signal.SIG_IGN}
    former = {number: signal.signal(number, stop) for number in signals if number not in ignored}
    try:
        yield
    finally:
        _whole.asked = False
        for number, handler in former.items():
            signal.signal(number, handler)


def raise_if_interrupted() -> None:
    """Raise the KeyboardInterrupt of ``interrupt_on_signals`` again where nobody has seen it.

    It is raised wherever Python is at that moment. In a callback of the garbage collector, or of a
    weak reference, Python prints and drops it.
    """
    if _whole.asked:
        raise KeyboardInterrupt


class _DeferredInterrupts:
    """How many blocks that are done whole the main thread is in, whether one was stopped, and
    whether a signal has asked to stop at all."""

    depth = 0
    stopped = False
    asked = False


_whole = _DeferredInterrupts()


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Inside, the KeyboardInterrupt of ``interrupt_on_signals`` waits for the end. In the main
    thread.

    For code of others that takes locks, which left in the middle may never let go of them, and for
    what can be had once and is lost if it is not kept.
    """
    _whole.depth += 1
    try:
        yield
    finally:
        _whole.depth -= 1
        if _whole.stopped and not _whole.depth:
            _whole.stopped = False
            raise KeyboardInterrupt


@contextmanager
def report_full_disk_once() -> Iterator[None]:
    """Inside, a thread that could not write ends without a traceback of its own.

    TensorBoard writes in a thread and raises the same error again at the next flush, where it
    stops the run with a message.
    """
    former = threading.excepthook

    def tell(crash: threading.ExceptHookArgs) -> None:
        if not isinstance(crash.exc_value, OSError):
            former(crash)

    threading.excepthook = tell
    try:
        yield
    finally:
        threading.excepthook = former


@contextmanager
def private_umask() -> Iterator[None]:
    """Inside, new files and folders are the user's alone."""
    former = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(former)
