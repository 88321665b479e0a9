"""Differences of final test accuracy on the same splits: mean, confidence interval, paired t-test.

Configs share the split of a seed, so its variation cancels in their difference. p-values are
corrected for several tests by Holm's method (S. Holm, A simple sequentially rejective multiple test
procedure, Scandinavian Journal of Statistics 6, 1979).
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtr, stdtrit

from privssl.compare.table import Row
from privssl.experiment.prepare import WITHHELD

LEVEL = 0.95  # of the confidence interval


@dataclass(frozen=True)
class Difference:
    """Final test accuracy of a config minus that of the first, a value per seed.

    ``low`` and ``high`` bound the mean difference at ``LEVEL``, for normal differences. ``p_value``
    is that of the two-sided paired t-test; None where all differences are equal. ``holm`` is
    corrected for all tests of a comparison.
    """

    config: str
    first: str
    values: tuple[float, ...]  # at least two
    low: float
    high: float
    p_value: float | None
    holm: float | None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    def interval(self) -> str:
        """Format the mean difference with its interval.

        >>> difference("a", "b", (0.01, 0.03)).interval()
        '+0.0200 [-0.1071, +0.1471]'
        """
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"

    def p_text(self) -> str:
        """Format p, corrected for several tests.

        >>> difference("a", "b", (0.01, 0.03)).p_text()
        '0.295'
        """
        if self.holm is None:
            return "none"
        return f"{self.holm:.3f}" if self.holm >= 0.001 else "< 0.001"

    def as_json(self) -> dict[str, Any]:
        return {
            "config": self.config, "minus": self.first, "values": list(self.values),
            "mean": self.mean, "level": LEVEL, "low": self.low, "high": self.high,
            "p_value": self.p_value, "p_value_holm": self.holm,
        }  # fmt: skip


def difference(config: str, first: str, values: Sequence[float]) -> Difference:
    """Compute the interval and the test of at least two differences."""
    seeds, mean = len(values), statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(seeds)
    margin = float(stdtrit(seeds - 1, (1 + LEVEL) / 2)) * error
    all_equal = error < 1e-12  # all are equal up to rounding
    p_value = None if all_equal else 2 * float(stdtr(seeds - 1, -abs(mean) / error))
    return Difference(config, first, tuple(values), mean - margin, mean + margin, p_value, p_value)


def corrected(p_values: Sequence[float]) -> list[float]:
    """Correct p-values by Holm's method: the smallest times their number, the next times one less,
    and so on, none below an earlier one. The probability of any false rejection at level a is
    then at most a.

    >>> [round(p, 3) for p in corrected([0.04, 0.01, 0.02])]
    [0.04, 0.03, 0.04]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def p_heading(results: Sequence[Difference]) -> str:
    """Return the heading of a column of ``p_text``."""
    return "p (Holm)" if len(results) > 1 else "p"


def differences(rows: Sequence[Row]) -> list[Difference]:
    """Return each config minus the first, if both have the same splits and at least two seeds.

    A config without a p value counts as no test.
    """
    first, *others = rows
    results = []
    for other in others:
        if other.differs or len(other.runs) < 2 or other.seeds != first.seeds:
            continue
        # Private runs withhold the hash; their split.json has been compared (differs).
        hashes = (
            {a["split_hash"], b["split_hash"]} - {WITHHELD}
            for a, b in zip(other.runs, first.runs, strict=True)
        )
        if any(len(pair) > 1 for pair in hashes):
            continue
        pairs = zip(
            *(row.values["final_test_accuracy"].values for row in (other, first)), strict=True
        )
        results.append(difference(other.config, first.config, [a - b for a, b in pairs]))
    adjusted = iter(corrected([result.p_value for result in results if result.p_value is not None]))
    return [
        result if result.p_value is None else dataclasses.replace(result, holm=next(adjusted))
        for result in results
    ]


def explanation(results: Sequence[Difference]) -> str:
    """Explain the meaning and the limits of the differences."""
    note = (
        f" There are {len(results)} tests, for which p is corrected (Holm); the intervals are not."
    )
    return (
        f"Difference: final test accuracy minus that of {results[0].first} on the same split, mean "
        f"over {len(results[0].values)} seeds with its {LEVEL:.0%} confidence interval. p: "
        "two-sided paired t-test. Both take the differences to be normal, and seeds that were not "
        f"used to choose anything.{note if len(results) > 1 else ''}"
    )
