"""FedSEAL's pseudo-labels (y+) and complementary labels (y-, what a row is not), and their losses.

Bian, Fu, Xu (arXiv:2110.07829). The rounds are in ``algorithms/fedseal/algorithm.py``.

    Eq. 5          compute_class_thresholds, average_thresholds; on rows of split_validation
    Eq. 9 to 12    draw_signed_labels
    Eq. 13         batch_loss, over draw_signed_batches, lambda from sign_weights
    Eq. 15         complementary_loss
    Fig. 3, 4      compute_validation_metrics
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from privssl.training import local_training
from privssl.training.losses import soft_cross_entropy

Schedule = Literal[
    "complement", "inverse", "inverse_capped", "decay", "rampup", "decay_negative", "constant"
]
Batching = Literal["union", "exact", "zip", "sequential"]
#: In place of +inf, which messages refuse: no confidence reaches it.
NEVER_SEEN = torch.finfo(torch.float32).max
LISTED = 20  # classes at most whose confidence is logged one by one


class SignedLabels(NamedTuple):
    """Pseudo-labels and complementary labels of N rows."""

    y_plus: Tensor  # (N,) classes
    targets: Tensor  # (N, C) target distributions of rows of D+
    positive: Tensor  # (N,) bool: in D+
    y_minus: Tensor  # (N,) classes; without meaning outside of D-
    negative: Tensor  # (N,) bool: in D-

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows in D+ and in D-."""
        return int(self.positive.sum()), int(self.negative.sum())


def compute_class_thresholds(p: Tensor, y: Tensor) -> Tensor:
    """tau_m = summed confidence of rows predicted as m / rows of class m. Eq. 5.

    Args:
        p: predictions of validation rows (V, C).
        y: their classes (V,).

    Returns:
        (C,), >= 0; above 1 for a class that is predicted too often, +inf for one without rows.
    """
    confidence, predicted = p.max(dim=1)  # (V,)
    summed = torch.zeros(p.shape[1]).index_add_(0, predicted, confidence)  # (C,)
    count = torch.bincount(y, minlength=p.shape[1])  # (C,)
    return torch.where(count > 0, summed / count, torch.inf)


def average_thresholds(thresholds: Sequence[Tensor], classes: int) -> Tensor:
    """Mean of thresholds (C,), of each class over the agents that have it; else NEVER_SEEN."""
    all_thresholds = torch.stack(
        [*thresholds, torch.full((classes,), NEVER_SEEN)]
    )  # (holders + 1, C)
    has_rows = all_thresholds < NEVER_SEEN
    mean = torch.where(has_rows, all_thresholds, 0.0).sum(dim=0) / has_rows.sum(dim=0)
    return torch.where(has_rows.any(dim=0), mean, NEVER_SEEN)


def draw_signed_labels(
    p_bar: Tensor, tau: Tensor, theta: float, rng: torch.Generator, *,
    exclude_likeliest: bool = False, hard: bool = True,
) -> SignedLabels:  # fmt: skip
    """Eq. 9 to 12. A row without confidence and without an unlikely class is in neither set.

    Args:
        p_bar: mean predictions (N, C), rows sum to 1.
        tau: threshold of each class (C,).
        theta: a class is unlikely up to this.
        exclude_likeliest: y+ is not unlikely, even where theta is above it.
        hard: the target of rows of D+ is y+, else p-bar.
    """
    confidence, y_plus = p_bar.max(dim=1)  # Eq. 9
    positive = confidence >= tau[y_plus]  # Eq. 10
    unlikely = p_bar <= theta  # (N, C), Eq. 11
    likeliest = one_hot(y_plus, p_bar.shape[1])
    if exclude_likeliest:
        unlikely &= ~likeliest.bool()
    negative = ~positive & unlikely.any(dim=1)  # Eq. 12
    weights = torch.where(negative[:, None], unlikely.float(), 1.0)
    y_minus = torch.multinomial(weights, 1, generator=rng)[:, 0]
    return SignedLabels(y_plus, likeliest.float() if hard else p_bar, positive, y_minus, negative)


def compute_validation_metrics(p: Tensor, y: Tensor, labels: SignedLabels) -> dict[str, float]:
    """What Figures 3 and 4 draw, on validation rows, whose classes are known.

    right_positive and right_negative: share of right labels among rows of D+ (y+ is the class) and
    of D- (y- is not); absent where there is no such row. confidence/m: mean of the largest
    probability of rows of class m.

    Args:
        p: predictions (V, C).
        y: classes (V,).
        labels: labels that these rows would get.
    """
    metrics = {}
    for sign, correct, mask in (
        ("positive", labels.y_plus == y, labels.positive),
        ("negative", labels.y_minus != y, labels.negative),
    ):
        if mask.any():
            metrics[f"train/right_{sign}"] = float(correct[mask].float().mean())
    if p.shape[1] <= LISTED:
        for m in sorted(set(y.tolist())):
            metrics[f"train/confidence/{m}"] = float(p[y == m].amax(dim=1).mean())
    return metrics


def complementary_loss(logits: Tensor, y_minus: Tensor) -> Tensor:
    """-log(1 - p of y-), Eq. 15, by the sum of the other classes: exact for any p.

    Args:
        logits: (B, C), C >= 2.
        y_minus: (B,).

    Returns:
        (B,). The gradient by the logits is at most p of y-, so no clamp is needed.
    """
    excluded = one_hot(y_minus, logits.shape[1]).bool()
    return logits.logsumexp(dim=1) - logits.masked_fill(excluded, -torch.inf).logsumexp(dim=1)


def sign_weights(
    schedule: Schedule, lambda_1: float, rate: float, *, rounds: int, max_rounds: int
) -> tuple[float, float]:
    """Weights of the positive loss (lambda) and of the negative one in Eq. 13.

    In the paper lambda grows, from a printed value with a "decay rate (until round 100)". With
    d = rate ^ rounds:

        complement      1 - (1 - lambda_1) d: agrees with all of this, and ends at 1
        inverse         lambda_1 / d: has no bound
        inverse_capped  the same, up to 1
        decay           lambda_1 d: the table without the text
        rampup          decay reversed
        constant        lambda_1
        decay_negative  the ratio of inverse, with weight d on the negative loss

    Args:
        lambda_1: lambda in the first round, in (0, 1].
        rounds: since the first, 0 to ``max_rounds``.
    """
    d = rate**rounds
    match schedule:
        case "complement":
            return 1 - (1 - lambda_1) * d, 1.0
        case "inverse":
            return lambda_1 / d, 1.0
        case "inverse_capped":
            return lambda_1 / max(lambda_1, d), 1.0
        case "decay":
            return lambda_1 * d, 1.0
        case "rampup":
            return lambda_1 * rate ** (max_rounds - rounds), 1.0
        case "decay_negative":
            return lambda_1, d
        case "constant":
            return lambda_1, 1.0


def batch_loss(
    batching: Batching, positive_loss: Tensor, negative_loss: Tensor, sizes: tuple[int, int],
    weights: tuple[float, float],
) -> Tensor:  # fmt: skip
    """Eq. 13 on one batch: lambda * mean over positive rows + mean over negative rows.

    Args:
        batching: exact divides by the expected number of rows, so that the mean over batches is
            Eq. 13 of the whole sets; otherwise by the actual number.
        positive_loss, negative_loss: of the batch's rows of D+ (B+,) and D- (B-,); none: no term.
        sizes: rows of the whole D+ and D-.
        weights: of the positive and of the negative loss.
    """
    ratio = sum(sizes) / (len(positive_loss) + len(negative_loss))
    loss = positive_loss.new_zeros(())
    for losses, size, weight in zip((positive_loss, negative_loss), sizes, weights, strict=True):
        if len(losses):
            share = ratio / size if batching == "exact" else 1 / len(losses)
            loss = loss + weight * share * losses.sum()
    return loss


def draw_signed_batches(
    batching: Batching, labels: SignedLabels, size: int, rng: torch.Generator
) -> list[Tensor]:
    """Row numbers of one epoch over D+ and D-, in batches of ``size``.

    union, exact: shuffled together. sequential: all of D+, then all of D-. zip: a batch of each
    side by side, reusing the smaller set; where one is empty, the other alone.
    """
    parts = [torch.nonzero(mask)[:, 0] for mask in (labels.positive, labels.negative)]
    sets = [rows for rows in parts if len(rows)]
    if batching in ("union", "exact") and sets:
        sets = [torch.cat(sets)]
    if batching != "zip":
        return [
            rows[i] for rows in sets for i in local_training.epoch_batches(len(rows), size, rng)
        ]
    steps = -(-max(labels.sizes) // size)
    columns = []
    for rows in sets:
        column: list[Tensor] = []
        while len(column) < steps:
            column += [rows[i] for i in local_training.epoch_batches(len(rows), size, rng)]
        columns.append(column[:steps])
    return [torch.cat(pair) for pair in zip(*columns, strict=True)]


def compute_signed_losses(
    logits: Tensor, labels: SignedLabels, batch: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses of the positive rows of a batch (B+,), Eq. 14, and of the negative ones (B-,), Eq. 15.

    Args:
        logits: of all rows of the batch (B, C).
        batch: their numbers (B,), each in D+ or in D-.
    """
    positive = labels.positive[batch]
    y_plus, y_minus = labels.targets[batch[positive]], labels.y_minus[batch[~positive]]
    return (
        soft_cross_entropy(logits[positive], y_plus.to(logits.device)),
        complementary_loss(logits[~positive], y_minus.to(logits.device)),
    )


def split_validation(y: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Validation rows (N,) bool: equally many of each class, as far as possible.

    The last row of a class is chosen only when all other classes are down to one row.

    Args:
        y: classes (N,), at least one.
        count: validation rows, at most N.
    """
    order = torch.randperm(len(y), generator=rng)
    tie = torch.randperm(int(y.max()) + 1, generator=rng)  # among classes of equal priority
    rows_of_class = torch.bincount(y)[y[order]]
    rank = one_hot(y[order]).cumsum(dim=0).gather(1, y[order, None])[:, 0] - 1  # within its class
    priority = torch.where(rank == rows_of_class - 1, len(y), rank)
    chosen = order[(priority * len(tie) + tie[y[order]]).argsort()[:count]]
    return torch.zeros(len(y), dtype=torch.bool).index_fill_(0, chosen, True)
