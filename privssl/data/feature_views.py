"""Random views of vectors and sequences: masked features or words, and noise.

Feature masking follows SCARF (Bahri et al., ICLR 2022). Differs from it: a masked feature becomes
0, the middle of the public range; SCARF samples it from another row, which would make private rows
depend on each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from privssl.core.rows import filled
from privssl.training.batched.deferred import batched_call

_EDGE = 1e-6  # keeps uniform numbers inside (0, 1), where the normal quantile is finite


@dataclass(frozen=True)
class FeatureView:
    """Strengths of random changes; call it with rows to get one view of each.

    Args:
        masked: probability that a feature of a vector, or a position of a sequence, becomes 0.
        noise: standard deviation of normal noise on every feature, as a multiple of the row's root
            mean square. Empty positions stay empty.
    """

    masked: float = 0.0
    noise: float = 0.0

    def __call__(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return one view of each row.

        Args:
            x: vectors (B, F) or sequences (B, L, F), float32; not written to.
            rng: a generator on the CPU. Row i of one draw is the only randomness of view i, so
                views are independent of other rows.
        """
        if self == FeatureView():
            return x
        positions = x[0].numel() if x.dim() == 2 else x.shape[1]  # maskable positions
        chance = torch.rand(len(x), positions + x[0].numel(), generator=rng)
        view: Tensor = batched_call(_make_views, {"x": x, "chance": chance}, self)
        return view


#: Strengths by name. Source: ours.
VECTOR_VIEWS = {
    "none": FeatureView(),
    "weak": FeatureView(masked=0.05, noise=0.05),
    "mid": FeatureView(masked=0.1, noise=0.1),
    "strong": FeatureView(masked=0.3, noise=0.2),
}
SEQUENCE_VIEWS = {**VECTOR_VIEWS, "strong": FeatureView(masked=0.2, noise=0.2)}


def _make_views(fields: Mapping[str, Tensor], strengths: FeatureView) -> Tensor:
    """Return a view of each row x, from its uniform numbers "chance": for masks, then for noise."""
    x, chance = fields["x"], fields["chance"].to(fields["x"].device)
    features = x[0].numel()
    kept = chance[:, :-features] >= strengths.masked  # (B, F) or (B, L)
    present = filled(x) if x.dim() == 3 else torch.ones_like(x[:, :1])
    if strengths.noise:
        mean_square = x.flatten(1).square().sum(dim=1) / (
            present.expand_as(x).flatten(1).sum(dim=1) + 1e-12
        )
        uniform = chance[:, -features:].clamp(_EDGE, 1 - _EDGE).view(x.shape)
        normal = 2**0.5 * torch.erfinv(2 * uniform - 1)
        scale = strengths.noise * mean_square.sqrt().view(-1, *[1] * (x.dim() - 1))
        x = x + scale * normal * present
    return x * (kept if x.dim() == 2 else kept[:, :, None])
