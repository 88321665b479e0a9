"""Noise: its size and distribution, that it never repeats, and that it reveals nothing of a sum."""

import functools
import math
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from privssl.ops import dispatch, gaussian_noise
from privssl.privacy import noisy_optimizer, secure_noise
from privssl.privacy.dp_sgd import PrivateTraining
from privssl.privacy.noisy_optimizer import SecureNoiseOptimizer
from privssl.privacy.secure_noise import _as_floats, box_muller, secure_normal, secure_uniform
from tests.support.kernel_generations import HERE
from tests.support.privacy import (
    PLAN,
    flat,
    moved_by,
    plan,
    repeats,
    seed_everything,
    small_loss,
    small_network,
    small_rows,
)
from tests.support.transports import in_a_fork

pytestmark = pytest.mark.usefixtures("torch_begins_alike")

DRAWS = 1_000_000


# P[D > 0.0027] at a million draws is 2 exp(-2 n D^2), about one in a million.
TOO_FAR = math.sqrt(math.log(2e6) / (2 * DRAWS))


def released_noise(noise_multiplier: float, clip: float) -> np.ndarray:
    """What a visit of two steps without rows adds to half a million parameters."""
    released = []
    network = nn.Linear(500, 1000, bias=False)
    quiet = plan(noise_multiplier=noise_multiplier, clip_norm=clip)
    for _ in range(2):
        nn.init.zeros_(network.weight)
        PrivateTraining(quiet, {"F": network}).run(0, lambda *_: {}, lambda *_: torch.zeros(()))
        released.append(-network.weight.detach().flatten().numpy())
    return np.concatenate(released)


def test_noise_is_normal_with_the_planned_deviation_to_within_two_percent() -> None:
    noise = released_noise(noise_multiplier=1.6, clip=0.25)  # deviation 0.4
    assert len(noise) == DRAWS
    distance = {
        factor: stats.ks_1samp(noise, stats.norm(scale=0.4 * factor).cdf, method="asymp").statistic
        for factor in (0.98, 1.0, 1.02)
    }
    assert distance[1.0] < TOO_FAR
    # The negative control: at a scale wrong by 2% the distance is about 0.02 * 0.242 = 0.0048.
    assert distance[0.98] > TOO_FAR and distance[1.02] > TOO_FAR


def largest_correlation() -> float:
    """The largest correlation between releases of two steps, within a visit and between visits."""
    network, released = nn.Linear(50, 40), []
    for _ in range(2):
        training = PrivateTraining(PLAN, {"F": network})
        for _ in range(2):
            before = flat(network)
            training.run(0, lambda rows, step: {}, small_loss(network))
            released.append((flat(network) - before).numpy())
            assert np.mean(released[-1] != 0) > 0.99  # the bias alone is 2%
    return float(np.abs(np.corrcoef(released) - np.eye(4)).max())


@pytest.mark.usefixtures("each_way")
def test_every_step_and_visit_releases_fresh_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of 2,040 numbers each: a correlation has deviation 0.022, so 0.15 does not occur by chance.
    assert largest_correlation() < 0.15
    monkeypatch.setattr(secure_noise, "secure_normal", functools.cache(secure_normal))
    assert largest_correlation() > 0.9  # the control


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """All noise drawn after this call."""
    drawn: list[np.ndarray] = []

    def record(count: int) -> np.ndarray:
        drawn.append(secure_normal(count))
        return drawn[-1].copy()

    monkeypatch.setattr(secure_noise, "secure_normal", record)
    return drawn


def release_sums(sums: Tensor, parameter: nn.Parameter | None = None) -> Tensor:
    """Sums after noise of deviation 0.91 was added."""
    parameter = nn.Parameter(torch.zeros_like(sums)) if parameter is None else parameter
    optimizer = SecureNoiseOptimizer(
        torch.optim.SGD([parameter], lr=1.0), noise_multiplier=1.3, max_grad_norm=0.7,
        expected_batch_size=None, loss_reduction="sum",
    )  # fmt: skip
    parameter.summed_grad = sums  # type: ignore[attr-defined]
    optimizer.add_noise()
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("total", [0.0, 1 / 3, -1e-9, 50.0])
def test_released_numbers_lie_on_one_grid_whatever_the_sum(
    total: float, monkeypatch: pytest.MonkeyPatch, recorded: list[np.ndarray]
) -> None:
    sums = torch.full((10_000,), total)
    released = release_sums(sums).double() * 2**17  # 0.91 lies between 2^-1 and 2^0; 2^-1 / 2^16
    assert torch.equal(released, released.round())
    before = sums.double() + 0.91 * torch.from_numpy(recorded[0])
    assert float((released / 2**17 - before).abs().max()) <= 2**-18
    # The control: without rounding, sums with noise lie off the grid.
    monkeypatch.setattr(noisy_optimizer, "rounding_grid", lambda deviation: 0.0)
    anywhere = release_sums(sums).double() * 2**17
    assert not torch.equal(anywhere, anywhere.round())


@pytest.mark.usefixtures("each_way", "no_noise")
def test_a_sum_is_released_in_its_place_for_every_memory_layout() -> None:
    sums = torch.arange(3.0 * 4 * 5 * 2).view(3, 4, 5, 2)
    for of in (sums, sums.contiguous(memory_format=torch.channels_last)):
        for as_they_lie in (of, sums.contiguous(memory_format=torch.channels_last)):
            parameter = nn.Parameter(torch.zeros_like(as_they_lie))
            assert torch.equal(release_sums(of, parameter), sums)


@pytest.mark.usefixtures("each_way")
def test_bfloat16_parameters_get_noise_on_float32_sums() -> None:
    parameter = nn.Parameter(torch.zeros(300, dtype=torch.bfloat16))
    released = release_sums(torch.full((300,), 2.0), parameter)
    assert released.dtype == torch.bfloat16
    # Of 300 numbers: the mean has deviation 0.053, and the deviation of 0.91 has 0.037: once in
    # 10^9.
    assert 1.65 < float(released.double().mean()) < 2.35
    assert 0.65 < float(released.double().std()) < 1.2


@pytest.mark.usefixtures("each_way")
def test_no_gradient_is_released_when_the_noise_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_count: int) -> np.ndarray:
        raise OSError("no coins")

    monkeypatch.setattr(secure_noise, "secure_normal", fails)
    for sums in (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).mT):
        parameter = nn.Parameter(torch.zeros(2, 3))
        with pytest.raises(OSError, match="no coins"):
            release_sums(sums, parameter)
        assert parameter.grad is None


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    numbers = secure_uniform(DRAWS)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert stats.ks_1samp(numbers, stats.uniform.cdf, method="asymp").statistic < TOO_FAR


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
@example([0, 1, 2**53 - 1, 2**53 + 1, 2**54 + 3, 2**63 - 1, 2**63, 2**63 + 1024, 2**63 + 1025])
@example([2**63 + 3072, 2**64 - 1024, 2**64 - 1025, 2**64 - 1])
def test_random_words_become_the_nearest_floats(words: list[int]) -> None:
    found = _as_floats(np.array(words, dtype=np.uint64))
    assert found.tolist() == [float(word) for word in words]  # Python rounds to the nearest


@pytest.mark.usefixtures("each_way")
def test_the_smallest_random_words_give_no_infinite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for extreme in (0, 1, 2**64 - 1):
        word = np.array([extreme], dtype=np.uint64)
        monkeypatch.setattr(secure_noise, "random_uint64", functools.partial(np.resize, word))
        assert np.isfinite(secure_normal(3)).all()


def from_words(radius: int, angle: int) -> tuple[float, float]:
    """The Box-Muller formula for one pair of words, in higher precision."""
    tail = np.longdouble((float(radius) + 1.0) * 2.0**-64)
    turn = 8 * np.arctan(np.longdouble(1)) * np.longdouble(angle >> 11) / 2**53
    size = np.sqrt(-2 * np.log(tail))
    return float(size * np.cos(turn)), float(size * np.sin(turn))


WORDS = st.integers(0, 2**64 - 1)


QUARTERS = [turn * 2**61 + near for turn in range(8) for near in (-2048, 0, 2048)]


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=40))
@example([(2**64 - 1 - k, angle % 2**64) for angle in QUARTERS for k in (0, 2**11, 2**12, 2**40)])
@example([(2**k, angle % 2**64) for angle in QUARTERS for k in range(64)])
@example([(k, 2**63 + k) for k in range(5)])
@example([])
def test_every_pair_of_words_gives_the_numbers_of_box_and_muller(
    words: list[tuple[int, int]],
) -> None:
    radii, angles = (np.array([w[n] for w in words], dtype=np.uint64) for n in (0, 1))
    expected = np.array([from_words(*pair) for pair in words]).reshape(-1, 2).T.flatten()
    for way in (None, *HERE):
        with patch.object(dispatch, "_find_latest", lambda way=way: way):
            # Radii up to 9.4, for angles with an error of 7e-16.
            np.testing.assert_allclose(box_muller(radii, angles), expected, rtol=0, atol=8e-15)


@pytest.mark.usefixtures("each_generation")
def test_the_noise_kernel_is_used_where_it_was_compiled() -> None:
    with patch.object(gaussian_noise, "normal", wraps=gaussian_noise.normal) as asked:
        secure_normal(3)
        with dispatch.disabled():
            secure_normal(3)
    assert asked.call_count == 1
    with pytest.raises(ValueError, match=r"radii \(2,\) and angles \(3,\)"):
        gaussian_noise.normal(np.zeros(2, dtype=np.uint64), np.zeros(3, dtype=np.uint64))


def gap_of_radii(word: int, bits: int) -> float:
    """The gap between the noise of two successive words, at angle 0, for this number of bits."""
    words = np.array([word, word + 1], dtype=np.uint64) << np.uint64(64 - bits)
    one, other, *_ = box_muller(words, np.zeros(2, dtype=np.uint64))
    return float(one - other)


@pytest.mark.usefixtures("each_way")
def test_gaps_between_radii_of_64_bits_exceed_the_grid_with_probability_below_1e_15() -> None:
    # Gaps grow with the radius, which falls as the word grows. Deviation 1; the finer grid.
    rare = int(1e-15 * 2**64)
    assert 0 < gap_of_radii(rare, 64) < noisy_optimizer.GRID / 2
    assert gap_of_radii(rare // 4, 64) > noisy_optimizer.GRID / 2
    # The control: with the 53 bits of a uniform number such gaps are a thousand times as likely.
    assert gap_of_radii(int(0.7e-12 * 2**53), 53) > noisy_optimizer.GRID / 2


def furthest(radii: int, more: int) -> float:
    """A cosine at angle 0: the radius of one word below ``FAR`` and one additional word."""
    words = (np.array([word], dtype=np.uint64) for word in (radii, more, 0))
    return float(secure_noise.box_muller_tail(*words)[0][0])


@pytest.mark.usefixtures("each_way")
def test_gaps_between_the_largest_radii_stay_below_the_grid() -> None:
    rare, last, grid = int(1e-15 * 2**64), 2**64 - 1, noisy_optimizer.GRID / 2
    for word in (0, 1, 100, int(secure_noise.FAR) - 1):
        # The additional bits subdivide the interval between the radii of a word and its successor.
        assert furthest(word, last) == pytest.approx(radius_of(word), abs=1e-12)
        assert furthest(word + 1, 0) == pytest.approx(radius_of(word), abs=1e-4)
        assert 0 <= furthest(word, rare) - furthest(word, rare + 1) < grid
    assert furthest(0, 0) == pytest.approx(math.sqrt(256 * math.log(2)))
    assert radius_of(int(secure_noise.FAR) - 1) - radius_of(int(secure_noise.FAR)) < grid
    assert radius_of(0) - radius_of(1) > 1000 * grid  # the control


def radius_of(word: int) -> float:
    """The radius by 64 bits: the cosine at angle 0."""
    return float(box_muller(np.array([word], dtype=np.uint64), np.zeros(1, dtype=np.uint64))[0])


@pytest.mark.usefixtures("each_way")
def test_only_large_radii_get_additional_random_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far, near = int(secure_noise.FAR) - 1, int(secure_noise.FAR)
    drawn = [[5, near, far], [2**61] * 3, [2**63, 2**62]]
    monkeypatch.setattr(
        secure_noise, "random_uint64", lambda count: np.array(drawn.pop(0)[:count], dtype=np.uint64)
    )
    found = secure_normal(6).reshape(2, 3)
    assert not drawn
    half = math.cos(math.pi / 4)
    radii = [furthest(5, 2**63), radius_of(near), furthest(far, 2**62)]
    np.testing.assert_allclose(found, np.outer([half, half], radii), rtol=0, atol=1e-14)


def test_noise_never_repeats_across_steps_parameters_and_runs_with_one_seed(
    recorded: list[np.ndarray],
) -> None:
    for _ in range(2):
        seed_everything()
        moved_by(small_network(), small_rows(3), plan(steps=4))
    assert len(recorded) == 2 * 4  # runs, steps
    assert repeats(recorded) == 0


def first_noise(network: nn.Module) -> list[tuple[float, ...]]:
    """The first three noise values of each parameter in two steps, without rows."""
    landed: list[tuple[float, ...]] = []
    add_noise = SecureNoiseOptimizer.add_noise

    def look(self: SecureNoiseOptimizer) -> None:
        add_noise(self)
        landed.extend(tuple(p.grad.flatten()[:3].tolist()) for p in self.params if p.numel() >= 3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SecureNoiseOptimizer, "add_noise", look)
        moved_by(network, small_rows(0), plan(steps=2))
    return landed


def test_every_parameter_gets_its_own_noise_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    landed = first_noise(small_network())
    assert len(landed) == len(set(landed)) == 2 * 4  # steps, parameters
    # The control: the same noise for all parameters.
    real = torch.split

    def same_for_all(noise: Tensor, sizes: Any) -> Any:
        return [noise[:n] for n in sizes] if isinstance(sizes, list) else real(noise, sizes)

    monkeypatch.setattr(torch, "split", same_for_all)
    assert len(set(first_noise(small_network()))) == 2


def test_the_check_of_repeats_detects_a_seeded_generator() -> None:
    drawn = []
    for _ in range(2):
        seed_everything()
        drawn.append(torch.randn(10, dtype=torch.float64).numpy())
    assert repeats(drawn) == 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_draws_different_noise() -> None:
    def in_a_child(draw: Callable[[], np.ndarray]) -> np.ndarray:
        told = in_a_fork(lambda: draw().tobytes())
        assert told is not None
        return np.frombuffer(told, dtype=np.float64)

    assert repeats([in_a_child(lambda: secure_normal(100)), secure_normal(100)]) == 0
    # The negative control: a generator that is copied into the child repeats its draws.
    ambient = np.random.default_rng(1)
    copied = in_a_child(lambda: ambient.standard_normal(100))
    assert repeats([copied, ambient.standard_normal(100)]) == 100


def coupling(halves: NDArray[np.float64]) -> float:
    """The largest correlation between the two numbers of a Box-Muller pair: of the numbers and of
    their squares, which would show a shared radius or angle. (2, N).
    """
    one, other = halves
    found = [np.corrcoef(one, other)[0, 1], np.corrcoef(one**2, other**2)[0, 1]]
    return max(abs(float(value)) for value in found)


def test_the_two_numbers_of_a_box_muller_pair_are_independent() -> None:
    pairs = 500_000
    normal: NDArray[np.float64] = secure_normal(2 * pairs).reshape(2, pairs)
    six_sigma = 6 / math.sqrt(pairs)
    assert coupling(normal) < six_sigma
    first = normal[0, :]
    sign = np.where(np.arange(pairs) % 2, 1.0, -1.0)
    assert coupling(np.stack([first, first * sign])) > six_sigma  # the control: one radius
