"""What query agents learn together before anybody asks for a label: an encoder and its clusters.

Nothing in this file can read a label: its steps take query agents and use their unlabelled rows.

    encoder     one agent a round trains it on two views of each row        contrastive.py
    clusters    all agents send sums and counts of features                 clusters.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor

from privssl import learn
from privssl.agents import QueryAgent
from privssl.algorithms.base import Algorithm, Context, Task, on_agent
from privssl.algorithms.clusters import (
    joined,
    k_means,
    mass_and_borders,
    moved,
    nearest,
    neighbours,
    on_sphere,
    sums,
)
from privssl.algorithms.contrastive import FEATURES, Encoder, EncoderTraining, learn_views
from privssl.algorithms.local_ssl import SelfTraining
from privssl.messages import Message, MessageError, Reply, StateDict, average
from privssl.settings import Positive, strict
from privssl.world import World

CHUNK = 512  # rows of one forward pass without gradient
M = TypeVar("M", bound=Message)
S = TypeVar("S", bound="MapState")

# What travels -------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncoderLesson(Message):
    """Down: the encoder, and the learning rate of this round."""

    encoder: StateDict
    learning_rate: float


@dataclass(frozen=True)
class TrainedEncoder(Message):
    """Up, from a query agent: the encoder after local training."""

    encoder: StateDict


@dataclass(frozen=True)
class Map(Message):
    """Down: how a row finds its cell, and the cell its cluster."""

    encoder: StateDict
    mean: Tensor  # (E,) of features
    centroids: Tensor  # (J, E)
    cluster: Tensor  # (J,) int64: of each cell


@dataclass(frozen=True)
class Sums(Message):
    """Up, from a query agent: sums (J, E) and numbers (J,) of its rows' features by cell."""

    total: Tensor
    count: Tensor


@dataclass(frozen=True)
class Graph(Message):
    """Up, from a query agent: how many rows have cell i nearest and j second (J, J)."""

    graph: Tensor


@dataclass(frozen=True)
class MapState:
    """What the server keeps of it."""

    encoder: StateDict
    mean: Tensor  # (E,) of features
    centroids: Tensor  # (J, E)
    cluster: Tensor  # (J,) int64: of each cell
    mass: Tensor  # (K,) shares of unlabelled rows in clusters
    borders: Tensor  # (K, K) how many of these lie between two clusters


# Config -------------------------------------------------------------------------------------


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class MapConfig(EncoderTraining, SelfTraining):
    """How the map of rows is made. Numbers are ours, measured in docs/label_census.md."""

    clusters: Annotated[int, Field(ge=2)] | None = None  # K; null: twice the classes
    cells: Annotated[int, Field(ge=2)] = 200  # J, of which clusters are joined
    cluster_rows: Positive = 2000  # of an agent, at most, that cells are placed by
    cluster_rounds: Annotated[int, Field(ge=3)] = 8  # seeds, Lloyd's steps, graph


# Rounds and steps ---------------------------------------------------------------------------


class MapsRows(Algorithm[Any]):
    """The rounds that make the map, and how a row is found on it."""

    cfg: MapConfig

    def __init__(self, config: Any, task: Task, plan: Any = None) -> None:
        super().__init__(config, task, plan)
        self._encoder = self._new_encoder()

    def _new_encoder(self) -> Encoder:
        assert self.task.new_body is not None
        return Encoder(self.task.new_body(FEATURES), self.cfg)

    @property
    def _k(self) -> int:
        return self.cfg.clusters or 2 * self.task.classes

    def first_map(self, world: World) -> Mapping[str, Any]:
        """Fields of ``MapState`` before the first round."""
        return {
            "encoder": learn.fresh_weights(self._new_encoder, world.rng("init encoder")),
            "mean": torch.zeros(FEATURES),
            "centroids": torch.zeros(self.cfg.cells, FEATURES),
            "cluster": torch.zeros(self.cfg.cells, dtype=torch.int64),
            "mass": torch.zeros(self._k),
            "borders": torch.zeros(self._k, self._k),
        }

    def encoder_round(self, state: S, world: World) -> S:
        """A few agents train the encoder, each from where it stands; their average is the next."""
        rate = self.cfg.encoder_rate(world.round.number_in_phase)
        taking_part = world.sample(world.query, self.cfg.encoder_agents)
        replies = world.ask_each(taking_part, self.encoder_pass, EncoderLesson(state.encoder, rate))
        return replace(state, encoder=average(replies, "encoder", otherwise=state.encoder))

    def cluster_round(self, state: S, world: World) -> S:
        """k-means: mean and seeds first, then Lloyd's steps; last, cells are joined to clusters."""
        number = world.round.number_in_phase
        if number == 1:
            return self._seeded(state, world)
        if number < self.cfg.cluster_rounds:
            sent = said(world.ask_each(world.query, self.cell_sums, map_of(state)))
            if not sent:
                return state
            total, count = summed(sent, "total"), summed(sent, "count")
            return replace(state, centroids=moved(state.centroids, total, count))
        told = said(world.ask_each(world.query, self.cell_graph, map_of(state)))
        if not told:
            return state
        graph = summed(told, "graph")
        seed = int(torch.randint(2**31, (), generator=world.rng("cuts")))
        cluster = joined(graph, self._k, seed)
        mass, borders = mass_and_borders(graph, cluster, self._k)
        return replace(state, cluster=cluster, mass=mass, borders=borders)

    def _seeded(self, state: S, world: World) -> S:
        told = said(world.ask_each(world.query, self.feature_mean, map_of(state)))
        if not told:
            return state
        state = replace(state, mean=summed(told, "total")[0] / summed(told, "count"))
        seen = said(world.ask_each(world.query, self.own_cells, map_of(state)))
        if not seen:
            return state
        points = torch.cat([one.total for one in seen])
        weight = torch.cat([one.count for one in seen])
        centroids, _ = k_means(points, weight, self.cfg.cells, world.rng("seeds"))
        return replace(state, centroids=centroids)

    # Steps ----------------------------------------------------------------------------------

    @on_agent
    def encoder_pass(self, agent: QueryAgent, msg: EncoderLesson, ctx: Context) -> TrainedEncoder:
        """Learn to see that two views are of one row."""
        rows = agent.unlabelled
        ctx.weight = float(len(rows))
        encoder = self._encoder.to(ctx.device)
        learn.load(encoder, msg.encoder)
        loss = learn_views(
            encoder, agent, self.cfg, msg.learning_rate, self.cfg.augmentation(), ctx
        )
        ctx.note("train/loss_encoder", loss)
        return TrainedEncoder(learn.weights_of(encoder))

    @on_agent
    def feature_mean(self, agent: QueryAgent, msg: Map, ctx: Context) -> Sums:
        """Sum (1, E) and number (1,) of the features of all rows."""
        features = self._features(self._some(agent), msg, ctx.device)
        return Sums(features.sum(dim=0, keepdim=True), torch.tensor([float(len(features))]))

    @on_agent
    def own_cells(self, agent: QueryAgent, msg: Map, ctx: Context) -> Sums:
        """Centroids of the agent's own k-means, and how many rows each has."""
        points = self.points(self._some(agent), msg, ctx.device)
        few = min(self.cfg.cells, len(points))
        return Sums(*k_means(points, torch.ones(len(points)), few, ctx.rng("seeds")))

    @on_agent
    def cell_sums(self, agent: QueryAgent, msg: Map, ctx: Context) -> Sums:
        """One step of Lloyd's algorithm on the agent's rows."""
        return Sums(*sums(self.points(self._some(agent), msg, ctx.device), msg.centroids))

    @on_agent
    def cell_graph(self, agent: QueryAgent, msg: Map, ctx: Context) -> Graph:
        """Which cells the agent's rows lie between."""
        return Graph(neighbours(self.points(self._some(agent), msg, ctx.device), msg.centroids))

    def _some(self, agent: QueryAgent) -> Tensor:
        """The rows by which cells are placed: all, or evenly spaced ones, the same every time."""
        x = agent.unlabelled.x
        return x[:: max(1, -(-len(x) // self.cfg.cluster_rows))]

    # Features -------------------------------------------------------------------------------

    @torch.no_grad()
    def _features(self, x: Tensor, msg: Map, device: torch.device) -> Tensor:
        """Of stored rows: (N, E) on the CPU."""
        encoder = learn.load(self._encoder.to(device), msg.encoder).eval()
        parts = [encoder(learn.network_input(part, device)).cpu() for part in torch.split(x, CHUNK)]
        return torch.cat(parts) if parts else torch.zeros(0, FEATURES)

    def points(self, x: Tensor, msg: Map, device: torch.device) -> Tensor:
        """Of stored rows: where k-means sees them (N, E)."""
        return on_sphere(self._features(x, msg, device), msg.mean)

    def check_map(self, msg: Map) -> None:
        """Refuse a map of another form than this algorithm's own.

        Raises:
            MessageError: shapes, types or numbers of clusters are not those of the config.
        """
        own = self._encoder.state_dict()
        right = {
            "encoder": {k: (v.shape, v.dtype) for k, v in msg.encoder.items()}
            == {k: (v.shape, v.dtype) for k, v in own.items()},
            "mean": (msg.mean.shape, msg.mean.dtype) == ((FEATURES,), torch.float32),
            "centroids": (msg.centroids.shape, msg.centroids.dtype)
            == ((self.cfg.cells, FEATURES), torch.float32),
            "cluster": (msg.cluster.shape, msg.cluster.dtype) == ((self.cfg.cells,), torch.int64)
            and 0 <= int(msg.cluster.min()) <= int(msg.cluster.max()) < self._k,
        }
        wrong = [name for name, good in right.items() if not good]
        if wrong:
            raise MessageError(f"a map whose {' and '.join(wrong)} is not that of this census")

    def cluster_of(self, x: Tensor, msg: Map, ctx: Context) -> Tensor:
        """The cluster of each stored row (N,)."""
        return msg.cluster[nearest(self.points(x, msg, ctx.device), msg.centroids)]


def map_of(state: MapState) -> Map:
    """The map as it travels."""
    return Map(state.encoder, state.mean, state.centroids, state.cluster)


def said(replies: Sequence[Reply[M]]) -> list[M]:
    """What those who were not silent sent."""
    return [reply.said for reply in replies if not reply.silent]


def summed(sent: Sequence[Message], field: str) -> Tensor:
    """The sum of one field over agents, in the order of the roster."""
    return torch.stack([getattr(one, field) for one in sent]).sum(dim=0)
