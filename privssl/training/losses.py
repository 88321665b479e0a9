"""Losses of classifiers: one number per row, so that each can be clipped row by row."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def soft_cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    """Compute -sum_c p_c log softmax(logits)_c of logits and targets (..., C): (...). Fan et al.,
    Eq. 4."""
    return -(p * logits.log_softmax(dim=-1)).sum(dim=-1)


def divergence(p: Tensor, logits: Tensor) -> Tensor:
    """Compute KL(p || softmax(logits)), >= 0 (...): p and logits (..., C)."""
    entropy = -torch.special.xlogy(p, p).sum(dim=-1)
    divergences: Tensor = soft_cross_entropy(logits, p) - entropy
    return divergences


def soft_label_loss(fields: Mapping[str, Tensor], *, F: Callable[..., Tensor]) -> Tensor:
    """Average ``soft_cross_entropy`` over rows ``x`` with targets ``p``, for
    ``deferred.batched_call``."""
    return soft_cross_entropy(F(fields["x"]), fields["p"]).mean()


def hard_label_loss(fields: Mapping[str, Tensor], *, F: Callable[..., Tensor]) -> Tensor:
    """Average cross-entropy over ``x`` with classes ``y`` (B,), for ``deferred.batched_call``."""
    return cross_entropy(F(fields["x"]), fields["y"])
