"""User errors: exceptions that say what is wrong, where, and what to do.

The commands catch :class:`UserError`, print its text and end with its exit status.
"""

from collections.abc import Sequence


class UserError(Exception):
    """An error that the user can correct. ``str(error)`` says what, where and what to do."""

    exit_status = 2


class ConfigError(UserError):
    """The config file or the command line is wrong."""


class DataError(UserError):
    """A data set is missing, damaged, or cannot be split as configured."""


class RunFolderError(UserError):
    """The run folder exists, is damaged, belongs to another run, or cannot be written."""


class PrivacyError(UserError):
    """The privacy guarantee would be false."""


class RoleError(UserError):
    """A step accessed rows that an agent of this role does not hold."""


def first_line(error: BaseException) -> str:
    """Return the first informative line of an error's text, at most 200 characters, without full
    stop.

    That is the second line if the first ends with a colon. Blank lines do not count.

    >>> first_line(RuntimeError("Errors in loading:\\n\\n\\tsize mismatch."))
    'size mismatch'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    informative = lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return informative[:200].rstrip(".")


def first_few(names: Sequence[object]) -> str:
    """Return the first five names in a sentence, and dots if there are more."""
    return ", ".join(map(str, names[:5])) + (", ..." if len(names) > 5 else "")
