"""Reads and releases of private mechanisms in the current step.

Mechanisms record them; the step runner compares them with the rows read and the message sent.
"""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import PurePath
from typing import Any, Protocol

import torch
from torch import Tensor

from accounting.errors import AccountingError
from accounting.events import Event
from privssl.errors import PrivacyError


class Made(dict[str, tuple[Event, dict[str, Tensor]]]):
    """Field of a message -> its charged event, and its tensors by name ("" for a single tensor).

    ``begun``: whether a mechanism has begun to use rows. ``failed``: whether one raised an error
    while it used them. ``counted``: the histograms of a census, as the step sees them and as they
    are, and the most rows of one person in it. ``sealed``: whether the step may see no exact one.
    """

    begun = False
    failed = False

    def __init__(self, *, sealed: bool) -> None:
        super().__init__()
        self.sealed = sealed
        self.counted: list[tuple[Tensor, Tensor, int]] = []


_made: ContextVar[Made | None] = ContextVar("made", default=None)
_reads: ContextVar[bool] = ContextVar("reads", default=False)


@contextmanager
def mechanism_reads() -> Iterator[None]:
    """Permit reads of labelled rows under a plan that leaves them to its mechanism."""
    token = _reads.set(True)
    try:
        yield
    finally:
        _reads.reset(token)


def mechanism_is_reading() -> bool:
    """Return whether :func:`mechanism_reads` is open."""
    return _reads.get()


@contextmanager
def watch_mechanisms(*, sealed: bool) -> Iterator[Made]:
    """Collect the releases of mechanisms inside the block. ``sealed``: as in :class:`Made`."""
    made = Made(sealed=sealed)
    token = _made.set(made)
    try:
        yield made
    finally:
        _made.reset(token)


@contextmanager
def errors_without_rows(what: str) -> Iterator[None]:
    """Replace errors of code that gets labelled rows by a PrivacyError without their text.

    The text may show rows, and errors are printed, logged and in tracebacks. ``what``: that code.
    Outside of steps the failure is not recorded.
    """
    try:
        yield
    except Exception as error:
        if (made := _made.get()) is not None:
            made.failed = True
        if isinstance(error, PrivacyError | AccountingError):  # raised by the mechanism itself
            raise
        raise error_without_rows(what, error) from None


def error_without_rows(what: str, error: Exception) -> PrivacyError:
    """Return an error that names the place of another, without its text."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return PrivacyError(
        f"{what} fails on labelled rows: {type(error).__name__} in {frame.name} "
        f"({PurePath(frame.filename).name}, line {frame.lineno}). The text of the error is "
        "withheld, because it may show rows. Try that code on made-up rows, of all classes"
    )


class Mechanism(Protocol):
    """A plan of a private mechanism."""

    @property
    def event(self) -> Event: ...  # the event of a visit


def begin_release() -> None:
    """Record that a mechanism begins to use rows; outside of steps do nothing.

    Raises:
        PrivacyError: it is the second of the step, and one charge would pay for two.
    """
    made = _made.get()
    if made is None:
        return
    if made.begun:
        raise PrivacyError(
            "a private mechanism uses rows twice in one step, which is charged once. Train all "
            "protected networks in one call, or in two visits"
        )
    made.begun = True


def record_counts(counts: Tensor, per_person: int) -> Tensor:
    """Record a counted histogram; return what the step may see of it: in a sealed one zeros.

    ``per_person``: the most rows of one person in it; 1 if rows name none.

    Which message it sends, and the text of an error, could follow from exact counts.
    """
    if (made := _made.get()) is None:
        return counts
    seen = torch.zeros_like(counts) if made.sealed else counts
    made.counted.append((seen, counts.clone(), per_person))
    return seen


def exact_counts(seen: Tensor, per_person: int) -> Tensor:
    """Return the histogram that was counted in this step; outside of steps the given one.

    Args:
        seen: what :func:`record_counts` returned, unchanged.
        per_person: how many rows of one person it may have.

    Raises:
        PrivacyError: it was changed, so a row may change it by more than one; or several were
            counted, and the choice may depend on rows; or a person has more rows in it.
    """
    made = _made.get()
    if made is None:
        return seen
    if len(made.counted) != 1:
        raise PrivacyError(
            f"a census releases the one table that was counted in its step, and "
            f"{len(made.counted)} were: which of several is released could follow from the rows. "
            "Call count_rows once"
        )
    [(recorded, exact, most)] = made.counted
    if most > per_person:
        raise PrivacyError(
            f"a person has {most} rows in a census whose noise is for {per_person} "
            "(privacy.rows_per_person)"
        )
    if seen is not recorded or not torch.equal(
        recorded, torch.zeros_like(exact) if made.sealed else exact
    ):
        raise PrivacyError(
            "a census releases counts as count_rows made them, and these were changed, so one row "
            "could move them by more than 1. Change them after the noise"
        )
    return exact


def record_release(mechanism: Mechanism, name: str, value: Mapping[str, Tensor] | Tensor) -> None:
    """Record a mechanism's release for a field; outside of steps do nothing."""
    if (made := _made.get()) is not None:
        made[name] = mechanism.event, {n: t.detach().clone() for n, t in _as_tensors(value).items()}


def is_release(made: Made, event: Event, name: str, sent: Any) -> bool:
    """Return whether a field has exactly the bits that a mechanism released for it, under this
    event."""
    charged, released = made.get(name, (None, {}))
    tensors = _as_tensors(sent)
    return charged == event and released.keys() == tensors.keys() and all(
        _has_same_bits(released[n], tensors[n]) for n in released
    )  # fmt: skip


def _as_tensors(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"": value}


def _has_same_bits(tensor: Tensor, other: Any) -> bool:
    """Return whether the bits are equal, also of NaN: training may diverge."""
    if not isinstance(other, Tensor) or (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return False
    a, b = (t.detach().cpu().reshape(-1).contiguous().view(torch.uint8) for t in (tensor, other))
    return torch.equal(a, b)
