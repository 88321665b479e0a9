"""The gate: in which rounds mixes train F (docs/synthetic_rows.md, "When mixes train F")."""

from collections.abc import Iterable
from typing import Literal, Protocol

SIMILAR = 0.1  # similarity of gradients from which mixes train F
SMOOTHING = 0.9  # of this similarity, from round to round


class GateReport(Protocol):
    """What an agent reports; None: nothing."""

    @property
    def agreement(self) -> float | None: ...
    @property
    def similarity(self) -> float | None: ...


class GateState(Protocol):
    """What the server keeps."""

    @property
    def agreement(self) -> float: ...
    @property
    def gate_round(self) -> int: ...
    @property
    def similarity(self) -> float: ...


def update_gate(
    gate: float | Literal["similarity"], state: GateState, reports: Iterable[GateReport], round: int
) -> tuple[float, int, float]:
    """Open or close the gate after a round.

    Args:
        gate: the agreement from which the gate opens and stays open, or "similarity": it is open
            while the similarity is at least ``SIMILAR``.
        round: the number of the round that ends.

    Returns:
        The agents' mean agreement, in [0, 1]; the round from which mixes train F, 0: they do not;
        the moving average of the agents' mean similarity, in [-1, 1].
    """
    reports = list(reports)
    agreement = _mean((report.agreement for report in reports), state.agreement)
    latest = _mean((report.similarity for report in reports), state.similarity)
    similarity = SMOOTHING * state.similarity + (1 - SMOOTHING) * latest
    if gate == "similarity":
        is_open = similarity >= SIMILAR
    else:
        is_open = state.gate_round > 0 or agreement >= gate
    return agreement, (state.gate_round or round + 1) if is_open else 0, similarity


def _mean(values: Iterable[float | None], default: float) -> float:
    """The mean of the values that are not None; ``default`` without any."""
    reported = [value for value in values if value is not None]
    return sum(reported) / len(reported) if reported else default
