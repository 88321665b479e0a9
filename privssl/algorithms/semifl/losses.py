"""SemiFL's batches and losses: rows that meet in a mix, Eq. 5 to 7."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from privssl.algorithms.semifl.settings import Variant


def epoch_permutations(
    row_count: int, size: int, epochs: float, rng: torch.Generator
) -> Iterator[Tensor]:
    """Row numbers of each epoch, shuffled, for batches of ``size``.

    Args:
        row_count: >= 0; no rows give empty epochs.
        epochs: > 0, rounded up; up to 1, one epoch stops after that share of its batches.
    """
    share = min(epochs, 1.0)
    epoch_size = size * math.ceil(share * math.ceil(row_count / size))
    for _ in range(math.ceil(epochs)):
        yield torch.randperm(row_count, generator=rng)[:epoch_size]


def pair_rows(
    confident: Tensor, orders: Iterable[Tensor], variant: Variant, rng: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each epoch the rows of D+ and those of D- that they are mixed with (B,): Eq. 3 and 4.

    D- is drawn with replacement, by ``mix_rows`` from all rows or, as printed, from unsure ones
    (from all, where none is unsure). By ``mix_drawn`` it is drawn in every epoch or, as printed,
    once, and then shuffled in every epoch.

    Args:
        confident: which rows (N,) have a label of probability tau or more; at least one has.
        orders: of the confident rows, ``epoch_permutations``.
    """
    plus, pool = confident.nonzero()[:, 0], torch.arange(len(confident))
    if variant.mix_rows == "unsure" and not confident.all():
        pool = pool[~confident]
    minus_of_visit = pool[:0]
    if variant.mix_drawn == "visit":
        minus_of_visit = pool[torch.randint(len(pool), (len(plus),), generator=rng)]
    for order in orders:
        if variant.mix_drawn == "visit":
            minus = minus_of_visit[torch.randperm(len(minus_of_visit), generator=rng)[: len(order)]]
        else:
            minus = pool[torch.randint(len(pool), (len(order),), generator=rng)]
        yield plus[order], minus


def fix_and_mix_loss(
    batch: Mapping[str, Tensor], mix_weight: float, *, F: Callable[..., Tensor]
) -> Tensor:
    """CE(F(strong), y) + mix_weight mix_loss, a scalar: Eq. 6 and 7.

    Args:
        batch: ``strong`` (B, *shape) and its labels ``y``; for the mix ``y2``, ``lam`` and either
            ``mix``, a view of mixed rows, or weak views ``x1`` and ``x2`` to mix. y is the label of
            strong and of x1. Labels are classes (B,) or probabilities (B, C).
    """
    loss = cross_entropy(F(batch["strong"]), batch["y"])
    if not mix_weight:
        return loss
    lam = batch["lam"]
    mixed = batch["mix"] if "mix" in batch else lam * batch["x1"] + (1 - lam) * batch["x2"]
    return loss + mix_weight * mix_loss(F(mixed), batch["y"], batch["y2"], lam)


def mix_loss(logits: Tensor, y1: Tensor, y2: Tensor, lam: float | Tensor) -> Tensor:
    """lam CE(logits, y1) + (1 - lam) CE(logits, y2), a scalar: logits (B, C), labels (B,) classes
    or (B, C) probabilities."""
    return lam * cross_entropy(logits, y1) + (1 - lam) * cross_entropy(logits, y2)
