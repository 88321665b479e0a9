"""DP-SGD on the classifier: the private form of FedAvg.

Abadi et al. (CCS 2016), at each agent under its own account, charged before rows are read.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from privssl.core.agents import LabelledRows, SupportAgent
from privssl.core.task import Context, Task
from privssl.data.augmentations import view
from privssl.privacy.independence import check_rows_independent, refuse_coupling_layers
from privssl.privacy.local_dp_sgd import make_dry_run, train_rows_privately
from privssl.privacy.plan import PrivatePlan
from privssl.runtime import randomness
from privssl.settings.schema import Problem
from privssl.training import local_training
from privssl.training.batched.deferred import ExampleLoss
from privssl.training.losses import hard_label_loss

#: Settings of the ``algorithm`` section, and those of the ``privacy`` section that replace them.
OVERRIDDEN_BY_PRIVACY = {
    "local_epochs": "steps",
    "batch_size": "sample_rate",
    "learning_rate": "learning_rate",
    "learning_rate_decay": "learning_rate",
    "momentum": "momentum",
    "weight_decay": "clip_norm",
    "weak": "augment",
    "schedule": "learning_rate",
    "nesterov": "learning_rate",
    "clip_gradients": "clip_norm",
}


def train_classifier(
    plan: PrivatePlan, F: nn.Module, agent: SupportAgent, ctx: Context, *, flip: bool
) -> None:
    """Charge the account, then train F in place by DP-SGD.

    Args:
        F: with the global weights.
        flip: whether half of the rows are mirrored left to right.

    Raises:
        accounting.errors.BudgetExhausted: nothing was read.
    """
    assert agent.account is not None
    with agent.account.spend(plan.event, ctx.charge_id):
        counts_public = agent.account.plan.record_counts == "public"
        _train(plan, F, agent.labelled, ctx, flip=flip, counts_public=counts_public)


def try_classifier(
    plan: PrivatePlan, F: nn.Module, task: Task, device: torch.device, *, flip: bool
) -> None:
    """A dry run of ``train_classifier`` without its steps; raises the same PrivacyError."""
    dry_plan, rows, ctx = make_dry_run(plan, task.shape, device)
    counts_public = plan.record_counts == "public"
    _train(dry_plan, F.to(device).train(), rows, ctx, flip=flip, counts_public=counts_public)


def _train(
    plan: PrivatePlan, F: nn.Module, rows: LabelledRows, ctx: Context, *, flip: bool,
    counts_public: bool,
) -> None:  # fmt: skip
    def draw(x: Tensor, y: Tensor, row_ctx: Context) -> Mapping[str, Tensor]:
        real = local_training.network_input(x, ctx.device)
        views = view(plan.augment, real, row_ctx.rng("weak view"), flip=flip)
        return {"x": views, "y": y.to(ctx.device)}

    loss = ExampleLoss(hard_label_loss, (), {"F": F})
    train_rows_privately(plan, {"F": F}, rows, ctx, draw, loss, counts_public=counts_public)


def check_classifier(F: nn.Module, task: Task) -> None:
    """Raise PrivacyError when one row changes another row's loss. Tries random rows."""
    refuse_coupling_layers({"F": F})
    rng, rows = randomness.stream(0, 0, "world", "check rows"), 3
    x = torch.rand(rows, *task.shape, generator=rng) * 2 - 1
    y = torch.arange(rows) % task.classes
    F = F.train()  # as private steps have it
    check_rows_independent(lambda r: cross_entropy(F(r["x"]), y, reduction="none"), {"x": x})


def private_problems(config: Any) -> Iterator[Problem]:
    """Settings that a private run of the classifier refuses, or would ignore."""
    defaults = {spec.name: spec.default for spec in dataclasses.fields(config.algorithm)}
    for key, privacy_key in OVERRIDDEN_BY_PRIVACY.items():
        if key in defaults and getattr(config.algorithm, key) != defaults[key]:
            yield Problem(
                f"algorithm.{key}",
                f"has no effect on private steps: privacy.{privacy_key} sets them. Leave it out",
            )
    privacy, name = config.privacy, config.algorithm.name
    if {*privacy.update_at_support, *privacy.protect} != {"F"}:
        yield Problem("privacy.protect", f"{name} trains F alone. Set [F], or leave it out")
    if privacy.visits is not None and privacy.visits < config.algorithm.rounds:
        yield Problem(
            "algorithm.rounds",
            f"{config.algorithm.rounds}, but no agent trains after round {privacy.visits} "
            "(privacy.visits). Leave privacy.visits out",
        )
