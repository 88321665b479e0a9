"""The sum over rows that DP-SGD adds noise to: no row moves it by more than the clip norm.

Abadi et al. (CCS 2016), Algorithm 1, line "clip gradient", over all networks of a step together. A
gradient that is no number counts nothing, silently, and takes the same time: an error or a pause
would tell of the row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 512  # numbers of a gradient whose squares are added up in one go


def clipped_sums(samples: Sequence[Tensor], drawn: Tensor, clip_norm: float) -> list[Tensor]:
    """Sums over rows of g min(1, clip_norm / (|g| + 1e-6)), g a row's gradient of all parameters.

    The rule is Opacus', whose ``clip_and_accumulate`` needs rows that do not count to be written
    over with zeros first, and so reads and writes all gradients several times more.

    Args:
        samples: gradients of each parameter, row by row: (B, *shape), B >= 1; written into.
        drawn: (B,) whether a row counts. One that does not adds nothing, and neither does one whose
            gradient is not finite or has no finite norm.
        clip_norm: > 0.

    Returns:
        One sum (*shape) for each parameter.
    """
    norms = torch.stack([_norms(sample) for sample in samples], dim=1).norm(dim=1)  # (B,)
    keep = norms.isfinite() & drawn.to(norms.device)  # not so, if one number of the row is not
    factor = torch.where(keep, (clip_norm / (norms + 1e-6)).clamp(max=1.0), 0.0)
    sums = []
    for sample in samples:
        # vmap gives one gradient for all rows, where it does not depend on them.
        own = sample.contiguous() if 0 in sample.stride() else sample
        # 0 times infinity would be NaN. Always, not if need be: the time would tell of rows.
        sums.append(
            torch.einsum("i,i...", factor, own.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
        )
    return sums


def _norms(sample: Tensor) -> Tensor:
    """Norm of each row (B,). Block by block: a long sum of squares in one go loses digits (one in
    a thousand at a million numbers), and a row would weigh more than the clip norm."""
    flat = sample.reshape(len(sample), -1)
    while flat.shape[1] > BLOCK:
        whole = flat.shape[1] // BLOCK * BLOCK
        blocks = flat[:, :whole].reshape(len(flat), -1, BLOCK).norm(dim=2)
        flat = torch.cat([blocks, flat[:, whole:]], dim=1)
    norms: Tensor = flat.norm(dim=1)
    return norms
