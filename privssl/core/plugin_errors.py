"""Errors in plug-ins, shown by the failing line without a traceback."""

import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from accounting.errors import AccountingError
from privssl.core.step_runner import run_step
from privssl.errors import UserError, first_line
from privssl.runtime import plugins


class PluginError(UserError):
    """An unexpected error raised by a plug-in."""


class Frame(NamedTuple):
    """A frame of a traceback. ``visit``: the step and agent called from it, "" on the server."""

    file: str
    line: int
    function: str
    visit: str


def frames_of(error: BaseException) -> list[Frame]:
    """Return the frames of an error, innermost last.

    An error of a worker process has the frames of that process (``ErrorInWorker.frames``).
    """
    frames, visit = list[Frame](), ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code is run_step.__code__:
            step, agent, ctx = (frame.f_locals[name] for name in ("step", "agent", "ctx"))
            visit = f"{getattr(step, '__name__', 'a step')} of {agent.id} in round {ctx.round}"
        frames.append(Frame(frame.f_code.co_filename, line, frame.f_code.co_name, visit))
    return [*frames, *getattr(error.__cause__, "frames", ())]


#: Kind, key and name of each plug-in, as in ``experiment/plugin_names.py``.
Named = Iterable[tuple[plugins.Kind, str, str]]


@contextmanager
def plugin_errors(
    named: Named,
    keep: Callable[[Exception], str] | None = None,
    passing: type[Exception] = UserError,
) -> Iterator[None]:
    """Convert an error from a line of a plug-in to PluginError with its key, name, file and line.

    Args:
        named: the plug-ins that were imported.
        keep: saves the traceback, and returns where: ". The traceback is in FILE".
        passing: errors that are not converted, besides user errors.
    """
    try:
        yield
    except (UserError, AccountingError, passing):
        raise
    except Exception as error:
        description = _describe_error(error, named)
        if description is None:
            raise
        raise PluginError(description + (keep(error) if keep else "")) from error


def _describe_error(error: Exception, named: Named) -> str | None:
    """Describe the innermost line of a plug-in, and the error; None if no plug-in is in the
    traceback."""
    frames = frames_of(error)
    files = {os.path.realpath(frame.file) for frame in frames}
    for kind, key, name in named:
        paths = {
            os.path.realpath(path): short for short, path in plugins.files_of(kind, name).items()
        }
        if not paths.keys() & files:
            continue
        last = [frame for frame in frames if os.path.realpath(frame.file) in paths][-1]
        visit = f", {last.visit}" if last.visit else ""
        return (
            f"{key} {name} fails in {last.function} ({paths[os.path.realpath(last.file)]}, line "
            f"{last.line}){visit}: {type(error).__name__}: {first_line(error)}"
        )
    return None
