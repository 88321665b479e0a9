"""(FL)^2 and SAGE: thresholds, perturbed weights, weights of agents and soft labels by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, kl_div
from torch.testing import assert_close

from privssl.algorithms.baselines.sage import soft_correction
from privssl.algorithms.fl2.algorithm import FL2, ParameterUpdate
from privssl.algorithms.fl2.settings import FL2Config
from privssl.algorithms.fl2.thresholds import adaptive_thresholds, learning_status, perturbation
from privssl.core.agents import AgentRef
from privssl.core.aggregation import average
from privssl.core.messages import Reply
from privssl.errors import ConfigError
from privssl.experiment.config import load_config
from privssl.training.evaluation import score
from tests.support.toy_worlds import (
    TOY,
    DecliningEngine,
    RecordingEngine,
    apart,
    at_clients,
    at_server,
    make,
    same_bits,
    simulate,
    through_disk,
)

CONFIGS = Path(__file__).parents[2] / "configs"
CPU = torch.device("cpu")

# (FL)^2 -------------------------------------------------------------------------------------


def test_thresholds_are_the_mean_confidence_scaled_by_the_class_mean_prediction() -> None:
    q = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1]])
    tau, by_class = adaptive_thresholds(q)
    assert tau == pytest.approx((0.6 + 0.7) / 2)  # Eq. 7
    # Eq. 8: mean prediction (0.4, 0.5, 0.1); Eq. 9: over its largest, times tau
    assert_close(by_class, torch.tensor([0.8, 1.0, 0.2]) * 0.65)
    confidence, y = q.max(dim=1)
    assert (confidence > by_class[y]).tolist() == [True, True]
    assert (confidence > tau).tolist() == [False, True]  # the control: one threshold for all


def test_weights_are_perturbed_along_the_gradient_and_adaptively_by_their_size() -> None:
    weights = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([[0.0]])}
    g = (torch.tensor([3.0, 4.0]), torch.tensor([[0.0]]))
    plain = perturbation(weights, g, 0.5, False)
    assert_close(plain["a"], torch.tensor([0.3, 0.4]))  # 0.5 (3, 4) / 5
    assert plain["b"].item() == 0
    # ASAM: T = |w| + 0.01 = (1.01, 2.01); |T g| of (3.03, 8.04)
    norm = math.hypot(3.03, 8.04)
    moved = perturbation(weights, g, 0.5, True)["a"]
    assert_close(moved, torch.tensor([0.5 * 1.01 * 3.03 / norm, 0.5 * 2.01 * 8.04 / norm]))
    zero = perturbation(weights, (torch.zeros(2), torch.zeros(1, 1)), 0.5, False)
    assert zero["a"].tolist() == [0.0, 0.0]


def test_agents_that_have_learned_less_have_larger_weights() -> None:
    replies: list[Reply[Any]] = [
        Reply(AgentRef(name, "query"), ParameterUpdate({"w": torch.tensor([w])}, tau))
        for name, w, tau in (("q0", 0.0, 0.9), ("q1", 1.0, 0.6))
    ]
    mean = average(replies, "F", otherwise={}, weight=learning_status)["w"]
    assert mean.item() == pytest.approx(0.4 / (0.1 + 0.4))  # Eq. 15
    assert average(replies, "F", otherwise={})["w"].item() == 0.5  # the control
    sure: list[Reply[Any]] = [
        Reply(reply.sender, ParameterUpdate(reply.payload.F, 1.0)) for reply in replies
    ]
    assert average(sure, "F", otherwise={}, weight=learning_status)["w"].item() == 0.5


@pytest.mark.parametrize("moving", [True, False])
def test_the_loss_is_that_of_learned_rows_and_the_divergence_from_perturbed_weights(
    moving: bool,
) -> None:
    algorithm: FL2 = make("fl2", radius=0.3, moving_target=moving, perturbation="sam")  # type: ignore[assignment]
    F = nn.Sequential(nn.Flatten(), nn.Linear(2, 3))
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0], [-2.0, 0.3]]).view(3, 1, 1, 2)
    y = torch.tensor([0, 2, 1])
    learned, sure = torch.tensor([True, True, False]), torch.tensor([False, True, True])
    found = algorithm._compute_loss(F, x, y, learned, sure)
    names = [name for name, _ in F.named_parameters()]
    g = torch.autograd.grad(cross_entropy(F(x[1:]), y[1:]), list(F.parameters()))
    length = math.sqrt(sum(float(part.square().sum()) for part in g))
    at = {n: p + 0.3 * part / length for n, p, part in zip(names, F.parameters(), g, strict=True)}
    Q = functional_call(F, at, (x[1:],)).softmax(dim=1)
    Q = Q if moving else Q.detach()
    expected = cross_entropy(F(x[:2]), y[:2]) + kl_div(
        F(x[1:]).log_softmax(dim=1), Q, reduction="batchmean"
    )
    assert_close(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, list(F.parameters())),
        torch.autograd.grad(expected, list(F.parameters())),
        strict=True,
    ):
        assert_close(mine, theirs)
    # the control: the radius matters, and without confident rows nothing is perturbed
    assert bool(found > cross_entropy(F(x[:2]), y[:2]))
    none = algorithm._compute_loss(F, x, y, learned, sure & False)
    assert_close(none, cross_entropy(F(x[:2]), y[:2]))


def test_the_servers_step_has_momentum_and_the_server_trains_first_and_last() -> None:
    algorithm = make("fl2", global_momentum=0.5, local_epochs=1, sure_above=0.1)
    after = simulate(algorithm, at_server(), 2, engine=RecordingEngine)
    assert isinstance(after.engine, RecordingEngine)
    steps = [call.step.__name__ for call, _ in after.engine.recorded]
    assert steps[0] == steps[-1] == "support_pass"
    before = simulate(algorithm, at_server(), 1).state
    recorded = after.engine.recorded[2:]  # of round 2; the second half is that of round 1
    sent = [reply for call, reply in after.engine.recorded if call.step.__name__ == "query_pass"][
        2:
    ]
    mean = average(sent, "F", otherwise={}, weight=learning_status)
    v = {name: 0.5 * before.velocity[name] + (before.F[name] - w) for name, w in mean.items()}
    assert apart(after.state.velocity, v) < 1e-6
    tuned = recorded[-1][0].message.F  # the server continues from this
    assert apart(tuned, {name: before.F[name] - step for name, step in v.items()}) < 1e-6
    assert apart(tuned, mean) > 1e-4  # the control: the mean itself


def test_a_round_without_replies_changes_nothing_despite_momentum() -> None:
    algorithm = make("fl2", local_epochs=1, sure_above=0.1)
    begun = simulate(algorithm, at_server(), 1)
    silent = simulate(
        algorithm, at_server(), 2, engine=DecliningEngine, resume=through_disk(begun, 1)
    )
    # or it is no control
    assert max(float(v.abs().max()) for v in begun.state.velocity.values()) > 1e-4
    assert same_bits(begun.state, silent.state)


@pytest.mark.slow
def test_each_part_of_fl2_can_be_disabled_and_changes_the_result() -> None:
    whole: dict[str, Any] = {"local_epochs": 1, "sure_above": 0.12, "radius": 0.5}
    changes: tuple[dict[str, Any], ...] = (
        {"adaptive": False}, {"consistency_weight": 0.0}, {"aggregation": "equal"},
        {"perturbation": "sam"}, {"moving_target": False}, {"schedule": "factor"},
    )  # fmt: skip
    reference = simulate(make("fl2", **whole), at_server(), 2).state
    for change in changes:
        assert not same_bits(
            reference, simulate(make("fl2", **whole, **change), at_server(), 2).state
        )


@pytest.mark.parametrize(("clip", "step"), [(0.01, 0.01), (None, None)])
def test_a_step_of_fl2_is_as_long_as_the_clipped_gradient(
    clip: float | None, step: float | None
) -> None:
    algorithm = make(
        "fl2", clip_gradients=clip, learning_rate=1.0, schedule="factor", local_epochs=1,
        server_batch_size=100, batch_size=100, momentum=0.0, nesterov=False, weight_decay=0.0,
        sure_above=0.1, consistency_weight=0.0,
    )  # fmt: skip
    after = simulate(algorithm, at_server(), 1, engine=RecordingEngine)
    assert isinstance(after.engine, RecordingEngine)
    for call, reply in after.engine.recorded:
        moved = [reply.payload.F[name] - call.message.F[name] for name in reply.payload.F]
        length = math.sqrt(sum(float(part.square().sum()) for part in moved))
        assert length == pytest.approx(step, rel=1e-3) if step else length > 0.1


def test_settings_of_fl2_without_effect_are_refused() -> None:
    def keys(**settings: Any) -> list[str]:
        return [problem.key for problem in FL2Config(**settings).problems()]

    assert keys() == []
    assert keys(learning_rate_decay=0.9) == ["learning_rate_decay"]
    assert keys(learning_rate_decay=0.9, schedule="factor") == []
    assert keys(momentum=0.0) == ["nesterov"]
    with pytest.raises(ConfigError, match=r"fl2 does not average. Set group"):
        load_config(CONFIGS / "fl2.yaml", ["model.norm=batch"])


# SAGE ---------------------------------------------------------------------------------------


def test_the_weight_of_local_pseudo_labels_halves_at_a_confidence_gap_of_five_percent() -> None:
    # local and global: alike; 0.05 apart; 0.15 apart; local unsure, global sure; none sure
    local = probabilities((0, 0.97), (0, 0.98), (0, 0.99), (0, 0.5), (1, 0.6))
    world = probabilities((1, 0.97), (1, 0.93), (1, 0.84), (2, 0.96), (2, 0.6))
    target, used = soft_correction(local, world, 0.95, 0.05)
    assert_close(
        target,
        torch.tensor(
            [[1.0, 0, 0], [0.5, 0.5, 0], [0.125, 0.875, 0], [0, 0, 1.0], [0, 0, 1.0]]
        ),
        atol=1e-5, rtol=0,
    )  # fmt: skip
    assert used.tolist() == [True, True, True, True, False]
    mine, sure = soft_correction(local, world, 0.95, 0.05, "local")  # the controls
    assert (mine.argmax(dim=1).tolist(), sure.tolist()) == (
        [0, 0, 0, 0, 1],
        [True] * 3 + [False] * 2,
    )
    theirs, sure = soft_correction(local, world, 0.95, 0.05, "global")
    assert theirs.argmax(dim=1).tolist() == [1, 1, 1, 2, 2]
    assert sure.tolist() == [True, False, False, True, False]


def probabilities(*rows: tuple[int, float]) -> Tensor:
    p = torch.stack([torch.full((3,), (1 - largest) / 2) for _, largest in rows])
    for row, (where, largest) in enumerate(rows):
        p[row, where] = largest
    return p


def test_before_the_first_step_both_models_agree_and_later_they_differ() -> None:
    settings: dict[str, Any] = {"threshold": 0.0, "local_epochs": 1, "batch_size": 100}
    one = simulate(make("sage", **settings), at_clients(), 1)  # a single batch: no step before it
    assert one.federation.mean_metrics()["train/gap"] == 0.0
    more = simulate(make("sage", **(settings | {"batch_size": 5})), at_clients(), 1)
    assert more.federation.mean_metrics()["train/gap"] > 0.0


def test_labelled_rows_also_have_pseudo_labels_by_default() -> None:
    settings: dict[str, Any] = {"threshold": 0.0, "local_epochs": 1, "batch_size": 20}
    with_them, without = (
        simulate(make("sage", labelled_too=too, **settings), at_clients(), 1).state
        for too in (True, False)
    )
    assert not same_bits(with_them, without)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "settings", "parties"),
    [
        ("fl2", {"learning_rate": 0.05, "batch_size": 10}, at_server),
        ("sage", {"threshold": 0.9, "learning_rate": 0.1, "batch_size": 10}, at_clients),
    ],
)
def test_toy_rows_are_learned(name: str, settings: dict[str, Any], parties: Any) -> None:
    algorithm = make(
        name, rounds=10, local_epochs=2, weak="weak", strong="strong", momentum=0.9, **settings
    )
    after = simulate(algorithm, parties(labelled=100), 10)
    network = algorithm.task.new_classifier()
    reached = score(network, after.classifier, TOY.x_test, TOY.y_test, device=CPU).accuracy
    assert reached > 0.6  # by seed and rounding 0.78 to 0.99; chance is 0.1
