"""Settings of FedMatch: the authors' code is the default, and a profile has the paper's choices.

A setting that is null follows ``profile``, and some of them the place of the labels too.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import pydantic.dataclasses
import torch
from torch import Tensor

from privssl.algorithms.fedmatch.sparse_updates import SparsityThresholds
from privssl.algorithms.local_ssl import Amount, Share
from privssl.data.augmentations import StrongName, view
from privssl.settings.schema import Count, Positive, Problem, Rate, strict

LogForm: TypeAlias = Literal["clamped", "exact"]
LabelLocation: TypeAlias = Literal["server", "client"]
Vote: TypeAlias = Literal["always", "sure"]
DecayOn: TypeAlias = Literal["labelled", "validation"]
InterClientRows: TypeAlias = Literal["confident", "all"]
RefreshHelpers: TypeAlias = Literal["round", "age"]
SlicesOf: TypeAlias = Literal["shuffled", "stored"]


@dataclass(frozen=True)
class Hyperparameters:
    """What a config's null settings mean, by the place of the labels and the profile."""

    batch_size: int
    patience: int
    threshold: float
    l1_weight: float
    negligible: float
    smallest_change: float
    weight_decay: float = 0.0
    probabilities: LogForm = "clamped"
    helpers_vote: Vote = "always"
    inter_client_rows: InterClientRows = "confident"
    decay_on: DecayOn = "labelled"
    keep_helpers: bool = False
    refresh_helpers: RefreshHelpers = "round"
    sparse_messages: bool = False
    slices_of: SlicesOf = "shuffled"

    @property
    def sparsity_thresholds(self) -> SparsityThresholds:
        return SparsityThresholds(self.negligible, self.smallest_change)


#: Authors' code. Support agents count as a server.
RELEASED: Mapping[LabelLocation, Hyperparameters] = {
    "server": Hyperparameters(100, 20, 0.75, 1e-5, negligible=1e-5, smallest_change=1e-5),
    "client": Hyperparameters(10, 5, 0.75, 1e-4, negligible=5e-6, smallest_change=5e-5),
}
#: What a profile changes of them. The paper's rows: 54,000 + 3,000 + 3,000 (data.test, validation).
PROFILES: Mapping[str, Mapping[str, Any]] = {
    "fedmatch-release": {},
    "fedmatch-paper": {
        "threshold": 0.85,  # A.1
        "patience": 5,  # A.3
        "decay_on": "validation",  # A.3
        "weight_decay": 1e-4,  # A.3
        "probabilities": "exact",  # Eq. 1, 2, 4
        "inter_client_rows": "all",  # Eq. 1, 2
        "helpers_vote": "sure",  # Eq. 3 and the sentence below it
        "keep_helpers": True,  # Alg. 1 l. 6, Alg. 2 l. 11
        "refresh_helpers": "age",  # 3.1
        "sparse_messages": True,  # 3.2
        "slices_of": "stored",  # 6.1, with data.order
    },
}


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class DisjointTraining:
    """Local training. Numbers are the authors' code's; null: RELEASED and PROFILES."""

    profile: Literal["fedmatch-release", "fedmatch-paper"] = "fedmatch-release"
    epochs: Positive = 1  # of an agent's visit
    batch_size: Positive | None = None  # labelled rows at clients; rows of either kind otherwise
    learning_rate: Rate = 1e-3  # SGD without momentum, of sigma and psi
    patience: Positive | None = None  # visits without a lower loss until rate / 3
    decay_on: DecayOn | None = None  # the loss on an agent's labels, or on data.validation (paper)
    threshold: Share | None = None  # tau: a row is used where the agent's max p >= tau
    labelled_weight: Rate = 10.0  # lambda_s
    inter_client_weight: Amount = 0.01  # lambda_ICCS, of Eq. 1
    inter_client_rows: InterClientRows | None = None  # of Eq. 1: from tau on, or all (paper)
    agreement_weight: Amount = 0.01  # lambda_ICCS, of the pseudo-labels
    l2_weight: Amount = 10.0  # of sum (sigma - psi)^2
    l1_weight: Amount | None = None  # of sum |psi|
    weight_decay: Amount | None = None  # of sum theta^2; the paper's 1e-4 is not added in the code
    negligible: Amount | None = None  # l1_thres: entries of psi that count as 0
    smallest_change: Amount | None = None  # delta: differences up to it are not sent
    helpers_vote: Vote | None = None  # sure: where their max p >= tau (paper)
    probabilities: LogForm | None = None  # in losses; clamped: as Keras does; exact: by log softmax
    strong: StrongName = "fedmatch"
    decomposition: bool = True  # false: one set of weights learns from all rows (Table 5)
    measure_labelled: bool = False  # accuracy on an agent's labels after each step (Fig. 6c)
    keep_helpers: bool | None = None  # true: an agent uses them until it gets others (paper)
    refresh_helpers: RefreshHelpers | None = None  # in every tenth round, or ten rounds old (paper)
    sparse_messages: bool | None = None  # only entries that changed are sent, both ways (paper)
    slices_of: SlicesOf | None = None  # a stream is cut from shuffled rows, or as stored (paper)

    def hyperparameters(self, labels_at: LabelLocation) -> Hyperparameters:
        """The numbers that hold where labels are at ``labels_at``."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(Hyperparameters)}
        overrides = {name: value for name, value in values.items() if value is not None}
        if not self.decomposition:  # psi is then the whole network
            overrides.setdefault("negligible", 0.0)
        return dataclasses.replace(RELEASED[labels_at], **{**PROFILES[self.profile], **overrides})

    def strong_view(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """A strong view of rows (B, *shape) in [-1, 1]. There is no weak view."""
        return view(self.strong, x, rng, flip=False, under="none")


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedMatchConfig(DisjointTraining):
    """Section ``algorithm`` for FedMatch. Numbers are the authors' code's (CIFAR-10)."""

    name: Literal["fedmatch"] = "fedmatch"
    rounds: Positive = 200
    query_per_round: Positive | None = 5  # 0.05 of 100 agents; all when null or fewer
    server_epochs: Positive = 1  # of an agent with labels alone
    psi_factor: Amount = 0.2  # psi_0 / sigma_0; the paper has none
    sparse_down: bool = False  # true: agents train with what sparse differences give
    helpers: Count = 2  # H; 0: none
    helpers_every: Positive = 10  # rounds
    stream_slices: Positive = 1  # above 1: agents see one slice of their rows after the other
    evaluate_parts: bool = False  # also the accuracy of sigma alone and psi alone (Fig. 6b)

    def problems(self) -> Iterator[Problem]:
        """Settings under which psi diverges, or rows are never used."""
        product = self.learning_rate * self.l2_weight
        if product >= 1 and self.decomposition:
            yield Problem(
                "learning_rate",
                f"{self.learning_rate:g} times l2_weight {self.l2_weight:g} is {product:g}: from 1 "
                "on psi diverges from sigma. Lower one of them",
            )
        if self.stream_slices > self.rounds:
            yield Problem(
                "stream_slices",
                f"{self.stream_slices}, but there are {self.rounds} rounds: some rows would never "
                "be used. Give at most that many",
            )
        if self.evaluate_parts and not self.decomposition:
            yield Problem("evaluate_parts", "has no effect: without decomposition there is no part")
        if self.sparse_down and self.hyperparameters("server").sparse_messages:
            text = "has no effect: with sparse_messages agents train with what differences give"
            yield Problem("sparse_down", f"{text}. Leave it out")
