"""Per-example gradients of FedSSL's networks against one row at a time and against Opacus hooks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from generators.objectives import discriminator_loss
from privssl.algorithms.fedssl.losses import MixupBatch, NetworkFunctions, mixing_losses
from privssl.algorithms.fedssl.settings import GMixupSettings
from privssl.models.convnets import LeNet, SmallCNN
from privssl.privacy.per_example_gradients import (
    per_example_gradients,
)
from privssl.training.batched.deferred import FunctionalModule
from privssl.training.losses import soft_cross_entropy
from tests.support.privacy import (
    CLASSES,
    SHAPE,
    joint_loss,
    mixing,
    networks,
    parameters_of,
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
