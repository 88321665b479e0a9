"""The base class of all algorithms.

``round`` is the server's script: it calls steps on agents through the federation and returns a new
state. Methods marked ``@on_agent`` are the steps. They run where the data is, take the agent, a
message and a context, and return a message or ``Declined``. An algorithm keeps nothing on itself
between calls. Algorithms are final: a variant is a config field or a new file.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from generators.base import ConditionalGenerator
from privssl.core.federation import Federation
from privssl.core.messages import StateDict
from privssl.core.task import Context, Phase, Task
from privssl.privacy import dp_sgd, label_histogram
from privssl.privacy.plan import Plan
from privssl.settings.schema import PrivacySettings, Problem
from privssl.training import local_training

StateT = TypeVar("StateT")

#: (network as a function, row (1, *shape) in [-1, 1], its class (1,)) -> scalar, low where the
#: network was trained on the row.
CanaryLoss = Callable[[Callable[..., Tensor], Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MissingReplyPolicy:
    """What a run over sites does when an agent does not reply to a step, for every step.

    A site that declines has replied. A missing reply was lost, or its step broke off.
    """

    #: The round continues with the agents that replied, if they are at least ``run.quorum``.
    quorum: tuple[str, ...] = ()
    #: Steps in sequence: with ``run.absent: skip`` the next agent starts where the last one ended.
    skip: tuple[str, ...] = ()
    #: Steps that need every agent: the run stops, and continues when all are back.
    needed: tuple[str, ...] = ()
    #: The reason, a sentence that is shown while the run waits for the agents.
    needed_because: str = ""
    #: ``run.absent`` where the config does not set it.
    absent: Literal["stop", "skip"] = "stop"


class Algorithm(ABC, Generic[StateT]):
    """Base of all algorithms. ``StateT`` is a frozen dataclass of state dicts and numbers."""

    #: The frozen pydantic dataclass of the ``algorithm`` section; has ``name`` and ``rounds``.
    Config: ClassVar[type[Any]]
    #: Whether the algorithm can train under a privacy plan.
    can_be_private: ClassVar[bool] = False
    #: Whether a round is the same whatever ``rounds`` is: a finished run can then be lengthened.
    can_be_lengthened: ClassVar[bool] = False
    #: How labelled rows are protected there: noise on gradients, or on counts of labels.
    mechanism: ClassVar[Literal["dp-sgd", "census"]] = "dp-sgd"
    #: Whether agents send anything computed from their unlabelled rows.
    reads_unlabelled: ClassVar[bool] = True
    #: Why rows must be images; "": rows of every kind can be.
    needs_images: ClassVar[str] = ""
    #: What the height and width of images must be multiples of.
    sides_divisible_by: ClassVar[int] = 1
    #: What happens in a run over sites when a reply is missing; unnamed steps need all agents.
    missing_reply_policy: ClassVar[MissingReplyPolicy] = MissingReplyPolicy()
    #: Class of the state, so that a checkpoint can be read back.
    StateType: ClassVar[type[Any]]

    #: None, or the plan of its mechanism: a ``PrivatePlan`` or a ``CensusPlan``.
    plan: Any

    def __init__(self, config: Any, task: Task, plan: Plan | None = None) -> None:
        """``plan`` makes the run private; only algorithms with ``can_be_private`` get one."""
        self.cfg = config
        self.task = task
        self.plan = plan
        self._F = task.new_classifier()

    def initial_classifier(self, federation: Federation) -> StateDict:
        """Weights of an untrained F, drawn from the seed of the run."""
        return local_training.fresh_weights(self.task.new_classifier, federation.rng("init F"))

    def load_classifier(self, weights: StateDict, ctx: Context) -> nn.Module:
        """F with these weights on the device of a step, in training mode."""
        return local_training.load_weights(self._F, weights, ctx.device)

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        """Settings that this algorithm cannot run with: dotted key and advice.

        Args:
            config: the ``privssl.experiment.config.Config`` being checked.
        """
        return iter(())

    @classmethod
    def missing_reply_policy_for(cls, cfg: Any, *, private: bool) -> MissingReplyPolicy:
        """The policy under these settings.

        Args:
            cfg: the ``algorithm`` section.
            private: whether the run is under a privacy plan.
        """
        return cls.missing_reply_policy

    @classmethod
    def make_plan(
        cls, settings: PrivacySettings, *, rounds: int, rows_per_agent: float, agents: int = 1
    ) -> Plan:
        """The plan of its mechanism; all its numbers are public and fixed before the run.

        Args:
            settings: the privacy section.
            rounds: of the run; a support agent is visited at most once in each.
            rows_per_agent: declared labelled rows of a support agent, public.
            agents: number of support agents.

        Raises:
            accounting.errors.PlanError: no noise fits the budget.
        """
        if cls.mechanism == "census":
            return label_histogram.make_census_plan(settings, rows=rows_per_agent * agents)
        return dp_sgd.make_dp_sgd_plan(settings, rounds=rounds, rows_per_agent=rows_per_agent)

    def networks(self) -> Mapping[str, nn.Module]:
        """The networks by name. Their weights have no meaning between steps."""
        return {"F": self._F}

    def check_private(self) -> None:
        """Raise PrivacyError when one row changes another row's private loss.

        Required where ``can_be_private``, except for a census, which trains on no labelled row.
        """
        if self.mechanism != "census":
            raise NotImplementedError(f"{type(self).__name__} cannot be trained privately")

    def try_private(self, device: torch.device) -> None:
        """Raise PrivacyError where private steps on this device would, before one is charged."""

    def canary_losses(self) -> Mapping[str, "CanaryLoss"]:
        """What the audit attacks: network -> loss of one labelled row.

        The names are those of the message fields that carry the networks. The rows are made by the
        audit, never an agent's.
        """
        return {"F": lambda F, x, y: cross_entropy(F(x), y)}

    def phases(self) -> tuple[Phase, ...]:
        """The phases of a run; one by default."""
        return (Phase("train", self.cfg.rounds),)

    @abstractmethod
    def start(self, federation: Federation) -> StateT:
        """The state before the first round."""

    @abstractmethod
    def round(self, state: StateT, federation: Federation) -> StateT:
        """One round: call agents, return the new state."""

    def finish(self, state: StateT, federation: Federation) -> StateT:
        """The state after the last round."""
        return state

    @abstractmethod
    def classifier(self, state: StateT) -> StateDict:
        """The weights that are evaluated and released."""

    def also_evaluated(self, state: StateT) -> Mapping[str, StateDict]:
        """Other classifiers whose accuracy is logged: name -> weights."""
        return {}

    def own_classifiers(self, state: StateT) -> Mapping[str, StateDict]:
        """The networks of single agents, where the server has them: agent -> weights. Their mean
        accuracy is measured with ``run.evaluate_agents``."""
        return {}

    def metrics(self, state: StateT) -> Mapping[str, float]:
        """Numbers of the server for the tracker."""
        return {}

    def generator(self, state: StateT) -> ConditionalGenerator | None:
        """The generator whose rows are measured and given out, in eval mode on the CPU; None where
        there is none. It is overwritten by the next step."""
        return None

    def pictures(self, state: StateT, x: Tensor, y: Tensor) -> Mapping[str, np.ndarray]:
        """Pictures for TensorBoard: tag -> uint8 image.

        Args:
            x: held-out rows (N, *shape) in [-1, 1]; never rows of an agent.
            y: their classes (N,).
        """
        return {}
