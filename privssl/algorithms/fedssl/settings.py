"""Section ``algorithm`` for FedSSL. Numbers are ours unless a source is given
(docs/fedssl.md)."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

import pydantic.dataclasses
from pydantic import Field

from privssl.algorithms.local_ssl import Amount, ClassifierTraining, Share
from privssl.settings.schema import Positive, Problem, Rate, strict


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class GMixupSettings(ClassifierTraining):
    """How mixes are made, and the weights of their losses. Numbers are ours (docs/fedssl.md)."""

    real_rows: bool = True  # false: Algorithm 1 read literally, F learns from mixes alone
    mix_alpha: Rate = 0.5  # alpha of lambda ~ Beta(alpha, alpha), Eq. 3
    noise_size: Positive = 32  # D_n
    judge: Literal["mixed", "target"] = "mixed"  # the label D sees with a mix: p', or p2 (Eq. 6)
    weight_mix: Amount = 0.5  # of the cross-entropy of mixes, for F
    weight_guidance: Amount = 0.3  # of the same, for G
    weight_real: Amount = 1.0  # of the realistic loss, Eq. 6; 0: ablation, D is not trained
    weight_reconstruction: Amount = 0.0125  # of the squared error in [-1, 1], Eq. 7; 0: ablation
    generator: Literal["mixing", "variational"] = "mixing"  # variational: diverse rows, a VAE
    weight_code: Amount = 0.0125  # of a VAE's cost of a row's code; of vectors also of the row
    # Share of each batch of F that G makes of noise and a class (lambda 0)
    synthetic_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    synthetic_at: Literal["query", "all"] = "query"  # support agents can keep to their labels
    # teacher: sharpened predictions, as of real rows; condition: the class that G was given
    synthetic_labels: Literal["teacher", "condition"] = "teacher"


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedSSLConfig(GMixupSettings):
    """Section ``algorithm`` for FedSSL. Numbers are ours unless a source is given."""

    name: Literal["fedssl"] = "fedssl"
    order: Literal["parallel", "sequential"] = "parallel"  # Alg. 1 or 2; a private run is Alg. 2
    # joint: a step goes down all losses at once; in_turn: G-Reg over all rows of a visit, then
    # G-MixUp over the same, as printed in Alg. 1 l. 4-5 and 7-8. A step under noise stays joint
    updates: Literal["joint", "in_turn"] = "joint"
    mix_every: Positive = 2  # local steps from one with G and D to the next; others train F alone
    # agreement from which mixes train F; 0: from the start; similarity: while their gradient points
    # as that of real rows does
    gate: Share | Literal["similarity"] = 0.85
    generator_learning_rate: Rate = 2e-3  # Adam
    discriminator_learning_rate: Rate = 1e-3  # Adam
    generator_width: Positive = 16
    spectral_norm: bool = True  # of D's trunk; off where D is under DP
    # query: support agents train F alone, so G learns no label; a private run: update_at_support
    generator_at: Literal["query", "all"] = "all"

    def training_phases(self) -> tuple[tuple["FedSSLConfig", str], ...]:
        """The phases of local training in order: weights of the losses, and networks trained."""
        if self.updates == "joint":
            return ((self, "FGD"),)
        g_reg = dataclasses.replace(self, weight_mix=0.0, weight_guidance=0.0)
        g_mixup = dataclasses.replace(
            self, weight_real=0.0, weight_reconstruction=0.0, weight_code=0.0
        )
        code_costs = self.generator == "variational" and self.weight_code
        with_g = self.weight_real or self.weight_reconstruction or code_costs
        # Without a loss of its own, momentum alone would move G.
        return ((g_reg, "GD" if with_g else "D"), (g_mixup, "FG" if self.weight_guidance else "F"))

    def problems(self) -> Iterator[Problem]:
        """Settings under which F is never trained, or the gate has nothing to compare."""
        if self.gate == "similarity":
            yield from self._problems_of_similarity()
        if not self.real_rows and self.gate != 0:
            yield Problem(
                "gate",
                f"{self.gate}, but with real_rows: false F learns from mixes alone, and recognises "
                "none before that. Set gate: 0",
            )
        if self.synthetic_share and not self.real_rows:
            yield Problem(
                "synthetic_share",
                f"{self.synthetic_share}, but with real_rows: false F learns from mixes alone. "
                "Leave one of them out",
            )

    def _problems_of_similarity(self) -> Iterator[Problem]:
        if self.batch_size < 2:
            yield Problem(
                "gate", "similarity compares two halves of a batch. Set batch_size: 2 or more"
            )
        if self.weight_mix == 0:
            yield Problem(
                "gate",
                "similarity looks at mixes, and with weight_mix: 0 none trains F. Set gate to a "
                "number",
            )
        if self.synthetic_share and self.synthetic_labels == "condition":
            yield Problem(
                "gate",
                "similarity looks at mixes, but synthetic rows with the class that G was given "
                "need the teacher's agreement. Set gate to a number",
            )
