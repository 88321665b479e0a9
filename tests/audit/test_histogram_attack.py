"""``audit --empirical`` of a census: correct noise is accepted, and each planted mistake is named.

Each mistake is patched into the releasing code; the control is the same attack on the unchanged
code. The attack is random, and its tests have a level of one in a million: by chance a correct
release fails once in 20,000 runs of this file.
"""

import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting import discrete_laplace as sampler
from privssl.audit import __main__ as audit
from privssl.audit import canary_attack, histogram_attack
from privssl.audit.histogram_attack import CensusAttack, attack_census, judge_census
from privssl.privacy import label_histogram
from privssl.privacy.label_histogram import CensusPlan
from tests.support.command_line import command

CONFIG = Path(__file__).parents[2] / "configs" / "label_census.yaml"
CLASSES = 5

Patch = pytest.MonkeyPatch
Whole = NDArray[np.int64]


@pytest.fixture(autouse=True)
def _small(monkeypatch: Patch) -> None:
    """Use fewer tables than the command, so that an attack takes half a second."""
    monkeypatch.setattr(histogram_attack, "_FEWEST", 400)


def attacked(epsilon: float, censuses: int = 1) -> tuple[CensusAttack, list[str]]:
    """What the attack on a plan measured, and the problems that the audit reports."""
    plan = CensusPlan(epsilon, visits=1)
    found = attack_census(plan, censuses, censuses * epsilon, CLASSES)
    return found, list(judge_census(found, censuses * epsilon))


# The unchanged mechanism ------------------------------------------------------------------------


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("epsilon", "censuses"),
    [pytest.param(0.5, 1, marks=pytest.mark.slow), (4.0, 1), (1.0, 2)],
)
def test_correct_noise_is_accepted_and_most_of_epsilon_is_measured(
    epsilon: float, censuses: int
) -> None:
    assert_right(*attacked(epsilon, censuses), epsilon * censuses)


def assert_right(found: CensusAttack, problems: list[str], claimed: float) -> None:
    assert problems == []
    assert 0.5 * claimed < found.lower_bound <= claimed
    assert found.ceiling > claimed
    assert set(found.p_values) == {"noise", "every cell", "other cells", "other releases"}


def test_the_lower_bound_is_that_of_randomized_response() -> None:
    # A cell of 1 or 0 is guessed right with probability r = e / (1 + e) at epsilon 1. Half of the
    # trials are counted. Each limit is 5 standard errors away (level 1e-6 in two halves), and with
    # the same probability the counts are within 5 others of r.
    found, problems = attacked(1.0)
    assert_right(found, problems, 1.0)
    assert found.trials > 19_000
    r = math.e / (1 + math.e)
    off = 10 * math.sqrt(r * (1 - r) / (found.trials // 2))
    assert found.lower_bound >= math.log((r - off) / (1 - r + off))


# Planted mistakes -------------------------------------------------------------------------------


def half_the_noise(patch: Patch) -> None:
    real = sampler.discrete_laplace
    patch.setattr(label_histogram, "discrete_laplace", lambda epsilon, n: real(2 * epsilon, n))


def one_cell_without_noise(patch: Patch) -> None:
    real = CensusPlan.release

    def release(self: CensusPlan, counts: Tensor) -> Tensor:
        noisy = real(self, counts)
        noisy[3, 2] = counts[3, 2]
        return noisy

    patch.setattr(CensusPlan, "release", release)


def every_row_with_the_noise_of_the_first(patch: Patch) -> None:
    def release(self: CensusPlan, counts: Tensor) -> Tensor:
        noise = torch.from_numpy(sampler.discrete_laplace(self.epsilon, counts.shape[1]))
        return counts + noise  # broadcast over clusters

    patch.setattr(CensusPlan, "release", release)


def two_cells_with_opposite_noise(patch: Patch) -> None:
    real = sampler.discrete_laplace

    def draws(epsilon: float, count: int) -> Whole:
        noise = real(epsilon, count)
        noise[-1] = -noise[0]
        return noise

    patch.setattr(label_histogram, "discrete_laplace", draws)


def the_same_noise_twice(patch: Patch) -> None:
    real = sampler.discrete_laplace
    kept: list[Whole] = []

    def draws(epsilon: float, count: int) -> Whole:
        kept.append(kept.pop() if kept else real(epsilon, count))
        return kept.pop() if len(kept) == 2 else kept[0]

    patch.setattr(label_histogram, "discrete_laplace", draws)


def seeded_noise(patch: Patch) -> None:
    def words(count: int) -> NDArray[np.uint64]:
        return torch.randint(-(2**63), 2**63 - 1, (count,)).numpy().view(np.uint64)

    patch.setattr(sampler, "random_uint64", words)


def continuous_noise_that_is_rounded(patch: Patch) -> None:
    def draws(epsilon: float, count: int) -> Whole:
        return np.rint(np.random.default_rng().laplace(scale=1 / epsilon, size=count)).astype(int)

    patch.setattr(label_histogram, "discrete_laplace", draws)


def a_record_counts_twice(patch: Patch) -> None:
    real = CensusPlan.release
    patch.setattr(CensusPlan, "release", lambda self, counts: real(self, 2 * counts))


BUGS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "one bare cell": (one_cell_without_noise, "a cell gets noise more or less often"),
    "shared rows": (every_row_with_the_noise_of_the_first, "cells of one table get the same"),
    "opposite cells": (two_cells_with_opposite_noise, "cells of one table get the same"),
    "same noise twice": (the_same_noise_twice, "two releases get the same noise"),
    "seeded": (seeded_noise, "two releases get the same noise"),
    "rounded": (continuous_noise_that_is_rounded, "does not follow the discrete Laplace law"),
    "counts twice": (a_record_counts_twice, "the counts leak at least epsilon"),
}


@pytest.mark.fast_cases("rounded", "same noise twice", "one bare cell")
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_mistake_is_detected_and_named(bug: str, monkeypatch: Patch) -> None:
    plant, words = BUGS[bug]
    plant(monkeypatch)
    found, problems = attacked(2.0)
    assert any(words in problem for problem in problems), (found, problems)


@pytest.mark.slow
def test_half_the_noise_is_named_and_shows_as_more_epsilon_than_is_claimed(
    monkeypatch: Patch,
) -> None:
    half_the_noise(monkeypatch)
    found, problems = attacked(1.0)
    # The code that ran is 2-DP. Scores depend only on the order of two outputs, so all of it is
    # measured.
    assert 1.5 < found.lower_bound <= 2.0
    assert any("leak at least epsilon 1." in problem for problem in problems)
    assert any("does not follow the discrete Laplace law" in problem for problem in problems)


def test_an_attack_does_not_change_seeded_generators() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    histogram_attack._release_table(CensusPlan(1.0, 1), np.zeros(10, dtype=np.int64), CLASSES)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # type: ignore[index]


def test_an_epsilon_beyond_every_attack_is_reported_as_such() -> None:
    report = canary_attack.AttackReport("s0", 16.0, 0.0, sound=True)
    report.mechanism = CensusAttack(1, 400_000, 9.5, 9.5, {})
    assert report.baseline_only
    report.mechanism = CensusAttack(1, 100_000, 3.9, 8.1, {})
    report.epsilon = 4.0
    assert not report.baseline_only


# The command ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with epsilon 1."""
    run = tmp_path_factory.mktemp("census") / "run"
    outcome = command(
        CONFIG, f"run.output={run}", "data.name=toy", "data.labelled=40", "data.unlabelled=80",
        "model.width=4", "algorithm.filters=8", "algorithm.cluster_rounds=3",
        "algorithm.vote_rounds=1", "algorithm.self_training_rounds=1",
        "algorithm.local_steps=1", "algorithm.batch_size=8",
        "privacy.epsilon=1.0", "--quiet",
    )  # fmt: skip
    assert outcome.status == 0, outcome
    return run


def audited(run: Path, *flags: str) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = audit.main([str(run), "--empirical", *flags])
    return status, " ".join(printed.getvalue().split())


def test_an_honest_run_is_consistent_and_needs_no_canaries(trained: Path) -> None:
    status, text = audited(trained)
    assert status == 0, text
    assert "attacks on the plan of s0: epsilon 1.0000 at delta 0" in text
    assert "records in each world, counted once" in text
    assert "not applicable: labels are released once, as counts" in text
    assert "clip norms" not in text  # no canaries were used


def test_less_noise_than_the_ledger_charges_is_violated(trained: Path, monkeypatch: Patch) -> None:
    half_the_noise(monkeypatch)
    status, text = audited(trained, "--json")
    report = json.loads(text)
    assert (status, report["verdict"]) == (1, "violated")
    assert report["attack"]["mechanism"]["lower_bound"] > 1.0
    assert report["attack"]["canaries"] is None
    assert any("above the 1.0000 that they are charged" in said for said in report["problems"])
