"""An encoder without training: every stage is a sum over rows.

A sum over agents is the sum over all rows, so the partition hardly matters (only filters come from
each agent's own centroids).

    filters     k-means of whitened patches         Coates, Ng, Lee (AISTATS 2011): patch by patch,
                                                    normalised, whitened (ZCA), clustered
    responses   each filter at each place, rectified, averaged over a coarse grid
    features    the directions in which two views of a row agree and two rows do not: Fisher's
                discriminant with every row a class of its own (contrastive learning in closed
                form: Balestriero, LeCun, NeurIPS 2022)

Differs from the paper: responses are rectified correlations, not the triangle of distances.
"""

from collections.abc import Mapping
from typing import Annotated

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, conv2d, normalize

from privssl.settings.schema import Positive, strict

CHUNK = 32  # rows of one pass; the responses of more do not stay in a core's cache
CONTRAST = 0.05  # added to the variance of a patch; an empty one stays empty
ZCA = 0.1  # added to the variances of patches before whitening (Coates et al., 3.2.1)
CUT = 0.5  # threshold of a response
RIDGE = 0.3  # of the variance within rows, added to it


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class EncoderConfig:
    """The encoder's sizes. Numbers are ours, measured in docs/label_census.md."""

    filters: Positive = 64
    patch: Annotated[int, Field(ge=2)] | None = None  # pixels of a side; null: a fifth of a row's
    patches: Positive = 16000  # per agent, for the filters
    places: Positive = 4  # side of the grid of averaged responses
    features: Positive = 40  # E

    def compute_patch_side(self, shape: tuple[int, int, int]) -> int:
        """Side of a patch in pixels, for rows (channels, height, width)."""
        smaller = min(shape[1:])
        return min(smaller, max(3, round(smaller / 5)) if self.patch is None else self.patch)


def sample_patches(x: Tensor, side: int, count: int, rng: torch.Generator) -> Tensor:
    """Patches of random places of random rows, normalised (count, channels * side**2).

    Args:
        x: rows as networks take them (N, channels, height, width), N >= 1.
        side: at most the rows' height and width.
    """
    rows, _, height, width = x.shape
    row = torch.randint(rows, (count, 1, 1, 1), generator=rng)
    top = torch.randint(height - side + 1, (count, 1, 1, 1), generator=rng)
    left = torch.randint(width - side + 1, (count, 1, 1, 1), generator=rng)
    channel = torch.arange(x.shape[1])[:, None, None]
    dy, dx = torch.arange(side)[:, None], torch.arange(side)
    patch = x[row, channel, top + dy, left + dx].flatten(1)
    patch = patch - patch.mean(dim=1, keepdim=True)
    return patch / (patch.square().mean(dim=1, keepdim=True) + CONTRAST).sqrt()


def compute_whitener(outer: Tensor, count: Tensor) -> Tensor:
    """ZCA of patches (d, d), symmetric: (covariance + ZCA)^-1/2.

    Args:
        outer: sum of the patches' outer products (d, d). count: number of patches, >= 1.
    """
    values, vectors = torch.linalg.eigh(outer.double() / count)
    whitener: Tensor = vectors * (values.clamp(min=0) + ZCA).rsqrt() @ vectors.T
    return whitener.float()


def whiten(patches: Tensor, whitener: Tensor) -> Tensor:
    """Whitened patches (N, d), at length 1 or 0."""
    return normalize(patches @ whitener, dim=1)


def make_filters(centroids: Tensor, whitener: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Filters (F, *shape) for patches from centroids of whitened patches (F, d).

    Args:
        shape: of a patch (channels, side, side).
    """
    weight = normalize(centroids, dim=1) @ whitener
    return (weight - weight.mean(dim=1, keepdim=True)).view(-1, *shape)


@torch.no_grad()
def compute_responses(x: Tensor, filters: Tensor, places: int) -> Tensor:
    """Rectified responses of each filter at each place (N, F * places**2), >= 0.

    Args:
        x: rows as networks take them (N, channels, height, width).
        filters: (F, channels, side, side).
    """
    mean_filter = torch.full_like(filters[:1], 1 / filters[0].numel())
    filters = filters.contiguous(memory_format=torch.channels_last)
    pooled = []
    for chunk in torch.split(x, CHUNK):
        mean, square = conv2d(chunk, mean_filter), conv2d(chunk.square(), mean_filter)
        contrast = (square - mean.square()).clamp(min=0).add(CONTRAST).sqrt()
        rectified = conv2d(chunk, filters).sub_(CUT * contrast).relu_().div_(contrast)
        pooled.append(adaptive_avg_pool2d(rectified, places).flatten(1))
    return torch.cat(pooled) if pooled else x.new_zeros(0, len(filters) * places**2)


def compute_view_map(
    total: Tensor, outer: Tensor, within: Tensor, count: Tensor, features: int
) -> Tensor:
    """The directions in which views agree and rows do not (D, E), the best last.

    With S the covariance of responses to views and W its part within rows: the v of largest
    v'Sv / v'Wv = r, of a length at which responses have the variance (r - 1) / r along them.

    Args:
        total: sum of responses to both views of all rows (D,).
        outer: sum of their outer products (D, D).
        within: sum of the outer products of the two views' differences (D, D).
        count: number of rows, >= 1.
        features: E at most; fewer where responses have fewer dimensions.
    """
    mean = total.double() / (2 * count)
    spread = outer.double() / (2 * count) - torch.outer(mean, mean)  # S
    noise = within.double() / (2 * count)  # W
    noise.diagonal().add_(RIDGE * noise.diagonal().mean().clamp(min=1e-12))
    root = torch.linalg.cholesky(noise)
    half = torch.linalg.solve_triangular(root, spread, upper=False)
    ratio = torch.linalg.solve_triangular(root, half.T, upper=False)
    values, vectors = torch.linalg.eigh((ratio + ratio.T) / 2)
    values, vectors = values[-features:].clamp(min=1), vectors[:, -features:]
    length = (values - 1).sqrt() / values
    directions: Tensor = torch.linalg.solve_triangular(root.T, vectors, upper=True) * length
    return directions.float()


def encode(x: Tensor, encoder: Mapping[str, Tensor], places: int) -> Tensor:
    """Features of rows as networks take them (N, E).

    Args:
        encoder: "filters" as in ``compute_responses``, "map" as ``compute_view_map`` gives it.
    """
    return compute_responses(x, encoder["filters"], places) @ encoder["map"]
