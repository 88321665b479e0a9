"""A generator of labelled rows, trained at query agents on the teacher's predictions.

It sees no labelled row, and no label but what the noisy counts taught the teacher. So of labelled
rows its output is post-processing of the census. A conditional variational auto-encoder
(``generators/variational.py``; Sohn et al. 2015).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic.dataclasses
import torch
from torch import Tensor

from generators import ConditionalGenerator, networks_for
from generators.objectives import reconstruction_loss
from privssl.algorithms.local_ssl import Amount
from privssl.core.messages import Message, StateDict
from privssl.core.task import Task
from privssl.models import optimize_layout
from privssl.ops.precision import in_precision
from privssl.settings.schema import Count, Positive, Rate, strict


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class GeneratorConfig:
    """How the generator is trained. Numbers are ours, those of FedSSL's synthetic rows."""

    generator_rounds: Count = 0  # in the end; 0: no generator. Images have sides in fours
    generator_learning_rate: Rate = 2e-3  # Adam
    generator_width: Positive = 32  # channels of its last hidden layer; of the others twice as many
    noise_size: Positive = 16  # numbers of the noise that makes a row, and of a row's code
    weight_reconstruction: Amount = 0.0125  # of the squared error in [-1, 1]
    weight_code: Amount = 0.03  # of the cost of a row's code; of vectors also of the row given it


@dataclass(frozen=True)
class GeneratorRequest(Message):
    """Down, in the phase "generator": G, and the teacher that predicts its classes."""

    G: StateDict
    teacher: StateDict


@dataclass(frozen=True)
class GeneratorUpdate(Message):
    """Up, from a query agent: G after training."""

    G: StateDict


def build_generator(cfg: GeneratorConfig, task: Task) -> ConditionalGenerator:
    """Build an untrained generator of images or vectors."""
    kind: Any = in_precision(networks_for(task.shape, "variational")[0], task.precision)
    width, noise_size = cfg.generator_width, cfg.noise_size
    network: ConditionalGenerator = optimize_layout(
        kind(task.shape, task.classes, width=width, noise_size=noise_size)
    )
    return network


def generator_loss(
    fields: Mapping[str, Tensor], weight_reconstruction: float, weight_code: float, *,
    G: Callable[..., Any],
) -> Tensor:  # fmt: skip
    """Mean loss () of rows x (B, *shape) with classes p (B, C) and noise z (B, noise_size)."""
    x, p, z = fields["x"], fields["p"], fields["z"]
    rebuilt, cost = G(x, p, p, z, torch.ones_like(z[:, :1]), True)
    distance = reconstruction_loss(rebuilt[:, 0], x)  # of rows from their copies at lambda 1
    loss: Tensor = (weight_reconstruction * distance + weight_code * cost).mean()
    return loss
