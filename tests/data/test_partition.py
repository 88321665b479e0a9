"""Partitions: every row has one owner under every rule, and classes are mixed as promised."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privssl.data.partition import (
    ClassesPerAgent,
    Dirichlet,
    DirichletEqual,
    Iid,
    Imbalanced,
    Ints,
    Partition,
    RoundRobin,
    Shards,
    _draw_class_counts,
    from_settings,
)
from privssl.errors import DataError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def balanced(rows: int, classes: int = 10) -> Ints:
    return np.arange(rows) % classes


def counts(labels: Ints, hands: list[Ints], classes: int = 10) -> Ints:
    """Rows of each class at each agent, (agents, C)."""
    return np.array([np.bincount(labels[hand], minlength=classes) for hand in hands])


def every_row_once(hands: list[Ints], rows: int) -> bool:
    return sorted(np.concatenate(hands).tolist()) == list(range(rows))


RULES: tuple[Partition, ...] = (
    Iid(),
    Dirichlet(0.5),
    Dirichlet(1e-300),
    Dirichlet(1e300),
    DirichletEqual(0.5),
    DirichletEqual(1e-300),
    RoundRobin(),
    Imbalanced(),
)


@given(
    rule=st.sampled_from(RULES),
    labels=st.lists(st.integers(0, 9), min_size=1, max_size=80),
    agents=st.integers(1, 15),
    seed=st.integers(0, 2**32),
)
def test_every_row_has_exactly_one_owner(
    rule: Partition, labels: list[int], agents: int, seed: int
) -> None:
    agents = min(agents, len(labels))
    hands = rule.split(np.array(labels), agents, rng(seed))
    assert len(hands) == agents
    assert every_row_once(hands, len(labels))
    assert all(hand.tolist() == sorted(hand.tolist()) for hand in hands)


def test_the_check_of_owners_detects_a_lost_or_repeated_row() -> None:
    assert every_row_once([np.array([0, 2]), np.array([1])], 3)
    assert not every_row_once([np.array([0, 2]), np.array([1, 2])], 3)
    assert not every_row_once([np.array([0]), np.array([1])], 3)


@given(
    labels=st.lists(st.integers(0, 6), min_size=7, max_size=80),
    agents=st.integers(1, 12),
    k=st.integers(1, 7),
)
def test_classes_per_agent_assigns_every_row_or_gives_the_reason_for_its_refusal(
    labels: list[int], agents: int, k: int
) -> None:
    agents, present = min(agents, len(labels)), len(set(labels))
    if k > present or agents * k < present:
        with pytest.raises(DataError):
            ClassesPerAgent(k).split(np.array(labels), agents, rng())
        return
    hands = ClassesPerAgent(k).split(np.array(labels), agents, rng())
    assert every_row_once(hands, len(labels))
    assert all(len(set(np.array(labels)[hand])) <= k for hand in hands)


@pytest.mark.parametrize("rule", [*RULES, ClassesPerAgent(2), Shards(2)], ids=str)
def test_the_same_generator_gives_the_same_split_and_another_gives_another(rule: Partition) -> None:
    labels = balanced(200)
    split = [hand.tolist() for hand in rule.split(labels, 12, rng(3))]
    assert split == [hand.tolist() for hand in rule.split(labels, 12, rng(3))]
    assert split != [hand.tolist() for hand in rule.split(labels, 12, rng(4))]


@pytest.mark.parametrize("rule", [*RULES, ClassesPerAgent(2), Shards(2)], ids=str)
def test_more_agents_than_rows_are_refused(rule: Partition) -> None:
    with pytest.raises(DataError, match="6 agents are to share 5 rows"):
        rule.split(balanced(5), 6, rng())


# Iid ----------------------------------------------------------------------------------------


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    agents=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_iid_agents_differ_by_at_most_one_row_in_total_and_in_each_class(
    labels: list[int], agents: int, seed: int
) -> None:
    agents = min(agents, len(labels))
    table = counts(np.array(labels), Iid().split(np.array(labels), agents, rng(seed)), 5)
    assert np.ptp(table.sum(axis=1)) <= 1
    assert np.ptp(table, axis=0).max() <= 1


# Dirichlet ----------------------------------------------------------------------------------


def test_a_tiny_alpha_gives_each_class_to_one_agent() -> None:
    labels = balanced(1000)
    table = counts(labels, Dirichlet(1e-9).split(labels, 4, rng()))
    # At most 3 agents get no class, and get one row each.
    assert ((table > 1).sum(axis=0) == 1).all()


@pytest.mark.parametrize("alpha", [1e9, 1e300])
def test_a_huge_alpha_is_iid(alpha: float) -> None:
    labels = balanced(1000)
    table = counts(labels, Dirichlet(alpha).split(labels, 4, rng()))
    assert np.ptp(table, axis=0).max() <= 1


@given(alpha=st.floats(1e-300, 1e300), rows=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_under_dirichlet_every_agent_has_rows(alpha: float, rows: int, seed: int) -> None:
    for agents in {1, (rows + 1) // 2, rows}:
        hands = Dirichlet(alpha).split(balanced(rows, 3), agents, rng(seed))
        assert min(map(len, hands)) >= 1
        assert every_row_once(hands, rows)


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    agents=st.integers(1, 9),
    alpha=st.floats(1e-300, 1e300),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_agents_of_equal_size_get_the_requested_number_of_distinct_rows(
    labels: list[int], agents: int, alpha: float, seed: int, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(1, len(labels)))
    agents = min(agents, rows)
    hands = DirichletEqual(alpha, rows).split(np.array(labels), agents, rng(seed))
    sizes = [len(hand) for hand in hands]
    assert (len(hands), sum(sizes)) == (agents, rows)
    assert max(sizes) - min(sizes) <= 1
    assert len(set(np.concatenate(hands).tolist())) == rows


def test_agents_of_equal_size_have_the_class_spread_of_the_distribution() -> None:
    # A share of a symmetric Dirichlet over C classes has mean 1/C and variance
    # (C - 1) / (C^2 (C alpha + 1)), and of 100 draws (1 - 1/100) of it and m (1 - m) / 100 more:
    # C = 4, alpha = 0.5: 3 / 48 = 0.0625, together 0.99 * 0.0625 + 0.1875 / 100 = 0.06375.
    labels = balanced(400 * 4 * 100, 4)
    shares = counts(labels, DirichletEqual(0.5, 400 * 100).split(labels, 400, rng()), 4) / 100
    assert shares.mean(axis=0) == pytest.approx([0.25] * 4, abs=0.04)
    assert shares.var() == pytest.approx(0.06375, rel=0.1)


def test_with_a_tiny_alpha_an_agent_of_equal_size_has_one_class_until_it_is_used_up() -> None:
    labels = balanced(1000, 4)  # 250 of each
    table = counts(labels, DirichletEqual(1e-9, 400).split(labels, 4, rng(1)), 4)
    assert (table.max(axis=1) == 100).all()
    table = counts(labels, DirichletEqual(1e-9, 1000).split(labels, 4, rng(1)), 4)
    assert (table.sum(axis=0) == 250).all()
    assert (table.sum(axis=1) == 250).all()


def test_a_used_up_class_is_not_drawn_and_the_others_keep_their_odds() -> None:
    # One row of class 0, and classes 1 and 2 at 1 : 3. Of 1,001 rows class 0 gives one, and the
    # others give about 250 and 750: the odds of the others do not change.
    left = np.array([1, 9000, 1000])
    drawn = _draw_class_counts(np.array([0.6, 0.1, 0.3]), 1001, left, rng())
    assert drawn[0] == 1
    assert drawn.sum() == 1001
    assert drawn[1] == pytest.approx(250, abs=5 * (1000 * 0.25 * 0.75) ** 0.5)
    # If none of the wanted classes is left, every remaining row is equally likely.
    drawn = _draw_class_counts(np.array([1.0, 0.0, 0.0]), 1001, left, rng())
    assert drawn[1] == pytest.approx(900, abs=5 * (1000 * 0.9 * 0.1) ** 0.5)


def test_asking_for_more_rows_than_exist_is_refused() -> None:
    with pytest.raises(DataError, match="6 of 5 rows"):
        DirichletEqual(1.0, 6).split(balanced(5), 2, rng())
    with pytest.raises(DataError, match="4 agents are to share 3 rows"):
        DirichletEqual(1.0, 3).split(balanced(5), 4, rng())


def test_the_spread_of_class_shares_is_that_of_the_distribution() -> None:
    # A share of a symmetric Dirichlet over n agents has mean 1/n and variance
    # (n - 1) / (n^2 (n alpha + 1)): here n = 4, alpha = 1, so 3 / 80.
    labels = balanced(400 * 100, 400)
    shares = counts(labels, Dirichlet(1.0).split(labels, 4, rng()), 400) / 100
    assert shares.var() == pytest.approx(3 / 80, rel=0.1)


# Classes ------------------------------------------------------------------------------------


def test_each_agent_owns_k_classes_and_all_classes_have_equally_many_owners() -> None:
    labels = balanced(1000)
    table = counts(labels, ClassesPerAgent(3).split(labels, 7, rng()))
    assert ((table > 0).sum(axis=1) == 3).all()
    owners = (table > 0).sum(axis=0)  # 7 * 3 = 21 places for 10 classes
    assert sorted(owners.tolist()) == [2] * 9 + [3]
    assert all(np.ptp(column[column > 0]) <= 1 for column in table.T)


def pairs_of_classes(rule: Partition, agents: int) -> list[tuple[int, ...]]:
    """The classes of each agent, sorted."""
    labels = balanced(100 * agents)
    return [tuple(sorted(set(labels[h].tolist()))) for h in rule.split(labels, agents, rng())]


def test_shards_have_one_class_each_and_are_dealt_at_random() -> None:
    labels = balanced(2000)
    table = counts(labels, Shards(2).split(labels, 100, rng()))
    # 200 shards of 10 rows, 20 of each class; an agent has two, of one class or of two
    assert set(table[table > 0].tolist()) <= {10, 20}
    assert table.sum(axis=1).tolist() == [20] * 100 and table.sum(axis=0).tolist() == [200] * 10
    # 55 kinds of pairs; 100 draws show most of them. The control: five fixed pairs.
    assert len(set(pairs_of_classes(Shards(2), 100))) > 25
    assert len(set(pairs_of_classes(ClassesPerAgent(2), 100))) == 5


def test_too_few_shards_for_all_classes_are_refused() -> None:
    with pytest.raises(DataError, match=r"partition shards: 3 agents .* Raise k to 4"):
        Shards(3).split(balanced(100), 3, rng())


def test_agents_that_cannot_own_all_classes_are_refused_with_the_necessary_k() -> None:
    with pytest.raises(DataError, match=r"cannot own all 10 classes.* Raise k to 4"):
        ClassesPerAgent(3).split(balanced(100), 3, rng())


def test_more_classes_per_agent_than_exist_are_refused() -> None:
    with pytest.raises(DataError, match="k is 11, but the rows have only 10 classes"):
        ClassesPerAgent(11).split(balanced(100), 3, rng())


def test_round_robin_reproduces_the_example_of_the_paper() -> None:  # Fan et al., section 5.5
    labels = balanced(100)

    def owned(agents: int) -> list[list[int]]:
        hands = RoundRobin().split(labels, agents, rng())
        return [sorted(set(labels[hand].tolist())) for hand in hands]

    assert owned(3) == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert owned(9) == [[0, 9], [1], [2], [3], [4], [5], [6], [7], [8]]


def test_with_more_agents_than_classes_round_robin_shares_the_classes() -> None:
    labels = balanced(100)
    table = counts(labels, RoundRobin().split(labels, 12, rng()))
    # Agents 10 and 11 share classes 0 and 1 with agents 0 and 1.
    assert table.max(axis=1).tolist() == [5, 5, 10, 10, 10, 10, 10, 10, 10, 10, 5, 5]
    assert table.argmax(axis=1).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


# FedMatch's table ---------------------------------------------------------------------------


def test_imbalanced_agents_have_the_class_mix_of_their_type() -> None:
    labels = balanced(100_000)
    table = counts(labels, Imbalanced().split(labels, 10, rng())) / 10_000
    base = [0.50, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15]
    for agent, mix in enumerate(table):
        # class c of type t has the probability base[(c - t) mod 10]
        expected = [base[(number - agent) % 10] for number in range(10)]
        # 6 standard deviations of a share of 10,000 draws are at most 0.03
        assert mix == pytest.approx(expected, abs=0.03)


def test_imbalanced_agents_have_equally_many_rows_and_types_repeat_after_ten() -> None:
    labels = balanced(5003)
    table = counts(labels, Imbalanced().split(labels, 20, rng()))
    assert set(table.sum(axis=1).tolist()) == {250, 251}
    assert table.argmax(axis=1).tolist() == [*range(10), *range(10)]


def test_imbalanced_needs_ten_classes() -> None:
    with pytest.raises(DataError, match="a table for 10 classes, and there is a class number 10"):
        Imbalanced().split(balanced(33, 11), 3, rng())


# Names --------------------------------------------------------------------------------------


def test_a_config_can_name_each_rule() -> None:
    assert from_settings("iid") == Iid()
    assert from_settings("dirichlet", alpha=0.1) == Dirichlet(0.1)
    assert from_settings("dirichlet_equal", alpha=0.3) == DirichletEqual(0.3)
    assert from_settings("classes_per_agent", k=2) == ClassesPerAgent(2)
    assert from_settings("shards", k=2) == Shards(2)
    assert from_settings("round_robin") == RoundRobin()
    assert from_settings("imbalanced") == Imbalanced()
