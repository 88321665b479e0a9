"""Attack a label census alone, with histograms that include each record with probability 1/2.

Each cell of a synthetic histogram is an independent experiment; the attacker sees the cell of every
release (``privacy/label_histogram.py``). The likelihood ratio (Neyman, Pearson) bounds epsilon from
below (Clopper, Pearson). It is tight for this distribution: a long enough attack would reach
epsilon, so the level of every test is one in a million. The noise is tested too:

    noise            all of it against the discrete Laplace distribution (chi-square)
    every cell       how often each cell got noise at all
    other cells      whether two cells of a table got the same noise, or opposite noise
    other releases   the same for two tables, with the usual generators equally seeded before each

With epsilon above 6 nearly all noise is 0, and one cell without noise is not detected. The attack
does not test that a record is in one cell independently of the other records; the algorithm must
ensure it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom, chisquare

from accounting.discrete_laplace import log_pmf
from accounting.two_sample_audit import two_sample_bound_from_scores
from privssl.privacy.label_histogram import CensusPlan
from privssl.privacy.secure_noise import secure_uniform
from privssl.runtime.randomness import others_seeded, seeded

ALARM = 1e-6  # level of each test

# Least number of cells of a synthetic table. With 100 cells, two releases with the same noise would
# be missed in one case of 16 at epsilon 2; with 200 in one of 100,000.
_CELLS = 200
_FEWEST, _MOST = 1000, 4000  # synthetic tables
_LARGEST_SEEN = 8.5  # epsilon; the number of trials is exponential in it
_COMPARED = 200  # releases that are compared with each other
_EXPECTED = 10.0  # least expected count of a bin of the chi-square test
_NO_DELTA = 1e-12  # the bound needs delta > 0; this one changes none of its digits

Whole = NDArray[np.int64]


@dataclass(frozen=True)
class CensusAttack:
    """The lower bound from releases of synthetic tables, and tests of the noise.

    ``trials`` of the smaller hypothesis; ``censuses`` per record, all charged to one account.
    """

    censuses: int
    trials: int
    lower_bound: float
    ceiling: float
    p_values: Mapping[str, float]

    @property
    def trials_run(self) -> str:
        """Describe the trials for a report."""
        times = "once" if self.censuses == 1 else f"{self.censuses} times"
        return f"{self.trials} records in each world, counted {times}"


def attack_census(plan: CensusPlan, censuses: int, epsilon: float, classes: int) -> CensusAttack:
    """Attack ``censuses`` >= 1 releases about the same records, whose total cost is epsilon."""
    cells = math.ceil(_CELLS / classes) * classes
    nonzero_rate = -math.expm1(float(log_pmf(plan.epsilon, 0)))  # probability of nonzero noise
    needed = max(
        2 * trials_to_see(epsilon, 1 - ALARM) / cells,
        math.log(2 * cells / ALARM) / max(nonzero_rate, 1e-9),
    )
    tables = min(max(_FEWEST, math.ceil(needed)), _MOST)
    included = secure_uniform(tables * cells).reshape(tables, 1, cells) < 0.5
    counts = np.repeat(included.astype(np.int64), censuses, axis=1)  # (tables, censuses, cells)
    released = np.stack(
        [_release_table(plan, table, classes) for table in counts.reshape(-1, cells)]
    )
    y = released.reshape(counts.shape)
    ratio = (log_pmf(plan.epsilon, y - 1) - log_pmf(plan.epsilon, y)).sum(axis=1)
    mask = included[:, 0]
    bound = two_sample_bound_from_scores(ratio[mask], ratio[~mask], _NO_DELTA, 1 - ALARM)
    noise = (y - counts).reshape(-1, cells)  # (releases, cells)
    sample = noise[np.linspace(0, len(noise) - 1, min(len(noise), _COMPARED)).astype(int)]
    return CensusAttack(
        censuses=censuses, trials=min(int(mask.sum()), int((~mask).sum())),
        lower_bound=bound.lower_bound, ceiling=bound.ceiling,
        p_values={
            "noise": _distribution_p(noise.ravel(), plan.epsilon),
            "every cell": _cell_frequency_p(noise, nonzero_rate),
            "other cells": _equal_columns_p(noise, plan.epsilon),
            "other releases": _equal_columns_p(sample.T, plan.epsilon),
        },
    )  # fmt: skip


def trials_to_see(epsilon: float, confidence: float) -> int:
    """Return the trials of each hypothesis with which full disclosure would reach epsilon; at least
    1,000.

    Without an error in n counted trials the Clopper-Pearson limit is ln(2 / (1 - confidence)) / n,
    and the bound minus its logarithm. Half choose the threshold; 10% more, because the hypotheses
    get unequal numbers.
    """
    counted = math.log(2 / (1 - confidence)) * math.exp(min(epsilon, _LARGEST_SEEN))
    return max(1000, math.ceil(2 * 1.1 * counted))


_SAYS = {
    "noise": "the noise does not follow the discrete Laplace law of the plan",
    "every cell": "a cell gets noise more or less often than it should",
    "other cells": "cells of one table get the same noise",
    "other releases": "two releases get the same noise",
}


def judge_census(result: CensusAttack, epsilon: float) -> Iterator[str]:
    """Yield contradictions to this total epsilon of all censuses."""
    for name, p in result.p_values.items():
        if p < ALARM:
            yield f"census: {_SAYS[name]} (p = {p:.2g})"
    if result.lower_bound > epsilon:
        yield (
            f"census: the counts leak at least epsilon {result.lower_bound:.4f}, above the "
            f"{epsilon:.4f} that they are charged"
        )


def _release_table(plan: CensusPlan, counts: Whole, classes: int) -> Whole:
    """Release a table (cells,) once, with equally seeded generators."""
    generator = torch.Generator().manual_seed(0)
    with seeded(generator), others_seeded(generator):  # noise must not depend on any of these
        table = plan.release(torch.from_numpy(counts.copy()).view(-1, classes))
    return np.asarray(table.numpy(), dtype=np.int64).ravel()


def _distribution_p(noise: Whole, epsilon: float) -> float:
    """Return the p-value of noise (N,) by a chi-square test with merged tails."""
    reach = 0
    while len(noise) * math.exp(float(log_pmf(epsilon, reach + 1))) >= _EXPECTED:
        reach += 1
    edges = np.arange(-reach, reach + 1)
    middle = np.exp(log_pmf(epsilon, edges))
    tail = max(0.0, 1 - float(middle.sum())) / 2
    expected = len(noise) * np.array([tail, *middle, tail])
    clipped = np.clip(noise, -reach - 1, reach + 1) + reach + 1
    observed = np.bincount(clipped, minlength=len(expected)).astype(np.float64)
    if expected[0] < _EXPECTED:  # sparse tails join the outermost values
        for bins in (observed, expected):
            bins[1] += bins[0]
            bins[-2] += bins[-1]
        observed, expected = observed[1:-1], expected[1:-1]
    if len(observed) == 1:  # nearly all noise is 0: count it
        nonzero_rate = -math.expm1(float(log_pmf(epsilon, 0)))
        return _binomial_p(int(np.count_nonzero(noise)), len(noise), nonzero_rate)
    return float(chisquare(observed, expected * (observed.sum() / expected.sum())).pvalue)


def _cell_frequency_p(noise: Whole, nonzero_rate: float) -> float:
    """Return the p-value of the frequency of nonzero noise in each cell of (releases, cells)."""
    hits = np.count_nonzero(noise, axis=0)
    p_values = [_binomial_p(int(k), len(noise), nonzero_rate) for k in np.unique(hits)]
    return float(min(1.0, noise.shape[1] * min(p_values)))


def _binomial_p(hits: int, trials: int, rate: float) -> float:
    """Return twice the smaller tail of a binomial count."""
    below, above = binom.cdf(hits, trials, rate), binom.sf(hits - 1, trials, rate)
    return float(min(1.0, 2 * below, 2 * above))


def _equal_columns_p(noise: Whole, epsilon: float) -> float:
    """Return the p-value that no two columns (N, columns) are too often equal or opposite.

    The probability of two equal nonzero draws is known. The smallest p-value is multiplied by the
    number of pairs and of tests.
    """
    values = np.arange(1, 1 + math.ceil(40 / epsilon))
    # twice: both signs. Without 0, because rare equal values are the evidence
    match_rate = 2 * float(np.exp(2 * log_pmf(epsilon, values)).sum())
    rows, columns = noise.shape
    matches = 0
    for i in range(columns - 1):
        column, others = noise[:, i : i + 1], noise[:, i + 1 :]
        nonzero = column != 0
        for sign in (1, -1):
            matches = max(matches, int(((others == sign * column) & nonzero).sum(axis=0).max()))
    return float(min(1.0, columns * (columns - 1) * binom.sf(matches - 1, rows, match_rate)))
