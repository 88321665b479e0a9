"""Losses for classifiers: one number per row, so that any of them can be clipped row by row."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def soft_cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    """-sum_c p_c log softmax(logits)_c of logits and targets (..., C): (...). Fan et al., Eq. 4."""
    return -(p * logits.log_softmax(dim=-1)).sum(dim=-1)


def divergence(p: Tensor, logits: Tensor) -> Tensor:
    """KL(p || softmax(logits)), numbers >= 0 (...): p and logits (..., C)."""
    entropy = -torch.special.xlogy(p, p).sum(dim=-1)
    divergences: Tensor = soft_cross_entropy(logits, p) - entropy
    return divergences


def soft_label_loss(fields: Mapping[str, Tensor], *, F: Callable[..., Tensor]) -> Tensor:
    """Its mean over rows ``x`` with targets ``p``, for ``deferred.batched_call``."""
    return soft_cross_entropy(F(fields["x"]), fields["p"]).mean()


def hard_label_loss(fields: Mapping[str, Tensor], *, F: Callable[..., Tensor]) -> Tensor:
    """The same with classes ``y`` (B,)."""
    return cross_entropy(F(fields["x"]), fields["y"])
