"""DP-SGD at a support agent: sampler, clipping, noise and event made from one set of numbers.

The per-row gradients come from one per-row loss under vmap, which cannot mix rows
(``row_gradients.py``); hooks break on networks that run through each other. The joint gradient of
all protected networks is clipped row by row and summed (``clipping.py``); Opacus' ``DPOptimizer``
adds the noise and steps. Around it, ours:

* masks and noise are made of ``accounting.coins``. They are never seeded, stored or resumed;
  torch's CPU generator is not used because it keeps 32 bits of its seed.
* rows whose gradient is not finite contribute zero, silently: an error would tell of them.
* the divisor is the public expected batch size, and an empty batch takes a noisy step.
* every part of a batch has one physical size, a public number, and is computed in one thread:
  kernels round otherwise where there are more rows or threads, and with weights that a server
  picks, rounding can be all that is left of a gradient. Rows that were not drawn, and made-up
  ones of zeros, fill parts up and are masked out.

More in docs/privacy.md. Abadi et al. 2016; Mironov et al. 2019.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from accounting.accountants import calibrate_noise, epsilon
from accounting.budget import round_up
from accounting.coins import random_uint64
from accounting.events import (
    ComposedEvent,
    Event,
    NonPrivateEvent,
    PoissonSampledGaussianEvent,
    is_protected,
)
from privssl import kernels, optimisers, together
from privssl.clipping import wide
from privssl.errors import PrivacyError
from privssl.kernels import noise, proof
from privssl.private_steps import ClippedSum, NoisyOptimizerStep, padded
from privssl.row_gradients import RowLoss
from privssl.settings import PrivacySettings


def microbatch_size(networks: Mapping[str, nn.Module], numbers: int) -> int:
    """How many rows' gradients are made, and held, at once: 256, or 64. Public sizes decide.

    Each pass has costs of its own, which 256 rows bear better: a step of one network on 256 small
    grey images takes 13 to 24% less time. What is held are gradients, rows times parameters, and
    every row's windows at every convolution; larger images leave the caches, and take longer.

    Args:
        networks: the protected ones.
        numbers: of a row as the networks see it: views x channels x height x width.
    """
    parameters = sum(p.numel() for net in networks.values() for p in net.parameters())
    return 256 if parameters <= 2**18 and numbers <= 2**10 else 64


def secure_uniform(count: int) -> np.ndarray:
    """``count`` float64 numbers in [0, 1), 53 bits each, that nobody can foretell."""
    return _as_uniform(random_uint64(count))


def secure_normal(count: int) -> np.ndarray:
    """``count`` standard normal float64 numbers that nobody can foretell."""
    half = (count + 1) // 2
    return box_muller(random_uint64(half), random_uint64(half))[:count]


def box_muller(radii: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Two standard normal float64 numbers of each pair of words (Box and Muller 1958).

    A radius is made of all 64 bits of a word: of 53 the largest would lie so far apart that two
    numbers of one radius could tell what was added to them. None is larger than 9.42. Of an angle
    53 bits count.

    Args:
        radii, angles: uint64 (pairs,).

    Returns:
        (2 pairs,): all cosines, then all sines.
    """
    if kernels.instruction_set() is not None:
        return noise.normal(radii, angles)
    tail = torch.from_numpy(_as_floats(radii)).add_(1.0).mul_(2.0**-64)  # in (0, 1]
    radius = tail.log_().mul_(-2.0).sqrt_()
    angle = torch.from_numpy(_as_uniform(angles)).mul_(2.0 * math.pi)  # torch is faster than numpy
    normal: np.ndarray = torch.cat([angle.cos().mul_(radius), angle.sin().mul_(radius)]).numpy()
    return normal


def _as_uniform(words: np.ndarray) -> np.ndarray:
    """Their highest 53 bits, as float64 in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _as_floats(words: np.ndarray) -> np.ndarray:
    """Words as the float64 numbers that are nearest to them: what ``astype`` says, in a third of
    the time. It branches on a word's highest bit, which no processor can guess of coins."""
    floats: np.ndarray = (words >> np.uint64(11)).astype(np.float64) * 2.0**11
    floats += (words & np.uint64(2**11 - 1)).astype(np.float64)
    return floats


class Plan(Protocol):
    """What accounts, card and loop ask of a plan, whatever its mechanism."""

    @property
    def update(self) -> tuple[str, ...]: ...  # what leaves a support agent that read its rows
    @property
    def protect(self) -> tuple[str, ...]: ...  # what of it leaves with noise
    @property
    def visits(self) -> int: ...  # after so many, support agents are left alone
    @property
    def scope(self) -> Literal["sound", "as_published"]: ...
    @property
    def event(self) -> Event: ...  # what one visit releases
    def spending(self, settings: PrivacySettings) -> str:
        """What a dry run says of it."""


@dataclass(frozen=True)
class PrivatePlan:
    """The numbers of one visit's private training, all public and fixed before the run."""

    update: tuple[str, ...]  # networks that a support agent trains
    protect: tuple[str, ...]  # networks trained privately
    noise_multiplier: float  # noise std / clip norm, > 0
    clip_norm: float  # > 0
    sample_rate: float  # in (0, 1]
    steps: int  # private steps per visit
    expected_batch: float  # public divisor: sample_rate x declared rows per agent
    learning_rate: float
    momentum: float
    views: int
    visits: int  # after so many, support agents are left alone
    augment: Literal["none", "weak", "mid", "strong"] = "none"  # of rows in private steps
    average_last: float = 0.0  # share of a visit's steps whose iterates are averaged; 0: none
    record_counts: Literal["public", "private"] = "public"  # whether neighbours have as many rows

    @property
    def event(self) -> Event:
        """What one visit releases."""
        protected = PoissonSampledGaussianEvent(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=self.steps,
        )
        plainly = [name for name in self.update if name not in self.protect]
        if not plainly:
            return protected
        return ComposedEvent((protected, NonPrivateEvent(f"{', '.join(plainly)} without noise")))

    @property
    def scope(self) -> Literal["sound", "as_published"]:
        return "sound" if set(self.update) <= set(self.protect) else "as_published"

    def spending(self, settings: PrivacySettings) -> str:
        """What a dry run says: the numbers of a visit, and what all visits would cost."""
        visits = is_protected([self.event]) * self.visits
        spent = epsilon(visits, settings.delta) if visits else 0.0
        return (
            f"Scope {self.scope}. Noise multiplier {self.noise_multiplier:g}, sample rate "
            f"{self.sample_rate:g}, {self.visits} visits of {self.steps} private steps to each "
            f"support agent: {'nominal ' if self.scope == 'as_published' else ''}epsilon "
            f"{round_up(spent)} of {settings.epsilon:g} at delta {settings.delta:g}."
            + (" The budget ends the visits before that." if spent > settings.epsilon else "")
        )

    @property
    def declared(self) -> int:
        """Rows of an agent by the config, public."""
        return math.ceil(self.expected_batch / self.sample_rate)

    def draw_batch(self, rows: int) -> Tensor:
        """A Poisson mask (rows,): each row independently with the sample rate."""
        if self.sample_rate == 1.0:
            return torch.ones(rows, dtype=torch.bool)
        return torch.from_numpy(secure_uniform(rows) < self.sample_rate)

    def physical_batch_size(self, rows: int) -> int:
        """Physical rows of a batch. Small agents always compute all rows, so that time does
        not tell the batch size; for others a public bound that a batch rarely exceeds."""
        if rows <= 256 or self.sample_rate == 1.0:
            return rows
        spread = math.sqrt(rows * self.sample_rate * (1 - self.sample_rate))
        return min(rows, math.ceil(rows * self.sample_rate + 4 * spread))

    def parts(self, rows: int, at_once: int) -> tuple[int, int]:
        """In how many parts a batch is computed at least, and the rows of each: public numbers.

        Where counts are private they follow from the declared rows alone, rounded up, so that an
        agent with a few rows more does not have to compute another part. Rows are a multiple of 4:
        products of matrices do what is left over in another way.

        Args:
            rows: that the agent holds.
            at_once: rows of one pass at most.
        """
        if self.record_counts == "private":
            rows = -(-max(self.declared, 1) // 8) * 8
        most = max(self.physical_batch_size(rows), 1)
        parts = -(-most // at_once)
        return parts, -(-most // (4 * parts)) * 4


def make_dp_sgd_plan(
    settings: PrivacySettings, *, rounds: int, rows_per_agent: float
) -> PrivatePlan:
    """Fix every number of private training before the run.

    Args:
        settings: the privacy section.
        rounds: of the whole run; a support agent is visited at most once in each.
        rows_per_agent: declared labelled rows of one support agent, public.

    Raises:
        accounting.errors.PlanError: no noise fits the budget.
        PrivacyError: a kernel of ours that clips or draws does not do so on this processor.
    """
    proof.refuse_wrong_kernels()  # before a visit is paid for; the training itself asks again
    visits = min(settings.visits or rounds, rounds) if settings.epsilon > 0 else 0
    noise = settings.noise_multiplier
    if noise is None:
        noise = 1.0 if visits == 0 else calibrate_noise(
            epsilon=settings.epsilon, delta=settings.delta,
            sample_rate=settings.sample_rate, steps=visits * settings.steps,
        )  # fmt: skip
    return PrivatePlan(
        update=settings.update_at_support,
        protect=settings.protect,
        noise_multiplier=noise,
        clip_norm=settings.clip_norm,
        sample_rate=settings.sample_rate,
        steps=settings.steps,
        expected_batch=settings.sample_rate * rows_per_agent,
        learning_rate=settings.learning_rate,
        momentum=settings.momentum,
        views=settings.views,
        visits=visits,
        augment=settings.augment,
        average_last=settings.average_last,
        record_counts=settings.record_counts,
    )


class PrivateTraining:
    """Trains networks on an agent's rows under a plan. One object is one visit."""

    def __init__(self, plan: PrivatePlan, networks: Mapping[str, nn.Module]) -> None:
        """``networks``: the protected ones; frozen ones belong to the row loss.

        Raises:
            PrivacyError: one of them has buffers, which would be sent and are never noisy, or two
                share a parameter, whose gradient would be clipped as two; or products are rounded
                so much that a row could weigh more than was measured; or a kernel of ours that
                clips or draws does not do so on this processor.
        """
        moving = [name for name, net in networks.items() if any(True for _ in net.buffers())]
        if moving:
            raise PrivacyError(
                f"{', '.join(moving)} cannot be protected: what it keeps beside its parameters "
                "(buffers) would be sent without noise"
            )
        self._plan = plan
        self._parameters = {name: dict(net.named_parameters()) for name, net in networks.items()}
        parameters = [p for net in networks.values() for p in net.parameters()]
        if len({id(p) for p in parameters}) < len(parameters):
            raise PrivacyError(
                f"{', '.join(networks)} share a parameter: protect one network of it"
            )
        if torch.get_float32_matmul_precision() != "highest":
            raise PrivacyError(
                "matrix products are rounded (torch.set_float32_matmul_precision), so that a row "
                "could weigh more than its clip norm. Set it to highest"
            )
        proof.refuse_wrong_kernels()
        from privssl.noisy_steps import SecureNoise  # Opacus: seconds that only private runs pay

        self._optimizer = SecureNoise(
            # Fresh for every visit, so its momentum has seen this visit's noisy gradients only.
            optimisers.SGD(parameters, lr=plan.learning_rate, momentum=plan.momentum),
            noise_multiplier=plan.noise_multiplier,
            max_grad_norm=plan.clip_norm,
            expected_batch_size=None,
            loss_reduction="sum",
        )

    def run(
        self,
        rows: int,
        fields_of: Callable[[Tensor, int], Mapping[str, Tensor]],
        row_loss: RowLoss,
        *,
        at_once: int = 64,
    ) -> None:
        """All steps of the visit. The caller has paid for the event before calling.

        Args:
            rows: how many labelled rows the agent holds; may be 0.
            fields_of: (row numbers (B,), step) -> tensors (B, ...), one row's fields each.
            row_loss: the loss of one row.
            at_once: rows of one pass, by public sizes: :func:`microbatch_size`.
        """
        mean: list[Tensor] = []
        parts, size = self._plan.parts(rows, at_once)
        kept = round(self._plan.average_last * self._plan.steps)
        for step in range(self._plan.steps):
            mask = self._plan.draw_batch(rows)
            drawn = mask.nonzero()[:, 0]
            # Rows that were not drawn fill the batch up to its public size, masked out.
            others = (~mask).nonzero()[:, 0]
            order = torch.cat([drawn, others])[: max(parts * size, len(drawn))]
            for number, part in enumerate(torch.split(order, size)):
                if len(part):
                    fields = {k: padded(v, size) for k, v in fields_of(part, step).items()}
                    # Whether there is a part beyond those that are public, no other agent's may
                    # show: a stack of one more agent rounds otherwise.
                    joint = self._plan.record_counts == "public" and number < parts
                    self._add_clipped(fields, padded(mask[part], size), row_loss, joint=joint)
            self._step()
            seen = step - (self._plan.steps - kept)  # steps averaged before this one
            if seen >= 0:
                mean = self._apply_average(mean, seen)
        with torch.no_grad():
            for parameter, value in zip(self._optimizer.params, mean, strict=False):
                parameter.copy_(value)

    def _apply_average(self, mean: list[Tensor], seen: int) -> list[Tensor]:
        """The mean of iterates with the present one added. Post-processing: it costs nothing,
        and takes out most of what the noise of single steps adds (Polyak and Juditsky 1992)."""
        now = [parameter.detach().clone() for parameter in self._optimizer.params]
        if not seen:
            return now
        return [m.lerp_(n, 1 / (seen + 1)) for m, n in zip(mean, now, strict=True)]

    def _add_clipped(
        self, fields: Mapping[str, Tensor], mask: Tensor, row_loss: RowLoss, *, joint: bool = True
    ) -> None:
        """Adds the clipped gradients of a part of the rows to the running sum, in float64."""
        wanted = ClippedSum(
            row_loss, self._parameters, fields, mask, self._plan.clip_norm, joint=joint
        )
        for (net, name), total in together.submit(wanted).items():
            of: Any = self._parameters[net][name]
            if total.shape != of.shape:  # adding would repeat a smaller one
                raise PrivacyError(f"the gradient of {net}.{name} has shape {total.shape}")
            of.summed_grad = total if of.summed_grad is None else of.summed_grad.add_(total)

    def _step(self) -> None:
        for parameter in self._optimizer.params:
            if parameter.summed_grad is None:  # no row, or no row's loss depends on it
                parameter.summed_grad = wide(torch.zeros_like(parameter))
        together.submit(NoisyOptimizerStep(self._optimizer, self._plan.expected_batch))
