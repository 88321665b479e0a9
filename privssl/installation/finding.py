"""What a check found, and how a check that fails itself is reported."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

Status = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """One line of the report; ``advice`` says what to do, and is empty where all is well."""

    name: str
    status: Status
    text: str
    advice: str = ""


def judge(name: str, fine: bool, text: str, advice: str, *, otherwise: Status) -> Finding:
    """``ok`` where all is fine, else ``otherwise``, with what to do."""
    return Finding(name, "ok" if fine else otherwise, text, "" if fine else advice)


Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Iterable[Check]) -> Iterator[Finding]:
    """Everything that the checks find. A check that fails itself is a problem, not the end."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # a broken library raises anything
            name = check.__name__.removeprefix("check_").replace("_", " ")
            seen = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            yield Finding(name, "problem", f"cannot be checked ({seen})", "Install privssl again.")
