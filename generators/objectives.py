"""Realism and reconstruction losses of G and D: Fan et al., Eq. 6 and 7. One number per row, so
that DP-SGD can clip row by row. D returns logits: log D = -softplus(-d), log(1 - D) = -softplus(d).
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus


def g(lam: Tensor) -> Tensor:
    """Weight of realism at a blending factor. Eq. 6: exp(max(lambda, 1 - lambda) - 1).

    Args:
        lam: (B,) in [0, 1].

    Returns:
        (B,) in [0.61, 1]: 1 at the ends, smallest for an even blend.

    >>> [round(v, 4) for v in g(torch.tensor([0.0, 0.5, 1.0])).tolist()]
    [1.0, 0.6065, 1.0]
    """
    return torch.exp(torch.maximum(lam, 1 - lam) - 1)


def discriminator_loss(real: Tensor, fake: Tensor, lam: Tensor) -> Tensor:
    """What D minimises: -log D(x1, p1) - g(lambda) log(1 - D(x_hat, .)). Eq. 6, max over D.

    Args:
        real, fake: logits of real rows and of mixes (B,).
        lam: blending factors of the mixes (B,).
    """
    return softplus(-real) + g(lam) * softplus(fake)


def realistic_loss(fake: Tensor, lam: Tensor) -> Tensor:
    """What G minimises: -g(lambda) log D(x_hat, .). Eq. 6, min over G. Shapes as above.

    Differs from the paper: the non-saturating form. log(1 - D) has no gradient while D wins,
    which is always so at first (Goodfellow et al. 2014, section 3).
    """
    return g(lam) * softplus(-fake)


def reconstruction_loss(rebuilt: Tensor, x: Tensor) -> Tensor:
    """Squared distance between rows (B, *shape) and G's copies at lambda 1, summed over each row:
    (B,). Eq. 7."""
    return (rebuilt - x).square().flatten(1).sum(dim=1)
