"""Federated clustering: many small cells by k-means, merged along a graph.

k-means cuts long thin classes and merges close ones. So it makes many cells, which are merged into
K clusters by normalised cuts (Ng, Jordan, Weiss 2001) of a graph: the weight of two cells is the
number of rows to which one is nearest and the other second (Martinetz, Schulten 1994).

Everything is a sum over agents, so the result is that of all rows in one place. Lloyd's algorithm
needs each cell's sum and count; seeds are chosen by k-means++ (Arthur, Vassilvitskii 2007) from the
centroids of each agent's k-means with their counts; the graph is a table of counts. Features are
centred by a public mean and normalised, so distance is angle.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

LLOYD = 10  # rounds of a k-means in one place
FAR = 1e3  # coordinates of a spare centroid


def center_and_normalize(features: Tensor, mean: Tensor) -> Tensor:
    """Features (N, E) without their mean (E,), at length 1."""
    return normalize(features - mean, dim=1)


def find_nearest_centroids(points: Tensor, centroids: Tensor) -> Tensor:
    """The centroid nearest to each point (N,): points (N, E) at length 1, centroids (K, E)."""
    return compute_distances(points, centroids).argmin(dim=1)


def compute_distances(points: Tensor, centroids: Tensor) -> Tensor:
    """Squared Euclidean distances (N, K), up to each point's own length."""
    return centroids.square().sum(dim=1) - 2 * points @ centroids.T


def sum_by_centroid(
    points: Tensor, centroids: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum (K, E) and number (K,) of the points nearest to each centroid; weighted where given."""
    weight = torch.ones(len(points)) if weight is None else weight
    nearest, k = find_nearest_centroids(points, centroids), len(centroids)
    total = torch.zeros(k, points.shape[1]).index_add_(0, nearest, points * weight[:, None])
    return total, torch.zeros(k).index_add_(0, nearest, weight)


def update_centroids(centroids: Tensor, total: Tensor, count: Tensor) -> Tensor:
    """Centroids at the means of their clusters; an empty cluster's is not changed."""
    occupied = (count > 0)[:, None]
    return torch.where(occupied, total / torch.where(occupied, count[:, None], 1.0), centroids)


def k_means(points: Tensor, weight: Tensor, k: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weighted k-means with k-means++ seeds on points in one place.

    Args:
        points: (N, E), N >= 1. weight: (N,) >= 0, some of it above 0.
        k: clusters; with fewer points than that some centroids coincide.

    Returns:
        Centroids (K, E), and the weight of each cluster (K,).
    """
    centroids = _draw_seeds(points, weight, k, rng)
    for _ in range(LLOYD):
        centroids = update_centroids(centroids, *sum_by_centroid(points, centroids, weight))
    return centroids, sum_by_centroid(points, centroids, weight)[1]


def _draw_seeds(points: Tensor, weight: Tensor, k: int, rng: torch.Generator) -> Tensor:
    """k-means++: each next seed is drawn by weight x squared distance to the nearest so far."""
    first = torch.multinomial(weight, 1, generator=rng)
    seeds = points[first]
    squared_distances = (points - seeds).square().sum(dim=1)
    for _ in range(k - 1):
        weights = weight * squared_distances
        if not weights.sum() > 0:  # every point is a seed
            weights = weight
        seed = points[torch.multinomial(weights, 1, generator=rng)]
        seeds = torch.cat([seeds, seed])
        squared_distances = torch.minimum(squared_distances, (points - seed).square().sum(dim=1))
    return seeds


def pad_centroids(centroids: Tensor, cells: int) -> Tensor:
    """Centroids (K, E), then spare ones to ``cells`` rows, which no point is ever near."""
    spare = torch.full((cells - len(centroids), centroids.shape[1]), FAR)
    return torch.cat([centroids, spare])


def count_cells(centroids: Tensor) -> int:
    """The number of centroids that are not spare."""
    return int((centroids < FAR).any(dim=1).sum())


def count_neighbours(points: Tensor, centroids: Tensor) -> Tensor:
    """Number of points with cell i nearest and j second (J, J); with one cell, 0.

    Args:
        points: (N, E). centroids: (J, E).
    """
    cells = len(centroids)
    if cells < 2:
        return torch.zeros(cells, cells)
    first, second = compute_distances(points, centroids).topk(2, dim=1, largest=False).indices.T
    return torch.bincount(first * cells + second, minlength=cells**2).view(cells, cells).float()


def merge_cells(graph: Tensor, k: int, seed: int) -> Tensor:
    """The cluster of each cell (J,), int64, by normalised cuts.

    Args:
        graph: (J, J) counts as ``count_neighbours`` gives them, over all agents.
        k: clusters; with fewer cells than that, each is one.
        seed: of the restarts of the k-means in eigenvectors.
    """
    from sklearn.cluster import spectral_clustering  # importing it takes a second

    if len(graph) <= k:
        return torch.arange(len(graph))
    affinity = (graph + graph.T).double().numpy() + 1e-6  # an edge everywhere: one component
    clusters = spectral_clustering(affinity, n_clusters=k, random_state=seed, n_init=10)
    return torch.from_numpy(clusters).long()


def cluster_shares_and_adjacency(graph: Tensor, cluster: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Shares of the clusters in all rows (K,), which sum to 1, and numbers of rows between two
    clusters (K, K), symmetric; rows within one are on the diagonal.

    Args:
        graph: (J, J) counts as ``count_neighbours`` gives them, over all agents; some are above 0.
        cluster: (J,) as ``merge_cells`` gives it. k: clusters.
    """
    membership = one_hot(cluster, k).to(graph.dtype)  # (J, K)
    mass = membership.T @ graph.sum(dim=1)
    return mass / mass.sum(), membership.T @ (graph + graph.T) @ membership
