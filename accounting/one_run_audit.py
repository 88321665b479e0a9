"""A lower bound on epsilon from one training run, by guesses about its canaries.

Each of m canaries (ordinary rows) is included in the training set with probability 1/2,
independently. An attacker then scores them on what was released, guesses "in" for the highest
scores, "out" for the lowest, and abstains on the rest. Too many correct guesses reject the
guarantee. Two tests:

* for any (epsilon, delta)-DP run: arXiv:2305.08846 (Steinke, Nasr, Jagielski 2023);
* about twice as tight, for a whole trade-off function f that the run guarantees: arXiv:2410.22235
  (Mahloujifar, Melis, Chaudhuri 2024). f(a) is the least false negative rate of any attack with
  false positive rate a.

Both need a number of guesses fixed before the scores are seen. To try several numbers, divide 1 -
confidence by how many. A bound below the guarantee proves nothing; one above it refutes the
guarantee. The ceiling is the bound with every guess correct.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binom

from accounting.errors import PlanError
from accounting.events import check_count, check_delta, check_real

#: From the power of an attack, in [0, 1], to its least possible false positive rate.
Inverse = Callable[[float], float]

_PRECISION = 1e-9  # of the bisection, on the rejected side
_LARGEST_EXPONENT = 700.0  # e^700 is a float, and e^-700 is negligible


def guess(scores: ArrayLike, guesses: int) -> NDArray[np.int8]:
    """Guess by score: +1 ("in") for the highest guesses / 2 scores, -1 ("out") for the lowest, else
    0.

    Args:
        scores: (m,), higher for canaries that look trained on. Not NaN.
        guesses: even, at most m. Fixed before the scores were seen.

    Raises:
        PlanError: NaN, not a vector of scores, or an odd or too large number of guesses.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or np.isnan(values).any():
        raise PlanError("scores are not one list of numbers, one per canary; NaN is not a score")
    _check_tally(values.size, guesses, 0)
    if guesses % 2:
        raise PlanError(f"guesses is {guesses}; it must be even: half say in, half say out")
    order = np.argsort(values, kind="stable")
    signs = np.zeros(values.size, dtype=np.int8)
    signs[order[: guesses // 2]] = -1
    signs[order[values.size - guesses // 2 :]] = 1
    return signs


def count_correct(guesses: ArrayLike, included: ArrayLike) -> int:
    """Count the guesses (m,) in {+1, 0, -1} that agree with ``included`` (m,), true for "in".

    Raises PlanError where the two differ in length, or hold something else.
    """
    signs, inclusion = np.asarray(guesses), np.asarray(included)
    if signs.ndim != 1 or signs.shape != inclusion.shape or inclusion.dtype != np.bool_:
        raise PlanError("guesses and included must be two lists as long, included of true or false")
    if not np.isin(signs, (-1, 0, 1)).all():
        raise PlanError("a guess is neither +1 (in) nor -1 (out) nor 0 (abstained)")
    return int(np.count_nonzero(signs == np.where(inclusion, 1, -1)))


def one_run_p_value(
    *, canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Return an upper bound of the probability of this many correct guesses in an (epsilon,
    delta)-DP run.

    With B ~ Binomial(r, e^eps / (1 + e^eps)): P[B >= v] + 2 m delta alpha, where
    alpha = max over i = 1..v of P[v - i <= B < v] / i. arXiv:2305.08846, Appendix D.

    Args:
        canaries: m, 1 to 10,000,000. guesses: r <= m. correct: v <= r.
        epsilon: >= 0. delta: in (0, 1).

    Raises:
        PlanError: a number is out of range.

    >>> round(one_run_p_value(canaries=34, guesses=34, correct=30, epsilon=1.0, delta=1e-5), 7)
    0.0293629
    """
    _check_tally(canaries, guesses, correct)
    check_delta(delta)
    check_real("epsilon", epsilon)
    if epsilon < 0:
        raise PlanError(f"epsilon is {epsilon}; it must be 0 or more")
    p = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, p))  # P[B >= v]
    i = np.arange(1, correct + 1)
    alpha = np.max(np.cumsum(binom.pmf(correct - i, guesses, p)) / i, initial=0.0)
    return min(1.0, tail + 2 * canaries * delta * float(alpha))


def one_run_lower_bound(
    *, canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """Return the largest epsilon that the guesses reject; 0.0 if they do not reject 0.

    Arguments and errors as in :func:`one_run_p_value`; confidence from 0.5 to below 1.

    >>> round(one_run_lower_bound(canaries=100, guesses=40, correct=38, delta=1e-5), 5)
    1.73993
    """
    check_confidence(confidence)

    def rejects(epsilon: float) -> bool:
        p = one_run_p_value(
            canaries=canaries, guesses=guesses, correct=correct, epsilon=epsilon, delta=delta
        )
        return p <= 1 - confidence

    return _find_largest_rejected(rejects)


def one_run_ceiling(
    *, canaries: int, guesses: int | None = None, delta: float, confidence: float = 0.95
) -> float:
    """Return the lower bound if all guesses are correct, by default one guess per canary.

    >>> round(one_run_ceiling(canaries=34, delta=1e-5), 2)
    2.38
    """
    count = canaries if guesses is None else guesses
    return one_run_lower_bound(
        canaries=canaries, guesses=count, correct=count, delta=delta, confidence=confidence
    )


def claim_rejected(
    *, canaries: int, guesses: int, correct: int, profile: Sequence[tuple[float, float]],
    confidence: float = 0.95,
) -> bool:  # fmt: skip
    """Return whether the guesses refute every (epsilon, delta) of the profile together.

    The recursion of arXiv:2410.22235, with abstention: assume that v or more guesses are correct
    with probability 1 - confidence. The trade-off function then bounds the probabilities of v - 1,
    v - 2, ... 0 correct guesses from below; they add up to a (correct) and h (wrong), which must
    fit into r / m.

    Args:
        canaries, guesses, correct: as in :func:`one_run_p_value`.
        profile: as in :func:`profile_inverse`. More pairs make the test stricter.
        confidence: from 0.5 to below 1. A true guarantee is rejected with probability at most 1 -
            confidence.
    """
    _check_tally(canaries, guesses, correct)
    check_confidence(confidence)
    inverse = profile_inverse(profile)
    a = (1 - confidence) * correct / canaries
    h = (1 - confidence) * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        higher = max(h, inverse(a))
        if higher == h:  # then a stays constant too, and so do all later values
            break
        a = min(1.0, a + i / (guesses - i) * (higher - h))
        h = higher
    return a + h > guesses / canaries


def profile_inverse(profile: Sequence[tuple[float, float]]) -> Inverse:
    """Return the inverse of the trade-off function of these (epsilon, delta) pairs together.

    f(a) = max over pairs of (0, 1 - delta - e^eps a, e^-eps (1 - delta - a)), arXiv:1905.02383,
    Equation 5. f is its own inverse, so an attack with power x has a false positive rate of at
    least f(1 - x).

    Args:
        profile: at least one pair; epsilon >= 0 and finite, delta in [0, 1]; else PlanError.
    """
    for eps, delta in profile:
        check_real("epsilon", eps)
        check_real("delta", delta)
        if eps < 0 or not 0 <= delta <= 1:
            raise PlanError(f"({eps}, {delta}) is not a pair of epsilon >= 0 and delta from 0 to 1")
    if not profile:
        raise PlanError("the profile is empty: give the (epsilon, delta) pairs that are claimed")
    pairs = np.array(profile, dtype=np.float64)  # (pairs, 2)
    growth = np.exp(np.minimum(pairs[:, 0], _LARGEST_EXPONENT))
    deltas = pairs[:, 1]

    def inverse(x: float) -> float:
        steep = 1 - deltas - growth * (1 - x)
        flat = (x - deltas) / growth
        return max(0.0, float(np.maximum(steep, flat).max()))

    return inverse


def check_confidence(value: float) -> None:
    """Raise PlanError unless 0.5 <= value < 1."""
    check_real("confidence", value)
    if not 0.5 <= value < 1:
        raise PlanError(f"confidence is {value}; it must be from 0.5 to below 1, such as 0.95")


def check_part(name: str, value: object, whole: int, of: str) -> None:
    """Raise PlanError unless the value is an integer from 0 to ``whole``, described by ``of``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"{name} is {value!r:.40}; it must be a whole number")
    if not 0 <= value <= whole:
        raise PlanError(f"{name} is {value!r:.40}; it must be from 0 to {whole}, the {of}")


def _check_tally(canaries: int, guesses: int, correct: int) -> None:
    check_count("canaries", canaries)
    check_part("guesses", guesses, canaries, "canaries")
    check_part("correct", correct, guesses, "guesses")


def _find_largest_rejected(rejects: Callable[[float], bool]) -> float:
    """Return the largest rejected number >= 0, by doubling and bisection; 0.0 if there is none."""
    if not rejects(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while rejects(high):
        low, high = high, 2 * high
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if rejects(middle) else (low, middle)
    return low
