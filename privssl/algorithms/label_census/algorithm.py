"""Label census: labels are released once, as counts, and never train a network (ours).

Nothing that depends on a label changes a weight at a support agent. Query agents compute an encoder
without labels and cluster its features into K clusters; each support agent then answers one
question, once: how many of my records of each class are in each cluster? It adds noise to every
count. Query agents train the classifier on the clusters' classes, then on its own predictions.

    encoder         query agents: directions that two views of an image share; not for
                    vectors and sequences, which are features already         feature_map.py
    clusters        query agents: sums and counts of features                 feature_map.py
    census          support agents: K x C counts + discrete Laplace noise     answer
    votes           server: class of each cluster from the counts             cluster_labels.py
                    query agents: F on these classes                          vote_pass
    self-training   query agents: F on the predictions of its moving average, times
                    the share of rows of that cluster in that class           self_training_pass
    generator       query agents: if asked, G on its predictions              generator_pass

Privacy: one record changes one count by one, so an answer is epsilon-DP with delta 0 against
blanking a record, their number being public. No weights leave a support agent, and the map that
it gets comes from unlabelled rows alone. docs/label_census.md.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, final

import numpy as np
import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor, nn

from accounting.errors import BudgetExhausted
from generators.base import ConditionalGenerator
from privssl.algorithms.base import MissingReplyPolicy
from privssl.algorithms.label_census import feature_map
from privssl.algorithms.label_census.cluster_labels import (
    class_given_cluster,
    class_posterior,
    compute_class_shares,
    label_by_majority,
)
from privssl.algorithms.label_census.feature_map import FeatureMapRounds, Map, MapConfig, MapState
from privssl.algorithms.label_census.generator_training import (
    GeneratorConfig,
    GeneratorRequest,
    GeneratorUpdate,
    build_generator,
    generator_loss,
)
from privssl.algorithms.local_ssl import (
    Amount,
    ModelUpdate,
    TrainRequest,
    model_update,
    needs_no_statistics,
    needs_unlabelled,
    train_and_average,
)
from privssl.core.agents import QueryAgent, SupportAgent
from privssl.core.aggregation import WeightedMean
from privssl.core.federation import Federation
from privssl.core.messages import BUDGET_EXHAUSTED, Ack, Declined, Message, MessageError, StateDict
from privssl.core.task import Context, Phase, Task, on_agent
from privssl.privacy.label_histogram import CensusPlan, count_rows
from privssl.reporting.figures import census_plot, of_generator
from privssl.settings.schema import Positive, Problem, strict
from privssl.training import local_training
from privssl.training.batched.deferred import batched_call
from privssl.training.losses import soft_label_loss

CLUSTER = "cluster"  # of each of its rows, in an agent's memory
CLEAR = 16 * (1 - 1e-5)  # epsilon x labels of a class from which counts exceed noise; rounded down
NO_CLUSTERS = Declined("did not take part in find_clusters")

# Messages and state -------------------------------------------------------------------------


@dataclass(frozen=True)
class Census(Message):
    """Up, from a support agent, once: labelled rows by cluster and class (K, C), with noise."""

    census: Tensor


@dataclass(frozen=True)
class PseudoLabelRequest(TrainRequest):
    """Down, in the phase "votes": classes of the clusters, and the classifier."""

    classes: Tensor  # (K, C) probability of each class
    learning_rate: float


@dataclass(frozen=True)
class SelfTrainingRequest(PseudoLabelRequest):
    """Down, in self-training: also the teacher that predicts pseudo-labels."""

    teacher: StateDict


@dataclass(frozen=True)
class LabelCensusState(MapState):
    """What the server keeps between rounds."""

    F: StateDict
    teacher: StateDict  # moving average of F; is evaluated and released
    histogram: Tensor  # (K, C) int64, sum over support agents
    classes: Tensor  # (K, C) probability of each class
    answers: int = 0  # support agents that answered
    G: StateDict = field(default_factory=dict)  # empty before it is trained


# Config -------------------------------------------------------------------------------------


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class LabelCensusConfig(GeneratorConfig, MapConfig):
    """Section ``algorithm`` for the label census. All of it is fixed before a label is read."""

    name: Literal["label_census"] = "label_census"
    vote_rounds: Positive = 16
    self_training_rounds: Positive = 40
    # of the counts: Bayes' rule; the largest, as NoiseCluster; or the counts' shares (Ghazi et al.)
    reading: Literal["bayes", "majority", "shares"] = "bayes"
    purity: Annotated[float, Field(gt=0.5, lt=1)] = 0.9  # expected of a cluster
    balanced: bool = True  # whether classes are expected to be equally frequent
    coupling: Amount = 8.0  # log odds that a cluster takes from its neighbours
    local_steps: Positive = 10
    batch_size: Positive = 64

    @property
    def rounds(self) -> int:
        """Of all phases, for images."""
        return (
            feature_map.ENCODER_ROUNDS + self.cluster_rounds + 1
            + self.vote_rounds + self.self_training_rounds + self.generator_rounds
        )  # fmt: skip


# The algorithm ------------------------------------------------------------------------------


@final
class LabelCensus(FeatureMapRounds):
    """Support agents answer once; all training is at query agents."""

    Config = LabelCensusConfig
    StateType = LabelCensusState
    # The map is made once, and an agent without clusters never trains, so its rounds need all
    # agents. A lost answer is never repeated: the quorum of the others suffices.
    missing_reply_policy = MissingReplyPolicy(
        quorum=("answer", "vote_pass", "self_training_pass", "generator_pass"),
        needed=(*FeatureMapRounds.missing_reply_policy.needed, "find_clusters"),
        needed_because="the map of rows is made once for the whole run, from all agents. Continue "
        "with --resume when all are back",
    )
    can_be_private = True
    mechanism = "census"
    plan: CensusPlan | None
    cfg: LabelCensusConfig

    def __init__(
        self, config: LabelCensusConfig, task: Task, plan: CensusPlan | None = None
    ) -> None:
        super().__init__(config, task, plan)
        self._G = build_generator(config, task) if config.generator_rounds else None

    @property
    def k(self) -> int:
        """Number of clusters: twice the classes, or once where noise exceeds the counts.

        Depends on epsilon, the classes and the declared number of labels, all public.
        """
        classes = self.task.classes
        if self.cfg.clusters is not None or self.plan is None:
            return self.cfg.clusters or 2 * classes
        noisy = self.plan.epsilon * self.plan.rows / classes < CLEAR
        return classes if noisy else 2 * classes

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        yield from needs_unlabelled(config)
        yield from needs_no_statistics(config)

    def phases(self) -> tuple[Phase, ...]:
        encoder = (Phase("encoder", feature_map.ENCODER_ROUNDS),)
        return (
            *(encoder if self.learns_features else ()),
            Phase("clusters", self.cfg.cluster_rounds),
            Phase("census", 1, saved=True),
            Phase("votes", self.cfg.vote_rounds),
            Phase("self-training", self.cfg.self_training_rounds),
            *([Phase("generator", self.cfg.generator_rounds)] if self.cfg.generator_rounds else []),
        )

    def start(self, federation: Federation) -> LabelCensusState:
        F = self.initial_classifier(federation)
        k, classes = self.k, self.task.classes
        return LabelCensusState(
            **self.make_initial_map(), F=F, teacher=F,
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
            case "generator":
                return self._generator_round(state, federation)
        return self._training_round(state, federation)

    def _census_round(self, state: LabelCensusState, federation: Federation) -> LabelCensusState:
        # Before the answers, which are given once: nothing may fail until their checkpoint.
        request = feature_map.make_map(state)
        federation.call_all(federation.query, self.find_clusters, request)
        agents = () if self.plan is not None and not self.plan.visits else federation.support
        answers = feature_map.get_payloads(federation.call_all(agents, self.answer, request))
        if not answers:
            return state
        shape = (self.k, self.task.classes)
        for answer in answers:
            if answer.census.shape != shape or answer.census.dtype != torch.int64:
                raise MessageError(
                    f"a census is {tuple(answer.census.shape)}, {answer.census.dtype}; it must be "
                    f"{shape}, int64"
                )
        histogram = torch.stack([answer.census for answer in answers]).sum(dim=0)
        classes = self._infer_cluster_classes(
            histogram, state, len(answers), len(federation.support)
        )
        return replace(state, histogram=histogram, classes=classes, answers=len(answers))

    def _infer_cluster_classes(
        self, histogram: Tensor, state: LabelCensusState, answers: int, called_agents: int
    ) -> Tensor:
        """Probability of each class for each cluster (K, C), from released numbers alone."""
        if self.cfg.reading == "majority":
            return label_by_majority(histogram)
        if self.cfg.reading == "shares":
            return compute_class_shares(histogram)
        labels = float(histogram.sum())  # exact without a plan, else as declared
        if self.plan is not None:
            labels = self.plan.rows * answers / called_agents
        return class_posterior(
            histogram, state.mass, labels, agents=answers,
            epsilon=None if self.plan is None else self.plan.epsilon,
            purity=self.cfg.purity, balanced=self.cfg.balanced,
            borders=state.borders, coupling=self.cfg.coupling,
        )  # fmt: skip

    def _training_round(self, state: LabelCensusState, federation: Federation) -> LabelCensusState:
        """One round of training F: on the clusters' classes, later on the teacher's guesses."""
        if not state.answers:
            return state  # no label was released: there is nothing to learn from
        fields, former_rounds = (state.F, state.classes, self.cfg.learning_rate), 0
        participants = federation.sample(federation.query, self.cfg.query_per_round)
        step: Callable[..., ModelUpdate | Declined]
        request: PseudoLabelRequest
        if federation.round.phase == "votes":
            step, request = self.vote_pass, PseudoLabelRequest(*fields)
        else:
            step, request = self.self_training_pass, SelfTrainingRequest(*fields, state.teacher)
            former_rounds = self.cfg.vote_rounds
        F = train_and_average(federation, participants, step, request, otherwise=state.F)
        decay = self.cfg.decay(former_rounds + federation.round.number_in_phase)
        return replace(state, F=F, teacher=local_training.moving_average(state.teacher, F, decay))

    def _generator_round(self, state: LabelCensusState, federation: Federation) -> LabelCensusState:
        """One round of training G on the teacher's predictions."""
        if not state.answers:
            return state  # there is no class to learn
        build = partial(build_generator, self.cfg, self.task)
        G = state.G or local_training.fresh_weights(build, federation.rng("init G"))
        participants = federation.sample(federation.query, self.cfg.query_per_round)
        mean = WeightedMean("G")
        request = GeneratorRequest(G, state.teacher)
        federation.call_all(participants, self.generator_pass, request, aggregator=mean)
        return replace(state, G=mean.value_or(state.G))

    def networks(self) -> Mapping[str, nn.Module]:
        return {"F": self._F} if self._G is None else {"F": self._F, "G": self._G}

    def classifier(self, state: LabelCensusState) -> StateDict:
        return state.teacher

    def generator(self, state: LabelCensusState) -> ConditionalGenerator | None:
        if self._G is None or not state.G:
            return None
        local_training.load_weights(self._G.cpu(), state.G)
        return self._G.eval()

    def also_evaluated(self, state: LabelCensusState) -> dict[str, StateDict]:
        return {"unaveraged": state.F}

    def metrics(self, state: LabelCensusState) -> dict[str, float]:
        """Metrics of the released counts, after noise."""
        if not state.answers:
            return {}
        classes_with_cluster = len(set(state.classes.argmax(dim=1).tolist()))
        return {
            "census/clusters_in_doubt": float((state.classes.amax(dim=1) < 0.5).sum()),
            "census/classes_without_cluster": float(self.task.classes - classes_with_cluster),
            "census/largest_cluster": float(state.mass.max()),
        }

    def pictures(self, state: LabelCensusState, x: Tensor, y: Tensor) -> dict[str, np.ndarray]:
        if not state.answers:
            return {}
        classes = state.classes.argmax(dim=1).numpy()
        pictures = {"images/census": census_plot(state.histogram.numpy(), classes)}
        G = self.generator(state)
        return pictures if G is None else pictures | of_generator(G, x, y, self.task.classes)

    # Steps at query agents ------------------------------------------------------------------

    @on_agent
    def find_clusters(self, agent: QueryAgent, msg: Map, ctx: Context) -> Ack:
        """Compute the cluster of each row, and remember it."""
        memory = {name: value for name, value in agent.memory.items() if name != feature_map.KEPT}
        agent.memory = {**memory, CLUSTER: self.cluster_of(agent.unlabelled.x, msg, ctx)}
        return Ack()

    @on_agent
    def vote_pass(
        self, agent: QueryAgent, msg: PseudoLabelRequest, ctx: Context
    ) -> ModelUpdate | Declined:
        """Learn the classes of the clusters of rows."""
        if CLUSTER not in agent.memory:
            return NO_CLUSTERS
        indices = self.cfg.draw_rows(len(agent.unlabelled), ctx)
        return self._learn(agent, indices, msg.classes[agent.memory[CLUSTER][indices]], msg, ctx)

    @on_agent
    def self_training_pass(
        self, agent: QueryAgent, msg: SelfTrainingRequest, ctx: Context
    ) -> ModelUpdate | Declined:
        """Learn the teacher's predictions, weighted by the classes of a row's cluster."""
        if CLUSTER not in agent.memory:
            return NO_CLUSTERS
        indices = self.cfg.draw_rows(len(agent.unlabelled), ctx)
        teacher = self.load_classifier(msg.teacher, ctx)
        p = self.cfg.guess(teacher, agent.unlabelled.x[indices], ctx).cpu()
        p = p * class_given_cluster(msg.classes, self.cfg.purity)[agent.memory[CLUSTER][indices]]
        return self._learn(agent, indices, p / p.sum(dim=1, keepdim=True), msg, ctx)

    def _learn(
        self, agent: QueryAgent, indices: Tensor, p: Tensor, msg: PseudoLabelRequest, ctx: Context
    ) -> ModelUpdate:
        """F after training on these rows and their classes p (N, C)."""
        rows = agent.unlabelled
        ctx.weight = float(len(rows))
        ctx.pseudo_labels(rows.ids[indices], p)
        x = local_training.network_input(rows.x[indices], ctx.device)
        fields = {"x": self.cfg.augmentation()(x, ctx.rng("augment F")), "p": p.to(ctx.device)}
        F = self.load_classifier(msg.F, ctx)
        group = local_training.AdamGroup(F, msg.learning_rate, (0.9, 0.99))
        optimiser = local_training.LocalOptimiser({"F": group}, agent.memory, "F")
        loss = partial(batched_call, soft_label_loss, F=F)
        mean_loss = local_training.fit(optimiser, fields, self.cfg.batch_size, loss)
        agent.memory = {**agent.memory, **optimiser.remember()}
        ctx.log_metric("train/loss_F", mean_loss)
        return model_update(F)

    @on_agent
    def generator_pass(
        self, agent: QueryAgent, msg: GeneratorRequest, ctx: Context
    ) -> GeneratorUpdate:
        """Learn to make rows of the classes that the teacher predicts."""
        assert self._G is not None
        rows = agent.unlabelled
        ctx.weight = float(len(rows))
        indices = self.cfg.draw_rows(len(rows), ctx)
        p = self.cfg.guess(self.load_classifier(msg.teacher, ctx), rows.x[indices], ctx)
        x = local_training.network_input(rows.x[indices], ctx.device)
        z = torch.rand(len(indices), self.cfg.noise_size, generator=ctx.rng("z"))
        fields = {"x": x, "p": p, "z": z.to(ctx.device)}
        G = local_training.load_weights(self._G, msg.G, ctx.device)
        group = local_training.AdamGroup(G, self.cfg.generator_learning_rate, (0.5, 0.99))
        optimiser = local_training.LocalOptimiser({"G": group}, agent.memory, "G")
        weights = self.cfg.weight_reconstruction, self.cfg.weight_code

        def loss(batch: dict[str, Tensor]) -> Tensor:
            return batched_call(generator_loss, batch, *weights, G=G)  # type: ignore[no-any-return]

        mean_loss = local_training.fit(optimiser, fields, self.cfg.batch_size, loss)
        agent.memory = {**agent.memory, **optimiser.remember()}
        ctx.log_metric("train/loss_G", mean_loss)
        return GeneratorUpdate(local_training.to_send(G.state_dict()))

    # The one step at support agents -----------------------------------------------------------

    @on_agent
    def answer(self, agent: SupportAgent, msg: Map, ctx: Context) -> Census | Declined:
        """Charge, then count, then add noise to every count.

        Raises:
            MessageError: the map is not of this census's form. Checked by public numbers before a
                row is read: a malformed map could count a row twice, or raise an error that
                depends on the rows.
        """
        self.check_map(msg)
        if self.plan is None:
            return Census(self._count_labels(agent, msg, ctx))
        assert agent.account is not None
        try:
            with agent.account.spend(self.plan.event, ctx.charge_id):
                return Census(self.plan.release(self._count_labels(agent, msg, ctx)))
        except BudgetExhausted:
            return BUDGET_EXHAUSTED

    def _count_labels(self, agent: SupportAgent, msg: Map, ctx: Context) -> Tensor:
        """Labelled rows by cluster and class (K, C), int64, exact."""
        cluster_of = partial(self.cluster_of, msg=msg, ctx=ctx)
        return count_rows(agent.labelled, cluster_of, self.k, self.task.classes)
