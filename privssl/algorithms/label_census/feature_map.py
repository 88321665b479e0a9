"""The map of rows, made by query agents before any label is counted: encoder, then clusters.

Steps here take query agents and read their unlabelled rows alone. They send sums over rows, or
centroids with their counts, so the distribution of rows over agents hardly matters: it decides
which rows and patches a sample has, and the agents' own centroids.

    encoder     patches -> filters -> directions that two views of a row share    patch_encoder.py
    clusters    sums and counts of features, and a graph of cells                 clustering.py
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from privssl.algorithms.base import Algorithm, MissingReplyPolicy
from privssl.algorithms.label_census import clustering
from privssl.algorithms.label_census import patch_encoder as patches
from privssl.algorithms.label_census.patch_encoder import EncoderConfig
from privssl.algorithms.local_ssl import SelfTraining
from privssl.core.agents import QueryAgent
from privssl.core.federation import Federation
from privssl.core.messages import Message, MessageError, Reply, StateDict, check_numbers
from privssl.core.rows import IMAGE, kind_of, pooled
from privssl.core.task import Context, on_agent
from privssl.settings.schema import Positive, strict
from privssl.training import local_training

ENCODER_ROUNDS = 3  # moments of patches, filters, moments of views
AT_ONCE = 16  # agents whose sums are held at one time
ROWS_PER_CELL = 5  # at least; with fewer the graph of cells falls apart
KEPT = "features"  # an agent's memory of its rows' features while clusters are made
M = TypeVar("M", bound=Message)
S = TypeVar("S", bound="MapState")

# Messages and state -------------------------------------------------------------------------


@dataclass(frozen=True)
class Whitener(Message):
    """Down: whitening of patches; the identity before it is known."""

    whitener: Tensor  # (d, d)


@dataclass(frozen=True)
class Filters(Message):
    """Down: filters of the encoder."""

    filters: Tensor  # (F, channels, side, side)


@dataclass(frozen=True)
class Views(Message):
    """Up, from a query agent: sums over rows of responses to two views: ``compute_view_map``."""

    total: Tensor  # (D,)
    outer: Tensor  # (D, D)
    within: Tensor  # (D, D)
    count: Tensor  # (1,)


@dataclass(frozen=True)
class Map(Message):
    """Down: from a row to its cell, and from the cell to its cluster."""

    encoder: StateDict  # "filters" and "map", see patch_encoder.encode
    mean: Tensor  # (E,) of features
    centroids: Tensor  # (J, E)
    cluster: Tensor  # (J,) int64: of each cell


@dataclass(frozen=True)
class Sums(Message):
    """Up, from a query agent: sums (J, E) and numbers (J,) of its rows' features by cell.

    Or of patches: the sum of outer products and their number; or centroids with their counts.
    """

    total: Tensor
    count: Tensor


@dataclass(frozen=True)
class Graph(Message):
    """Up, from a query agent: number of rows with cell i nearest and j second (J, J)."""

    graph: Tensor


@dataclass(frozen=True)
class MapState:
    """The server's part of the map."""

    whitener: Tensor  # (d, d)
    encoder: StateDict
    mean: Tensor  # (E,) of features
    centroids: Tensor  # (J, E)
    cluster: Tensor  # (J,) int64: of each cell
    mass: Tensor  # (K,) shares of unlabelled rows in clusters
    borders: Tensor  # (K, K) number of these between two clusters


# Config -------------------------------------------------------------------------------------


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class MapConfig(EncoderConfig, SelfTraining):
    """How the map of rows is made. Numbers are ours, measured in docs/label_census.md."""

    clusters: Annotated[int, Field(ge=2)] | None = None  # K; null: LabelCensus.k
    cells: Annotated[int, Field(ge=2)] = 200  # J at most, merged into clusters; 5 rows or more each
    map_rows: Positive = 2000  # of an agent, at most, from which the map is made
    cluster_rounds: Annotated[int, Field(ge=3)] = 8  # seeds, Lloyd's steps, graph


# Rounds and steps ---------------------------------------------------------------------------


class FeatureMapRounds(Algorithm[Any]):
    """The rounds that make the map, and the cluster of a row."""

    missing_reply_policy = MissingReplyPolicy(
        needed=(
            "patch_moments", "own_filters", "view_moments", "feature_mean", "own_cells",
            "cell_sums", "cell_graph",
        )
    )  # fmt: skip
    cfg: MapConfig

    @property
    @abstractmethod
    def k(self) -> int:
        """Number of clusters, from public numbers alone."""

    @property
    def learns_features(self) -> bool:
        """Whether features are learned here, from patches; vectors and sequences have some."""
        return kind_of(self.task.shape) is IMAGE

    @property
    def _patch_shape(self) -> tuple[int, int, int]:
        """Shape of a patch."""
        channels, height, width = self.task.shape
        side = self.cfg.compute_patch_side((channels, height, width))
        return channels, side, side

    def make_initial_map(self) -> Mapping[str, Any]:
        """Fields of ``MapState`` before the first round."""
        cfg, whitener, encoder = self.cfg, torch.eye(1), dict[str, Tensor]()
        if self.learns_features:
            whitener = torch.eye(torch.Size(self._patch_shape).numel())
            encoder["filters"] = torch.zeros(cfg.filters, *self._patch_shape)
            encoder["map"] = torch.zeros(cfg.filters * cfg.places**2, self._feature_count)
        return {
            "whitener": whitener,
            "encoder": encoder,
            "mean": torch.zeros(self._feature_count),
            "centroids": torch.zeros(cfg.cells, self._feature_count),
            "cluster": torch.zeros(cfg.cells, dtype=torch.int64),
            "mass": torch.zeros(self.k),
            "borders": torch.zeros(self.k, self.k),
        }

    @property
    def _feature_count(self) -> int:
        if not self.learns_features:
            return self.task.shape[-1]
        return min(self.cfg.features, self.cfg.filters * self.cfg.places**2)

    def encoder_round(self, state: S, federation: Federation) -> S:
        """Whitening of patches, then filters, then the directions that views share."""
        match federation.round.number_in_phase:
            case 1:
                sums = _sum_over_agents(federation, self.patch_moments, Whitener(state.whitener))
                if sums is None:
                    return state
                return replace(
                    state, whitener=patches.compute_whitener(sums["total"], sums["count"])
                )
            case 2:
                request = Whitener(state.whitener)
                messages = get_payloads(
                    federation.call_all(federation.query, self.own_filters, request)
                )
                if not messages:
                    return state
                vectors = self._merge_centroids(
                    messages, self.cfg.filters, federation.rng("filters")
                )
                filters = patches.make_filters(vectors, state.whitener, self._patch_shape)
                return replace(state, encoder={**state.encoder, "filters": filters})
        views = _sum_over_agents(federation, self.view_moments, Filters(state.encoder["filters"]))
        if views is None:
            return state
        vectors = patches.compute_view_map(**views, features=self.cfg.features)
        return replace(state, encoder={**state.encoder, "map": vectors})

    def cluster_round(self, state: S, federation: Federation) -> S:
        """k-means: mean and seeds, then Lloyd's steps; in the last round cells are merged."""
        number = federation.round.number_in_phase
        if number == 1:
            return self._seed_centroids(state, federation)
        if number < self.cfg.cluster_rounds:
            sums = _sum_over_agents(federation, self.cell_sums, make_map(state))
            if sums is None:
                return state
            return replace(state, centroids=clustering.update_centroids(state.centroids, **sums))
        sums = _sum_over_agents(federation, self.cell_graph, make_map(state))
        if sums is None:
            return state
        seed = int(torch.randint(2**31, (), generator=federation.rng("cuts")))
        cells = clustering.count_cells(state.centroids)
        merged = clustering.merge_cells(sums["graph"][:cells, :cells], self.k, seed)
        cluster = pad(merged, (0, self.cfg.cells - cells))  # spare cells have no rows
        mass, borders = clustering.cluster_shares_and_adjacency(sums["graph"], cluster, self.k)
        return replace(state, cluster=cluster, mass=mass, borders=borders)

    def _seed_centroids(self, state: S, federation: Federation) -> S:
        sums = _sum_over_agents(federation, self.feature_mean, make_map(state))
        if sums is None:
            return state
        state = replace(state, mean=sums["total"][0] / sums["count"])
        messages = get_payloads(
            federation.call_all(federation.query, self.own_cells, make_map(state))
        )
        if not messages:
            return state
        full_cells = int(sums["count"] / ROWS_PER_CELL)
        cells = min(self.cfg.cells, max(self.k, full_cells))
        centroids = self._merge_centroids(messages, cells, federation.rng("seeds"))
        return replace(state, centroids=clustering.pad_centroids(centroids, self.cfg.cells))

    def _merge_centroids(self, messages: Sequence[Sums], k: int, rng: torch.Generator) -> Tensor:
        """k centroids of the agents' centroids, weighted by their counts."""
        points = torch.cat([message.total for message in messages])
        return clustering.k_means(
            points, torch.cat([message.count for message in messages]), k, rng
        )[0]

    # Steps ----------------------------------------------------------------------------------

    @on_agent
    def patch_moments(self, agent: QueryAgent, msg: Whitener, ctx: Context) -> Sums:
        """Sum of outer products (d, d) and number (1,) of patches."""
        sample = self._sample_patches(agent, ctx)
        return Sums(sample.T @ sample * _weigh_sample(agent, sample), _count_rows(agent))

    @on_agent
    def own_filters(self, agent: QueryAgent, msg: Whitener, ctx: Context) -> Sums:
        """Centroids of the agent's whitened patches, and the rows that each represents."""
        points = patches.whiten(self._sample_patches(agent, ctx), msg.whitener)
        k = min(self.cfg.filters, len(points))
        centroids, count = clustering.k_means(
            points, torch.ones(len(points)), k, ctx.rng("filters")
        )
        return Sums(centroids, count * _weigh_sample(agent, points))

    def _sample_patches(self, agent: QueryAgent, ctx: Context) -> Tensor:
        x = local_training.network_input(self._select_map_rows(agent))
        return patches.sample_patches(x, self._patch_shape[1], self.cfg.patches, ctx.rng("patches"))

    @on_agent
    def view_moments(self, agent: QueryAgent, msg: Filters, ctx: Context) -> Views:
        """Sums over rows of the responses to two views."""
        x = local_training.network_input(self._select_map_rows(agent), ctx.device)
        filters, view = msg.filters.to(ctx.device), self.cfg.augmentation()
        first, second = (
            patches.compute_responses(view(x, ctx.rng(name)), filters, self.cfg.places)
            for name in ("view 1", "view 2")
        )
        weight, difference = _weigh_sample(agent, x), first - second
        return Views(
            total=(first + second).sum(dim=0).cpu() * weight,
            outer=(first.T @ first + second.T @ second).cpu() * weight,
            within=(difference.T @ difference).cpu() * weight,
            count=_count_rows(agent),
        )

    @on_agent
    def feature_mean(self, agent: QueryAgent, msg: Map, ctx: Context) -> Sums:
        """Sum (1, E) and number (1,) of the features of all rows, which the agent remembers."""
        features = self._compute_features(self._select_map_rows(agent), msg, ctx.device)
        agent.memory = {**agent.memory, KEPT: features}
        total = features.sum(dim=0, keepdim=True) * _weigh_sample(agent, features)
        return Sums(total, _count_rows(agent))

    @on_agent
    def own_cells(self, agent: QueryAgent, msg: Map, ctx: Context) -> Sums:
        """Centroids of the agent's k-means, and the number of rows of each."""
        points = self._recall_points(agent, msg, ctx)
        k = min(self.cfg.cells, len(points))
        centroids, count = clustering.k_means(points, torch.ones(len(points)), k, ctx.rng("seeds"))
        return Sums(centroids, count * _weigh_sample(agent, points))

    @on_agent
    def cell_sums(self, agent: QueryAgent, msg: Map, ctx: Context) -> Sums:
        """One step of Lloyd's algorithm on the agent's rows."""
        points = self._recall_points(agent, msg, ctx)
        total, count = clustering.sum_by_centroid(points, msg.centroids)
        return Sums(
            total * _weigh_sample(agent, points),
            count * _weigh_sample(agent, points),
        )

    @on_agent
    def cell_graph(self, agent: QueryAgent, msg: Map, ctx: Context) -> Graph:
        """Numbers of the agent's rows between two cells."""
        points = self._recall_points(agent, msg, ctx)
        agent.memory = {name: value for name, value in agent.memory.items() if name != KEPT}
        return Graph(
            clustering.count_neighbours(points, msg.centroids) * _weigh_sample(agent, points)
        )

    def _select_map_rows(self, agent: QueryAgent) -> Tensor:
        """The rows from which the map is made: all, or evenly spaced ones, the same every time."""
        x = agent.unlabelled.x
        return x[:: max(1, -(-len(x) // self.cfg.map_rows))]

    # Features -------------------------------------------------------------------------------

    def _compute_features(self, x: Tensor, msg: Map, device: torch.device) -> Tensor:
        """Features (N, E) of stored rows, on the CPU."""
        if not self.learns_features:
            return pooled(local_training.network_input(x))
        encoder = {name: value.to(device) for name, value in msg.encoder.items()}
        return patches.encode(
            local_training.network_input(x, device), encoder, self.cfg.places
        ).cpu()

    def _recall_points(self, agent: QueryAgent, msg: Map, ctx: Context) -> Tensor:
        """Points (N, E) of the rows from which the map is made."""
        features = agent.memory.get(KEPT)
        if features is None:  # the agent missed feature_mean
            return self.compute_points(self._select_map_rows(agent), msg, ctx.device)
        return clustering.center_and_normalize(features, msg.mean)

    def compute_points(self, x: Tensor, msg: Map, device: torch.device) -> Tensor:
        """Centred and normalised features (N, E) of stored rows, for k-means."""
        return clustering.center_and_normalize(self._compute_features(x, msg, device), msg.mean)

    def check_map(self, msg: Map) -> None:
        """Raise MessageError unless shapes, types and cluster numbers fit the config."""
        expected = self.make_initial_map()
        wrong = [
            name for name in ("encoder", "mean", "centroids", "cluster")
            if _get_shapes_and_dtypes(getattr(msg, name)) != _get_shapes_and_dtypes(expected[name])
        ]  # fmt: skip
        if not wrong and not 0 <= int(msg.cluster.min()) <= int(msg.cluster.max()) < self.k:
            wrong = ["cluster"]
        if wrong:
            raise MessageError(
                f"a map with {' and '.join(wrong)} of another form than this census's"
            )

    def cluster_of(self, x: Tensor, msg: Map, ctx: Context) -> Tensor:
        """The cluster of each stored row (N,)."""
        return msg.cluster[
            clustering.find_nearest_centroids(
                self.compute_points(x, msg, ctx.device), msg.centroids
            )
        ]


def make_map(state: MapState) -> Map:
    """The map as a message."""
    return Map(state.encoder, state.mean, state.centroids, state.cluster)


def get_payloads(replies: Sequence[Reply[M]]) -> list[M]:
    """The payloads of the agents that did not decline."""
    return [reply.payload for reply in replies if not reply.declined]


def _sum_over_agents(
    federation: Federation, step: Callable[..., M], message: Message
) -> dict[str, Tensor] | None:
    """The sum of each field over query agents; None where all declined.

    A few agents at a time, because their messages may be large.

    Raises:
        MessageError: the sum is not finite.
    """
    total: dict[str, Tensor] | None = None
    for start in range(0, len(federation.query), AT_ONCE):
        agents = federation.query[start : start + AT_ONCE]
        for payload in get_payloads(federation.call_all(agents, step, message)):
            total = {k: v if total is None else total[k] + v for k, v in vars(payload).items()}
    for name, value in (total or {}).items():
        check_numbers(f"the sum of {name}", value)
    return total


def _weigh_sample(agent: QueryAgent, sample: Tensor) -> float:
    """Number of the agent's rows for each of a sample."""
    return len(agent.unlabelled) / len(sample)


def _count_rows(agent: QueryAgent) -> Tensor:
    """Number of rows of an agent (1,)."""
    return torch.tensor([float(len(agent.unlabelled))])


def _get_shapes_and_dtypes(value: Tensor | StateDict) -> Any:
    """Shape and type, of a tensor or by name."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return {name: _get_shapes_and_dtypes(part) for name, part in value.items()}
