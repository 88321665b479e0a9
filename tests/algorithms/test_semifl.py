"""SemiFL: each line of the algorithm by hand, what an agent sends, and unusual agents."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from privssl import models
from privssl.algorithms import static_statistics
from privssl.algorithms.local_ssl import (
    ModelUpdate,
    TrainRequest,
)
from privssl.algorithms.semifl import algorithm as semifl
from privssl.algorithms.semifl import losses
from privssl.algorithms.semifl.algorithm import SemiFL
from privssl.algorithms.semifl.losses import (
    epoch_permutations,
    fix_and_mix_loss,
    mix_loss,
    pair_rows,
)
from privssl.algorithms.semifl.settings import SemiFLConfig
from privssl.algorithms.static_statistics import Statistics
from privssl.core.agents import Agent, LabelledRows, UnlabelledRows
from privssl.core.aggregation import momentum_step
from privssl.core.messages import Declined, Reply
from privssl.core.task import Context, Task
from privssl.data.affine_augment import AUGMENTATIONS, Augmentation
from privssl.data.rand_augment import RANDAUGMENTS
from privssl.errors import ConfigError
from privssl.experiment import config
from privssl.models.static_norm import collect, statistics_of
from privssl.runtime.randomness import seeded, stream
from privssl.settings.schema import ModelSettings
from privssl.training.evaluation import score
from privssl.training.local_training import network_input, weights_of
from tests.support.algorithm_contract import relabelled
from tests.support.toy_worlds import (
    TOY,
    RecordingEngine,
    ReverseOrderEngine,
    Simulation,
    apart,
    at_clients,
    at_server,
    federated_data,
    finite,
    held_as_in,
    make,
    same_bits,
    simulate,
    through_disk,
)

CONFIGS = Path(__file__).parents[2] / "configs"

#: One epoch of each kind, one unchanged view, every row confident.
PLAIN: dict[str, Any] = {
    "epochs": 1.0, "server_epochs": 1.0, "threshold": 0.0, "weak": "none", "strong": "none",
    "batch_size": 100, "server_batch_size": 100,
}  # fmt: skip


def new(norm: str = "group", **settings: Any) -> SemiFL:
    made = make("semifl", norm=norm, **(PLAIN | settings))
    assert isinstance(made, SemiFL)
    return made


def context(number: int = 1, agent: str = "q0") -> Context:
    return Context(0, number, agent, f"step:{number}", "attempt", torch.device("cpu"))


def untrained(algorithm: SemiFL) -> dict[str, Tensor]:
    with seeded(stream(0, 0, "world", "test")):
        return weights_of(algorithm.task.new_classifier())


def loaded(algorithm: SemiFL, weights: Mapping[str, Tensor]) -> nn.Module:
    network = algorithm.task.new_classifier()
    network.load_state_dict(dict(weights))
    return network


def logits_of(algorithm: SemiFL, weights: Mapping[str, Tensor], agent: Agent) -> Tensor:
    """The logits for an agent's rows with these weights, without views: (N, 10)."""
    with torch.no_grad():
        logits: Tensor = loaded(algorithm, weights)(network_input(agent.unlabelled.x))
    return logits


def query_agent(rows: int = 12) -> Agent:
    ids = torch.arange(rows)
    return Agent(id="q0", held_unlabelled=UnlabelledRows(TOY.x_train[ids], ids))


def support_agent(rows: int = 20) -> Agent:
    ids = torch.arange(rows)
    return Agent(id="s0", held_labelled=LabelledRows(TOY.x_train[ids], TOY.y_train[ids], ids))


def recorded(after: Simulation) -> list[tuple[str, str, Any, Reply[Any]]]:
    """All messages: agent, step, request, reply."""
    assert isinstance(after.engine, RecordingEngine)
    return [(c.to.id, c.step.__name__, c.message, reply) for c, reply in after.engine.recorded]


# Small maths --------------------------------------------------------------------------------


def test_the_learning_rate_decays_along_half_a_cosine() -> None:
    rate = SemiFLConfig().rate  # 0.03 over 800 rounds
    assert rate(1) == pytest.approx(0.03)
    assert rate(401) == pytest.approx(0.015)
    assert rate(800) == pytest.approx(1.2e-7, rel=0.05)  # 0.03 / 4 (pi / 800)^2 = 1.157e-7
    assert SemiFLConfig(rounds=1).rate(1) == 0.03


@pytest.mark.parametrize(
    ("momentum", "expected"), [(0.5, [-1.0, -2.5, -4.25]), (0.0, [-1.0, -2.0, -3.0])]
)
def test_the_servers_momentum_increases_steps_under_a_constant_difference(
    momentum: float, expected: list[float]
) -> None:
    # g = W - mean = 1 each time: v = 1, 1.5, 1.75. Without momentum: the plain mean.
    F: Mapping[str, Tensor] = {"w": torch.tensor([0.0]), "statistic": torch.tensor([7.0])}
    velocity: Mapping[str, Tensor] = {"w": torch.tensor([0.0])}
    reached = []
    for _ in expected:
        F, velocity = momentum_step(F, velocity, {"w": F["w"] - 1}, momentum)
        reached.append(float(F["w"]))
    assert reached == expected
    assert F["statistic"] == 7


def test_the_mixed_loss_weighs_both_labels_by_lambda() -> None:
    logits = torch.tensor([[3.0, 1.0], [1.0, 3.0]]).log()  # P = (3/4, 1/4), (1/4, 3/4)
    first, second = torch.tensor([0, 1]), torch.tensor([1, 1])
    # lambda 0.3: -0.3 log 3/4 for both; -0.7 (log 1/4 + log 3/4) / 2
    expected = -0.3 * math.log(3 / 4) - 0.7 * (math.log(1 / 4) + math.log(3 / 4)) / 2
    assert float(mix_loss(logits, first, second, 0.3)) == pytest.approx(expected)


@given(held=st.integers(0, 40), size=st.integers(1, 12), epochs=st.integers(1, 3))
def test_an_epoch_has_every_row_once(held: int, size: int, epochs: int) -> None:
    rng = torch.Generator().manual_seed(0)
    found = [order.tolist() for order in epoch_permutations(held, size, float(epochs), rng)]
    assert [sorted(order) for order in found] == [list(range(held))] * epochs


def test_a_fraction_of_an_epoch_has_that_fraction_of_its_batches_rounded_up() -> None:
    def lengths(epochs: float) -> list[int]:
        rng = torch.Generator().manual_seed(0)
        return [
            len(order) for order in epoch_permutations(33, 10, epochs, rng)
        ]  # 10, 10, 10 and 3 rows

    assert lengths(0.001) == [10]
    assert lengths(0.5) == [20]
    assert lengths(1.0) == [33]
    assert lengths(1.5) == [33, 33]  # authors' code


def test_strong_views_are_those_of_the_table_and_rand_augment_starts_from_a_weak_view() -> None:
    x = network_input(TOY.x_train[:5])
    rng = torch.Generator
    batched = SemiFLConfig(strong="strong", flip=True).strong_view(x, rng().manual_seed(3))
    assert_close(batched, AUGMENTATIONS["strong"].flipping(True)(x, rng().manual_seed(3)))
    drawn = rng().manual_seed(3)
    expected = RANDAUGMENTS["fixmatch"](Augmentation(crop=0.125, flip=True)(x, drawn), drawn)
    found = SemiFLConfig(flip=True).strong_view(x, rng().manual_seed(3))
    assert torch.equal(found, expected)
    weak = SemiFLConfig(flip=True).weak_view(x, rng().manual_seed(3))
    assert torch.equal(weak, Augmentation(crop=0.125, flip=True)(x, rng().manual_seed(3)))


# A round ------------------------------------------------------------------------------------


def test_an_untrained_model_has_no_confident_rows_so_only_the_server_trains() -> None:
    after = simulate(new(threshold=0.95), at_server(), 1, engine=RecordingEngine)
    steps = [(agent, step, reply.declined) for agent, step, _, reply in recorded(after)]
    assert steps == [
        ("q0", "query_pass", True), ("q1", "query_pass", True), ("server", "support_pass", False)
    ]  # fmt: skip
    assert after.state.active == 0
    assert same_bits(after.begun.velocity, after.state.velocity)
    *_, (_, _, request, reply) = recorded(after)
    assert same_bits(request.F, after.begun.F)  # no active agent: W and v do not change
    assert same_bits(reply.payload.F, after.state.F)


def unequal(**how: Any) -> Any:
    """Two query agents, one with far more rows, and a labelled server."""
    parties = at_server(partition="dirichlet", alpha=0.5, **how)
    sizes = [len(a.unlabelled) for a in parties.agents if a.role == "query"]
    assert max(sizes) >= 1.5 * min(sizes)
    return parties


def test_agents_have_equal_weights_and_the_server_steps_with_momentum_then_fine_tunes() -> None:
    after = simulate(new(), unequal(), 2, engine=RecordingEngine)
    one, two = recorded(after)[:3], recorded(after)[3:]
    assert [agent for agent, *_ in one] == ["q0", "q1", "server"]

    def pull(told: Any) -> dict[str, Tensor]:
        """W minus the plain mean of what the two agents sent."""
        (_, _, request, first), (_, _, _, second) = told[:2]
        return {k: request.F[k] - (v + second.payload.F[k]) / 2 for k, v in first.payload.F.items()}

    first = pull(one)
    assert same_bits(one[0][2].F, after.begun.F)
    expected = {k: after.begun.F[k] - g for k, g in first.items()}
    assert_close(dict(one[2][2].F), expected, atol=1e-6, rtol=0)
    # Round 2 starts from what the server sent back, v = 0.5 v + g.
    assert same_bits(two[0][2].F, one[2][3].payload.F)
    second = {k: g + 0.5 * first[k] for k, g in pull(two).items()}
    expected = {k: two[0][2].F[k] - v for k, v in second.items()}
    assert_close(dict(two[2][2].F), expected, atol=1e-6, rtol=0)
    assert_close(dict(after.state.velocity), second, atol=1e-6, rtol=0)
    assert same_bits(after.state.F, two[2][3].payload.F)  # fine-tuning comes last
    assert after.state.active == 2


def test_without_fine_tuning_the_server_trains_beside_the_agents_with_weight_one_half() -> None:
    after = simulate(new(fine_tune=False), unequal(), 1, engine=RecordingEngine)
    by_agent = {agent: (request, reply.payload) for agent, _, request, reply in recorded(after)}
    assert all(same_bits(request.F, after.begun.F) for request, _ in by_agent.values())
    sent = {agent: said.F for agent, (_, said) in by_agent.items()}
    expected = {
        k: sent["server"][k] / 2 + sent["q0"][k] / 4 + sent["q1"][k] / 4 for k in sent["q0"]
    }
    assert_close(dict(after.state.F), expected, atol=1e-6, rtol=0)
    # The control: fine-tuning differs.
    tuned = simulate(new(), unequal(), 1).state
    assert apart(tuned.F, after.state.F) > 1e-4


def test_several_label_holders_fine_tune_together_weighted_by_rows() -> None:
    parties = federated_data(labelled_partition="dirichlet", labelled_alpha=0.5)
    rows = {a.id: len(a.labelled) for a in parties.agents if a.role == "support"}
    assert rows["s0"] != rows["s1"]
    after = simulate(new(), parties, 1, engine=RecordingEngine)
    sent = {a: reply.payload.F for a, step, _, reply in recorded(after) if step == "support_pass"}
    expected = {
        k: (rows["s0"] * v + rows["s1"] * sent["s1"][k]) / 20 for k, v in sent["s0"].items()
    }
    assert_close(dict(after.state.F), expected, atol=1e-6, rtol=0)


def test_the_configured_number_of_query_agents_takes_part_or_all_if_there_are_fewer() -> None:
    for asked, expected in ((1, 1), (10, 2), (None, 2)):
        assert simulate(new(query_per_round=asked), at_server(), 1).state.active == expected


# An agent's visit ---------------------------------------------------------------------------


def saturated(algorithm: SemiFL, logit: float) -> dict[str, Tensor]:
    """Weights that predict class 3 for every row: P = 1 / (1 + 9 exp(-logit))."""
    weights = {name: torch.zeros_like(value) for name, value in untrained(algorithm).items()}
    weights["head.bias"][3] = logit
    return weights


def test_a_row_is_confident_from_tau_on_and_an_agent_without_one_declines() -> None:
    algorithm = new(threshold=1.0)
    sure = algorithm.query_pass(query_agent(), TrainRequest(saturated(algorithm, 200.0)), context())
    assert isinstance(sure, ModelUpdate)  # exp(-200) vanishes beside 1, so P is exactly 1
    agent = query_agent()
    said = algorithm.query_pass(agent, TrainRequest(saturated(algorithm, 9.0)), context())
    assert isinstance(said, Declined)  # P = 1 / (1 + 9 exp(-9)) = 0.9989
    assert agent.memory == {}


def test_an_agent_that_receives_nan_weights_declines() -> None:
    algorithm = new(threshold=0.0)
    broken = {name: value * math.nan for name, value in untrained(algorithm).items()}
    assert isinstance(
        algorithm.query_pass(query_agent(), TrainRequest(broken), context()), Declined
    )


@pytest.mark.parametrize("weight", [0.0, 1.0, 3.0])
def test_a_single_row_mixed_with_itself_has_twice_the_plain_loss(weight: float) -> None:
    algorithm = new(mix_weight=weight)
    weights, agent, ctx = untrained(algorithm), query_agent(rows=1), context()
    logits = logits_of(algorithm, weights, agent)
    once = float(cross_entropy(logits, logits.argmax(dim=1)))
    algorithm.query_pass(agent, TrainRequest(weights), ctx)
    assert ctx.metrics["train/loss_F/query"] == pytest.approx((1 + weight) * once, rel=1e-5)


class Mixed:
    """Replaces mix_loss and records its arguments."""

    def __init__(self) -> None:
        self.first: list[int] = []
        self.second: list[int] = []
        self.lam: list[float] = []
        self.sizes: list[int] = []

    def __call__(self, logits: Tensor, y1: Tensor, y2: Tensor, lam: Tensor) -> Tensor:
        self.first += y1.tolist()
        self.second += y2.tolist()
        self.lam.append(float(lam))
        self.sizes.append(len(y1))
        return mix_loss(logits, y1, y2, lam)


def mixed_with(
    monkeypatch: pytest.MonkeyPatch, profile: str, *, sure: int, rows: int = 90
) -> Mixed:
    """The pairs in MIX if the first rows are confidently class 0 and the others may be class 1."""
    P = torch.full((rows, 10), 0.05)
    P[:, 1] = 0.55
    P[:sure] = torch.eye(10)[0]
    mixed = Mixed()
    monkeypatch.setattr(semifl, "guess_labels", lambda *_, **__: P)
    monkeypatch.setattr(losses, "mix_loss", mixed)
    algorithm = new(threshold=0.95, profile=profile, epochs=4.0, batch_size=10)
    said = algorithm.query_pass(query_agent(rows), TrainRequest(untrained(algorithm)), context())
    assert isinstance(said, ModelUpdate) and finite(said)
    return mixed


def test_confident_rows_are_mixed_with_equally_many_of_all_local_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixed = mixed_with(monkeypatch, "semifl-2021", sure=33)
    assert mixed.sizes == [10, 10, 10, 3] * 4
    assert set(mixed.first) == {0}  # FIX: confident rows only
    # MIX: 132 draws, 33 of 90 rows are of class 0: 48 expected, standard deviation 5.5
    assert 26 <= mixed.second.count(0) <= 70
    assert len(set(mixed.lam)) == 16  # one lambda per batch
    assert min(mixed.lam) < 0.5 < max(mixed.lam)  # not max(lambda, 1 - lambda)


def pairs(profile: str, sure: int, **given_: Any) -> list[tuple[list[int], list[int]]]:
    """D+ and D- of three epochs where the first of 90 rows are confident."""
    variant = SemiFLConfig(profile=profile, **given_).variant  # type: ignore[arg-type]
    confident, rng = torch.arange(90) < sure, torch.Generator().manual_seed(0)
    orders = epoch_permutations(sure, 10, 3.0, rng)
    found = pair_rows(confident, orders, variant, torch.Generator().manual_seed(1))
    return [(plus.tolist(), minus.tolist()) for plus, minus in found]


def test_by_the_text_mixes_use_unsure_rows_or_any_rows_if_all_are_confident() -> None:
    for plus, minus in pairs("semifl-text", sure=33):
        assert sorted(plus) == list(range(33)) and len(minus) == 33
        assert min(minus) >= 33 and len(set(minus)) < 33  # Eq. 4: unsure, with replacement
    assert all(len(minus) == 90 for _, minus in pairs("semifl-text", sure=90))
    for key in ({"mix_rows": "unsure"}, {"mix_rows": "unsure", "mix_drawn": "visit"}):
        assert min(min(minus) for _, minus in pairs("semifl-2021", sure=33, **key)) >= 33
    # the control: the code draws from all
    assert min(min(minus) for _, minus in pairs("semifl-2021", sure=33)) < 33


def test_by_the_text_rows_to_mix_are_drawn_once_and_by_the_code_in_every_epoch() -> None:
    (_, first), *others = pairs("semifl-text", sure=33)
    assert all(sorted(minus) == sorted(first) and minus != first for _, minus in others)
    for again in (pairs("semifl-2021", 33), pairs("semifl-text", 33, mix_drawn="epoch")):
        (_, first), (_, second), _ = again
        assert sorted(first) != sorted(second)  # the control


def test_soft_labels_weigh_the_logarithms_of_all_classes() -> None:
    logits = torch.tensor([[3.0, 1.0]]).log()  # P = (3/4, 1/4), of the strong view and of the mix
    rows = {"strong": torch.zeros(1), "mix": torch.zeros(1), "lam": torch.tensor(0.3)}
    a, b = -math.log(3 / 4), -math.log(1 / 4)
    soft = rows | {"y": torch.tensor([[0.9, 0.1]]), "y2": torch.tensor([[0.4, 0.6]])}
    expected = (0.9 * a + 0.1 * b) * (1 + 2 * 0.3) + 2 * 0.7 * (0.4 * a + 0.6 * b)
    assert float(fix_and_mix_loss(soft, 2.0, F=lambda _: logits)) == pytest.approx(expected)
    hard = rows | {"y": torch.tensor([0]), "y2": torch.tensor([1])}
    expected = a * (1 + 2 * 0.3) + 2 * 0.7 * b
    assert float(fix_and_mix_loss(hard, 2.0, F=lambda _: logits)) == pytest.approx(expected)


@pytest.mark.parametrize("soft", [True, False])
def test_an_agent_learns_from_the_received_probabilities_or_from_their_largest(soft: bool) -> None:
    algorithm = new(soft_labels=soft, mix_weight=0.0)
    weights, agent, ctx = untrained(algorithm), query_agent(), context()
    logits = logits_of(algorithm, weights, agent)
    y = logits.softmax(dim=1) if soft else logits.argmax(dim=1)
    algorithm.query_pass(agent, TrainRequest(weights), ctx)
    assert ctx.metrics["train/loss_F/query"] == pytest.approx(float(cross_entropy(logits, y)))


def test_the_text_has_a_weak_view_of_the_mix_and_the_code_a_mix_of_weak_views(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SemiFLConfig, "weak_view", lambda self, x, rng: x**2)
    seen: list[Mapping[str, Tensor]] = []

    def remembered(loss: Any, batch: Mapping[str, Tensor], *how: Any, F: nn.Module) -> Tensor:
        seen.append(batch)
        return loss(batch, *how, F=F)  # type: ignore[no-any-return]

    monkeypatch.setattr(semifl, "batched_call", remembered)
    agent = query_agent(rows=1)  # mixed with itself
    x = network_input(agent.unlabelled.x)
    for view, expected in (("mix", {"mix": x**2}), ("rows", {"x1": x**2, "x2": x**2})):
        algorithm = new(mix_view=view)
        algorithm.query_pass(agent, TrainRequest(untrained(algorithm)), context())
        given_ = {key: seen[-1][key] for key in seen[-1] if key in ("mix", "x1", "x2")}
        assert given_.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(given_[key], value)
    # of two rows: the square of a mix is not the mix of squares
    agent, algorithm = query_agent(rows=2), new(mix_view="mix")
    algorithm.query_pass(agent, TrainRequest(untrained(algorithm)), context())
    x, lam = network_input(agent.unlabelled.x), float(seen[-1]["lam"])
    mixes = [(lam * a + (1 - lam) * b) ** 2 for a in x for b in x]
    for found in seen[-1]["mix"]:
        assert min(float((found - mixed).abs().max()) for mixed in mixes) < 1e-6


def test_in_the_order_of_the_text_the_server_trains_before_the_agents_and_at_the_end() -> None:
    def order(**settings: Any) -> list[str]:
        return [
            agent
            for agent, *_ in recorded(
                simulate(new(**settings), at_server(), 2, engine=RecordingEngine)
            )
        ]

    assert order(server_first=True) == ["server", *["q0", "q1", "server"] * 2]
    assert order(profile="semifl-text") == order(server_first=True)
    assert order() == ["q0", "q1", "server"] * 2  # the control: the authors' code
    after = simulate(new(server_first=True), at_server(), 1, engine=RecordingEngine)
    (_, _, _, first), (_, _, request, _), *_ = recorded(after)
    assert same_bits(first.payload.F, request.F)  # agents start from the weights the server trained


def test_the_server_alone_learns_from_its_labels_and_calls_no_agent() -> None:
    after = simulate(new("static", query_per_round=0), at_server(), 2, engine=RecordingEngine)
    assert {step for _, step, *_ in recorded(after)} == {"support_pass", "support_statistics"}
    assert {agent for agent, *_ in recorded(after)} == {"server"}
    assert not same_bits(after.begun.F, after.state.F)
    # the control: a threshold of 1 does not disable agents
    sure = new(threshold=1.0, query_per_round=1)
    reply = sure.query_pass(query_agent(), TrainRequest(saturated(sure, 200.0)), context())
    assert isinstance(reply, ModelUpdate)


def test_pseudo_labels_are_given_by_the_received_model_and_not_by_the_one_in_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    algorithm = new(epochs=3.0, batch_size=4)
    weights, agent = untrained(algorithm), query_agent()
    expected = logits_of(algorithm, weights, agent).argmax(dim=1)
    mixed = Mixed()
    monkeypatch.setattr(losses, "mix_loss", mixed)
    algorithm.query_pass(agent, TrainRequest(weights), context())
    for epoch in range(3):
        given_ = mixed.first[12 * epoch : 12 * epoch + 12]
        assert sorted(given_) == sorted(expected.tolist())


# FixMatch, as a comparison


def test_fixmatch_uses_pseudo_labels_of_the_model_in_training() -> None:
    algorithm = new(pseudo_labels="training")
    weights, agent, ctx = untrained(algorithm), query_agent(), context()
    logits = logits_of(algorithm, weights, agent)
    top = logits.softmax(dim=1).max(dim=1).values
    algorithm.query_pass(agent, TrainRequest(weights), ctx)
    assert ctx.metrics["train/loss_F/query"] == pytest.approx(float(-top.log().mean()), rel=1e-5)
    # Unsure rows are left out: the mean is over the confident ones.
    half = float(top.median())
    some = new(pseudo_labels="training", threshold=half)
    some.query_pass(agent, TrainRequest(weights), ctx := context())
    kept = top[top >= half]
    assert 0 < len(kept) < 12
    assert ctx.metrics["train/loss_F/query"] == pytest.approx(float(-kept.log().mean()), rel=1e-5)


def test_fixmatch_declines_if_no_batch_had_a_confident_row() -> None:
    algorithm = new(pseudo_labels="training", threshold=0.95)
    said = algorithm.query_pass(query_agent(), TrainRequest(untrained(algorithm)), context())
    assert isinstance(said, Declined)


# The optimiser


def gradient(algorithm: SemiFL, weights: Mapping[str, Tensor], agent: Agent) -> dict[str, Tensor]:
    """Gradients of the mean cross-entropy over the labelled rows of an agent, by plain autograd."""
    network = loaded(algorithm, weights)
    loss = cross_entropy(network(network_input(agent.labelled.x)), agent.labelled.y)
    names, parameters = zip(*network.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize(
    ("profile", "clip"), [("semifl-2021", 0.1), ("semifl-2021", None), ("semifl-text", 0.1)]
)
def test_a_first_step_is_a_nesterov_step_on_the_clipped_gradient_with_weight_decay(
    profile: str, clip: float | None
) -> None:
    algorithm = new(profile=profile, clip_norm=clip, weight_decay=0.01, learning_rate=0.2)
    weights, agent = untrained(algorithm), support_agent()
    raw = gradient(algorithm, weights, agent)
    norm = math.sqrt(sum(float((g**2).sum()) for g in raw.values()))
    assert norm > 0.2  # so that 0.1 clips
    scale = 1.0 if clip is None or profile == "semifl-text" else clip / norm  # the text: none
    said = algorithm.support_pass(agent, TrainRequest(weights), context())
    # buffer = d; the step is d + 0.9 buffer, with d = clipped gradient + 0.01 w
    expected = {n: weights[n] - 0.2 * 1.9 * (scale * g + 0.01 * weights[n]) for n, g in raw.items()}
    assert_close(dict(said.F), expected, atol=1e-6, rtol=1e-4)


def test_only_the_newer_code_keeps_the_servers_momentum_between_visits() -> None:
    kept = new(profile="semifl-head", weight_decay=0.0, clip_norm=None)
    weights, agent = untrained(kept), support_agent()
    kept.support_pass(agent, TrainRequest(weights), context(1))
    buffer = gradient(kept, weights, agent)
    again = kept.support_pass(agent, TrainRequest(weights), context(2))  # the same gradient g
    # buffer = 0.9 g + g; the step is g + 0.9 * 1.9 g = 2.71 g, against 1.9 g of a fresh start
    rate = kept.cfg.rate(2)
    expected = {n: weights[n] - rate * 2.71 * g for n, g in buffer.items()}
    assert_close(dict(again.F), expected, atol=1e-6, rtol=1e-4)

    fresh = new(weight_decay=0.0, clip_norm=None)
    agent = support_agent()
    fresh.support_pass(agent, TrainRequest(weights), context(1))
    again = fresh.support_pass(agent, TrainRequest(weights), context(2))
    expected = {n: weights[n] - rate * 1.9 * g for n, g in buffer.items()}
    assert_close(dict(again.F), expected, atol=1e-6, rtol=1e-4)
    assert agent.memory == {}


@pytest.mark.parametrize("profile", ["semifl-2021", "semifl-head"])
def test_agents_without_labels_keep_their_momentum_in_every_profile(profile: str) -> None:
    algorithm = new(profile=profile)
    agent, weights = query_agent(), untrained(algorithm)
    algorithm.query_pass(agent, TrainRequest(weights), context())
    assert set(agent.memory) == {f"query/{name}#momentum" for name in weights}
    remembering = algorithm.query_pass(agent, TrainRequest(weights), context(2))
    forgetting = algorithm.query_pass(query_agent(), TrainRequest(weights), context(2))
    assert isinstance(remembering, ModelUpdate) and isinstance(forgetting, ModelUpdate)
    assert apart(remembering, forgetting) > 1e-6


def test_without_momentum_nothing_is_kept() -> None:
    algorithm = new(momentum=0.0)
    agent = query_agent()
    algorithm.query_pass(agent, TrainRequest(untrained(algorithm)), context())
    assert agent.memory == {}


# Static batch norm --------------------------------------------------------------------------


def gathered_by_torch(weights: Mapping[str, Tensor], groups: list[Tensor]) -> dict[str, Tensor]:
    """torch's cumulative averages of one pass over batches, in a network with the same names."""
    network = new("batch").task.new_classifier()
    network.load_state_dict(dict(weights))
    layers = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in layers:
        layer.momentum = None
        layer.reset_running_stats()
    with torch.no_grad():
        for batch in groups:
            network.train()(network_input(batch))
    return {name: value for name, value in weights_of(network).items() if "running" in name}


def differs(found: Mapping[str, Tensor], reference: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in reference.items())


@pytest.mark.parametrize("whose", ["everyone", "labelled"])
def test_statistics_are_those_of_one_pass_over_the_batches_of_all_agents_or_the_server(
    whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 20 labelled rows: 7, 7, 6; 30 rows of each query agent: 8, 8, 7, 7. An agent weighs by rows.
    monkeypatch.setattr(static_statistics, "BIG_BATCH", 8)
    parties = at_server()
    held = {a.id: (a.labelled if a.role == "server" else a.unlabelled).x for a in parties.agents}
    assert {name: len(x) for name, x in held.items()} == {"server": 20, "q0": 30, "q1": 30}
    sizes = {20: [7, 7, 6], 30: [8, 8, 7, 7]}

    def reference(weights: Mapping[str, Tensor], agents: Iterable[str]) -> dict[str, Tensor]:
        mean: dict[str, Tensor] = {}
        total = sum(len(held[name]) for name in agents)
        for name in agents:
            x = held[name]
            x = x[torch.randperm(len(x), generator=stream(0, 0, name, "statistics"))]
            own = gathered_by_torch(weights, list(torch.split(x, sizes[len(x)])))
            mean = {key: mean.get(key, 0) + len(x) / total * value for key, value in own.items()}
        return mean

    after = simulate(new("static", statistics=whose), parties, 1)
    for state in (after.begun, after.state):  # (2) after training; (1) for the first labels
        right, wrong = reference(state.F, held), reference(state.F, ["server"])
        if whose == "labelled":
            right, wrong = wrong, right
        assert differs(state.F, right) < 1e-5
        assert differs(state.F, wrong) > 1e-3  # the control


def statistics_at(x: Tensor, round_number: int = 1) -> tuple[SemiFL, Mapping[str, Tensor]]:
    """The statistics of an untrained network that an agent with these rows sends, and the calls."""
    algorithm = new("static")
    agent = Agent(id="q0", held_unlabelled=UnlabelledRows(x, torch.arange(len(x))))
    request = TrainRequest(untrained(algorithm))
    return algorithm, algorithm.query_statistics(agent, request, context(round_number)).statistics


def test_one_row_more_than_a_full_batch_hardly_changes_the_statistics() -> None:
    _, whole = statistics_at(TOY.x_train[:250])
    algorithm, found = statistics_at(TOY.x_train[:251])
    network = loaded(algorithm, untrained(algorithm))
    collect(network, (network_input(part) for part in torch.split(TOY.x_train[:251], 250)))
    reference = {name: value for name, value in whole.items() if "running" in name}
    # the control: a last batch of one row with the weight of 250
    assert 5 * differs(found, reference) < differs(statistics_of(network), reference)


def test_statistics_do_not_depend_on_the_order_of_rows_by_class() -> None:
    by_class = TOY.x_train[TOY.y_train.argsort(stable=True)]  # 1,000 rows: 4 batches
    algorithm, found = statistics_at(by_class)
    one_batch = gathered_by_torch(untrained(algorithm), [by_class])
    in_order = gathered_by_torch(untrained(algorithm), list(torch.split(by_class, 250)))
    # the control: batches of two or three classes each
    assert 5 * differs(found, one_batch) < differs(in_order, one_batch)


def test_rows_are_shuffled_for_statistics_in_the_same_order_in_every_round() -> None:
    x = TOY.x_train[:300]
    assert same_bits(statistics_at(x, 1)[1], statistics_at(x, 7)[1])
    assert not same_bits(statistics_at(x)[1], statistics_at(x.flip(0))[1])  # the order matters


def test_no_statistics_are_requested_for_networks_without_static_norm() -> None:
    after = simulate(new("group"), at_server(), 1, engine=RecordingEngine)
    assert {step for _, step, *_ in recorded(after)} == {"query_pass", "support_pass"}
    after = simulate(new("static"), at_server(), 1, engine=RecordingEngine)
    assert {step for _, step, *_ in recorded(after)} == {
        "query_pass", "support_pass", "query_statistics", "support_statistics"
    }  # fmt: skip
    statistics = simulate(
        new("static", statistics="labelled"), at_server(), 1, engine=RecordingEngine
    )
    assert "query_statistics" not in {step for _, step, *_ in recorded(statistics)}


def test_trained_parameters_and_statistics_are_sent_separately_and_nothing_else_is() -> None:
    algorithm = new("static")
    network = algorithm.task.new_classifier()
    after = simulate(algorithm, at_server(), 1, engine=RecordingEngine)
    for _, step, message, reply in recorded(after):
        assert isinstance(message, TrainRequest) and vars(message).keys() == {"F"}
        if step.endswith("statistics"):
            assert isinstance(reply.payload, Statistics)
            assert reply.payload.statistics.keys() == dict(network.named_buffers()).keys()
        else:
            assert isinstance(reply.payload, ModelUpdate)
            assert reply.payload.F.keys() == dict(network.named_parameters()).keys()


# Promises -----------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "2021": {},
    "head": {"profile": "semifl-head"},
    "parallel": {"fine_tune": False, "pseudo_labels": "training"},
    "static": {"norm": "static"},
    "text": {"profile": "semifl-text"},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def varied(variant: str) -> SemiFL:
    settings: dict[str, Any] = {"batch_size": 10, "weak": "weak", "strong": "strong"}
    return new(**(settings | VARIANTS[variant]))


@pytest.mark.fast_cases(2)
@every_variant
def test_one_seed_gives_one_result_in_any_order_through_bytes_and_over_a_checkpoint(
    variant: str,
) -> None:
    parties = at_server(unlabelled=30)
    once = simulate(varied(variant), parties, 2)
    wired = simulate(varied(variant), parties, 2, check_wire=True)
    assert same_bits(once.state, wired.state)
    backwards = simulate(varied(variant), parties, 2, engine=ReverseOrderEngine)
    assert apart(once.state, backwards.state) <= 1e-6
    saved = through_disk(simulate(varied(variant), parties, 1), 1)
    resumed = simulate(varied(variant), parties, 2, resume=saved)
    assert same_bits(once.state, resumed.state)
    assert not same_bits(once.state, simulate(varied(variant), parties, 2, seed=1).state)


@pytest.mark.fast_cases(2)
@every_variant
def test_hidden_labels_change_no_bit(variant: str, tmp_path: Path) -> None:
    parties = at_server()
    reference = simulate(varied(variant), parties, 1).state
    hidden = at_server(**held_as_in(parties, relabelled(parties, labelled=False), tmp_path))
    assert not torch.equal(hidden.true_labels, parties.true_labels)
    assert same_bits(reference, simulate(varied(variant), hidden, 1).state)
    # The control.
    given_ = at_server(**held_as_in(parties, relabelled(parties, labelled=True), tmp_path))
    assert not same_bits(reference, simulate(varied(variant), given_, 1).state)


def test_dropout_draws_from_the_visit_and_not_from_the_global_generator() -> None:
    model = ModelSettings(name="trinet_cnn", width=4)
    task = Task(10, (1, 8, 8), lambda: models.build_classifier(model, (1, 8, 8), 10))
    algorithm = SemiFL(SemiFLConfig(**PLAIN), task)
    weights, sent = untrained(algorithm), []
    for state_of_torch in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(state_of_torch)
            sent.append(algorithm.support_pass(support_agent(), TrainRequest(weights), context()))
    assert same_bits(*sent)
    assert not same_bits(
        sent[0], algorithm.support_pass(support_agent(), TrainRequest(weights), context(2))
    )


PARTIES: dict[str, Any] = {
    "one agent": lambda: at_server(query=1),
    "one row each": lambda: at_server(labelled=1, unlabelled=2),
    "one class each": lambda: at_server(
        query=10, partition="classes_per_agent", k=1, labelled_partition="iid"
    ),
    "classes without a label": lambda: at_server(labelled=3),
    "labels at clients": at_clients,
    "labels at support agents": federated_data,
}


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("parties", PARTIES)
@pytest.mark.parametrize("variant", ["2021", "parallel", "static"])
def test_unusual_agents_give_finite_weights(parties: str, variant: str) -> None:
    after = simulate(varied(variant), PARTIES[parties](), 2)
    assert finite(after.state)
    assert not same_bits(after.begun.F, after.state.F)


def test_a_toy_run_learns_and_its_agents_get_confident_rows() -> None:
    settings: dict[str, Any] = {
        "rounds": 8, "threshold": 0.6, "learning_rate": 0.1, "batch_size": 10, "weak": "weak",
        "server_batch_size": 5, "server_epochs": 5.0, "strong": "mid",
    }  # fmt: skip
    after = simulate(new(**settings), at_server(labelled=20, unlabelled=100), 8)
    network = after.algorithm.task.new_classifier()
    before, reached = (
        score(network, state.F, TOY.x_test, TOY.y_test, device=torch.device("cpu")).accuracy
        for state in (after.begun, after.state)
    )
    assert after.state.active == 2 and after.algorithm.metrics(after.state) == {"train/active": 2.0}
    assert before < 0.3 and reached > 0.5  # by seed and rounding 0.54 to 0.95; chance is 0.1


# Configs ------------------------------------------------------------------------------------


OF_SEMIFL = [
    path for path in sorted(CONFIGS.glob("**/semifl*.yaml")) if path.parent.name != "tables"
]


@pytest.mark.parametrize("path", OF_SEMIFL, ids=lambda p: p.stem)
def test_the_configs_can_be_read(path: Path) -> None:
    assert config.load_config(path).algorithm.name == "semifl"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.norm=batch", "model.norm +batch keeps averages that semifl does not average"),
        ("algorithm.statistics=labelled", "has no effect: it belongs to model.norm static"),
        ("agents.query=0", "semifl learns from unlabelled rows"),
        ("algorithm.threshold=1.5", "algorithm.threshold"),
        ("algorithm.global_momentum=1.0", "algorithm.global_momentum"),
        ("algorithm.epochs=0", "algorithm.epochs"),
        ("algorithm.clip_norm=0", "algorithm.clip_norm"),
        ("algorithm.profile=semifl", "algorithm.profile"),
        ("algorithm.profile=semifl-text algorithm.clip_norm=2.0", "semifl-text does not clip"),
        (
            "algorithm.fine_tune=false algorithm.server_first=true",
            "with fine_tune false the server",
        ),
    ],
)
def test_invalid_settings_are_refused_when_the_config_is_read(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.load_config(CONFIGS / "semifl.yaml", override.split())


def test_static_norm_with_statistics_of_the_server_alone_is_accepted() -> None:
    read = config.load_config(
        CONFIGS / "semifl.yaml", ["model.norm=static", "algorithm.statistics=labelled"]
    )
    assert read.algorithm.statistics == "labelled"
