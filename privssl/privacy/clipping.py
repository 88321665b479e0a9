"""The clipped sum of DP-SGD: no row changes it by more than the clip norm.

Abadi et al. (CCS 2016), Algorithm 1, "clip gradient", over all networks of a step together. A
gradient that is not finite counts as 0, by the same operations: an error or a branch would reveal
the row. (Time on subnormal numbers depends on the processor.)

A per-example gradient is a :class:`DenseGradients`, or an :class:`OuterProductGradients`: two
factors whose product is never computed for one row, of a linear layer (Goodfellow 2015; Li et al.
2022, "ghost clipping") or a convolution. In both, the norm is that of the summed gradient.

Norms, factors and sums are float64: a row weighs the clip norm to one part in 10^9, and n rows are
summed to within n^2 x 2.3e-16 of it (docs/dp_sgd.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from privssl.ops import clipping as kernel
from privssl.ops import dispatch
from privssl.ops.clipping import KernelInput

BLOCK = 2**18  # elements converted to float64 at once
LONGEST = math.sqrt(torch.finfo(torch.float32).max)  # largest norm of a row that counts
#: Rounding changes a product of factors by 1e-7 of its terms, which may cancel: a row's norm is
#: taken to be at least a thousandth of its terms.
CANCELLED = 1e-6


class PerExampleGradients(Protocol):
    """The gradients of one parameter, for each of B rows."""

    def norms(self) -> Tensor:
        """Return norms (B,) float64, at least those of the gradients that :meth:`total` adds.

        Not finite if the gradient is not.
        """

    def total(self, factors: Tensor) -> Tensor:
        """Return the float64 sum over rows of factor times gradient (*shape); factor 0 omits a row.

        Args:
            factors: (B,) float64; or (A, B), for A agents with B rows each: (A, *shape).
        """

    def kernel_input(self) -> KernelInput | None:
        """Return the kernel's input that replaces :meth:`norms` and :meth:`total`, or None."""

    def from_totals(self, totals: Tensor, first: int) -> Tensor:
        """Return the sum (*shape) that the kernel wrote at ``first`` for this parameter."""


@dataclass(frozen=True)
class DenseGradients:
    """Dense per-example gradients, with any order of axes."""

    each: Tensor  # (B, ...); overwritten
    axes: tuple[int, ...] | None = None  # the parameter's axes, among those of ``each`` without B

    def norms(self) -> Tensor:
        return _norms(self.each)

    def total(self, factors: Tensor) -> Tensor:
        # Under vmap, a gradient that is independent of rows has stride 0.
        gradients = self.each.contiguous() if 0 in self.each.stride() else self.each
        # 0 times infinity is NaN. Unconditional: a branch would reveal rows.
        finite = gradients.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        shape, flat = factors.shape[:-1], finite.reshape(*factors.shape, -1)
        total = _sum_weighted(factors, flat).view(shape + gradients.shape[1:])
        if self.axes is None:
            return total
        return total.permute(*range(len(shape)), *(len(shape) + axis for axis in self.axes))

    def kernel_input(self) -> KernelInput | None:
        return (self.each, None) if dispatch.available_for(self.each) else None

    def from_totals(self, totals: Tensor, first: int) -> Tensor:
        shape = self.each.shape[1:]
        total = totals[first : first + shape.numel()].view(shape)
        return total if self.axes is None else total.permute(self.axes)


@dataclass(frozen=True)
class OuterProductGradients:
    """Gradients of a matrix: the sum over T positions of left_t right_t^T."""

    left: Tensor  # (B, T, p)
    right: Tensor  # (B, T, d)
    #: For a convolution with weight (p, channels, height, width): d is height, width, channels.
    kernel: tuple[int, int, int] | None = None

    def norms(self) -> Tensor:
        if self.left.shape[1] == 1:
            lengths = _norms(self.left), _norms(self.right)
            return _replace_overlong(lengths[0] * lengths[1], *lengths)
        left, right = self._float64_factors
        squares = ((left @ left.mT) * (right @ right.mT)).sum(dim=(1, 2))
        terms = (left.norm(dim=2) * right.norm(dim=2)).sum(dim=1).square()
        norms = (squares.clamp(min=0.0) + CANCELLED * terms).sqrt()
        return _replace_overlong(norms, *(side.flatten(1).norm(dim=1) for side in (left, right)))

    def total(self, factors: Tensor) -> Tensor:
        left, right = (
            side.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0) for side in self._float64_factors
        )
        left, shape = left * factors.reshape(-1, 1, 1), factors.shape[:-1]
        left, right = (
            t.reshape(*shape, -1, t.shape[-1]) for t in (left, right)
        )  # (rows times positions, p or d), of each agent
        return self.reshape_like(left.mT @ right)

    @cached_property
    def _float64_factors(self) -> tuple[Tensor, Tensor]:
        """Return float64 copies, which :meth:`norms` reads and :meth:`total` then overwrites."""
        left, right = (side.to(torch.float64, copy=True) for side in (self.left, self.right))
        return left, right

    def kernel_input(self) -> KernelInput | None:
        single = self.left.shape[1] == 1 and self.left.numel() and self.right.numel()
        usable = single and dispatch.available_for(self.left) and dispatch.available_for(self.right)
        return (self.left, self.right) if usable else None

    def from_totals(self, totals: Tensor, first: int) -> Tensor:
        height, width = self.left.shape[-1], self.right.shape[-1]
        return self.reshape_like(totals[first : first + height * width].view(height, width))

    def reshape_like(self, matrices: Tensor) -> Tensor:
        """Reshape (..., p, d) to (..., *shape of the parameter)."""
        if self.kernel is None:
            return matrices
        return matrices.view(*matrices.shape[:-1], *self.kernel).movedim(-1, -3)


def clipped_sums(
    gradients: Sequence[PerExampleGradients], drawn: Tensor, clip_norm: float
) -> list[Tensor]:
    """Sum g min(1, clip_norm / (|g| + 1e-6)) over rows, g a row's gradient of all parameters.

    This is Opacus' rule; its ``clip_and_accumulate`` reads and writes all gradients several times
    more.

    Args:
        gradients: of each parameter, at least one, B >= 1 rows.
        drawn: (B,) whether a row counts; (A, B) for rows of A agents. Rows that do not count or
            whose gradient or norm is not finite add nothing.
        clip_norm: > 0.

    Returns:
        One float64 sum for each parameter; for A agents (A, *shape).
    """
    factors, inputs = factors_and_inputs(gradients, drawn, clip_norm)
    kernel_inputs = [x for x in inputs if x is not None]
    if not kernel_inputs:
        return [gradient.total(factors) for gradient in gradients]
    totals, first = kernel.totals(kernel_inputs, factors), 0
    sums = list[Tensor]()
    for gradient, x in zip(gradients, inputs, strict=True):
        if x is None:
            sums.append(gradient.total(factors))
        else:
            sums.append(gradient.from_totals(totals, first))
            first += kernel.numbers(x)
    return sums


def factors_and_inputs(
    gradients: Sequence[PerExampleGradients], drawn: Tensor, clip_norm: float
) -> tuple[Tensor, list[KernelInput | None]]:
    """Return clipping factors, and the kernel's input for each parameter, or None."""
    # The kernel supports only one agent's rows.
    inputs = [gradient.kernel_input() if drawn.dim() == 1 else None for gradient in gradients]
    norms = [gradient.norms() for gradient, x in zip(gradients, inputs, strict=True) if x is None]
    norm = torch.stack(norms, dim=1).norm(dim=1) if norms else None
    if kernel_inputs := [x for x in inputs if x is not None]:
        return kernel.factors(kernel_inputs, norm, drawn, clip_norm), inputs
    assert norm is not None
    return _compute_factors(norm, drawn, clip_norm), inputs


def _compute_factors(norms: Tensor, mask: Tensor, clip_norm: float) -> Tensor:
    """Return clipping factors of rows with these norms, in the shape of ``mask``."""
    if len(norms) != mask.numel():
        raise ValueError(f"gradients of {len(norms)} rows, where {mask.numel()} were looked at")
    norms = norms.view(mask.shape)
    # False for NaN, and for norms whose square overflows float32.
    keep = (norms < LONGEST) & mask.to(norms.device)
    return torch.where(keep, (clip_norm / (norms + 1e-6)).clamp(max=1.0), 0.0)


def _replace_overlong(norms: Tensor, *lengths: Tensor) -> Tensor:
    """Return infinity if a factor is too long: the other may be subnormal, with few digits."""
    keep = torch.stack([length < LONGEST for length in lengths]).all(dim=0)
    return norms.where(keep, math.inf)


def _norms(sample: Tensor) -> Tensor:
    """Compute the norm of each row (B,), in blocks that fit a cache in float64."""
    flat = sample.reshape(len(sample), -1)
    return torch.cat([chunk.double().norm(dim=1) for chunk in torch.split(flat, _block_size(flat))])


def _sum_weighted(factors: Tensor, values: Tensor) -> Tensor:
    """Sum factors (..., B) times values (..., B, N) over rows: (..., N)."""
    size = _block_size(values)
    chunks = zip(torch.split(factors, size, -1), torch.split(values, size, -2), strict=True)
    return sum(
        ((f[..., None, :] @ v.double()).squeeze(-2) for f, v in chunks),
        start=factors.new_zeros((*factors.shape[:-1], values.shape[-1])),
    )


def _block_size(rows: Tensor) -> int:
    """Return the number of rows of one block, for rows (..., B, N)."""
    return max(1, BLOCK // max(1, rows.numel() // rows.shape[-2]))
