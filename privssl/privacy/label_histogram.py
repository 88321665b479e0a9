"""The plan of a label census: labels leave a support agent once, as counts with noise on each.

A count says how many labelled rows of one class lie in one cluster. One record is in one count, so
with discrete Laplace noise on every count (``accounting/discrete_laplace.py``) the whole table is
epsilon-DP with delta 0:

    neighbours                                     what moves           the table is
    one record made empty                          one count by one     epsilon-DP
    one record exchanged for another               two counts by one    2 epsilon-DP
    k records of one person made empty             k steps of one       k epsilon-DP

Only the first line is claimed. (A record more or less changes the number of records too, which is
declared and public: the number of clusters may follow from it.) It holds if the cluster of a record
depends on nothing but this record and what is public: the caller owes that.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from accounting.discrete_laplace import discrete_laplace, exact_epsilon
from accounting.events import PureDpEvent
from privssl.errors import PrivacyError
from privssl.settings.schema import PrivacySettings

CENSUS = "census"  # the name under which the table stands in plans, ledgers and cards


@dataclass(frozen=True)
class CensusPlan:
    """The numbers of a census, all public and fixed before the run.

    It has the face of ``plan.Plan``: what accounts, card and loop ask of any plan.
    """

    epsilon: float  # of the one release, and of its noise; 0: nothing is asked
    visits: int  # 1; 0 where epsilon is 0
    rows: float = 0.0  # declared labelled rows of all support agents together, public

    update: ClassVar[tuple[str, ...]] = (CENSUS,)
    protect: ClassVar[tuple[str, ...]] = (CENSUS,)
    scope: ClassVar[Literal["sound", "as_published"]] = "sound"

    @property
    def event(self) -> PureDpEvent:
        """What a census releases. Without visits, one that the budget of 0 cannot pay for."""
        return PureDpEvent(self.epsilon if self.visits else 1.0, 1)

    def release(self, counts: Tensor) -> Tensor:
        """The counts with noise on every one. The caller has paid for the event before counting.

        Args:
            counts: (K, C), whole numbers >= 0: labelled rows by cluster and class.

        Returns:
            (K, C) int64 on the CPU; may be negative. Noise is drawn there.

        Raises:
            PrivacyError: these are no counts.
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
        noise = torch.from_numpy(discrete_laplace(self.epsilon, counts.numel()))
        return counts.cpu() + noise.view(counts.shape)

    def spending(self, settings: PrivacySettings) -> str:
        """What a dry run says: what is released, and what it costs of the run's epsilon."""
        if not self.visits:
            return f"Scope {self.scope}. Epsilon 0: no label is asked for, no labelled row is read."
        return (
            f"Scope {self.scope}. One census of each support agent: its labelled rows by cluster "
            f"and class, with discrete Laplace noise on every count: pure epsilon "
            f"{self.epsilon:g} of {settings.epsilon:g} (delta 0)."
        )


def make_census_plan(settings: PrivacySettings, *, rows: float) -> CensusPlan:
    """Fix every number of a census before the run.

    Epsilon is rounded down to what noise can be drawn for exactly, a multiple of 2^-20. Sums of
    such numbers are exact, so that three runs at 0.1 fit into accounts of 0.3.

    Args:
        settings: the privacy section.
        rows: declared labelled rows of all support agents together, public.

    Raises:
        accounting.errors.PlanError: epsilon is beyond what noise can be drawn for.
    """
    if settings.epsilon == 0:
        return CensusPlan(0.0, visits=0, rows=rows)
    return CensusPlan(float(exact_epsilon(settings.epsilon)), visits=1, rows=rows)
