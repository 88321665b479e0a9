"""The DP-SGD mechanism: what docs/dp_sgd.md promises.

Sums are read off the network: with noise taken away, learning rate 1 and divisor 1 a step moves
the weights by exactly the clipped sum. Networks are float64, so that reading it off loses nothing.
Every check of a guarantee is shown to fail when what it checks is broken on purpose.
"""

import copy
import functools
import logging
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from privssl.algorithms.baselines.dp_classifier import check_classifier
from privssl.algorithms.fedssl.losses import Callables, Mixing, mixing_losses
from privssl.algorithms.fedssl.settings import GMixupSettings
from privssl.core.agents import LabelledRows
from privssl.core.task import Context, Task
from privssl.errors import PrivacyError
from privssl.models.convnets import LeNet, SmallCNN
from privssl.ops import dispatch, gaussian_noise
from privssl.privacy import dp_sgd, noisy_optimizer, secure_noise
from privssl.privacy.clipping import (
    DenseGradients,
    OuterProductGradients,
    PerExampleGradients,
    clipped_sums,
)
from privssl.privacy.dp_sgd import PrivateTraining, make_dp_sgd_plan
from privssl.privacy.independence import check_rows_independent, refuse_coupling_layers
from privssl.privacy.local_dp_sgd import Draw, train_rows_privately
from privssl.privacy.noisy_optimizer import SecureNoise
from privssl.privacy.per_example_gradients import (
    Parameters,
    RowLoss,
    factored_gradients,
    per_example_gradients,
)
from privssl.privacy.plan import PrivatePlan
from privssl.privacy.secure_noise import _as_floats, box_muller, secure_normal, secure_uniform
from privssl.settings.schema import PrivacySettings
from privssl.training.batched.deferred import ExampleLoss, FunctionalModule
from privssl.training.losses import hard_label_loss, soft_cross_entropy
from tests.support.kernel_generations import HERE
from tests.support.posts import in_a_fork
from tests.support.privacy import (
    BARE,
    CLASSES,
    SHAPE,
    SHIPPED,
    classifier_rows,
    draw_rows,
    frequency_is,
    joint_loss,
    largest_correlation,
    mixing,
    networks,
    parameters_of,
    plan,
    repeats,
)
from tests.support.toy_worlds import without_noise


@pytest.fixture(params=[None, *HERE], ids=str)
def each_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch does all work, and our kernels do, as they were compiled for each generation."""
    with patch.object(dispatch, "_latest", lambda: request.param):
        yield


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)


@pytest.fixture(autouse=True)
def torch_begins_alike() -> Iterator[None]:
    """Untrained networks are the same in every run of a test, and no other test notices."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield


# A small problem: rows x (N, 4), loss of a row = softmax cross-entropy of a small network -------


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


def moved_by(network: nn.Module, x: Tensor, the_plan: PrivatePlan, at_once: int = 64) -> Tensor:
    """By how much one visit moves the weights, downhill, all parameters in one vector."""
    trained = copy.deepcopy(network)
    p = torch.eye(CLASSES, dtype=torch.float64)[torch.arange(len(x)) % CLASSES]
    training = PrivateTraining(the_plan, {"F": trained})
    training.run(
        len(x), lambda rows, step: {"x": x[rows], "p": p[rows]}, small_loss(trained),
        at_once=at_once,
    )  # fmt: skip
    return flat(network) - flat(trained)


def clipped_by_hand(network: nn.Module, x: Tensor, clip: float) -> Tensor:
    """The clipped sum, a row at a time with plain autograd: the definition."""
    total = torch.zeros_like(flat(network))
    for number, row in enumerate(x):
        network.zero_grad()
        target = torch.tensor([number % CLASSES])
        nn.functional.cross_entropy(network(row[None]), target).backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
        total += gradient * min(1.0, clip / float(gradient.norm()))
    return total


# The sum and its sensitivity --------------------------------------------------------------------


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("clip", [0.1, 1.0, 1e6])
def test_without_noise_a_step_is_the_sum_of_clipped_row_gradients(clip: float) -> None:
    network, x = small_network(), small_rows(7)
    moved = moved_by(network, x, plan(clip_norm=clip))
    # Opacus divides by norm + 1e-6, which is on the safe side of the definition.
    torch.testing.assert_close(moved, clipped_by_hand(network, x, clip), rtol=1e-5, atol=1e-9)


WILD = [0.0, 1e-300, 1e-12, 1.0, 1e12, 1e300, math.nan, math.inf, -math.inf]


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[nn.Module, Tensor, int, float]:
    """A network, rows of which some are wild, the row in which neighbours differ, a clip norm."""
    x = small_rows(draw(st.integers(1, 6)), seed=draw(st.integers(0, 999)))
    for row in range(len(x)):
        if draw(st.booleans()):
            x[row, draw(st.integers(0, 3))] = draw(st.sampled_from(WILD))
    network = small_network(draw(st.integers(0, 999)))
    differing = draw(st.integers(0, len(x) - 1))
    return network, x, differing, draw(st.sampled_from([1e-3, 1.0, 50.0]))


def largest_shift(network: nn.Module, x: Tensor, row: int, clip: float) -> float:
    """How far neighbours are apart, in clip norms, over all relations that a claim may name."""
    given_plan = plan(clip_norm=clip)
    whole = moved_by(network, x, given_plan)
    # Removing is the same distance as adding. The last row has to go, so that labels stay.
    turned = torch.cat([x[:row], x[row + 1 :], x[row : row + 1]])
    with_row, without = (moved_by(network, part, given_plan) for part in (turned, turned[:-1]))
    null = x.clone()
    null[row] = math.nan  # a row without a finite gradient is a row of zeros
    shifts = [with_row - without, whole - moved_by(network, null, given_plan)]
    return max(float(shift.norm()) for shift in shifts) / clip


@given(case=neighbours())
@settings(max_examples=40)
def test_one_row_more_or_less_or_nulled_moves_the_sum_by_at_most_the_clip_norm(
    case: tuple[nn.Module, Tensor, int, float],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_noise(patch)
        assert largest_shift(*case) <= 1 + 1e-5


@pytest.mark.usefixtures("each_way")
def test_clipped_sums_are_those_of_opacus_and_of_rows_one_by_one() -> None:
    sizes = torch.tensor([0.01, 1, 1, 100, 1])
    drawing = torch.Generator().manual_seed(0)
    samples = [
        torch.randn(5, 3, generator=drawing) * sizes[:, None],
        torch.randn(5, 2, 2, generator=drawing) * sizes[:, None, None],
        (torch.randn(4, 5, 3, generator=drawing) * sizes[:, None]).movedim(0, 2),  # out of order
        torch.randn(5, generator=drawing) * sizes,  # of a parameter that is one number
        torch.randn(5, 700, generator=drawing) * sizes[:, None] / 20,
    ]
    drawn = torch.tensor([True, True, False, True, True])
    samples[0][4, 1] = math.nan
    expected = [torch.zeros(s.shape[1:], dtype=torch.float64) for s in samples]
    for row in (0, 1, 3):
        norm = math.sqrt(sum(float(s[row].square().sum()) for s in samples))
        for total, sample in zip(expected, samples, strict=True):
            total += sample[row] * min(1.0, 0.5 / (norm + 1e-6))
    for found, total in zip(
        clipped_sums([DenseGradients(sample) for sample in samples], drawn, 0.5),
        expected,
        strict=True,
    ):
        torch.testing.assert_close(found, total, rtol=1e-6, atol=1e-6)
    parameters = [nn.Parameter(torch.zeros(s.shape[1:])) for s in samples]
    opacus = DPOptimizer(
        torch.optim.SGD(parameters, lr=1.0), noise_multiplier=0.0, max_grad_norm=0.5,
        expected_batch_size=None, loss_reduction="sum",
    )  # fmt: skip
    for parameter, sample in zip(parameters, samples, strict=True):
        parameter.grad_sample = sample[[0, 1, 3]]  # type: ignore[attr-defined]
    opacus.clip_and_accumulate()
    for parameter, total in zip(parameters, expected, strict=True):
        summed = parameter.summed_grad.double()  # type: ignore[attr-defined]
        torch.testing.assert_close(summed, total, rtol=1e-5, atol=1e-6)


def operations(work: Callable[[], object]) -> list[str]:
    """What torch is asked for meanwhile."""
    seen: list[str] = []

    class Listening(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Listening():  # type: ignore[no-untyped-call]
        work()
    return seen


def sum_with(bad: float, sums: Callable[..., object]) -> Callable[[], object]:
    """A sum over four rows, of which one has a bad number, in every form of a gradient."""

    def work() -> None:
        whole, left, right = torch.ones(4, 600), torch.ones(4, 1, 3), torch.ones(4, 2, 5)
        small, smaller = torch.ones(4, 3, 2), torch.ones(4)
        for part in (whole, left, right, small, smaller):
            part[2].view(-1)[0] = bad
        gradients = [
            DenseGradients(whole),
            DenseGradients(small, (1, 0)),
            DenseGradients(smaller),
            OuterProductGradients(left, torch.ones(4, 1, 2)),
            OuterProductGradients(torch.ones(4, 2, 2), right),
        ]
        sums(gradients, torch.tensor([True, True, False, True]), 1.0)

    return work


@pytest.mark.usefixtures("each_way")
def test_the_operations_of_a_clipped_sum_do_not_depend_on_what_rows_hold() -> None:
    for bad in (math.nan, math.inf, 1e30, 0.0):
        assert operations(sum_with(bad, clipped_sums)) == operations(sum_with(0.5, clipped_sums))

    def only_if_need_be(
        gradients: list[PerExampleGradients], drawn: Tensor, clip_norm: float
    ) -> list[Tensor]:
        drawn = drawn & all(bool(each.norms().isfinite().all()) for each in gradients)
        return clipped_sums(gradients, drawn, clip_norm) if drawn.any() else []

    assert operations(sum_with(math.nan, only_if_need_be)) != operations(
        sum_with(0.5, only_if_need_be)
    )


def test_the_operations_of_a_private_step_do_not_depend_on_what_rows_hold() -> None:
    nets = networks()
    training = PrivateTraining(plan(protect=("F", "G", "D")), nets)

    def step(bad: float) -> Callable[[], object]:
        fields = mixing(rows=3, views=2)
        fields["strong"][1, 0] = fields["mild"][1, 0] = bad
        mask = torch.tensor([True, True, False])
        for parameter in (p for net in nets.values() for p in net.parameters()):
            parameter.summed_grad = None  # type: ignore[attr-defined]  # as when a step begins
        return lambda: training._add_clipped(fields, mask, joint_loss(nets, ("F", "G", "D")))

    usual = operations(step(0.5))
    assert len(usual) > 100
    assert all(operations(step(bad)) == usual for bad in (math.nan, math.inf, 1e30, 0.0))


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("numbers", [1, 511, 512, 513, 300_000, 3_000_001])
def test_a_row_of_very_many_numbers_weighs_no_more_than_the_clip_norm(numbers: int) -> None:
    [total] = clipped_sums(
        [DenseGradients(torch.full((1, numbers), 0.7))], torch.tensor([True]), 0.1
    )
    assert float(total.double().norm()) == pytest.approx(0.1, rel=1e-5)
    if numbers > 3_000_000:  # the control: squares that are all added up in one go
        whole = float(torch.full((1, numbers), 0.7).norm(dim=1))
        assert abs(whole / (0.7 * math.sqrt(numbers)) - 1) > 1e-4


def test_a_network_with_buffers_is_refused_because_they_would_be_sent_without_noise() -> None:
    with_buffers = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    with pytest.raises(PrivacyError, match="D cannot be protected"):
        PrivateTraining(BARE, {"F": nn.Linear(2, 2), "D": with_buffers})
    PrivateTraining(BARE, {"F": nn.Linear(2, 2), "D": nn.Linear(2, 2)})  # the control


def test_two_networks_with_a_parameter_in_common_are_refused() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    with pytest.raises(PrivacyError, match="F, G share a parameter"):
        PrivateTraining(BARE, {"F": one, "G": other})


def test_matrix_products_that_are_rounded_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")  # TF32
    with pytest.raises(PrivacyError, match=r"products are rounded.* Set .* to highest"):
        PrivateTraining(BARE, {"F": nn.Linear(2, 2)})


def test_a_sum_of_another_shape_than_the_parameter_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = small_network()

    def narrow(_loss: RowLoss, _parameters: object, fields: Mapping[str, Tensor]) -> Any:
        return {
            ("F", "0.bias"): DenseGradients(torch.ones(len(fields["x"]), 1, dtype=torch.float64))
        }

    monkeypatch.setattr(dp_sgd, "factored_gradients", narrow)  # 0.bias has three numbers
    with pytest.raises(PrivacyError, match=r"gradient of F\.0\.bias has shape .*\[1\]"):
        moved_by(network, small_rows(4), BARE)


@pytest.mark.usefixtures("each_way")
def test_a_gradient_that_does_not_depend_on_the_row_is_summed_like_others() -> None:
    sample = torch.tensor([[3.0, 4.0]]).expand(5, 2)  # as vmap returns it
    [total] = clipped_sums(
        [DenseGradients(sample)], torch.tensor([True, True, False, True, True]), 1.0
    )
    assert total.tolist() == pytest.approx([2.4, 3.2], rel=1e-6)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])  # 1e30 has no finite norm
def test_a_row_whose_gradient_is_beyond_numbers_adds_nothing(bad: float) -> None:
    samples = [DenseGradients(torch.tensor([[3.0, 4.0], [bad, 1.0]]))]
    [total] = clipped_sums(samples, torch.tensor([True, True]), 1.0)
    assert total.tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


@pytest.mark.usefixtures("no_noise")
def test_the_check_of_sensitivity_notices_that_clipping_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def only_sums(
        samples: list[PerExampleGradients], drawn: Tensor, clip_norm: float
    ) -> list[Tensor]:
        return [sample.total(drawn.double()) for sample in samples]

    monkeypatch.setattr(dp_sgd, "clipped_sums", only_sums)
    assert largest_shift(small_network(), small_rows(4), 2, clip=0.1) > 1 + 1e-5


@pytest.mark.usefixtures("no_noise")
def test_two_networks_share_one_clip_norm() -> None:
    # Gradients of sum(w * 3) and sum(v * 4) are 3 and 4: together 5, clipped to norm 1.
    nets = {name: nn.Linear(1, 1, bias=False) for name in ("F", "G")}
    before = {name: net.weight.detach().clone() for name, net in nets.items()}

    def loss(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        return 3 * parameters["F"]["weight"].sum() + 4 * parameters["G"]["weight"].sum() * row["x"]

    one = {"x": torch.ones(1)}
    PrivateTraining(plan(protect=("F", "G")), nets).run(1, lambda rows, step: one, loss)
    moved = [float((before[name] - net.weight).detach()) for name, net in nets.items()]
    assert moved == pytest.approx([0.6, 0.8], rel=1e-5)


@pytest.mark.usefixtures("no_noise")
def test_all_views_of_a_row_share_one_clip_norm() -> None:
    # Three views whose gradients are 2 each: together 6, clipped to 1 and not to 3.
    network = nn.Linear(1, 1, bias=False)
    before = float(network.weight.detach())
    fields = {"x": torch.full((1, 3), 2.0)}

    def loss(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        return (parameters["F"]["weight"] * row["x"]).sum()

    PrivateTraining(plan(views=3), {"F": network}).run(1, lambda rows, step: fields, loss)
    assert before - float(network.weight.detach()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_finite_gradient_counts_nothing_and_nobody_is_told(
    bad: float, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    network, x = small_network(), small_rows(5)
    x[4, 1] = bad
    with caplog.at_level(logging.DEBUG, logger="privssl"):
        moved = moved_by(network, x, BARE)  # a warning would be an error here
    torch.testing.assert_close(moved, moved_by(network, x[:4], BARE), rtol=0, atol=1e-12)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("protect", [("F",), ("G",), ("F", "G"), ("F", "G", "D")])
def test_gradients_of_the_joint_loss_equal_one_row_at_a_time(protect: tuple[str, ...]) -> None:
    nets = {name: net.double() for name, net in networks().items()}
    fields = mixing(rows=3, views=2, dtype=torch.float64)
    protected = {name: nets[name] for name in protect}
    found = per_example_gradients(joint_loss(nets, protect), parameters_of(protected), fields)
    for row in range(3):
        # The reference: the modules themselves and backward, no functional call and no vmap.
        for name, net in nets.items():
            net.zero_grad()
            net.requires_grad_(name in protect)
        frozen = {n: copy.deepcopy(nets[n]).requires_grad_(False) for n in ("F", "D")}
        live = Callables(nets["F"], nets["G"], nets["D"], frozen["F"], frozen["D"])
        one = Mixing(**{key: value[row] for key, value in fields.items()})
        losses, _ = mixing_losses(GMixupSettings(), live, one, protect, True)
        torch.stack([part.mean() for part in losses.values()]).sum().backward()  # type: ignore[no-untyped-call]
        for net_name, net in protected.items():
            for name, parameter in net.named_parameters():
                assert parameter.grad is not None
                torch.testing.assert_close(
                    found[net_name][name][row], parameter.grad, rtol=1e-5, atol=1e-12
                )


# Opacus registers hooks in a way that torch has announced to change.
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
    # A bias before a group norm has no gradient: what is there of it is rounding.
    rounding = 1e-9 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=rounding)


@pytest.mark.parametrize("which", SHIPPED)
@pytest.mark.parametrize("value", [0.5, 1e30, math.nan])
def test_another_row_leaves_a_rows_gradient_bit_equal(which: str, value: float) -> None:
    build, rows_of = SHIPPED[which]
    network = build()

    def loss(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
        return rows_of(
            FunctionalModule(network, parameters["N"]), {k: v[None] for k, v in row.items()}
        )[0]

    fields = {key: field[:, 0] for key, field in mixing(rows=4, views=1).items()}
    before = per_example_gradients(loss, parameters_of({"N": network}), fields)["N"]
    changed = {key: field.clone() for key, field in fields.items()}
    changed["mild"][2] = value
    after = per_example_gradients(loss, parameters_of({"N": network}), changed)["N"]
    others = torch.tensor([0, 1, 3])
    assert all(torch.equal(after[name][others], before[name][others]) for name in before)
    assert any(not torch.equal(after[name][2], before[name][2]) for name in before)


@pytest.mark.parametrize("which", SHIPPED)
def test_rows_of_every_shipped_network_are_independent(which: str) -> None:
    build, rows_of = SHIPPED[which]
    network, fields = build(), {k: v[:, 0] for k, v in mixing(rows=4, views=1).items()}
    check_rows_independent(lambda batch: rows_of(network, batch), fields)


def planted() -> nn.Module:
    return SmallCNN(SHAPE, CLASSES, width=4, norm="batch")


def test_a_planted_batch_norm_is_noticed_by_the_check_of_independence() -> None:
    network = planted()
    fields = {key: field[:, 0] for key, field in mixing(rows=4, views=1).items()}
    with pytest.raises(PrivacyError, match="row 0 changed the loss of other rows"):
        check_rows_independent(lambda batch: classifier_rows(network, batch), fields)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_batch_norm_is_refused_by_name_in_a_trained_and_in_a_frozen_network(frozen: bool) -> None:
    bad = planted().requires_grad_(not frozen).train(not frozen)
    with pytest.raises(PrivacyError) as refusal:
        refuse_coupling_layers({"D": networks()["D"], "F": bad})
    text = str(refusal.value)
    assert "F.trunk.2 (BatchNorm2d)" in text and "F.trunk.6 (BatchNorm2d)" in text
    assert "model.norm: group" in text
    refuse_coupling_layers(networks(spectral=True))  # and nothing else is


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.InstanceNorm2d(3, track_running_stats=True)],
)
def test_other_layers_that_keep_statistics_of_rows_are_refused(layer: nn.Module) -> None:
    with pytest.raises(PrivacyError, match=type(layer).__name__):
        refuse_coupling_layers({"F": nn.Sequential(nn.Flatten(), layer)})


# Batches: empty, full, split -----------------------------------------------------------------


def test_a_step_without_rows_is_a_step_of_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_noise, "secure_normal", np.ones)
    draw_rows(monkeypatch, [False] * 6)
    shift = moved_by(
        small_network(), small_rows(6),
        plan(sample_rate=0.5, noise_multiplier=2.0, clip_norm=0.5, expected_batch=4.0, steps=3),
    )  # fmt: skip
    # 3 steps of noise 2.0 * 0.5 * 1, divided by 4
    torch.testing.assert_close(shift, torch.full_like(shift, 0.75))


def test_a_loop_that_skips_empty_batches_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_noise, "secure_normal", np.ones)
    draw_rows(monkeypatch, [False] * 6)
    monkeypatch.setattr(PrivateTraining, "_step", lambda self: None)  # no row, no step
    numbers = plan(sample_rate=0.5, noise_multiplier=2.0, clip_norm=0.5, steps=3)
    shift = moved_by(small_network(), small_rows(6), numbers)
    assert not shift.any()  # where every honest step leaves 0.25


@pytest.mark.parametrize(("share", "mean"), [(0.0, 3.0), (1 / 3, 3.0), (2 / 3, 2.5), (1.0, 2.0)])
def test_what_is_sent_is_the_mean_of_the_last_iterates_all_of_them_with_noise(
    share: float, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_noise, "secure_normal", np.ones)
    # Three steps of noise 1 leave the weights 1, 2 and 3 below where they came in.
    shift = moved_by(small_network(), small_rows(0), plan(steps=3, average_last=share))
    torch.testing.assert_close(shift, torch.full_like(shift, mean))


def test_momentum_has_seen_sums_with_noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_noise, "secure_normal", np.ones)
    # Noise 1 in two steps: v is 1, then half of that and 1 more.
    shift = moved_by(small_network(), small_rows(0), plan(steps=2, momentum=0.5))
    torch.testing.assert_close(shift, torch.full_like(shift, 2.5))


def test_an_agent_without_rows_makes_all_its_steps_and_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secure_noise, "secure_normal", np.ones)
    network = nn.Linear(2, 1)
    before = flat(network)

    def never(*_: object) -> Any:
        raise AssertionError("there is nothing to read")

    PrivateTraining(plan(sample_rate=0.3, steps=5), {"F": network}).run(0, never, never)
    torch.testing.assert_close(before - flat(network), torch.full((3,), 5.0))


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("rows", [1, 5])
def test_at_sample_rate_one_every_row_is_in_every_batch(rows: int) -> None:
    network, x = small_network(), small_rows(rows)
    moved = moved_by(network, x, plan(sample_rate=1.0))
    torch.testing.assert_close(moved, clipped_by_hand(network, x, 1.0), rtol=1e-5, atol=1e-9)
    assert bool(plan(sample_rate=1.0).draw_batch(rows).all())


@pytest.mark.usefixtures("no_noise")
def test_the_divisor_is_the_public_batch_size_whatever_was_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, x = small_network(), small_rows(1).repeat(4, 1)
    x[1:] = math.nan  # masked out or not, these count nothing
    public = plan(sample_rate=0.5, expected_batch=2.0)
    draw_rows(monkeypatch, [True, False, False, False])
    alone = moved_by(network, x, public)
    draw_rows(monkeypatch, [True, True, True, True])
    torch.testing.assert_close(moved_by(network, x, public), alone)
    torch.testing.assert_close(2 * alone, clipped_by_hand(network, x[:1], 1.0), rtol=1e-5, atol=0)


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_the_sum_does_not_depend_on_chunks_or_on_the_physical_batch(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 300 rows at rate 0.05: 15 expected, and 4 standard deviations of 3.77 more are 31.
    sparse = plan(sample_rate=0.05)
    assert sparse.physical_batch_size(300) == 31
    mask = [row % 20 == 3 for row in range(300)]
    draw_rows(monkeypatch, mask)
    network, x = small_network(), small_rows(300)
    moved = moved_by(network, x, sparse, chunk)
    expected = torch.zeros_like(moved)
    for row in range(3, 300, 20):
        pad = row % CLASSES  # rows before it, so that the row keeps its label
        alone = torch.cat([x[:pad], x[row : row + 1]])
        expected += clipped_by_hand(network, alone, 1.0) - clipped_by_hand(network, x[:pad], 1.0)
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("widths", "numbers", "rows"),
    [
        ([30_000], 1 * 28 * 28, 256),
        ([30_000], 2 * 28 * 28, 64),  # two views
        ([30_000], 3 * 32 * 32, 64),
        ([30_000], 1 * 64 * 64, 64),
        ([400_000], 1 * 28 * 28, 64),
        ([200_000, 200_000], 1 * 28 * 28, 64),  # of two networks together
    ],
)
def test_more_rows_are_computed_at_once_where_they_and_the_networks_are_small(
    widths: list[int], numbers: int, rows: int
) -> None:
    networks = {f"{n}": nn.Linear(width, 1, bias=False) for n, width in enumerate(widths)}
    assert dp_sgd.microbatch_size(networks, numbers) == rows


@pytest.mark.usefixtures("no_noise")
def test_a_batch_beyond_the_capacity_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = plan(sample_rate=0.01)
    assert sparse.physical_batch_size(257) < 257
    draw_rows(monkeypatch, [True] * 257)
    network, x = small_network(), small_rows(257)
    expected = clipped_by_hand(network, x, 1.0)
    torch.testing.assert_close(moved_by(network, x, sparse), expected, rtol=1e-5, atol=1e-8)


def test_small_agents_compute_every_row_so_that_time_tells_nothing() -> None:
    assert [plan(sample_rate=0.01).physical_batch_size(rows) for rows in (0, 1, 34, 256)] == [
        0,
        1,
        34,
        256,
    ]


def test_no_sum_without_noise_outlives_the_visit() -> None:
    network = nn.Linear(4, CLASSES).double()
    x, p = small_rows(3), torch.eye(CLASSES, dtype=torch.float64)
    PrivateTraining(BARE, {"F": network}).run(
        3, lambda rows, step: {"x": x[rows], "p": p[rows]}, small_loss(network)
    )
    for parameter in network.parameters():
        left = [vars(parameter).get(name) for name in ("summed_grad", "grad_sample")]
        assert [*left, parameter.grad] == [None] * 3


@pytest.mark.usefixtures("no_noise")
def test_the_sum_of_a_visit_that_broke_off_does_not_enter_the_next() -> None:
    network = nn.Linear(4, CLASSES).double()
    before = flat(network)
    x, p = small_rows(5), torch.eye(CLASSES, dtype=torch.float64)

    def breaks_off(rows: Tensor, step: int) -> dict[str, Tensor]:
        if 4 in rows:
            raise RuntimeError("at the second chunk")
        return {"x": x[rows], "p": p[rows % CLASSES]}

    with pytest.raises(RuntimeError, match="second chunk"):
        PrivateTraining(BARE, {"F": network}).run(5, breaks_off, small_loss(network), at_once=4)
    assert any(vars(p).get("summed_grad") is not None for p in network.parameters())
    PrivateTraining(BARE, {"F": network}).run(0, breaks_off, small_loss(network))
    assert torch.equal(flat(network), before)


# Noise ------------------------------------------------------------------------------------------

DRAWS = 1_000_000
# P[D > 0.0027] at a million draws is 2 exp(-2 n D^2), about one in a million.
TOO_FAR = math.sqrt(math.log(2e6) / (2 * DRAWS))


def noise_released(noise_multiplier: float, clip: float) -> np.ndarray:
    """What a visit of two steps without rows adds to half a million parameters."""
    released = []
    network = nn.Linear(500, 1000, bias=False)
    quiet = plan(noise_multiplier=noise_multiplier, clip_norm=clip)
    for _ in range(2):
        nn.init.zeros_(network.weight)
        PrivateTraining(quiet, {"F": network}).run(0, lambda *_: {}, lambda *_: torch.zeros(()))
        released.append(-network.weight.detach().flatten().numpy())
    return np.concatenate(released)


def test_noise_is_normal_with_the_planned_deviation_to_less_than_two_percent() -> None:
    noise = noise_released(noise_multiplier=1.6, clip=0.25)  # deviation 0.4
    assert len(noise) == DRAWS
    distance = {
        factor: stats.ks_1samp(noise, stats.norm(scale=0.4 * factor).cdf, method="asymp").statistic
        for factor in (0.98, 1.0, 1.02)
    }
    assert distance[1.0] < TOO_FAR
    # The negative control: at a scale wrong by 2% the distance is about 0.02 * 0.242 = 0.0048.
    assert distance[0.98] > TOO_FAR and distance[1.02] > TOO_FAR


def most_alike_releases() -> float:
    """The largest correlation between what two steps release, of one visit and of another."""
    network, released = nn.Linear(50, 40), []
    for _ in range(2):
        training = PrivateTraining(BARE, {"F": network})
        for _ in range(2):
            before = flat(network)
            training.run(0, lambda rows, step: {}, small_loss(network))
            released.append((flat(network) - before).numpy())
            assert np.mean(released[-1] != 0) > 0.99  # the bias alone is 2%
    return float(np.abs(np.corrcoef(released) - np.eye(4)).max())


@pytest.mark.usefixtures("each_way")
def test_what_is_released_has_fresh_noise_in_every_step_and_visit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of 2,040 numbers each: correlations are 0.022 wide, and 0.15 is beyond chance.
    assert most_alike_releases() < 0.15
    monkeypatch.setattr(secure_noise, "secure_normal", functools.cache(secure_normal))
    assert most_alike_releases() > 0.9  # the control


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """All noise that is drawn from here on."""
    drawn: list[np.ndarray] = []

    def record(count: int) -> np.ndarray:
        drawn.append(secure_normal(count))
        return drawn[-1].copy()

    monkeypatch.setattr(secure_noise, "secure_normal", record)
    return drawn


def noisy(sums: Tensor, parameter: nn.Parameter | None = None) -> Tensor:
    """What is released of sums, with noise of deviation 0.91 on each."""
    parameter = nn.Parameter(torch.zeros_like(sums)) if parameter is None else parameter
    optimizer = SecureNoise(
        torch.optim.SGD([parameter], lr=1.0), noise_multiplier=1.3, max_grad_norm=0.7,
        expected_batch_size=None, loss_reduction="sum",
    )  # fmt: skip
    parameter.summed_grad = sums  # type: ignore[attr-defined]
    optimizer.add_noise()
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("total", [0.0, 1 / 3, -1e-9, 50.0])
def test_the_same_numbers_come_out_whatever_noise_was_added_to(
    total: float, monkeypatch: pytest.MonkeyPatch, recorded: list[np.ndarray]
) -> None:
    sums = torch.full((10_000,), total)
    released = noisy(sums).double() * 2**17  # 0.91 lies between 2^-1 and 2^0; 2^-1 / 2^16
    assert torch.equal(released, released.round())
    before = sums.double() + 0.91 * torch.from_numpy(recorded[0])
    assert float((released / 2**17 - before).abs().max()) <= 2**-18
    # The control: sums with noise as they are lie anywhere.
    monkeypatch.setattr(noisy_optimizer, "rounding_grid", lambda deviation: 0.0)
    anywhere = noisy(sums).double() * 2**17
    assert not torch.equal(anywhere, anywhere.round())


@pytest.mark.usefixtures("each_way", "no_noise")
def test_a_sum_is_released_where_it_belongs_however_parameters_lie_in_memory() -> None:
    sums = torch.arange(3.0 * 4 * 5 * 2).view(3, 4, 5, 2)
    for of in (sums, sums.contiguous(memory_format=torch.channels_last)):
        for as_they_lie in (of, sums.contiguous(memory_format=torch.channels_last)):
            parameter = nn.Parameter(torch.zeros_like(as_they_lie))
            assert torch.equal(noisy(of, parameter), sums)


@pytest.mark.usefixtures("each_way")
def test_parameters_in_bfloat16_have_noise_on_sums_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(300, dtype=torch.bfloat16))
    released = noisy(torch.full((300,), 2.0), parameter)
    assert released.dtype == torch.bfloat16
    assert 1.7 < float(released.double().mean()) < 2.3
    assert 0.7 < float(released.double().std()) < 1.1


@pytest.mark.usefixtures("each_way")
def test_without_noise_there_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_count: int) -> np.ndarray:
        raise OSError("no coins")

    monkeypatch.setattr(secure_noise, "secure_normal", fails)
    for sums in (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).mT):
        parameter = nn.Parameter(torch.zeros(2, 3))
        with pytest.raises(OSError, match="no coins"):
            noisy(sums, parameter)
        assert parameter.grad is None


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    numbers = secure_uniform(DRAWS)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert stats.ks_1samp(numbers, stats.uniform.cdf, method="asymp").statistic < TOO_FAR


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
@example([0, 1, 2**53 - 1, 2**53 + 1, 2**54 + 3, 2**63 - 1, 2**63, 2**63 + 1024, 2**63 + 1025])
@example([2**63 + 3072, 2**64 - 1024, 2**64 - 1025, 2**64 - 1])
def test_words_become_the_numbers_that_are_nearest_to_them(words: list[int]) -> None:
    found = _as_floats(np.array(words, dtype=np.uint64))
    assert found.tolist() == [float(word) for word in words]  # Python rounds to the nearest


@pytest.mark.usefixtures("each_way")
def test_noise_without_luck_has_no_infinite_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    for extreme in (0, 1, 2**64 - 1):
        word = np.array([extreme], dtype=np.uint64)
        monkeypatch.setattr(secure_noise, "random_uint64", functools.partial(np.resize, word))
        assert np.isfinite(secure_normal(3)).all()


def from_words(radius: int, angle: int) -> tuple[float, float]:
    """The paper's formula for one pair of words, in numbers of more digits."""
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
def test_any_words_become_the_numbers_of_box_and_muller(words: list[tuple[int, int]]) -> None:
    radii, angles = (np.array([w[n] for w in words], dtype=np.uint64) for n in (0, 1))
    expected = np.array([from_words(*pair) for pair in words]).reshape(-1, 2).T.flatten()
    for way in (None, *HERE):
        with patch.object(dispatch, "_latest", lambda way=way: way):
            # Radii up to 9.4, of angles that are good to 7e-16.
            np.testing.assert_allclose(box_muller(radii, angles), expected, rtol=0, atol=8e-15)


@pytest.mark.usefixtures("each_generation")
def test_a_kernel_for_noise_is_asked_where_there_is_one() -> None:
    with patch.object(gaussian_noise, "normal", wraps=gaussian_noise.normal) as asked:
        secure_normal(3)
        with dispatch.disabled():
            secure_normal(3)
    assert asked.call_count == 1
    with pytest.raises(ValueError, match=r"radii \(2,\) and angles \(3,\)"):
        gaussian_noise.normal(np.zeros(2, dtype=np.uint64), np.zeros(3, dtype=np.uint64))


def gap_of_radii(word: int, bits: int) -> float:
    """Between the noise of two words beside each other, at angle 0, where so many bits count."""
    words = np.array([word, word + 1], dtype=np.uint64) << np.uint64(64 - bits)
    one, other, *_ = box_muller(words, np.zeros(2, dtype=np.uint64))
    return float(one - other)


@pytest.mark.usefixtures("each_way")
def test_noise_lies_closer_than_the_grid_but_once_in_ten_to_the_fifteen_draws() -> None:
    # Gaps grow with the radius, which falls as the word grows. Deviation 1; the finer of the grids.
    rare = int(1e-15 * 2**64)
    assert 0 < gap_of_radii(rare, 64) < noisy_optimizer.GRID / 2
    assert gap_of_radii(rare // 4, 64) > noisy_optimizer.GRID / 2
    # The control: with the 53 bits of a uniform number they lie apart a thousand times as often.
    assert gap_of_radii(int(0.7e-12 * 2**53), 53) > noisy_optimizer.GRID / 2


def seed_everything() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)


def test_noise_never_repeats_across_steps_parameters_and_runs_of_one_seed(
    recorded: list[np.ndarray],
) -> None:
    for _ in range(2):
        seed_everything()
        moved_by(small_network(), small_rows(3), plan(steps=4))
    assert len(recorded) == 2 * 4  # runs, steps
    assert repeats(recorded) == 0


def noise_that_lands(network: nn.Module) -> list[tuple[float, ...]]:
    """The first three numbers that each parameter is given in each of two steps, without rows."""
    landed: list[tuple[float, ...]] = []
    add_noise = SecureNoise.add_noise

    def look(self: SecureNoise) -> None:
        add_noise(self)
        landed.extend(tuple(p.grad.flatten()[:3].tolist()) for p in self.params if p.numel() >= 3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SecureNoise, "add_noise", look)
        moved_by(network, small_rows(0), plan(steps=2))
    return landed


def test_every_parameter_of_every_step_is_given_noise_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    landed = noise_that_lands(small_network())
    assert len(landed) == len(set(landed)) == 2 * 4  # steps, parameters
    # The control: one stretch of noise for all parameters.
    real = torch.split

    def same_for_all(noise: Tensor, sizes: Any) -> Any:
        return [noise[:n] for n in sizes] if isinstance(sizes, list) else real(noise, sizes)

    monkeypatch.setattr(torch, "split", same_for_all)
    assert len(set(noise_that_lands(small_network()))) == 2


def test_the_check_of_repeats_notices_a_seeded_generator() -> None:
    drawn = []
    for _ in range(2):
        seed_everything()
        drawn.append(torch.randn(10, dtype=torch.float64).numpy())
    assert repeats(drawn) == 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_draws_other_noise() -> None:
    def in_a_child(draw: Callable[[], np.ndarray]) -> np.ndarray:
        told = in_a_fork(lambda: draw().tobytes())
        assert told is not None
        return np.frombuffer(told, dtype=np.float64)

    assert repeats([in_a_child(lambda: secure_normal(100)), secure_normal(100)]) == 0
    # The negative control: a generator that is copied into the child repeats there.
    ambient = np.random.default_rng(1)
    copied = in_a_child(lambda: ambient.standard_normal(100))
    assert repeats([copied, ambient.standard_normal(100)]) == 100


# Masks ------------------------------------------------------------------------------------------

STEPS, ROWS = 20_000, 12
SIX_SIGMA = 6 / math.sqrt(STEPS)  # of a correlation of independent columns; once in 10^9


def test_every_row_is_drawn_with_the_sample_rate_and_independently() -> None:
    poisson = plan(sample_rate=0.25)
    masks = np.stack([poisson.draw_batch(ROWS).numpy() for _ in range(STEPS)]).astype(float)
    assert frequency_is(masks, 0.25)
    assert largest_correlation(masks) < SIX_SIGMA
    assert not frequency_is(masks, 0.27)  # the negative control: another rate is noticed


def test_the_check_of_independence_notices_batches_of_a_fixed_size() -> None:
    order = np.random.default_rng(5).permuted(np.tile(np.arange(ROWS), (STEPS, 1)), axis=1)
    masks = (order < 3).astype(float)  # 3 of 12 rows: the right rate, and not Poisson
    assert frequency_is(masks, 0.25)
    # Rows of a batch of fixed size are correlated by -1 / (ROWS - 1).
    assert largest_correlation(masks) > SIX_SIGMA


def test_masks_do_not_follow_a_seed() -> None:
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


# The plan ---------------------------------------------------------------------------------------


def chosen(**changes: Any) -> PrivacySettings:
    return PrivacySettings(**{"epsilon": 8.0, "sample_rate": 0.5, **changes})


def test_a_plan_divides_by_declared_rows_and_never_visits_more_than_asked() -> None:
    made = make_dp_sgd_plan(chosen(noise_multiplier=3.0, visits=9), rounds=4, rows_per_agent=34)
    assert (made.expected_batch, made.visits, made.noise_multiplier) == (17.0, 4, 3.0)
    assert make_dp_sgd_plan(chosen(noise_multiplier=3.0), rounds=4, rows_per_agent=34).visits == 4


def test_a_budget_of_zero_plans_no_visit() -> None:
    assert make_dp_sgd_plan(chosen(epsilon=0.0), rounds=4, rows_per_agent=34).visits == 0


@pytest.mark.parametrize(
    ("update", "protect", "scope"),
    [("F", "F", "sound"), ("FG", "FG", "sound"), ("FDG", "G", "as_published")],
)
def test_the_scope_follows_from_what_is_trained_without_noise(
    update: str, protect: str, scope: str
) -> None:
    assert plan(update=tuple(update), protect=tuple(protect)).scope == scope


# Chance and other rows, where an author would not look for them ---------------------------------


class Dropping(nn.Module):
    """Dropout as a function: no layer tells of it."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layer, self.share = nn.Linear(64, CLASSES), share

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(functional.dropout(x.flatten(1), self.share, self.training))
        return logits


def test_chance_inside_of_a_network_is_refused_before_a_run_and_in_training() -> None:
    task = Task(CLASSES, SHAPE, lambda: Dropping(0.5))
    with pytest.raises(PrivacyError, match="draws random numbers"):
        check_classifier(Dropping(0.5), task)
    check_classifier(Dropping(0.0), task)  # the control

    def gradients(network: nn.Module) -> object:
        def loss(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
            logits: Tensor = FunctionalModule(network, parameters["N"])(row["x"][None])
            return logits.square().sum()

        rows = {"x": torch.rand(3, *SHAPE)}
        return factored_gradients(loss, parameters_of({"N": network}), rows)

    with pytest.raises(PrivacyError, match="draws random numbers"):
        gradients(Dropping(0.5))
    assert gradients(Dropping(0.0))


def plain_fields(x: Tensor, y: Tensor, ctx: Context) -> Mapping[str, Tensor]:
    shift = torch.rand(len(x), 1, 1, 1, generator=ctx.rng("shift"))  # by places: they are public
    return {"x": x / 255 + shift, "y": y}


def mixed_with_its_neighbour(x: Tensor, y: Tensor, ctx: Context) -> Mapping[str, Tensor]:
    return {"x": (x + x.roll(1, dims=0)) / 510, "y": y}


def mixed_with_those_after_it(x: Tensor, y: Tensor, ctx: Context) -> Mapping[str, Tensor]:
    later = (x / 255).flip(0).cumsum(0).flip(0)
    return {"x": later, "y": y}


def one_of_the_whole_block(x: Tensor, y: Tensor, ctx: Context) -> Mapping[str, Tensor]:
    return {"x": x / 255, "y": y, "share": (y == 1).float().mean().expand(len(y))}


def chance_of_nobody(x: Tensor, y: Tensor, ctx: Context) -> Mapping[str, Tensor]:
    return {"x": x / 255 + torch.rand(len(x), 1, 1, 1), "y": y}


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (plain_fields, None),
        (mixed_with_its_neighbour, "^x of a row"),
        (mixed_with_those_after_it, "^x of a row"),
        (one_of_the_whole_block, "^share of a row"),
        (chance_of_nobody, "^x of a row"),
    ],
)
@pytest.mark.parametrize("counts_public", [True, False])
def test_what_is_drawn_for_a_row_may_not_depend_on_others(
    draw: Draw, named: str | None, counts_public: bool
) -> None:
    counts: Any = "public" if counts_public else "private"
    settings = PrivacySettings(epsilon=8.0, steps=2, record_counts=counts)
    plan = make_dp_sgd_plan(settings, rounds=1, rows_per_agent=4)
    rows = LabelledRows(
        torch.randint(256, (4, *SHAPE), dtype=torch.uint8), torch.arange(4) % CLASSES,
        torch.arange(4),
    )  # fmt: skip
    F, ctx = Dropping(0.0), Context(0, 1, "s0", "visit", "attempt", torch.device("cpu"))
    loss = ExampleLoss(hard_label_loss, (), {"F": F})
    before = F.layer.weight.clone()
    if named is None:
        train_rows_privately(plan, {"F": F}, rows, ctx, draw, loss, counts_public=counts_public)
        assert not torch.equal(F.layer.weight, before)
        return
    with pytest.raises(PrivacyError, match=named):
        train_rows_privately(plan, {"F": F}, rows, ctx, draw, loss, counts_public=counts_public)
    assert torch.equal(F.layer.weight, before)
