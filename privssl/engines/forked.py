"""Processes forked from this one, and what passes between the two: names, bytes and errors.

``workers.py`` says who does what; here is how. A worker is killed, never asked: it owns nothing
that a kill could harm. It outlives neither its engine's process nor a closed engine.

Nothing that arrives chooses what is built: there is no pickle, and the name of a class finds one
that both processes have already.
"""

import gc
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from privssl import tensor_file

STOPPING = (signal.SIGINT, signal.SIGTERM)  # meant for whoever made the workers

T = TypeVar("T")


# Bytes ---------------------------------------------------------------------------------------


class Sheet:
    """Memory that a process and its later forks all see. They take turns: a pipe says whose it is.

    It grows with what is written and stays as large, so that pages are asked for once. It is mapped
    and not written to as a file is, which takes more than twice as long.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("privssl")
        self._seen = memoryview(bytearray())

    def write(self, *parts: Iterable[memoryview]) -> list[int]:
        """Put parts one after the other from the start, each in pieces; their sizes in bytes."""
        sizes, at = [], 0
        for part in parts:
            begun = at
            for piece in part:
                self._mapped(at + len(piece))[at : at + len(piece)] = piece
                at += len(piece)
            sizes.append(at - begun)
        return sizes

    def read(self, sizes: Sequence[int]) -> list[bytes]:
        """The parts that were put there; ``sizes`` as ``write`` gave them."""
        parts, at, seen = [], 0, self._mapped(sum(sizes))
        for size in sizes:
            parts.append(bytes(seen[at : at + size]))
            at += size
        return parts

    def _mapped(self, size: int) -> memoryview:
        """The first bytes, so many or more."""
        if size > len(self._seen):
            size = 2 ** (size - 1).bit_length()  # only pages that are written to take memory
            if size > os.fstat(self.file).st_size:
                os.ftruncate(self.file, size)  # torch could, and would lose the first byte
            # By its path, which leaves no second file behind, as Python's own mmap would: a fork
            # closes all that it does not know.
            pages = torch.from_file(
                f"/proc/self/fd/{self.file}", shared=True, size=size, dtype=torch.uint8
            )
            self._seen = pages.numpy().data
        return self._seen

    def unmap(self) -> None:
        """Let go of the memory in this process, a fork say, until it is next asked for."""
        self._seen = memoryview(bytearray())

    def close(self) -> None:
        """Give the memory back. May be called twice."""
        self.unmap()
        if self.file >= 0:
            os.close(self.file)
        self.file = -1


def bundled(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """Tensors to bytes, piece by piece. Unlike those of messages they may hold any number: no
    party sees them."""
    return tensor_file.pieces_of({str(place): tensor for place, tensor in enumerate(tensors)})


def unbundled(data: bytes) -> list[Tensor]:
    """The inverse of ``bundled``."""
    tensors = safetensors.torch.load(data)
    return [tensors[str(place)] for place in range(len(tensors))]


# Names and errors ----------------------------------------------------------------------------


def name_of(kind: type) -> tuple[str, str]:
    """Module and name, under which ``class_of`` finds a class in the other process."""
    return kind.__module__, kind.__qualname__


def class_of(base: type[T], module: str, name: str) -> type[T]:
    """The subclass of ``base`` of that name; of several, the one made last.

    Raises:
        LookupError: this process has none.

    >>> class_of(Exception, "builtins", "KeyError")
    <class 'KeyError'>
    """
    found, left = None, [base]
    while left:
        kind = left.pop()
        found = kind if name_of(kind) == (module, name) else found
        left += type.__subclasses__(kind)[::-1]
    if found is None:
        raise LookupError(f"no {base.__name__} is called {module}.{name}")
    return found


class ErrorInWorker(Exception):  # noqa: N818  (it only shows where another one came from)
    """The traceback of an error in the worker where it was raised."""


def told(error: BaseException) -> dict[str, Any]:
    """An error as names and plain values; ``raised`` is the inverse."""
    plain = all(isinstance(value, str | int | float | None) for value in error.args)
    return {
        "error": name_of(type(error)),
        "arguments": list(error.args) if plain else [str(error)],
        "text": str(error),
        "trace": "".join(traceback.format_exception(error)),
    }


def raised(told: dict[str, Any]) -> Exception:
    """The error, of its own class where it can be made alike, else a RuntimeError with its text."""
    error: Exception
    try:
        error = class_of(Exception, *told["error"])(*told["arguments"])
        alike = str(error) == told["text"]
    except Exception:
        alike = False
    if not alike:
        error = RuntimeError(f"{told['error'][1]}: {told['text']}")
    error.__cause__ = ErrorInWorker(told["trace"])
    return error


# Processes -----------------------------------------------------------------------------------


class Lifeline:
    """A pipe to which nobody writes: it ends with the process that made it, however that ends."""

    def __init__(self) -> None:
        self.file, held = os.pipe()
        self._open = {self.file, held}

    def close(self) -> None:
        """Let go; processes that hang on it end. May be called twice."""
        while self._open:
            os.close(self._open.pop())


@contextmanager
def signals_waiting() -> Iterator[None]:
    """Inside, signals that stop a run wait: no worker may be forked and then not be known."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


@dataclass(eq=False)
class Worker:
    """A forked process, as the one that forked it knows it."""

    process: int  # its id; 0 when it has ended
    pipe: Connection
    sheet: Sheet

    @classmethod
    def forked(
        cls,
        serve: Callable[[Connection, Sheet], None],
        lifeline: Lifeline,
        shared: Sequence[Sheet],
    ) -> "Worker":
        """A new process that does ``serve`` and ends with it. Call it in ``signals_waiting``.

        Args:
            serve: gets the other end of ``pipe``, and ``sheet``.
            shared: sheets that the process will read beside its own.

        Raises:
            OSError: the system gives no process.
        """
        ours, theirs = Pipe()
        sheet = Sheet()
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of threads beside a fork; workers.py says why there may be.
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            sheet.close()
            raise
        if process == 0:
            kept = {theirs.fileno(), lifeline.file, *(s.file for s in (sheet, *shared))}
            _live(lambda: serve(theirs, sheet), lifeline, kept)
        theirs.close()
        return cls(process, ours, sheet)

    def end(self) -> str:
        """Kill it if it lives, and take leave of it; how it ended. May be called twice."""
        process, self.process = self.process, 0
        self.pipe.close()
        self.sheet.close()
        if not process:
            return "had ended"
        try:
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
        except (ProcessLookupError, ChildProcessError):
            return "had ended"  # and somebody else has waited for it
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with status {code}"


def _live(serve: Callable[[], None], lifeline: Lifeline, kept: set[int]) -> NoReturn:
    """A worker's life, from the fork to its end. What called it belongs to the other process."""
    status = 1
    try:
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        # Else the locks of journals and run folder would last as long as the slowest worker, and
        # the pipes of other workers would not end with the engine.
        for file in set(map(int, os.listdir("/proc/self/fd"))) - kept - {0, 1, 2}:
            with suppress(OSError):  # the listing's own
                os.close(file)
        threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
        logging.disable()  # train.log belongs to the other process
        sys.stdout = sys.stderr  # and its standard output may be a --json
        gc.freeze()  # what the other process made is not for this one to end
        torch.set_num_threads(1)
        serve()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _end_with(lifeline: Lifeline) -> None:
    """End this process, in whatever step it is, when the one at the other end has ended."""
    os.read(lifeline.file, 1)
    os._exit(1)
