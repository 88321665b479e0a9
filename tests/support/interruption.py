"""Ctrl-C in a chosen round of a command with several runs."""

import contextlib
import signal
from collections.abc import Iterator

import pytest

from privssl.core.federation import Federation, Round


@contextlib.contextmanager
def interrupted_in(round_of_all: int) -> Iterator[None]:
    """Raise SIGINT at the start of a round, counted over all runs of the command."""
    real, count = Federation.begin, 0

    def begin(self: Federation, now: Round) -> None:
        nonlocal count
        count += now.number > 0  # round 0 is the start of a run
        if count == round_of_all:
            signal.raise_signal(signal.SIGINT)
        real(self, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "begin", begin)
        yield
