"""Pi-Model and Mean Teacher: two views of a row must get the same prediction.

Centralised methods that SemiFL (Diao et al., Table 1) compares with. Rounds: centralised.py.

    Laine, Aila (ICLR 2017), Pi-Model                     here
    Alg. 1: z, z~ of two views and dropouts               PiModel._predict_second_view
    w(t) ||z - z~||^2 / C, beside the cross-entropy       losses, squared_difference
    w(t) = w_max exp(-5 (1 - T)^2), T = t / ramp-up       ramp_up_weight
    Tarvainen, Valpola (NeurIPS 2017), Mean Teacher
    the second view is the teacher's, without gradient    MeanTeacher._predict_second_view
    Eq. 1: theta' = alpha theta' + (1 - alpha) theta      centralised.update_teacher
    alpha 0.99 in the ramp-up, 0.999 after it             MeanTeacherConfig.decay

Weights of the losses are those of Berthelot et al.'s code, whose numbers Sohn et al. and so SemiFL
print. Differs from both papers, beside what centralised.py says: (1) A batch has as many labelled
rows as others (Oliver et al. 2018); in the papers it is drawn from all rows. (2) The ramp-up counts
rounds.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Literal, final

import pydantic.dataclasses
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from privssl.algorithms.baselines.centralised import CentralisedSettings, CentralisedTraining
from privssl.algorithms.local_ssl import Amount, Share, can_learn_from
from privssl.core.agents import LabelledRows, UnlabelledRows
from privssl.core.task import Context
from privssl.settings.schema import strict
from privssl.training import local_training


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class TwoViewSettings(CentralisedSettings):
    """Settings of both methods."""

    consistency_weight: Amount = 10.0  # w_max; Berthelot et al.'s code


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class PiModelConfig(TwoViewSettings):
    """Section ``algorithm`` for the Pi-Model."""

    name: Literal["pi_model"] = "pi_model"
    teacher_decay: Share = 0.0  # the network itself is released


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class MeanTeacherConfig(TwoViewSettings):
    """Section ``algorithm`` for Mean Teacher."""

    name: Literal["mean_teacher"] = "mean_teacher"
    consistency_weight: Amount = 50.0  # w_max; Berthelot et al.'s code

    def decay(self, round_number: int) -> float:
        return min(self.teacher_decay, 0.99) if round_number <= self.ramp_up else self.teacher_decay


class _TwoViewTraining(CentralisedTraining):
    """The loss; a subclass says who predicts the second view."""

    cfg: TwoViewSettings

    def losses(
        self, F: nn.Module, teacher: nn.Module, labelled: LabelledRows, unlabelled: UnlabelledRows,
        memory: dict[str, Tensor], ctx: Context,
    ) -> Iterator[Tensor]:  # fmt: skip
        """Cross-entropy of labelled rows, and w(t) times the difference of all rows' two views."""
        order, view_rng = ctx.rng("order"), ctx.rng("views")
        weight = self.cfg.consistency_weight * ramp_up_weight(ctx.round, self.cfg.ramp_up)
        x_all, count = torch.cat([labelled.x, unlabelled.x]), len(labelled)
        view = partial(self.cfg.weak_view, rng=view_rng)
        for _ in range(self.cfg.local_epochs):
            pairs = list(
                local_training.joint_batches(
                    count, len(unlabelled), self.cfg.batch_size, self.cfg.steps_of, order
                )
            )
            indices = [torch.cat([s, u + count]) for s, u in pairs]
            doubled = [torch.cat([rows, rows]) for rows in indices]
            views = local_training.views_of(x_all, doubled, view, ctx.device)
            for (s, _), x in zip(pairs, views, strict=True):
                if not can_learn_from(F, len(x) // 2):
                    continue
                first, second = x.chunk(2)
                logits = F(first)
                y = labelled.y[s].to(ctx.device)
                loss_s = cross_entropy(logits[: len(s)], y, reduction="sum") / max(1, len(s))
                second_logits = self._predict_second_view(F, teacher, second)
                yield loss_s + weight * squared_difference(logits, second_logits).mean()

    @abstractmethod
    def _predict_second_view(self, F: nn.Module, teacher: nn.Module, x: Tensor) -> Tensor:
        """Logits (B, C) of the second view."""


@final
class PiModel(_TwoViewTraining):
    """The network itself, with other dropout; its gradient flows through both views."""

    Config = PiModelConfig

    def _predict_second_view(self, F: nn.Module, teacher: nn.Module, x: Tensor) -> Tensor:
        logits: Tensor = F(x)
        return logits


@final
class MeanTeacher(_TwoViewTraining):
    """A moving average of the network's weights, which is also what is released."""

    Config = MeanTeacherConfig

    @torch.no_grad()
    def _predict_second_view(self, F: nn.Module, teacher: nn.Module, x: Tensor) -> Tensor:
        logits: Tensor = teacher(x)
        return logits


def ramp_up_weight(round_number: int, ramp_up: int) -> float:
    """exp(-5 (1 - T)^2), T from 0 in round 1 to 1 after ``ramp_up`` rounds: Laine and Aila, section
    2.1."""
    progress = min(1.0, (round_number - 1) / ramp_up) if ramp_up else 1.0
    return math.exp(-5 * (1 - progress) ** 2)


def squared_difference(first: Tensor, second: Tensor) -> Tensor:
    """||softmax(first) - softmax(second)||^2 / C of logits (B, C): (B,)."""
    return (first.softmax(dim=1) - second.softmax(dim=1)).square().mean(dim=1)
