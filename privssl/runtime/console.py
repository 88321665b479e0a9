"""Standard output and error of a command; if they close, the run continues.

Readers may close early, such as ``| head -1``, a terminal, or a supervisor without standard error.
The run folder has the results.
"""

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console

from privssl.errors import UserError

#: Errors of a closed stream: a pipe, a terminal, or one that a caller closed.
CLOSED_STREAM_ERRNOS = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF)


class Terminal(Console):
    """A console on which a broken pipe is not an error."""

    def print(self, *objects: Any, **how: Any) -> None:
        with ignore_closed_stream(self.file):
            super().print(*objects, **how)

    def on_broken_pipe(self) -> None:
        """Do nothing. Rich's method ends the process, even if only standard error is broken."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Screen(logging.Handler):
    """Log handler for errors, and each warning once, on standard error; not those of the last
    lines."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text, style = record.getMessage(), None
        if getattr(record, "repeated", False):
            return
        if record.levelno == logging.WARNING:
            if text in self._shown:  # the seeds of a comparison repeat their warnings
                return
            self._shown.add(text)
            text, style = f"Warning: {text}", "yellow"
        console = Terminal(stderr=True, highlight=False, soft_wrap=True)
        console.print(text, style=style, markup=False)


@contextmanager
def ignore_closed_stream(stream: Any) -> Iterator[None]:
    """Ignore broken-pipe errors on a stream; then redirect it to /dev/null.

    Raises UserError if standard output cannot be written for another reason, such as a full disk.
    """
    try:
        yield
        stream.flush()
    except OSError as error:
        redirect_to_devnull(stream)
        if stream is sys.stdout and error.errno not in CLOSED_STREAM_ERRNOS:
            raise UserError(
                f"Standard output cannot be written: {error.strerror}. The results are in the run "
                "folder; the same command prints them again"
            ) from error
    except ValueError:
        if not stream.closed:
            raise


def redirect_to_devnull(stream: Any) -> None:
    """Discard buffered and later output of a stream."""
    with suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(devnull, stream.fileno())
        finally:
            os.close(devnull)


def results_to_standard_output(text: str) -> None:
    """Print output for programs. Raises UserError as :func:`ignore_closed_stream`."""
    with ignore_closed_stream(sys.stdout):
        print(text)


def open_standard_streams() -> None:
    """Let standard output and error print any text; replace closed streams by /dev/null.

    Otherwise the next opened files, a log or a ledger, would get their descriptors, and the output
    of libraries.
    """
    for number in range(3):  # the lowest free number is used next
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if isinstance(getattr(sys, name), io.TextIOWrapper):  # ASCII lacks most characters
            getattr(sys, name).reconfigure(errors="backslashreplace")
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
