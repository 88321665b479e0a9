"""Supervise, Pseudo and MixMatch, and the average over two groups that they share with FedSSL."""

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch.testing import assert_close

from privssl.algorithms import ALGORITHMS
from privssl.algorithms.baselines.fedssl_baselines import TeacherRequest
from privssl.algorithms.local_ssl import (
    ClassifierTraining,
    ModelUpdate,
    average_groups,
    one_hot_labels,
)
from privssl.core.agents import AgentRef, LabelledRows
from privssl.core.messages import Declined, Reply
from privssl.data.augmentations import View
from tests.support.toy_worlds import RecordingEngine, federated_data, make, same_bits, simulate

# Line 9 of Algorithm 1 ----------------------------------------------------------------------

NOBODY = {"w": torch.tensor([-1.0])}


def reply(sender: str, value: float | None, weight: float = 1.0) -> Reply[Any]:
    content = Declined("no") if value is None else ModelUpdate({"w": torch.tensor([value])})
    return Reply(AgentRef(sender, "query"), content, weight)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("half", 1 / 2 * 6 + 1 / 2 * (0 + 3 + 9) / 3),  # Eq. 1: one support agent, three query
        ("rows", (10 * 6 + 30 * 0 + 20 * 3 + 40 * 9) / 100),
        ("equal", (6 + 0 + 3 + 9) / 4),
    ],
)
def test_the_two_groups_are_averaged_as_configured(
    weights: Literal["half", "rows", "equal"], expected: float
) -> None:
    support = [reply("s0", 6.0, 10)]
    query = [reply("q0", 0.0, 30), reply("q1", 3.0, 20), reply("q2", 9.0, 40)]
    mean = average_groups(weights, support, query, "F", otherwise=NOBODY)
    assert_close(mean["w"], torch.tensor([expected]))


def test_agents_without_replies_do_not_count_in_the_weight_of_their_group() -> None:
    support = [reply("s0", 6.0), reply("s1", None)]
    query = [reply("q0", 0.0), reply("q1", None), reply("q2", None)]
    mean = average_groups("half", support, query, "F", otherwise=NOBODY)
    assert_close(mean["w"], torch.tensor([3.0]))  # 6 / 2 + 0 / 2


def test_a_group_without_replies_leaves_all_weight_to_the_other() -> None:
    mean = average_groups(
        "half", [reply("s0", None)], [reply("q0", 2.0), reply("q1", 4.0)], "F", NOBODY
    )
    assert_close(mean["w"], torch.tensor([3.0]))
    assert average_groups("half", [reply("s0", None)], [], "F", NOBODY) is NOBODY


def test_an_agent_with_both_kinds_of_rows_counts_in_both_groups() -> None:
    support, query = [reply("m0", 4.0), reply("m1", 8.0)], [reply("m0", 0.0), reply("m1", 2.0)]
    mean = average_groups("half", support, query, "F", otherwise=NOBODY)
    assert_close(mean["w"], torch.tensor([3.5]))  # (4 + 8) / 4 + (0 + 2) / 4


def test_labels_become_one_hot_distributions() -> None:
    rows = LabelledRows(torch.zeros(3, 1, 8, 8), torch.tensor([2, 0, 1]), torch.arange(3))
    assert torch.equal(one_hot_labels(rows, torch.tensor([1, 0]), 3), torch.eye(3)[[0, 2]])


def test_the_weight_of_the_initial_classifier_in_the_teacher_falls_within_a_few_rounds() -> None:
    training = ClassifierTraining(teacher_decay=0.8)
    # (1 + r) / (5 + r): 2/6, 3/7, ... until it passes 0.8 at r = 15
    decays = [training.decay(number) for number in (1, 2, 14, 15, 100)]
    assert decays == pytest.approx([2 / 6, 3 / 7, 15 / 19, 0.8, 0.8])


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_a_cosine_decays_the_rate_over_all_rounds(optimiser: Literal["adam", "sgd"]) -> None:
    def rates(schedule: Literal["constant", "cosine"]) -> list[float]:
        training = ClassifierTraining(
            rounds=4, learning_rate=0.1, optimiser=optimiser, schedule=schedule
        )
        return [
            training.make_optimiser_group(torch.nn.Linear(1, 1), number).learning_rate
            for number in (1, 3)
        ]

    assert rates("constant") == [0.1, 0.1]
    assert rates("cosine") == pytest.approx([0.1, 0.05])  # (1 + cos 0) / 2, (1 + cos 90) / 2


@pytest.mark.parametrize(
    ("augment", "mild"),
    [("strong", "mid"), ("weak", "mid"), ("crop", "crop"), ("fixmatch", "crop")],
)
def test_photos_are_shifted_and_not_rotated(
    augment: Literal["strong", "weak", "crop", "fixmatch"], mild: str
) -> None:
    assert ClassifierTraining(augment=augment, flip=True).mild_view("mid") == View(mild, True)


# The three ----------------------------------------------------------------------------------


def steps_asked(name: str, rounds: int, **settings: Any) -> list[tuple[int, str, str]]:
    after = simulate(make(name, **settings), federated_data(), rounds, engine=RecordingEngine)
    assert isinstance(after.engine, RecordingEngine)
    return [(call.round, call.to.id, call.step.__name__) for call, _ in after.engine.recorded]


SUPPORT = [("s0", "support_pass"), ("s1", "support_pass")]
QUERY = [("q0", "query_pass"), ("q1", "query_pass")]


def test_supervise_never_calls_agents_without_labels() -> None:
    assert steps_asked("supervise", 2, warm_up=0) == [(r, *s) for r in (1, 2) for s in SUPPORT]


@pytest.mark.parametrize("name", ["pseudo", "mixmatch"])
def test_query_agents_are_not_called_during_the_warm_up(name: str) -> None:
    asked = steps_asked(name, 2, warm_up=1)
    assert asked == [(1, *s) for s in SUPPORT] + [(2, *s) for s in [*SUPPORT, *QUERY]]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", ["supervise", "pseudo", "mixmatch", "fedssl"])
def test_f_is_trained_by_sgd_without_state_or_by_adam_with_its_moments(
    name: str,
) -> None:
    def moments(**settings: Any) -> set[str]:
        after = simulate(make(name, **settings), federated_data(), 2)
        kept = [key for memory in after.engine.memories().values() for key in memory]
        return {key for key in kept if "/F/" in key and "#exp_avg" in key}

    assert not moments(optimiser="sgd")
    assert moments() == moments(optimiser="adam") != set()


def test_momentum_applies_to_sgd_and_is_ignored_by_adam() -> None:
    def trained(**settings: Any) -> Any:
        return simulate(make("supervise", **settings), federated_data(), 1).state

    assert not same_bits(
        trained(optimiser="sgd", momentum=0.9), trained(optimiser="sgd", momentum=0.0)
    )
    assert same_bits(trained(momentum=0.9), trained(momentum=0.0))


@pytest.mark.parametrize(
    ("name", "refused"),
    [("supervise", []), ("pseudo", ["agents.query"]), ("mixmatch", ["agents.query"])],
)
def test_only_supervise_works_without_unlabelled_rows(name: str, refused: list[str]) -> None:
    asked = SimpleNamespace(
        data=SimpleNamespace(labels="support"),
        agents=SimpleNamespace(query=0, mixed=0),
        model=SimpleNamespace(norm="group"),
        algorithm=SimpleNamespace(name=name),
    )
    assert [problem.key for problem in ALGORITHMS[name].problems(asked)] == refused


def test_only_the_configured_number_of_query_agents_takes_part() -> None:
    asked = steps_asked("pseudo", 6, warm_up=0, query_per_round=1)
    chosen = [agent for _, agent, step in asked if step == "query_pass"]
    assert len(chosen) == 6 and set(chosen) == {"q0", "q1"}


def test_the_three_methods_differ_by_their_switches_only() -> None:
    parties = federated_data()
    warm = [
        simulate(make(n, warm_up=9), parties).state for n in ("supervise", "pseudo", "mixmatch")
    ]
    assert same_bits(warm[0], warm[1])  # no query agent yet: Pseudo equals Supervise
    assert not same_bits(warm[1], warm[2])  # MixMatch mixes labelled rows as well
    cold = [simulate(make(n, warm_up=0), parties).state for n in ("supervise", "pseudo")]
    assert not same_bits(*cold)


@pytest.mark.parametrize("batch_size", [1, 6])
def test_a_row_mixed_with_itself_has_the_loss_of_an_unmixed_row(batch_size: int) -> None:
    # In a batch of one the partner is the row itself, so that MixMatch has the loss of Pseudo.
    settings: dict[str, Any] = {"batch_size": batch_size, "local_steps": 1, "warm_up": 0}
    parties = federated_data()
    mixed, plain = (
        simulate(make(name, **settings), parties, 1).federation.mean_metrics()
        for name in ("mixmatch", "pseudo")
    )
    assert (mixed == pytest.approx(plain, abs=1e-5)) == (batch_size == 1)


def test_the_teacher_is_sent_to_agents_and_released() -> None:
    after = simulate(make("pseudo", warm_up=0), federated_data(), 2, engine=RecordingEngine)
    assert isinstance(after.engine, RecordingEngine)
    requests = [call.message for call, _ in after.engine.recorded if call.round == 2]
    assert all(isinstance(request, TeacherRequest) for request in requests)
    assert after.classifier is after.state.teacher
    assert not same_bits(after.state.F, after.state.teacher)
    assert after.algorithm.also_evaluated(after.state) == {"unaveraged": after.state.F}


def test_agents_report_their_losses_and_the_accuracy_of_their_pseudo_labels() -> None:
    after = simulate(make("pseudo", warm_up=0), federated_data(), 1)
    notes = after.federation.mean_metrics()
    assert set(notes) == {"train/loss_F/support", "train/loss_F/query"}
    # ten classes, untrained: -log(1/10) is 2.30 on labelled rows
    assert notes["train/loss_F/support"] == pytest.approx(2.3026, abs=0.4)


def test_supervised_rounds_learn_the_toy_rows() -> None:
    parties = federated_data(labelled=100, unlabelled=10)
    after = simulate(
        make("supervise", augment="none", local_steps=8, batch_size=25, learning_rate=0.02),
        parties, 8,
    )  # fmt: skip
    notes = after.federation.mean_metrics()
    assert notes["train/loss_F/support"] < 0.7  # from 2.3
