"""What several algorithms do alike: the settings of the classifier's local training, classes as
distributions, the server's average over the two groups of agents, and refusals.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from privssl.core.agents import LabelledRows
from privssl.core.aggregation import average
from privssl.core.messages import Reply, StateDict
from privssl.data.affine_augment import AUGMENTATIONS, Augmentation
from privssl.settings.schema import Count, Positive, Problem, Rate, strict
from privssl.training import local_training

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=strict)
class SelfTraining:
    """How F learns at an agent, and how a moving average of F guesses labels for rows without.

    Sources: Fan et al. give Z and K as symbols only; numbers are ours.
    """

    local_steps: Positive = 20  # of every agent in every round
    batch_size: Positive = 32
    learning_rate: Rate = 2e-3  # of F; Adam's
    augment: Literal["none", "weak", "mid", "strong"] = "strong"  # of the rows that F learns from
    flip: bool = False  # mirror images left to right: objects yes, digits no
    sharpness: Annotated[float, Field(gt=1)] = 2.0  # Z of Eq. 2
    views: Positive = 2  # K: augmented views whose mean prediction is the pseudo-label
    teacher_decay: Share = 0.8  # of the moving average of F that guesses labels and is released
    query_per_round: Positive | None = None  # query agents drawn for a round; all when absent

    def augmentation(self, name: str = "") -> Augmentation:
        """The named augmentation (default: of F's rows), with mirroring as configured."""
        return AUGMENTATIONS[name or self.augment].flipping(self.flip)

    def decay(self, round_number: int) -> float:
        """Of the teacher after a round: short at first, so that it is not the untrained F."""
        return min(self.teacher_decay, (1 + round_number) / (5 + round_number))


@dataclass(frozen=True, config=strict)
class ClassifierTraining(SelfTraining):
    """How F is trained at all agents; the same for FedSSL and for what it is compared with."""

    rounds: Positive = 100  # ours; the paper gives none
    weights: Literal["half", "rows", "equal"] = "half"  # half: Eq. 1, each group one half
    warm_up: Count = 2  # rounds in which F learns at support agents only
    # Of F. Adam takes steps of one length whatever the gradient: agents that miss classes drift
    # further apart than under sgd (docs/fedssl.md). Its learning_rate is about ten times as large
    optimiser: Literal["adam", "sgd"] = "adam"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of sgd; starts anew at every visit

    def stepping(self, F: nn.Module) -> local_training.Group:
        """How F is stepped at an agent."""
        if self.optimiser == "sgd":
            return local_training.SGDGroup(F, self.learning_rate, self.momentum)
        return local_training.AdamGroup(F, self.learning_rate, (0.9, 0.99))


def needs_unlabelled(config: Any) -> Iterator[Problem]:
    """The problem of a config under which nobody holds unlabelled rows.

    Args:
        config: the ``privssl.experiment.config.Config`` being checked.
    """
    if config.data.labels != "labels-at-client" and not config.agents.query:
        name = config.algorithm.name
        yield Problem("agents.query", f"0, but {name} learns from unlabelled rows: give 1 or more")


def no_statistics(config: Any) -> Iterator[Problem]:
    """The problem of a config whose norm needs statistics that its algorithm does not collect.

    Args:
        config: the ``privssl.experiment.config.Config`` being checked.
    """
    if config.model.norm == "static":
        name = config.algorithm.name
        text = f"static needs statistics that {name} does not collect. Set group, batch or none"
        yield Problem("model.norm", text)


def one_hot(rows: LabelledRows, picked: Tensor, classes: int) -> Tensor:
    """The labels of some rows as distributions (B, C)."""
    return torch.eye(classes)[rows.y[picked]]


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
        support, query: replies of the two groups; a silent agent counts nothing.
        field: which network of the message.
        otherwise: used when nobody sent it.
    """
    sent = {
        group: [r for r in replies if not r.declined and getattr(r.payload, field) is not None]
        for group, replies in (("support", support), ("query", query))
    }
    share = {
        id(reply): {"half": 1 / len(replies), "rows": reply.weight, "equal": 1.0}[weights]
        for replies in sent.values()
        for reply in replies
    }
    everyone = [*sent["support"], *sent["query"]]
    return average(everyone, field, otherwise=otherwise, weight=lambda reply: share[id(reply)])
