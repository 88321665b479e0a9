"""Shared by several algorithms: messages, settings of local training, pseudo-labels, averages,
config checks.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from privssl.core.agents import LabelledRows, UnlabelledRows, natural_order
from privssl.core.aggregation import WeightedMean, average
from privssl.core.federation import Federation, Roster
from privssl.core.messages import Message, Reply, StateDict
from privssl.core.task import Context
from privssl.data.augmentations import View
from privssl.settings.schema import Count, Positive, Problem, Rate, strict
from privssl.training import local_training
from privssl.training.pseudo_labels import guess_labels

Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# Messages and state -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TrainRequest(Message):
    """Down to an agent: the global classifier."""

    F: StateDict


@dataclasses.dataclass(frozen=True)
class ModelUpdate(Message):
    """Up from an agent: the classifier after local training."""

    F: StateDict


@dataclasses.dataclass(frozen=True)
class ModelState:
    """What the server keeps between rounds."""

    F: StateDict


@dataclasses.dataclass(frozen=True)
class TeacherState(ModelState):
    """What the server keeps between rounds."""

    teacher: StateDict  # moving average of F: predicts pseudo-labels, is evaluated and released


def model_update(F: nn.Module) -> ModelUpdate:
    """The reply with F's weights."""
    return ModelUpdate(local_training.to_send(F.state_dict()))


# Settings -----------------------------------------------------------------------------------


@dataclass(frozen=True, config=strict)
class SelfTraining:
    """How F is trained at an agent, and how a moving average of F predicts pseudo-labels.

    Sources: Fan et al. give Z and K as symbols only; numbers are ours.
    """

    local_steps: Positive = 20  # of every agent in every round
    batch_size: Positive = 32
    learning_rate: Rate = 2e-3  # of F; Adam's
    # Of the rows that F learns from. Images of things: crop, or fixmatch (RandAugment)
    augment: Literal["none", "weak", "mid", "strong", "crop", "fixmatch"] = "strong"
    flip: bool = False  # mirror images left to right: objects yes, digits no
    sharpness: Annotated[float, Field(gt=1)] = 2.0  # Z of Eq. 2
    views: Positive = 2  # K: augmented views whose mean prediction is the pseudo-label
    teacher_decay: Share = 0.8  # of the moving average of F that guesses labels and is released
    query_per_round: Positive | None = None  # query agents drawn for a round; all when absent

    def augmentation(self, name: str = "") -> View:
        """The named augmentation (default: of F's rows), with mirroring as configured."""
        return View(name or self.augment, self.flip)

    def mild_view(self, digit_view: str) -> View:
        """``digit_view``, which turns an image as digits may be; of images of things a shift."""
        return self.augmentation("crop" if self.augment in ("crop", "fixmatch") else digit_view)

    def decay(self, round_number: int) -> float:
        """Decay of the teacher after a round: small at first, when F is nearly untrained."""
        return min(self.teacher_decay, (1 + round_number) / (5 + round_number))

    def draw_rows(self, row_count: int, ctx: Context) -> Tensor:
        """Numbers of the rows of one step (local_steps * batch_size,), out of ``row_count``."""
        return local_training.draw_rows(
            row_count, self.local_steps * self.batch_size, ctx.rng("rows")
        )

    def guess(self, teacher: nn.Module, x: Tensor, ctx: Context) -> Tensor:
        """Pseudo-labels (N, C) of stored rows (N, *shape): Fan et al., Eq. 2."""
        return self.guess_input(teacher, local_training.network_input(x, ctx.device), ctx)

    def guess_input(
        self, teacher: nn.Module, x: Tensor, ctx: Context, stream: str = "guess"
    ) -> Tensor:
        """The same of rows (N, *shape) in [-1, 1] on the device of a step."""
        return guess_labels(
            teacher.eval(), x, augment=self.mild_view("weak"), views=self.views,
            sharpness=self.sharpness, rng=ctx.rng(stream),
        )  # fmt: skip


@dataclass(frozen=True, config=strict)
class ClassifierTraining(SelfTraining):
    """How F is trained at all agents: the same for FedSSL and the baselines of its paper."""

    rounds: Positive = 100  # ours; the paper gives none
    weights: Literal["half", "rows", "equal"] = "half"  # half: Eq. 1, each group one half
    warm_up: Count = 2  # rounds in which F learns at support agents only
    # Of F. Adam takes steps of one length whatever the gradient: agents that miss classes drift
    # further apart than under sgd (docs/fedssl.md). Its learning_rate is about ten times as large
    optimiser: Literal["adam", "sgd"] = "adam"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of sgd; starts anew at every visit
    schedule: Literal["constant", "cosine"] = "constant"  # cosine: half of one over all rounds

    def make_optimiser_group(self, F: nn.Module, round_number: int) -> local_training.Group:
        """The optimiser of F at an agent in a round, counted from 1."""
        rate = self.learning_rate
        if self.schedule == "cosine":
            rate *= (1 + math.cos(math.pi * (round_number - 1) / self.rounds)) / 2
        if self.optimiser == "sgd":
            return local_training.SGDGroup(F, rate, self.momentum)
        return local_training.AdamGroup(F, rate, (0.9, 0.99))


# Config checks ------------------------------------------------------------------------------


def needs_unlabelled(config: Any) -> Iterator[Problem]:
    """The problem of a config in which no agent holds unlabelled rows.

    Args:
        config: the ``privssl.experiment.config.Config`` being checked.
    """
    if config.data.labels != "labels-at-client" and not config.agents.query:
        name = config.algorithm.name
        yield Problem("agents.query", f"0, but {name} learns from unlabelled rows: give 1 or more")


def needs_no_statistics(config: Any) -> Iterator[Problem]:
    """The problem of a config whose norm needs statistics that its algorithm does not collect."""
    if config.model.norm == "static":
        name = config.algorithm.name
        text = f"static needs statistics that {name} does not collect. Set group, batch or none"
        yield Problem("model.norm", text)


def warm_up_fits(warm_up: int, rounds: int) -> Iterator[Problem]:
    """The problem of a warm-up on labels that is longer than the run."""
    if warm_up > rounds:
        yield Problem(
            "warm_up",
            f"{warm_up}, but there are {rounds} rounds, and warm_up counts among them. Give less, "
            "or as many for FedAvg on labelled rows",
        )


# Rows and predictions -----------------------------------------------------------------------


def one_hot_labels(rows: LabelledRows, indices: Tensor, classes: int) -> Tensor:
    """The labels of some rows as distributions (B, C)."""
    return torch.eye(classes)[rows.y[indices]]


def make_empty_labelled(rows: UnlabelledRows) -> LabelledRows:
    """Zero labelled rows of the same form."""
    return LabelledRows(rows.x[:0], torch.empty(0, dtype=torch.int64), rows.ids[:0])


def make_empty_unlabelled(rows: LabelledRows) -> UnlabelledRows:
    """Zero unlabelled rows of the same form."""
    return UnlabelledRows(rows.x[:0], rows.ids[:0])


def can_learn_from(F: nn.Module, rows: int) -> bool:
    """Whether F can take a training step on so many rows: at least one, two with batch norm."""
    return rows > 1 or (
        rows == 1 and not any(isinstance(layer, _BatchNorm) for layer in F.modules())
    )


@torch.no_grad()
def predict(F: nn.Module, x: Tensor, device: torch.device) -> Tensor:
    """Logits (N, C) of stored rows (N, *shape), not augmented, in evaluation mode.

    F is in training mode afterwards.
    """
    F.eval()
    logits = [F(local_training.network_input(chunk, device)) for chunk in torch.split(x, 512)]
    F.train()
    return torch.cat(logits)


def select_stream_slice(row_count: int, slices: int, round_number: int, rounds: int) -> Tensor:
    """Numbers of the rows (n,) of a round, of ``row_count`` in the order of the stream: equal
    slices (within one row) for equally many rounds (within one)."""
    slice_number = min((round_number - 1) * slices // rounds, slices - 1)
    return torch.tensor_split(torch.arange(row_count), slices)[slice_number]


# Averages -----------------------------------------------------------------------------------


def train_and_average(
    federation: Federation,
    agents: Roster,
    step: Callable[..., Any],
    message: Message | Callable[[Any], Message],
    otherwise: StateDict,
    weight: Callable[[Reply[Any]], float] = lambda reply: reply.weight,
) -> StateDict:
    """FedAvg: agents do a step in parallel; the weighted mean of the F that they send.

    Args:
        message: one for all, or a function from the agent to its own.
        otherwise: used when no agent sends F.
        weight: of a reply, >= 0; its agent's number of rows by default.
    """
    mean = WeightedMean("F", weight)
    federation.call_all(agents, step, message, aggregator=mean)
    return mean.value_or(otherwise)


def train_alone(
    federation: Federation, agents: Roster, step: Callable[..., Any],
    message: Callable[[StateDict], Message], classifiers: Mapping[str, StateDict],
    initial: StateDict,
) -> dict[str, StateDict]:  # fmt: skip
    """No aggregation: each agent continues from its own F, as in FedMatch's Local-SL.

    Args:
        message: F -> what an agent is sent.
        classifiers: agent -> its F of former rounds.
        initial: F of an agent that has none.
    """
    replies = federation.call_all(
        agents, step, lambda agent: message(classifiers.get(agent.id, initial))
    )
    return {**classifiers, **{r.sender.id: r.payload.F for r in replies if not r.declined}}


def select_first_classifier(
    classifiers: Mapping[str, StateDict], otherwise: StateDict
) -> StateDict:
    """The F of the first agent: without aggregation there is none of all."""
    return classifiers[min(classifiers, key=natural_order)] if classifiers else otherwise


def average_groups(
    weights: Literal["half", "rows", "equal"],
    support: Sequence[Reply[Any]],
    query: Sequence[Reply[Any]],
    field: str,
    otherwise: StateDict,
) -> StateDict:
    """FedAvg over both groups: line 9 of Fan et al., Algorithm 1.

    Args:
        weights: half: Eq. 1, each group counts one half whatever its size; rows: section 3.1,
            n_k / n; equal: every agent counts the same.
        support, query: replies of the two groups; those that declined are left out.
        field: which network of the message.
        otherwise: used when no agent sent it.
    """
    groups = [
        [r for r in replies if not r.declined and getattr(r.payload, field) is not None]
        for replies in (support, query)
    ]
    weight = {
        id(reply): {"half": 1 / len(group), "rows": reply.weight, "equal": 1.0}[weights]
        for group in groups
        for reply in group
    }
    replies = [*groups[0], *groups[1]]
    return average(replies, field, otherwise=otherwise, weight=lambda reply: weight[id(reply)])
