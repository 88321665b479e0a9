"""DP-SGD at a support agent: sampler, clipping, noise and event made from one set of numbers.

The per-row gradients come from one per-row loss under vmap, which cannot mix rows
(``privacy/per_example_gradients.py``); hooks break on networks that run through each other. The
joint gradient of all protected networks is clipped row by row and summed (``privacy/clipping.py``);
Opacus' ``DPOptimizer`` adds the noise and steps. Around it, ours:

* masks and noise are made of ``accounting.secure_random``. They are never seeded, stored or
  resumed; torch's CPU generator is not used because it keeps 32 bits of its seed.
* rows whose gradient is not finite contribute zero, silently: an error would tell of them.
* the divisor is the public expected batch size, and an empty batch takes a noisy step.
* every part of a batch has one physical size, a public number, and is computed in one thread:
  kernels round otherwise where there are more rows or threads, and with weights that a server
  picks, rounding can be all that is left of a gradient. Rows that were not drawn, and made-up
  ones of zeros, fill parts up and are masked out.

More in docs/privacy.md. Abadi et al. 2016; Mironov et al. 2019.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accounting.accountants import calibrate_noise
from privssl.errors import PrivacyError
from privssl.ops import self_test
from privssl.privacy.clipping import PerExampleGradients, clipped_sums, wide
from privssl.privacy.layer_gradients import Key
from privssl.privacy.per_example_gradients import Parameters, RowLoss, factored_gradients
from privssl.privacy.plan import PrivatePlan
from privssl.settings.schema import PrivacySettings
from privssl.training import optim
from privssl.training.batched import deferred

if TYPE_CHECKING:
    from privssl.privacy.noisy_optimizer import SecureNoise


@contextmanager
def in_one_thread() -> Iterator[None]:
    """Inside, the calling thread computes alone: several share out rows by their number, and round
    each row by its place."""
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def padded(x: Tensor, rows: int) -> Tensor:
    """Rows (B, ...) and zeros behind them, ``rows`` in all."""
    missing = rows - len(x)
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))]) if missing else x


@dataclass(frozen=True, eq=False)
class ClippedSum:
    """What a private step asks for: the sums over rows of clipped gradients."""

    row_loss: RowLoss
    parameters: Parameters
    fields: Mapping[str, Tensor]  # (B, ...), B >= 1
    drawn: Tensor  # (B,) whether a row counts
    clip_norm: float
    joint: bool = True  # whether it may be done together with other agents'

    def run_single(self) -> dict[Key, Tensor]:
        """Of each parameter that a row's loss depends on, float64."""
        with in_one_thread():
            gradients = factored_gradients(self.row_loss, self.parameters, self.fields)
            return self.add_clipped_sum(gradients, self.drawn)

    def add_clipped_sum(
        self, gradients: Mapping[Key, PerExampleGradients], drawn: Tensor
    ) -> dict[Key, Tensor]:
        if not gradients:
            return {}
        sums = clipped_sums(list(gradients.values()), drawn, self.clip_norm)
        return dict(zip(gradients, sums, strict=True))


@dataclass(frozen=True, eq=False)
class NoisyOptimizerStep:
    """A step down sums of clipped gradients, with noise on them."""

    optimiser: "SecureNoise"
    expected_batch: float

    def run_single(self) -> None:
        self.optimiser.add_noise()
        self.average()
        self.optimiser.original_optimizer.step()
        self.forget()

    def average(self) -> None:
        """Sums with noise become gradients: the divisor is public."""
        torch._foreach_div_([p.grad for p in self.optimiser.params], self.expected_batch)

    def forget(self) -> None:
        """The sum without noise does not outlive its step."""
        for parameter in self.optimiser.params:
            parameter.grad = parameter.summed_grad = None


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
    self_test.refuse_wrong_kernels()  # before a visit is paid for; the training itself asks again
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
        self_test.refuse_wrong_kernels()
        from privssl.privacy.noisy_optimizer import (
            SecureNoise,  # Opacus: seconds that only private runs pay
        )

        self._optimizer = SecureNoise(
            # Fresh for every visit, so its momentum has seen this visit's noisy gradients only.
            optim.SGD(parameters, lr=plan.learning_rate, momentum=plan.momentum),
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
        for (net, name), total in deferred.submit(wanted).items():
            of: Any = self._parameters[net][name]
            if total.shape != of.shape:  # adding would repeat a smaller one
                raise PrivacyError(f"the gradient of {net}.{name} has shape {total.shape}")
            of.summed_grad = total if of.summed_grad is None else of.summed_grad.add_(total)

    def _step(self) -> None:
        for parameter in self._optimizer.params:
            if parameter.summed_grad is None:  # no row, or no row's loss depends on it
                parameter.summed_grad = wide(torch.zeros_like(parameter))
        deferred.submit(NoisyOptimizerStep(self._optimizer, self._plan.expected_batch))
