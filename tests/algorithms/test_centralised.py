"""Pi-Model, Mean Teacher and ReMixMatch: their equations by hand, and the released weights."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from privssl.algorithms.baselines.centralised import update_teacher
from privssl.algorithms.baselines.mean_teacher import (
    MeanTeacherConfig,
    PiModelConfig,
    ramp_up_weight,
    squared_difference,
)
from privssl.algorithms.baselines.remixmatch import align
from privssl.core.agents import LabelledRows, UnlabelledRows
from privssl.core.task import Context
from privssl.errors import ConfigError
from privssl.runtime.randomness import stream
from privssl.training.mixup import local_mixup
from privssl.training.rotation import rotate
from tests.support.toy_worlds import at_clients, make, same_bits, simulate

# Equations -----------------------------------------------------------------------------------


def test_the_ramp_up_is_that_of_laine_and_aila() -> None:
    assert ramp_up_weight(1, 80) == pytest.approx(math.exp(-5))
    assert ramp_up_weight(41, 80) == pytest.approx(math.exp(-5 / 4))
    assert [ramp_up_weight(round_number, 80) for round_number in (81, 500)] == [1.0, 1.0]
    assert ramp_up_weight(1, 0) == 1.0


def test_the_consistency_loss_is_the_mean_over_classes_of_squared_differences() -> None:
    p, q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.5, 0.1, 0.4]])
    found = squared_difference(p.log(), q.log())
    assert found.tolist() == pytest.approx([(0.2**2 + 0.1**2 + 0.3**2) / 3])
    assert float(squared_difference(p.log(), p.log() + 3.0)) == pytest.approx(0.0, abs=1e-7)


def test_the_teachers_weights_and_statistics_are_moving_averages() -> None:
    teacher, F = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
    for name, (kept, new) in {"weight": (1.0, 3.0), "running_mean": (0.0, 8.0)}.items():
        nn.init.constant_(getattr(teacher, name), kept)
        nn.init.constant_(getattr(F, name), new)
    F.num_batches_tracked = torch.tensor(5)
    update_teacher(teacher, F, 0.75)
    assert (teacher.weight.item(), teacher.running_mean.item()) == (1.5, 2.0)  # type: ignore[union-attr]
    assert int(teacher.num_batches_tracked) == 5  # type: ignore[arg-type]


def test_the_decay_of_mean_teacher_is_smaller_in_the_ramp_up() -> None:
    assert [MeanTeacherConfig(ramp_up=80).decay(t) for t in (1, 80, 81)] == [0.99, 0.99, 0.999]
    assert PiModelConfig().decay(1) == 0.0


def test_predictions_are_aligned_with_the_label_distribution() -> None:
    q, known = torch.tensor([[0.6, 0.4], [0.1, 0.9]]), torch.tensor([0.5, 0.5])
    predicted = torch.tensor([0.2, 0.8])
    by_hand = []
    for first, second in q.tolist():
        a, b = first * 0.5 / 0.2, second * 0.5 / 0.8
        by_hand.append([a / (a + b), b / (a + b)])
    assert_close(align(q, known, predicted), torch.tensor(by_hand), rtol=1e-4, atol=1e-5)
    assert_close(align(q, predicted, predicted), q)  # the control: nothing to align
    assert align(q, known, torch.tensor([1.0, 0.0])).isfinite().all()


def test_the_mixing_factor_is_at_least_one_half() -> None:
    x, p = torch.arange(64.0)[:, None], torch.eye(64)
    mixed, labels = local_mixup(x, p, 0.75, stream(0, 0, "world", "mix"), towards_first=True)
    own = labels.diagonal()
    assert bool((own >= 0.5).all()) and float(own.min()) < 0.7  # some are near one half
    assert_close(mixed[:, 0], labels @ x[:, 0])


# Losses --------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Logits that are the row itself, plus a parameter."""

    def __init__(self, plus: float = 0.0) -> None:
        super().__init__()
        self.plus = plus

    def forward(self, x: Tensor) -> Tensor:
        logits = x.flatten(1).clone()
        logits[:, 0] += self.plus
        return logits


def first_loss(name: str, teacher: float, **settings: Any) -> float:
    """The loss of one labelled and one unlabelled row of ten numbers, without views."""
    method: Any = make(name, rows="vector", weak="none", ramp_up=0, steps_of="labelled", **settings)
    x = torch.linspace(-1, 1, 20).view(2, 10)
    labelled = LabelledRows(x[:1], torch.tensor([3]), torch.tensor([0]))
    unlabelled = UnlabelledRows(x[1:], torch.tensor([1]))
    ctx = Context(0, 1, "m0", "1/m0/mixed_pass/1", "attempt", torch.device("cpu"))
    return float(next(method.losses(Fixed(), Fixed(teacher), labelled, unlabelled, {}, ctx)))


def predictions(plus: float) -> Tensor:
    p: Tensor = Fixed(plus)(torch.linspace(-1, 1, 20).view(2, 10)).softmax(dim=1)
    return p


def test_mean_teacher_compares_with_the_teacher_and_the_pi_model_with_itself() -> None:
    known = -math.log(float(predictions(0.0)[0, 3]))
    difference = (predictions(0.0) - predictions(2.0)).square().mean().item()
    weight = {"consistency_weight": 7.0}
    assert first_loss("mean_teacher", 2.0, **weight) == pytest.approx(known + 7 * difference)
    assert first_loss("pi_model", 2.0, **weight) == pytest.approx(known)  # no views, no dropout


def test_remixmatch_adds_up_mixed_rows_and_the_first_strong_view() -> None:
    settings = {"strong": "none", "strong_views": 1, "mix_alpha": 1e-9}  # every mix equals its row
    p = predictions(0.0)
    known = torch.eye(10)[3]
    aligned = (p[1] * (known + 1e-6) / (p[1] + 1e-6)).double()
    q = (aligned / aligned.sum()).square()
    q = q / q.sum()
    of_mixed = -(q * p[1].log()).sum()  # of the strong and the weak view, which are equal
    expected = -math.log(float(p[0, 3])) + 1.5 * float(of_mixed) + 0.5 * float(of_mixed)
    assert first_loss("remixmatch", 0.0, **settings) == pytest.approx(expected, rel=1e-4)


class Corner(nn.Module):
    """Logits by a linear layer from the four pixels of a 2x2 image."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits


def test_rows_are_rotated_by_quarter_turns() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).expand(4, 1, 2, 2)
    turned = rotate(x, torch.arange(4)).flatten(1).tolist()
    assert turned == [[1, 2, 3, 4], [2, 4, 1, 3], [4, 3, 2, 1], [3, 1, 4, 2]]


def test_remixmatch_predicts_the_rotation_from_features_and_its_head_learns() -> None:
    method: Any = make("remixmatch", rotation_weight=0.5)
    x, memory = torch.linspace(-1, 1, 12).view(3, 1, 2, 2), dict[str, Tensor]()
    F, turns = Corner(), torch.randint(4, (3,), generator=stream(0, 0, "world", "turns"))

    def loss() -> float:
        found = method._compute_rotation_loss(F, x, memory, stream(0, 0, "world", "turns"), 0.1)
        return float(found.detach())

    assert loss() == pytest.approx(math.log(4))  # the head starts at zero
    # Gradient of the mean cross-entropy at zero: (1/4 - one-hot) outer features.
    seen = rotate(x, turns).flatten(1)
    by_hand = (0.25 - torch.eye(4)[turns]).T @ seen / 3
    assert_close(memory["rotation head"], -0.1 * by_hand)
    assert loss() < math.log(4)  # by the same rotations


def test_the_rotation_loss_trains_the_features_and_is_refused_for_rows_that_are_no_images() -> None:
    def played(weight: float) -> Any:
        quick: dict[str, Any] = {"local_epochs": 1, "strong": "strong", "steps_of": "labelled"}
        return simulate(make("remixmatch", rotation_weight=weight, **quick), at_clients(), 2)

    with_it, without = played(0.5), played(0.0)
    assert not same_bits(with_it.state.F, without.state.F)
    assert with_it.engine.memories()["m0"]["rotation head"].shape[0] == 4
    assert "rotation head" not in without.engine.memories()["m0"]
    with pytest.raises(ConfigError, match="needs square images"):
        make("remixmatch", rows="vector", rotation_weight=0.5)


# Rounds --------------------------------------------------------------------------------------


def test_the_pi_model_releases_the_network_and_mean_teacher_the_average() -> None:
    def played(name: str, **settings: Any) -> Any:
        method = make(name, local_epochs=1, steps_of="labelled", **settings)
        return simulate(method, at_clients(), 1)

    plain = played("pi_model")
    assert same_bits(plain.classifier, plain.state.F)
    taught = played("mean_teacher", teacher_decay=0.9)
    assert not same_bits(taught.classifier, taught.state.F)
    assert same_bits(taught.classifier, taught.state.teacher)


def test_predictions_of_former_rounds_are_kept_for_the_alignment() -> None:
    method = make(
        "remixmatch", local_epochs=1, strong_views=1, strong="strong", steps_of="labelled"
    )
    after = simulate(method, at_clients(), 2)
    steps = after.engine.memories()["m0"]["means"]
    assert steps.shape[1] == 10 and len(steps) == 2 * 2  # two rounds of two batches
    assert_close(steps.sum(dim=1), torch.ones(len(steps)))
