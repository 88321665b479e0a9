"""Findings of checks, and the report of a check that itself fails."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

Status = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """One line of the report; ``advice`` is empty if there is no problem."""

    name: str
    status: Status
    text: str
    advice: str = ""


def judge(name: str, fine: bool, text: str, advice: str, *, otherwise: Status) -> Finding:
    """Return ``ok`` if ``fine``, else ``otherwise`` with the advice."""
    return Finding(name, "ok" if fine else otherwise, text, "" if fine else advice)


Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yield all findings. A check that itself fails is reported as a problem."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # a broken library raises anything
            name = check.__name__.removeprefix("check_").replace("_", " ")
            message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            yield Finding(
                name, "problem", f"cannot be checked ({message})", "Install privssl again."
            )
