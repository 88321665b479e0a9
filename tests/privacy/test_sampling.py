"""Poisson sampling: each row is in a batch independently, with the sampling rate, unseeded."""

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given
from numpy.typing import NDArray
from torch import Tensor, nn

from privssl.errors import ConfigError
from privssl.experiment import config
from privssl.privacy import plan as privacy_plan
from privssl.privacy import secure_noise
from privssl.privacy.dp_sgd import PrivateTraining
from privssl.privacy.noisy_optimizer import SecureNoiseOptimizer
from tests.support.privacy import (
    draw_rows,
    frequency_is,
    largest_correlation,
    plan,
    seed_everything,
)

pytestmark = pytest.mark.usefixtures("torch_begins_alike")

STEPS, ROWS = 20_000, 12


#: A correlation of independent columns exceeds this once in 10^9.
SIX_SIGMA = 6 / math.sqrt(STEPS)


def test_every_row_is_drawn_with_the_sample_rate_and_independently() -> None:
    poisson = plan(sample_rate=0.25)
    masks = np.stack([poisson.draw_batch(ROWS).numpy() for _ in range(STEPS)]).astype(float)
    assert frequency_is(masks, 0.25)
    assert largest_correlation(masks) < SIX_SIGMA
    assert not frequency_is(masks, 0.27)  # the negative control: another rate is detected


def test_the_check_of_independence_detects_batches_of_a_fixed_size() -> None:
    order = np.random.default_rng(5).permuted(np.tile(np.arange(ROWS), (STEPS, 1)), axis=1)
    masks = (order < 3).astype(float)  # 3 of 12 rows: the right rate, but not Poisson
    assert frequency_is(masks, 0.25)
    # Rows of a batch of fixed size are correlated by -1 / (ROWS - 1).
    assert largest_correlation(masks) > SIX_SIGMA


def test_masks_do_not_depend_on_a_seed() -> None:
    def masks(draw: Callable[[], Tensor]) -> list[Tensor]:
        drawn = []
        for _ in range(2):
            seed_everything()
            drawn.append(draw())
        return drawn

    first, second = masks(lambda: plan(sample_rate=0.5).draw_batch(200))
    assert not torch.equal(first, second)
    first, second = masks(lambda: torch.rand(200) < 0.5)  # the negative control
    assert torch.equal(first, second)


@pytest.mark.parametrize("rate", ["1.0001", "8.0", "0.0", "-0.5"])
def test_an_expected_batch_larger_than_the_rows_is_refused(
    rate: str, configured: Callable[..., config.Config]
) -> None:
    with pytest.raises(ConfigError, match=r"it is a probability in \(0, 1\]"):
        configured(f"privacy.sample_rate={rate}")
    configured("privacy.sample_rate=1.0")


@pytest.mark.parametrize("rows", [3, 256])
def test_a_step_with_an_empty_batch_computes_as_many_gradients_as_a_full_one(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Run time: for up to 256 rows it does not depend on the number of drawn rows.
    def work(drawn: bool) -> list[int]:
        sizes: list[int] = []
        draw_rows(monkeypatch, [drawn] * rows)
        network = nn.Linear(2, 1, bias=False)

        def fields_of(picked: Tensor, step: int) -> dict[str, Tensor]:
            sizes.append(len(picked))
            return {"x": torch.ones(len(picked), 2)}

        def loss(parameters: Any, row: Any) -> Tensor:
            return (parameters["F"]["weight"] * row["x"]).sum()  # type: ignore[no-any-return]

        PrivateTraining(plan(sample_rate=0.5), {"F": network}).run(rows, fields_of, loss)
        return sizes

    assert work(True) == work(False)
    assert sum(work(True)) == rows


HELD, DRAWS = 6, 300


def rows_in_sums(poisson: privacy_plan.PrivatePlan) -> NDArray[np.float64]:
    """Which rows are part of each released sum (steps, rows), read from the sums before noise: row
    i has the gradient e_i.
    """
    sums: list[NDArray[np.float64]] = []
    add_noise = SecureNoiseOptimizer.add_noise

    def look(self: Any) -> None:
        sums.append(self.params[0].summed_grad.detach().numpy().copy())
        add_noise(self)

    network = nn.Linear(HELD, 1, bias=False)
    unit = torch.eye(HELD)

    def loss(parameters: Any, row: Any) -> Tensor:
        return (parameters["F"]["weight"][0] * row["x"]).sum()  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SecureNoiseOptimizer, "add_noise", look)
        PrivateTraining(poisson, {"F": network}).run(HELD, lambda p, step: {"x": unit[p]}, loss)
    return np.concatenate(sums).round()


def test_rows_are_part_of_released_sums_with_the_sample_rate_and_independently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poisson = plan(sample_rate=0.3, steps=DRAWS)
    part = rows_in_sums(poisson)
    assert part.shape == (DRAWS, HELD)
    assert frequency_is(part, 0.3) and largest_correlation(part) < 6 / math.sqrt(DRAWS)

    # The control: batches of two shuffled rows have the right rate, and are not Poisson.
    def shuffled(self: Any, rows: int) -> Tensor:
        return torch.randperm(rows) < 2

    monkeypatch.setattr(privacy_plan.PrivatePlan, "draw_batch", shuffled)
    part = rows_in_sums(poisson)
    # Negative correlation of every pair: the size of a batch has no variance at all.
    assert frequency_is(part, 1 / 3) and part.sum(axis=1).std() == 0


@pytest.mark.parametrize(
    "key", ["sampler", "loader", "shuffle", "weights", "batch_size", "replace"]
)
def test_no_config_selects_another_sampler(
    key: str, configured: Callable[..., config.Config]
) -> None:
    with pytest.raises(ConfigError, match=f"privacy.{key} .*unknown key"):
        configured(f"privacy.{key}=1")


@given(st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True))
@example(2.0**-54)
@example(0.1)
def test_no_row_is_drawn_with_more_than_the_sample_rate(rate: float) -> None:
    limit = secure_noise.round_rate_down(rate)
    draws = limit * 2**53  # uniform multiples of 2^-53 below the limit
    assert draws == int(draws)
    assert limit <= rate < limit + 2**-53


def test_a_sample_rate_below_the_finest_draw_draws_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_noise, "secure_uniform", np.zeros)  # the smallest draw
    assert not plan(sample_rate=2.0**-54).draw_batch(9).any()
    assert plan(sample_rate=2.0**-53).draw_batch(9).all()  # the control
