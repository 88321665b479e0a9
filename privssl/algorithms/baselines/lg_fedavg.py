"""LG-FedAvg: each agent keeps a representation of its own, and a small common part is averaged.

Liang, Liu, Liu, Salakhutdinov, Morency: "Think Locally, Act Globally: Federated Learning with Local
and Global Representations" (2020; arXiv:2001.01523). Agents hold labels, as in FedAvg.

    paper, Algorithm 1; authors' code                       here
    FedAvg first, and all local models start from it        warm_up rounds, then keep_pass
    agent: a joint step on local and global parameters      labelled_pass
    only the global parameters travel and are averaged      LGRequest, LGUpdate.shared
    which layers are global                                 shared_layers, shared_end; split_layers
    new test (code, "avg"): mean of the local models        LGUpdate.local

Differs from the paper: on rows of an unknown agent it lets all local models vote, or, in the code,
averages their weights. One network is released here, so local parts travel up (never down) for this
mean; ``send_local: false`` saves them, and the representation of the warm-up is released. The mean
is over the agents of the last round. The local test, each agent's model on its own test rows, has
no counterpart.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, final

import pydantic.dataclasses

from privssl.algorithms.baselines.local_settings import FederatedSettings
from privssl.algorithms.baselines.supervised import (
    AveragedTraining,
    ProximalRequest,
    SupervisedState,
    labelled_losses,
    run_sgd,
)
from privssl.algorithms.local_ssl import ModelState, ModelUpdate, TrainRequest, warm_up_fits
from privssl.core.agents import SupportAgent
from privssl.core.aggregation import average
from privssl.core.federation import Federation
from privssl.core.messages import Ack, Declined, Message, StateDict
from privssl.core.task import Context, on_agent
from privssl.errors import ConfigError
from privssl.settings.schema import Count, Positive, Problem, strict


@dataclasses.dataclass(frozen=True)
class LGRequest(Message):
    """Down: the global parameters."""

    shared: StateDict


@dataclasses.dataclass(frozen=True)
class LGUpdate(Message):
    """Up: the global parameters; local ones for the released mean alone, or None."""

    shared: StateDict
    local: StateDict | None


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class LGFedAvgConfig(FederatedSettings):
    """Section ``algorithm`` for LG-FedAvg."""

    name: Literal["lg_fedavg"] = "lg_fedavg"
    warm_up: Count = 20  # of the rounds: FedAvg on all layers
    shared_layers: Positive = 1  # how many layers are global
    # counted from the output (paper), or from the input (code: CIFAR-10's two convolutions)
    shared_end: Literal["output", "input"] = "output"
    send_local: bool = True  # local parts travel up, for the released model

    def problems(self) -> Iterator[Problem]:
        """Numbers that contradict each other."""
        yield from super().problems()
        yield from warm_up_fits(self.warm_up, self.rounds)


@final
class LGFedAvg(AveragedTraining):
    """FedAvg of some layers; the others stay."""

    Config = LGFedAvgConfig
    missing_reply_policy = dataclasses.replace(
        AveragedTraining.missing_reply_policy,
        quorum=(*AveragedTraining.missing_reply_policy.quorum, "keep_pass", "local_pass"),
    )
    cfg: LGFedAvgConfig

    def __init__(self, config: Any, *task_args: Any) -> None:
        super().__init__(config, *task_args)
        self._shared = split_layers(self._F.state_dict(), config.shared_layers, config.shared_end)

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        rounds_after_warm_up = federation.round.number - self.cfg.warm_up
        if rounds_after_warm_up < 1:
            return super().round(state, federation)
        if rounds_after_warm_up == 1:  # every agent, drawn or not
            federation.call_all(federation.support, self.keep_pass, TrainRequest(state.F))
        request = LGRequest(self._select_part(state.F, shared=True))
        replies = federation.call_all(
            self.select_participants(federation), self.local_pass, request
        )
        shared, local = (average(replies, key, otherwise={}) for key in ("shared", "local"))
        return SupervisedState(
            self.aggregate_bn_statistics({**state.F, **local, **shared}, federation)
        )

    @on_agent
    def keep_pass(self, agent: SupportAgent, msg: TrainRequest, ctx: Context) -> Ack:
        """Remember the local part of the warm-up's model."""
        agent.memory = {**agent.memory, **_copy_weights(self._select_part(msg.F, shared=False))}
        return Ack()

    @on_agent
    def local_pass(self, agent: SupportAgent, msg: LGRequest, ctx: Context) -> LGUpdate | Declined:
        """Epochs on all layers, from the agent's own local part and the global one."""
        if not agent.memory:
            return Declined("missed the model of the warm-up")
        self.cfg.weigh(len(agent.labelled), ctx)
        request = ProximalRequest({**agent.memory, **msg.shared})
        F = self.load_classifier(request.F, ctx)
        losses = labelled_losses(F, agent.labelled, self.cfg, ctx)
        update: ModelUpdate = run_sgd(F, losses, self.cfg, request, ctx)
        local = self._select_part(update.F, shared=False)
        agent.memory = {**agent.memory, **_copy_weights(local)}
        shared = self._select_part(update.F, shared=True)
        return LGUpdate(shared, local if self.cfg.send_local else None)

    def _select_part(self, weights: StateDict, *, shared: bool) -> StateDict:
        """The global or the local part of all weights."""
        return {k: v for k, v in weights.items() if (k in self._shared) == shared}


def _copy_weights(weights: StateDict) -> StateDict:
    return {name: value.clone() for name, value in weights.items()}


def split_layers(
    weights: StateDict, count: int, shared_end: Literal["output", "input"]
) -> frozenset[str]:
    """Names of the weights of the first or last layers, in the order of the state dict.

    Args:
        weights: of the whole network. A layer begins with a weight of two dimensions or more, and
            a norm belongs to the layer before it.
        count: of layers, fewer than there are.

    Raises:
        ConfigError: there are too few.
    """
    names = list(weights)
    starts = [index for index, name in enumerate(names) if weights[name].dim() > 1]
    if count >= len(starts):
        raise ConfigError(
            f"algorithm.shared_layers is {count}, but the network has {len(starts)} layers, and "
            f"one or more must be local. Give less than {len(starts)}"
        )
    if shared_end == "output":
        return frozenset(names[starts[-count] :])
    return frozenset(names[: starts[count]])
