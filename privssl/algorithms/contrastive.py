"""What an encoder learns from without labels: two views of a row must look alike.

    NT-Xent      views of one row attract, all other rows repel (Chen et al., ICML 2020, Eq. 1)
    IIC          cluster heads: mutual information of both views' clusters
                 (Ji, Henriques, Vedaldi, ICCV 2019, Eq. 3 to 5)

The second spreads rows over a few clusters of equal size, which is what k-means is to find
afterwards; the first fills the features with everything else that tells rows apart.
"""

import math
from typing import Annotated

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, relu

from privssl import learn
from privssl.agents import QueryAgent
from privssl.algorithms.base import Context
from privssl.data.augment import Augmentation
from privssl.settings import Positive, Rate, strict

FEATURES = 128  # what the encoder gives for a row
TINY = 1e-9  # below any probability that matters; keeps its logarithm finite


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class EncoderTraining:
    """How the encoder is trained. Numbers are ours, measured in docs/label_census.md."""

    encoder_rounds: Positive = 250
    # Steps one after another are what an encoder needs; more agents only widen the average.
    encoder_agents: Positive = 1  # drawn in each round
    encoder_steps: Positive = 20  # of an agent in a round
    encoder_batch_size: Annotated[int, Field(ge=2)] = 96
    encoder_learning_rate: Rate = 2e-3  # Adam; falls to 0 along a cosine
    temperature: Rate = 0.4  # of NT-Xent
    projection: Positive = 64  # length of what NT-Xent compares
    heads: tuple[Annotated[int, Field(ge=2)], ...] = (10, 20, 50)  # clusters of the IIC heads
    cluster_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.3  # of IIC

    def encoder_rate(self, round_number: int) -> float:
        """Learning rate in a round, counted from 1."""
        done = (round_number - 1) / self.encoder_rounds
        return self.encoder_learning_rate * (1 + math.cos(math.pi * done)) / 2


class Encoder(nn.Module):
    """A classifier's body as an encoder, with the heads that it learns through.

    Its output, features (B, E) >= 0, is what is clustered afterwards; heads serve training alone.
    """

    def __init__(self, body: nn.Module, cfg: EncoderTraining) -> None:
        """``body``: network from (B, *shape) to (B, E)."""
        super().__init__()
        self.body = body
        self.projector = nn.Linear(FEATURES, cfg.projection)
        self.heads = nn.ModuleList(nn.Linear(FEATURES, clusters) for clusters in cfg.heads)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.body(x))

    def loss(self, x1: Tensor, x2: Tensor, cfg: EncoderTraining) -> Tensor:
        """Of a batch seen twice, x1 and x2 (B, *shape), B >= 2: a scalar."""
        features = self(torch.cat([x1, x2]))
        z1, z2 = self.projector(features).chunk(2)
        loss = nt_xent(z1, z2, cfg.temperature)
        if len(self.heads) and cfg.cluster_weight:
            told = [mutual_information(*h(features).softmax(dim=1).chunk(2)) for h in self.heads]
            loss = loss - cfg.cluster_weight * torch.stack(told).mean()
        return loss


def learn_views(
    encoder: Encoder, agent: QueryAgent, cfg: EncoderTraining, rate: float, view: Augmentation,
    ctx: Context,
) -> float:  # fmt: skip
    """One visit's training of an encoder on an agent's unlabelled rows; the mean loss."""
    group = learn.AdamGroup(encoder, rate, (0.9, 0.99))
    adam = learn.KeptAdam({"encoder": group}, agent.memory, "encoder")
    rows, size = agent.unlabelled, cfg.encoder_batch_size
    picked = learn.draw_rows(len(rows), cfg.encoder_steps * size, ctx.rng("rows"))
    x = learn.network_input(rows.x[picked], ctx.device)
    fields = {"one": view(x, ctx.rng("view 1")), "two": view(x, ctx.rng("view 2"))}
    loss = learn.fit(adam, fields, size, lambda b: encoder.loss(b["one"], b["two"], cfg))
    agent.memory = {**agent.memory, **adam.remember()}
    return loss


def nt_xent(z1: Tensor, z2: Tensor, temperature: float) -> Tensor:
    """Mean of -log softmax(cos(z_i, .) / temperature) at the other view of i, over 2B views.

    Args:
        z1, z2: (B, P), row i of both are views of one row; B >= 2.
        temperature: > 0.
    """
    z = normalize(torch.cat([z1, z2]), dim=1)  # (2B, P)
    alike = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    rows = len(z1)
    other = torch.arange(2 * rows, device=z.device).roll(rows)
    return cross_entropy(alike, other)


def mutual_information(p1: Tensor, p2: Tensor) -> Tensor:
    """I(cluster of view 1; cluster of view 2), in nats, of a batch; at most log K.

    Args:
        p1, p2: (B, K) probabilities of clusters, row i of both are of one row.
    """
    joint = p1.T @ p2 / len(p1)  # (K, K)
    joint = ((joint + joint.T) / 2).clamp(min=TINY)
    rows, columns = joint.sum(dim=1, keepdim=True), joint.sum(dim=0, keepdim=True)
    return (joint * (joint.log() - rows.log() - columns.log())).sum()
