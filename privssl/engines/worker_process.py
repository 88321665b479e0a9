"""Forked worker processes, and their communication with the engine: names, bytes and errors.

A worker owns nothing that a kill could damage, so it is ended by SIGKILL. It exits when the
engine's process ends. Received data cannot choose classes: there is no pickle, and classes are
looked up by name.
"""

import gc
import logging
import os
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
from torch import Tensor

from privssl.core.plugin_errors import Frame, frames_of
from privssl.errors import UserError
from privssl.runtime.process import STOPPING
from privssl.storage.tensor_files import PackedTensors, TensorSlice, places_in


class WorkerError(UserError):
    """Worker processes cannot start, get no memory, or repeatedly die during a step."""


class SharedBuffer:
    """Memory that a process shares with its later forks.

    Access is synchronised by the pipe. It grows and never shrinks. It is mapped, which is twice as
    fast as writing a file.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("privssl")
        self._mapped = torch.empty(0, dtype=torch.uint8)

    def write(self, *parts: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Write parts from the start; return their layout for ``read``, as JSON values.

        Raises:
            TypeError: a tensor's type is not allowed in messages.
            WorkerError: the system has no more memory.
        """
        forms = [PackedTensors(part).form() for part in parts]
        offset = 0
        for tensor in (tensor for part in parts for tensor in part.values()):
            data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
            self._map_first_bytes(offset + len(data))[offset:].copy_(data)
            offset += len(data)
        return forms

    def read(self, forms: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
        """Return copies of the written parts."""
        parts, start = [], 0
        for entries in map(places_in, forms):
            parts.append({name: self._copy_slice(start, entry) for name, entry in entries.items()})
            start += sum(entry.size for entry in entries.values())
        return parts

    def _copy_slice(self, start: int, entry: TensorSlice) -> Tensor:
        offset = start + entry.at
        data = self._map_first_bytes(offset + entry.size)[offset:].clone()
        return data.view(entry.dtype).reshape(entry.shape)

    def _map_first_bytes(self, size: int) -> Tensor:
        """Return the first bytes (size,)."""
        if size > len(self._mapped):
            capacity = 2 ** (size - 1).bit_length()  # unwritten pages take no memory
            if capacity > os.fstat(self.file).st_size:
                try:
                    os.ftruncate(self.file, capacity)  # torch would overwrite the first byte
                except OSError as error:
                    raise WorkerError(
                        f"The system gives worker processes no {capacity} bytes to share: "
                        f"{error.strerror}. Set run.workers=1, and all agents work in one process"
                    ) from error
            # By path, because Python's mmap would duplicate the file, and a fork closes unknown
            # ones.
            self._mapped = torch.from_file(
                f"/proc/self/fd/{self.file}", shared=True, size=capacity, dtype=torch.uint8
            )
        return self._mapped[:size]

    def unmap(self) -> None:
        """Release the mapping in this process until the next access."""
        self._mapped = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Release the memory. May be called twice."""
        self.unmap()
        if self.file >= 0:
            os.close(self.file)
        self.file = -1


# Errors --------------------------------------------------------------------------------------


class ErrorInWorker(Exception):  # noqa: N818  (it only carries a traceback)
    """The traceback of an error in a worker, and its frames."""

    def __init__(self, trace: str, frames: Sequence[Sequence[Any]]) -> None:
        super().__init__(trace)
        self.frames = [Frame(*frame) for frame in frames]


def encode_error(error: BaseException) -> dict[str, Any]:
    """Encode an error as JSON values; ``decode_error`` is the inverse."""
    simple = all(isinstance(value, str | int | float | None) for value in error.args)
    try:
        text = str(error)
    except Exception:  # its __str__ fails
        text = ""
    return {
        "error": [type(error).__module__, type(error).__qualname__],
        "arguments": list(error.args) if simple else [text],
        "text": text,
        "trace": "".join(traceback.format_exception(error)),
        "frames": frames_of(error),
    }


def decode_error(values: dict[str, Any]) -> Exception:
    """Decode an error to its own class if possible, else to a RuntimeError with its text."""
    module, name = values["error"]
    error: Exception = RuntimeError(f"{name}: {values['text']}")
    with suppress(Exception):
        error_type = reduce(getattr, name.split("."), sys.modules[module])
        if isinstance(error_type, type) and issubclass(error_type, Exception):
            rebuilt = error_type(*values["arguments"])
            error = rebuilt if str(rebuilt) == values["text"] else error
    error.__cause__ = ErrorInWorker(values["trace"], values["frames"])
    return error


# Processes -----------------------------------------------------------------------------------


@contextmanager
def pending_signals() -> Iterator[None]:
    """Delay signals that stop a run, so that every forked worker is recorded."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


@dataclass(eq=False)
class Worker:
    """A forked process, in the process that forked it."""

    process: int  # its id; 0 after its end
    pipe: Connection
    shared_buffer: SharedBuffer

    @classmethod
    def fork(
        cls, serve: Callable[[Connection, SharedBuffer], None], shared: Sequence[SharedBuffer]
    ) -> "Worker":
        """Fork a process that runs ``serve`` with the other end of ``pipe`` and ``shared_buffer``.

        Call it in ``pending_signals``. ``shared``: further buffers that the process reads. Raises
        OSError if the system has no process.
        """
        pipe, child_pipe = Pipe()
        shared_buffer = SharedBuffer()
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of forks beside threads; engines/process_pool.py explains why it
                # is safe.
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
        except OSError:
            pipe.close()
            child_pipe.close()
            shared_buffer.close()
            raise
        if process == 0:
            _run_worker(serve, child_pipe, shared_buffer, shared)
        child_pipe.close()
        return cls(process, pipe, shared_buffer)

    def end(self) -> str:
        """Kill the process if it runs; return how it ended. May be called twice."""
        process, self.process = self.process, 0
        self.pipe.close()
        self.shared_buffer.close()
        if not process:
            return "had ended"
        try:
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
        except (ProcessLookupError, ChildProcessError):
            return "had ended"
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return f"ended with status {code}"
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"  # a real-time signal without a name


def _run_worker(
    serve: Callable[[Connection, SharedBuffer], None], pipe: Connection,
    shared_buffer: SharedBuffer, shared: Sequence[SharedBuffer],
) -> NoReturn:  # fmt: skip
    """Run a worker from the fork to its end."""
    status = 1
    try:
        for number in STOPPING:  # these are meant for the engine's process
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        # Otherwise journals and run folder stay locked, and pipes of other workers open.
        kept_files = {pipe.fileno(), shared_buffer.file, *(buffer.file for buffer in shared)}
        for file in set(map(int, os.listdir("/proc/self/fd"))) - kept_files - {0, 1, 2}:
            with suppress(OSError):  # the listing's own descriptor
                os.close(file)
        threading.Thread(target=_end_with_parent, args=(pipe.fileno(),), daemon=True).start()
        logging.disable()  # train.log belongs to the engine's process
        sys.stdout = sys.stderr  # standard output may be JSON
        gc.freeze()
        torch.set_num_threads(1)
        serve(pipe, shared_buffer)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _end_with_parent(pipe: int) -> None:
    """Exit, even within a step, when the other end of the pipe closes."""
    poll = select.poll()
    poll.register(pipe, 0)  # reports hang-ups only
    poll.poll()
    os._exit(1)


def pin_to_core(place: int, workers: int) -> None:
    """Pin this process, worker ``place`` from 0, to one core if workers divide evenly among the
    cores.

    Linux may run all workers on one core and another program on the other, which doubles the time.
    With fewer workers than cores nothing is pinned, because another run would choose the same
    cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if workers % len(cores) == 0:
        with suppress(OSError):  # the core may be taken away meanwhile
            os.sched_setaffinity(0, {cores[place % len(cores)]})
