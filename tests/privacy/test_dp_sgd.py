"""The DP-SGD mechanism: what docs/dp_sgd.md promises.

Sums are read from the network: without noise, with learning rate 1 and divisor 1, a step moves the
weights by exactly the clipped sum. Networks are float64, so this loses no digits. Every check of a
guarantee has a negative control.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from privssl.errors import PrivacyError
from privssl.privacy import dp_sgd, secure_noise
from privssl.privacy.clipping import (
    DenseGradients,
    OuterProductGradients,
    PerExampleGradients,
    clipped_sums,
)
from privssl.privacy.dp_sgd import PrivateTraining, make_dp_sgd_plan
from privssl.privacy.per_example_gradients import (
    Parameters,
    RowLoss,
)
from privssl.settings.schema import PrivacySettings
from tests.support.privacy import (
    CLASSES,
    PLAN,
    draw_rows,
    flat,
    joint_loss,
    mixing,
    moved_by,
    networks,
    plan,
    small_loss,
    small_network,
    small_rows,
)
from tests.support.toy_worlds import without_noise

pytestmark = pytest.mark.usefixtures("torch_begins_alike")

# A small problem: rows x (N, 4), loss of a row = softmax cross-entropy of a small network -------


def clipped_by_hand(network: nn.Module, x: Tensor, clip: float) -> Tensor:
    """The clipped sum by definition: one row at a time with plain autograd."""
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
def test_without_noise_a_step_moves_the_weights_by_the_sum_of_clipped_gradients(
    clip: float,
) -> None:
    network, x = small_network(), small_rows(7)
    moved = moved_by(network, x, plan(clip_norm=clip))
    # Opacus divides by norm + 1e-6, which clips slightly more than the definition.
    torch.testing.assert_close(moved, clipped_by_hand(network, x, clip), rtol=1e-5, atol=1e-9)


EXTREME_VALUES = [0.0, 1e-300, 1e-12, 1.0, 1e12, 1e300, math.nan, math.inf, -math.inf]


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[nn.Module, Tensor, int, float]:
    """A network, rows with some extreme values, the row in which neighbours differ, a clipping
    norm.
    """
    x = small_rows(draw(st.integers(1, 6)), seed=draw(st.integers(0, 999)))
    for row in range(len(x)):
        if draw(st.booleans()):
            x[row, draw(st.integers(0, 3))] = draw(st.sampled_from(EXTREME_VALUES))
    network = small_network(draw(st.integers(0, 999)))
    differing = draw(st.integers(0, len(x) - 1))
    return network, x, differing, draw(st.sampled_from([1e-3, 1.0, 50.0]))


def largest_shift(network: nn.Module, x: Tensor, row: int, clip: float) -> float:
    """The largest distance between the sums of neighbours, in clipping norms, over all neighbour
    relations of a claim.
    """
    given_plan = plan(clip_norm=clip)
    whole = moved_by(network, x, given_plan)
    # Removing is the same distance as adding. The row is moved to the end first, to keep the labels
    # of the others.
    turned = torch.cat([x[:row], x[row + 1 :], x[row : row + 1]])
    with_row, without = (moved_by(network, part, given_plan) for part in (turned, turned[:-1]))
    null = x.clone()
    null[row] = math.nan  # a row without a finite gradient counts as zero
    shifts = [with_row - without, whole - moved_by(network, null, given_plan)]
    return max(float(shift.norm()) for shift in shifts) / clip


@given(case=neighbours())
@settings(max_examples=40)
def test_adding_removing_or_nulling_a_row_moves_the_sum_by_at_most_the_clip_norm(
    case: tuple[nn.Module, Tensor, int, float],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_noise(patch)
        assert largest_shift(*case) <= 1 + 1e-5


@pytest.mark.usefixtures("each_way")
def test_clipped_sums_equal_those_of_opacus_and_of_one_row_at_a_time() -> None:
    sizes = torch.tensor([0.01, 1, 1, 100, 1])
    drawing = torch.Generator().manual_seed(0)
    samples = [
        torch.randn(5, 3, generator=drawing) * sizes[:, None],
        torch.randn(5, 2, 2, generator=drawing) * sizes[:, None, None],
        # another order of dimensions
        (torch.randn(4, 5, 3, generator=drawing) * sizes[:, None]).movedim(0, 2),
        torch.randn(5, generator=drawing) * sizes,  # a scalar parameter
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
    """Names of the torch operations that ``work`` calls."""
    seen: list[str] = []

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Recorder():  # type: ignore[no-untyped-call]
        work()
    return seen


def sum_with(bad: float, sums: Callable[..., object]) -> Callable[[], object]:
    """A function that sums gradients of four rows, in every form; one row holds ``bad``."""

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
def test_operations_of_a_clipped_sum_do_not_depend_on_the_values_of_rows() -> None:
    for bad in (math.nan, math.inf, 1e30, 0.0):
        assert operations(sum_with(bad, clipped_sums)) == operations(sum_with(0.5, clipped_sums))

    def skips_non_finite_rows(
        gradients: list[PerExampleGradients], drawn: Tensor, clip_norm: float
    ) -> list[Tensor]:
        drawn = drawn & all(bool(each.norms().isfinite().all()) for each in gradients)
        return clipped_sums(gradients, drawn, clip_norm) if drawn.any() else []

    assert operations(sum_with(math.nan, skips_non_finite_rows)) != operations(
        sum_with(0.5, skips_non_finite_rows)
    )


def test_operations_of_a_private_step_do_not_depend_on_the_values_of_rows() -> None:
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
def test_a_row_with_millions_of_numbers_weighs_no_more_than_the_clip_norm(numbers: int) -> None:
    [total] = clipped_sums(
        [DenseGradients(torch.full((1, numbers), 0.7))], torch.tensor([True]), 0.1
    )
    assert float(total.double().norm()) == pytest.approx(0.1, rel=1e-5)
    if numbers > 3_000_000:  # the control: one float32 sum over all squares
        whole = float(torch.full((1, numbers), 0.7).norm(dim=1))
        assert abs(whole / (0.7 * math.sqrt(numbers)) - 1) > 1e-4


def test_a_network_with_buffers_is_refused_because_buffers_would_be_sent_without_noise() -> None:
    with_buffers = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    with pytest.raises(PrivacyError, match="D cannot be protected"):
        PrivateTraining(PLAN, {"F": nn.Linear(2, 2), "D": with_buffers})
    PrivateTraining(PLAN, {"F": nn.Linear(2, 2), "D": nn.Linear(2, 2)})  # the control


def test_two_networks_that_share_a_parameter_are_refused() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    with pytest.raises(PrivacyError, match="F, G share a parameter"):
        PrivateTraining(PLAN, {"F": one, "G": other})


def test_reduced_precision_of_float32_matrix_products_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")  # TF32
    with pytest.raises(PrivacyError, match=r"products are rounded.* Set .* to highest"):
        PrivateTraining(PLAN, {"F": nn.Linear(2, 2)})


def test_a_sum_of_another_shape_than_the_parameter_is_refused_and_not_broadcast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = small_network()

    def wrong_shape(_loss: RowLoss, _parameters: object, fields: Mapping[str, Tensor]) -> Any:
        return {
            ("F", "0.bias"): DenseGradients(torch.ones(len(fields["x"]), 1, dtype=torch.float64))
        }

    monkeypatch.setattr(dp_sgd, "factored_gradients", wrong_shape)  # 0.bias has three numbers
    with pytest.raises(PrivacyError, match=r"gradient of F\.0\.bias has shape .*\[1\]"):
        moved_by(network, small_rows(4), PLAN)


@pytest.mark.usefixtures("each_way")
def test_a_gradient_that_does_not_depend_on_the_row_is_summed_like_others() -> None:
    sample = torch.tensor([[3.0, 4.0]]).expand(5, 2)  # as vmap returns it
    [total] = clipped_sums(
        [DenseGradients(sample)], torch.tensor([True, True, False, True, True]), 1.0
    )
    assert total.tolist() == pytest.approx([2.4, 3.2], rel=1e-6)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])  # 1e30: its norm overflows
def test_a_row_with_a_non_finite_gradient_adds_nothing(bad: float) -> None:
    samples = [DenseGradients(torch.tensor([[3.0, 4.0], [bad, 1.0]]))]
    [total] = clipped_sums(samples, torch.tensor([True, True]), 1.0)
    assert total.tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


@pytest.mark.usefixtures("no_noise")
def test_the_check_of_sensitivity_detects_missing_clipping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_clipping(
        samples: list[PerExampleGradients], drawn: Tensor, clip_norm: float
    ) -> list[Tensor]:
        return [sample.total(drawn.double()) for sample in samples]

    monkeypatch.setattr(dp_sgd, "clipped_sums", without_clipping)
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
def test_a_row_with_a_non_finite_gradient_adds_nothing_and_causes_no_log_line(
    bad: float, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    network, x = small_network(), small_rows(5)
    x[4, 1] = bad
    with caplog.at_level(logging.DEBUG, logger="privssl"):
        moved = moved_by(network, x, PLAN)  # a warning would be an error here
    torch.testing.assert_close(moved, moved_by(network, x[:4], PLAN), rtol=0, atol=1e-12)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


# Batches: empty, full, split -----------------------------------------------------------------


def test_a_step_with_an_empty_batch_is_a_step_of_noise_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secure_noise, "secure_normal", np.ones)
    draw_rows(monkeypatch, [False] * 6)
    shift = moved_by(
        small_network(), small_rows(6),
        plan(sample_rate=0.5, noise_multiplier=2.0, clip_norm=0.5, expected_batch=4.0, steps=3),
    )  # fmt: skip
    # 3 steps of noise 2.0 * 0.5 * 1, divided by 4
    torch.testing.assert_close(shift, torch.full_like(shift, 0.75))


def test_the_check_of_empty_batches_detects_a_loop_that_skips_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secure_noise, "secure_normal", np.ones)
    draw_rows(monkeypatch, [False] * 6)
    monkeypatch.setattr(PrivateTraining, "_step", lambda self: None)  # no row, no step
    numbers = plan(sample_rate=0.5, noise_multiplier=2.0, clip_norm=0.5, steps=3)
    shift = moved_by(small_network(), small_rows(6), numbers)
    assert not shift.any()  # an honest step leaves 0.25 each


@pytest.mark.parametrize(("share", "mean"), [(0.0, 3.0), (1 / 3, 3.0), (2 / 3, 2.5), (1.0, 2.0)])
def test_a_visit_sends_the_mean_of_its_last_iterates_each_with_noise(
    share: float, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_noise, "secure_normal", np.ones)
    # Three steps of noise 1 move the weights to -1, -2 and -3 from where they began.
    shift = moved_by(small_network(), small_rows(0), plan(steps=3, average_last=share))
    torch.testing.assert_close(shift, torch.full_like(shift, mean))


def test_momentum_accumulates_sums_with_noise_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_noise, "secure_normal", np.ones)
    # Noise 1 in two steps: v is 1, then half of that and 1 more.
    shift = moved_by(small_network(), small_rows(0), plan(steps=2, momentum=0.5))
    torch.testing.assert_close(shift, torch.full_like(shift, 2.5))


def test_an_agent_without_rows_takes_all_its_steps_and_reads_nothing(
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
def test_the_divisor_is_the_public_batch_size_and_not_the_number_of_drawn_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, x = small_network(), small_rows(1).repeat(4, 1)
    x[1:] = math.nan  # non-finite rows count as zero, drawn or not
    public = plan(sample_rate=0.5, expected_batch=2.0)
    draw_rows(monkeypatch, [True, False, False, False])
    alone = moved_by(network, x, public)
    draw_rows(monkeypatch, [True, True, True, True])
    torch.testing.assert_close(moved_by(network, x, public), alone)
    torch.testing.assert_close(2 * alone, clipped_by_hand(network, x[:1], 1.0), rtol=1e-5, atol=0)


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_the_sum_does_not_depend_on_microbatches_or_on_the_padded_batch_size(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 300 rows at rate 0.05: 15 expected, and 4 standard deviations of 3.77 more are 31.
    sparse = plan(sample_rate=0.05)
    assert sparse.padded_batch_size(300) == 31
    mask = [row % 20 == 3 for row in range(300)]
    draw_rows(monkeypatch, mask)
    network, x = small_network(), small_rows(300)
    moved = moved_by(network, x, sparse, chunk)
    expected = torch.zeros_like(moved)
    for row in range(3, 300, 20):
        pad = row % CLASSES  # earlier rows, so that the row keeps its label
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
        ([200_000, 200_000], 1 * 28 * 28, 64),  # two networks together
    ],
)
def test_microbatches_are_larger_where_rows_and_networks_are_small(
    widths: list[int], numbers: int, rows: int
) -> None:
    networks = {f"{n}": nn.Linear(width, 1, bias=False) for n, width in enumerate(widths)}
    assert dp_sgd.choose_max_microbatch_size(networks, numbers) == rows


@pytest.mark.usefixtures("no_noise")
def test_a_batch_larger_than_the_padded_batch_size_is_not_truncated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sparse = plan(sample_rate=0.01)
    assert sparse.padded_batch_size(257) < 257
    draw_rows(monkeypatch, [True] * 257)
    network, x = small_network(), small_rows(257)
    expected = clipped_by_hand(network, x, 1.0)
    torch.testing.assert_close(moved_by(network, x, sparse), expected, rtol=1e-5, atol=1e-8)


def test_small_agents_compute_every_row_so_that_run_time_does_not_show_the_batch_size() -> None:
    assert [plan(sample_rate=0.01).padded_batch_size(rows) for rows in (0, 1, 34, 256)] == [
        0,
        1,
        34,
        256,
    ]


def test_no_sum_without_noise_is_left_after_a_visit() -> None:
    network = nn.Linear(4, CLASSES).double()
    x, p = small_rows(3), torch.eye(CLASSES, dtype=torch.float64)
    PrivateTraining(PLAN, {"F": network}).run(
        3, lambda rows, step: {"x": x[rows], "p": p[rows]}, small_loss(network)
    )
    for parameter in network.parameters():
        left = [vars(parameter).get(name) for name in ("summed_grad", "grad_sample")]
        assert [*left, parameter.grad] == [None] * 3


@pytest.mark.usefixtures("no_noise")
def test_the_sum_of_a_failed_visit_does_not_enter_the_next_one() -> None:
    network = nn.Linear(4, CLASSES).double()
    before = flat(network)
    x, p = small_rows(5), torch.eye(CLASSES, dtype=torch.float64)

    def breaks_off(rows: Tensor, step: int) -> dict[str, Tensor]:
        if 4 in rows:
            raise RuntimeError("at the second chunk")
        return {"x": x[rows], "p": p[rows % CLASSES]}

    with pytest.raises(RuntimeError, match="second chunk"):
        PrivateTraining(PLAN, {"F": network}).run(
            5, breaks_off, small_loss(network), max_microbatch_size=4
        )
    assert any(vars(p).get("summed_grad") is not None for p in network.parameters())
    PrivateTraining(PLAN, {"F": network}).run(0, breaks_off, small_loss(network))
    assert torch.equal(flat(network), before)


# The plan ---------------------------------------------------------------------------------------


def chosen(**changes: Any) -> PrivacySettings:
    return PrivacySettings(**{"epsilon": 8.0, "sample_rate": 0.5, **changes})


def test_a_plan_divides_by_declared_rows_and_has_at_most_the_configured_visits() -> None:
    made = make_dp_sgd_plan(chosen(noise_multiplier=3.0, visits=9), rounds=4, rows_per_agent=34)
    assert (made.expected_batch, made.visits, made.noise_multiplier) == (17.0, 4, 3.0)
    assert make_dp_sgd_plan(chosen(noise_multiplier=3.0), rounds=4, rows_per_agent=34).visits == 4


def test_a_budget_of_zero_plans_no_visit() -> None:
    assert make_dp_sgd_plan(chosen(epsilon=0.0), rounds=4, rows_per_agent=34).visits == 0


@pytest.mark.parametrize(
    ("update", "protect", "scope"),
    [("F", "F", "sound"), ("FG", "FG", "sound"), ("FDG", "G", "as_published")],
)
def test_the_scope_is_sound_only_if_every_trained_network_has_noise(
    update: str, protect: str, scope: str
) -> None:
    assert plan(update=tuple(update), protect=tuple(protect)).scope == scope


# Randomness and coupled rows in less obvious places ---------------------------------------------
