"""FedMatch: its losses and steps by plain arithmetic, its costs, helpers and both scenarios."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from privssl.algorithms.fedmatch.algorithm import FedMatch
from privssl.algorithms.fedmatch.disjoint_training import (
    DisjointTrainer,
    inter_client_loss,
    label_loss,
    make_plateau,
    pair_batches,
    penalties,
    split_batches,
    step_plateau,
)
from privssl.algorithms.fedmatch.exchange import FedMatchRequest
from privssl.algorithms.fedmatch.helper_agents import (
    draw_probe,
    nearest_agents,
    pack_helpers,
    unpack_helpers,
    vote_agreement,
)
from privssl.algorithms.fedmatch.settings import RELEASED, FedMatchConfig
from privssl.algorithms.fedmatch.sparse_updates import (
    FIRST_COST,
    DecomposedWeights,
    SparsityThresholds,
    find_changes,
    make_sparse_download,
    make_sparse_upload,
    zero_small_entries,
)
from privssl.core.messages import Declined
from privssl.core.task import Task
from privssl.data import FederatedDataset
from privssl.errors import ConfigError
from privssl.experiment import config
from privssl.runtime.randomness import stream
from privssl.training.evaluation import score
from tests.support.fedmatch import (
    EAGER,
    HELPERS,
    KEY,
    LEVELS,
    PLACES,
    PSI,
    SIGMA,
    Floats,
    RecordingMeter,
    X,
    context,
    fedmatch,
    linear,
    party,
    psi_uploads,
    recorded,
    row,
    softmax,
    stepped_psi,
    stepped_sigma,
    weights,
)
from tests.support.toy_worlds import (
    TOY,
    RecordingEngine,
    ReverseOrderEngine,
    apart,
    at_clients,
    at_server,
    federated_data,
    finite,
    held_as_in,
    same_bits,
    simulate,
    through_disk,
)

CONFIGS = [
    path for path in sorted(Path(__file__).parents[2].glob("configs/**/fedmatch*.yaml"))
    if path.parent.name != "tables" and path.stem != "fedmatch_mixup"
]  # fmt: skip


@pytest.mark.parametrize("form", ["clamped", "exact"])
@pytest.mark.parametrize("helpers", [[], HELPERS[:1], HELPERS])
@pytest.mark.parametrize("tau", [0.0, 0.45, 0.99])
def test_a_step_on_psi_follows_the_equations(form: str, helpers: list[Floats], tau: float) -> None:
    algorithm = linear(probabilities=form, threshold=tau)
    sent = FedMatchRequest(
        weights(SIGMA), weights(PSI), pack_helpers([weights(h) for h in helpers])
    )
    meter = RecordingMeter()
    reply = algorithm.learn_psi(party("query"), sent, context(meter=meter))
    assert not isinstance(reply, Declined) and reply.psi is not None
    assert_close(reply.psi, weights(stepped_psi(SIGMA, PSI, helpers, tau)))
    assert reply.sigma is None  # C2S of labels-at-server has no sigma part
    p = softmax(X @ (SIGMA + PSI).T)
    assert [meter.kept[meter.ids.index(i)] for i in range(4)] == (p.max(axis=1) >= tau).tolist()
    assert sum(meter.kept) == {0.0: 4, 0.45: 2, 0.99: 0}[tau]


def test_a_step_on_sigma_follows_the_equation_with_the_sparse_psi() -> None:
    reply = linear().learn_sigma(
        party("support"), FedMatchRequest(weights(SIGMA), weights(PSI)), context()
    )
    cut = np.where(np.abs(PSI) > 1e-5, PSI, 0)
    assert reply.sigma is not None and reply.psi is None
    assert_close(reply.sigma, weights(stepped_sigma(SIGMA, cut)))


def test_at_a_client_psi_learns_beside_the_updated_sigma() -> None:
    sent = FedMatchRequest(
        weights(SIGMA), weights(PSI), pack_helpers([weights(h) for h in HELPERS])
    )
    reply = linear().learn_both(party("mixed"), sent, context())
    assert reply.sigma is not None and reply.psi is not None
    sigma = stepped_sigma(SIGMA, PSI)
    assert_close(reply.sigma, weights(sigma))
    assert_close(reply.psi, weights(stepped_psi(sigma, PSI, HELPERS, sent=SIGMA)))
    for wrong in (  # the controls: psi beside the former sigma, helpers with the updated one
        stepped_psi(SIGMA, PSI, HELPERS),
        stepped_psi(sigma, PSI, HELPERS, sent=sigma),
    ):
        assert not torch.allclose(reply.psi[KEY], weights(wrong)[KEY])


def test_weight_decay_pulls_the_trained_half_by_the_sum_of_both() -> None:
    plain, decayed = (
        linear(weight_decay=share).learn_sigma(
            party("support"), FedMatchRequest(weights(SIGMA), weights(PSI)), context()
        )
        for share in (0.0, 0.1)
    )
    assert plain.sigma is not None and decayed.sigma is not None
    cut = np.where(np.abs(PSI) > 1e-5, PSI, 0)
    pull = 0.05 * 2 * 0.1 * (SIGMA + cut)
    assert_close(plain.sigma[KEY] - decayed.sigma[KEY], weights(pull)[KEY])


def test_with_confident_helpers_only_the_others_have_no_vote() -> None:
    # In row 1 a helper that predicts 2 with 0.416 is not counted: 1 and 2 have a vote each.
    sent = FedMatchRequest(
        weights(SIGMA), weights(PSI), pack_helpers([weights(h) for h in HELPERS])
    )
    told = {}
    for vote in ("always", "sure"):
        meter = RecordingMeter()
        algorithm = linear(helpers_vote=vote, threshold=0.42)
        algorithm.learn_psi(party("query"), sent, context(meter=meter))
        told[vote] = [meter.labels[meter.ids.index(i)] for i in range(4)]
    p = softmax(X @ (SIGMA + PSI).T)
    said = [softmax(X @ (SIGMA + h).T) for h in HELPERS]
    expected = []
    for i in np.flatnonzero(p.max(axis=1) >= 0.42):
        votes = np.eye(3)[p[i].argmax()]
        for h in said:
            votes = votes + np.eye(3)[h[i].argmax()] * (h[i].max() >= 0.42)
        expected.append(int(votes.argmax()))
    sure = [i for i in range(4) if p[i].max() >= 0.42]
    assert [told["sure"][i] for i in sure] == expected
    assert told["sure"] != told["always"]  # the control: it changes the result here


# Losses by hand -------------------------------------------------------------------------------


def test_cross_entropy_is_a_mean_over_the_given_rows_with_clipped_probabilities() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    y = torch.tensor([1, 1])
    expected = -(math.log(0.25) + math.log(0.8)) / 2
    for form in ("clamped", "exact"):
        assert label_loss(p.log(), y, form) == pytest.approx(expected, rel=1e-6)
    certain = torch.tensor([[40.0, 0.0]])
    assert label_loss(certain, torch.tensor([1]), "clamped") == pytest.approx(-math.log(1e-7))
    assert label_loss(certain, torch.tensor([1]), "exact") == pytest.approx(40.0)


@pytest.mark.parametrize(("form", "learns"), [("clamped", False), ("exact", True)])
def test_a_row_with_a_clipped_probability_has_no_gradient(form: Any, learns: bool) -> None:
    logits = torch.tensor([[40.0, 0.0]], requires_grad=True)
    label_loss(logits, torch.tensor([1]), form).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None and bool(logits.grad.any()) == learns


@pytest.mark.parametrize("form", ["clamped", "exact"])
def test_the_inter_client_loss_is_the_mean_divergence_from_the_helpers(form: Any) -> None:
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]])
    one = torch.tensor([[0.75, 0.25], [0.9, 0.1]])
    other = torch.tensor([[0.5, 0.5], [0.6, 0.4]])
    first = (0.75 * math.log(1.5) + 0.25 * math.log(0.5) + 0) / 2
    second = (0 + 0.6 * math.log(0.6 / 0.9) + 0.4 * math.log(4)) / 2
    found = inter_client_loss(p.log(), [one, other], form)
    assert found == pytest.approx((first + second) / 2, abs=1e-6)


def test_a_helper_with_probability_one_gives_a_finite_loss() -> None:
    logits = torch.tensor([[-60.0, 60.0]])
    for form in ("clamped", "exact"):
        assert inter_client_loss(logits, [torch.tensor([[1.0, 0.0]])], form).isfinite()


def test_penalties_are_sums_over_all_weights() -> None:
    sigma = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])}
    psi = {"a": torch.tensor([0.0, -1.0]), "b": torch.tensor([[2.0]])}
    # 10 ((1)^2 + (3)^2 + (1)^2) + 0.5 (0 + 1 + 2)
    assert penalties(sigma, psi, l2=10.0, l1=0.5) == pytest.approx(110 + 1.5)


@pytest.mark.parametrize(("l2", "share"), [(10.0, 0.98), (5.0, 0.99)])
def test_the_l2_penalty_alone_moves_psi_two_percent_of_the_way_to_sigma_per_step(
    l2: float, share: float
) -> None:
    algorithm = fedmatch(l2_weight=l2, l1_weight=0.0, threshold=1.0, batch_size=10)
    played = simulate(algorithm, at_server(unlabelled=40), 0)
    sigma, psi = played.begun.sigma, played.begun.psi
    agent = played.engine._agents["q0"]
    reply = algorithm.learn_psi(agent, FedMatchRequest(sigma, psi), context())
    assert not isinstance(reply, Declined) and reply.psi is not None
    for name, weight in sigma.items():  # 20 rows, batches of 10: two steps at 1e-3
        assert_close(weight - reply.psi[name], (weight - psi[name]) * share**2)


def test_psi_starts_as_a_fifth_of_sigma() -> None:
    algorithm = fedmatch()
    begun = simulate(algorithm, at_server(), 0).begun
    for name, weight in algorithm.classifier(begun).items():
        cut = zero_small_entries(begun.psi, 1e-5)[name]
        assert_close(weight, begun.sigma[name] + cut)
        assert_close(begun.psi[name], 0.2 * begun.sigma[name])
        large = begun.psi[name].abs() > 1e-5
        assert_close(weight[large], 1.2 * begun.sigma[name][large])


def test_the_released_weights_exclude_small_entries_of_psi() -> None:
    after = simulate(fedmatch(negligible=0.02), at_server(), 1)
    small = {n: w.abs() <= 0.02 for n, w in after.state.psi.items()}
    assert any(bool(mask.any()) for mask in small.values())
    for name, weight in after.classifier.items():
        psi = after.state.psi[name].masked_fill(small[name], 0.0)
        assert torch.equal(weight, after.state.sigma[name] + psi)


# Batches and learning rate --------------------------------------------------------------------


def test_a_client_takes_equally_many_batches_of_each_kind() -> None:
    pairs = pair_batches(torch.arange(50), torch.arange(510), 10)  # the paper's numbers
    assert [(len(s), len(u)) for s, u in pairs] == [(10, 102)] * 5
    assert torch.equal(torch.cat([u for _, u in pairs]), torch.arange(510))
    assert [(len(s), len(u)) for s, u in pair_batches(torch.arange(2), torch.arange(7), 10)] == [
        (2, 7)
    ]
    few = pair_batches(torch.arange(40), torch.arange(2), 10)
    assert [len(u) for _, u in few] == [1, 1, 0, 0]
    assert [len(u) for _, u in pair_batches(torch.arange(20), torch.arange(0), 10)] == [0, 0]
    assert [len(s) for s, _ in pair_batches(torch.arange(24), torch.arange(2), 10)] == [10, 10]


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (500, [100] * 5),
        (549, [100] * 5),  # a tail is dropped
        (550, [100] * 5 + [50]),  # 5.5 to even: 6
        (450, [100] * 4),  # 4.5 to even: 4
        (560, [100] * 5 + [60]),
        (30, [30]),
    ],
)
def test_unlabelled_rows_alone_make_about_a_hundred_batches(rows: int, sizes: list[int]) -> None:
    assert [len(batch) for batch in split_batches(torch.arange(rows), 100)] == sizes


@pytest.mark.parametrize(("place", "sigma_steps", "psi_steps"), [
    ("labels-at-server", [10], [3, 3]), ("labels-at-client", [5, 5], [5, 5]),
])  # fmt: skip
def test_a_round_has_as_many_steps_as_batches(
    place: str, sigma_steps: list[int], psi_steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[list[str]] = []
    ended: Callable[[DisjointTrainer], None] = DisjointTrainer.finish

    def step(self: DisjointTrainer, half: str, loss: Tensor) -> None:
        self.__dict__.setdefault("halves_stepped", []).append(half)

    def end(self: DisjointTrainer) -> None:
        steps.append(self.__dict__["halves_stepped"])
        ended(self)

    monkeypatch.setattr(DisjointTrainer, "_step", step)
    monkeypatch.setattr(DisjointTrainer, "finish", end)
    simulate(fedmatch(batch_size=2), PLACES[place](labelled=20, unlabelled=12), 1)
    counts = [(visit.count("sigma"), visit.count("psi")) for visit in steps]
    assert [s for s, _ in counts if s] == sigma_steps
    assert [p for _, p in counts if p] == psi_steps
    if place == "labels-at-client":
        assert steps[0] == ["sigma", "psi"] * 5  # in turn


def test_the_learning_rate_is_cut_when_patience_is_exhausted() -> None:
    pace = make_plateau(0.9, 2)
    seen = []
    for loss in (1.0, 0.5, 0.5, 0.7, 0.4, 0.6, math.nan):
        pace = step_plateau(pace, loss, 2)
        seen.append(float(pace[0]))
    # 0.5 again and 0.7 exhaust patience; 0.4 restores it; 0.6 and a NaN loss exhaust it
    assert seen == pytest.approx([0.9, 0.9, 0.9, 0.3, 0.3, 0.3, 0.1])


def test_only_agents_with_labels_change_their_learning_rate() -> None:
    algorithm = fedmatch(patience=1, labelled_weight=1e-9)  # sigma does not move: no lower loss
    after = simulate(algorithm, at_server(), 3)
    memories = after.engine.memories()
    assert float(memories["server"]["pace"][0]) == pytest.approx(1e-3 / 9, rel=1e-6)
    assert all("pace" not in memories[agent] for agent in ("q0", "q1"))


# Sparse differences ---------------------------------------------------------------------------

CUTS = SparsityThresholds(negligible=0.1, change=0.05)


def test_an_upload_of_psi_keeps_the_servers_entries_where_the_difference_is_small() -> None:
    received = row(0.5, 0.5, 0.04, 0.2, 0.0)
    trained = row(0.54, 0.56, 0.09, 0.08, 0.3)
    # compared as        .54   .56   0     0     .3   (small ones are 0)
    # differences        .04   .06  -.04  -.2    .3   -> sent: 2nd, 4th with its value, 5th
    sent, cost = make_sparse_upload(trained, received, CUTS, is_psi=True)
    assert_close(sent, row(0.5, 0.56, 0.04, 0.08, 0.3))
    assert cost == pytest.approx(3 / 5)


def test_an_upload_of_sigma_is_compared_without_thresholding() -> None:
    sent, cost = make_sparse_upload(row(0.09, 0.2, 1.0), row(0.02, 0.2, 1.04), CUTS, is_psi=False)
    assert_close(sent, row(0.09, 0.2, 1.04))
    assert cost == pytest.approx(1 / 3)


def test_equal_weights_cost_nothing_and_a_first_visit_costs_two_models() -> None:
    own = DecomposedWeights(row(0.5, -0.3), row(0.2, 0.7))
    again = make_sparse_download(own, own, [], CUTS)
    assert again.cost == 0 and same_bits(again.weights, own)
    assert make_sparse_upload(own.psi, own.psi, CUTS, is_psi=True)[1] == 0
    assert make_sparse_upload(own.sigma, own.sigma, CUTS, is_psi=False)[1] == 0
    first = make_sparse_download(None, own, [], CUTS)
    assert first.cost == FIRST_COST == 2.0 and first.weights is own


def test_a_download_counts_both_halves_and_each_helper() -> None:
    held = DecomposedWeights(row(1.0, 1.0, 1.0, 1.0), row(0.5, 0.0, 0.3, 0.09))
    sent = DecomposedWeights(row(1.0, 1.2, 1.04, 1.0), row(0.5, 0.08, 0.4, 0.2))
    # sigma: the 2nd. psi as compared: .5 0 .3 0 and .5 0 .4 .2: the 3rd and 4th.
    # helper .5 .3 0 0 against own where it is not 0, .5 0 - -: the 2nd.
    found = make_sparse_download(held, sent, [row(0.5, 0.3, 0.01, 0.0)], CUTS)
    assert found.cost == pytest.approx((1 + 2 + 1) / 4)
    assert_close(found.weights.sigma, row(1.0, 1.2, 1.0, 1.0))
    assert_close(found.weights.psi, row(0.5, 0.0, 0.4, 0.2))


def test_nan_entries_are_always_sent() -> None:
    assert find_changes(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, math.nan]), 9.0).all()
    sent, _ = make_sparse_upload(row(math.nan), row(1.0), CUTS, is_psi=True)
    assert sent["w"].isnan().all()


def test_costs_are_logged_separately_and_messages_are_dense() -> None:
    after = simulate(fedmatch(), at_server(), 1)
    told = {**after.federation.mean_metrics(), **after.algorithm.metrics(after.state)}
    assert told["train/cost_down"] == 2.0
    assert 0 < told["train/cost_up"] <= 1.0
    one = sum(w.numel() * 4 for w in after.classifier.values())
    # down: both halves to each of two agents, no helpers; up: one half of each. What the labelled
    # server sends to itself is not counted.
    assert (after.federation.traffic.down, after.federation.traffic.up) == (2 * 2 * one, 2 * one)


def test_agents_train_with_sparse_differences_only_if_configured() -> None:
    for sparse_down in (False, True):
        algorithm = fedmatch(sparse_down=sparse_down, smallest_change=1e-4, **EAGER)
        after = simulate(algorithm, at_server(), 2, engine=RecordingEngine)
        before = simulate(algorithm, at_server(), 1).state
        requests = recorded(after, 2, "learn_psi")
        for agent, request in requests.items():
            dense, held = request.psi, before.held_psi[agent]
            if not sparse_down:
                assert same_bits({"w": dense}, {"w": before.psi})
                continue
            gaps = {n: w - before.psi[n] for n, w in dense.items()}
            assert any(bool(gap.any()) for gap in gaps.values())
            # entries that were not sent have small differences, and keep the old value
            for name, gap in gaps.items():
                assert float(gap.abs().max()) <= 1e-4 + 2e-5
                assert torch.equal(dense[name][gap != 0], held[name][gap != 0])


# Helpers ---------------------------------------------------------------------------------------


def test_ties_of_votes_go_to_the_lowest_class() -> None:
    one, two, three = (torch.eye(3)[[c]] for c in (2, 0, 1))
    assert vote_agreement(one, [two, three]).argmax(dim=1).tolist() == [0]
    # no helper: the agent's own prediction
    assert vote_agreement(one, []).argmax(dim=1).tolist() == [2]
    assert vote_agreement(one, [three, three]).argmax(dim=1).tolist() == [1]


def test_the_nearest_helpers_equal_those_of_an_exhaustive_search() -> None:
    points = torch.rand(40, 10, generator=stream(0, 0, "test", "points")).softmax(dim=1)
    known = {f"q{i}": point for i, point in enumerate(points)}
    found = nearest_agents(known, known, 3)
    for agent, point in known.items():
        others = sorted(
            (float((other - point).norm()), name) for name, other in known.items() if name != agent
        )
        assert list(found[agent]) == [name for _, name in others[:3]]
    shuffled = dict(sorted(known.items(), reverse=True))
    assert nearest_agents(shuffled, known, 3) == found


def test_an_agent_never_helps_itself_even_among_equal_ones() -> None:
    alike = {f"q{i}": torch.full((3,), 1 / 3) for i in range(9)}
    found = nearest_agents(alike, alike, 2)
    assert set(found) == set(alike)
    assert all(len(set(names)) == 2 and agent not in names for agent, names in found.items())


def test_unseen_agents_and_single_agents_have_no_helpers() -> None:
    one, two = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert nearest_agents({}, ["q0"], 2) == {}
    assert nearest_agents({"q0": one}, ["q0"], 2) == {}
    assert nearest_agents({"q0": one, "q1": two}, ["q0", "q7"], 2) == {"q0": ("q1",)}
    assert nearest_agents({"q0": one, "q1": two}, ["q0"], 0) == {}
    assert nearest_agents({"q0": one, "q1": two * math.nan, "q2": two}, ["q0", "q1"], 2) == {
        "q0": ("q2",)
    }


def test_helpers_are_sent_as_one_mapping() -> None:
    helpers = [weights(h) for h in HELPERS]
    assert pack_helpers([]) is None and unpack_helpers(None) == []
    back = unpack_helpers(pack_helpers(helpers))
    assert len(back) == 2 and all(same_bits(a, b) for a, b in zip(back, helpers, strict=True))


def test_the_probe_is_noise_within_the_levels_of_an_image() -> None:
    probe = draw_probe((3, 64, 64), stream(0, 0, "world", "probe"))
    assert probe.shape == (1, 3, 64, 64) and probe.min() >= -1 and probe.max() <= 1
    levels = (probe + 1) * 127.5
    # a normal cut to +-1 deviation: mean 125 (0..255 is symmetric but for 5), deviation 0.54 * 125
    assert float(levels.mean()) == pytest.approx(126, abs=3)
    assert float(levels.std()) == pytest.approx(0.54 * 125, abs=3)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("place", ["labels-at-server", "labels-at-client"])
def test_helpers_are_sent_every_few_rounds_to_agents_that_were_seen(place: str) -> None:
    after = simulate(
        fedmatch(helpers_every=2, rounds=5), PLACES[place](), 5, engine=RecordingEngine
    )
    step = "learn_psi" if place == "labels-at-server" else "learn_both"
    came = {
        number: [request.helpers is not None for request in recorded(after, number, step).values()]
        for number in range(1, 6)
    }
    assert came == {n: [n % 2 == 0] * 2 for n in range(1, 6)}
    at_first = simulate(fedmatch(helpers_every=1), PLACES[place](), 1, engine=RecordingEngine)
    assert all(request.helpers is None for request in recorded(at_first, 1, step).values())


def test_a_helper_is_the_last_psi_of_another_agent() -> None:
    after = simulate(fedmatch(**EAGER), at_server(), 2, engine=RecordingEngine)
    before = simulate(fedmatch(**EAGER), at_server(), 1).state
    requests = recorded(after, 2, "learn_psi")
    for agent, other in (("q0", "q1"), ("q1", "q0")):
        [helper] = unpack_helpers(requests[agent].helpers)  # two were requested, one exists
        assert same_bits(helper, before.held_psi[other])
    assert after.state.helped == 1.0 and before.helped == 0.0


def test_helpers_are_kept_only_if_configured() -> None:
    kept = {
        keep: simulate(
            fedmatch(**EAGER | {"keep_helpers": keep, "helpers_every": 2}), at_server(), 3
        )
        for keep in (False, True)
    }
    memory = {keep: set(after.engine.memories()["q0"]) for keep, after in kept.items()}
    names = {f"helper/0/{name}" for name in kept[True].state.psi}
    assert memory[True] == memory[False] | names
    assert not same_bits(kept[True].state, kept[False].state)  # used in round 3


# Streams, and agents that decline --------------------------------------------------------------


def test_a_stream_shows_every_row_once_and_each_slice_for_equally_many_rounds() -> None:
    algorithm = linear(rounds=4, stream_slices=2, batch_size=1)
    agent, seen = party("query"), []
    for number in range(1, 5):
        meter = RecordingMeter()
        algorithm.learn_psi(
            agent, FedMatchRequest(weights(SIGMA), weights(PSI)), context(number, meter)
        )
        seen.append(meter.ids)
    assert seen[0] == seen[1] and seen[2] == seen[3]
    assert sorted(seen[0] + seen[2]) == [0, 1, 2, 3]


def test_an_agent_without_rows_in_its_slice_declines_unless_it_has_labels() -> None:
    settings: dict[str, Any] = {"rounds": 3, "stream_slices": 3}
    request = FedMatchRequest(weights(SIGMA), weights(PSI))
    reply = linear(**settings).learn_psi(party("query", LEVELS[:2]), request, context(3))
    assert isinstance(reply, Declined)
    mixed = party("mixed", LEVELS[:2])
    both = linear(**settings).learn_both(mixed, request, context(3))
    # psi takes a step on its penalties, after sigma has taken its own
    assert both.sigma is not None and both.psi is not None
    sigma, psi = both.sigma[KEY], weights(PSI)[KEY]
    pull = psi - 0.05 * (3.0 * (psi - sigma) + 0.02 * psi.sign())
    assert_close(both.psi[KEY], pull)


def test_without_penalties_and_confident_rows_psi_does_not_change() -> None:
    algorithm = linear(threshold=1.0, l2_weight=0.0, l1_weight=0.0)
    reply = algorithm.learn_psi(
        party("query"), FedMatchRequest(weights(SIGMA), weights(PSI)), context()
    )
    assert not isinstance(reply, Declined) and reply.psi is not None
    assert same_bits(reply.psi, weights(PSI))


# Rounds ------------------------------------------------------------------------------------------


def test_with_labels_at_the_server_sigma_is_the_servers_and_psi_the_plain_mean() -> None:
    after = simulate(fedmatch(**EAGER), at_server(unlabelled=61), 1, engine=RecordingEngine)
    assert isinstance(after.engine, RecordingEngine)
    first_call, first_reply = after.engine.recorded[0]
    assert first_call.to.id == "server"
    said = psi_uploads(after)
    assert same_bits(after.state.sigma, first_reply.payload.sigma)
    for name, mean in after.state.psi.items():  # 31 and 30 rows have equal weight
        assert_close(mean, (said["q0"].psi[name] + said["q1"].psi[name]) / 2)
    for request in recorded(after, 1, "learn_psi").values():  # agents get the sigma of this round
        assert same_bits(request.sigma, first_reply.payload.sigma)


def test_with_labels_at_clients_both_halves_are_plain_means_and_the_server_does_not_train() -> None:
    after = simulate(fedmatch(**EAGER), at_clients(), 1, engine=RecordingEngine)
    said = psi_uploads(after)
    assert sorted(said) == ["m0", "m1"]
    for half in ("sigma", "psi"):
        for name, mean in getattr(after.state, half).items():
            one, other = (getattr(said[agent], half)[name] for agent in ("m0", "m1"))
            assert_close(mean, (one + other) / 2)


def test_embeddings_are_predictions_on_the_probe_before_averaging() -> None:
    after = simulate(fedmatch(**EAGER), at_clients(), 1, engine=RecordingEngine)
    F = after.algorithm.task.new_classifier().eval()
    for agent, said in psi_uploads(after).items():
        F.load_state_dict({name: said.sigma[name] + said.psi[name] for name in said.psi})
        with torch.no_grad():
            expected = F(after.state.probe).softmax(dim=1)[0]
        assert_close(after.state.embeddings[agent], expected)


def test_five_of_many_agents_take_part() -> None:
    after = simulate(fedmatch(), at_server(query=9), 1, engine=RecordingEngine)
    assert len(psi_uploads(after)) == 5
    assert set(after.state.embeddings) == set(psi_uploads(after))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("place", "strong"), [
    ("support", "weak"), ("labels-at-server", "weak"), ("labels-at-client", "fedmatch"),
])  # fmt: skip
def test_one_seed_gives_the_same_bits_in_every_order_of_agents(place: str, strong: str) -> None:
    parties, settings = PLACES[place](), EAGER | {"strong": strong}
    one, two, other = (simulate(fedmatch(**settings), parties, 2, seed=s).state for s in (4, 4, 5))
    assert same_bits(one, two) and not same_bits(one, other)
    backwards = simulate(fedmatch(**settings), parties, 2, seed=4, engine=ReverseOrderEngine).state
    assert apart(one, backwards) <= 1e-6


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("place", PLACES)
def test_hidden_labels_change_no_bit_of_psi_if_it_learns_from_every_row(
    place: str, tmp_path: Path
) -> None:
    parties: FederatedDataset = PLACES[place]()
    y = TOY.y_train.clone()
    hidden = [i for h in parties.manifest.agents.values() for i in h.unlabelled]
    y[hidden] = y[hidden].flip(0)
    other = PLACES[place](**held_as_in(parties, dataclasses.replace(TOY, y_train=y), tmp_path))
    assert not torch.equal(other.true_labels, parties.true_labels)
    first, second = (simulate(fedmatch(**EAGER), p, 3).state for p in (parties, other))
    assert same_bits(first, second)
    # The control: without the pseudo-labels psi differs.
    alone = simulate(fedmatch(**EAGER | {"agreement_weight": 0.0}), parties, 3).state
    assert not same_bits(first, alone)


@pytest.mark.slow
def test_a_resumed_run_keeps_helpers_costs_and_learning_rates() -> None:
    settings = EAGER | {"helpers_every": 2, "keep_helpers": True, "sparse_down": True, "rounds": 4}
    whole = simulate(fedmatch(**settings), at_clients(), 4)
    saved = through_disk(simulate(fedmatch(**settings), at_clients(), 3), 3)
    rest = simulate(fedmatch(**settings), at_clients(), 4, resume=saved)
    assert same_bits(whole.state, rest.state)
    assert same_bits(whole.engine.memories(), rest.engine.memories())


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("parties", [
    federated_data(support=1, query=1), at_server(query=1), at_clients(labelled=2, unlabelled=2),
])  # fmt: skip
def test_a_single_agent_or_a_single_row_gives_finite_weights(parties: FederatedDataset) -> None:
    after = simulate(fedmatch(**EAGER), parties, 3)
    assert finite(after.state)
    assert all(math.isfinite(v) for v in after.algorithm.metrics(after.state).values())


def test_dropout_draws_from_the_visit_and_not_from_the_global_generator() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))

    algorithm = FedMatch(FedMatchConfig(**EAGER), Task(10, (1, 8, 8), network))
    states = []
    for number in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            states.append(simulate(algorithm, at_clients(), 2).state)
    assert same_bits(*states)


def test_rounds_learn_the_toy_rows() -> None:
    settings: dict[str, Any] = {
        "strong": "none",
        "learning_rate": 0.02,
        "batch_size": 10,
        "rounds": 8,
    }
    after = simulate(fedmatch(**settings), at_server(labelled=100, unlabelled=40), 8)
    judge = after.algorithm.task.new_classifier()
    at = torch.device("cpu")
    before = score(
        judge, after.algorithm.classifier(after.begun), TOY.x_test, TOY.y_test, device=at
    ).accuracy
    reached = score(judge, after.classifier, TOY.x_test, TOY.y_test, device=at).accuracy
    assert reached > 0.7 > before + 0.3


# Config -------------------------------------------------------------------------------------------


def test_null_settings_follow_from_the_place_of_labels_and_the_profile() -> None:
    released, paper = FedMatchConfig(), FedMatchConfig(profile="fedmatch-paper")
    assert released.hyperparameters("server") == RELEASED["server"]
    assert (
        released.hyperparameters("client").threshold,
        released.hyperparameters("client").patience,
    ) == (0.75, 5)
    assert (
        released.hyperparameters("server").patience,
        paper.hyperparameters("server").patience,
    ) == (20, 5)
    assert paper.hyperparameters("client").threshold == 0.85
    own = FedMatchConfig(profile="fedmatch-paper", threshold=0.5, smallest_change=0.0)
    assert own.hyperparameters("client").threshold == 0.5
    assert own.hyperparameters("client").sparsity_thresholds == SparsityThresholds(5e-6, 0.0)


def test_settings_under_which_psi_diverges_are_refused() -> None:
    def keys(**settings: Any) -> list[str]:
        return [problem.key for problem in FedMatchConfig(**settings).problems()]

    assert keys() == keys(learning_rate=0.09) == []
    assert keys(learning_rate=0.1) == ["learning_rate"]
    assert keys(learning_rate=0.1, l2_weight=1.0) == []
    assert keys(rounds=5, stream_slices=6) == ["stream_slices"]
    algorithm = fedmatch(learning_rate=0.11, threshold=1.0, l1_weight=0.0, batch_size=1)
    begun = simulate(algorithm, at_server(), 0)
    request = FedMatchRequest(
        begun.begun.sigma, begun.begun.psi
    )  # 30 steps, each 1.2 times as far and back
    reply = algorithm.learn_psi(begun.engine._agents["q0"], request, context())
    assert not isinstance(reply, Declined) and reply.psi is not None
    name = next(iter(reply.psi))
    gap = (request.sigma[name] - reply.psi[name]) / (request.sigma[name] - request.psi[name])
    assert_close(gap, torch.full_like(gap, 1.2**30), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("labels", "query", "norm", "refused"),
    [
        ("labels-at-server", 3, "none", []),
        ("labels-at-server", 3, "group", []),
        ("support", 3, "none", []),
        ("labels-at-client", 0, "none", []),
        ("labels-at-server", 0, "none", ["agents.query"]),
        ("support", 0, "none", ["agents.query"]),
        ("labels-at-client", 2, "none", ["agents.query"]),
        ("labels-at-server", 3, "batch", ["model.norm"]),
        ("labels-at-client", 0, "static", ["model.norm"]),
    ],
)
def test_invalid_settings_are_refused_when_the_config_is_read(
    labels: str, query: int, norm: str, refused: list[str]
) -> None:
    asked = SimpleNamespace(
        data=SimpleNamespace(labels=labels),
        agents=SimpleNamespace(query=query, mixed=2),
        model=SimpleNamespace(norm=norm),
        algorithm=FedMatchConfig(),
    )
    assert [problem.key for problem in FedMatch.problems(asked)] == refused


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_can_be_read_without_warnings(path: Path) -> None:
    read = config.load_config(path, ["run.precision=float32"])  # which no machine is warned of
    assert read.algorithm.name == "fedmatch" and not read.warnings
    with pytest.raises(ConfigError, match="no sum of sigma and psi"):
        config.load_config(path, ["model.norm=batch"])
