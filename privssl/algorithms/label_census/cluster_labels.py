"""What class a cluster has, told by a noisy histogram whose noise law is public.

The server sees H[k, c] = n[k, c] + noise, where n counts the labelled rows of class c in cluster k.
Model: cluster k has one main class, and of its labelled rows a share ``purity`` is of that class,
while the rest is spread over the other classes evenly. How many labelled rows it has is expected
and not looked up: all labelled rows (a public number) times the cluster's share of unlabelled
rows. Counts are Poisson around that; noise is one two-sided geometric draw per support agent.
Clusters that lie side by side tend to be of one class (a Potts model on the graph of borders), and
classes to be equally frequent.

All of it is post-processing of H and of what query agents sent: it reads no label and is free.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FAR = 6.0  # log odds of 400: bound of a class's prior; standard deviations that are no chance
STEPS = 120  # towards the prior; some tens are enough
MEAN_FIELD = 20  # steps of clusters listening to their neighbours
WIDE = 4000  # expected count and reach of all noise above which a normal law stands for both
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
        purity: in (1 / C, 1); below that, few votes would speak for a class.
        balanced: whether all classes are expected to have the same share of unlabelled rows.
        borders: (K, K) how many unlabelled rows lie between two clusters; its diagonal is not
            looked at. None: clusters know nothing of each other.
        coupling: log odds that a cluster takes over from neighbours who are all sure.
    """
    clusters, classes = histogram.shape
    scores = torch.zeros(clusters, classes, dtype=torch.float64)
    noise = 0.0 if epsilon is None else agents * _noise_variance(epsilon)
    for k in range(clusters):
        seen = histogram[k].numpy().astype(np.float64)
        expected = max(float(mass[k]) * labels, 1e-6)
        if seen.max() > expected + FAR * np.sqrt(expected + noise):
            expected = float(seen.max())  # labels are not spread as rows are: that much is plain
        high = _log_law(seen, expected * purity, epsilon, agents)
        low = _log_law(seen, expected * (1 - purity) / (classes - 1), epsilon, agents)
        scores[k] = torch.from_numpy(high - low)
    shares = mass.double() if balanced else None
    posterior, prior = _posterior(scores, shares, torch.zeros(classes, dtype=scores.dtype), STEPS)
    if borders is not None and coupling:
        beside = borders.double().clone().fill_diagonal_(0)
        beside = beside / beside.sum(dim=1, keepdim=True).clamp(min=1)  # (K, K), rows sum to 1
        for _ in range(MEAN_FIELD):  # naive mean field, damped
            pulled = scores + coupling * (beside @ posterior)
            again, prior = _posterior(pulled, shares, prior, STEPS // MEAN_FIELD)
            posterior = (posterior + again) / 2
    return posterior.float()


def class_given_cluster(posterior: Tensor, purity: float) -> Tensor:
    """Probability of each class for a row of which only its cluster is known (K, C).

    Args:
        posterior: of each class to be the cluster's main class (K, C), rows sum to 1.
        purity: share of a cluster's rows that are of its main class; others are spread evenly.
    """
    other = (1 - purity) / (posterior.shape[1] - 1)
    return other + (purity - other) * posterior


def _posterior(
    scores: Tensor, mass: Tensor | None, prior: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Posterior (K, C), and the log prior of classes (C,) under which it is balanced.

    The prior is moved from the given one as in Sinkhorn's algorithm until every class has the same
    mass of rows; ``FAR`` bounds it, so that a class without any sign of a cluster is not given one
    by force. Without ``mass`` it stays as it is.
    """
    for _ in range(steps if mass is not None else 0):
        assert mass is not None
        share = (mass[:, None] * (scores + prior).softmax(dim=1)).sum(dim=0)  # (C,)
        prior = prior - 0.5 * (len(prior) * share).clamp(min=1e-6).log()
        prior = (prior - prior.mean()).clamp(-FAR, FAR)
    return (scores + prior).softmax(dim=1), prior


def _noise_variance(epsilon: float) -> float:
    """Of one two-sided geometric draw: 2 e^-epsilon / (1 - e^-epsilon)^2."""
    return float(2 * np.exp(-epsilon) / np.expm1(-epsilon) ** 2)


def _log_law(
    seen: NDArray[np.float64], mean: float, epsilon: float | None, agents: int
) -> NDArray[np.float64]:
    """log P(count + noise = seen), count Poisson with this mean.

    Exact where the noise is short; where it is wide, or of many agents, it is nearly normal.
    Numbers beyond what it can be are taken for the last that it can.
    """
    wide = 0 if epsilon is None else int(np.ceil(-np.log(TAIL) / epsilon))
    if mean + agents * wide > WIDE:
        variance = mean + (0.0 if epsilon is None else agents * _noise_variance(epsilon))
        normal: NDArray[np.float64] = -np.square(seen - mean) / (2 * variance)
        return np.asarray(normal - np.log(variance) / 2)
    counts = np.arange(int(mean + 12 * np.sqrt(mean) + 30))
    from scipy.special import gammaln  # here: runs of other algorithms need none of scipy

    law = np.exp(counts * np.log(mean) - mean - gammaln(counts + 1))
    for _ in range(agents if epsilon is not None else 0):
        noise = np.exp(-float(epsilon or 0) * np.abs(np.arange(-wide, wide + 1)))
        law = np.convolve(law, noise / noise.sum())
    start = -wide * agents
    place = np.clip(seen - start, 0, len(law) - 1).astype(np.int64)
    logs: NDArray[np.float64] = np.log(np.maximum(law[place], 1e-300))
    return logs
