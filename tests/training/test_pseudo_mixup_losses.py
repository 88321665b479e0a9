"""One test per equation: pseudo-labels (Eq. 2), mixing (Eq. 3) and the cross-entropy (Eq. 4, 5)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from privssl.runtime.randomness import stream
from privssl.training.losses import soft_cross_entropy
from privssl.training.mixup import local_mixup, mix, sample_mix
from privssl.training.pseudo_labels import guess_labels, sharpen


def rng(purpose: str = "test") -> torch.Generator:
    return stream(0, 0, "world", purpose)


def unchanged(x: Tensor, rng: torch.Generator) -> Tensor:
    return x


distributions = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6).map(
    lambda weights: torch.tensor([[w / sum(weights) for w in weights]], dtype=torch.float64)
)

# Sharpening, Eq. 2 ---------------------------------------------------------------------------


def test_sharpening_by_hand() -> None:
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.5, 0.0]])
    # squares 0.36, 0.09, 0.01 of sum 0.46; 0.25, 0.25, 0 of sum 0.5
    expected = torch.tensor([[36 / 46, 9 / 46, 1 / 46], [0.5, 0.5, 0.0]])
    assert_close(sharpen(probs, 2.0), expected)


@given(probs=distributions, sharpness=st.floats(1.01, 8))
def test_sharpening_keeps_the_order_of_classes_and_never_lowers_the_maximum(
    probs: Tensor, sharpness: float
) -> None:
    sharp = sharpen(probs, sharpness)
    assert_close(sharp.sum(dim=1), torch.ones(1, dtype=torch.float64))
    order = probs.argsort(dim=1)
    assert bool((sharp.gather(1, order).diff(dim=1) >= 0).all())
    assert float(sharp.max()) >= float(probs.max()) - 1e-12
    # the control: a sharpness below 1 flattens
    assert float(sharpen(probs, 1 / sharpness).max()) <= float(probs.max()) + 1e-12


# Pseudo-labels, 3.3 --------------------------------------------------------------------------


def test_a_pseudo_label_is_the_sharpened_mean_over_views() -> None:
    shifts = iter([0.0, 1.0])

    def next_view(x: Tensor, rng: torch.Generator) -> Tensor:
        return x + next(shifts)

    def classify(x: Tensor) -> Tensor:  # logits (x, 0): the first class with chance 1/(1+e^-x)
        return torch.stack([x[:, 0], torch.zeros(len(x))], dim=1)

    guess = guess_labels(
        classify, torch.tensor([[0.5]]), augment=next_view, views=2, sharpness=3.0, rng=rng()
    )
    mean = (1 / (1 + math.exp(-0.5)) + 1 / (1 + math.exp(-1.5))) / 2
    first = mean**3 / (mean**3 + (1 - mean) ** 3)
    assert_close(guess, torch.tensor([[first, 1 - first]]))
    # the control: sharpening before the mean gives another number
    sharp = [p**3 / (p**3 + (1 - p) ** 3) for p in (1 / (1 + math.exp(-s)) for s in (0.5, 1.5))]
    assert abs(sum(sharp) / 2 - first) > 1e-3


def test_pseudo_labels_do_not_depend_on_the_chunk_size_and_have_no_gradient() -> None:
    network = torch.nn.Linear(3, 4)
    x = torch.rand(10, 3, generator=rng())
    guesses = [
        guess_labels(network, x, augment=unchanged, views=1, sharpness=2.0, rng=rng(), chunk=c)
        for c in (3, 512)
    ]
    assert_close(guesses[0], guesses[1])
    assert_close(guesses[0], sharpen(network(x).softmax(dim=1), 2.0).detach())
    assert not guesses[0].requires_grad


# Mixing, Eq. 3 -------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.5, 1.0, 4.0])
def test_blending_factors_are_beta_distributed(alpha: float) -> None:
    lam = sample_mix(40_000, alpha, rng()).double()
    assert bool(((lam >= 0) & (lam <= 1)).all())
    # Beta(a, a): mean 1/2, variance 1 / (4 (2 a + 1)), at most 1/4, so the mean of 40,000 draws
    # is within 0.5 / 200 = 0.0025 of 1/2 at one sigma
    variance = 1 / (4 * (2 * alpha + 1))
    assert float(lam.mean()) == pytest.approx(0.5, abs=0.0125)
    assert float(lam.var()) == pytest.approx(variance, rel=0.03)
    # fourth moment about 1/2: 3 / (16 (2a + 1)(2a + 3)); distinguishes Beta from others of that
    # variance
    fourth = 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))
    assert float(((lam - 0.5) ** 4).mean()) == pytest.approx(fourth, rel=0.05)


def test_blending_factors_depend_on_their_generator() -> None:
    assert torch.equal(sample_mix(5, 0.5, rng()), sample_mix(5, 0.5, rng()))
    assert not torch.equal(sample_mix(5, 0.5, rng()), sample_mix(5, 0.5, rng("other")))


def test_mixing_by_hand_for_rows_of_any_shape() -> None:
    lam = torch.tensor([1.0, 0.25])
    first, second = torch.tensor([[4.0, 8.0], [4.0, 8.0]]), torch.zeros(2, 2)
    assert_close(mix(lam, first, second), torch.tensor([[4.0, 8.0], [1.0, 2.0]]))
    assert_close(
        mix(lam, first[:, None, :, None], second[:, None, :, None])[:, 0, :, 0],
        torch.tensor([[4.0, 8.0], [1.0, 2.0]]),
    )


def test_a_row_and_its_label_are_mixed_with_the_same_partner_by_the_same_factor() -> None:
    p = torch.eye(6)
    x = p.view(6, 1, 2, 3)  # rows that equal their labels
    mixed_x, mixed_p = local_mixup(x, p, 0.5, rng())
    assert torch.equal(mixed_x.flatten(1), mixed_p)
    assert_close(mixed_p.sum(dim=1), torch.ones(6))
    assert not torch.equal(mixed_p, p)
    # every row has a share of itself, and of at most one other
    assert bool((mixed_p.diagonal() > 0).all())
    assert int((mixed_p > 0).sum(dim=1).max()) == 2


# Cross-entropy, Eq. 4 and 5 ------------------------------------------------------------------


def test_the_cross_entropy_of_each_row_equals_that_of_plain_loops() -> None:
    logits = torch.randn(5, 4, generator=rng(), dtype=torch.float64)
    p = torch.rand(5, 4, generator=rng("p"), dtype=torch.float64)
    p = p / p.sum(dim=1, keepdim=True)
    expected = []
    for row, target in zip(logits.tolist(), p.tolist(), strict=True):
        total = sum(math.exp(v) for v in row)
        pairs = zip(row, target, strict=True)
        expected.append(-sum(t * math.log(math.exp(v) / total) for v, t in pairs))
    assert_close(soft_cross_entropy(logits, p), torch.tensor(expected, dtype=torch.float64))


def test_the_cross_entropy_is_smallest_where_the_prediction_is_the_target() -> None:
    p = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    entropy = -(0.7 * math.log(0.7) + 0.2 * math.log(0.2) + 0.1 * math.log(0.1))
    assert float(soft_cross_entropy(p.log(), p)) == pytest.approx(entropy)
    for other in torch.eye(3, dtype=torch.float64):
        assert float(soft_cross_entropy(p.log() + 0.1 * other, p)) > entropy


def test_large_logits_give_a_finite_loss() -> None:
    logits = torch.tensor([[1e4, -1e4]])
    assert_close(soft_cross_entropy(logits, torch.tensor([[0.0, 1.0]])), torch.tensor([2e4]))
