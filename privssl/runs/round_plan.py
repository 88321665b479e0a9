"""The planned rounds of a run."""

from collections.abc import Sequence
from typing import Any

from privssl.algorithms.base import Algorithm
from privssl.core.federation import Round
from privssl.core.task import Phase


def rounds_of(algorithm: Algorithm[Any]) -> int:
    """Return the number of rounds of a run."""
    return sum(phase.rounds for phase in algorithm.phases())


def planned_rounds(phases: Sequence[Phase]) -> list[Round]:
    """Return all rounds of a run, in order."""
    rounds: list[Round] = []
    for phase in phases:
        for number in range(1, phase.rounds + 1):
            saved = phase.saved and number == phase.rounds
            rounds.append(Round(len(rounds) + 1, phase.name, number, saved))
    return rounds
