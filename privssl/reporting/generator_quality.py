"""Quality of a generator's rows: the ``gen/*`` metrics.

The judge is a small network trained on held-out test rows, the rows that test accuracy is measured
on. So in a private run the metrics are post-processing of networks. Like test accuracy they choose
nothing. Only ``nearest_ratio`` reads training rows: in a private run unlabelled ones alone, which
no claim covers.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from generators.base import ConditionalGenerator
from generators.sampling import draw_samples
from privssl.core.rows import VECTOR, Shape, kind_of
from privssl.data.augmentations import View
from privssl.data.column_values import snap_to_columns, values_of
from privssl.data.npz import Scale
from privssl.reporting.figures import Picture, columns_figure
from privssl.runtime import randomness
from privssl.training.local_training import network_input

FEATURES = 32  # hidden units of the judge
TAUGHT = 1000  # synthetic rows to train a classifier
SAMPLES = 500  # largest number of evaluated synthetic rows; at least two of each class
REAL = 2000  # largest number of test rows for comparison
TRAINED_ON = 8000  # largest number of test rows to train the judge
BATCH = 64
LEAST_STEPS, MOST_STEPS = 400, 1000  # limits of the judge's training; 20 epochs in between
FEWEST = 20  # least test rows for any metric
TINY = 1e-9


class Judge(nn.Module):
    """A small CNN, or for vectors a small MLP, whose last hidden layer is the feature space of the
    Frechet distance."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        if kind_of(shape) is VECTOR:
            first: list[nn.Module] = [nn.Linear(shape[0], 2 * FEATURES), nn.ReLU()]
            hidden = 2 * FEATURES
        else:
            first = [
                nn.Conv2d(shape[0], 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
            ]  # fmt: skip
            height, width = (math.ceil(math.ceil(side / 2) / 2) for side in shape[1:])
            hidden = 32 * height * width
        self.features = nn.Sequential(*first, nn.Linear(hidden, FEATURES), nn.ReLU())
        self.output = nn.Linear(FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows (B, *shape) in [-1, 1] to logits (B, C)."""
        logits: Tensor = self.output(self.features(x))
        return logits


def train_judge(x: Tensor, y: Tensor, classes: int) -> Judge:
    """Train a judge on rows (N, *shape) in [-1, 1], classes (N,), reproducibly."""
    steps = max(LEAST_STEPS, min(MOST_STEPS, 20 * len(x) // BATCH))
    with randomness.seeded(randomness.stream(0, 0, "world", "judge")):
        judge = Judge(tuple(x.shape[1:]), classes)
    rng = randomness.stream(0, 0, "world", "judge's rows")
    optimiser = torch.optim.Adam(judge.parameters(), lr=2e-3, fused=True)
    for step in range(steps):
        rows = torch.randint(len(x), (BATCH,), generator=rng)
        loss = cross_entropy(judge(View("weak")(x[rows], rng)), y[rows])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.param_groups[0]["lr"] = 2e-3 * (1 - step / steps)
        optimiser.step()
    return judge.eval().requires_grad_(False)


class GeneratorQuality:
    """Metrics of a generator's lambda-0 images or vectors against held-out rows. On the CPU."""

    def __init__(
        self, x: Tensor, y: Tensor, classes: int, scales: Mapping[str, Scale] | None = None
    ) -> None:
        """Set test rows as stored (N, *shape), their classes (N,), and the columns of a table."""
        self._x, self._y, self._classes, self._scales = x, y, classes, scales
        per_class = max(2, SAMPLES // classes)
        self._labels = torch.arange(classes).repeat_interleave(per_class)

    def sample(self, generator: ConditionalGenerator) -> Tensor:
        """Generate the evaluated rows, in order of class, with fixed noise."""
        return self._draw(generator, self._labels, "judged samples")

    def _draw(self, generator: ConditionalGenerator, labels: Tensor, draw: str) -> Tensor:
        """Generate a row of each label; of a table, rows that it can have."""
        rng, shape = randomness.stream(0, 0, "world", draw), self._x.shape[1:]
        rows = draw_samples(generator, labels, self._classes, shape, rng)
        rows = rows.nan_to_num(0.0)  # the generator may have diverged
        if self._scales is None:
            return rows
        return torch.from_numpy(snap_to_columns(rows.numpy(), self._scales))

    def measure_all(
        self, generator: ConditionalGenerator, predict: Callable[[Tensor], Tensor],
        training: Sequence[Tensor], *, taught: bool,
    ) -> dict[str, float]:  # fmt: skip
        """Run :meth:`measure`, and :meth:`nearest_ratio` if training rows are given. ``taught``:
        also train a classifier on synthetic rows, which takes seconds."""
        values = self.measure(generator, predict)
        if values and taught:
            values |= self.accuracy_from_synthetic_rows(generator)
        if values and training:
            values |= self.nearest_ratio(generator, training)
        return values

    def measure(
        self, generator: ConditionalGenerator, predict: Callable[[Tensor], Tensor]
    ) -> dict[str, float]:
        """Compute all metrics but the distance to training rows; docs/synthetic_rows.md describes
        each.

        Args:
            generator: in eval mode, on the CPU.
            predict: rows (N, *shape) in [-1, 1] -> classes (N,) by the released classifier.
        """
        if len(self._x) < FEWEST:
            return {}
        reference, images = self._reference, self.sample(generator)
        with torch.no_grad():
            features = reference.judge.features(images)
            predicted = reference.judge.output(features).argmax(dim=1)
        scaled = features / reference.scale
        in_columns, unit = dict[str, float](), "pixels"
        if kind_of(tuple(images.shape[1:])) is VECTOR:
            in_columns, unit = self._compare_columns(images), "numbers"
        return in_columns | {
            "gen/right_by_classifier": _accuracy_of(predict(images), self._labels),
            "gen/right_by_judge": _accuracy_of(predicted, self._labels),
            "gen/judge_on_real_rows": reference.accuracy,
            f"gen/diversity_{unit}": _compute_spread(images, self._labels) / reference.pixels,
            "gen/diversity_features": _compute_spread(scaled, self._labels) / reference.features,
            "gen/frechet": frechet_distance(scaled, reference.seen),
        }

    def _compare_columns(self, made: Tensor) -> dict[str, float]:
        """Compare numbers of synthetic and test vectors of each class, the mean over classes."""
        real = network_input(self._x)
        pairs = [(made[self._labels == c], real[self._y == c]) for c in torch.unique(self._y)]
        pairs = [pair for pair in pairs if len(pair[1]) > 1]
        distances = [float(column_distances(*pair).mean()) for pair in pairs]
        correlations = [
            float((_correlate(first) - _correlate(second)).abs().mean()) for first, second in pairs
        ]
        return {
            "gen/column_distance": sum(distances) / max(1, len(pairs)),
            "gen/correlation_difference": sum(correlations) / max(1, len(pairs)),
        }

    def columns_picture(self, generator: ConditionalGenerator) -> dict[str, Picture]:
        """Draw the columns of synthetic and of test rows, if rows are a table's; else nothing."""
        if self._scales is None or len(self._y) < FEWEST:
            return {}
        rng = randomness.stream(0, 0, "world", "classes of columns")
        labels = self._y[torch.randint(len(self._y), (REAL,), generator=rng)]  # as in test rows
        made = self._draw(generator, labels, "columns").numpy()
        real = values_of(network_input(self._x).numpy(), self._scales)
        return {"images/columns": columns_figure(values_of(made, self._scales), real)}

    def accuracy_from_synthetic_rows(self, generator: ConditionalGenerator) -> dict[str, float]:
        """Return test accuracy of a network like the judge, trained on synthetic rows alone."""
        if len(self._x) < FEWEST:
            return {}
        labels = torch.arange(TAUGHT) % self._classes
        rows = self._draw(generator, labels, "taught rows")
        classifier = train_judge(rows, labels, self._classes)
        with torch.no_grad():
            predicted = torch.cat(
                [
                    classifier(network_input(part)).argmax(dim=1)
                    for part in torch.split(self._x, 2048)
                ]
            )
        return {"gen/accuracy_from_synthetic_rows": _accuracy_of(predicted, self._y)}

    def nearest_ratio(
        self, generator: ConditionalGenerator, training: Iterable[Tensor]
    ) -> dict[str, float]:
        """Return the median distance of synthetic rows to the nearest training row, over that of
        test rows.

        Far below 1 the generator copies training rows. ``training``: rows as stored, of one or
        several agents.
        """
        images = self.sample(generator)
        test_rows = network_input(self._x[: len(images)])
        queries = torch.cat([images, test_rows]).flatten(1)
        nearest = torch.full((len(queries),), math.inf)
        for stored in training:
            for part in torch.split(stored, 4096):
                rows = network_input(part).flatten(1)
                nearest = torch.minimum(nearest, torch.cdist(queries, rows).min(dim=1).values)
        synthetic, real = nearest[: len(images)].median(), nearest[len(images) :].median()
        return {"gen/nearest_training_row": float(synthetic / real.clamp(min=1e-12))}

    @cached_property
    def _reference(self) -> "_Reference":
        """Return judge and statistics of real rows, cached in the process by test rows."""
        digest = hashlib.sha256(self._x.numpy().tobytes() + self._y.numpy().tobytes())
        key = digest.hexdigest(), self._classes
        if key not in _KNOWN:
            _KNOWN[key] = _build_reference(self._x, self._y, self._classes)
        return _KNOWN[key]


@dataclass(frozen=True)
class _Reference:
    """The reference for synthetic rows."""

    judge: Judge
    accuracy: float  # of the judge, on held-out rows
    scale: float  # one for all features, so that a nearly constant one does not dominate
    seen: Tensor  # (N, FEATURES) scaled features of real rows
    pixels: float  # spread of real rows
    features: float


_KNOWN: dict[tuple[str, int], _Reference] = {}


def _build_reference(x: Tensor, y: Tensor, classes: int) -> _Reference:
    order = torch.randperm(len(x), generator=randomness.stream(0, 0, "world", "judge's split"))
    held_out = max(1, len(order) // 5)  # held out to evaluate the judge
    training, reference = order[held_out:][:TRAINED_ON], order[:REAL]
    judge = train_judge(network_input(x[training]), y[training], classes)
    rows = network_input(x[reference])
    with torch.no_grad():
        predicted = judge(network_input(x[order[:held_out]])).argmax(dim=1)
        features = judge.features(rows)
    scale = max(float(features.var(dim=0).sum().sqrt()), TINY)
    return _Reference(
        judge, _accuracy_of(predicted, y[order[:held_out]]), scale, features / scale,
        pixels=max(_compute_spread(rows, y[reference]), TINY),
        features=max(_compute_spread(features / scale, y[reference]), TINY),
    )  # fmt: skip


def _accuracy_of(predicted: Tensor, labels: Tensor) -> float:
    return float((predicted.cpu() == labels).float().mean())


def _compute_spread(rows: Tensor, labels: Tensor) -> float:
    """Return the root mean square distance of two rows of a class, averaged over classes with two
    rows."""
    groups = [rows[labels == c].flatten(1) for c in torch.unique(labels)]
    # E|a - b|^2 over distinct pairs = 2 n / (n - 1) * variance
    squared = [
        2 * (group - group.mean(dim=0)).square().mean() * len(group) / (len(group) - 1)
        for group in groups
        if len(group) > 1
    ]
    return float(torch.stack(squared).sqrt().mean()) if squared else 0.0


def column_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return the Kolmogorov-Smirnov distance of each number of vectors (N, F) and (M, F): (F,).

    The largest difference of the shares of values up to any point, in [0, 1]; 0: equal.
    """
    points = torch.cat([a, b]).T.contiguous()
    shares = [
        torch.searchsorted(rows.T.contiguous().sort(dim=1).values, points, right=True) / len(rows)
        for rows in (a, b)
    ]
    return (shares[0] - shares[1]).abs().amax(dim=1)


def _correlate(rows: Tensor) -> Tensor:
    """Correlations of the numbers of vectors (N, F), (F, F); 0 where one is constant."""
    return torch.corrcoef(rows.T).nan_to_num(0.0).view(rows.shape[1], -1)


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Compute the squared Frechet distance of features (N, d) as Gaussians (Heusel et al. 2017).

    |mean_a - mean_b|^2 + tr(A + B - 2 (A B)^(1/2)), A and B their covariances; 0: equal.
    """
    first, second = (t.double().numpy() for t in (a, b))
    means = first.mean(axis=0) - second.mean(axis=0)
    A, B = (np.cov(rows, rowvar=False, ddof=1) for rows in (first, second))
    root = _square_root(A)
    cross = np.linalg.eigvalsh(root @ B @ root).clip(min=0)  # similar to A B, and symmetric
    distance = means @ means + np.trace(A) + np.trace(B) - 2 * np.sqrt(cross).sum()
    return max(0.0, float(distance))


def _square_root(symmetric: NDArray[np.float64]) -> NDArray[np.float64]:
    values, vectors = np.linalg.eigh(symmetric)
    root: NDArray[np.float64] = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    return root
