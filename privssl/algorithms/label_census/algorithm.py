"""Label census: labels are released once, as counts, and never train a network (ours).

Nothing that depends on a label moves a weight at a support agent. Query agents make an encoder
without labels and cut its features into K clusters; each support agent then answers one question,
once: how many of my records of each class lie in each cluster? It adds noise to every count.
Query agents train the classifier on what the counts say, then on their own growing confidence.

    encoder         query agents: what two views of a row share
    algorithms/label_census/feature_map.py
    clusters        query agents: sums and counts of features
    algorithms/label_census/feature_map.py
    census          support agents: K x C counts + discrete Laplace noise         answer
    votes           server: class of each cluster from the counts
                    algorithms/label_census/cluster_labels.py query agents: F on these classes
    self-training   query agents: F on the guesses of its own moving average, times
                    how often rows of that cluster are of that class

Privacy: one record changes one count by one, so an answer is epsilon-DP with delta 0 against
blanking a record, their number being public. No weights leave a support agent, and the map that
reaches it comes from unlabelled rows alone. docs/label_census.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, final

import numpy as np
import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor, nn

from accounting.errors import BudgetExhausted
from privssl.algorithms.base import MissingReplyPolicy
from privssl.algorithms.label_census.cluster_labels import class_given_cluster, class_posterior
from privssl.algorithms.label_census.feature_map import (
    ENCODER_ROUNDS,
    KEPT,
    FeatureMapRounds,
    Map,
    MapConfig,
    MapState,
    map_of,
    payloads,
)
from privssl.algorithms.local_ssl import needs_unlabelled, no_statistics
from privssl.core.agents import QueryAgent, SupportAgent
from privssl.core.aggregation import WeightedMean
from privssl.core.federation import Federation
from privssl.core.messages import BUDGET_EXHAUSTED, Ack, Declined, Message, MessageError, StateDict
from privssl.core.task import Context, Phase, Task, on_agent
from privssl.privacy.label_histogram import CensusPlan
from privssl.reporting.figures import census_plot
from privssl.settings.schema import Positive, Problem, strict
from privssl.training import local_training
from privssl.training.batched.deferred import batched_call
from privssl.training.losses import soft_label_loss
from privssl.training.pseudo_labels import guess_labels

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]

CLUSTER = "cluster"  # of each of its rows, in an agent's memory
CLEAR = 16 * (1 - 1e-5)  # epsilon x labels of a class above which counts can be read; rounded down
NO_CLUSTERS = Declined("was not there when rows were put into clusters")

# What travels -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Census(Message):
    """Up, from a support agent, once: labelled rows by cluster and class (K, C), with noise."""

    census: Tensor


@dataclass(frozen=True)
class PseudoLabelRequest(Message):
    """Down, in votes: what clusters are called, and the classifier."""

    classes: Tensor  # (K, C) probability of each class
    F: StateDict
    learning_rate: float


@dataclass(frozen=True)
class SelfTrainingRequest(PseudoLabelRequest):
    """Down, in self-training: the teacher as well, whose guesses F learns."""

    teacher: StateDict


@dataclass(frozen=True)
class ClusterClassifierUpdate(Message):
    """Up, from a query agent: the classifier after local training."""

    F: StateDict


@dataclass(frozen=True)
class LabelCensusState(MapState):
    """What the server keeps between rounds."""

    F: StateDict
    teacher: StateDict  # moving average of F; is evaluated and released
    histogram: Tensor  # (K, C) int64, sum of the answers
    classes: Tensor  # (K, C) probability of each class to be a cluster's
    answers: int = 0  # support agents that answered


# Config -------------------------------------------------------------------------------------


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class LabelCensusConfig(MapConfig):
    """Section ``algorithm`` for the label census. All of it is fixed before a label is read."""

    name: Literal["label_census"] = "label_census"
    vote_rounds: Positive = 16
    self_training_rounds: Positive = 40
    purity: Annotated[float, Field(gt=0.5, lt=1)] = 0.9  # expected of a cluster
    balanced: bool = True  # whether classes are expected to be equally frequent
    coupling: Amount = 8.0  # log odds that a cluster takes over from its neighbours
    local_steps: Positive = 10
    batch_size: Positive = 64

    @property
    def rounds(self) -> int:
        """Of all phases."""
        return (
            ENCODER_ROUNDS + self.cluster_rounds + 1
            + self.vote_rounds + self.self_training_rounds
        )  # fmt: skip


# The algorithm ------------------------------------------------------------------------------


@final
class LabelCensus(FeatureMapRounds):
    """One question to every support agent; all training at query agents."""

    Config = LabelCensusConfig
    StateType = LabelCensusState
    # The map is made once, of sums, and who has no clusters trains in no round: stopping costs
    # nothing, going on would. A table that was lost is never made again: the others are enough,
    # if so many are asked for (``_census_round`` counts them).
    missing_reply_policy = MissingReplyPolicy(
        quorum=("answer", "vote_pass", "self_training_pass"),
        needed=(*FeatureMapRounds.missing_reply_policy.needed, "find_clusters"),
        needed_because="the map of rows is made once for the whole run, and stays without those "
        "who are away. Nothing is lost: go on with --resume when all are back",
    )
    can_be_private = True
    mechanism = "census"
    plan: CensusPlan | None
    cfg: LabelCensusConfig

    def __init__(self, config: LabelCensusConfig, task: Task, plan: Any = None) -> None:
        super().__init__(config, task, plan)
        self._F = task.new_classifier()

    @property
    def k(self) -> int:
        """Number of clusters: twice the classes, or as many where noise would drown their counts.

        By epsilon, the classes and the declared number of labels; by nothing that is private.
        """
        classes = self.task.classes
        if self.cfg.clusters is not None or self.plan is None:
            return self.cfg.clusters or 2 * classes
        drowned = self.plan.epsilon * self.plan.rows / classes < CLEAR
        return classes if drowned else 2 * classes

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        yield from needs_unlabelled(config)
        yield from no_statistics(config)

    def networks(self) -> dict[str, nn.Module]:
        return {"F": self._F}

    def check_private(self) -> None:
        """No network is trained on labelled rows, so none can mix them."""

    def phases(self) -> tuple[Phase, ...]:
        return (
            Phase("encoder", ENCODER_ROUNDS),
            Phase("clusters", self.cfg.cluster_rounds),
            Phase("census", 1, saved=True),
            Phase("votes", self.cfg.vote_rounds),
            Phase("self-training", self.cfg.self_training_rounds),
        )

    def start(self, federation: Federation) -> LabelCensusState:
        F = local_training.fresh_weights(self.task.new_classifier, federation.rng("init F"))
        k, classes = self.k, self.task.classes
        return LabelCensusState(
            **self.first_map(), F=F, teacher=F,
            histogram=torch.zeros(k, classes, dtype=torch.int64),
            classes=torch.full((k, classes), 1 / classes),
        )  # fmt: skip

    def round(self, state: LabelCensusState, federation: Federation) -> LabelCensusState:
        match federation.round.phase:
            case "encoder":
                return self.encoder_round(state, federation)
            case "clusters":
                return self.cluster_round(state, federation)
            case "census":
                return self._census_round(state, federation)
        return self._training_round(state, federation)

    def _census_round(self, state: LabelCensusState, federation: Federation) -> LabelCensusState:
        # First, because an answer is given once, and all this can fail: it may not lie between the
        # answers and the checkpoint that keeps them.
        federation.call_all(federation.query, self.find_clusters, map_of(state))
        asked = () if self.plan is not None and not self.plan.visits else federation.support
        answers = payloads(federation.call_all(asked, self.answer, map_of(state)))
        if not answers:
            return state
        table = (self.k, self.task.classes)
        for told in answers:
            if told.census.shape != table or told.census.dtype != torch.int64:
                raise MessageError(
                    f"a census is a table of {table} whole numbers, and one that came is of "
                    f"{tuple(told.census.shape)}, {told.census.dtype}"
                )
        histogram = torch.stack([told.census for told in answers]).sum(dim=0)
        labels = float(histogram.sum())  # exact where there is no plan, else promised
        if self.plan is not None:
            labels = self.plan.rows * len(answers) / len(federation.support)
        classes = class_posterior(
            histogram, state.mass, labels, agents=len(answers),
            epsilon=None if self.plan is None else self.plan.epsilon,
            purity=self.cfg.purity, balanced=self.cfg.balanced,
            borders=state.borders, coupling=self.cfg.coupling,
        )  # fmt: skip
        return replace(state, histogram=histogram, classes=classes, answers=len(answers))

    def _training_round(self, state: LabelCensusState, federation: Federation) -> LabelCensusState:
        """One round of training F: on the clusters' classes, later on the teacher's guesses."""
        if not state.answers:
            return state  # no label was released: there is nothing to learn from
        F, rate, number = state.F, self.cfg.learning_rate, federation.round.number_in_phase
        taking_part = federation.sample(federation.query, self.cfg.query_per_round)
        learned = WeightedMean("F")
        if federation.round.phase == "votes":
            votes = PseudoLabelRequest(state.classes, F, rate)
            federation.call_all(taking_part, self.vote_pass, votes, aggregator=learned)
        else:
            lesson = SelfTrainingRequest(state.classes, F, rate, state.teacher)
            federation.call_all(taking_part, self.self_training_pass, lesson, aggregator=learned)
            number += self.cfg.vote_rounds
        F = learned.value_or(F)
        teacher = local_training.moving_average(state.teacher, F, self.cfg.decay(number))
        return replace(state, F=F, teacher=teacher)

    def classifier(self, state: LabelCensusState) -> StateDict:
        return state.teacher

    def also_evaluated(self, state: LabelCensusState) -> dict[str, StateDict]:
        return {"unaveraged": state.F}

    def metrics(self, state: LabelCensusState) -> dict[str, float]:
        """Of what was released: nothing here is known without the noise."""
        if not state.answers:
            return {}
        sure = state.classes.amax(dim=1)
        with_cluster = len(set(state.classes.argmax(dim=1).tolist()))
        return {
            "census/clusters_in_doubt": float((sure < 0.5).sum()),
            "census/classes_without_cluster": float(self.task.classes - with_cluster),
        }

    def pictures(self, state: LabelCensusState, x: Tensor, y: Tensor) -> dict[str, np.ndarray]:
        if not state.answers:
            return {}
        told = state.classes.argmax(dim=1).numpy()
        return {"images/census": census_plot(state.histogram.numpy(), told)}

    # Steps at query agents ------------------------------------------------------------------

    @on_agent
    def find_clusters(self, agent: QueryAgent, msg: Map, ctx: Context) -> Ack:
        """See in which cluster each row lies, and remember it."""
        kept = {name: value for name, value in agent.memory.items() if name != KEPT}
        agent.memory = {**kept, CLUSTER: self.cluster_of(agent.unlabelled.x, msg, ctx)}
        return Ack()

    @on_agent
    def vote_pass(
        self, agent: QueryAgent, msg: PseudoLabelRequest, ctx: Context
    ) -> ClusterClassifierUpdate | Declined:
        """Learn what the clusters are called in which rows lie."""
        if CLUSTER not in agent.memory:
            return NO_CLUSTERS
        picked = self._pick_rows(agent, ctx)
        return self._learn(agent, picked, msg.classes[agent.memory[CLUSTER][picked]], msg, ctx)

    @on_agent
    def self_training_pass(
        self, agent: QueryAgent, msg: SelfTrainingRequest, ctx: Context
    ) -> ClusterClassifierUpdate | Declined:
        """Learn the teacher's guesses, as far as a row's cluster does not speak against them."""
        if CLUSTER not in agent.memory:
            return NO_CLUSTERS
        picked = self._pick_rows(agent, ctx)
        p = guess_labels(
            local_training.load_weights(self._F, msg.teacher, ctx.device).eval(),
            local_training.network_input(agent.unlabelled.x[picked], ctx.device),
            augment=self.cfg.augmentation("weak"), views=self.cfg.views,
            sharpness=self.cfg.sharpness, rng=ctx.rng("guess"),
        ).cpu()  # fmt: skip
        p = p * class_given_cluster(msg.classes, self.cfg.purity)[agent.memory[CLUSTER][picked]]
        return self._learn(agent, picked, p / p.sum(dim=1, keepdim=True), msg, ctx)

    def _pick_rows(self, agent: QueryAgent, ctx: Context) -> Tensor:
        """The rows of a visit."""
        wanted = self.cfg.local_steps * self.cfg.batch_size
        return local_training.draw_rows(len(agent.unlabelled), wanted, ctx.rng("rows"))

    def _learn(
        self, agent: QueryAgent, picked: Tensor, p: Tensor, msg: PseudoLabelRequest, ctx: Context
    ) -> ClusterClassifierUpdate:
        """F after a visit's steps on the picked rows and their classes p (N, C)."""
        rows = agent.unlabelled
        ctx.weight = float(len(rows))
        ctx.pseudo_labels(rows.ids[picked], p)
        x = local_training.network_input(rows.x[picked], ctx.device)
        fields = {"x": self.cfg.augmentation()(x, ctx.rng("augment F")), "p": p.to(ctx.device)}
        F = local_training.load_weights(self._F, msg.F, ctx.device)
        group = local_training.AdamGroup(F, msg.learning_rate, (0.9, 0.99))
        optimiser = local_training.LocalOptimiser({"F": group}, agent.memory, "F")
        loss = local_training.fit(
            optimiser, fields, self.cfg.batch_size,
            partial(batched_call, soft_label_loss, F=F),
        )  # fmt: skip
        agent.memory = {**agent.memory, **optimiser.remember()}
        ctx.log_metric("train/loss_F", loss)
        return ClusterClassifierUpdate(local_training.to_send(F.state_dict()))

    # The one step at support agents -----------------------------------------------------------

    @on_agent
    def answer(self, agent: SupportAgent, msg: Map, ctx: Context) -> Census | Declined:
        """Pay, then count, then add noise to every count.

        Raises:
            MessageError: the map is not one of this census. Checked before a row is looked at, by
                public numbers alone: a crooked map could otherwise count a row twice, or make an
                error that depends on where rows lie.
        """
        self.check_map(msg)
        if self.plan is None:
            return Census(self._count(agent, msg, ctx))
        assert agent.account is not None
        try:
            with agent.account.spend(self.plan.event, ctx.charge_id):
                return Census(self.plan.release(self._count(agent, msg, ctx)))
        except BudgetExhausted:
            return BUDGET_EXHAUSTED

    def _count(self, agent: SupportAgent, msg: Map, ctx: Context) -> Tensor:
        """Labelled rows by cluster and class (K, C), int64, exact.

        Row by row: in a batch of another size a row's features differ in their last bits, and a row
        on a border would change its cluster with the number of the others.
        """
        rows, classes = agent.labelled, self.task.classes
        counts = torch.zeros(self.k, classes, dtype=torch.int64)
        for row, label in zip(rows.x, rows.y.tolist(), strict=True):
            counts[int(self.cluster_of(row[None], msg, ctx)), label] += 1
        return counts
