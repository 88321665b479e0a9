"""``gen/*``: each number by arithmetic, and faulty generators that each of them must detect."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from generators.base import ConditionalGenerator
from generators.sampling import draw_samples
from privssl.reporting import generator_quality
from privssl.reporting.generator_quality import (
    _KNOWN,
    FEWEST,
    GeneratorQuality,
    frechet_distance,
    train_judge,
)
from privssl.training.local_training import network_input
from tests.support.toy_worlds import TOY

pytestmark = pytest.mark.usefixtures("costs_of_users_in_file", "few_steps")

CLASSES = 10
PIXELS, LABELS = TOY.x_test, TOY.y_test


class Bank(ConditionalGenerator):
    """A generator that returns stored rows of the requested class, ``spread`` of them, selected by
    the noise.
    """

    noise_size = 1

    def __init__(self, rows: Tensor, labels: Tensor, spread: int, shift: int = 0) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        of_class = [network_input(rows[labels == c]) for c in range(CLASSES)]
        self.rows = torch.stack([some[: min(map(len, of_class))] for some in of_class])
        self.spread, self.shift = spread, shift

    def forward(self, x: Tensor, p: Tensor, p_target: Tensor, z: Tensor, lam: Tensor) -> Tensor:
        picked = (z[:, 0] * min(self.spread, self.rows.shape[1])).long()
        wanted = (p_target.argmax(dim=1) + self.shift) % CLASSES
        return self.rows[wanted, picked][:, None] * self.scale


@pytest.fixture(scope="module")
def few_steps(costs_of_users_in_file: None) -> Iterator[None]:
    """A quarter of the usual steps is enough for toy rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator_quality, "LEAST_STEPS", 100)
        patch.setattr(generator_quality, "MOST_STEPS", 100)
        yield


@pytest.fixture(scope="module")
def quality(few_steps: None) -> GeneratorQuality:
    return GeneratorQuality(PIXELS, LABELS, CLASSES)


def measured(quality: GeneratorQuality, generator: ConditionalGenerator) -> dict[str, float]:
    judge = quality._reference.judge  # a classifier as accurate as the judge
    return quality.measure(generator, lambda x: judge(x).argmax(dim=1))


def test_real_rows_are_classified_correctly_and_as_diverse_as_real_rows(
    quality: GeneratorQuality,
) -> None:
    found = measured(quality, Bank(TOY.x_train, TOY.y_train, spread=1000))
    assert found["gen/right_by_judge"] == found["gen/right_by_classifier"]
    assert found["gen/right_by_judge"] >= found["gen/judge_on_real_rows"] - 0.05 > 0.8
    assert found["gen/diversity_pixels"] == pytest.approx(1.0, abs=0.1)
    assert found["gen/diversity_features"] == pytest.approx(1.0, abs=0.2)
    assert found["gen/frechet"] < 0.05


def test_one_picture_per_class_is_classified_correctly_but_not_diverse(
    quality: GeneratorQuality,
) -> None:
    found = measured(quality, Bank(TOY.x_train, TOY.y_train, spread=1))
    assert max(found["gen/diversity_pixels"], found["gen/diversity_features"]) < 1e-5
    diverse = measured(quality, Bank(TOY.x_train, TOY.y_train, spread=1000))
    assert found["gen/frechet"] > 2 * diverse["gen/frechet"]


def test_rows_of_the_wrong_class_are_diverse_but_not_classified_correctly(
    quality: GeneratorQuality,
) -> None:
    found = measured(quality, Bank(TOY.x_train, TOY.y_train, spread=1000, shift=1))
    assert found["gen/right_by_judge"] < 0.1
    assert found["gen/diversity_pixels"] == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
def test_a_classifier_learns_the_classes_from_synthetic_rows(
    quality: GeneratorQuality,
) -> None:
    right, wrong = (
        quality.accuracy_from_synthetic_rows(
            Bank(TOY.x_train, TOY.y_train, spread=1000, shift=shift)
        )["gen/accuracy_from_synthetic_rows"]
        for shift in (0, 1)
    )
    assert right > 0.8 and wrong < 0.1
    few = GeneratorQuality(PIXELS[: FEWEST - 1], LABELS[: FEWEST - 1], CLASSES)
    assert few.accuracy_from_synthetic_rows(Bank(PIXELS, LABELS, 5)) == {}


def test_copies_of_training_rows_are_detected_and_test_rows_are_no_copies(
    quality: GeneratorQuality,
) -> None:
    held = [TOY.x_train[:300], TOY.x_train[300:]]
    copied = quality.nearest_ratio(Bank(TOY.x_train, TOY.y_train, spread=1000), held)
    honest = quality.nearest_ratio(Bank(PIXELS, LABELS, spread=1000), held)
    assert copied["gen/nearest_training_row"] < 0.01
    assert honest["gen/nearest_training_row"] == pytest.approx(1.0, abs=0.1)


def test_the_metrics_are_reproducible_and_a_diverged_generator_stops_no_run(
    quality: GeneratorQuality,
) -> None:
    good = Bank(TOY.x_train, TOY.y_train, spread=5)
    assert measured(quality, good) == measured(GeneratorQuality(PIXELS, LABELS, CLASSES), good)
    changed = GeneratorQuality(255 - PIXELS, LABELS, CLASSES)  # other test rows: another judge
    assert measured(quality, good) != measured(changed, good)
    assert len(_KNOWN) >= 2
    broken = Bank(TOY.x_train, TOY.y_train, spread=5)
    broken.scale.data.fill_(math.nan)
    found = measured(quality, broken)
    assert all(math.isfinite(value) for value in found.values())
    assert found["gen/diversity_pixels"] == 0.0


def test_too_few_test_rows_give_no_metrics() -> None:
    few = GeneratorQuality(PIXELS[: FEWEST - 1], LABELS[: FEWEST - 1], CLASSES)
    assert few.measure(Bank(PIXELS, LABELS, 5), lambda x: x) == {}


@pytest.mark.slow
def test_a_judge_is_reproducible_and_does_not_use_the_global_generator() -> None:
    before = torch.get_rng_state()
    first, again = (train_judge(network_input(PIXELS), LABELS, CLASSES) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, first.state_dict().values(), again.state_dict().values()))


def test_the_frechet_distance_is_that_of_gaussians() -> None:
    # Equal covariances: the squared distance of means. Diagonal ones: of standard deviations too.
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(500, 3, generator=rng, dtype=torch.float64)
    assert frechet_distance(a, a) == pytest.approx(0.0, abs=1e-9)
    assert frechet_distance(a, a + torch.tensor([3.0, 0.0, 4.0])) == pytest.approx(25.0)
    trace = float(a.var(dim=0).sum())
    moved = float((a.mean(dim=0) - 2 * a.mean(dim=0)).square().sum())
    assert frechet_distance(a, 2 * a) == pytest.approx(trace + moved)  # (2 s - s)^2 summed


def test_samples_have_the_requested_classes_and_depend_on_the_seed() -> None:
    generator = Bank(PIXELS, LABELS, spread=1000)
    labels = torch.tensor([3, 3, 7])
    first, again, other = (
        draw_samples(generator, labels, CLASSES, (1, 8, 8), torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert all(
        bool((row == generator.rows[c]).flatten(1).all(1).any())
        for row, c in zip(first, labels.tolist(), strict=True)
    )
    assert len(draw_samples(generator, labels[:0], CLASSES, (1, 8, 8), torch.Generator())) == 0
