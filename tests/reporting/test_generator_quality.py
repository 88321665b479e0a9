"""``gen/*``: each number by arithmetic, and faulty generators that each of them must detect."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from torch import Tensor

from generators.base import ConditionalGenerator
from generators.sampling import draw_samples
from privssl.data.npz import Scale
from privssl.reporting import generator_quality
from privssl.reporting.generator_quality import (
    _KNOWN,
    FEWEST,
    GeneratorQuality,
    column_distances,
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

    def __init__(
        self, rows: Tensor, labels: Tensor, spread: int, shift: int = 0, classes: int = CLASSES
    ) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        of_class = [network_input(rows[labels == c]) for c in range(classes)]
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


# Vectors and tables -------------------------------------------------------------------------

SCALES: dict[str, Scale] = {"size": (0.0, 10.0), "weight": (0.0, 1.0), "colour": ("red", "green")}


def lines_of_a_table(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows (N, 4) of three classes, and the classes: size goes with weight, colour with class 0."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    size = 0.3 * torch.randn(count, generator=rng) + 0.4 * (y - 1)
    weight = size + 0.05 * torch.randn(count, generator=rng)
    colour = 2.0 * (torch.rand(count, generator=rng) < torch.where(y == 0, 0.9, 0.2)) - 1
    return torch.stack([size, weight, colour, -colour], dim=1).clamp(-1, 1), y


class OfTable(Bank):
    """As ``Bank``, of another number of classes; ``apart``: each number from another row."""

    def __init__(
        self, rows: Tensor, labels: Tensor, apart: bool = False, move: float = 0.0
    ) -> None:
        super().__init__(rows, labels, spread=10**6, classes=3)
        self.apart, self.move, self.noise_size = apart, move, rows.shape[1]

    def forward(self, x: Tensor, p: Tensor, p_target: Tensor, z: Tensor, lam: Tensor) -> Tensor:
        draws = z if self.apart else z[:, :1].expand(-1, z.shape[1])
        picked = (draws * self.rows.shape[1]).long()  # (B, F)
        wanted = p_target.argmax(dim=1)[:, None]
        numbers = torch.arange(z.shape[1])
        return self.rows[wanted, picked, numbers][:, None] + self.move


@pytest.fixture(scope="module")
def of_table(few_steps: None) -> GeneratorQuality:
    return GeneratorQuality(*lines_of_a_table(900, 0), 3, SCALES)


def test_lines_of_a_table_are_judged_by_class_diversity_columns_and_their_relations(
    of_table: GeneratorQuality,
) -> None:
    rows, labels = lines_of_a_table(900, 1)
    good = measured(of_table, OfTable(rows, labels))
    assert good["gen/right_by_judge"] == pytest.approx(good["gen/judge_on_real_rows"], abs=0.1)
    assert good["gen/diversity_numbers"] == pytest.approx(1.0, abs=0.1)
    assert "gen/diversity_pixels" not in good
    assert good["gen/column_distance"] < 0.12 and good["gen/correlation_difference"] < 0.1
    # The same numbers, each of another row: only relations are wrong.
    apart = measured(of_table, OfTable(rows, labels, apart=True))
    assert apart["gen/column_distance"] < 0.15
    assert apart["gen/correlation_difference"] > 2 * good["gen/correlation_difference"]
    # All numbers a little larger: only the columns are wrong.
    moved = measured(of_table, OfTable(rows, labels, move=0.3))
    assert moved["gen/column_distance"] > good["gen/column_distance"] + 0.1
    assert moved["gen/correlation_difference"] < 0.15


def test_of_a_table_rows_are_judged_as_lines_that_it_can_have(of_table: GeneratorQuality) -> None:
    made = of_table.sample(OfTable(*lines_of_a_table(900, 1), move=0.3))
    assert float(made.max()) == 1.0 and set(made[:, 2:].flatten().tolist()) == {-1.0, 1.0}
    plain = GeneratorQuality(*lines_of_a_table(900, 0), 3)  # the control: vectors of no table
    assert float(plain.sample(OfTable(*lines_of_a_table(900, 1), move=0.3)).max()) > 1.0


def test_a_picture_shows_the_columns_of_a_table_and_there_is_none_of_other_rows(
    of_table: GeneratorQuality, quality: GeneratorQuality
) -> None:
    good, moved = (
        of_table.columns_picture(OfTable(*lines_of_a_table(900, 1), move=move))["images/columns"]
        for move in (0.0, 0.3)
    )
    assert good.ndim == 3 and good.dtype == np.uint8 and not np.array_equal(good, moved)
    few = GeneratorQuality(*lines_of_a_table(FEWEST - 1, 0), 3, SCALES)
    assert few.columns_picture(OfTable(*lines_of_a_table(900, 1))) == {}
    assert quality.columns_picture(Bank(PIXELS, LABELS, spread=5)) == {}


def test_the_distance_of_columns_is_that_of_kolmogorov_and_smirnov() -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(70, 3, generator=rng), torch.randn(110, 3, generator=rng) * 2 + 0.5
    a[:, 2], b[:, 2] = (a[:, 2] > 0).float(), (b[:, 2] > 0).float()  # with equal values
    expected = ks_2samp(a.numpy(), b.numpy(), axis=0, method="asymp").statistic
    assert column_distances(a, b).numpy() == pytest.approx(expected, abs=1e-6)
    assert column_distances(a, a).tolist() == [0, 0, 0]


# --------------------------------------------------------------------------------------------


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
