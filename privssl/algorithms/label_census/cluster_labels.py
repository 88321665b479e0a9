"""The class of each cluster, from a histogram with noise of a public distribution.

The server sees H[k, c] = n[k, c] + noise, where n counts the labelled rows of class c in cluster k.
Model: a share ``purity`` of the labelled rows of cluster k is of its main class, the rest is spread
evenly over the other classes. Their number is Poisson around all labelled rows (a public number)
times the cluster's share of unlabelled rows; noise is one two-sided geometric draw per support
agent. Adjacent clusters tend to be of one class (a Potts model on the graph of borders), and
classes to be equally frequent.

All of it is post-processing of H and of messages of query agents: no label is read.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_LOG_ODDS = 6.0  # 400:1, bound of the prior of a class
OUTLIER_SIGMAS = 6.0  # from which a count contradicts its expectation
STEPS = 120  # of the prior; some tens are enough
MEAN_FIELD = 20  # steps of clusters and their neighbours
WIDE = 4000  # expected count + range of all noise above which a normal distribution is used
TAIL = 1e-12  # probability of counts and noise that the tables leave out


def class_posterior(
    histogram: Tensor,
    mass: Tensor,
    labels: float,
    *,
    epsilon: float | None,
    agents: int,
    purity: float,
    balanced: bool,
    borders: Tensor | None = None,
    coupling: float = 0.0,
) -> Tensor:
    """Probability of each class to be the main class of each cluster (K, C), rows sum to 1.

    Args:
        histogram: (K, C) integers, sum of what ``agents`` support agents released.
        mass: (K,) shares of unlabelled rows in the clusters, summing to 1.
        labels: expected number of labelled rows over all agents, > 0.
        epsilon: of each agent's release; None where no noise was added.
        agents: >= 1; each added noise of its own.
        purity: in (1 / C, 1).
        balanced: whether all classes are expected to have the same share of unlabelled rows.
        borders: (K, K) number of unlabelled rows between two clusters; its diagonal is ignored.
            None: clusters are independent.
        coupling: log odds that a cluster takes from neighbours of one certain class.
    """
    clusters, classes = histogram.shape
    scores = torch.zeros(clusters, classes, dtype=torch.float64)
    noise = 0.0 if epsilon is None else agents * _noise_variance(epsilon)
    for k in range(clusters):
        counts = histogram[k].numpy().astype(np.float64)
        expected = max(float(mass[k]) * labels, 1e-6)
        if counts.max() > expected + OUTLIER_SIGMAS * np.sqrt(expected + noise):
            expected = float(counts.max())  # labels are not distributed as unlabelled rows
        log_main = _log_likelihood(counts, expected * purity, epsilon, agents)
        log_other = _log_likelihood(
            counts, expected * (1 - purity) / (classes - 1), epsilon, agents
        )
        scores[k] = torch.from_numpy(log_main - log_other)
    row_shares = mass.double() if balanced else None
    posterior, prior = _posterior(
        scores, row_shares, torch.zeros(classes, dtype=scores.dtype), STEPS
    )
    if borders is not None and coupling:
        graph = borders.double().clone().fill_diagonal_(0)
        graph = graph / graph.sum(dim=1, keepdim=True).clamp(min=1)  # (K, K), rows sum to 1
        for _ in range(MEAN_FIELD):  # naive mean field, damped
            coupled = scores + coupling * (graph @ posterior)
            updated, prior = _posterior(coupled, row_shares, prior, STEPS // MEAN_FIELD)
            posterior = (posterior + updated) / 2
    return posterior.float()


def label_by_majority(histogram: Tensor) -> Tensor:
    """Certainty (K, C) that a cluster's class is the one of its largest count, the first of equals:
    NoiseCluster (Tang et al., PoPETs 2022)."""
    return torch.nn.functional.one_hot(histogram.argmax(dim=1), histogram.shape[1]).float()


def compute_class_shares(histogram: Tensor) -> Tensor:
    """Each class's share of a cluster's counts (K, C), negative ones as 0; equal shares of none:
    the priors of Ghazi et al. (NeurIPS 2021)."""
    counts = histogram.clamp(min=0).double()
    counts = torch.where(counts.sum(dim=1, keepdim=True) > 0, counts, torch.ones_like(counts))
    return (counts / counts.sum(dim=1, keepdim=True)).float()


def class_given_cluster(posterior: Tensor, purity: float) -> Tensor:
    """Probability of each class for a row of each cluster (K, C).

    Args:
        posterior: of each class to be the cluster's main class (K, C), rows sum to 1.
        purity: share of a cluster's rows of its main class.
    """
    other = (1 - purity) / (posterior.shape[1] - 1)
    return other + (purity - other) * posterior


def _posterior(
    scores: Tensor, mass: Tensor | None, prior: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Posterior (K, C), and the log prior of classes (C,) under which it is balanced.

    The prior is moved as in Sinkhorn's algorithm until every class has the same mass of rows;
    ``MAX_LOG_ODDS`` bounds it, so that a class without evidence gets no cluster. Without ``mass``
    the prior does not change.
    """
    for _ in range(steps if mass is not None else 0):
        assert mass is not None
        share = (mass[:, None] * (scores + prior).softmax(dim=1)).sum(dim=0)  # (C,)
        prior = prior - 0.5 * (len(prior) * share).clamp(min=1e-6).log()
        prior = (prior - prior.mean()).clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)
    return (scores + prior).softmax(dim=1), prior


def _noise_variance(epsilon: float) -> float:
    """Of one two-sided geometric draw: 2 e^-epsilon / (1 - e^-epsilon)^2."""
    return float(2 * np.exp(-epsilon) / np.expm1(-epsilon) ** 2)


def _log_likelihood(
    observed: NDArray[np.float64], mean: float, epsilon: float | None, agents: int
) -> NDArray[np.float64]:
    """log P(count + noise = observed), count Poisson with this mean.

    Exact for narrow noise; wide noise, or that of many agents, is nearly normal. Numbers outside of
    the table get the probability of its end.
    """
    noise_range = 0 if epsilon is None else int(np.ceil(-np.log(TAIL) / epsilon))
    if mean + agents * noise_range > WIDE:
        variance = mean + (0.0 if epsilon is None else agents * _noise_variance(epsilon))
        normal: NDArray[np.float64] = -np.square(observed - mean) / (2 * variance)
        return np.asarray(normal - np.log(variance) / 2)
    counts = np.arange(int(mean + 12 * np.sqrt(mean) + 30))
    from scipy.special import gammaln  # here: other algorithms do not need scipy

    pmf = np.exp(counts * np.log(mean) - mean - gammaln(counts + 1))
    for _ in range(agents if epsilon is not None else 0):
        noise = np.exp(-float(epsilon or 0) * np.abs(np.arange(-noise_range, noise_range + 1)))
        pmf = np.convolve(pmf, noise / noise.sum())
    start = -noise_range * agents
    index = np.clip(observed - start, 0, len(pmf) - 1).astype(np.int64)
    log_pmf: NDArray[np.float64] = np.log(np.maximum(pmf[index], 1e-300))
    return log_pmf
