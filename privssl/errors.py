"""What a user can do wrong, as exceptions that say what, where and what to do.

The commands catch :class:`UserError`, print its text and end with its exit status; a
traceback is for bugs alone. The tree is flat on purpose: a caller rarely needs more than
"is this the user's to mend?".
"""


class UserError(Exception):
    """Something the user can mend. ``str(error)`` says what, where and what to do."""

    exit_status = 2


class ConfigError(UserError):
    """The config file or the command line asks for something that cannot be."""


class DataError(UserError):
    """A data set is missing, damaged, or cannot be split as asked."""


class RunFolderError(UserError):
    """The run folder exists, is damaged, belongs to another run, or cannot be written."""


class PrivacyError(UserError):
    """What was asked would make the privacy claim untrue."""


class RoleError(UserError):
    """A step asked an agent for rows that its role does not hold."""
