"""DP-SGD on vectors and sequences: per-example gradients are those of the row alone, one row moves
a sum by at most the clipping norm, and canaries show a leak.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accounting.accountants import epsilon
from accounting.events import PoissonSampledGaussianEvent
from generators import FeatureDiscriminator, FeatureGenerator
from privssl.algorithms.fedssl.losses import MixupBatch, NetworkFunctions, mixing_losses
from privssl.algorithms.fedssl.settings import GMixupSettings
from privssl.audit.canary_attack import attack_messages
from privssl.experiment import config
from privssl.experiment.prepare import prepare
from privssl.models import build_classifier
from privssl.privacy.per_example_gradients import Parameters, factored_gradients
from privssl.privacy.plan import PrivatePlan
from privssl.settings.schema import ModelSettings
from privssl.training.batched.deferred import FunctionalModule
from tests.rows.test_kinds_of_rows import PRIVATE, SHAPES, cases, some
from tests.rows.test_kinds_of_rows import written as written
from tests.support.toy_worlds import without_noise

CLASSES, NOISE, CANARIES, DELTA = 3, 5, 120, 1e-5


def networks(kind: str, name: str, norm: str = "group") -> dict[str, nn.Module]:
    settings: Any = {"name": name, "width": 2, "norm": norm}
    shape = SHAPES[kind]
    nets: dict[str, nn.Module] = {
        "F": build_classifier(ModelSettings(**settings), shape, CLASSES),
        "G": FeatureGenerator(shape, CLASSES, width=2, noise_size=NOISE),
        "D": FeatureDiscriminator(shape, CLASSES, width=2, spectral=False),
    }
    for net in nets.values():  # a linear layer starts at 0
        for p in net.parameters():
            nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(p.numel()))
    return {n: net.double() for n, net in nets.items()}


def mixing(kind: str, rows: int = 4) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(3)
    uniform = torch.rand(rows, 1, CLASSES, generator=chance).double()
    x = some(kind, rows).double()[:, None]
    return {
        "strong": x, "mild": x.flip(-1), "p1": uniform.softmax(dim=-1),
        "p2": torch.eye(CLASSES).double()[torch.arange(rows) % CLASSES][:, None],
        "z": torch.rand(rows, 1, NOISE, generator=chance).double(),
        "lam": torch.rand(rows, 1, generator=chance).double(),
    }  # fmt: skip


def check_one_row_at_a_time(
    loss: Any, nets: dict[str, nn.Module], fields: dict[str, Tensor]
) -> None:
    """Gradients of all rows at once equal those of autograd, row by row."""
    parameters: Parameters = {n: dict(net.named_parameters()) for n, net in nets.items()}
    found = factored_gradients(loss, parameters, fields)
    flat = {(net, name): p for net, named in parameters.items() for name, p in named.items()}
    for row in range(len(next(iter(fields.values())))):
        alone = loss(parameters, {name: value[row] for name, value in fields.items()})
        wanted = torch.autograd.grad(alone, list(flat.values()), allow_unused=True)
        one = torch.eye(4, dtype=torch.float64)[row]
        for key, expected in zip(flat, wanted, strict=True):
            if expected is not None:
                torch.testing.assert_close(found[key].total(one), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("kind", "name", "norm"), cases(("group", "none")))
def test_gradients_of_a_classifier_equal_those_of_one_row_at_a_time(
    kind: str, name: str, norm: str
) -> None:
    F = networks(kind, name, norm)["F"]

    def loss(parameters: Parameters, fields: Any) -> Tensor:
        return cross_entropy(FunctionalModule(F, parameters["F"])(fields["x"][None]), fields["y"])

    fields = {"x": some(kind, 4).double(), "y": torch.tensor([[0], [1], [2], [1]])}
    check_one_row_at_a_time(loss, {"F": F}, fields)


@pytest.mark.parametrize("kind", SHAPES)
def test_joint_gradients_of_f_g_and_d_equal_those_of_one_row_at_a_time(kind: str) -> None:
    nets = networks(kind, {"vector": "mlp", "sequence": "text_cnn"}[kind])

    def loss(parameters: Parameters, fields: Any) -> Tensor:
        functions = NetworkFunctions.with_parameters(nets, parameters)
        cfg, trained = GMixupSettings(), ("F", "G", "D")
        by_network, _ = mixing_losses(cfg, functions, MixupBatch(**fields), trained, True)
        return torch.stack([part.mean() for part in by_network.values()]).sum()

    check_one_row_at_a_time(loss, nets, mixing(kind))


def test_the_check_of_gradients_detects_a_loss_that_couples_rows() -> None:
    F = networks("vector", "mlp", "batch")["F"].train()

    def loss(parameters: Parameters, fields: Any) -> Tensor:
        several = torch.stack([fields["x"], fields["x"].flip(0)])
        return cross_entropy(FunctionalModule(F, parameters["F"])(several), fields["y"].repeat(2))

    fields = {"x": some("vector", 4).double(), "y": torch.tensor([[0], [1], [2], [1]])}
    with pytest.raises((AssertionError, RuntimeError)):  # its running mean depends on all rows
        check_one_row_at_a_time(loss, {"F": F}, fields)


# Canaries ------------------------------------------------------------------------------------


def attacked(path: Path, *, claimed: float, noise: float = 4.0) -> Any:
    """The attack on two visits of an agent with canary vectors."""
    prepared = prepare(config.load_config(path, [f"privacy.noise_multiplier={noise}"]))
    assert isinstance(prepared.plan, PrivatePlan)
    plan, task = prepared.plan, prepared.algorithm.task
    profile = [(claimed, DELTA)]
    [account, *_] = prepared.account_plans.values()
    return attack_messages(prepared.algorithm, plan, task, 2, DELTA, profile, CANARIES, account)


def test_canary_vectors_refute_no_true_claim(written: Callable[..., Path]) -> None:
    claimed = epsilon([PoissonSampledGaussianEvent(4.0, 1.0, 4)], DELTA)
    found = attacked(written(privacy=PRIVATE), claimed=claimed)
    assert not found.rejects_claim
    assert set(found.rates) == {"F", "G", "D"}


def test_without_noise_canary_vectors_refute_a_claim(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_noise(monkeypatch)
    found = attacked(written(privacy=PRIVATE), claimed=0.5, noise=1.0)
    assert found.rejects_claim
