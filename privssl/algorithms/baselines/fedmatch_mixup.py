"""FedMatch as FedSSL's paper compares with it: L-MixUp, and agents that agree with each other.

Fan, Hu, Huang (IJCAI 2022), section 5.3: it "performs both L-MixUp and divergence minimization
across all agents". Read here as MixMatch with Jeong et al.'s (ICLR 2021) inter-client consistency:

    L-MixUp, Eq. 3, at every agent              local_mixup, as MixMatch
    divergence minimization, at every agent     FedMatchMixup._train, of rows as they are
    Jeong et al., 3.1: helpers                  round, fedmatch/helper_agents.py
    Eq. 1: 1/H sum_j KL[p_j(y|u) || p(y|u)]     helper_divergence

Everything else is as in MixMatch. Pseudo-labels are the teacher's (Eq. 2), not votes. Differs from
Jeong et al.: (1) no sigma and psi: one set of weights; (2) helpers are chosen anew in every round.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, final

import pydantic.dataclasses
import torch
from torch import Tensor

from privssl.algorithms.base import MissingReplyPolicy
from privssl.algorithms.baselines.fedssl_baselines import TeacherRequest, _FedSSLBaseline
from privssl.algorithms.fedmatch.helper_agents import (
    draw_probe,
    nearest_agents,
    pack_helpers,
    unpack_helpers,
)
from privssl.algorithms.local_ssl import (
    Amount,
    ClassifierTraining,
    ModelUpdate,
    TeacherState,
    average_groups,
    model_update,
    predict,
)
from privssl.core.agents import AgentRef, QueryAgent, SupportAgent
from privssl.core.federation import Federation, Roster
from privssl.core.messages import Reply, StateDict
from privssl.core.task import Context, on_agent
from privssl.settings.schema import Positive, Problem, Rate, strict
from privssl.training import local_training
from privssl.training.batched.deferred import FunctionalModule, batched_call
from privssl.training.losses import divergence, soft_cross_entropy
from privssl.training.mixup import local_mixup


@dataclasses.dataclass(frozen=True)
class HelpedRequest(TeacherRequest):
    """Down: also the classifiers of the agent's helpers (``helper_agents.pack_helpers``)."""

    helpers: StateDict | None


@dataclasses.dataclass(frozen=True)
class HelpedState(TeacherState):
    """What the server keeps between rounds; by agent: what it sent at its last visit."""

    probe: Tensor  # (1, *shape) noise
    sent: Mapping[str, StateDict]
    embeddings: Mapping[str, Tensor]  # agent -> (C,), that model's prediction for the probe


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedMatchMixupConfig(ClassifierTraining):
    """Section ``algorithm`` for FedMatch with L-MixUp."""

    name: Literal["fedmatch_mixup"] = "fedmatch_mixup"
    mix_alpha: Rate = 0.5  # alpha of lambda ~ Beta(alpha, alpha), Eq. 3; as MixMatch
    helpers: Positive = 2  # H; Jeong et al.
    divergence_weight: Amount = 0.01  # Jeong et al., Table 4; 0: MixMatch
    order: Literal["parallel", "sequential"] = "parallel"  # FedSSL's Alg. 1 or 2

    def problems(self) -> Iterator[Problem]:
        """A number of helpers without effect."""
        if not self.divergence_weight and self.helpers != 2:
            text = f"{self.helpers} has no effect: divergence_weight is 0. Leave it out"
            yield Problem("helpers", text)


@final
class FedMatchMixup(_FedSSLBaseline):
    """MixMatch with a divergence from the predictions of an agent's helpers."""

    Config = FedMatchMixupConfig
    StateType: ClassVar[type[Any]] = HelpedState
    uses_unlabelled = True
    cfg: FedMatchMixupConfig

    @classmethod
    def missing_reply_policy_for(
        cls, cfg: FedMatchMixupConfig, *, private: bool
    ) -> MissingReplyPolicy:
        if cfg.order == "sequential":
            return MissingReplyPolicy(quorum=("query_pass",), skip=("support_pass",))
        return cls.missing_reply_policy

    def start(self, federation: Federation) -> HelpedState:
        F = self.initial_classifier(federation)
        probe = draw_probe(self.task.shape, federation.rng("probe"))
        return HelpedState(F, teacher=F, probe=probe, sent={}, embeddings={})

    def round(self, state: TeacherState, federation: Federation) -> HelpedState:
        assert isinstance(state, HelpedState)
        participants: Roster = ()
        if federation.round.number > self.cfg.warm_up:
            participants = federation.sample(federation.query, self.cfg.query_per_round)
        agent_ids = {agent.id for agent in (*federation.support, *participants)}
        count = self.cfg.helpers if self.cfg.divergence_weight else 0
        helper_ids = nearest_agents(state.embeddings, sorted(agent_ids), count)

        def make_request(agent: AgentRef) -> HelpedRequest:
            helpers = pack_helpers([state.sent[helper] for helper in helper_ids.get(agent.id, ())])
            return HelpedRequest(F, state.teacher, helpers)

        F, replies = state.F, list[Reply[ModelUpdate]]()
        if self.cfg.order == "sequential":
            for agent in federation.support:
                replies.append(federation.call(agent, self.support_pass, make_request(agent)))
                F = F if replies[-1].declined else replies[-1].payload.F
            support: list[Reply[ModelUpdate]] = []
        else:
            support = federation.call_all(federation.support, self.support_pass, make_request)
        query = federation.call_all(participants, self.query_pass, make_request)
        F = average_groups(self.cfg.weights, support, query, "F", otherwise=F)
        sent = {r.sender.id: r.payload.F for r in [*replies, *support, *query] if not r.declined}
        embeddings = {agent: self._embed(weights, state.probe) for agent, weights in sent.items()}
        decay = self.cfg.decay(federation.round.number)
        return HelpedState(
            F, local_training.moving_average(state.teacher, F, decay), state.probe,
            {**state.sent, **sent}, {**state.embeddings, **embeddings},
        )  # fmt: skip

    @torch.no_grad()
    def _embed(self, weights: StateDict, probe: Tensor) -> Tensor:
        """A model's prediction (C,) for the row of noise."""
        F = local_training.load_weights(self._F, weights, torch.device("cpu")).eval()
        prediction: Tensor = F(probe).softmax(dim=1)[0]
        return prediction

    @on_agent
    def support_pass(
        self, agent: SupportAgent, msg: TeacherRequest | HelpedRequest, ctx: Context
    ) -> ModelUpdate:
        """As MixMatch, with helpers."""
        return super().support_pass(agent, msg, ctx)

    @on_agent
    def query_pass(
        self, agent: QueryAgent, msg: TeacherRequest | HelpedRequest, ctx: Context
    ) -> ModelUpdate:
        """As MixMatch, with helpers."""
        return super().query_pass(agent, msg, ctx)

    def _train(
        self, x: Tensor, p: Tensor, agent: SupportAgent | QueryAgent, msg: TeacherRequest,
        ctx: Context, group: str,
    ) -> ModelUpdate:  # fmt: skip
        assert isinstance(msg, HelpedRequest)
        helpers = [
            predict(self.load_classifier(weights, ctx), x, ctx.device).softmax(dim=1)
            for weights in unpack_helpers(msg.helpers)
        ]
        if not helpers:
            return super()._train(x, p, agent, msg, ctx, group)
        F = self.load_classifier(msg.F, ctx)
        optimiser = local_training.LocalOptimiser(
            {"F": self.cfg.make_optimiser_group(F, ctx.round)}, agent.memory, group
        )
        clean, rng = local_training.network_input(x, ctx.device), ctx.rng("mixup")
        views = self.cfg.augmentation()(clean, ctx.rng("augment F"))

        def loss(batch: dict[str, Tensor]) -> Tensor:
            mixed, labels = self._mix(batch["x"], batch["p"], rng)
            fields = {**batch, "x": mixed, "p": labels}
            mean: Tensor = batched_call(agreement_loss, fields, self.cfg.divergence_weight, F=F)
            return mean

        fields = {
            "x": views, "p": p.to(ctx.device), "plain": clean,
            "helpers": torch.stack(helpers, dim=1),
        }  # fmt: skip
        mean_loss = local_training.fit(optimiser, fields, self.cfg.batch_size, loss)
        ctx.log_metric(f"train/loss_F/{group}", mean_loss)
        agent.memory = {**agent.memory, **optimiser.remember()}
        return model_update(F)

    def _mix(self, x: Tensor, p: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        return local_mixup(x, p, self.cfg.mix_alpha, rng)


def agreement_loss(fields: Mapping[str, Tensor], weight: float, *, F: FunctionalModule) -> Tensor:
    """Mean over rows: cross-entropy of mixes ``x``, ``p``, and ``weight`` times the divergence."""
    mixed_logits, clean_logits = F(torch.cat([fields["x"], fields["plain"]])).chunk(2)
    kl = helper_divergence(fields["helpers"], clean_logits)
    return (soft_cross_entropy(mixed_logits, fields["p"]) + weight * kl).mean()


def helper_divergence(helpers: Tensor, logits: Tensor) -> Tensor:
    """1/H sum_j KL[h_j || softmax(logits)] (B,): helpers' h (B, H, C), logits (B, C); Eq. 1."""
    return divergence(helpers, logits[:, None]).mean(dim=1)
