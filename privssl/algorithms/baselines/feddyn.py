"""FedDyn: a penalty at each agent, renewed in every round, that makes local optima agree.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: "Federated Learning Based on Dynamic
Regularization" (ICLR 2021; arXiv:2111.04263). Agents hold labels, as in FedAvg.

    paper, Algorithm 1                                             here
    theta_k = argmin L_k - <g_k, theta> + a/2 |theta - theta^t|^2  labelled_pass, penalty
    g_k = g_k - a (theta_k - theta^t), kept at the agent           labelled_pass
    h = h - a / m sum_k (theta_k - theta^t), m: all agents         server_step
    theta^(t+1) = mean_k theta_k - h / a                           server_step

Differs from the paper: the argmin is a few epochs of SGD, as in the authors' code. That code also
gives an agent with more rows a smaller a; here a is the same for all. The code's curves are of the
mean of the agents' weights, ``released: averaged``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, final

import pydantic.dataclasses
import torch
from torch import Tensor

from privssl.algorithms.baselines.local_settings import FederatedSettings
from privssl.algorithms.baselines.supervised import (
    AveragedTraining,
    ProximalRequest,
    labelled_losses,
    run_sgd,
    squared_distance,
)
from privssl.algorithms.local_ssl import ModelState, ModelUpdate
from privssl.core.agents import SupportAgent
from privssl.core.aggregation import WeightedMean, uniform_weight
from privssl.core.federation import Federation
from privssl.core.messages import StateDict
from privssl.core.task import Context, on_agent
from privssl.settings.schema import Rate, strict
from privssl.training import device_transfer


@dataclasses.dataclass(frozen=True)
class FedDynState(ModelState):
    """What the server keeps between rounds."""

    h: StateDict  # by parameter; zeros at first
    averaged: StateDict  # mean of the weights that agents sent


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedDynConfig(FederatedSettings):
    """Section ``algorithm`` for FedDyn."""

    name: Literal["feddyn"] = "feddyn"
    weights: Literal["equal"] = "equal"  # in the average: the paper's
    alpha: Rate = 0.01  # a, strength of the penalty; paper: 0.01 on CIFAR-10
    released: Literal["server", "averaged"] = "server"  # theta^t, or the mean of agents (code)


@final
class FedDyn(AveragedTraining):
    """FedAvg with a dynamic penalty."""

    Config = FedDynConfig
    StateType = FedDynState
    cfg: FedDynConfig

    def start(self, federation: Federation) -> FedDynState:
        F = self.initial_classifier(federation)
        zeros = {name: torch.zeros_like(F[name]) for name, _ in self._F.named_parameters()}
        return FedDynState(F, zeros, averaged=F)

    def round(self, state: ModelState, federation: Federation) -> FedDynState:
        assert isinstance(state, FedDynState)
        mean, request = WeightedMean("F", uniform_weight), ProximalRequest(state.F)
        participants = self.select_participants(federation)
        replies = federation.call_all(participants, self.labelled_pass, request, aggregator=mean)
        share = sum(not reply.declined for reply in replies) / len(federation.support)
        averaged = mean.value_or(state.F)
        F, h = server_step(state.F, state.h, averaged, share, self.cfg.alpha)
        return FedDynState(
            self.aggregate_bn_statistics(F, federation),
            h,
            self.aggregate_bn_statistics(averaged, federation),
        )

    def classifier(self, state: ModelState) -> StateDict:
        assert isinstance(state, FedDynState)
        return state.F if self.cfg.released == "server" else state.averaged

    def also_evaluated(self, state: ModelState) -> Mapping[str, StateDict]:
        assert isinstance(state, FedDynState)
        if self.cfg.released == "server":
            return {"averaged": state.averaged}
        return {"server": state.F}

    @on_agent
    def labelled_pass(self, agent: SupportAgent, msg: ProximalRequest, ctx: Context) -> ModelUpdate:
        """Epochs on L_k - <g_k, theta> + a/2 |theta - theta^t|^2; then g_k is renewed."""
        F, a = self.load_classifier(msg.F, ctx), self.cfg.alpha
        params = {f"gradient/{name}": p for name, p in F.named_parameters()}
        anchor = [p.detach().clone() for p in params.values()]  # theta^t
        stored = {key: agent.memory.get(key, torch.zeros(p.shape)) for key, p in params.items()}
        g = device_transfer.move_to(stored, ctx.device)

        def penalty() -> Tensor:
            linear = torch.stack([(g[key] * p).sum() for key, p in params.items()]).sum()
            return a / 2 * squared_distance(F, anchor) - linear

        losses = labelled_losses(F, agent.labelled, self.cfg, ctx)
        update = run_sgd(F, losses, self.cfg, msg, ctx, penalty)
        pairs = zip(params.items(), anchor, strict=True)
        new_g = {key: g[key] - a * (p.detach() - start) for (key, p), start in pairs}
        agent.memory = {**agent.memory, **device_transfer.copy_tensors(new_g)}
        return update


def server_step(
    F: StateDict, h: StateDict, mean: StateDict, share: float, alpha: float
) -> tuple[StateDict, StateDict]:
    """The new theta and the new h.

    Args:
        F: theta^t, which the agents started from.
        mean: plain mean of what they sent; F if no agent replied.
        share: of all agents, who sent.
    """
    if not share:
        return F, h
    h = {name: value - alpha * share * (mean[name] - F[name]) for name, value in h.items()}
    return {**mean, **{name: mean[name] - value / alpha for name, value in h.items()}}, h
