"""Purity of the clusters of a label census, and accuracy of its labels.

    python -m benchmarks.census_map CONFIG [--seed 12] [--epsilons 4,2,1] [--clusters 10,15,20]
                                    [section.key=value ...]

Trains the encoder with a seed reserved for tuning, then reads the true classes of unlabelled rows,
which no run may use. All these rows are clustered centrally, three times:

    purity   share of rows in the right class if every cluster had its most frequent one: k-means
             with K clusters, and cells joined into K. Lowest to highest of the clusterings
    census   share of rows in the right class after a census, for several K and couplings, and no
             posterior at all (the largest count); labels and noise are drawn ten times for each
             clustering. Mean (worst)

Prints two Markdown tables; the defaults in docs/label_census.md were chosen by them.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from accounting.discrete_laplace import discrete_laplace
from benchmarks.census_curve import before_the_census
from privssl.algorithms.label_census.algorithm import LabelCensus
from privssl.algorithms.label_census.cluster_labels import class_posterior
from privssl.algorithms.label_census.clustering import (
    cluster_shares_and_adjacency,
    count_neighbours,
    find_nearest_centroids,
    k_means,
    merge_cells,
)
from privssl.algorithms.label_census.feature_map import make_map
from privssl.errors import UserError
from privssl.experiment.config import Config, load_config
from privssl.experiment.prepare import prepare

CLUSTERINGS, DRAWS = 3, 10
COUPLINGS = (0.0, 4.0, 8.0)


@dataclass(frozen=True)
class Clustering:
    """Clustered rows: the cluster of each row (N,), and the server's statistics of clusters."""

    of_row: Tensor
    mass: Tensor  # (K,)
    borders: Tensor  # (K, K)


class Rows:
    """Unlabelled rows encoded by a run's encoder, with their true classes."""

    def __init__(self, config: Config) -> None:
        prepared = prepare(replace(config, privacy=None))
        algorithm, federated_data = prepared.algorithm, prepared.federated_data
        assert isinstance(algorithm, LabelCensus)
        state, _ = before_the_census(prepared)
        unlabelled = [
            a.held_unlabelled for a in federated_data.agents if a.held_unlabelled is not None
        ]
        feature_map = make_map(state)
        self.points = torch.cat(
            [algorithm.compute_points(h.x, feature_map, prepared.device) for h in unlabelled]
        )
        self.truth = federated_data.true_labels[torch.cat([h.ids for h in unlabelled])]
        self.classes = federated_data.dataset.classes
        self.cells = algorithm.cfg.cells
        self.purity = algorithm.cfg.purity
        self.labels = config.data.labelled or 0
        self.support = config.agents.support

    def by_k_means(self, k: int, seed: int) -> Tensor:
        """Return the cluster of each row (N,) by k-means alone."""
        centroids, _ = k_means(self.points, torch.ones(len(self.points)), k, _make_generator(seed))
        return find_nearest_centroids(self.points, centroids)

    def by_graph(self, ks: Sequence[int], seed: int) -> dict[int, Clustering]:
        """Join cells of one k-means into each number of clusters."""
        centroids, _ = k_means(
            self.points, torch.ones(len(self.points)), self.cells, _make_generator(seed)
        )
        cell, graph = (
            find_nearest_centroids(self.points, centroids),
            count_neighbours(self.points, centroids),
        )
        clusterings = {}
        for k in ks:
            cluster = merge_cells(graph, k, seed)
            clusterings[k] = Clustering(
                cluster[cell], *cluster_shares_and_adjacency(graph, cluster, k)
            )
        return clusterings

    def purity_of(self, of_row: Tensor) -> float:
        """Return the share of rows in the most frequent class of their cluster."""
        counts = self._count_table(of_row, torch.arange(len(self.truth)))
        return float(counts.amax(dim=1).sum() / counts.sum())

    def _count_table(self, of_row: Tensor, rows: Tensor) -> Tensor:
        """Count these rows by cluster and class (K, C)."""
        k = int(of_row.max()) + 1
        index = of_row[rows] * self.classes + self.truth[rows]
        return torch.bincount(index, minlength=k * self.classes).view(k, self.classes)

    def after_a_census(
        self, at: Clustering, epsilon: float, coupling: float | None, seed: int
    ) -> float:
        """Return the share of rows with the right label after a census; coupling None: largest
        count."""
        k = len(at.mass)
        picked = torch.randperm(len(self.truth), generator=_make_generator(seed))[: self.labels]
        counts = torch.zeros(k, self.classes, dtype=torch.int64)
        counts += one_hot(at.of_row[picked], k).T @ one_hot(self.truth[picked], self.classes)
        noise = sum(discrete_laplace(epsilon, counts.numel()) for _ in range(self.support))
        table = counts + torch.from_numpy(np.asarray(noise)).view_as(counts)
        scores = table
        if coupling is not None:
            scores = class_posterior(
                table, at.mass, float(self.labels), agents=self.support, epsilon=epsilon,
                purity=self.purity, balanced=True, borders=at.borders, coupling=coupling,
            )  # fmt: skip
        return float((scores.argmax(dim=1)[at.of_row] == self.truth).float().mean())


def _make_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def purity_table(rows: Rows, ks: Sequence[int]) -> list[str]:
    """Return the first table."""
    clusterings = [rows.by_graph(ks, seed) for seed in range(CLUSTERINGS)]
    k_means_purity = {
        k: [rows.purity_of(rows.by_k_means(k, s)) for s in range(CLUSTERINGS)] for k in ks
    }
    graph_purity = {
        k: [rows.purity_of(clustering[k].of_row) for clustering in clusterings] for k in ks
    }

    def format_line(name: str, purities: dict[int, list[float]]) -> str:
        cells = [f"{min(purities[k]):.3f} to {max(purities[k]):.3f}" for k in ks]
        return f"| {name} | " + " | ".join(cells) + " |"

    return [
        "| K | " + " | ".join(map(str, ks)) + " |",
        "|---" * (len(ks) + 1) + "|",
        format_line("k-means", k_means_purity),
        format_line(f"{rows.cells} cells, joined", graph_purity),
    ]


def census_table(rows: Rows, ks: Sequence[int], epsilons: Sequence[float]) -> list[str]:
    """Return the second table."""
    maps = [rows.by_graph(ks, seed) for seed in range(CLUSTERINGS)]
    lines = [
        "| K | | " + " | ".join(f"epsilon {e:g}" for e in epsilons) + " |",
        "|---" * (len(epsilons) + 2) + "|",
    ]
    for k in ks:
        for coupling in (None, *COUPLINGS):
            name = "largest count" if coupling is None else f"posterior, coupling {coupling:g}"
            cells = []
            for epsilon in epsilons:
                shares = [
                    rows.after_a_census(clustering[k], epsilon, coupling, draw)
                    for clustering in maps
                    for draw in range(DRAWS)
                ]
                cells.append(f"{math.fsum(shares) / len(shares):.3f} ({min(shares):.3f})")
            lines.append(f"| {k} | {name} | " + " | ".join(cells) + " |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 if the config cannot be measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.census_map", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--epsilons", default="4,2,1,0.5")
    parser.add_argument("--clusters", help="a list: 10,15,20; 1 to 6 times the classes")
    options = parser.parse_intermixed_args(arguments)
    torch.set_num_threads(1)
    try:
        config = load_config(options.config, [*options.overrides, f"run.seed={options.seed}"])
        if config.algorithm.name != "label_census" or not config.data.labelled:
            raise UserError(f"{options.config}: give a config of label_census with data.labelled")
        rows = Rows(config)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    c = rows.classes
    ks, few = [c, c * 12 // 10, c * 15 // 10, 2 * c, 3 * c, 6 * c], [c, c * 15 // 10, 2 * c]
    if options.clusters:
        ks = few = [int(k) for k in options.clusters.split(",")]
    print("\n".join(purity_table(rows, ks)))
    epsilons = [float(e) for e in options.epsilons.split(",")]
    print("\n" + "\n".join(census_table(rows, few, epsilons)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
