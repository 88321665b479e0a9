"""Plans, networks, rows, losses and measurements for the tests of DP-SGD."""

import copy
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from generators import ImageDiscriminator, ImageGenerator, VariationalImageGenerator
from privssl.algorithms.fedssl.losses import MixupBatch, NetworkFunctions, mixing_losses
from privssl.algorithms.fedssl.settings import GMixupSettings
from privssl.core.rows import IMAGE, WITH_DROPOUT
from privssl.models.convnets import LeNet, SmallCNN
from privssl.models.resnet import ResNet9
from privssl.models.wide_resnet import WideResNet28x2
from privssl.ops import dispatch
from privssl.privacy import secure_noise
from privssl.privacy.dp_sgd import PrivateTraining
from privssl.privacy.per_example_gradients import (
    Parameters,
    RowLoss,
)
from privssl.privacy.plan import PrivatePlan
from privssl.settings.schema import ModelSettings
from privssl.training.batched.deferred import FunctionalModule
from privssl.training.losses import soft_cross_entropy
from tests.support.kernel_generations import HERE
from tests.support.toy_worlds import without_noise

SHAPE, CLASSES, NOISE = (1, 8, 8), 3, 5
PLAN = PrivatePlan(
    update=("F",), protect=("F",), noise_multiplier=1.0, clip_norm=1.0, sample_rate=1.0, steps=1,
    expected_batch=1.0, learning_rate=1.0, momentum=0.0, views=1, visits=1,
)  # fmt: skip


def plan(**changes: Any) -> PrivatePlan:
    return dataclasses.replace(PLAN, **changes)


def draw_rows(monkeypatch: pytest.MonkeyPatch, *masks: list[bool]) -> None:
    """Replace the sampled masks by these, one per call."""
    draws = itertools.cycle(masks)
    monkeypatch.setattr(
        secure_noise,
        "secure_uniform",
        lambda count: np.where(next(draws), 0.0, np.nextafter(1.0, 0.0)),
    )


# Per-row gradients ------------------------------------------------------------------------------


def networks(*, spectral: bool = False) -> dict[str, nn.Module]:
    return {
        "F": SmallCNN(SHAPE, CLASSES, width=4),
        "G": ImageGenerator(SHAPE, CLASSES, width=4, code_size=8, noise_size=NOISE),
        "D": ImageDiscriminator(SHAPE, CLASSES, width=4, feature_size=8, spectral=spectral),
    }


def mixing(rows: int, views: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Fields of rows, each of shape (rows, views, ...)."""
    generator = torch.Generator().manual_seed(11)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(rows, views, *shape, generator=generator, dtype=dtype)

    return {
        "strong": 2 * uniform(*SHAPE) - 1, "mild": 2 * uniform(*SHAPE) - 1,
        "p1": uniform(CLASSES).softmax(dim=-1), "p2": torch.eye(CLASSES, dtype=dtype)[
            torch.randint(CLASSES, (rows, views), generator=generator)],
        "z": uniform(NOISE), "lam": uniform(),
    }  # fmt: skip


def joint_loss(nets: Mapping[str, nn.Module], protect: tuple[str, ...]) -> RowLoss:
    def loss(parameters: Parameters, fields: Mapping[str, Tensor]) -> Tensor:
        functions = NetworkFunctions.with_parameters(nets, parameters)
        by_network, _ = mixing_losses(
            GMixupSettings(), functions, MixupBatch(**fields), protect, True
        )
        return torch.stack([part.mean() for part in by_network.values()]).sum()

    return loss


def parameters_of(nets: Mapping[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    return {name: dict(net.named_parameters()) for name, net in nets.items()}


def classifier_rows(network: nn.Module, fields: Mapping[str, Tensor]) -> Tensor:
    return soft_cross_entropy(network(fields["mild"]), fields["p1"])


def generator_rows(network: nn.Module, fields: Mapping[str, Tensor]) -> Tensor:
    f = fields
    mixes = network(f["mild"], f["p1"], f["p2"], f["z"], f["lam"][:, None])
    squares: Tensor = mixes.square().flatten(1).sum(dim=1)
    return squares


def discriminator_rows(network: nn.Module, fields: Mapping[str, Tensor]) -> Tensor:
    logits: Tensor = network(fields["mild"], fields["p1"])
    return logits


SHIPPED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "SmallCNN": (lambda: SmallCNN(SHAPE, CLASSES, width=4), classifier_rows),
    "SmallCNN without norm": (
        lambda: SmallCNN(SHAPE, CLASSES, width=4, norm="none"), classifier_rows,
    ),
    "LeNet": (lambda: LeNet(SHAPE, CLASSES, width=4), classifier_rows),
    "ResNet9": (lambda: ResNet9(SHAPE, CLASSES, width=2), classifier_rows),
    "WideResNet28x2": (lambda: WideResNet28x2(SHAPE, CLASSES, width=2), classifier_rows),
    "ImageGenerator": (lambda: networks()["G"], generator_rows),
    "VariationalImageGenerator": (
        lambda: VariationalImageGenerator(SHAPE, CLASSES, width=4, noise_size=NOISE),
        generator_rows,
    ),
    "ImageDiscriminator": (lambda: networks()["D"], discriminator_rows),
    # As in the published scheme: spectral norm, so frozen and in eval mode.
    "spectral ImageDiscriminator": (
        lambda: networks(spectral=True)["D"].eval(), discriminator_rows,
    ),
}  # fmt: skip


def repeats(drawn: list[np.ndarray]) -> int:
    numbers = np.concatenate(drawn)
    return len(numbers) - len(np.unique(numbers))


def largest_correlation(masks: np.ndarray) -> float:
    """Largest correlation between two rows of one step, or of a row between two steps."""
    between = np.corrcoef(masks.T) - np.eye(masks.shape[1])
    steps = [np.corrcoef(column[:-1], column[1:])[0, 1] for column in masks.T]
    return float(max(np.abs(between).max(), np.abs(steps).max()))


def frequency_is(masks: np.ndarray, rate: float) -> bool:
    """Whether every row is sampled at this rate, within six standard deviations."""
    allowed = 6 * math.sqrt(rate * (1 - rate) / len(masks))
    return bool((np.abs(masks.mean(axis=0) - rate) < allowed).all())


@pytest.fixture(params=[None, *HERE], ids=str)
def each_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use torch's kernels, and ours as compiled for each instruction set."""
    with patch.object(dispatch, "_find_latest", lambda: request.param):
        yield


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)


@pytest.fixture
def torch_begins_alike() -> Iterator[None]:
    """Seed torch for the initial weights of networks, without effect on other tests."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield


def small_network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, CLASSES)).double()


def small_rows(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(count, 4, generator=generator, dtype=torch.float64)


def small_loss(network: nn.Module) -> RowLoss:
    def loss(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        logits = FunctionalModule(network, parameters["F"])(row["x"][None])
        return soft_cross_entropy(logits, row["p"][None])[0]

    return loss


def flat(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def moved_by(
    network: nn.Module, x: Tensor, the_plan: PrivatePlan, max_microbatch_size: int = 64
) -> Tensor:
    """The change of the weights by one visit, against the gradient, as one vector."""
    trained = copy.deepcopy(network)
    p = torch.eye(CLASSES, dtype=torch.float64)[torch.arange(len(x)) % CLASSES]
    training = PrivateTraining(the_plan, {"F": trained})
    training.run(
        len(x), lambda rows, step: {"x": x[rows], "p": p[rows]}, small_loss(trained),
        max_microbatch_size=max_microbatch_size,
    )  # fmt: skip
    return flat(network) - flat(trained)


def seed_everything() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)


def shipped_classifiers() -> list[ModelSettings]:
    """Every classifier that a private run can name."""
    hints = get_type_hints(ModelSettings)
    norms = [norm for norm in get_args(hints["norm"]) if norm not in ("batch", "static")]
    names = [name for name in IMAGE.networks if name not in WITH_DROPOUT]
    return [ModelSettings(name, 4, norm) for name in names for norm in norms]
