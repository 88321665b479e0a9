"""DP-SGD at a support agent: sampling, clipping, noise and accounting event from one plan.

Per-example gradients come from a per-example loss under vmap, which cannot mix rows
(``privacy/per_example_gradients.py``); backward hooks do not work when one network's output feeds
another. The joint gradient of all protected networks is clipped row by row and summed
(``privacy/clipping.py``). ``SecureNoiseOptimizer`` (``privacy/noisy_optimizer.py``), a subclass of
Opacus' ``DPOptimizer``, adds the noise and steps.

* Masks and noise come from ``accounting.secure_random``: never seeded, stored or resumed. (torch's
  CPU generator keeps 32 bits of its seed.)
* Rows whose gradient is not finite contribute zero without an error, which would reveal them.
* The divisor is the public expected batch size; an empty batch takes a noisy step.
* Every microbatch has one public size and is computed in one thread: rounding depends on the
  number of rows and threads, and a server can choose weights so that rounding dominates the
  gradient. Rows that were not sampled, and zeros, pad microbatches and are masked out.

docs/dp_sgd.md has more. Abadi et al. 2016; Mironov et al. 2019.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accounting.accountants import calibrate_noise
from privssl.core.private_release import begin_release, record_release
from privssl.errors import PrivacyError
from privssl.ops import self_test
from privssl.privacy.clipping import PerExampleGradients, clipped_sums
from privssl.privacy.layer_gradients import Key
from privssl.privacy.per_example_gradients import Parameters, RowLoss, factored_gradients
from privssl.privacy.plan import PrivatePlan
from privssl.runtime.process import single_threaded
from privssl.settings.schema import PrivacySettings
from privssl.training import optim
from privssl.training.batched import deferred

if TYPE_CHECKING:
    from privssl.privacy.noisy_optimizer import SecureNoiseOptimizer


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """Pad rows (B, ...) with zeros to ``rows`` in total."""
    missing = rows - len(x)
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))]) if missing else x


@dataclass(frozen=True, eq=False)
class ClippedSum:
    """The sums of clipped gradients of a private step."""

    row_loss: RowLoss
    parameters: Parameters
    fields: Mapping[str, Tensor]  # (B, ...), B >= 1
    drawn: Tensor  # (B,) whether a row counts
    clip_norm: float
    joint: bool = True  # whether it may be batched with other agents'

    def run_single(self) -> dict[Key, Tensor]:
        """Compute the float64 sum for each parameter that a row's loss depends on."""
        with single_threaded():
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
    """An optimiser step along noisy sums of clipped gradients."""

    optimiser: "SecureNoiseOptimizer"
    expected_batch: float

    def run_single(self) -> None:
        self.optimiser.add_noise()
        self.average()
        self.optimiser.original_optimizer.step()
        self.forget()

    def average(self) -> None:
        """Turn noisy sums into gradients; the divisor is public."""
        torch._foreach_div_([p.grad for p in self.optimiser.params], self.expected_batch)

    def forget(self) -> None:
        """Delete the sum without noise."""
        for parameter in self.optimiser.params:
            parameter.grad = parameter.summed_grad = None


def choose_max_microbatch_size(networks: Mapping[str, nn.Module], numbers: int) -> int:
    """Return the number of rows per pass: 256 or 64, by public sizes.

    256 rows save 13 to 24% of a step of one network on small grey images; larger images exceed the
    caches.

    Args:
        networks: the protected ones.
        numbers: elements of a network's input row: views x channels x height x width.
    """
    parameters = sum(p.numel() for net in networks.values() for p in net.parameters())
    return 256 if parameters <= 2**18 and numbers <= 2**10 else 64


def make_dp_sgd_plan(
    settings: PrivacySettings, *, rounds: int, rows_per_agent: float
) -> PrivatePlan:
    """Fix every parameter of private training before the run.

    Args:
        settings: the privacy section.
        rounds: of the whole run; a support agent is visited at most once in each.
        rows_per_agent: declared labelled rows of one support agent, public.

    Raises:
        accounting.errors.PlanError: no noise fits the budget.
        PrivacyError: a kernel for clipping or noise fails its self-test.
    """
    self_test.refuse_wrong_kernels()  # before a visit is charged; training tests again
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
    """Private training of networks on an agent's rows under a plan; one object per visit."""

    def __init__(self, plan: PrivatePlan, networks: Mapping[str, nn.Module]) -> None:
        """Prepare a visit. ``networks``: the protected ones; frozen ones belong to the row loss.

        Raises:
            PrivacyError: one has buffers, which would be sent without noise; parameters() of one
                differ from named_parameters(); two share a parameter, whose gradient would be
                clipped as two; matrix products are rounded, so a row could exceed its measured
                norm; or a kernel for clipping or noise fails its self-test.
        """
        buffered = [name for name, net in networks.items() if any(True for _ in net.buffers())]
        if buffered:
            raise PrivacyError(
                f"{', '.join(buffered)} cannot be protected: its buffers would be sent without "
                "noise. Use a network without buffers"
            )
        self._plan = plan
        self._parameters = {name: dict(net.named_parameters()) for name, net in networks.items()}
        parameters = [p for net in networks.values() for p in net.parameters()]
        named_parameters = [p for params in self._parameters.values() for p in params.values()]
        if {id(p) for p in named_parameters} != {id(p) for p in parameters}:
            raise PrivacyError(
                f"parameters() and named_parameters() of {', '.join(networks)} differ, so a "
                "step would not know to which ones it adds noise. Override neither"
            )
        if len({id(p) for p in parameters}) < len(parameters):
            raise PrivacyError(
                f"{', '.join(networks)} share a parameter: protect one network of it"
            )
        if torch.get_float32_matmul_precision() != "highest":
            raise PrivacyError(
                "matrix products are rounded, so a row could exceed its clip norm. Set "
                "torch.set_float32_matmul_precision to highest"
            )
        self_test.refuse_wrong_kernels()
        # Importing Opacus takes seconds.
        from privssl.privacy.noisy_optimizer import SecureNoiseOptimizer

        self._optimizer = SecureNoiseOptimizer(
            # New for every visit, so that its momentum contains only this visit's noisy gradients.
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
        max_microbatch_size: int = 64,
    ) -> None:
        """Run all steps of the visit. The caller has charged the event.

        Args:
            rows: labelled rows that the agent holds, >= 0.
            fields_of: (row numbers (B,), step) -> tensors (B, ...), one row's fields each.
            row_loss: the loss of one row.
            max_microbatch_size: most rows of one pass: :func:`choose_max_microbatch_size`.

        Raises:
            PrivacyError: the step has already trained privately under the same charge.
        """
        begin_release()
        mean: list[Tensor] = []
        count, size = self._plan.plan_microbatches(rows, max_microbatch_size)
        averaged_steps = round(self._plan.average_last * self._plan.steps)
        for step in range(self._plan.steps):
            mask = self._plan.draw_batch(rows)
            if self._plan.fixes_positions(rows):
                order = torch.arange(rows)
            else:  # rows that were not sampled pad the batch to its public size
                sampled, unsampled = mask.nonzero()[:, 0], (~mask).nonzero()[:, 0]
                order = torch.cat([sampled, unsampled])[: max(count * size, len(sampled))]
            for number, indices in enumerate(torch.split(order, size)):
                if len(indices):
                    fields = {k: pad_rows(v, size) for k, v in fields_of(indices, step).items()}
                    # Microbatches beyond the public number must not affect other agents' rounding.
                    joint = self._plan.record_counts == "public" and number < count
                    self._add_clipped(fields, pad_rows(mask[indices], size), row_loss, joint=joint)
            self._step()
            averaged = step - (self._plan.steps - averaged_steps)  # steps averaged before this one
            if averaged >= 0:
                mean = self._apply_average(mean, averaged)
        with torch.no_grad():
            for parameter, value in zip(self._optimizer.params, mean, strict=False):
                parameter.copy_(value)
        for name, weights in self._parameters.items():
            record_release(self._plan, name, weights)

    def _apply_average(self, mean: list[Tensor], averaged: int) -> list[Tensor]:
        """Add the current iterate to the mean of iterates (Polyak and Juditsky 1992).

        This is post-processing, which removes most of the noise of single steps.
        """
        iterate = [parameter.detach().clone() for parameter in self._optimizer.params]
        if not averaged:
            return iterate
        return [m.lerp_(n, 1 / (averaged + 1)) for m, n in zip(mean, iterate, strict=True)]

    def _add_clipped(
        self, fields: Mapping[str, Tensor], mask: Tensor, row_loss: RowLoss, *, joint: bool = True
    ) -> None:
        """Add the clipped gradients of a microbatch to the running float64 sum."""
        request = ClippedSum(
            row_loss, self._parameters, fields, mask, self._plan.clip_norm, joint=joint
        )
        for (net, name), total in deferred.submit(request).items():
            p: Any = self._parameters[net][name]
            if total.shape != p.shape:  # broadcasting would repeat a smaller one
                raise PrivacyError(f"the gradient of {net}.{name} has shape {total.shape}")
            p.summed_grad = total if p.summed_grad is None else p.summed_grad.add_(total)

    def _step(self) -> None:
        for parameter in self._optimizer.params:
            if parameter.summed_grad is None:  # no rows, or no loss depends on it
                parameter.summed_grad = torch.zeros_like(parameter, dtype=torch.float64)
        deferred.submit(NoisyOptimizerStep(self._optimizer, self._plan.expected_batch))
