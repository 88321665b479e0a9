"""Differences of final test accuracy on the same splits: mean, confidence interval, paired t-test.

The split of a seed is shared, so its luck cancels in the difference of two configs.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtr, stdtrit

from privssl.compare.table import Row

LEVEL = 0.95  # of the confidence interval


@dataclass(frozen=True)
class Difference:
    """Final test accuracy of a config minus that of the first, a value per seed.

    ``low`` and ``high`` bound the mean difference at ``LEVEL``, for normal differences.
    ``p_value`` is that of the two-sided paired t-test; None where all differences are equal.
    """

    config: str
    first: str
    values: tuple[float, ...]  # at least two
    low: float
    high: float
    p_value: float | None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    def interval(self) -> str:
        """
        >>> difference("a", "b", (0.01, 0.03)).interval()
        '+0.0200 [-0.1071, +0.1471]'
        """
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"

    def p_text(self) -> str:
        """
        >>> difference("a", "b", (0.01, 0.03)).p_text()
        '0.295'
        """
        if self.p_value is None:
            return "none"
        return f"{self.p_value:.3f}" if self.p_value >= 0.001 else "< 0.001"

    def as_json(self) -> dict[str, Any]:
        return {
            "config": self.config, "minus": self.first, "values": list(self.values),
            "mean": self.mean, "level": LEVEL, "low": self.low, "high": self.high,
            "p_value": self.p_value,
        }  # fmt: skip


def difference(config: str, first: str, values: Sequence[float]) -> Difference:
    """The interval and the test of differences, at least two."""
    seeds, mean = len(values), statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(seeds)
    half = float(stdtrit(seeds - 1, (1 + LEVEL) / 2)) * error
    exact = error < 1e-12  # rounding apart, all are equal
    p_value = None if exact else 2 * float(stdtr(seeds - 1, -abs(mean) / error))
    return Difference(config, first, tuple(values), mean - half, mean + half, p_value)


def differences(rows: Sequence[Row]) -> list[Difference]:
    """Each config minus the first, where both have the same splits and at least two seeds."""
    first, *others = rows
    found = []
    for of in others:
        equal = [a["split_hash"] for a in of.runs] == [b["split_hash"] for b in first.runs]
        if of.differs or not equal or len(of.runs) < 2 or of.seeds != first.seeds:
            continue
        pairs = zip(*(row.values["final_test_accuracy"].values for row in (of, first)), strict=True)
        found.append(difference(of.config, first.config, [mine - its for mine, its in pairs]))
    return found


def explanation(found: Sequence[Difference]) -> str:
    """What the differences say, and what they do not."""
    many = (
        f" There are {len(found)} tests: some p below 0.05 is likely by chance alone; multiply p "
        f"by {len(found)} (Bonferroni) before a claim."
    )
    return (
        f"Difference: final test accuracy minus that of {found[0].first} on the same split, mean "
        f"over {len(found[0].values)} seeds with its {LEVEL:.0%} confidence interval. p: two-sided "
        "paired t-test. Both take the differences to be normal, and seeds that were not used to "
        f"choose anything.{many if len(found) > 1 else ''}"
    )
