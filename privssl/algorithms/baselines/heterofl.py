"""HeteroFL: agents with less power train a narrower network, cut out of the global one.

Diao, Ding, Tarokh: "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients" (ICLR 2021; arXiv:2010.01264). Agents hold labels, as in FedAvg.

    paper                                                     here
    level l: a share 2^-l of all channels                     HeteroFL.networks, levels
    W_l: the first channels of each parameter                 slice_parameters
    each entry: the mean over the agents that have it         merge_parameters
    masked cross-entropy                                      masked_loss
    static batch norm: statistics of all agents, at the end   aggregate_bn_statistics
    scaler: activations / share in training                   not needed, see below

Differs from the paper: agent i has level i mod ``levels`` (the paper's fixed assignment, evenly
shared). The scaler is left out. Before a norm (``static`` in the paper) it has no effect, as a norm
removes a factor. A network without norms is refused, and so is, from two levels on, one with a
hidden linear layer that no norm follows. The authors' code averages a row of the last layer over
the agents that hold its class; here over all, as in the paper. One level: FedAvg with static norm
and masks, HeteroFL's row in SemiFL's Table 3.

The mask is that of the authors' code: logits of classes that an agent has no row of are set to 0.
They stay in the softmax, as exp(0) = 1 in its sum, and get no gradient.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, final

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from privssl.algorithms.baselines.local_settings import FederatedSettings
from privssl.algorithms.baselines.supervised import (
    AveragedTraining,
    ProximalRequest,
    SupervisedState,
    labelled_losses,
    run_sgd,
)
from privssl.algorithms.local_ssl import ModelState, ModelUpdate
from privssl.core.agents import SupportAgent
from privssl.core.aggregation import average, uniform_weight
from privssl.core.federation import Federation
from privssl.core.messages import MessageError, StateDict
from privssl.core.task import Context, on_agent
from privssl.errors import ConfigError
from privssl.settings.names import is_outside
from privssl.settings.schema import Problem, strict
from privssl.training import local_training


@dataclasses.dataclass(frozen=True)
class LevelRequest(ProximalRequest):
    """Down: the part of the global classifier for a level (F), and the level."""

    level: int = 0


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class HeteroFLConfig(FederatedSettings):
    """Section ``algorithm`` for HeteroFL."""

    name: Literal["heterofl"] = "heterofl"
    weights: Literal["equal"] = "equal"  # in the average: the paper's
    levels: Annotated[int, Field(ge=1, le=5)] = 2  # of widths: 1, 1/2, ..., 1/16; paper: 1 to 5
    masked: bool = True  # logits of classes that an agent has no row of are set to 0


@final
class HeteroFL(AveragedTraining):
    """FedAvg of networks of several widths."""

    Config = HeteroFLConfig
    missing_reply_policy = dataclasses.replace(
        AveragedTraining.missing_reply_policy,
        quorum=(*AveragedTraining.missing_reply_policy.quorum, "level_pass"),
    )
    cfg: HeteroFLConfig

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        yield from super().problems(config)
        levels, width = config.algorithm.levels, config.model.width
        if config.model.norm in ("none", "batch"):
            text = f"{config.model.norm}, but heterofl needs static (paper) or group"
            yield Problem("model.norm", text)
        if is_outside(config.model.name) and levels > 1:
            text = f"{levels}, but a network from outside has no width. Set 1"
            yield Problem("algorithm.levels", text)
        if width % 2 ** (levels - 1):
            text = f"{width}, which cannot be halved {levels - 1} times. Give a multiple"
            yield Problem("model.width", text)

    def __init__(self, config: Any, *task_args: Any) -> None:
        super().__init__(config, *task_args)
        if config.levels > 1 and (hidden := layers_without_norm(self._F)):
            raise ConfigError(
                f"algorithm.levels is {config.levels}, but no norm follows the layer {hidden[0]} "
                "of the network, whose outputs would shrink with its width. Set levels: 1, or "
                "model.name: small_cnn"
            )
        self._networks = [self._F]
        for level in range(1, config.levels):
            assert self.task.narrow_classifier is not None, "problems refuses other networks"
            self._networks.append(self.task.narrow_classifier(0.5**level))

    def networks(self) -> Mapping[str, nn.Module]:
        return {"F" if not level else f"F_{level}": F for level, F in enumerate(self._networks)}

    def round(self, state: ModelState, federation: Federation) -> ModelState:
        level_of = {agent.id: i % self.cfg.levels for i, agent in enumerate(federation.support)}
        requests = [
            LevelRequest(slice_parameters(state.F, F.state_dict()), level=level)
            for level, F in enumerate(self._networks)
        ]
        replies = federation.call_all(
            self.select_participants(federation),
            self.level_pass,
            lambda agent: requests[level_of[agent.id]],
        )
        parts = []
        for level, request in enumerate(requests):
            level_replies = [
                r for r in replies if level_of[r.sender.id] == level and not r.declined
            ]
            mean = average(level_replies, "F", otherwise=request.F, weight=uniform_weight)
            if {k: v.shape for k, v in mean.items()} != {k: v.shape for k, v in request.F.items()}:
                raise MessageError(
                    f"{level_replies[0].sender.id} sent F in other shapes than it got"
                )
            parts.append((len(level_replies), mean))
        return SupervisedState(
            self.aggregate_bn_statistics(merge_parameters(state.F, parts), federation)
        )

    @on_agent
    def level_pass(self, agent: SupportAgent, msg: LevelRequest, ctx: Context) -> ModelUpdate:
        """Epochs of masked cross-entropy on the network of the agent's level."""
        F = local_training.load_weights(self._networks[msg.level], msg.F, ctx.device)
        mask = torch.ones(self.task.classes)
        if self.cfg.masked:
            mask = torch.bincount(agent.labelled.y, minlength=self.task.classes).clamp(max=1)
        loss: Callable[..., Tensor] = masked_loss
        losses = labelled_losses(
            F, agent.labelled, self.cfg, ctx, loss, held=mask.float().to(ctx.device)
        )
        return run_sgd(F, losses, self.cfg, msg, ctx)


def layers_without_norm(network: nn.Module) -> list[str]:
    """Names of linear layers that are followed by another one, in the order of definition."""
    kinds = (nn.Linear, nn.GroupNorm, _BatchNorm)
    layers = [
        (n, isinstance(m, nn.Linear)) for n, m in network.named_modules() if isinstance(m, kinds)
    ]
    return [
        name
        for (name, is_linear), (_, next_is_linear) in itertools.pairwise(layers)
        if is_linear and next_is_linear
    ]


def masked_loss(batch: Mapping[str, Tensor], *, F: Callable[..., Tensor]) -> Tensor:
    """Mean cross-entropy of ``y`` (B,) where logits of classes not in ``held`` (C,) are 0."""
    return cross_entropy(F(batch["x"]) * batch["held"], batch["y"])


def slice_parameters(F: StateDict, narrow: StateDict) -> StateDict:
    """The first channels of each parameter, as many as ``narrow`` has."""
    return {name: F[name][_make_slices(part)].clone() for name, part in narrow.items()}


def merge_parameters(F: StateDict, parts: Sequence[tuple[int, StateDict]]) -> StateDict:
    """Each entry's mean over the agents that have it; F's where none does.

    Args:
        parts: for each level how many agents sent, and the plain mean of what they sent.
    """
    merged = {}
    for name, value in F.items():
        if not value.is_floating_point():
            merged[name] = value
            continue
        total = torch.zeros(value.shape, dtype=torch.float64)
        count = torch.zeros(value.shape, dtype=torch.float64)
        for agents, mean in parts:
            total[_make_slices(mean[name])] += agents * mean[name]
            count[_make_slices(mean[name])] += agents
        means = (total / count.clamp(min=1)).to(value.dtype)
        merged[name] = torch.where(count > 0, means, value)
    return merged


def _make_slices(part: Tensor) -> tuple[slice, ...]:
    """Where a part lies in the whole."""
    return tuple(slice(size) for size in part.shape)
