"""Where a run has come to, as it is kept between rounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Progress:
    """What a run has come to; saved with every checkpoint."""

    round: int = 0
    best: float = 0.0
    best_round: int = 0
    final: float = 0.0
    saved_best: float = -1.0  # highest accuracy of a round that has a checkpoint
    saved_best_round: int = 0
    up: int = 0
    down: int = 0
    seconds: float = 0.0
    refused: int = 0  # visits that a budget did not pay for
    start: str = ""  # fingerprint of the networks before round 1


@dataclass(frozen=True)
class CompletedRound:
    """What the last finished round left behind. Replaced as one, so that it is always whole."""

    state: Any
    memories: Mapping[str, Mapping[str, Tensor]]
    progress: Progress
