"""The errors of an account; ``accounting`` imports nothing from ``privssl``, so it has its own."""


class AccountingError(Exception):
    """Something the user can mend. ``str(error)`` says what, where and what to do."""

    exit_status = 2


class PlanError(AccountingError):
    """A number or a combination of numbers from which no true claim can follow."""


class BudgetExhausted(AccountingError):  # noqa: N818  a normal end, not an error
    """A visit was refused because it would exceed the budget. Nothing was written or read."""


class LedgerError(AccountingError):
    """The journal is missing, damaged, rolled back, locked, or cannot be written."""
