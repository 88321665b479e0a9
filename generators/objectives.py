"""The objectives that keep G honest: realism and reconstruction. Fan et al., Eq. 6 and 7.

All functions return one number per row, so that a private step can clip row by row. The
discriminator answers in logits: log D = -softplus(-d) and log(1 - D) = -softplus(d).
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
        real: logits of real rows (B,).
        fake: logits of mixes (B,).
        lam: blending factors of the mixes (B,).

    Returns:
        (B,), one loss per row.
    """
    return softplus(-real) + g(lam) * softplus(fake)


def realistic_loss(fake: Tensor, lam: Tensor) -> Tensor:
    """What G minimises: -g(lambda) log D(x_hat, .). Eq. 6, min over G. Shapes as above.

    Differs from the paper: the non-saturating form. log(1 - D) has no gradient while D wins,
    which is always so at first (Goodfellow et al. 2014, section 3).
    """
    return g(lam) * softplus(-fake)


def reconstruction_loss(rebuilt: Tensor, x: Tensor) -> Tensor:
    """Squared distance between a row and G's copy of it at lambda 1. Eq. 7.

    Args:
        rebuilt: (B, *shape).
        x: (B, *shape).

    Returns:
        (B,), the sum of squares over the row.
    """
    return (rebuilt - x).square().flatten(1).sum(dim=1)
