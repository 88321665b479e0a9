"""Standard output and error of a command, which end no run: their reader may leave early.

``| head -1`` ends, a terminal is closed, a supervisor provides no standard error: the run
continues, and its folder has the results.
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

#: Errors of a stream without a reader: a pipe, a terminal, a stream that a caller closed.
CLOSED_STREAM_ERRNOS = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF)


class Terminal(Console):
    """A console whose broken pipe is no error."""

    def print(self, *objects: Any, **how: Any) -> None:
        with ignore_closed_stream(self.file):
            super().print(*objects, **how)

    def on_broken_pipe(self) -> None:
        """Rich's own method ends the process, also if standard error alone is broken."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Screen(logging.Handler):
    """Errors, and each warning once, on standard error; not those that the last lines repeat."""

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
    """Ignore broken-pipe errors on a stream; afterwards it is redirected to /dev/null. Raises
    UserError: standard output cannot be written for another reason, such as a full disk."""
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
    """Discard what is buffered in a stream, and what is written to it later."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def results_to_standard_output(text: str) -> None:
    """Print output for programs. Raises UserError as :func:`ignore_closed_stream`."""
    with ignore_closed_stream(sys.stdout):
        print(text)


def open_standard_streams() -> None:
    """Let standard output and error print any text; replace closed streams by /dev/null.

    Otherwise the next files that are opened, a log or a ledger, would get their numbers and the
    output of libraries.
    """
    for number in range(3):  # the lowest free number is used next
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if isinstance(getattr(sys, name), io.TextIOWrapper):  # ASCII or Latin-1 lacks some letters
            getattr(sys, name).reconfigure(errors="backslashreplace")
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
