"""The sum over rows that DP-SGD adds noise to: no row moves it by more than the clip norm.

Abadi et al. (CCS 2016), Algorithm 1, line "clip gradient", over all networks of a step together. A
gradient that is no number counts nothing, silently, by the same operations: an error or a branch
would tell of the row. (How long an operation takes on very small numbers is the processor's.)

A row's gradient is a :class:`DenseGradients`, written out, or an :class:`OuterProductGradients`,
two factors whose product is
never made for one row alone: a linear layer has as many weights as these have numbers multiplied
with each other (Goodfellow 2015; Li et al. 2022, "ghost clipping"), and so has a convolution, whose
places are those that its kernel meets. What is measured to clip is what is summed, in both.

Norms, factors and sums are float64, so that a row weighs the clip norm to one part in 10^9, and n
rows are added up to within n^2 x 2.3e-16 of it (docs/privacy.md). A device that has none sums on
the CPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from privssl.ops import clipping as kernel
from privssl.ops import dispatch
from privssl.ops.clipping import Lines

BLOCK = 2**18  # numbers that are float64 at once
LONGEST = math.sqrt(torch.finfo(torch.float32).max)  # of a row that counts
#: Rounding moves a product of factors by 1e-7 of what is multiplied. Where its terms cancel, this
#: is much beside what is left: a row is taken to be as long as a thousandth of its terms, at least.
CANCELLED = 1e-6


class PerExampleGradients(Protocol):
    """The gradients of one parameter, for each of B rows."""

    def norms(self) -> Tensor:
        """(B,) float64, at least the norms of what :meth:`total` adds. Not finite, if a number is
        not."""

    def total(self, factors: Tensor) -> Tensor:
        """The float64 sum over rows of factor times gradient (*shape); a factor 0 leaves a row out.

        Args:
            factors: (B,) float64; or (A, B), where the rows are A agents' with B each: (A, *shape).
        """

    def iter_chunks(self) -> Lines | None:
        """What the kernel measures and adds up in place of :meth:`norms` and :meth:`total`, if it
        can."""

    def scatter(self, totals: Tensor, first: int) -> Tensor:
        """The sum (*shape) that the kernel made: where it begins among those of all parameters."""


@dataclass(frozen=True)
class DenseGradients:
    """Gradients row by row, in any order of their axes."""

    each: Tensor  # (B, ...); written into
    axes: tuple[int, ...] | None = None  # the parameter's, among those of ``each`` without B

    def norms(self) -> Tensor:
        return _norms(self.each)

    def total(self, factors: Tensor) -> Tensor:
        # vmap gives one gradient for all rows, where it does not depend on them.
        own = self.each.contiguous() if 0 in self.each.stride() else self.each
        # 0 times infinity would be NaN. Always, not if need be: that would tell of rows.
        finite = own.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        agents, numbers = factors.shape[:-1], finite.reshape(*factors.shape, -1)
        total = _weighted(factors, numbers).view(agents + own.shape[1:])
        if self.axes is None:
            return total
        return total.permute(*range(len(agents)), *(len(agents) + axis for axis in self.axes))

    def iter_chunks(self) -> Lines | None:
        return (self.each, None) if dispatch.available_for(self.each) else None

    def scatter(self, totals: Tensor, first: int) -> Tensor:
        shape, strides = _places(self.each.shape[1:], self.axes)
        return totals.as_strided(shape, strides, first)


@dataclass(frozen=True)
class OuterProductGradients:
    """Gradients of a matrix: the sum over T places of left_t right_t^T."""

    left: Tensor  # (B, T, p)
    right: Tensor  # (B, T, d)
    #: Of a convolution, whose weight is (p, channels, height, width): d is height, width, channels.
    kernel: tuple[int, int, int] | None = None

    def norms(self) -> Tensor:
        if self.left.shape[1] == 1:
            lengths = _norms(self.left), _norms(self.right)
            return _unless_longest(lengths[0] * lengths[1], *lengths)
        left, right = self._wide
        squares = ((left @ left.mT) * (right @ right.mT)).sum(dim=(1, 2))
        terms = (left.norm(dim=2) * right.norm(dim=2)).sum(dim=1).square()
        norms = (squares.clamp(min=0.0) + CANCELLED * terms).sqrt()
        return _unless_longest(norms, *(side.flatten(1).norm(dim=1) for side in (left, right)))

    def total(self, factors: Tensor) -> Tensor:
        left, right = (side.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0) for side in self._wide)
        left, agents = left * factors.reshape(-1, 1, 1), factors.shape[:-1]
        left, right = (
            t.reshape(*agents, -1, t.shape[-1]) for t in (left, right)
        )  # (rows times places, p or d), of each agent
        return self.reshape_like(left.mT @ right)

    @cached_property
    def _wide(self) -> tuple[Tensor, Tensor]:
        """Copies in float64, which :meth:`norms` looks at and :meth:`total` then writes into."""
        left, right = (side.clone() if side.dtype == torch.float64 else wide(side)
                       for side in (self.left, self.right))  # fmt: skip
        return left, right

    def iter_chunks(self) -> Lines | None:
        there = self.left.shape[1] == 1 and self.left.numel() and self.right.numel()
        known = there and dispatch.available_for(self.left) and dispatch.available_for(self.right)
        return (self.left, self.right) if known else None

    def scatter(self, totals: Tensor, first: int) -> Tensor:
        high, wide = self.left.shape[-1], self.right.shape[-1]
        return self.reshape_like(totals.as_strided((high, wide), (wide, 1), first))

    def reshape_like(self, matrices: Tensor) -> Tensor:
        """(..., p, d) -> (..., *shape of the parameter)."""
        if self.kernel is None:
            return matrices
        return matrices.view(*matrices.shape[:-1], *self.kernel).movedim(-1, -3)


def clipped_sums(
    gradients: Sequence[PerExampleGradients], drawn: Tensor, clip_norm: float
) -> list[Tensor]:
    """Sums over rows of g min(1, clip_norm / (|g| + 1e-6)), g a row's gradient of all parameters.

    The rule is Opacus', whose ``clip_and_accumulate`` needs rows that do not count to be written
    over with zeros first, and so reads and writes all gradients several times more.

    Args:
        gradients: of each parameter, one at least, B >= 1 rows.
        drawn: (B,) whether a row counts. One that does not adds nothing, and neither does one whose
            gradient is not finite or has no finite norm. (A, B) for rows of A agents.
        clip_norm: > 0.

    Returns:
        One float64 sum for each parameter; of A agents (A, *shape).
    """
    factors, iter_chunks = factors_and_lines(gradients, drawn, clip_norm)
    known = [there for there in iter_chunks if there is not None]
    if not known:
        return [one.total(factors) for one in gradients]
    totals, first = kernel.totals(known, factors), 0
    sums = list[Tensor]()
    for one, there in zip(gradients, iter_chunks, strict=True):
        if there is None:
            sums.append(one.total(factors))
        else:
            sums.append(one.scatter(totals, first))
            first += kernel.numbers(there)
    return sums


def factors_and_lines(
    gradients: Sequence[PerExampleGradients], drawn: Tensor, clip_norm: float
) -> tuple[Tensor, list[Lines | None]]:
    """What rows are multiplied with, and of each parameter what the kernel adds up, if it does."""
    # It knows nothing of agents side by side.
    iter_chunks = [one.iter_chunks() if drawn.dim() == 1 else None for one in gradients]
    norms = [
        one.norms() for one, there in zip(gradients, iter_chunks, strict=True) if there is None
    ]
    norm = torch.stack(norms, dim=1).norm(dim=1) if norms else None
    if known := [there for there in iter_chunks if there is not None]:
        return kernel.factors(known, norm, drawn, clip_norm), iter_chunks
    assert norm is not None
    return _factors(norm, drawn, clip_norm), iter_chunks


def _factors(norms: Tensor, drawn: Tensor, clip_norm: float) -> Tensor:
    """What rows of these norms are multiplied with, in the shape of ``drawn``."""
    if len(norms) != drawn.numel():
        raise ValueError(f"gradients of {len(norms)} rows, where {drawn.numel()} were looked at")
    norms = norms.view(drawn.shape)
    # Not so, if one number of the row is not, or its square is none in float32.
    keep = (norms < LONGEST) & drawn.to(norms.device)
    return torch.where(keep, (clip_norm / (norms + 1e-6)).clamp(max=1.0), 0.0)


@lru_cache(maxsize=1024)
def _places(kept: torch.Size, axes: tuple[int, ...] | None) -> tuple[torch.Size, tuple[int, ...]]:
    """Shape and strides of a parameter, of the shape in which its gradients are kept densely."""
    strides = kernel.strides(kept)
    if axes is None:
        return kept, strides
    return torch.Size(kept[axis] for axis in axes), tuple(strides[axis] for axis in axes)


def wide(numbers: Tensor) -> Tensor:
    """As float64; on the CPU, where the device has none."""
    return numbers.to("cpu" if numbers.device.type == "mps" else numbers.device, torch.float64)


def _unless_longest(norms: Tensor, *lengths: Tensor) -> Tensor:
    """Infinite, where a factor is longer than a row that is written out may be: the other one then
    lies among the last numbers above 0, which have few digits left to round to."""
    keep = torch.stack([length < LONGEST for length in lengths]).all(dim=0)
    return norms.where(keep, math.inf)


def _norms(sample: Tensor) -> Tensor:
    """Norm of each row (B,), of so many at a time as a cache holds in float64."""
    flat = sample.reshape(len(sample), -1)
    return torch.cat([wide(some).norm(dim=1) for some in torch.split(flat, _at_once(flat))])


def _weighted(factors: Tensor, numbers: Tensor) -> Tensor:
    """Sums over rows of factors (..., B) times numbers (..., B, N): (..., N)."""
    size = _at_once(numbers)
    parts = zip(torch.split(factors, size, -1), torch.split(numbers, size, -2), strict=True)
    return sum(
        ((some[..., None, :] @ wide(those)).squeeze(-2) for some, those in parts),
        start=factors.new_zeros((*factors.shape[:-1], numbers.shape[-1])),
    )


def _at_once(rows: Tensor) -> int:
    """Of rows of so many numbers (..., B, N)."""
    return max(1, BLOCK // max(1, rows.numel() // rows.shape[-2]))
