"""Group norm that works under vmap on torch before 2.14.

torch queries memory layouts there, which rows of three dimensions avoid.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

ASKS = torch.__version__ < "2.14"


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm`` by :func:`group_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Apply ``torch.nn.functional.group_norm`` in a form that vmap supports."""
    if ASKS and torch._C._are_functorch_transforms_active():
        return functional.group_norm(x.flatten(2), groups, weight, bias, eps).view_as(x)
    return functional.group_norm(x, groups, weight, bias, eps)
