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
    def visits(self) -> int: ...  # of one support agent, at most
    @property
    def scope(self) -> Literal["sound", "as_published"]: ...
    @property
    def event(self) -> Event: ...  # what one visit releases
    def spending(self, settings: PrivacySettings) -> str:
        """The privacy spending, as a dry run prints it."""


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
    visits: int  # of one support agent, at most
    augment: Literal["none", "weak", "mid", "strong"] = "none"  # of rows in private steps
    average_last: float = 0.0  # share of a visit's steps whose iterates are averaged; 0: none
    record_counts: Literal["public", "private"] = "public"  # whether neighbours have as many rows

    @property
    def event(self) -> Event:
        """What one visit releases."""
        protected = PoissonSampledGaussianEvent(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=self.steps,
        )
        plainly = [name for name in self.update if name not in self.protect]
        if not plainly:
            return protected
        return ComposedEvent((protected, NonPrivateEvent(f"{', '.join(plainly)} without noise")))

    @property
    def scope(self) -> Literal["sound", "as_published"]:
        return "sound" if set(self.update) <= set(self.protect) else "as_published"

    def spending(self, settings: PrivacySettings) -> str:
        """The numbers of a visit, and what all visits would cost."""
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
        """Rows of an agent by the config, public."""
        return math.ceil(self.expected_batch / self.sample_rate)

    def draw_batch(self, rows: int) -> Tensor:
        """A Poisson mask (rows,): each row independently with the sample rate, never with more."""
        if self.sample_rate == 1.0:
            return torch.ones(rows, dtype=torch.bool)
        limit = secure_noise.round_rate_down(self.sample_rate)
        return torch.from_numpy(secure_noise.secure_uniform(rows) < limit)

    def physical_batch_size(self, rows: int) -> int:
        """Physical rows of a batch. Small agents compute all rows, so that time does not reveal the
        batch size; others a public bound that a batch rarely exceeds."""
        if rows <= 256 or self.sample_rate == 1.0:
            return rows
        spread = math.sqrt(rows * self.sample_rate * (1 - self.sample_rate))
        return min(rows, math.ceil(rows * self.sample_rate + 4 * spread))

    def keeps_places(self, rows: int) -> bool:
        """Whether every row is computed in each step, at a place that only its number decides.

        Then no row's place, and so no rounding by place, depends on who is drawn. With private
        counts one row more moves the places of all after it.
        """
        return self.record_counts == "public" and self.physical_batch_size(rows) >= rows

    def parts(self, rows: int, at_once: int) -> tuple[int, int]:
        """Least number of parts of a batch, and the rows of each: public numbers.

        With private counts they follow from the declared rows, rounded up, so that a few rows more
        do not add a part. Rows are a multiple of 4, because matrix products compute remainders in
        another way; where places change, of 32, because element-wise operations do, too, beyond
        the last two whole registers (of 16 numbers with AVX-512).

        Args:
            rows: that the agent holds.
            at_once: most rows of one pass.
        """
        whole = 4 if self.keeps_places(rows) else 32
        if self.record_counts == "private":
            rows = -(-max(self.declared, 1) // 8) * 8
        most = max(self.physical_batch_size(rows), 1)
        parts = -(-most // at_once)
        return parts, -(-most // (whole * parts)) * whole
