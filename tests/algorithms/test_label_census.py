"""The label census: losses, k-means over agents, votes, and which agents are called for what."""

import contextlib
import functools
import itertools
import json
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from privssl.algorithms import local_ssl
from privssl.algorithms.label_census import feature_map
from privssl.algorithms.label_census.algorithm import Census, LabelCensus, SelfTrainingRequest
from privssl.algorithms.label_census.cluster_labels import (
    class_given_cluster,
    class_posterior,
    compute_class_shares,
    label_by_majority,
)
from privssl.algorithms.label_census.clustering import (
    center_and_normalize,
    count_cells,
    count_neighbours,
    find_nearest_centroids,
    k_means,
    merge_cells,
    pad_centroids,
    sum_by_centroid,
    update_centroids,
)
from privssl.algorithms.label_census.feature_map import Map, Sums, make_map
from privssl.algorithms.label_census.patch_encoder import encode
from privssl.algorithms.local_ssl import ModelUpdate
from privssl.core.engine import Call
from privssl.core.federation import Federation, Round
from privssl.core.messages import MessageError, Reply
from privssl.core.task import Context
from privssl.engines.local import LocalEngine
from privssl.errors import RunFolderError
from privssl.privacy.label_histogram import make_census_plan
from privssl.reporting.trackers import CsvTracker, RoundRecord
from privssl.runs.round_loop import RoundLoop
from privssl.runs.round_plan import planned_rounds
from privssl.runtime.process import INTERRUPTED
from privssl.runtime.randomness import stream
from privssl.settings.schema import PrivacySettings
from tests.support.algorithm_contract import algorithm
from tests.support.command_line import command
from tests.support.toy_worlds import (
    DecliningEngine,
    RecordingEngine,
    at_clients,
    at_server,
    federated_data,
    finite,
    make,
    same_bits,
    simulate,
)

FEW: dict[str, Any] = {
    "clusters": 5, "cells": 12, "cluster_rounds": 3, "vote_rounds": 1, "self_training_rounds": 1,
    "filters": 8, "places": 2,
}  # fmt: skip


#: With a last phase, in which query agents train a generator.
GENERATOR: dict[str, Any] = FEW | {"generator_rounds": 2, "generator_width": 4, "noise_size": 4}

#: A run of few rows and all phases.
SHORT = [
    "data.name=toy", "data.labelled=40", "data.unlabelled=80", "agents.query=2",
    "model.width=4", "run.images_every=1000",
    *(f"algorithm.{setting}" for setting in (
        "cells=20", "filters=8", "cluster_rounds=3", "vote_rounds=1", "self_training_rounds=1",
        "local_steps=1",
    )),
]  # fmt: skip


def normal(*shape: int, name: str = "x") -> Tensor:
    return torch.randn(*shape, generator=stream(0, 0, "world", name))


# Clusters -----------------------------------------------------------------------------------


def test_a_round_of_k_means_over_agents_equals_that_on_all_rows_in_one_place() -> None:
    points = center_and_normalize(normal(60, 8), torch.zeros(8))
    centroids = points[:5].clone()
    parts = [sum_by_centroid(part, centroids) for part in torch.split(points, [7, 33, 20])]
    total, count = (sum(values) for values in zip(*parts, strict=True))
    chosen = (points[:, None] - centroids).square().sum(dim=2).argmin(dim=1)
    means = torch.stack([points[chosen == k].mean(dim=0) for k in range(5)])
    assert torch.equal(find_nearest_centroids(points, centroids), chosen)
    torch.testing.assert_close(update_centroids(centroids, total, count), means)


def test_an_empty_cluster_does_not_move() -> None:
    centroids = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    after = update_centroids(centroids, *sum_by_centroid(torch.tensor([[0.8, 0.6]]), centroids))
    torch.testing.assert_close(after, torch.tensor([[0.8, 0.6], [0.0, 1.0]]))


def test_k_means_finds_groups_that_are_far_apart_and_counts_their_weight() -> None:
    middles = torch.eye(4)
    points = torch.cat([m + 0.01 * normal(25, 4, name=str(i)) for i, m in enumerate(middles)])
    weight = torch.arange(1.0, 5).repeat_interleave(25)
    centroids, mass = k_means(points, weight, 4, stream(0, 0, "world", "seeds"))
    found = find_nearest_centroids(middles, centroids)
    assert sorted(found.tolist()) == [0, 1, 2, 3]
    assert mass[found].tolist() == [25, 50, 75, 100]
    assert float((centroids[found] - middles).norm(dim=1).max()) < 0.02


def test_k_means_of_fewer_points_than_clusters_is_finite() -> None:
    centroids, mass = k_means(normal(2, 3), torch.ones(2), 5, stream(0, 0, "world", "seeds"))
    assert bool(centroids.isfinite().all())
    assert float(mass.sum()) == 2


def test_neighbour_counts_of_two_cells_are_the_rows_between_them() -> None:
    cells = torch.tensor([[0.0], [1.0], [3.0]])
    rows = torch.tensor([[0.1], [0.9], [0.8], [1.9], [2.9]])
    # nearest and second: 0-1, 1-0, 1-0, 1-2 (0.9 against 1.1), 2-1
    expected = [[0, 1, 0], [2, 0, 1], [0, 1, 0]]
    assert count_neighbours(rows, cells).tolist() == expected
    assert count_neighbours(rows, cells[:1]).tolist() == [[0]]


def test_cells_along_a_ring_are_one_cluster_where_k_means_would_cut_the_ring() -> None:
    # Two rings, one inside the other: each is one cluster of the graph, and no k-means finds them.
    turn = torch.linspace(0, 2 * math.pi, 401)[:-1]
    ring = torch.stack([turn.cos(), turn.sin()], dim=1)
    rows = torch.cat([ring, 3 * ring])
    cells = torch.cat([ring[::20], 3 * ring[::20]])
    found = merge_cells(count_neighbours(rows, cells), 2, seed=0)
    assert len(set(found[:20].tolist())) == 1
    cut, _ = k_means(rows, torch.ones(800), 2, stream(0, 0, "world", "seeds"))
    assert len(set(find_nearest_centroids(ring, cut).tolist())) == 2  # the control


def test_spare_cells_have_no_row_and_no_part_in_the_graph() -> None:
    points = center_and_normalize(normal(40, 6), torch.zeros(6))
    padded = pad_centroids(points[:5], 12)
    assert count_cells(padded) == 5 and count_cells(points[:5]) == 5
    assert torch.equal(
        find_nearest_centroids(points, padded), find_nearest_centroids(points, points[:5])
    )
    graph = count_neighbours(points, padded)
    assert torch.equal(graph[:5, :5], count_neighbours(points, points[:5]))
    assert float(graph.sum()) == float(graph[:5, :5].sum()) == 40


@pytest.mark.parametrize(("rows_each", "cells"), [(4, 5), (20, 8), (200, 12)])
def test_a_cell_has_five_rows_on_average_but_there_are_as_many_cells_as_clusters(
    rows_each: int, cells: int
) -> None:
    data = federated_data(query=2, unlabelled=2 * rows_each, labelled=40)
    after = simulate(make("label_census", **FEW), data)
    assert count_cells(after.state.centroids) == cells  # 8 / 5 < 5 clusters; 40 / 5; at most 12
    assert after.state.centroids.shape[0] == 12 and after.state.cluster.shape == (12,)
    assert float(after.state.mass.sum()) == pytest.approx(1)
    assert len(set(after.state.cluster[:cells].tolist())) == 5  # spare cells take no cluster


def test_fewer_cells_than_clusters_are_clusters_of_their_own() -> None:
    assert merge_cells(torch.zeros(3, 3), 5, seed=0).tolist() == [0, 1, 2]


# Votes --------------------------------------------------------------------------------------


def likelihood(seen: list[int], expected: list[float], epsilon: float | None, agents: int) -> float:
    """P(Poisson counts + two-sided geometric noise = seen), summed over all combinations."""

    def noise(value: int) -> float:
        if epsilon is None:
            return float(value == 0)
        e = math.exp(-epsilon)
        one = [(1 - e) / (1 + e) * e ** abs(v) for v in range(-60, 61)]
        if agents == 1:
            return one[value + 60]
        return sum(one[v + 60] * one[value - v + 60] for v in range(-30, 31) if abs(value - v) < 60)

    product = 1.0
    for cell, mean in zip(seen, expected, strict=True):
        counts = range(40)
        product *= sum(
            math.exp(-mean) * mean**n / math.factorial(n) * noise(cell - n) for n in counts
        )
    return product


@pytest.mark.parametrize(("epsilon", "agents"), [(None, 1), (2.0, 1), (1.0, 2)])
def test_the_posterior_is_bayes_rule_over_the_class_of_a_cluster(
    epsilon: float | None, agents: int
) -> None:
    histogram, labels, purity = torch.tensor([[4, 1, 0], [0, 0, 2]]), 9.0, 0.8
    if epsilon is not None:
        histogram = histogram - 1  # noise makes counts negative
    mass = torch.tensor([0.7, 0.3])
    found = class_posterior(
        histogram, mass, labels, epsilon=epsilon, agents=agents, purity=purity, balanced=False
    )
    for k in range(2):
        expected = float(mass[k]) * labels
        high, low = expected * purity, expected * (1 - purity) / 2
        simulate_with = [
            likelihood(
                histogram[k].tolist(),
                [high if c == main else low for c in range(3)],
                epsilon,
                agents,
            )
            for main in range(3)
        ]
        assert found[k].tolist() == pytest.approx(
            [t / sum(simulate_with) for t in simulate_with], abs=1e-4
        )


def test_a_histogram_of_noise_gives_a_uniform_posterior_and_one_without_noise_a_sure_one() -> None:
    histogram = torch.tensor([[30, 2, -5], [-3, 40, 7]])
    even = torch.tensor([0.5, 0.5])
    kind: dict[str, Any] = {"agents": 2, "purity": 0.9, "balanced": False}
    dim = class_posterior(histogram, even, 10.0, epsilon=0.001, **kind)
    assert float((dim - 1 / 3).abs().max()) < 0.02
    counted = torch.tensor([[30, 2, 0], [0, 40, 7]])
    sure = class_posterior(counted, even, 79.0, epsilon=None, **kind)
    assert sure.argmax(dim=1).tolist() == [0, 1]
    assert float(sure.amax(dim=1).min()) > 0.999


def test_permuting_the_classes_permutes_the_posterior() -> None:
    histogram = torch.tensor([[4, 0, 1], [2, 3, -1], [0, 0, 5]])
    mass = torch.full((3,), 1 / 3)
    kind: dict[str, Any] = {"epsilon": 1.0, "agents": 2, "purity": 0.9, "balanced": False}
    first = class_posterior(histogram, mass, 15.0, **kind)
    for order in itertools.permutations(range(3)):
        again = class_posterior(histogram[:, list(order)], mass, 15.0, **kind)
        torch.testing.assert_close(again, first[:, list(order)])


def test_a_balanced_prior_gives_an_ambiguous_cluster_to_the_class_without_clusters() -> None:
    # Both clusters look like class 0, the second less so; half of the rows must be class 1.
    histogram, half = torch.tensor([[9, 0], [5, 4]]), torch.tensor([0.5, 0.5])
    kind: dict[str, Any] = {"epsilon": 0.5, "agents": 1, "purity": 0.9}
    loose = class_posterior(histogram, half, 18.0, balanced=False, **kind)
    fair = class_posterior(histogram, half, 18.0, balanced=True, **kind)
    assert loose.argmax(dim=1).tolist() == [0, 0]
    assert fair.argmax(dim=1).tolist() == [0, 1]
    assert float((half[:, None] * fair).sum(dim=0)[0]) == pytest.approx(0.5, abs=1e-3)


def test_an_ambiguous_cluster_follows_the_neighbours_with_which_it_shares_borders() -> None:
    # 0 and 1 are certain, 2 is ambiguous: many rows lie between it and 0, few between it and 1.
    histogram = torch.tensor([[20, 0], [0, 20], [1, 1]])
    borders = torch.tensor([[99.0, 0, 30], [0, 99, 5], [30, 5, 99]])
    kind: dict[str, Any] = {"epsilon": 1.0, "agents": 1, "purity": 0.9, "balanced": False}
    third = torch.full((3,), 1 / 3)

    def simulate_with(coupling: float, graph: Tensor | None = borders) -> Tensor:
        return class_posterior(histogram, third, 40.0, borders=graph, coupling=coupling, **kind)

    assert simulate_with(0.0)[2].tolist() == pytest.approx([0.5, 0.5])
    assert simulate_with(8.0, None)[2].tolist() == pytest.approx([0.5, 0.5])
    # mean field: log odds 8 (30 - 5) / 35 of certain neighbours
    assert float(simulate_with(8.0)[2].log().diff()) == pytest.approx(-8 * 25 / 35, abs=0.01)
    assert simulate_with(8.0)[:2].argmax(dim=1).tolist() == [0, 1]


def test_borders_are_the_rows_between_cells_of_two_clusters() -> None:
    state = simulate(make("label_census", **FEW), federated_data(labelled=40)).state
    agents = federated_data(labelled=40).agents
    rows = sum(len(a.held_unlabelled) for a in agents if a.held_unlabelled is not None)
    assert torch.equal(state.borders, state.borders.T)
    assert int(state.borders.sum()) == 2 * rows  # each row is between two cells, counted both ways


# Which agents are called for what -----------------------------------------------------------


def test_a_support_agent_is_called_once_and_sends_counts_only() -> None:
    parties = federated_data(labelled=40)
    after = simulate(make("label_census", **GENERATOR), parties, engine=RecordingEngine)
    assert isinstance(after.engine, RecordingEngine)
    recorded = [(c.step.__name__, r) for c, r in after.engine.recorded if c.to.role == "support"]
    assert [step for step, _ in recorded] == ["answer", "answer"]
    assert {reply.sender.id for _, reply in recorded} == {"s0", "s1"}
    for _, reply in recorded:
        assert isinstance(reply.content, Census)
        assert vars(reply.content).keys() == {"census"}
        assert reply.content.census.dtype == torch.int64
        assert int(reply.content.census.sum()) == 20  # no plan: exact


def test_each_labelled_row_counts_once_in_its_cluster_and_class() -> None:
    parties = federated_data(labelled=40)
    after = simulate(make("label_census", **FEW), parties)
    state, census = after.state, after.algorithm
    assert isinstance(census, LabelCensus)
    expected = np.zeros((5, 10), dtype=np.int64)
    for agent in parties.agents:
        if agent.held_labelled is not None:
            rows = agent.held_labelled
            features = encode(2 * rows.x.float() / 255 - 1, state.encoder, places=2)
            points = torch.nn.functional.normalize(features - state.mean, dim=1)
            for point, label in zip(points, rows.y.tolist(), strict=True):
                cell = int((state.centroids - point).square().sum(dim=1).argmin())
                expected[int(state.cluster[cell]), label] += 1
    assert state.histogram.tolist() == expected.tolist()


def test_labels_change_no_weight_before_the_census() -> None:
    # Encoder and clusters do not depend on labels; later rounds do.
    one, other = federated_data(labelled=40), federated_data(labelled=40)
    for agent in other.agents:
        if agent.held_labelled is not None:
            agent.held_labelled.y.copy_((agent.held_labelled.y + 1) % 10)
    before = [simulate(make("label_census", **FEW), p, rounds=4).state for p in (one, other)]
    after = [simulate(make("label_census", **FEW), p).state for p in (one, other)]
    assert same_bits(*before)
    assert not same_bits({"F": after[0].F}, {"F": after[1].F})
    assert same_bits({"e": after[0].encoder}, {"e": after[1].encoder})


@pytest.mark.parametrize("parties", [federated_data, at_clients, at_server])
def test_labelled_rows_affect_the_run_only_through_the_table(
    parties: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The table is fixed while labelled images and labels change: no message, no memory and no part
    # of the state may change.
    def simulate_with(changed: bool, fixed: bool) -> tuple[Any, list[Any]]:
        with monkeypatch.context() as patch:
            if fixed:
                table = torch.ones(5, 10, dtype=torch.int64)
                patch.setattr(LabelCensus, "_count_labels", lambda *_: table)
            those = parties(labelled=20)
            for agent in those.agents:
                if changed and agent.held_labelled is not None:
                    agent.held_labelled.x.copy_(255 - agent.held_labelled.x)
                    agent.held_labelled.y.copy_((agent.held_labelled.y + 1) % 10)
            after = simulate(make("label_census", **GENERATOR), those, engine=RecordingEngine)
            assert isinstance(after.engine, RecordingEngine)
            sent = [vars(m) for call, r in after.engine.recorded for m in (call.message, r.content)]
            return after.state, [*sent, {a.id: a.memory for a in those.agents}]

    state, sent = simulate_with(changed=False, fixed=True)
    other, also = simulate_with(changed=True, fixed=True)
    assert same_bits(state, other)
    assert len(sent) == len(also) > 20
    assert all(same_tree(one, two) for one, two in zip(sent, also, strict=True))
    with_labels, _ = simulate_with(changed=True, fixed=False)
    assert not same_bits(with_labels, simulate_with(changed=False, fixed=False)[0])  # the control


def same_tree(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_tree(one[k], other[k]) for k in one)
    return bool(one == other)


def test_the_encoder_is_made_in_its_own_phase_and_stays_fixed() -> None:
    begun, *after = (
        simulate(make("label_census", **FEW), federated_data(labelled=40), rounds=r).state
        for r in (0, 1, 2, 3, 6, 9)
    )
    assert not torch.equal(begun.whitener, after[0].whitener)
    assert not torch.equal(after[0].encoder["filters"], after[1].encoder["filters"])
    assert not torch.equal(after[1].encoder["map"], after[2].encoder["map"])
    for later in after[3:]:
        assert same_bits({"e": later.encoder}, {"e": after[2].encoder})


def test_agents_delete_their_features_after_the_clustering() -> None:
    for rounds, kept in ((3, False), (4, True), (6, False)):
        parties = federated_data(labelled=40)
        simulate(make("label_census", **FEW), parties, rounds=rounds)
        held = {"features" in a.memory for a in parties.agents if a.held_unlabelled is not None}
        assert held == {kept}


def test_the_map_does_not_depend_on_the_number_of_agents_called_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    maps = []
    for at_once in (1, 16):
        monkeypatch.setattr(feature_map, "AT_ONCE", at_once)
        maps.append(
            simulate(make("label_census", **FEW), federated_data(labelled=40), rounds=6).state
        )
    assert same_bits(*maps)


def test_sums_that_overflow_are_refused() -> None:
    class Endless(LocalEngine):
        def _copy_message(self, message: Any) -> Any:
            if isinstance(message, Sums):
                return replace(message, total=torch.full_like(message.total, 3e38))
            return super()._copy_message(message)

    with pytest.raises(MessageError, match="the sum of total has numbers that are not finite"):
        simulate(make("label_census", **FEW), federated_data(labelled=40), engine=Endless, rounds=1)


def test_an_agent_that_missed_its_clusters_declines_training() -> None:
    parties = federated_data(labelled=40)
    after = simulate(make("label_census", **FEW), parties, rounds=7, engine=RecordingEngine)
    assert isinstance(after.engine, RecordingEngine)
    for agent in parties.agents:
        agent.memory = {}
    for now in planned_rounds(after.algorithm.phases())[7:]:
        after.federation.begin(now)
        after.engine.recorded.clear()
        later = after.algorithm.round(after.state, after.federation)
        assert sum(reply.declined for _, reply in after.engine.recorded) == sum(
            a.held_unlabelled is not None for a in parties.agents
        )
        assert same_bits({"F": after.state.F}, {"F": later.F})


@pytest.mark.parametrize(
    ("epsilon", "labels", "clusters", "k"),
    [
        (2.0, 100, None, 20),  # 2 x 100 / 10 is 20
        (1.0, 100, None, 10),
        (0.5, 300, None, 10),  # 15, just below 20
        (1.0, 300, None, 20),
        (1.6, 100, None, 20),  # 16, though an epsilon is rounded down before its noise is drawn
        (1.0, 100, 37, 37),
    ],
)
def test_there_are_two_clusters_per_class_if_the_noise_leaves_the_counts_readable(
    epsilon: float, labels: int, clusters: int | None, k: int
) -> None:
    census = make("label_census", clusters=clusters)
    plan = make_census_plan(PrivacySettings(epsilon=epsilon), rows=labels)
    assert LabelCensus(census.cfg, census.task, plan).k == k
    assert LabelCensus(census.cfg, census.task).k == (clusters or 20)  # no noise


NOISY = torch.tensor([[3, -1, 6], [2, 2, 0], [-4, -1, -2]])


def test_the_reading_noise_clusters_is_the_largest_count_and_the_first_of_equals() -> None:
    assert label_by_majority(NOISY).tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]


def test_shares_use_positive_counts_and_are_equal_without_them() -> None:
    expected = torch.tensor([[3 / 9, 0, 6 / 9], [0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(compute_class_shares(NOISY), expected)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("reading", ["majority", "shares"])
def test_another_reading_changes_the_posterior_of_the_same_released_table(
    reading: str,
) -> None:
    other, usual = (
        simulate(algorithm("label_census", reading=how), federated_data())
        for how in (reading, "bayes")
    )
    assert torch.equal(other.state.histogram, usual.state.histogram)
    read = {"majority": label_by_majority, "shares": compute_class_shares}[reading](
        other.state.histogram
    )
    assert torch.equal(other.state.classes, read)
    assert not torch.equal(other.state.classes, usual.state.classes)  # the control


def test_a_row_of_a_known_cluster_has_its_class_with_the_assumed_purity() -> None:
    simulate_with = class_given_cluster(torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0]]), 0.8)
    torch.testing.assert_close(simulate_with, torch.tensor([[0.8, 0.1, 0.1], [0.45, 0.45, 0.1]]))


def test_self_training_learns_the_teachers_prediction_times_the_likelihood_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learned: list[tuple[Tensor, Tensor]] = []

    def guessed(F: nn.Module, x: Tensor, **_: Any) -> Tensor:
        return torch.tensor([0.5, 0.3, 0.2] + [0.0] * 7).expand(len(x), 10)

    def noted(self: Any, agent: Any, picked: Tensor, p: Tensor, msg: Any, ctx: Any) -> ModelUpdate:
        learned.append((agent.memory["cluster"][picked], p))
        return ModelUpdate(msg.F)

    monkeypatch.setattr(local_ssl, "guess_labels", guessed)
    monkeypatch.setattr(LabelCensus, "_learn", noted)
    parties = federated_data(labelled=40)
    after = simulate(make("label_census", **FEW), parties, rounds=7)
    agent = next(a for a in parties.agents if a.held_unlabelled is not None)
    agent.memory = {"cluster": torch.arange(len(agent.unlabelled)) % 2}
    assert isinstance(after.algorithm, LabelCensus)
    known = torch.zeros(5, 10)
    known[0, 1] = known[1, 9] = 1.0  # the second prediction, and a class that was not predicted
    request = SelfTrainingRequest(after.state.F, known, 1e-3, after.state.F)
    after.algorithm.self_training_pass(
        agent, request, Context(0, 8, agent.id, "1", "a", torch.device("cpu"))
    )
    [(cluster, p)] = learned
    # Purity 0.9: 0.9 for the class of the cluster and 1/90 for each other; 0.5, 0.3 and 0.2 times.
    simulate_with = {
        0: torch.tensor([0.5 / 90, 0.3 * 0.9, 0.2 / 90] + [0.0] * 7),
        1: torch.tensor([0.5, 0.3, 0.2] + [0.0] * 7),  # the same for all three
    }
    for number, expected in simulate_with.items():
        own = p[cluster == number]
        assert len(own)
        torch.testing.assert_close(own, (expected / expected.sum()).expand_as(own))


@pytest.mark.parametrize("clusters", [2, 30])
def test_more_clusters_than_rows_of_an_agent_and_very_few_give_finite_weights(
    clusters: int,
) -> None:
    parties = federated_data(labelled=20, unlabelled=20)
    after = simulate(make("label_census", **(FEW | {"clusters": clusters})), parties)
    assert finite(after.state)
    assert int(after.state.histogram.sum()) == 20


def test_a_run_in_which_all_agents_decline_in_every_round_learns_nothing() -> None:
    after = simulate(
        make("label_census", **FEW), federated_data(labelled=40), engine=DecliningEngine
    )
    assert after.state.answers == 0
    assert same_bits({"e": after.begun.encoder}, {"e": after.state.encoder})
    assert finite(after.state)


def test_mixed_agents_answer_with_labelled_rows_and_train_on_the_others() -> None:
    after = simulate(make("label_census", **FEW), at_clients(labelled=20), engine=RecordingEngine)
    assert isinstance(after.engine, RecordingEngine)
    steps = [call.step.__name__ for call, _ in after.engine.recorded]
    assert steps.count("answer") == 2
    assert int(after.state.histogram.sum()) == 20


def test_the_cluster_of_a_labelled_row_is_computed_from_that_row_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # In a batch of another size features differ in their last bits, so adding a record could move
    # another one over a border. (The control: unlabelled rows are batched.)
    parties, seen = federated_data(labelled=40), []
    given = LabelCensus.cluster_of

    def watched(self: LabelCensus, x: Tensor, msg: Any, ctx: Any) -> Tensor:
        seen.append((ctx.agent[0], len(x)))
        return given(self, x, msg, ctx)

    monkeypatch.setattr(LabelCensus, "cluster_of", watched)
    simulate(make("label_census", **FEW), parties)
    # Twice each: the replaced method is not part of privssl.
    assert [size for who, size in seen if who == "s"] == [1] * 80
    assert max(size for who, size in seen if who == "q") > 1


def test_the_round_of_the_answers_is_saved_at_once_because_answers_cannot_be_repeated() -> None:
    rounds = planned_rounds(make("label_census", **FEW).phases())
    assert [now.phase for now in rounds if now.saved] == ["census"]
    others = planned_rounds(make("fedsem").phases())
    assert not any(now.saved for now in others)


def test_no_pass_over_query_agents_lies_between_the_answers_and_their_checkpoint() -> None:
    after = simulate(
        make("label_census", **FEW), federated_data(labelled=40), engine=RecordingEngine
    )
    assert isinstance(after.engine, RecordingEngine)
    calls = [call for call, _ in after.engine.recorded]
    answered = [call.round for call in calls if call.step.__name__ == "answer"]
    in_that_round = [c.step.__name__ for c in calls if c.round in answered]
    assert in_that_round == ["find_clusters"] * 2 + ["answer"] * 2


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("whole", [True, False], ids=["done whole", "control"])
@pytest.mark.parametrize("moment", ["between two answers", "after them"])
def test_ctrl_c_in_the_round_of_the_answers_waits_for_their_checkpoint(
    whole: bool, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        monkeypatch.setattr("privssl.runs.round_loop.defer_interrupts", contextlib.nullcontext)
    left = [signal.SIGINT]
    answer, measure = LabelCensus.answer, RoundLoop._measure_round

    @functools.wraps(answer)
    def pressed_before(self: LabelCensus, agent: Any, msg: Any, ctx: Any) -> Any:
        if agent.id == "s1" and left:
            signal.raise_signal(left.pop())
        return answer(self, agent, msg, ctx)

    def pressed_after(self: RoundLoop, state: Any, now: Round, last: bool) -> dict[str, float]:
        if now.phase == "census" and left:
            signal.raise_signal(left.pop())
        return measure(self, state, now, last)

    if moment == "after them":
        monkeypatch.setattr(RoundLoop, "_measure_round", pressed_after)
    else:
        monkeypatch.setattr(LabelCensus, "answer", pressed_before)
    config = Path(__file__).parents[2] / "configs" / "label_census.yaml"
    outcome = command(config, *SHORT, f"run.output={tmp_path / 'run'}", "run.workers=1")
    assert outcome.status == INTERRUPTED
    resumed = command("--resume", tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    lost = "budget_exhausted"  # no agent answers twice
    assert (resumed.status, results["status"]) == (0, "finished" if whole else lost)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("where", ["round", "keep"])
def test_answers_are_kept_even_if_metrics_cannot_be_written(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_with, kept = CsvTracker.round, CsvTracker.keep
    full: list[bool] = []

    def round_of(self: CsvTracker, record: RoundRecord) -> None:
        full[:] = [True] * (record.phase == "census")
        if full and where == "round":
            raise RunFolderError("metrics.csv: cannot be written")
        simulate_with(self, record)

    def keep(self: CsvTracker) -> None:
        if full:
            raise RunFolderError("metrics.csv: cannot be written")
        kept(self)

    config = Path(__file__).parents[2] / "configs" / "label_census.yaml"
    with monkeypatch.context() as patched:
        patched.setattr(CsvTracker, "round", round_of)
        patched.setattr(CsvTracker, "keep", keep)
        outcome = command(config, *SHORT, f"run.output={tmp_path / 'run'}", "run.workers=1")
    assert (outcome.status, "cannot be written" in outcome.err) == (2, True)
    resumed = command("--resume", tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (resumed.status, results["status"]) == (0, "finished")


def test_a_picture_shows_the_released_counts_and_metrics_count_ambiguous_clusters() -> None:
    after = simulate(make("label_census", **FEW), federated_data(labelled=40))
    none = torch.zeros(0)
    picture = after.algorithm.pictures(after.state, none, none)["images/census"]
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    simulate_with = after.algorithm.metrics(after.state)
    # five clusters have at most five classes
    assert 5 <= simulate_with["census/classes_without_cluster"] <= 9
    assert 0 <= simulate_with["census/clusters_in_doubt"] <= 5
    assert after.algorithm.metrics(after.begun) == {}


# A malicious server ---------------------------------------------------------------------------


def malicious(name: str, map_of_rows: Map) -> Map:
    """The map with one invalid part. In one, cell 4 belongs to a cluster that does not exist."""
    mean, cluster = map_of_rows.mean, map_of_rows.cluster
    encoder = dict(map_of_rows.encoder)
    first = next(iter(encoder))
    beyond, below = cluster.clone(), cluster.clone()
    beyond[4], below[4] = 5, -1
    changes: dict[str, dict[str, Any]] = {
        "a mean for each of a thousand rows": {"mean": mean.expand(1000, -1).clone()},
        "a mean of another type": {"mean": mean.double()},
        "no centroids": {"centroids": map_of_rows.centroids[:0]},
        "a cluster too many": {"cluster": beyond},
        "a cluster below 0": {"cluster": below},
        "cells without a cluster": {"cluster": cluster[:3]},
        "clusters that are no whole numbers": {"cluster": cluster.float()},
        "an encoder with a layer of another shape": {
            "encoder": {**encoder, first: encoder[first][:1]}
        },
        "an encoder without a layer": {"encoder": {k: v for k, v in encoder.items() if k != first}},
        "an empty encoder": {"encoder": {}},
        "an encoder with one thing more": {"encoder": {**encoder, "more": torch.zeros(1)}},
        "an encoder of another type": {"encoder": {**encoder, first: encoder[first].double()}},
        "an encoder that is no number": {"encoder": {**encoder, first: encoder[first] * math.nan}},
        "an endless mean": {"mean": map_of_rows.mean + math.inf},
    }
    return replace(map_of_rows, **changes[name])


MAPS = [
    "a mean for each of a thousand rows", "a mean of another type", "no centroids",
    "a cluster too many", "a cluster below 0", "cells without a cluster",
    "clusters that are no whole numbers", "an encoder with a layer of another shape",
    "an encoder without a layer", "an empty encoder", "an encoder with one thing more",
    "an encoder of another type", "an encoder that is no number", "an endless mean",
]  # fmt: skip


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("name", MAPS)
def test_a_malicious_map_is_refused_in_the_same_way_for_any_number_of_rows(name: str) -> None:
    census = make("label_census", **FEW)
    after = simulate(census, federated_data(labelled=40), rounds=4)
    good = make_map(after.state)
    assert isinstance(census, LabelCensus)
    simulate_with = set()
    for labelled in (2, 4, 40):  # one row per agent, two, twenty
        parties = federated_data(labelled=labelled)
        federation = Federation(LocalEngine(parties.agents, seed=0, device=torch.device("cpu")), 0)
        federation.begin(after.federation.round)
        counted = federation.call(federation.support[0], census.answer, good).payload.census
        assert int(counted.sum()) == labelled // 2  # the control: the true map is answered
        with pytest.raises(MessageError) as refused:
            federation.call(federation.support[0], census.answer, malicious(name, good))
        simulate_with.add(str(refused.value))
    assert len(simulate_with) == 1


@pytest.mark.parametrize("census", [torch.zeros(5, 9, dtype=torch.int64), torch.zeros(5, 10)])
def test_an_answer_that_is_no_table_of_this_census_is_refused(census: Tensor) -> None:
    class Liar(LocalEngine):
        def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
            if calls and calls[0].step.__name__ == "answer":
                return [Reply(call.to, Census(census)) for call in calls]
            return list(super().deliver(calls))

    with pytest.raises(MessageError, match="it must be"):
        simulate(make("label_census", **FEW), federated_data(labelled=40), engine=Liar)


@pytest.mark.parametrize("epsilon", [None, 16.0, 2.0, 0.01, 1e-5])
def test_counts_far_above_the_expected_ones_still_give_the_class(epsilon: float | None) -> None:
    # 10 labels expected, 300 counted; and a false count of 10^9 costs no time
    histogram = torch.tensor([[45, 300_000, 2], [2, 1, 10**9]])
    found = class_posterior(
        histogram, torch.tensor([0.5, 0.5]), 20.0, epsilon=epsilon, agents=2, purity=0.9,
        balanced=False,
    )  # fmt: skip
    assert found.argmax(dim=1).tolist() == [1, 2]
    assert bool(found.isfinite().all())
