"""The patch encoder, made from sums over agents: patches, filters, responses, and two views."""

import pytest
import torch
from torch import Tensor

from privssl.algorithms.label_census.patch_encoder import (
    CONTRAST,
    CUT,
    ZCA,
    EncoderConfig,
    compute_responses,
    compute_view_map,
    compute_whitener,
    encode,
    make_filters,
    sample_patches,
    whiten,
)
from privssl.runtime.randomness import stream


def normal(*shape: int, name: str = "x") -> Tensor:
    return torch.randn(*shape, generator=stream(0, 0, "world", name))


# Patches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sides", "patch"), [((28, 28), 6), ((32, 32), 6), ((8, 8), 3)])
def test_a_patch_side_is_a_fifth_of_a_row_and_at_least_three_pixels(
    sides: tuple[int, int], patch: int
) -> None:
    assert EncoderConfig().compute_patch_side((1, *sides)) == patch
    assert EncoderConfig(patch=4).compute_patch_side((1, *sides)) == 4
    assert (
        EncoderConfig(patch=40).compute_patch_side((1, *sides)) == sides[0]
    )  # no larger than a row


def test_a_drawn_patch_is_a_piece_of_one_row_with_mean_and_contrast_removed() -> None:
    rows, found = (
        normal(3, 2, 5, 6),
        sample_patches(normal(3, 2, 5, 6), 3, 200, stream(0, 0, "a", "p")),
    )
    pieces = []
    for row in rows:
        for top in range(3):
            for left in range(4):
                piece = row[:, top : top + 3, left : left + 3].flatten()
                apart = piece - piece.mean()
                pieces.append(apart / (apart.square().mean() + CONTRAST).sqrt())
    gaps = torch.cdist(found, torch.stack(pieces))
    assert float(gaps.amin(dim=1).max()) < 1e-2  # cdist is no closer
    assert len(set(gaps.argmin(dim=1).tolist())) == 36  # every patch of every row is drawn


def test_whitened_patches_have_equal_variance_in_all_directions_up_to_the_ridge() -> None:
    patches = normal(500, 6) * torch.tensor([3.0, 2.0, 1.0, 1.0, 0.1, 0.0])
    outer = patches.T @ patches
    whitener = compute_whitener(outer, torch.tensor([500.0]))
    torch.testing.assert_close(
        whitener @ (outer / 500 + ZCA * torch.eye(6)) @ whitener, torch.eye(6), atol=1e-4, rtol=0
    )


def test_an_empty_patch_stays_empty_and_all_others_have_length_one() -> None:
    patches = torch.cat([torch.zeros(1, 4), normal(5, 4)])
    lengths = whiten(patches, compute_whitener(torch.eye(4), torch.tensor([1.0]))).norm(dim=1)
    torch.testing.assert_close(lengths, torch.tensor([0.0, 1, 1, 1, 1, 1]))


def test_a_filter_on_a_patch_equals_its_centroid_on_the_whitened_patch() -> None:
    patch = normal(1, 9)
    patch = patch - patch.mean()
    seen = normal(40, 9, name="seen")
    whitener = compute_whitener(seen.T @ seen, torch.tensor([40.0]))
    centroid = normal(2, 9, name="centroid")
    weights = make_filters(centroid, whitener, (1, 3, 3)).flatten(1)
    length = centroid.norm(dim=1)
    torch.testing.assert_close(patch @ weights.T, patch @ whitener @ centroid.T / length)
    torch.testing.assert_close(weights.sum(dim=1), torch.zeros(2), atol=1e-5, rtol=0)


# Responses ------------------------------------------------------------------------------------


def test_a_response_is_the_rectified_correlation_with_a_patch_averaged_over_positions() -> None:
    x, filters = normal(2, 2, 5, 5), normal(3, 2, 2, 2, name="filters")
    filters = filters - filters.mean(dim=(1, 2, 3), keepdim=True)
    expected = torch.zeros(2, 3, 4, 4)
    for top in range(4):
        for left in range(4):
            patch = x[:, :, top : top + 2, left : left + 2].flatten(1)  # (2, 8)
            apart = patch - patch.mean(dim=1, keepdim=True)
            apart = apart / (apart.square().mean(dim=1, keepdim=True) + CONTRAST).sqrt()
            expected[:, :, top, left] = (apart @ filters.flatten(1).T - CUT).clamp(min=0)
    torch.testing.assert_close(compute_responses(x, filters, 4), expected.flatten(1))
    quarters = expected.view(2, 3, 2, 2, 2, 2).mean(dim=(3, 5))
    torch.testing.assert_close(compute_responses(x, filters, 2), quarters.flatten(1))


def test_no_rows_have_no_responses() -> None:
    assert compute_responses(torch.zeros(0, 1, 8, 8), normal(5, 1, 3, 3), 2).shape == (0, 20)


def test_brightness_and_contrast_of_a_row_hardly_change_its_responses() -> None:
    x, filters = normal(4, 1, 8, 8), normal(5, 1, 3, 3, name="filters")
    filters = filters - filters.mean(dim=(1, 2, 3), keepdim=True)
    one, other = compute_responses(10 * x, filters, 2), compute_responses(20 * x + 3, filters, 2)
    torch.testing.assert_close(one, other, atol=2e-3, rtol=0)
    assert float((compute_responses(-x, filters, 2) - one).abs().max()) > 0.1  # the control


# Views ----------------------------------------------------------------------------------------


def moments(one: Tensor, other: Tensor) -> dict[str, Tensor]:
    apart = one - other
    return {
        "total": (one + other).sum(dim=0),
        "outer": one.T @ one + other.T @ other,
        "within": apart.T @ apart,
        "count": torch.tensor([float(len(one))]),
    }


def views(noise: Tensor) -> tuple[Tensor, Tensor]:
    """Two views of 4,000 rows that share a normal value in each direction, of variance 1."""
    shared = normal(4000, len(noise), name="shared")
    one, other = (shared + noise.sqrt() * normal(*shared.shape, name=n) for n in ("1", "2"))
    return one + 5, other + 5


def test_features_are_the_directions_shared_by_two_views_with_the_most_shared_last() -> None:
    one, other = views(torch.tensor([4.0, 0.25, 1.0]))
    directions = compute_view_map(**moments(one, other), features=2)
    seen = directions.abs() / directions.abs().sum(dim=0)
    assert seen[2, 0] > 0.8  # the second best: noise as large as the shared value
    assert seen[1, 1] > 0.8  # the best
    assert directions.shape == (3, 2)


def test_the_variance_of_a_feature_is_the_share_that_views_have_in_common() -> None:
    one, other = views(torch.tensor([0.25, 1.0]))
    features = torch.cat([one, other]) @ compute_view_map(**moments(one, other), features=2)
    covariance = torch.cov(features.T)
    # Noise v, and a ridge of 0.3 (0.25 + 1) / 2 on it: r = (1 + v) / (v + ridge), (r - 1) / r.
    ridge = 0.3 * 0.625
    expected = [1 - (v + ridge) / (1 + v) for v in (1.0, 0.25)]
    torch.testing.assert_close(covariance.diagonal(), torch.tensor(expected), atol=0.05, rtol=0)
    assert abs(float(covariance[0, 1])) < 0.05


def test_sums_over_agents_give_the_map_of_all_rows_in_one_place() -> None:
    one, other = views(torch.tensor([4.0, 0.25, 1.0]))
    order = one[:, 0].argsort()  # agents as different as possible
    parts = [moments(one[rows], other[rows]) for rows in torch.split(order, [3000, 10, 990])]
    added = {name: sum(part[name] for part in parts) for name in parts[0]}
    whole = compute_view_map(**moments(one, other), features=2)
    apart = compute_view_map(**added, features=2)  # type: ignore[arg-type]  # sum may be 0
    torch.testing.assert_close(apart.abs(), whole.abs(), atol=1e-3, rtol=1e-3)
    biased = compute_view_map(**parts[0], features=2)
    assert not torch.allclose(biased.abs(), whole.abs(), atol=1e-2)  # the control: one agent alone


def test_views_of_pure_noise_or_without_noise_give_finite_features() -> None:
    alike = normal(50, 4)
    for one, other in ((alike, alike), (alike, normal(50, 4, name="2")), (alike * 0, alike * 0)):
        assert bool(compute_view_map(**moments(one, other), features=3).isfinite().all())


def test_a_row_has_the_same_features_alone_and_in_a_batch() -> None:
    x, filters = normal(40, 1, 8, 8), normal(5, 1, 3, 3, name="filters")
    encoder = {"filters": filters, "map": normal(20, 6, name="map")}
    alone = torch.cat([encode(row[None], encoder, 2) for row in x])
    torch.testing.assert_close(encode(x, encoder, 2), alone, atol=1e-5, rtol=1e-5)
