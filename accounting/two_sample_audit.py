"""ROC of an attack, and the lower bound on epsilon from its errors in two hypotheses.

The attack scores independent trials of two kinds: the row was in the training data, or not. The ROC
gives the AUC with a 95% interval and the TPR at 1% FPR. Errors at one threshold give
Clopper-Pearson limits and the largest epsilon that they reject (arXiv:2006.07709,
arXiv:2101.04535): an (epsilon, delta)-DP run bounds both kinds of errors from below.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import betaincinv, ndtri
from scipy.stats import rankdata

from accounting.errors import PlanError
from accounting.events import check_count, check_delta
from accounting.one_run_audit import check_confidence, check_part

Floats = NDArray[np.float64]

_CANDIDATES = 500  # thresholds tried from either end of the scores
#: The best of many thresholds is partly chance. Wider limits while choosing prefer a threshold with
#: more errors to count.
_WIDER = 50
_Z = float(ndtri(0.975))  # of a two-sided 95% interval


@dataclass(frozen=True)
class AttackRates:
    """AUC and TPR of membership scores.

    ``auc``: probability that a member outscores a non-member, ties half, with its 95% interval.
    ``tpr_at_1_percent_fpr``: largest share of members above a threshold that at most 1% of the
    non-members exceed (none of them, if fewer than 100).
    """

    auc: float
    auc_low: float
    auc_high: float
    tpr_at_1_percent_fpr: float


def roc(scores_in: ArrayLike, scores_out: ArrayLike) -> AttackRates:
    """Return the area under the ROC curve and the TPR at 1% FPR.

    The interval is Newcombe's method 5 (Statistics in Medicine 25, 2006, 559-573): the AUCs within
    1.96 of Hanley and McNeil's standard errors at that AUC. It keeps its width when all members
    rank on top.

    Args:
        scores_in, scores_out: (I,) and (O,), I, O >= 1, higher for members. PlanError for NaN.
    """
    included, excluded = (
        _check_scores("scores_in", scores_in),
        _check_scores("scores_out", scores_out),
    )
    ranks = rankdata(np.concatenate([included, excluded]))  # (I + O,), ties share the mean rank
    u_statistic = float(ranks[: included.size].sum()) - included.size * (included.size + 1) / 2
    auc = u_statistic / (included.size * excluded.size)
    threshold = np.sort(excluded)[-1 - excluded.size // 100]  # above it: at most 1% of these
    low, high = (_find_auc_limit(auc, end, included.size, excluded.size) for end in (0.0, 1.0))
    return AttackRates(auc, low, high, float(np.mean(included > threshold)))


def _find_auc_limit(auc: float, end: float, trials_in: int, trials_out: int) -> float:
    """Return the AUC towards ``end`` (0 or 1) at which the observed one is 1.96 standard errors
    away."""
    if auc == end:
        return end

    def excess(theta: float) -> float:
        half = (trials_in + trials_out) / 2 - 1
        spread = 1 + half * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        variance = theta * (1 - theta) * spread / (trials_in * trials_out)
        return abs(auc - theta) - _Z * math.sqrt(variance)

    start = auc + 1e-12 * (end - auc)  # at auc = 0 or 1 itself the excess is 0
    return float(brentq(excess, start, end))


@dataclass(frozen=True)
class TwoSampleBound:
    """The epsilon that the errors at one threshold reject.

    ``ceiling`` is the bound without any error. Scores at or above ``threshold``, which was chosen
    on other scores, say "in".
    """

    lower_bound: float
    ceiling: float
    threshold: float


def two_sample_lower_bound(
    *, false_negatives: int, false_positives: int, trials_in: int, trials_out: int, delta: float,
    confidence: float = 0.95,
) -> float:  # fmt: skip
    """Return the largest epsilon that the errors of one predetermined test reject; else 0.0.

    With upper Clopper-Pearson limits FN and FP, each at half of 1 - confidence: the larger of
    ln((1 - FN - delta) / FP) and ln((1 - FP - delta) / FN). arXiv:2101.04535.

    Args:
        false_negatives: of trials_in independent runs with the row, those called "out".
        false_positives: of trials_out without it, those called "in".
        trials_in, trials_out: 1 to 10,000,000. delta: in (0, 1). confidence: from 0.5 to below 1.
    """
    check_count("trials_in", trials_in)
    check_count("trials_out", trials_out)
    check_part("false_negatives", false_negatives, trials_in, "trials")
    check_part("false_positives", false_positives, trials_out, "trials")
    check_delta(delta)
    check_confidence(confidence)
    counts = np.array([false_negatives]), np.array([false_positives])
    return float(_bounds(*counts, (trials_in, trials_out), delta, confidence)[0])


def two_sample_ceiling(
    *, trials_in: int, trials_out: int, delta: float, confidence: float = 0.95
) -> float:
    """Return the lower bound without any error.

    >>> round(two_sample_ceiling(trials_in=500, trials_out=500, delta=1e-5), 2)
    4.91
    """
    return two_sample_lower_bound(
        false_negatives=0, false_positives=0, trials_in=trials_in, trials_out=trials_out,
        delta=delta, confidence=confidence,
    )  # fmt: skip


def two_sample_bound_from_scores(
    scores_in: ArrayLike, scores_out: ArrayLike, delta: float, confidence: float = 0.95, *,
    choosing: float = 0.5,
) -> TwoSampleBound:  # fmt: skip
    """Choose a threshold on the first part of the scores and count errors on the rest.

    The parts are taken by position, so the scores must not be sorted.

    Args:
        scores_in, scores_out: (I,) and (O,), I, O >= 2, higher for "in". Not NaN.
        delta: in (0, 1). confidence: from 0.5 to below 1.
        choosing: share of the scores on which the threshold is chosen, in (0, 1).

    Raises:
        PlanError: a number is out of range, or too few scores.
    """
    check_delta(delta)
    check_confidence(confidence)
    included = _check_scores("scores_in", scores_in, least=2)
    excluded = _check_scores("scores_out", scores_out, least=2)
    if not 0 < choosing < 1:
        raise PlanError(f"choosing is {choosing}; it must be above 0 and below 1")
    splits = [
        min(max(1, int(choosing * part.size)), part.size - 1) for part in (included, excluded)
    ]
    threshold = _choose_threshold(included[: splits[0]], excluded[: splits[1]], delta, confidence)
    included, excluded = included[splits[0] :], excluded[splits[1] :]
    errors = {
        "false_negatives": int(np.count_nonzero(included < threshold)),
        "false_positives": int(np.count_nonzero(excluded >= threshold)),
    }
    trials = {"trials_in": included.size, "trials_out": excluded.size}
    return TwoSampleBound(
        lower_bound=two_sample_lower_bound(**errors, **trials, delta=delta, confidence=confidence),
        ceiling=two_sample_ceiling(**trials, delta=delta, confidence=confidence),
        threshold=threshold,
    )


def _choose_threshold(
    scores_in: Floats, scores_out: Floats, delta: float, confidence: float
) -> float:
    """Return the threshold with the largest bound on these scores; candidates are dense in both
    tails."""
    pooled = np.unique(np.concatenate([scores_in, scores_out]))
    indices = np.unique(np.geomspace(1, pooled.size, _CANDIDATES).astype(int)) - 1
    candidates = np.concatenate([pooled[indices], pooled[::-1][indices]])
    false_negatives = np.searchsorted(np.sort(scores_in), candidates)
    false_positives = scores_out.size - np.searchsorted(np.sort(scores_out), candidates)
    trials = (scores_in.size, scores_out.size)
    bounds = _bounds(false_negatives, false_positives, trials, delta, 1 - (1 - confidence) / _WIDER)
    return float(candidates[np.argmax(bounds)])


def _bounds(
    false_negatives: NDArray[np.int64], false_positives: NDArray[np.int64],
    trials: tuple[int, int], delta: float, confidence: float,
) -> Floats:  # fmt: skip
    """Compute lower bounds (K,) for K pairs of error counts."""
    level = (1 + confidence) / 2
    upper = []
    for errors, total in zip((false_negatives, false_positives), trials, strict=True):
        limit = betaincinv(errors + 1, np.maximum(total - errors, 1), level)
        upper.append(np.where(errors < total, limit, 1.0))
    fn, fp = upper
    ratios = np.maximum((1 - fn - delta) / fp, (1 - fp - delta) / fn)
    return np.asarray(np.log(np.maximum(ratios, 1.0)), dtype=np.float64)


def _check_scores(name: str, values: ArrayLike, least: int = 1) -> Floats:
    """Return scores (N,) of at least ``least`` numbers; infinite ones are allowed."""
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or scores.size < least or np.isnan(scores).any():
        raise PlanError(f"{name} must be one list of {least} or more numbers; NaN is not a score")
    return scores
