"""Errors of privacy accounts. ``accounting`` imports nothing from ``privssl``, hence its own."""


class AccountingError(Exception):
    """An error that the user can fix. ``str(error)`` says what, where and what to do."""

    exit_status = 2


class PlanError(AccountingError):
    """A number or a combination of numbers that permits no true guarantee."""


class BudgetExhausted(AccountingError):  # noqa: N818  a normal end, not an error
    """A visit refused because it would exceed the budget. Nothing was written or read."""


class LedgerError(AccountingError):
    """A journal that is missing, damaged, rolled back, locked or not writable."""
