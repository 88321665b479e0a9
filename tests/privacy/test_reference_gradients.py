"""Per-example gradients of FedSSL's networks against one row at a time and against Opacus hooks."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from generators import VariationalFeatureGenerator, networks_for
from generators.objectives import discriminator_loss
from privssl.algorithms.fedssl.losses import MixupBatch, NetworkFunctions, mixing_losses
from privssl.algorithms.fedssl.settings import GMixupSettings
from privssl.models.convnets import LeNet, SmallCNN
from privssl.models.feature_nets import MLP
from privssl.privacy.dp_sgd import PrivateTraining
from privssl.privacy.per_example_gradients import Parameters, per_example_gradients
from privssl.training.batched.deferred import FunctionalModule
from privssl.training.losses import soft_cross_entropy
from tests.support.privacy import (
    CLASSES,
    SHAPE,
    draw_rows,
    joint_loss,
    mixing,
    networks,
    parameters_of,
    plan,
    small_loss,
)

pytestmark = pytest.mark.usefixtures("torch_begins_alike")


@pytest.mark.parametrize("protect", [("F",), ("G",), ("F", "G"), ("F", "G", "D")])
def test_gradients_of_the_joint_loss_equal_those_of_one_row_at_a_time(
    protect: tuple[str, ...],
) -> None:
    nets = {name: net.double() for name, net in networks().items()}
    fields = mixing(rows=3, views=2, dtype=torch.float64)
    protected = {name: nets[name] for name in protect}
    found = per_example_gradients(joint_loss(nets, protect), parameters_of(protected), fields)
    for row in range(3):
        # The reference: the modules themselves and backward(), without functional calls or vmap.
        for name, net in nets.items():
            net.zero_grad()
            net.requires_grad_(name in protect)
        frozen = {n: copy.deepcopy(nets[n]).requires_grad_(False) for n in ("F", "D")}
        live = NetworkFunctions(nets["F"], nets["G"], nets["D"], frozen["F"], frozen["D"])
        one = MixupBatch(**{key: value[row] for key, value in fields.items()})
        losses, _ = mixing_losses(GMixupSettings(), live, one, protect, True)
        torch.stack([part.mean() for part in losses.values()]).sum().backward()  # type: ignore[no-untyped-call]
        for net_name, net in protected.items():
            for name, parameter in net.named_parameters():
                assert parameter.grad is not None
                torch.testing.assert_close(
                    found[net_name][name][row], parameter.grad, rtol=1e-5, atol=1e-12
                )


# Opacus registers hooks in a way that torch has deprecated.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", [SmallCNN, LeNet])
def test_gradients_of_the_classifier_equal_those_of_opacus_hooks(kind: type[nn.Module]) -> None:
    network = kind(SHAPE, CLASSES, width=4).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, *SHAPE, generator=generator, dtype=torch.float64)
    p = torch.eye(CLASSES, dtype=torch.float64)[torch.arange(5) % CLASSES]
    found = per_example_gradients(
        small_loss(network), parameters_of({"F": network}), {"x": x, "p": p}
    )["F"]  # fmt: skip
    hooked = GradSampleModule(copy.deepcopy(network), loss_reduction="sum")
    soft_cross_entropy(hooked(x), p).sum().backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad_sample for name, p in hooked._module.named_parameters()}
    # A bias before a group norm has zero gradient, so only rounding is left.
    rounding = 1e-9 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=rounding)


def hooked_gradients(network: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Per-example gradients by Opacus hooks; the loss is the sum over rows."""
    wrapped = GradSampleModule(copy.deepcopy(network), loss_reduction="sum")
    loss(wrapped).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad_sample for name, p in wrapped._module.named_parameters()}


def assert_alike(found: Any, expected: dict[str, Tensor]) -> None:
    rounding = 1e-9 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=rounding)


# Opacus registers hooks in a way that torch has deprecated.
hooks = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@hooks
def test_gradients_of_the_generator_equal_those_of_opacus_hooks() -> None:
    network = networks()["G"].double()
    f = {k: v[:, 0] for k, v in mixing(rows=5, views=1, dtype=torch.float64).items()}

    def row(parameters: Any, r: Any) -> Tensor:
        given = [r[key][None] for key in ("mild", "p1", "p2", "z", "lam")]
        made = FunctionalModule(network, parameters["G"])(*given[:4], given[4][:, None])
        total: Tensor = made.square().sum()
        return total

    found = per_example_gradients(row, parameters_of({"G": network}), f)["G"]
    given = (f["mild"], f["p1"], f["p2"], f["z"], f["lam"][:, None])
    assert_alike(found, hooked_gradients(network, lambda G: G(*given).square().sum()))


@hooks
def test_gradients_of_a_discriminator_that_a_loss_calls_twice_equal_those_of_opacus_hooks() -> None:
    nets = {name: net.double() for name, net in networks().items()}
    fields = mixing(rows=5, views=1, dtype=torch.float64)
    f = {key: value[:, 0] for key, value in fields.items()}
    found = per_example_gradients(joint_loss(nets, ("D",)), parameters_of({"D": nets["D"]}), fields)
    with torch.no_grad():  # Eq. 6: D sees the mix and its mixed label p'
        x_hat = nets["G"](f["mild"], f["p1"], f["p2"], f["z"], f["lam"][:, None])[:, 0]
        mixed = f["lam"][:, None] * f["p1"] + (1 - f["lam"][:, None]) * f["p2"]

    def loss(D: nn.Module) -> Tensor:
        return discriminator_loss(D(f["mild"], f["p1"]), D(x_hat, mixed), f["lam"]).sum()

    assert_alike(found["D"], hooked_gradients(nets["D"], loss))

    def wrong(D: nn.Module) -> Tensor:  # the control: one call of D on the mix is missing
        return discriminator_loss(D(f["mild"], f["p1"]), torch.zeros(5).double(), f["lam"]).sum()

    with pytest.raises(AssertionError):
        assert_alike(found["D"], hooked_gradients(nets["D"], wrong))


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("protect", [("G",), ("F", "G"), ("F", "G", "D")])
def test_a_private_step_on_vectors_moves_all_weights_by_the_clipped_sum_of_its_rows(
    protect: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, features, clip = 4, 6, 0.3
    draw_rows(monkeypatch, [True, True, False, True])
    cfg = GMixupSettings(generator="variational", weight_code=1.0)
    G, D = networks_for((features,), "variational")
    kinds = {"F": MLP((features,), CLASSES), "D": D((features,), CLASSES, spectral=False)}
    kinds["G"] = G((features,), CLASSES, noise_size=cfg.noise_size)
    nets = {name: net.double() for name, net in kinds.items()}
    rng = torch.Generator().manual_seed(5)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(rows, 1, *shape, generator=rng, dtype=torch.float64)

    fields = {
        "strong": 2 * uniform(features) - 1, "mild": 2 * uniform(features) - 1, "lam": uniform(),
        "p1": uniform(CLASSES).softmax(dim=-1), "p2": uniform(CLASSES).softmax(dim=-1),
        "z": uniform(cfg.noise_size),
    }  # fmt: skip
    for name, net in nets.items():
        net.requires_grad_(name in protect)

    def loss_of(functions: NetworkFunctions, one: Mapping[str, Tensor]) -> Tensor:
        by_network, _ = mixing_losses(cfg, functions, MixupBatch(**one), protect, True)
        return torch.stack([part.mean() for part in by_network.values()]).sum()

    # The reference: backward() for each row, clipped over all its weights together.
    weights = {(n, k): p for n in protect for k, p in nets[n].named_parameters()}
    expected = {key: torch.zeros_like(p) for key, p in weights.items()}
    frozen = {n: copy.deepcopy(nets[n]).requires_grad_(False) for n in ("F", "D")}
    live = NetworkFunctions(nets["F"], nets["G"], nets["D"], frozen["F"], frozen["D"])
    norms = []
    for row in (0, 1, 3):
        loss = loss_of(live, {key: value[row] for key, value in fields.items()})
        parts = torch.autograd.grad(loss, list(weights.values()))
        norms.append(float(torch.cat([part.flatten() for part in parts]).norm()))
        for key, part in zip(weights, parts, strict=True):
            expected[key] += part * min(1.0, clip / norms[-1])
    assert min(norms) > clip  # the control: clipping matters
    assert float(expected["G", "log_deviation"].norm()) > 0.01  # and so does this parameter
    before = {key: p.detach().clone() for key, p in weights.items()}
    steps = PrivateTraining(
        plan(update=protect, protect=protect, clip_norm=clip, expected_batch=2.0, sample_rate=0.5),
        {name: nets[name] for name in protect},
    )
    steps.run(
        rows, lambda indices, _: {key: value[indices] for key, value in fields.items()},
        lambda p, one: loss_of(NetworkFunctions.with_parameters(nets, p), one),
    )  # fmt: skip
    for key, parameter in weights.items():
        moved = before[key] - parameter.detach()
        torch.testing.assert_close(moved, expected[key] / 2, rtol=1e-3, atol=1e-6)


def test_noise_reaches_the_deviations_of_a_variational_generator_of_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw_rows(monkeypatch, [False])
    G = networks_for((6,), "variational")[0]((6,), CLASSES)
    assert isinstance(G, VariationalFeatureGenerator)
    before = G.log_deviation.detach().clone()
    steps = PrivateTraining(plan(update=("G",), protect=("G",)), {"G": G})
    steps.run(1, lambda indices, _: {"x": torch.zeros(len(indices), 6)}, _sum_of_deviations)
    assert bool((G.log_deviation != before).all())


def _sum_of_deviations(parameters: Parameters, fields: Mapping[str, Tensor]) -> Tensor:
    return parameters["G"]["log_deviation"].sum() + fields["x"].sum()
