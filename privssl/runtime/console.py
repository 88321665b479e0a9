"""Standard output and error of a command, whose reader may leave before the command has ended.

``| head -1`` ends, a terminal is closed, a supervisor gives no standard error at all: a run goes on
without a word then. What it did is in its folder.
"""

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console

from privssl.errors import UserError

#: Errors of a stream whose reader has left: a pipe, a terminal, what a caller closed.
CLOSED_STREAM_ERRNOS = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF)


class Terminal(Console):
    """A console on which printing ends nothing."""

    def print(self, *objects: Any, **how: Any) -> None:
        with ignore_closed_stream(self.file):
            super().print(*objects, **how)

    def on_broken_pipe(self) -> None:
        """rich's own ends the process, and closes standard output whichever of the two broke."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Screen(logging.Handler):
    """Errors, and each warning once, on standard error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text, style = record.getMessage(), None
        if record.levelno == logging.WARNING:
            if text in self._shown:  # the seeds of a comparison repeat their warnings
                return
            self._shown.add(text)
            text, style = f"Warning: {text}", "yellow"
        console = Terminal(stderr=True, highlight=False, soft_wrap=True)
        console.print(text, style=style, markup=False)


@contextmanager
def ignore_closed_stream(stream: Any) -> Iterator[None]:
    """Inside, a stream that nobody reads any more is no mistake; from then on it goes nowhere.

    Raises:
        UserError: standard output has a reader, a file on a full disk say, and cannot be written.
    """
    try:
        yield
        stream.flush()
    except OSError as error:
        redirect_to_devnull(stream)
        if stream is sys.stdout and error.errno not in CLOSED_STREAM_ERRNOS:
            raise UserError(
                f"Standard output cannot be written: {error.strerror}. The same is in the folder "
                "of the run, or comes again with the same command"
            ) from error
    except ValueError:
        if not stream.closed:
            raise


def redirect_to_devnull(stream: Any) -> None:
    """Let what is written to a stream from now on, and what waits in it, go nowhere."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def results_to_standard_output(text: str) -> None:
    """Print what a program is to read. Raises UserError as :func:`ignore_closed_stream`."""
    with ignore_closed_stream(sys.stdout):
        print(text)


def open_standard_streams() -> None:
    """Have somewhere for standard input, output and error to go where a caller closed them.

    Else the next files that are opened, a log or a ledger, get their numbers, and what any library
    prints would go there.
    """
    for number in range(3):  # the lowest that is free is given next
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")
