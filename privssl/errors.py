"""A user's mistakes, as exceptions that say what is wrong, where, and what to do.

The commands catch :class:`UserError`, print its text and end with its exit status.
"""

from collections.abc import Sequence


class UserError(Exception):
    """A mistake that the user can correct. ``str(error)`` says what, where and what to do."""

    exit_status = 2


class ConfigError(UserError):
    """The config file or the command line is wrong."""


class DataError(UserError):
    """A data set is missing, damaged, or cannot be split as configured."""


class RunFolderError(UserError):
    """The run folder exists, is damaged, belongs to another run, or cannot be written."""


class PrivacyError(UserError):
    """The privacy claim would be untrue."""


class RoleError(UserError):
    """A step accessed rows that the agent's role does not hold."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, at most 200 characters, without its
    full stop: a line that ends with a colon announces the next.

    >>> first_line(RuntimeError("Errors in loading:\\n\\tsize mismatch."))
    'size mismatch'
    """
    lines = str(error).strip().splitlines() or ["no message"]
    return lines[lines[0].endswith(":") and len(lines) > 1].strip()[:200].rstrip(".")


def first_few(names: Sequence[object]) -> str:
    """The first five names in a sentence, and dots if there are more."""
    return ", ".join(map(str, names[:5])) + (", ..." if len(names) > 5 else "")
