"""Group norm that older torches, too, can do row by row.

Before 2.14 torch asks how rows lie in memory before it normalises them, and under vmap the answer
may be an error. Per-row gradients and agents side by side are taken under vmap. Of rows in three
dimensions it does not ask.
"""

import torch
from torch import Tensor, nn

ASKS = torch.__version__ < "2.14"


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm``."""

    def forward(self, x: Tensor) -> Tensor:
        if ASKS and torch._C._are_functorch_transforms_active():
            return super().forward(x.flatten(2)).view_as(x)
        return super().forward(x)
