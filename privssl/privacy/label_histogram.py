"""The label histogram of a support agent, released once with noise on every count (label census).

A count is the number of labelled rows of one class in one cluster. One record is in one count, so
with discrete Laplace noise on every count (``accounting/discrete_laplace.py``) the histogram is
epsilon-DP with delta 0 for replacing one record by an empty one (2 epsilon for replacing it by
another, k epsilon for k records; not guaranteed). If rows name persons and at most k of each count,
it is k epsilon-DP for replacing all records of a person. Their numbers are public. The caller must
ensure that the cluster of a record depends only on this record and public values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from accounting.discrete_laplace import discrete_laplace, exact_epsilon
from accounting.events import PureDpEvent
from privssl.core.agents import LabelledRows, rows_by_person
from privssl.core.private_release import (
    begin_release,
    errors_without_rows,
    exact_counts,
    mechanism_reads,
    record_counts,
    record_release,
)
from privssl.errors import PrivacyError
from privssl.privacy.own_code import is_ours
from privssl.settings.schema import PrivacySettings

CENSUS = "census"  # the name of the histogram in plans, ledgers and cards


@dataclass(frozen=True)
class CensusPlan:
    """Parameters of a census, public and fixed before the run; the interface of ``plan.Plan``."""

    epsilon: float  # of the one release for a record, which determines its noise; 0: no release
    visits: int  # 1; 0 where epsilon is 0
    rows: float = 0.0  # declared counted rows of all support agents together, public
    rows_per_person: int = 1  # that count at most, if rows name persons

    update: ClassVar[tuple[str, ...]] = (CENSUS,)
    protect: ClassVar[tuple[str, ...]] = (CENSUS,)
    scope: ClassVar[Literal["sound", "as_published"]] = "sound"

    @property
    def event(self) -> PureDpEvent:
        """Return the release of a census. Without visits, one that a budget of 0 refuses."""
        return PureDpEvent(self.epsilon * self.rows_per_person if self.visits else 1.0, 1)

    def release(self, counts: Tensor) -> Tensor:
        """Return the counts with noise on every one. The caller has charged the event before
        counting.

        Args:
            counts: (K, C) int64, >= 0: labelled rows by cluster and class.

        Returns:
            (K, C) int64 on the CPU; may be negative.

        Raises:
            PrivacyError: these are not counts, not those of :func:`count_rows` in this step, more
                rows of a person count than in the plan, or the step has already released some.
            accounting.errors.PlanError: the plan has no epsilon to add noise for.
        """
        if counts.dtype != torch.int64:
            raise PrivacyError(
                f"a census counts rows in whole numbers (torch.int64), and these are "
                f"{counts.dtype}: what one record adds must be 1"
            )
        if counts.dim() != 2 or bool((counts < 0).any()):
            raise PrivacyError(
                f"a census is a table of clusters by classes of counts >= 0; this one has shape "
                f"{tuple(counts.shape)}, or a negative count"
            )
        counts = exact_counts(counts, self.rows_per_person)
        begin_release()
        noise = torch.from_numpy(discrete_laplace(self.epsilon, counts.numel()))
        noisy = counts.cpu() + noise.view(counts.shape)
        record_release(self, CENSUS, noisy)
        return noisy

    def spending(self, settings: PrivacySettings) -> str:
        """Describe the release and its cost for a dry run."""
        if not self.visits:
            return f"Scope {self.scope}. Epsilon 0: no label is asked for, no labelled row is read."
        return (
            f"Scope {self.scope}. One census of each support agent: its labelled rows by cluster "
            f"and class, with discrete Laplace noise on every count: pure epsilon "
            f"{self.event.epsilon:g} of {settings.epsilon:g} (delta 0)."
        )


def count_rows(
    rows: LabelledRows, cluster_of: Callable[[Tensor], Tensor], clusters: int, classes: int
) -> Tensor:
    """Count labelled rows by cluster and class (K, C), int64, exact: the input of a census.

    If the rows name persons, at most ``CensusPlan.rows_per_person`` of each are among them, or the
    release is refused.

    Row by row: a row's features differ in their last bits with the batch size, so its cluster
    could depend on the number of other rows. In a step under a sound account the result is zeros,
    in whose place :meth:`CensusPlan.release` puts the counts.

    Args:
        cluster_of: a stored row (1, *shape) -> its cluster (1,), from public values. An own one is
            called twice, in both orders of the rows.

    Raises:
        PrivacyError: the cluster of a row depends on the rows before it; or ``cluster_of`` raised
            an error, whose text is withheld.
    """
    with mechanism_reads():
        x, y, persons = rows.x, rows.y, rows.persons
    counts = torch.zeros(clusters, classes, dtype=torch.int64)
    with errors_without_rows("the cluster of a row"):
        cluster_ids = [int(cluster_of(row[None])) for row in x]
        outside = not is_ours(cluster_of)
        if outside and cluster_ids != [int(cluster_of(row[None])) for row in x.flip(0)][::-1]:
            raise PrivacyError(
                "the cluster of a row depends on the rows before it, so one row would move the "
                "counts of others. Find clusters by what is public and the row alone"
            )
        for cluster, label in zip(cluster_ids, y.tolist(), strict=True):
            counts[cluster, label] += 1
    return record_counts(counts, max(map(len, rows_by_person(persons or ()).values()), default=1))


def make_census_plan(settings: PrivacySettings, *, rows: float) -> CensusPlan:
    """Fix every number of a census before the run; PlanError for an epsilon beyond the sampler.

    Epsilon is rounded down to a multiple of 2^-20, for which noise is sampled exactly. Sums of such
    numbers are exact: three runs at 0.1 fit into accounts of 0.3. ``rows``: declared labelled rows
    of all support agents together, or persons, public.
    """
    k = settings.rows_per_person
    if settings.epsilon == 0:
        return CensusPlan(0.0, visits=0, rows=rows * k, rows_per_person=k)
    epsilon = float(exact_epsilon(settings.epsilon / k))
    return CensusPlan(epsilon, visits=1, rows=rows * k, rows_per_person=k)
