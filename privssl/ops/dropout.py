"""Dropout with one random byte per element.

torch's CPU dropout draws 64 bits sequentially, a tenth of a step of pfl-research's CIFAR-10
network.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

LEAST = -(2**63)  # random_ from here draws all 64 bits; by default the highest is 0


class Dropout(nn.Dropout):
    """``torch.nn.Dropout`` with other random numbers from the same (torch's global) generator."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x.device.type != "cpu" or not 0 < self.p < 1:
            return dropout(x, self.p, self.training, self.inplace)
        mask = _draw_mask(x, self.p).to(x.dtype).div_(1 - self.p)
        return x.mul_(mask) if self.inplace else x * mask


def _draw_mask(like: Tensor, p: float) -> Tensor:
    """Return 1 with probability 1 - p, else 0, in the shape and strides of ``like``.

    A byte suffices if p is a multiple of 1/256; else four bytes, to within 2^-32.
    """
    if p * 256 % 1 == 0:
        dtype, threshold = torch.uint8, int(p * 256)
    else:
        dtype, threshold = torch.int32, min(max(round(p * 2**32), 1), 2**32 - 1) - 2**31
    words = torch.empty(-(-like.numel() * dtype.itemsize // 8), dtype=torch.int64)
    samples = words.random_(LEAST, None).view(dtype)[: like.numel()]
    # samples >= threshold, ten times faster: torch's comparisons are not vectorised.
    samples.clamp_(threshold - 1, threshold).sub_(threshold - 1)
    return samples.as_strided(like.shape, torch.empty_like(like, device="meta").stride())
