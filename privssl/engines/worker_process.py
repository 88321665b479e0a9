"""Processes forked from this one, and what passes between the two: names, bytes and errors.

``engines/process_pool.py`` says who does what; here is how. A worker is killed, never asked: it
owns nothing that a kill could harm. It outlives neither its engine's process nor a closed engine
(one that was stopped by SIGSTOP ends when it is let go on).

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from privssl.errors import UserError
from privssl.runtime.process import STOPPING
from privssl.storage.tensor_files import PackedTensors, TensorSlice, places_in

T = TypeVar("T")


class WorkerError(UserError):
    """Worker processes cannot start, get no memory, or end whenever they do a certain visit."""


# Bytes ---------------------------------------------------------------------------------------


class SharedBuffer:
    """Memory that a process and its later forks all see. They take turns: a pipe says whose it is.

    It grows with what is written and stays as large, so that pages are asked for once. It is mapped
    and not written to as a file is, which takes more than twice as long.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("privssl")
        self._seen = torch.empty(0, dtype=torch.uint8)

    def write(self, *parts: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Put parts one behind the other from the start. Returns what ``read`` asks for, as JSON.

        Raises:
            TypeError: a tensor is of a type that no message could carry.
            WorkerError: the system gives no more memory.
        """
        forms = [PackedTensors(part).form() for part in parts]
        at = 0
        for tensor in (tensor for part in parts for tensor in part.values()):
            data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
            self._mapped(at + len(data))[at:].copy_(data)
            at += len(data)
        return forms

    def read(self, forms: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
        """The parts that were put there. Each tensor has memory of its own."""
        parts, begun = [], 0
        for places in map(places_in, forms):
            parts.append({name: self._copied(begun, place) for name, place in places.items()})
            begun += sum(place.size for place in places.values())
        return parts

    def _copied(self, begun: int, place: TensorSlice) -> Tensor:
        at = begun + place.at
        data = self._mapped(at + place.size)[at:].clone()
        return data.view(place.dtype).reshape(place.shape)

    def _mapped(self, size: int) -> Tensor:
        """The first bytes (size,)."""
        if size > len(self._seen):
            whole = 2 ** (size - 1).bit_length()  # only pages that are written to take memory
            if whole > os.fstat(self.file).st_size:
                try:
                    os.ftruncate(self.file, whole)  # torch could, and would lose the first byte
                except OSError as error:
                    raise WorkerError(
                        f"The system gives worker processes no {whole} bytes to share: "
                        f"{error.strerror}. Set run.workers=1, and all agents work in one process"
                    ) from error
            # By its path, which leaves no second file behind, as Python's own mmap would: a fork
            # closes all that it does not know.
            self._seen = torch.from_file(
                f"/proc/self/fd/{self.file}", shared=True, size=whole, dtype=torch.uint8
            )
        return self._seen[:size]

    def unmap(self) -> None:
        """Let go of the memory in this process, a fork say, until it is next asked for."""
        self._seen = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Give the memory back. May be called twice."""
        self.unmap()
        if self.file >= 0:
            os.close(self.file)
        self.file = -1


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


def encode_error(error: BaseException) -> dict[str, Any]:
    """An error as names and plain values; ``decode_error`` is the inverse."""
    plain = all(isinstance(value, str | int | float | None) for value in error.args)
    try:
        text = str(error)
    except Exception:  # of an error that cannot say what it is
        text = ""
    return {
        "error": name_of(type(error)),
        "arguments": list(error.args) if plain else [text],
        "text": text,
        "trace": "".join(traceback.format_exception(error)),
    }


def decode_error(told: dict[str, Any]) -> Exception:
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


class ParentDeathPipe:
    """A pipe to which nobody writes: it ends with the process that made it, however that ends."""

    def __init__(self) -> None:
        self.file, held = os.pipe()
        self._open = {self.file, held}

    def close(self) -> None:
        """Let go; processes that hang on it end. May be called twice."""
        while self._open:
            os.close(self._open.pop())


@contextmanager
def pending_signals() -> Iterator[None]:
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
    shared_buffer: SharedBuffer

    @classmethod
    def fork(
        cls,
        serve: Callable[[Connection, SharedBuffer], None],
        parent_death_pipe: ParentDeathPipe,
        shared: Sequence[SharedBuffer],
    ) -> "Worker":
        """A new process that does ``serve`` and ends with it. Call it in ``pending_signals``.

        Args:
            serve: gets the other end of ``pipe``, and ``shared_buffer``.
            shared: sheets that the process will read beside its own.

        Raises:
            OSError: the system gives no process.
        """
        ours, theirs = Pipe()
        shared_buffer = SharedBuffer()
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of threads beside a fork; engines/process_pool.py says why there
                # may be.
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            shared_buffer.close()
            raise
        if process == 0:
            kept = {
                theirs.fileno(),
                parent_death_pipe.file,
                *(s.file for s in (shared_buffer, *shared)),
            }
            _live(lambda: serve(theirs, shared_buffer), parent_death_pipe, kept)
        theirs.close()
        return cls(process, ours, shared_buffer)

    def end(self) -> str:
        """Kill it if it lives, and take leave of it; how it ended. May be called twice."""
        process, self.process = self.process, 0
        self.pipe.close()
        self.shared_buffer.close()
        if not process:
            return "had ended"
        try:
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
        except (ProcessLookupError, ChildProcessError):
            return "had ended"  # and somebody else has waited for it
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return f"ended with status {code}"
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"  # most of the real-time ones have no name


def _live(
    serve: Callable[[], None], parent_death_pipe: ParentDeathPipe, kept: set[int]
) -> NoReturn:
    """A worker's life, from the fork to its end. What called it belongs to the other process."""
    status = 1
    try:
        for number in STOPPING:  # meant for whoever made the workers
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        # Else the locks of journals and run folder would last as long as the slowest worker, and
        # the pipes of other workers would not end with the engine.
        for file in set(map(int, os.listdir("/proc/self/fd"))) - kept - {0, 1, 2}:
            with suppress(OSError):  # the listing's own
                os.close(file)
        threading.Thread(target=_end_with, args=(parent_death_pipe,), daemon=True).start()
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


def keep_to_core(place: int, workers: int) -> None:
    """Keep this process to one core, where so many workers are as many on each; else do nothing.

    Linux divides a machine between programs, not between processes: beside one busy program it
    thinks two cores well balanced with all workers on one and that program on the other, so two
    workers took the time of one. With fewer workers than cores, each is better left free: another
    run would choose the same cores.

    Args:
        place: of this worker among them, from 0.
    """
    cores = sorted(os.sched_getaffinity(0))
    if workers % len(cores) == 0:
        with suppress(OSError):  # a core that was taken away meanwhile
            os.sched_setaffinity(0, {cores[place % len(cores)]})


def _end_with(parent_death_pipe: ParentDeathPipe) -> None:
    """End this process, in whatever step it is, when the one at the other end has ended."""
    os.read(parent_death_pipe.file, 1)
    os._exit(1)
