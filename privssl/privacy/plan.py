"""The parameters of private training: public and fixed before the run."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from accounting.accountants import epsilon
from accounting.budget import round_up
from accounting.events import (
    ComposedEvent,
    Event,
    NonPrivateEvent,
    PoissonSampledGaussianEvent,
    is_protected,
)
from privssl.privacy import secure_noise
from privssl.settings.schema import PrivacySettings


class Plan(Protocol):
    """The parameters of any private mechanism, for accounts, privacy card and round loop."""

    @property
    def update(self) -> tuple[str, ...]: ...  # fields that leave a support agent
    @property
    def protect(self) -> tuple[str, ...]: ...  # those with noise
    @property
    def visits(self) -> int: ...  # largest number of visits of one support agent
    @property
    def scope(self) -> Literal["sound", "as_published"]: ...
    @property
    def event(self) -> Event: ...  # the releases of one visit
    def spending(self, settings: PrivacySettings) -> str:
        """Describe the privacy spending for a dry run."""


@dataclass(frozen=True)
class PrivatePlan:
    """The parameters of one DP-SGD step at an agent."""

    update: tuple[str, ...]  # networks that a support agent trains
    protect: tuple[str, ...]  # networks trained privately
    noise_multiplier: float  # noise std / clip norm, > 0
    clip_norm: float  # > 0
    sample_rate: float  # in (0, 1]
    steps: int  # private steps per visit
    expected_batch: float  # public divisor: sample_rate x declared rows per agent
    learning_rate: float
    momentum: float
    views: int
    visits: int  # largest number of visits of one support agent
    augment: Literal["none", "weak", "mid", "strong"] = "none"  # view of rows in private steps
    average_last: float = 0.0  # share of a visit's steps whose iterates are averaged; 0: none
    record_counts: Literal["public", "private"] = "public"  # public: neighbours have as many rows

    @property
    def event(self) -> Event:
        """Return the releases of one visit."""
        protected = PoissonSampledGaussianEvent(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=self.steps,
        )
        noiseless = [name for name in self.update if name not in self.protect]
        if not noiseless:
            return protected
        return ComposedEvent((protected, NonPrivateEvent(f"{', '.join(noiseless)} without noise")))

    @property
    def scope(self) -> Literal["sound", "as_published"]:
        return "sound" if set(self.update) <= set(self.protect) else "as_published"

    def spending(self, settings: PrivacySettings) -> str:
        """Describe the parameters of a visit, and the cost of all visits."""
        visits = is_protected([self.event]) * self.visits
        spent = epsilon(visits, settings.delta) if visits else 0.0
        return (
            f"Scope {self.scope}. Noise multiplier {self.noise_multiplier:g}, sample rate "
            f"{self.sample_rate:g}, {self.visits} visits of {self.steps} private steps to each "
            f"support agent: {'nominal ' if self.scope == 'as_published' else ''}epsilon "
            f"{round_up(spent)} of {settings.epsilon:g} at delta {settings.delta:g}."
            + (" The budget ends the visits before that." if spent > settings.epsilon else "")
        )

    @property
    def declared(self) -> int:
        """Return the declared number of an agent's rows, which is public."""
        return math.ceil(self.expected_batch / self.sample_rate)

    def draw_batch(self, rows: int) -> Tensor:
        """Sample a Poisson mask (rows,): each row independently with at most the sample rate."""
        if self.sample_rate == 1.0:
            return torch.ones(rows, dtype=torch.bool)
        limit = secure_noise.round_rate_down(self.sample_rate)
        return torch.from_numpy(secure_noise.secure_uniform(rows) < limit)

    def padded_batch_size(self, rows: int) -> int:
        """Return the number of rows of a batch with its padding.

        Small agents compute all rows, so that time does not reveal the batch size; others a public
        bound that a batch rarely exceeds.
        """
        if rows <= 256 or self.sample_rate == 1.0:
            return rows
        deviation = math.sqrt(rows * self.sample_rate * (1 - self.sample_rate))
        return min(rows, math.ceil(rows * self.sample_rate + 4 * deviation))

    def fixes_positions(self, rows: int) -> bool:
        """Return whether every row is computed in each step, at a position determined by its
        number.

        Then no row's position, and so no rounding by position, depends on the sample. With private
        counts an additional row shifts the positions of all later rows.
        """
        return self.record_counts == "public" and self.padded_batch_size(rows) >= rows

    def plan_microbatches(self, rows: int, max_microbatch_size: int) -> tuple[int, int]:
        """Return the least number of microbatches, and the rows of each: public numbers.

        With private counts they follow from the declared rows, rounded up, so that a few more rows
        add no microbatch. Rows are a multiple of 4, because matrix products compute remainders
        differently. If positions change, they are a multiple of 32, because element-wise operations
        do so too, beyond the last two full registers (of 16 numbers with AVX-512).

        Args:
            rows: of the agent.
            max_microbatch_size: most rows of one pass.
        """
        multiple = 4 if self.fixes_positions(rows) else 32
        if self.record_counts == "private":
            rows = -(-max(self.declared, 1) // 8) * 8
        batch_size = max(self.padded_batch_size(rows), 1)
        microbatch_count = -(-batch_size // max_microbatch_size)
        return microbatch_count, -(-batch_size // (multiple * microbatch_count)) * multiple
