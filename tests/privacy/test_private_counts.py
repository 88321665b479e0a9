"""Private counts against a server that chooses the weights: one row more moves the clipped sum by
at most one clipping norm, in spite of rounding (docs/dp_sgd.md).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from privssl.errors import PrivacyError
from privssl.models import build_classifier
from privssl.models.convnets import SmallCNN
from privssl.ops import dispatch
from privssl.ops.group_norm import GroupNorm
from privssl.privacy import batched_dp_sgd, dp_sgd, per_example_gradients, row_bits
from privssl.privacy.clipping import DenseGradients, clipped_sums
from privssl.privacy.dp_sgd import ClippedSum, NoisyOptimizerStep, PrivateTraining
from privssl.privacy.per_example_gradients import factored_gradients
from privssl.privacy.plan import PrivatePlan
from privssl.settings.schema import ModelSettings
from privssl.training.batched.deferred import ExampleLoss, request_handler
from privssl.training.losses import hard_label_loss
from tests.support.costs import OF_USERS
from tests.support.kernel_generations import HERE

pytestmark = pytest.mark.usefixtures("costs_of_users_in_file")

SHAPE, CLASSES, MAX_MICROBATCH_SIZE = (1, 8, 8), 10, 64
#: Numbers of rows of two neighbours, and the declared rows of an agent.
MORE = ((3, 4, 4), (63, 64, 64), (64, 65, 64), (255, 260, 256))
aten = torch.ops.aten
EACH_WAY = [None, *HERE]
SHIPPED = [
    (ModelSettings(name, 4, norm), shape)
    for name in ("small_cnn", "lenet", "resnet9", "wresnet28x2")
    for norm in ("group", "none")
    for shape in (((1, 8, 8), (1, 12, 12)) if name in ("small_cnn", "lenet") else ((3, 8, 8),))
]


@pytest.fixture(params=EACH_WAY)
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_find_latest", lambda: request.param)


def plan(declared: float, **changes: Any) -> PrivatePlan:
    numbers: dict[str, Any] = {
        "update": ("F",), "protect": ("F",), "noise_multiplier": 1.0, "clip_norm": 1.0,
        "sample_rate": 1.0, "steps": 1, "expected_batch": declared, "learning_rate": 1.0,
        "momentum": 0.0, "views": 1, "visits": 1, "record_counts": "private",
    }  # fmt: skip
    changed = numbers | changes
    changed["expected_batch"] = declared * changed["sample_rate"]
    return PrivatePlan(**changed)


def rows_of(count: int, shape: tuple[int, int, int] = SHAPE) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(5)
    return torch.rand(count, *shape, generator=chance) * 2 - 1, torch.full((count,), 2)


def record_sums(
    F: nn.Module,
    x: Tensor,
    y: Tensor,
    the_plan: PrivatePlan,
    max_microbatch_size: int = MAX_MICROBATCH_SIZE,
) -> tuple[list[ClippedSum], Tensor]:
    """The gradient requests of a visit, and the sum of each step before noise (steps, numbers)."""
    seen, sums = list[ClippedSum](), list[Tensor]()

    def answer(question: Any) -> Any:
        if isinstance(question, NoisyOptimizerStep):
            params = question.optimiser.params
            sums.append(torch.cat([p.summed_grad.flatten() for p in params]))
            return question.forget()
        seen.append(question)
        return question.run_single()

    loss = ExampleLoss(hard_label_loss, (), {"F": F})
    training = PrivateTraining(the_plan, {"F": F})
    with request_handler(answer):
        training.run(
            len(x),
            lambda rows, _: {"x": x[rows, None], "y": y[rows, None]},
            loss,
            max_microbatch_size=max_microbatch_size,
        )
    return seen, torch.stack(sums)


def shift(F: nn.Module, few: int, many: int, declared: int, shape: Any = SHAPE) -> float:
    """How far the sum moves per added row, in clipping norms."""
    x, y = rows_of(many, shape)
    one, other = (record_sums(F, x[:n], y[:n], plan(declared))[1][0] for n in (few, many))
    assert bool((one.isfinite() & other.isfinite()).all())
    return float((other - one).norm()) / (many - few)


# Hostile weights ------------------------------------------------------------------------------


def set_hostile_weights(F: nn.Module, number: int) -> None:
    """Set weights number ``number``: all of one scale, a scale per tensor, or cancelling."""
    chance = torch.Generator().manual_seed(number)
    ten = [10.0 ** (60 * float(torch.rand((), generator=chance)) - 30) for _ in F.parameters()]
    with torch.no_grad():
        for parameter, size in zip(F.parameters(), ten, strict=True):
            drawn = torch.randn(parameter.shape, generator=chance)
            scale = 1.0 if number % 3 == 2 else ten[0] if number % 3 else size
            parameter.copy_((drawn * scale).clamp(-1e30, 1e30))
        if number % 3 == 2:
            set_cancelling_weights(F, chance)


def set_cancelling_weights(
    F: nn.Module, chance: torch.Generator, bias: Tensor | None = None
) -> None:
    """Make the logits equal to the last layer's biases. What flows back through its weights is 0
    except for rounding, which weights of 1e8 make large.
    """
    last = [layer for layer in F.modules() if isinstance(layer, nn.Linear)][-1]
    for norm in [layer for layer in F.modules() if isinstance(layer, nn.GroupNorm | GroupNorm)][
        -1:
    ]:
        norm.weight.fill_(0.0)
        norm.bias.fill_(1e-30)
    if last.bias is None:
        bias = torch.zeros(CLASSES)
    else:
        bias = torch.randn(CLASSES, generator=chance) if bias is None else bias
        last.bias.copy_(bias)
    g = bias.softmax(0).double()
    g[2] -= 1
    W = torch.randn(CLASSES, last.in_features, generator=chance, dtype=torch.float64)
    last.weight.copy_(1e8 * (W - torch.outer(g, g @ W) / (g @ g)))


def crafted_network(few: int, tries: int = 60) -> SmallCNN:
    """A network in which an added row changes the sign of a rounding error of another row's
    gradient.
    """
    torch.manual_seed(1)
    F = build_classifier(ModelSettings("small_cnn"), SHAPE, CLASSES).train()
    assert isinstance(F, SmallCNN)
    chance, best = torch.Generator().manual_seed(0), (0.0, F.head.weight[:, 0].detach())
    x, y = rows_of(few + 1)
    bias = torch.randn(CLASSES, generator=chance)
    loss = ExampleLoss(hard_label_loss, (), {"F": F})
    for _ in range(tries):
        with torch.no_grad():
            set_cancelling_weights(F, chance, bias)
        found = []
        for n in (few, few + 1):
            fields = {"x": x[:n, None], "y": y[:n, None]}
            each = factored_gradients(loss, {"F": dict(F.named_parameters())}, fields)
            one = each["F", "trunk.10.bias"]
            assert isinstance(one, DenseGradients)
            found.append(one.each[0])
        gap = torch.where(found[0] * found[1] < 0, torch.minimum(*(f.abs() for f in found)), 0.0)
        if float(gap.max()) > best[0]:
            best = float(gap.max()), F.head.weight[:, int(gap.argmax())].detach().clone()
    with torch.no_grad():
        F.head.weight.copy_(best[1][:, None].expand_as(F.head.weight))
    return F


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(("model", "shape"), SHIPPED[::2], ids=str)
def test_one_row_more_moves_the_clipped_sum_by_at_most_a_clip_norm_for_hostile_weights(
    model: ModelSettings, shape: tuple[int, int, int]
) -> None:
    F = build_classifier(model, shape, CLASSES).train()
    for number in range(3):
        set_hostile_weights(F, number)
        assert shift(F, *MORE[number % 2], shape) <= 1 + 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("each_way")
def test_two_hundred_hostile_sets_of_weights_move_no_sum_by_more_than_a_clip_norm() -> None:
    worst = 0.0
    for number, (model, shape) in zip(range(200), itertools.cycle(SHIPPED)):
        F = build_classifier(model, shape, CLASSES).train()
        set_hostile_weights(F, number)
        worst = max(worst, *(shift(F, *more, shape) for more in MORE))
    print(f"at most {worst:.12f} clip norms")
    assert 0.99 < worst <= 1 + 1e-6


@pytest.mark.fast_cases(2)
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("padding", [True, False])
def test_crafted_weights_exploit_rounding_only_without_padding(
    padding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    F = crafted_network(3)
    if not padding:  # the control
        monkeypatch.setattr(dp_sgd, "pad_rows", lambda x, rows: x)
    moved = shift(F, 3, 4, 4)
    assert moved <= 1 + 1e-6 if padding else moved > 5


# Batch sizes ------------------------------------------------------------------------------------


def sizes(
    count: int, the_plan: PrivatePlan, max_microbatch_size: int = MAX_MICROBATCH_SIZE
) -> list[int]:
    F = build_classifier(ModelSettings("small_cnn", 4), SHAPE, CLASSES).train()
    return [
        len(one.fields["x"])
        for one in record_sums(F, *rows_of(count), the_plan, max_microbatch_size)[0]
    ]


def test_with_private_counts_every_microbatch_has_the_size_for_the_declared_rows() -> None:
    assert [sizes(n, plan(34)) for n in (0, 1, 34, 40)] == [[], [64], [64], [64]]
    assert sizes(65, plan(34)) == [64, 64]
    assert sizes(3, plan(100)) == [64]  # the second of two microbatches would be empty
    for n in (3, 290, 700):  # for any draw, and for any number of rows above the declared one
        assert set(sizes(n, plan(300, sample_rate=0.3, steps=4))) == {64}


def test_with_public_counts_microbatch_sizes_depend_on_the_rows_and_not_on_the_draw() -> None:
    public = plan(34, record_counts="public", sample_rate=0.3, steps=6)
    assert set(sizes(34, public)) == {36} and set(sizes(3, public)) == {4}
    assert plan(300, record_counts="public", sample_rate=0.5).plan_microbatches(300, 256) == (
        1,
        192,
    )
    assert plan(400, record_counts="public", sample_rate=0.5).plan_microbatches(400, 64) == (
        4,
        64,
    )


@pytest.mark.parametrize(
    ("rows", "changes", "keeps"),
    [
        (34, {}, True),
        (300, {}, False),  # the control: only some rows are computed, drawn rows first
        (34, {"record_counts": "private"}, False),
    ],
)
def test_with_public_counts_a_row_keeps_its_position_for_any_draw(
    rows: int, changes: dict[str, Any], keeps: bool
) -> None:
    the_plan = plan(rows, **{"record_counts": "public", "sample_rate": 0.3, "steps": 4} | changes)
    F = build_classifier(ModelSettings("small_cnn", 4), SHAPE, CLASSES).train()
    x, y = rows_of(rows)
    calls, _ = record_sums(F, x, y, the_plan)
    steps = len(calls) // 4
    seen = [
        torch.cat([q.fields["x"] for q in calls[i : i + steps]]) for i in range(0, 4 * steps, steps)
    ]
    assert the_plan.fixes_positions(rows) is keeps
    assert all(torch.equal(one, seen[0]) for one in seen) is keeps


class _ContractionSizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record over how many numbers each matrix product sums."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.over: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.bmm.default):
            self.over.append(args[0].shape[-1])
        if func is aten.addmm.default:
            self.over.append(args[1].shape[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("inputs", [10, 21, 42, 75])
def test_linear_layers_in_private_steps_have_a_multiple_of_four_inputs(
    inputs: int, safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the alignment of a row depends on its position, and MKL rounds by alignment.
    if not safe:  # the control
        monkeypatch.setattr(per_example_gradients, "_aligned_linear", functional.linear)
    F, frozen = nn.Linear(inputs, 3), nn.Linear(inputs, 3).requires_grad_(False)
    x = torch.randn(8, inputs)

    def loss(p: Any, row: Any) -> Tensor:
        learnt = functional.linear(row["x"], p["F"]["weight"], p["F"]["bias"])
        return (learnt * functional.linear(row["x"], frozen.weight, frozen.bias)).sum()

    with _ContractionSizes() as products:
        found = factored_gradients(loss, {"F": dict(F.named_parameters())}, {"x": x})
    assert (inputs in products.over) is not safe
    assert (inputs + -inputs % 4 in products.over) is safe
    bias = found["F", "bias"]
    assert isinstance(bias, DenseGradients)
    assert_close(bias.each, frozen(x))


def test_neighbours_with_public_counts_have_equal_batches_and_differ_by_one_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    public = plan(300, record_counts="public", sample_rate=0.3, steps=3)
    coins = [public.draw_batch(300) for _ in range(3)]
    drawn = iter([*coins, *coins])
    monkeypatch.setattr(PrivatePlan, "draw_batch", lambda self, rows: next(drawn))
    F = build_classifier(ModelSettings("small_cnn", 4), SHAPE, CLASSES).train()
    x, y = rows_of(300)
    empty = x.clone()
    empty[7] = math.nan  # like a row that adds nothing
    found = [record_sums(F, one, y, public) for one in (x, empty)]
    (mine, sums), (theirs, others) = found
    assert [q.drawn.tolist() for q in mine] == [q.drawn.tolist() for q in theirs]
    assert [{k: v.shape for k, v in q.fields.items()} for q in mine] == [
        {k: v.shape for k, v in q.fields.items()} for q in theirs
    ]
    moved = (sums - others).norm(dim=1)
    assert float(moved.max()) <= 1 + 1e-6
    assert [bool(m > 0) for m in moved] == [bool(mask[7]) for mask in coins]


def test_a_batch_beyond_its_public_size_gets_more_microbatches_of_that_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sparse = plan(300, record_counts="public", sample_rate=0.01)
    assert sparse.plan_microbatches(300, 64) == (1, 32)
    monkeypatch.setattr(PrivatePlan, "draw_batch", lambda self, rows: torch.arange(rows) < 70)
    F = build_classifier(ModelSettings("small_cnn", 4), SHAPE, CLASSES).train()
    seen, _ = record_sums(F, *rows_of(300), sparse)
    assert [len(one.drawn) for one in seen] == [32, 32, 32]
    assert sum(int(one.drawn.sum()) for one in seen) == 70
    # Only the first microbatch is computed together with other agents, so no other agent sees more.
    assert [one.joint for one in seen] == [True, False, False]


def test_padding_rows_are_zeros_and_count_for_no_row() -> None:
    F = build_classifier(ModelSettings("small_cnn", 4), SHAPE, CLASSES).train()
    [one], _ = record_sums(F, *rows_of(3), plan(8))
    assert one.drawn.tolist() == [True] * 3 + [False] * 29
    assert not one.fields["x"][3:].any() and not one.fields["y"][3:].any()
    assert not one.joint and not batched_dp_sgd.can_sum(one)


# Threads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False])
def test_a_private_step_runs_in_one_thread_whatever_the_process_uses(
    safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()

    def counted(*what: Any, **how: Any) -> Any:
        seen.append(torch.get_num_threads())
        return factored_gradients(*what, **how)

    monkeypatch.setattr(dp_sgd, "factored_gradients", counted)
    if not safe:  # the control
        monkeypatch.setattr(dp_sgd, "single_threaded", nullcontext)
    F = build_classifier(ModelSettings("small_cnn", 4), SHAPE, CLASSES).train()
    _, alone = record_sums(F, *rows_of(9), plan(8))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _, by_two = record_sums(F, *rows_of(9), plan(8))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1 if safe else 2]
    assert not safe or torch.equal(alone, by_two)


# The check before a run -------------------------------------------------------------------------


@pytest.fixture
def all_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the scales of users: most tests use one."""
    monkeypatch.setattr(row_bits, "SCALES", OF_USERS[row_bits, "SCALES"])


def check_network(F: nn.Module, rows: int = 12, shape: tuple[int, int, int] = SHAPE) -> None:
    row_bits._passed.clear()
    x, y = rows_of(rows, shape)
    fields = {"x": x[:, None], "y": y[:, None]}
    row_bits.refuse_batch_dependent_rounding(
        {"F": F}, ExampleLoss(hard_label_loss, (), {"F": F}), fields
    )


# The instruction set of this processor, and each other one.
@pytest.mark.fast_cases(3)
@pytest.mark.usefixtures("all_scales")
@pytest.mark.parametrize(
    ("way", "model", "shape"),
    [
        pytest.param(way, *some, marks=() if way == EACH_WAY[-1] or not n else pytest.mark.slow)
        for way in EACH_WAY
        for n, some in enumerate(SHIPPED[::3])
    ],
    ids=str,
)
def test_the_gradient_of_a_row_has_the_same_bits_beside_any_other_rows(
    way: Any, model: ModelSettings, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_find_latest", lambda: way)
    check_network(build_classifier(model, shape, CLASSES).train(), shape=shape)


def by_position(each: Tensor) -> Tensor:
    """Round the last row otherwise, like a matrix product its remainder."""
    return torch.cat([each[:-1], each[-1:] * (1 + 2**-22)])


def by_other_rows(each: Tensor) -> Tensor:
    return each + each.mean(dim=0) * 2**-20


@pytest.mark.parametrize("fault", [by_position, by_other_rows])
def test_a_network_whose_rounding_depends_on_position_or_other_rows_is_refused(
    fault: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*what: Any) -> Mapping[Any, Any]:
        return {
            key: DenseGradients(fault(one.each), one.axes)
            if isinstance(one, DenseGradients)
            else one
            for key, one in factored_gradients(*what).items()
        }

    F = build_classifier(ModelSettings("small_cnn", 4), SHAPE, CLASSES).train()
    check_network(F)
    monkeypatch.setattr(row_bits, "factored_gradients", faulty)
    with pytest.raises(PrivacyError, match=r"rounding of a row's gradient .* 11 rows"):
        check_network(F)


def test_each_kind_of_network_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    F = build_classifier(ModelSettings("small_cnn", 4), SHAPE, CLASSES).train()
    check_network(F)
    count = list[int]()

    def counted(*what: Any) -> Any:
        count.append(1)
        return factored_gradients(*what)

    monkeypatch.setattr(row_bits, "factored_gradients", counted)
    x, y = rows_of(12)
    loss = ExampleLoss(hard_label_loss, (), {"F": F})
    row_bits.refuse_batch_dependent_rounding({"F": F}, loss, {"x": x[:, None], "y": y[:, None]})
    assert not count
    x, y = rows_of(16)
    fields = {"x": x[:, None], "y": y[:, None]}
    row_bits.refuse_batch_dependent_rounding({"F": F}, loss, fields)
    first = len(count)
    assert first
    row_bits.refuse_batch_dependent_rounding({"F": F}, loss, fields)
    assert len(count) == first


class ClosureNetwork(nn.Module):
    """A user's network whose source text does not determine what it computes."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.layers, self.mixes = nn.Linear(64, CLASSES), mixes

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x.flatten(1))
        return AddMeanOverRows.apply(logits) if self.mixes else logits


class AddMeanOverRows(torch.autograd.Function):
    """Add the mean over rows in a way that vmap does not split."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(*_: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x + x.mean(dim=in_dims[0], keepdim=True), in_dims[0]


def test_a_users_network_is_checked_again_after_another_with_the_same_source_text() -> None:
    x, y = rows_of(12)
    fields = {"x": x[:, None], "y": y[:, None]}
    for mixes in (False, True):
        F = ClosureNetwork(mixes).train()
        loss = ExampleLoss(hard_label_loss, (), {"F": F})
        if not mixes:
            row_bits.refuse_batch_dependent_rounding({"F": F}, loss, fields)
            continue
        with pytest.raises(PrivacyError, match="depends on the other 11 rows"):
            row_bits.refuse_batch_dependent_rounding({"F": F}, loss, fields)


# Sums in float64 --------------------------------------------------------------------------------


def many_rows(rows: int) -> Iterator[Tensor]:
    """Gradients of one direction, in microbatches, with norms from the clipping norm upwards."""
    direction = torch.tensor([0.1, 0.7, 0.3])
    for part in torch.split(torch.arange(rows), 4096):
        yield direction * (3.0 + 1e5 * (part % 97 == 0) + part % 31)[:, None]


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("rows", [256, 65_536])
def test_each_of_many_rows_weighs_the_clip_norm_and_the_sum_stays_within_its_bound(
    rows: int,
) -> None:
    whole = torch.zeros(3, dtype=torch.float64)
    for each in many_rows(rows):
        [total] = clipped_sums(
            [DenseGradients(each.clone())], torch.ones(len(each), dtype=torch.bool), 1.0
        )
        whole += total
    unit = torch.tensor([0.1, 0.7, 0.3]).double()
    exact = rows * unit / unit.norm()
    bound = rows**2 * 2.3e-16 + rows * 1e-6 / 2  # clipping divides by norm + 1e-6
    assert float((whole - exact).norm()) <= bound
    assert float(whole.norm()) <= rows * (1 + 1e-9)
    one = torch.tensor([[0.1, 0.7, 0.3]]) * 5
    [more] = clipped_sums([DenseGradients(one)], torch.tensor([True]), 1.0)
    assert float(((whole + more) - whole).norm()) <= 1 + 1e-6
    # The control: sums in float32.
    narrow = whole.float()
    gap = (narrow + more.float()).double() - narrow.double()
    assert rows < 65_536 or abs(float(gap.norm()) - 1) > 1e-4


@pytest.mark.usefixtures("each_way")
def test_no_clipped_row_exceeds_the_clip_norm_by_more_than_one_part_in_a_million() -> None:
    chance = torch.Generator().manual_seed(0)
    sizes = 10.0 ** (torch.rand(500, 1, generator=chance) * 24 - 6)
    each = torch.randn(500, 70, generator=chance) * sizes
    for row in range(20):
        [total] = clipped_sums([DenseGradients(each.clone())], torch.arange(500) == row, 0.3)
        assert float(total.norm()) <= 0.3 * (1 + 1e-9)
        assert total.dtype == torch.float64
