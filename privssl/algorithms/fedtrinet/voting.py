"""FedTriNet's settings, votes, threshold and batches: Che et al. 2021, Eq. 3 to 6.

The rounds are in ``algorithms/fedtrinet/algorithm.py``. Where the authors' code ("code" below) is
another method than their paper, a setting has both readings.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor

from privssl.algorithms.local_ssl import Amount, warm_up_fits
from privssl.data.affine_augment import AUGMENTATIONS
from privssl.data.augmentations import CROP, View
from privssl.settings.schema import Count, Positive, Problem, Rate, strict
from privssl.training import local_training

#: Rows of one step (B,), and the weight of their mean loss.
Part = tuple[Tensor, float]

# The authors' code: pseudo-labels count extra from epoch 50 of phase 2, by 0.15 from epoch 150.
RAMP_FROM, RAMP_OVER, RAMP_TO = 50, 100, 0.15
PROFILED = 10  # newly admitted rows from which a visit counts for ``ramp``


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedTriNetConfig:
    """Section ``algorithm`` for FedTriNet. The defaults are the profile ``fedtrinet-paper``;
    docs/fedtrinet.md lists what ``fedtrinet-release`` sets."""

    name: Literal["fedtrinet"] = "fedtrinet"
    rounds: Positive = 100  # T1 + T2; paper
    warm_up: Count = 40  # T1: rounds on labels alone; paper: 40 on MNIST, 30 Fashion, 60 SVHN
    cold_start: Count = 0  # rounds of all agents on labels before these; code: 2
    agents_per_round: Positive | None = 5  # m; code. All when absent
    local_epochs: Positive = 5  # E; paper. Code: 5
    fine_tune_epochs: Count = 5  # of c on labels, before it votes; code. 0: the paper's ablation
    batch_size: Positive = 50  # of labelled and of admitted rows; paper
    learning_rate: Rate = 0.01  # SGD, fresh at every call; code
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5  # code
    # code: none; SVHN there: shift. Paper, for all: fedtrinet, with flip
    augment: Literal["none", "shift", "weak", "mid", "strong", "fedtrinet"] = "none"
    flip: bool = False  # mirror left to right; code: SVHN alone
    shallow_convolutions: Positive | None = 2  # c has W's layers up to here; null: all of W's
    shallow: tuple[str, ...] = ()  # names of modules, in place of counting convolutions
    freeze_shallow: bool = False  # while c is fine-tuned; code: true on MNIST
    # Who trains in a round: the drawn agents (the algorithm box), or all, of which the drawn upload
    # (section III.B)
    trains: Literal["drawn", "all"] = "drawn"
    # l: the agent's network after its last visit (the box; code), or W after E epochs on its labels
    # in this visit ("trained with labeled data", section I)
    local_player: Literal["remembered", "labelled"] = "remembered"
    remember: Literal["trained", "fine_tuned"] = "trained"  # what an agent keeps as l; code
    local_votes: bool = True  # false: W and c alone, their sum on the scale of three; code
    votes_in: Literal["eval", "train"] = "eval"  # train: with dropout; code
    alpha: Amount = 0.93  # of Eq. 5; paper
    confidence: Literal["max", "mean"] = "max"  # over an agent's rows; code: mean (of test rows)
    measured: Literal["every_round", "once"] = "every_round"  # code: once, after phase 1
    measured_at: Literal["all", "taking_part"] = "all"  # Eq. 4: all
    schedule: Literal["printed", "floor", "unprotected"] = "printed"  # of theta(t): shrinkage
    clock: Rate = 1.0  # rounds of this run per round of the schedules: 0.5 for runs half as long
    first_round: Literal[0, 1] = 1  # t of the first round of phase 2; code: 0
    pseudo_labels: Literal["fresh", "kept", "never"] = "fresh"  # code: kept, for ever
    # two_streams: a batch of each kind in a step; mixed: all rows alike; code: ramp
    retrain: Literal["two_streams", "mixed", "ramp"] = "two_streams"
    pseudo_weight: Amount = 1.0  # lambda of Eq. 6, in two streams; ours
    weights: Literal["equal", "rows"] = "equal"  # of agents in the mean; Eq. 1: equal

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other, or have no effect."""
        yield from warm_up_fits(self.warm_up, self.rounds)
        if self.local_player == "labelled" and self.remember != "trained":
            yield Problem("remember", "has no effect: local_player labelled remembers no network")
        unused = self.retrain != "two_streams" or self.pseudo_labels == "never"
        if self.pseudo_weight != 1 and unused:
            text = "has no effect: it belongs to retrain two_streams, and to rows that are admitted"
            yield Problem("pseudo_weight", f"{text}. Leave it out")
        if self.freeze_shallow and not self.fine_tune_epochs:
            text = "has no effect: with fine_tune_epochs 0 there is no fine-tuning. Leave it out"
            yield Problem("freeze_shallow", text)

    def threshold(self, confidence: float, t: int) -> float:
        """theta(t) = alpha * theta-bar * s(t), Eq. 5.

        Args:
            confidence: theta-bar.
            t: rounds since phase 2 began, 0 in its first; the paper's t is ``first_round`` more.

        Returns:
            What the mean of three probabilities must exceed: at 2 no row passes, at 0 all do.
        """
        if self.pseudo_labels == "never":
            return 2.0
        scaled_t = (t + self.first_round) / self.clock
        return self.alpha * confidence * shrinkage(scaled_t, self.schedule)

    def augmentation(self) -> Callable[[Tensor, torch.Generator], Tensor]:
        """The augmentation of rows before training and voting."""
        if self.augment == "shift":  # the authors' SVHN: 4 of 32 pixels, mirrored borders
            return CROP.flipping(self.flip)
        if self.augment == "fedtrinet":
            return View(self.augment, self.flip)
        return AUGMENTATIONS[self.augment].flipping(self.flip)


def shrinkage(t: float, schedule: str) -> float:
    """s(t) of Eq. 5; the paper's t = 1, 2, ... since phase 2 began.

    As printed it is not monotone: 0.32 at t = 34, then 0.5. ``floor`` is at least 0.5;
    ``unprotected`` is the paper's ablation "threshold guarantee off", below 0 from t = 51.
    """
    if t < 10:
        return 1.0
    falling = (100 - 2 * t) / 100
    if schedule == "unprotected":
        return falling
    printed = falling if t < 35 else 0.5
    return max(0.5, printed) if schedule == "floor" else printed


def vote(probs: Sequence[Tensor], threshold: float) -> tuple[Tensor, Tensor]:
    """Eq. 3: the class of the largest summed probability, and whether it is confident.

    Args:
        probs: of each player (N, C), rows sum to 1. The sum of two players is divided by 3 too.
        threshold: theta(t); the mean must exceed it.

    Returns:
        Classes (N,), the lowest of equals, and confident (N,) bool.
    """
    highest, classes = (torch.stack(list(probs)).sum(dim=0) / 3).max(dim=1)
    return classes, highest > threshold


def ramp(epoch: float) -> float:
    """Weight of pseudo-labels in the authors' code; ``epoch`` counts since phase 2 began."""
    return RAMP_TO * min(max((epoch - RAMP_FROM) / RAMP_OVER, 0.0), 1.0)


def plan_steps(
    cfg: FedTriNetConfig, labelled: int, pseudo: int, *, t: int, is_hot: bool, rng: torch.Generator
) -> Iterator[list[Part]]:
    """Rows and loss weights of each step of one visit; labelled rows come first in the numbering.

    two_streams: Eq. 6, a batch of each kind in every step, reusing the smaller kind. mixed: all
    rows alike. ramp: the authors' code. It is mixed until a visit admitted ``PROFILED`` rows. Then
    it is half of that plus ``ramp`` / 2 of a batch of admitted rows, for as many steps as those
    make.

    Args:
        labelled, pseudo: rows of each kind, >= 0.
        t: rounds since phase 2 began.
        is_hot: whether any visit so far admitted ``PROFILED`` rows.
    """
    size = cfg.batch_size
    for epoch in range(cfg.local_epochs):
        if cfg.retrain == "two_streams":
            count = math.ceil(max(labelled, pseudo) / size)
            pairs = zip(
                _repeat_epochs(labelled, size, rng), _repeat_epochs(pseudo, size, rng), strict=True
            )
            for labelled_batch, pseudo_batch in itertools.islice(pairs, count):
                parts = [(labelled_batch, 1.0), (labelled + pseudo_batch, cfg.pseudo_weight)]
                yield [part for part in parts if len(part[0])]
            continue
        mixed_batches = local_training.epoch_batches(labelled + pseudo, size, rng)
        if cfg.retrain == "mixed" or not (is_hot and pseudo):
            yield from ([(batch, 1.0)] for batch in mixed_batches)
            continue
        pseudo_weight = ramp((epoch + cfg.local_epochs * t) / cfg.clock) / 2
        for batch, pseudo_batch in zip(
            mixed_batches, local_training.epoch_batches(pseudo, size, rng), strict=False
        ):
            yield [(batch, 0.5), (labelled + pseudo_batch, pseudo_weight)]


def _repeat_epochs(row_count: int, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Batches of epoch after epoch; empty ones without rows."""
    while row_count:
        yield from local_training.epoch_batches(row_count, size, rng)
    yield from itertools.repeat(torch.empty(0, dtype=torch.int64))
