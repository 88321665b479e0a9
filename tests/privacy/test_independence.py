"""A row's private loss depends on no other row, for any network, draw or random number in it."""

import contextlib
import math
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from privssl.algorithms.baselines.dp_classifier import check_classifier
from privssl.algorithms.fedssl import losses
from privssl.algorithms.fedssl.settings import FedSSLConfig
from privssl.core.agents import LabelledRows
from privssl.core.rows import WITH_DROPOUT
from privssl.core.task import Context, Task
from privssl.errors import ConfigError, PrivacyError
from privssl.experiment import config
from privssl.experiment.prepare import prepare
from privssl.models import build_classifier
from privssl.models.convnets import SmallCNN
from privssl.privacy import local_dp_sgd
from privssl.privacy.dp_sgd import make_dp_sgd_plan
from privssl.privacy.independence import (
    check_rows_independent,
    refuse_coupling_layers,
    refuse_memory,
)
from privssl.privacy.local_dp_sgd import Draw, train_rows_privately
from privssl.privacy.per_example_gradients import (
    Parameters,
    factored_gradients,
    per_example_gradients,
)
from privssl.settings.schema import ModelSettings, PrivacySettings
from privssl.training.batched.deferred import ExampleLoss, FunctionalModule
from privssl.training.losses import hard_label_loss
from tests.support.privacy import (
    CLASSES,
    NOISE,
    SHAPE,
    SHIPPED,
    classifier_rows,
    joint_loss,
    mixing,
    networks,
    parameters_of,
    shipped_classifiers,
)

pytestmark = pytest.mark.usefixtures("torch_begins_alike")


@pytest.mark.fast_cases(14)
@pytest.mark.parametrize("which", SHIPPED)
@pytest.mark.parametrize("value", [0.5, 1e30, math.nan])
def test_changing_another_row_leaves_the_gradient_of_a_row_bit_equal(
    which: str, value: float
) -> None:
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


def with_batch_norm() -> nn.Module:
    return SmallCNN(SHAPE, CLASSES, width=4, norm="batch")


def test_the_independence_check_detects_batch_norm() -> None:
    network = with_batch_norm()
    fields = {key: field[:, 0] for key, field in mixing(rows=4, views=1).items()}
    with pytest.raises(PrivacyError, match="row 0 changed the loss of other rows"):
        check_rows_independent(lambda batch: classifier_rows(network, batch), fields)


@pytest.mark.parametrize("frozen", [False, True])
def test_batch_norm_is_refused_by_layer_name_in_trained_and_in_frozen_networks(
    frozen: bool,
) -> None:
    bad = with_batch_norm().requires_grad_(not frozen).train(not frozen)
    with pytest.raises(PrivacyError) as refusal:
        refuse_coupling_layers({"D": networks()["D"], "F": bad})
    text = str(refusal.value)
    assert "F.trunk.2 (BatchNorm2d)" in text and "F.trunk.6 (BatchNorm2d)" in text
    assert "model.norm: group" in text
    refuse_coupling_layers(networks(spectral=True))  # the control: other layers are accepted


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.InstanceNorm2d(3, track_running_stats=True)],
)
def test_other_layers_that_keep_statistics_of_rows_are_refused(layer: nn.Module) -> None:
    with pytest.raises(PrivacyError, match=type(layer).__name__):
        refuse_coupling_layers({"F": nn.Sequential(nn.Flatten(), layer)})


class FunctionalDropout(nn.Module):
    """Dropout as a function, which no list of layers shows."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layer, self.share = nn.Linear(64, CLASSES), share

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(functional.dropout(x.flatten(1), self.share, self.training))
        return logits


def test_random_numbers_inside_a_network_are_refused_before_a_run_and_in_training() -> None:
    task = Task(CLASSES, SHAPE, lambda: FunctionalDropout(0.5))
    with pytest.raises(PrivacyError, match="draws random numbers"):
        check_classifier(FunctionalDropout(0.5), task)
    check_classifier(FunctionalDropout(0.0), task)  # the control

    def gradients(network: nn.Module) -> object:
        def loss(parameters: Parameters, row: Mapping[str, Tensor]) -> Tensor:
            logits: Tensor = FunctionalModule(network, parameters["N"])(row["x"][None])
            return logits.square().sum()

        rows = {"x": torch.rand(3, *SHAPE)}
        return factored_gradients(loss, parameters_of({"N": network}), rows)

    with pytest.raises(PrivacyError, match="draws random numbers"):
        gradients(FunctionalDropout(0.5))
    assert gradients(FunctionalDropout(0.0))


def plain_fields(x: Tensor, y: Tensor, ctx: Context) -> Mapping[str, Tensor]:
    shift = torch.rand(len(x), 1, 1, 1, generator=ctx.rng("shift"))  # by public position
    return {"x": x / 255 + shift, "y": y}


def mixed_with_its_neighbour(x: Tensor, y: Tensor, ctx: Context) -> Mapping[str, Tensor]:
    return {"x": (x + x.roll(1, dims=0)) / 510, "y": y}


def mixed_with_later_rows(x: Tensor, y: Tensor, ctx: Context) -> Mapping[str, Tensor]:
    later = (x / 255).flip(0).cumsum(0).flip(0)
    return {"x": later, "y": y}


def with_the_class_share_of_the_block(x: Tensor, y: Tensor, ctx: Context) -> Mapping[str, Tensor]:
    return {"x": x / 255, "y": y, "share": (y == 1).float().mean().expand(len(y))}


def from_the_global_generator(x: Tensor, y: Tensor, ctx: Context) -> Mapping[str, Tensor]:
    return {"x": x / 255 + torch.rand(len(x), 1, 1, 1), "y": y}


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (plain_fields, None),
        (mixed_with_its_neighbour, "^x of a row"),
        (mixed_with_later_rows, "^x of a row"),
        (with_the_class_share_of_the_block, "^share of a row"),
        (from_the_global_generator, "^x of a row"),
    ],
)
@pytest.mark.parametrize("counts_public", [True, False])
def test_the_draw_of_a_row_must_not_depend_on_other_rows(
    draw: Draw, named: str | None, counts_public: bool
) -> None:
    counts: Any = "public" if counts_public else "private"
    settings = PrivacySettings(epsilon=8.0, steps=2, record_counts=counts)
    plan = make_dp_sgd_plan(settings, rounds=1, rows_per_agent=4)
    rows = LabelledRows(
        torch.randint(256, (4, *SHAPE), dtype=torch.uint8), torch.arange(4) % CLASSES,
        torch.arange(4),
    )  # fmt: skip
    F, ctx = FunctionalDropout(0.0), Context(0, 1, "s0", "visit", "attempt", torch.device("cpu"))
    loss = ExampleLoss(hard_label_loss, (), {"F": F})
    before = F.layer.weight.clone()
    if named is None:
        train_rows_privately(plan, {"F": F}, rows, ctx, draw, loss, counts_public=counts_public)
        assert not torch.equal(F.layer.weight, before)
        return
    with pytest.raises(PrivacyError, match=named):
        train_rows_privately(plan, {"F": F}, rows, ctx, draw, loss, counts_public=counts_public)
    assert torch.equal(F.layer.weight, before)


class Memory:
    """State where a check of attributes does not look."""

    def __init__(self) -> None:
        self.calls, self.mean = 0, torch.zeros(())


class CentredLater(nn.Module):
    """Centre rows by the mean of the last call, after a warm-up; or keep the mean unused."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.layer, self.seen, self.uses = nn.Linear(math.prod(SHAPE), CLASSES), Memory(), uses

    def forward(self, x: Tensor) -> Tensor:
        flat, before = x.flatten(1), self.seen.mean
        self.seen.calls += 1
        if self.training and self.seen.calls > 15:
            self.seen.mean = flat.detach()
        logits: Tensor = self.layer(flat - before if self.uses else flat)
        return logits


def draw_with_memory(uses: bool) -> Draw:
    seen = Memory()

    def draw(x: Tensor, y: Tensor, ctx: Context) -> Mapping[str, Tensor]:
        seen.calls += 1
        if seen.calls > 12:
            seen.mean = (x / 255).mean()
        return {"x": x / 255 - (seen.mean if uses else 0.0), "y": y}

    return draw


@pytest.mark.parametrize("where", ["network", "draw"])
@pytest.mark.parametrize("uses", [True, False])
def test_a_network_or_draw_that_starts_to_keep_rows_after_a_warm_up_is_refused(
    where: str, uses: bool
) -> None:
    plan = make_dp_sgd_plan(
        PrivacySettings(epsilon=8.0, steps=20, sample_rate=1.0), rounds=1, rows_per_agent=4
    )
    rows = LabelledRows(
        torch.randint(256, (4, *SHAPE), dtype=torch.uint8), torch.arange(4) % CLASSES,
        torch.arange(4),
    )  # fmt: skip
    F = CentredLater(uses and where == "network").train()
    draw = draw_with_memory(uses and where == "draw")
    if where == "network":
        refuse_memory(CentredLater(uses), SHAPE)  # too few calls to detect it before a run

    def visit() -> None:
        loss = ExampleLoss(hard_label_loss, (), {"F": F})
        ctx = Context(0, 1, "s0", "visit", "attempt", torch.device("cpu"))
        train_rows_privately(plan, {"F": F}, rows, ctx, draw, loss, counts_public=True)

    if not uses:  # the control: called as often, and uses nothing that it keeps
        return visit()
    with pytest.raises(PrivacyError, match="keeps something of the rows that it is trained on"):
        visit()
    return None


@pytest.mark.parametrize("uses", [True, False])
def test_a_view_of_ones_own_config_that_keeps_rows_after_a_warm_up_is_refused(uses: bool) -> None:
    seen = Memory()

    class OwnViews(FedSSLConfig):
        """Centres rows by the mean of the last call, in the draw of privssl's own losses."""

        def augmentation(self, *_: Any) -> Any:
            def view(x: Tensor, rng: torch.Generator) -> Tensor:
                before, seen.calls = seen.mean, seen.calls + 1
                if seen.calls > 20:
                    seen.mean = x.mean()
                return x - (before if uses else 0.0)

            return view

    plan = make_dp_sgd_plan(
        PrivacySettings(epsilon=8.0, steps=8, sample_rate=1.0), rounds=1, rows_per_agent=4
    )
    rows = LabelledRows(
        torch.randint(256, (4, *SHAPE), dtype=torch.uint8), torch.arange(4) % CLASSES,
        torch.arange(4),
    )  # fmt: skip
    ctx = Context(0, 1, "s0", "visit", "attempt", torch.device("cpu"))
    refused = pytest.raises(PrivacyError, match="keeps something of the rows that it is trained on")
    with refused if uses else contextlib.nullcontext():
        losses.train_networks_privately(
            plan, OwnViews(noise_size=NOISE), networks(), rows, ctx, classes=CLASSES,
            train_on_mixes=True, counts_public=True,
        )  # fmt: skip
    assert seen.calls > 20


@pytest.mark.parametrize("fails", [True, False])
def test_an_error_in_a_draw_on_labelled_rows_shows_no_label(fails: bool) -> None:
    plan = make_dp_sgd_plan(PrivacySettings(epsilon=8.0, steps=2), rounds=1, rows_per_agent=4)
    rows = LabelledRows(
        torch.full((4, *SHAPE), 77, dtype=torch.uint8), torch.arange(4) % CLASSES, torch.arange(4)
    )
    F, ctx = FunctionalDropout(0.0), Context(0, 1, "s0", "visit", "attempt", torch.device("cpu"))

    def refuses_grey(x: Tensor, y: Tensor, here: Context) -> Mapping[str, Tensor]:
        if fails and (x == 77).all():
            raise ValueError(f"these are classes {y.tolist()}")
        return plain_fields(x, y, here)

    def visit() -> None:
        loss = ExampleLoss(hard_label_loss, (), {"F": F})
        train_rows_privately(plan, {"F": F}, rows, ctx, refuses_grey, loss, counts_public=True)

    if not fails:
        return visit()
    with pytest.raises(PrivacyError, match="ValueError in refuses_grey") as error:
        visit()
    assert "these are" not in "".join(traceback.format_exception(error.value))
    return None


def test_recurrent_layers_of_torch_are_refused_and_our_gru_is_accepted() -> None:
    with pytest.raises(PrivacyError, match=r"torch computes F.0 \(GRU\) for all rows at once.*gru"):
        refuse_coupling_layers({"F": nn.Sequential(nn.GRU(4, 3))})
    ours = build_classifier(ModelSettings(name="gru", width=2), (6, 8), 3)
    refuse_coupling_layers({"F": ours})


@pytest.mark.parametrize("norm", ["group", "none"])
def test_dropout_is_refused_when_the_config_is_read_and_later_by_layer_name(
    configured: Callable[..., config.Config], norm: Any
) -> None:
    for name in WITH_DROPOUT:
        with pytest.raises(ConfigError, match=f"{name} has dropout"):
            configured(f"model.name={name}")
    good = configured()
    object.__setattr__(good, "model", ModelSettings("trinet_cnn", 4, norm))
    with pytest.raises(PrivacyError, match=r"F\.deep\.3 \(Dropout\)"):
        prepare(good)


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize("model", shipped_classifiers(), ids=lambda m: f"{m.name}-{m.norm}")
@pytest.mark.parametrize("value", [pytest.param(0.5, marks=pytest.mark.slow), 1e30, math.nan])
def test_in_the_joint_loss_changing_another_row_leaves_a_gradient_bit_equal(
    model: ModelSettings, value: float
) -> None:
    nets = {**networks(), "F": build_classifier(model, SHAPE, CLASSES)}
    loss, fields = joint_loss(nets, ("F", "G", "D")), mixing(rows=4, views=2)
    before = per_example_gradients(loss, parameters_of(nets), fields)
    changed = {key: field.clone() for key, field in fields.items()}
    changed["mild"][2], changed["strong"][2] = value, value
    after = per_example_gradients(loss, parameters_of(nets), changed)
    others = torch.tensor([0, 1, 3])
    pairs = [(before[n][k], after[n][k]) for n in before for k in before[n]]
    assert all(torch.equal(a[others], b[others]) for a, b in pairs)
    assert any(not torch.equal(a[2], b[2]) for a, b in pairs)  # the control: its own changes


def test_batch_norm_in_a_frozen_network_is_refused_by_layer_name_when_the_run_is_prepared(
    configured: Callable[..., config.Config],
) -> None:
    only_g = ["privacy.update_at_support=[G]", "privacy.protect=[G]"]
    prepare(configured(*only_g))  # the control: the config is valid otherwise
    good = configured(*only_g)
    object.__setattr__(good, "model", ModelSettings("small_cnn", 4, "batch"))
    with pytest.raises(PrivacyError, match=r"F\.trunk\.2 \(BatchNorm2d\)"):
        prepare(good)


@pytest.mark.parametrize("moved", ["F", "x", None])
def test_private_steps_refuse_networks_and_fields_that_are_not_on_the_cpu(
    moved: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plug-in may move them. The device "meta" stands for a GPU."""
    monkeypatch.setattr(local_dp_sgd, "_check_draws_per_row", lambda *_: None)  # computes with them
    plan = make_dp_sgd_plan(PrivacySettings(epsilon=8.0, steps=2), rounds=1, rows_per_agent=4)
    rows = LabelledRows(torch.zeros(4, *SHAPE), torch.arange(4) % CLASSES, torch.arange(4))
    ctx = Context(0, 1, "s0", "visit", "attempt", torch.device("cpu"))
    F = FunctionalDropout(0.0).to("meta" if moved == "F" else "cpu")
    loss = ExampleLoss(hard_label_loss, (), {"F": F})

    def draw(x: Tensor, y: Tensor, here: Context) -> Mapping[str, Tensor]:
        return {"x": x.to("meta" if moved == "x" else "cpu"), "y": y}

    if moved is None:  # the control
        train_rows_privately(plan, {"F": F}, rows, ctx, draw, loss, counts_public=True)
        return
    with pytest.raises(PrivacyError, match=f"^{moved} is on the device meta, but private steps ne"):
        train_rows_privately(plan, {"F": F}, rows, ctx, draw, loss, counts_public=True)
