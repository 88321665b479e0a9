"""Arguments of steps beside agent and message: context and task."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from privssl.core.rows import Shape
from privssl.ops.precision import Precision
from privssl.runtime import randomness

StepT = TypeVar("StepT")
NetworkFactory = Callable[[], nn.Module]  # builds an untrained network


def on_agent(step: StepT) -> StepT:
    """Mark a step, a method that runs at the agent: (self, agent, message, ctx) -> Message."""
    step.runs_on_agent = True  # type: ignore[attr-defined]
    return step


class LabelMeter(Protocol):
    """Receives pseudo-labels and returns nothing: steps can report but not read."""

    def observe(self, ids: Tensor, labels: Tensor, kept: Tensor) -> None: ...


@dataclass
class Context:
    """A step's context."""

    seed: int
    round: int
    agent: str
    visit_key: str
    session_id: str  # of this process: a step run again after a crash is charged again
    device: torch.device
    telemetry: bool = True
    meter: LabelMeter | None = None
    weight: float = 1.0
    metrics: dict[str, float] = field(default_factory=dict)

    def rng(self, purpose: str) -> torch.Generator:
        """Return the generator for one purpose in this step; different steps have different
        generators."""
        return randomness.stream(self.seed, self.round, self.agent, f"{self.visit_key}:{purpose}")

    @property
    def charge_id(self) -> str:
        """The unique id of this step's charge to an account."""
        return f"{self.visit_key}@{self.session_id}"

    def log_metric(self, name: str, value: float) -> None:
        """Log a number under a name such as ``train/loss``; dropped for rows with an account.

        Raises:
            TypeError: it is not a number or a tensor with one number.
        """
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not isinstance(number, int | float | np.number):
            kind = type(value).__name__
            raise TypeError(f"log_metric got a {kind} for {name}. Give a number, such as a mean")
        if self.telemetry:
            self.metrics[name] = number if isinstance(number, int) else float(number)

    def pseudo_labels(self, ids: Tensor, probs: Tensor, kept: Tensor | None = None) -> None:
        """Report pseudo-labels for coverage and accuracy: ids (B,), probs (B, C), kept (B,)."""
        if self.telemetry and self.meter is not None:
            all_rows = torch.ones(len(ids), dtype=torch.bool)
            self.meter.observe(ids, probs.argmax(dim=1).cpu(), all_rows if kept is None else kept)


@dataclass(frozen=True)
class Task:
    """The learning task: shape of a row, classes, and the classifier's network.

    ``shape`` is of one of the kinds in ``core/rows.py``. ``new_classifier`` builds an untrained F
    whose input is (B, *shape) as ``rows.network_input`` makes it, and whose output is (B, classes)
    logits, with initial weights from torch's global generator. ``precision`` also applies to an
    algorithm's own networks. ``narrow_classifier`` builds F with a share (0, 1] of its channels;
    None: its width is fixed.
    """

    classes: int
    shape: Shape
    new_classifier: NetworkFactory
    precision: Precision = "float32"
    narrow_classifier: Callable[[float], nn.Module] | None = None


@dataclass(frozen=True)
class Phase:
    """A named sequence of rounds."""

    name: str
    rounds: int
    saved: bool = False  # force a checkpoint after its last round
