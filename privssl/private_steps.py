"""What a step of DP-SGD asks for: sums of clipped gradients, and a step down them with noise.

``privacy.PrivateTraining`` asks, through ``together.ask``. Alone, it is done here as it is asked;
side by side with other agents it is done in ``private_stacks.py``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from privssl.clipping import PerExampleGradients, clipped_sums
from privssl.layer_gradients import Key
from privssl.row_gradients import Parameters, RowLoss, factored_gradients

if TYPE_CHECKING:
    from privssl.noisy_steps import SecureNoise


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
