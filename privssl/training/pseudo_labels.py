"""Pseudo-labels of unlabelled rows."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def sharpen(probs: Tensor, sharpness: float) -> Tensor:
    """Sharpen distributions (B, C). Fan et al., Eq. 2, where sharpness is Z > 1.

    >>> sharpen(torch.tensor([[0.8, 0.2]]), 2.0)
    tensor([[0.9412, 0.0588]])
    """
    powered = probs**sharpness
    return powered / powered.sum(dim=1, keepdim=True)


@torch.no_grad()
def guess_labels(
    classify: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    augment: Callable[[Tensor, torch.Generator], Tensor],
    views: int,
    sharpness: float,
    rng: torch.Generator,
    chunk: int = 512,
) -> Tensor:
    """Compute pseudo-labels (N, C): sharpened mean prediction over views. Fan et al., 3.3, Eq. 2.

    Args:
        classify: (B, *shape) -> (B, C) logits.
        x: rows (N, *shape) in [-1, 1].
        views: K of the paper, >= 1.
        chunk: rows per forward pass.
    """
    guesses = []
    for part in torch.split(x, chunk):
        predictions = [classify(augment(part, rng)).softmax(dim=1) for _ in range(views)]
        guesses.append(torch.stack(predictions).mean(dim=0))
    return sharpen(torch.cat(guesses), sharpness)


@torch.no_grad()
def view_probabilities(F: nn.Module, x: Tensor, classes: int) -> Tensor:
    """Compute class probabilities (B, C) of views (B, *shape) in evaluation mode; B may be 0.

    F is in training mode afterwards.
    """
    if not len(x):
        return torch.empty(0, classes, device=x.device)
    p: Tensor = F.eval()(x).softmax(dim=1)
    F.train()
    return p
