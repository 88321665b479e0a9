"""Losses for classifiers: one number per row, so that any of them can be clipped row by row."""

from torch import Tensor


def soft_cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    """-sum_c p_c log softmax(logits)_c. Fan et al., Eq. 4 and 5.

    Args:
        logits: (B, C).
        p: target distributions (B, C).

    Returns:
        (B,).
    """
    return -(p * logits.log_softmax(dim=1)).sum(dim=1)
