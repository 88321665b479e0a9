"""From a config to the agents: who holds which rows, hidden labels, and replaying a split."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from privssl.core.agents import Agent, AgentLocation
from privssl.data import FederatedDataset, build, class_counts
from privssl.data.datasets import Dataset, checksum, load_dataset
from privssl.data.split_manifest import Manifest
from privssl.errors import DataError
from privssl.settings.schema import AgentSettings, DataSettings

TOY = load_dataset(DataSettings(name="toy"))  # 1,000 rows, 100 of each of ten classes


def federated_data(
    *, support: int = 2, query: int = 3, mixed: int = 0, seed: int = 0, dataset: Dataset = TOY,
    **settings: Any,
) -> FederatedDataset:  # fmt: skip
    agents = AgentSettings(support=support, query=query, mixed=mixed)
    return build(DataSettings(name="toy", **settings), agents, seed, dataset)


def held(agent: Agent) -> list[Tensor]:
    """Every tensor that an agent has, in a fixed order."""
    rows = [agent.held_labelled, agent.held_unlabelled]
    every = [getattr(r, f.name) for r in rows if r is not None for f in dataclasses.fields(r)]
    return [tensor for tensor in every if tensor is not None]  # origin: without an encoder None


def ids(found: FederatedDataset) -> list[int]:
    """Row ids of all agents and of validation, with repetitions."""
    rows = [part for a in found.agents for part in (a.held_labelled, a.held_unlabelled) if part]
    everything = [*rows, found.validation] if found.validation else rows
    return sorted(i for part in everything for i in part.ids.tolist())


# Who holds what -----------------------------------------------------------------------------


def roles(found: FederatedDataset) -> dict[str, str]:
    return {agent.id: agent.role for agent in found.agents}


def test_support_agents_hold_the_labels_and_query_agents_the_rest() -> None:
    found = federated_data(labelled=50)
    assert roles(found) == {"s0": "support", "s1": "support"} | dict.fromkeys(
        ("q0", "q1", "q2"), "query"
    )
    assert [len(agent.labelled) for agent in found.agents[:2]] == [25, 25]
    assert sorted(len(agent.unlabelled) for agent in found.agents[2:]) == [316, 317, 317]
    assert found.validation is None


def test_a_labelled_server_holds_all_labels() -> None:
    found = federated_data(support=0, labels="labels-at-server", labelled=50)
    assert roles(found) == {"server": "server"} | dict.fromkeys(("q0", "q1", "q2"), "query")
    server = found.agents[0]
    assert (server.location, len(server.labelled)) == (AgentLocation.SERVER, 50)


def test_mixed_agents_hold_both_kinds_and_query_agents_share_the_unlabelled_rows() -> None:
    found = federated_data(support=0, query=1, mixed=2, labels="labels-at-client", labelled=100)
    assert roles(found) == {"m0": "mixed", "m1": "mixed", "q0": "query"}
    assert [len(agent.unlabelled) for agent in found.agents] == [300, 300, 300]
    assert [len(agent.labelled) for agent in found.agents[:2]] == [50, 50]


@given(
    labelled=st.integers(2, 300),
    validation=st.integers(0, 200),
    unlabelled=st.none() | st.integers(3, 500),
    stratified=st.booleans(),
    rule=st.sampled_from(["iid", "dirichlet", "dirichlet_equal"]),
    seed=st.integers(0, 2**40),
)
def test_no_row_is_held_twice_and_none_is_lost(
    labelled: int, validation: int, unlabelled: int | None, stratified: bool, rule: str, seed: int
) -> None:
    found = federated_data(
        seed=seed, labelled=labelled, validation=validation, unlabelled=unlabelled,
        stratified=stratified, partition=rule, alpha=None if rule == "iid" else 0.1,
    )  # fmt: skip
    everyone = ids(found)
    rest = 1000 - labelled - validation if unlabelled is None else unlabelled
    assert len(set(everyone)) == len(everyone) == labelled + validation + rest
    assert sum(len(a.labelled) for a in found.agents if a.role == "support") == labelled
    if unlabelled is None:
        assert everyone == list(range(1000))


def test_agents_of_equal_size_draw_their_classes_from_all_free_rows() -> None:
    # 100 rows of each class; 3 agents with 60 rows of one class each. If 180 rows were picked
    # first, no class would have much more than 18 of them.
    found = federated_data(
        labelled=100, unlabelled=180, partition="dirichlet_equal", alpha=1e-6,
        labelled_partition="iid",
    )  # fmt: skip
    _, held = class_counts(found)
    assert [counts.max() for counts in held.values()] == [60, 60, 60]
    # The rule for unlabelled rows does not change the number of labelled ones.
    found = federated_data(labelled=100, unlabelled=180, partition="dirichlet_equal", alpha=1e-6)
    assert [len(agent.labelled) for agent in found.agents[:2]] == [50, 50]


def test_rows_have_their_own_images_and_labels() -> None:
    found = federated_data(labelled=50, validation=20)
    assert found.validation is not None
    for rows in (found.agents[0].labelled, found.agents[1].labelled, found.validation):
        assert torch.equal(rows.x, TOY.x_train[rows.ids])
        assert torch.equal(rows.y, TOY.y_train[rows.ids])
    for agent in found.agents[2:]:
        assert torch.equal(agent.unlabelled.x, TOY.x_train[agent.unlabelled.ids])


@pytest.mark.parametrize(("labelled", "most"), [(50, 5), (57, 6), (4, 1), (990, 99)])
def test_stratified_labels_are_equally_many_of_each_class(labelled: int, most: int) -> None:
    found = federated_data(labelled=labelled)
    counts = sum(class_counts(found)[0].values())
    assert np.max(counts) == most
    assert np.ptp(counts) <= 1


def test_a_class_with_too_few_rows_gives_all_and_other_classes_give_more() -> None:
    # Classes 0 and 1 with 3 rows and 27: of 20, class 0 gives 3 and class 1 gives 17.
    y = torch.tensor([0] * 3 + [1] * 27)
    few = dataclasses.replace(TOY, x_train=TOY.x_train[:30], y_train=y, class_names=("a", "b"))
    found = federated_data(support=1, labelled=20, dataset=few)
    assert class_counts(found)[0]["s0"].tolist() == [3, 17]


def test_labels_that_are_not_stratified_are_drawn_regardless_of_class() -> None:
    draws = [federated_data(labelled=100, stratified=False, seed=seed) for seed in range(5)]
    spreads = [np.ptp(sum(class_counts(found)[0].values())) for found in draws]
    assert min(spreads) > 1  # ten equal classes by chance, five times: less than 1e-8 each


def test_more_labels_are_a_superset_of_fewer() -> None:
    few, many = federated_data(labelled=50), federated_data(labelled=80)

    def labelled(found: FederatedDataset) -> set[int]:
        return {i for a in found.agents[:2] for i in a.labelled.ids.tolist()}

    assert labelled(few) < labelled(many)


def test_labelled_and_unlabelled_rows_may_have_their_own_partition_rules() -> None:
    found = federated_data(
        query=5, labelled=100, partition="classes_per_agent", k=2, labelled_partition="iid"
    )
    labelled, unlabelled = class_counts(found)
    assert all(counts.tolist() == [5] * 10 for counts in labelled.values())
    assert all((counts > 0).sum() == 2 for counts in unlabelled.values())


def test_labelled_partition_defaults_to_the_partition_of_all_rows() -> None:
    labelled, _ = class_counts(federated_data(labelled=100, partition="round_robin"))
    assert labelled["s0"].tolist() == [10, 0] * 5


def test_under_one_rule_both_kinds_of_rows_of_a_mixed_agent_have_the_same_classes() -> None:
    found = federated_data(
        support=0, query=0, mixed=5, labels="labels-at-client", labelled=100,
        partition="classes_per_agent", k=2,
    )  # fmt: skip
    labelled, unlabelled = class_counts(found)
    for agent in ("m0", "m1", "m2", "m3", "m4"):
        assert ((labelled[agent] > 0) == (unlabelled[agent] > 0)).all()


# Hidden labels ------------------------------------------------------------------------------


def of_rows(split: Manifest, dataset: Dataset) -> tuple[Manifest, Dataset]:
    """The split as if it had been drawn for these rows."""
    return dataclasses.replace(split, checksum=checksum(dataset)), dataset


def test_labels_of_unlabelled_rows_reach_no_agent() -> None:
    drawn = federated_data(labelled=50, validation=20)
    hidden = torch.cat([agent.unlabelled.ids for agent in drawn.agents[2:]])
    permuted = TOY.y_train.clone()
    permuted[hidden] = permuted[hidden.roll(1)]
    assert not torch.equal(permuted, TOY.y_train)
    # The same split is replayed with other labels, because a new draw depends on all classes.
    replayed = replay(*of_rows(drawn.manifest, dataclasses.replace(TOY, y_train=permuted)))
    for before, after in zip(drawn.agents, replayed.agents, strict=True):
        assert all(map(torch.equal, held(before), held(after)))
    assert torch.equal(replayed.true_labels, permuted)
    # The control: the label of a labelled row is detected.
    seen = TOY.y_train.clone()
    seen[drawn.agents[0].labelled.ids[0]] += 1
    changed = replay(*of_rows(drawn.manifest, dataclasses.replace(TOY, y_train=seen)))
    assert not all(map(torch.equal, held(drawn.agents[0]), held(changed.agents[0])))


def test_unlabelled_rows_have_no_field_for_a_label() -> None:
    agent = federated_data(labelled=50).agents[-1]
    fields = {field.name for field in dataclasses.fields(agent.unlabelled)}
    assert fields == {"x", "ids", "origin", "persons"}
    assert agent.unlabelled.origin is None  # of a table: tests/rows/test_csv_rows.py
    assert agent.held_labelled is None


def test_agents_share_no_memory_with_the_data_set_or_other_agents() -> None:
    found = federated_data(labelled=50, validation=20)
    whole = [TOY.x_train, TOY.y_train, found.true_labels]
    tensors = [t for agent in found.agents for t in held(agent)]
    storages = [t.untyped_storage().data_ptr() for t in tensors + whole]
    assert len(set(storages)) == len(storages)
    # A view would have the storage of the whole set behind it.
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in tensors)


def test_the_data_set_keeps_no_training_rows() -> None:
    kept = federated_data(labelled=50, validation=20).dataset.x_train
    assert len(kept) == 0 and kept.untyped_storage().nbytes() == 0


# Reproducing a split ------------------------------------------------------------------------


def test_one_seed_gives_one_split_and_another_seed_another() -> None:
    base = federated_data(labelled=50).manifest
    assert federated_data(labelled=50).manifest == base
    assert federated_data(labelled=50, seed=1).manifest.agents != base.agents


def test_the_hash_does_not_depend_on_folders() -> None:
    a, b = federated_data(labelled=50), federated_data(labelled=50, root="somewhere")
    assert a.manifest.hash == b.manifest.hash


def replay(split: Any, dataset: Dataset = TOY, **settings: Any) -> FederatedDataset:
    """Write a manifest and build from it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "split.json"
        split.write(path)
        merged = {"labelled": 50, "validation": 20, "split": str(path), **settings}
        return federated_data(dataset=dataset, **merged)


def test_a_replayed_split_gives_every_agent_the_same_rows_and_keeps_its_hash() -> None:
    drawn = federated_data(query=12, labelled=50, validation=20, seed=5)
    again = replay(drawn.manifest, query=12, seed=99)
    assert [agent.id for agent in again.agents] == [agent.id for agent in drawn.agents]
    assert again.manifest.hash == drawn.manifest.hash
    for before, after in zip(drawn.agents, again.agents, strict=True):
        assert all(map(torch.equal, held(before), held(after)))
    assert ids(again) == ids(drawn)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"labelled": 60}, "has 50 labelled rows, but data.labelled is 60"),
        ({"validation": 0}, "has 20 validation rows, but data.validation is 0"),
        ({"unlabelled": 100}, "has 930 unlabelled rows, but data.unlabelled is 100"),
        ({"query": 4}, "unlabelled rows to q0, q1, q2, but .* to q0, q1, q2, q3"),
        ({"support": 1}, "labelled rows to s0, s1, but .* to s0"),
        ({"query": 0}, "unlabelled rows to q0, q1, q2, but .* to no agent"),
        ({"support": 0, "labels": "labels-at-server"}, "to s0, s1, but .* to server"),
        ({"partition": "dirichlet", "alpha": 0.1}, "partition is dirichlet, .* drawn with iid"),
        ({"stratified": False}, "data.stratified is False, but .* drawn with True"),
    ],
    ids=str,
)
def test_a_split_that_does_not_match_the_config_is_refused(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        replay(federated_data(labelled=50, validation=20).manifest, **settings)


def test_a_split_is_replayed_by_its_own_rule_and_by_a_config_without_one() -> None:
    rule: dict[str, Any] = {"partition": "dirichlet", "alpha": 0.5}
    drawn = federated_data(labelled=50, validation=20, **rule)
    mute: dict[str, Any] = {}
    in_full = rule | {"labelled_partition": "dirichlet", "labelled_alpha": 0.5}
    for named in (mute, rule, in_full):
        assert replay(drawn.manifest, **named).manifest.hash == drawn.manifest.hash
    with pytest.raises(DataError, match=r"data.alpha is 0.1, but .* was drawn with 0.5"):
        replay(drawn.manifest, partition="dirichlet", alpha=0.1)


def test_a_split_of_other_rows_is_refused() -> None:
    other = dataclasses.replace(TOY, x_train=TOY.x_train.flip(0))
    with pytest.raises(DataError, match="other ones"):
        replay(federated_data(labelled=50, validation=20).manifest, other)


# Impossible splits --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"support": 0}, "agents.support is 0, so no agent would hold labels"),
        ({"mixed": 1}, "agents.mixed is 1, but with data.labels support there can be none"),
        ({"labels": "labels-at-server"}, "Set agents.support to 0"),
        ({"labels": "labels-at-client", "support": 0}, "agents.mixed is 0"),
        ({"labels": "labels-at-client", "mixed": 2}, "Set agents.support to 0"),
        ({"labelled": 900, "validation": 101}, r"= 1001, but toy has 1000 training rows"),
        ({"labelled": 900, "unlabelled": 101}, r"= 1001, but toy has 1000 training rows"),
        ({"labelled": 3, "support": 4}, "4 agents are to share 3 labelled rows"),
        ({"labelled": 1000}, "3 agents are to share 0 unlabelled rows"),
        ({"unlabelled": 2}, "3 agents are to share 2 unlabelled rows"),
        ({"unlabelled": 9, "query": 0}, "no agent holds unlabelled rows"),
        (
            {"support": 12, "labelled": 12, "labelled_partition": "round_robin", "seed": 1},
            "RoundRobin.. leaves .* without labelled rows",
        ),
        ({"partition": "classes_per_agent", "k": 1}, "Raise k to"),
    ],
    ids=str,
)  # fmt: skip
def test_a_split_that_cannot_be_drawn_is_refused_with_advice(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        federated_data(**settings)


def test_without_query_agents_only_labelled_rows_are_handed_out() -> None:
    found = federated_data(query=0, labelled=50)
    assert len(ids(found)) == 50


def test_class_counts_are_those_of_the_true_labels() -> None:
    labelled, unlabelled = class_counts(federated_data(labelled=50))
    assert labelled.keys() == {"s0", "s1"}
    assert unlabelled.keys() == {"q0", "q1", "q2"}
    # 100 rows of each class, 5 of them labelled.
    assert sum(labelled.values()).tolist() == [5] * 10  # type: ignore[union-attr]
    assert sum(unlabelled.values()).tolist() == [95] * 10  # type: ignore[union-attr]
