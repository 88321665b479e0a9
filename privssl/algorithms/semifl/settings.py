"""Section ``algorithm`` for SemiFL, and where its text and the authors' code differ."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor

from privssl.algorithms.local_ssl import (
    Share,
)
from privssl.data.augmentations import StrongName, StrongViews, view
from privssl.settings.schema import Count, Positive, Problem, Rate, strict

Momentum = Annotated[float, Field(ge=0, lt=1)]
Profile = Literal["semifl-2021", "semifl-head", "semifl-text"]


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a profile decides, unless the config gives it."""

    soft_labels: bool  # Eq. 2-7: y is the vector f(alpha(x)); code: its largest class
    mix_rows: Literal["all", "unsure"]  # what MIX draws from; Eq. 4: rows below tau
    mix_drawn: Literal["epoch", "visit"]  # how often; Algorithm 1: once, before the epochs
    mix_view: Literal["rows", "mix"]  # Eq. 7: a weak view of the mix; code: a mix of weak views
    clips: bool  # gradients, at clip_norm; the text has no clipping
    server_first: bool  # Algorithm 1; code: the server trains last in a round
    keeps_momentum: bool  # of fine-tuning, from round to round; not said in the text


_CODE = Variant(
    soft_labels=False, mix_rows="all", mix_drawn="epoch", mix_view="rows", clips=True,
    server_first=False, keeps_momentum=False,
)  # fmt: skip
PROFILES: Mapping[Profile, Variant] = {
    "semifl-2021": _CODE,  # behind most published numbers, probably
    "semifl-head": dataclasses.replace(_CODE, keeps_momentum=True),  # since September 2022
    "semifl-text": Variant(
        soft_labels=True, mix_rows="unsure", mix_drawn="visit", mix_view="mix", clips=False,
        server_first=True, keeps_momentum=False,
    ),
}  # fmt: skip


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class SemiFLConfig(StrongViews):
    """Section ``algorithm`` for SemiFL. Numbers are the paper's (CIFAR-10) unless marked."""

    name: Literal["semifl"] = "semifl"
    rounds: Positive = 800
    # semifl-2021: the code of the published numbers. semifl-head, since Sept 2022: fine-tuning
    # keeps its momentum. semifl-text: as printed. Keys below that are null follow the profile.
    profile: Profile = "semifl-2021"
    # 0.1 of 100 agents; all when null or fewer; 0: the server alone (the paper's PSL)
    query_per_round: Count | None = 10
    epochs: Rate = 5.0  # E of a visit; below 1: that share of one epoch's batches
    server_epochs: Rate = 5.0  # E of fine-tuning
    batch_size: Positive = 10
    server_batch_size: Positive = 10  # 10 with 250 labels, 250 with 1,000 or more
    learning_rate: Rate = 0.03  # SGD with Nesterov momentum, in round 1; it falls by a cosine
    momentum: Momentum = 0.9
    weight_decay: Share = 5e-4  # of all parameters, biases included
    clip_norm: Rate | None = 1.0  # of the whole gradient; authors' code. Not in semifl-text
    threshold: Share = 0.95  # tau: a label is confident where max P >= tau
    mix_alpha: Rate = 0.75  # a of lambda ~ Beta(a, a), one draw per batch
    mix_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0  # 0: FIX alone
    soft_labels: bool | None = None  # pseudo-labels are probabilities; text: true, code: false
    mix_rows: Literal["all", "unsure"] | None = None  # MIX draws from; text: unsure, code: all
    mix_drawn: Literal["epoch", "visit"] | None = None  # anew in each; text: visit, code: epoch
    mix_view: Literal["rows", "mix"] | None = None  # weak view of the; text: mix, code: rows
    server_first: bool | None = None  # fine-tuning before round 1 too; text: true, code: false
    global_momentum: Momentum = 0.5  # beta_g of the server's step; 0: the plain average
    fine_tune: bool = True  # false: the server trains at the same time, for one half
    pseudo_labels: Literal["global", "training"] = "global"  # training: FixMatch, without MIX
    statistics: Literal["everyone", "labelled"] = "everyone"  # whose rows, for norm: static
    weak: Literal["none", "weak", "mid", "crop"] = "crop"
    strong: StrongName = "fixmatch"
    flip: bool = False  # mirror images left to right: CIFAR yes (authors' code); digits no

    @property
    def variant(self) -> Variant:
        """What the profile and the keys that override it decide."""
        keys = ("soft_labels", "mix_rows", "mix_drawn", "mix_view", "server_first")
        overrides = {key: getattr(self, key) for key in keys if getattr(self, key) is not None}
        return dataclasses.replace(PROFILES[self.profile], **overrides)

    @property
    def max_gradient_norm(self) -> float | None:
        """The largest norm of a gradient; None: any."""
        return self.clip_norm if self.variant.clips else None

    def problems(self) -> Iterator[Problem]:
        """Numbers that the profile does not use."""
        if not self.variant.clips and self.clip_norm not in (None, 1.0):
            text = f"{self.clip_norm:g} has no effect: {self.profile} does not clip. Leave it out"
            yield Problem("clip_norm", text)
        if not self.mix_weight or self.pseudo_labels == "training":
            why = "mix_weight is 0" if not self.mix_weight else "pseudo_labels training has no mix"
            for key, default in (
                ("mix_alpha", 0.75), ("mix_rows", None), ("mix_drawn", None), ("mix_view", None)
            ):  # fmt: skip
                if (value := getattr(self, key)) != default:
                    yield Problem(key, f"{value} has no effect: {why}. Leave it out")
        if self.server_first and not self.fine_tune:
            text = (
                "true, but with fine_tune false the server trains beside the agents. Leave it out"
            )
            yield Problem("server_first", text)

    def rate(self, round_number: int) -> float:
        """Learning rate of agents and server in a round, counted from 1: cosine down to near 0."""
        progress = max(0, round_number - 1) / self.rounds
        return self.learning_rate * (1 + math.cos(math.pi * progress)) / 2

    def weak_view(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """A weak view of rows (B, *shape) in [-1, 1]."""
        return view(self.weak, x, rng, flip=self.flip)
