"""FedRGD: FixMatch at agents while the server trains, averaged in groups, with group norm.

Zhang, Yang, Yao, Yan, Gonzalez, Mahoney: "Improving Semi-supervised Federated Learning by Reducing
the Gradient Diversity of Models" (2020; arXiv:2008.11364). Labels are at the server.

    paper and authors' code                                      here
    users: CE(strong view, label of the weak view), max >= tau   query_pass, as FixMatch
    server: cross-entropy of labelled rows, at the same time     round -> support_pass
    group g: mean of the server and of its users                 average_with_server
    users of g start from the mean of g, the server from the
      mean over groups                                           round, FedRGDState.groups
    group norm in place of batch norm                            model.norm: group

Agent i is in group i mod ``groups``. Differs from the authors' code: (1) A visit is epochs over an
agent's rows. There, users and server exchange weights every T steps of a stream of batches. (2) The
server trains once for all groups. There, each group has a copy of it, which trains on its own.
SemiFL's code has this method as ``start_from: average``: every user starts from the mean over
groups.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, final

import pydantic.dataclasses
import torch

from privssl.algorithms.baselines.fixmatch_uda import ConsistencySettings, ConsistencyTraining
from privssl.algorithms.baselines.pseudo_labeling import PseudoLabelState
from privssl.algorithms.baselines.supervised import ProximalRequest
from privssl.algorithms.local_ssl import Share
from privssl.core.aggregation import average, uniform_weight
from privssl.core.federation import Federation
from privssl.core.messages import StateDict
from privssl.settings.schema import Positive, strict
from privssl.training import local_training


@dataclasses.dataclass(frozen=True)
class FedRGDState(PseudoLabelState):
    """What the server keeps between rounds. F: the mean over groups."""

    # group -> the mean of its users and the server
    groups: Mapping[str, StateDict] = dataclasses.field(default_factory=dict)


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FedRGDConfig(ConsistencySettings):
    """Section ``algorithm`` for FedRGD."""

    name: Literal["fedrgd"] = "fedrgd"
    weights: Literal["equal"] = "equal"  # of users in a group, and of agents with labels
    groups: Positive = 2  # authors' code, CIFAR-10 and SVHN; 1: FedAvg
    start_from: Literal["group", "average"] = "group"  # what a user starts from
    threshold: Share = 0.95  # tau: authors' code
    guess_on: Literal["raw", "weak"] = "weak"  # the clean view: authors' code
    mean_over: Literal["kept", "batch"] = "batch"  # authors' code
    released: Literal["labelled", "averaged"] = "averaged"  # the mean over groups, or the server's


@final
class FedRGD(ConsistencyTraining):
    """FixMatch in parallel with the server, averaged in groups."""

    Config = FedRGDConfig
    StateType = FedRGDState
    cfg: FedRGDConfig

    def start(self, federation: Federation) -> FedRGDState:
        F = self.initial_classifier(federation)
        return FedRGDState(F, F, groups={str(g): F for g in range(self.cfg.groups)})

    def round(self, state: PseudoLabelState, federation: Federation) -> FedRGDState:
        assert isinstance(state, FedRGDState)
        group_of = {a.id: str(i % self.cfg.groups) for i, a in enumerate(federation.query)}
        starts = state.groups
        if self.cfg.start_from == "average":
            starts = dict.fromkeys(state.groups, state.F)
        request = ProximalRequest(state.F)
        server_replies = federation.call_all(federation.support, self.support_pass, request)
        user_replies = federation.call_all(
            federation.sample(federation.query, self.cfg.agents_per_round), self.query_pass,
            lambda agent: ProximalRequest(starts[group_of[agent.id]], self.cfg.proximal),
        )  # fmt: skip
        if all(reply.declined for reply in (*server_replies, *user_replies)):
            return state
        server = average(server_replies, "F", otherwise=state.F)
        groups = {}
        for name in state.groups:
            group_users = [
                r for r in user_replies if group_of[r.sender.id] == name and not r.declined
            ]
            mean = average(group_users, "F", otherwise=server, weight=uniform_weight)
            groups[name] = average_with_server(server, mean, len(group_users))
        return FedRGDState(average_over_groups(groups), server, groups=groups)


def average_with_server(server: StateDict, user_mean: StateDict, count: int) -> StateDict:
    """(server + sum of ``count`` users) / (count + 1), of the users' mean."""
    return local_training.moving_average(user_mean, server, count / (count + 1))


def average_over_groups(groups: Mapping[str, StateDict]) -> StateDict:
    """The plain mean over groups; of integer tensors the first one."""
    first = next(iter(groups.values()))
    return {
        name: torch.stack([weights[name] for weights in groups.values()]).mean(dim=0)
        if value.is_floating_point()
        else value
        for name, value in first.items()
    }
