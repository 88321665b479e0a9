"""What an algorithm is: a frozen recipe with a script for the server and steps for agents.

``round`` is the script: it speaks to agents only through the world's verbs and returns a new
state. Methods marked ``@on_agent`` are the steps; they run where the data is, get the agent,
a message and a context, and return a message or ``Declined``. An algorithm keeps nothing on
itself between calls. Algorithms are final: a variant is a config field or a new file.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from privssl.core.messages import StateDict
from privssl.privacy import dp_sgd, label_histogram
from privssl.privacy.plan import Plan
from privssl.settings.schema import PrivacySettings, Problem

if TYPE_CHECKING:
    from privssl.core.federation import Federation

from privssl.core.task import Phase, Task

StateT = TypeVar("StateT")


#: (a network as a function, a row (1, *shape) in [-1, 1], its class (1,)) -> scalar, low where
#: the network was trained on the row.
CanaryLoss = Callable[[Callable[..., Tensor], Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MissingReplyPolicy:
    """What becomes of a run over sites where an agent has no reply to a step, for every step.

    A site that declines has replied. What is missing here was lost on the way, or broke off.
    """

    #: Averaged, or nothing of it is: goes on with those who replied, if they are ``run.quorum`` of
    #: those who were asked, never with fewer.
    quorum: tuple[str, ...] = ()
    #: From agent to agent: with ``run.absent: skip`` the next one takes what the last one sent.
    skip: tuple[str, ...] = ()
    #: Stands on everyone: the run stops, and goes on when they are back.
    needed: tuple[str, ...] = ()
    #: Why so, in a sentence for whoever waits for them.
    needed_because: str = ""
    #: ``run.absent`` where the config says nothing.
    absent: Literal["stop", "skip"] = "stop"


class Algorithm(ABC, Generic[StateT]):
    """Base of all algorithms. ``StateT`` is a frozen dataclass of state dicts and numbers."""

    #: The frozen pydantic dataclass of the ``algorithm`` section; has ``name`` and ``rounds``.
    Config: ClassVar[type[Any]]
    #: Whether the algorithm can train under a privacy plan.
    can_be_private: ClassVar[bool] = False
    #: How labelled rows are protected there: by noise on gradients, or on counts of labels.
    mechanism: ClassVar[Literal["dp-sgd", "census"]] = "dp-sgd"
    #: Whether agents are asked for anything that is made of their unlabelled rows.
    reads_unlabelled: ClassVar[bool] = True
    #: What the height and width of rows must be multiples of.
    sides_divisible_by: ClassVar[int] = 1
    #: What a run over sites goes on without; a step that is not named is needed of all.
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

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        """What in the whole config this algorithm cannot run with: dotted key and advice.

        Args:
            config: the ``privssl.experiment.config.Config`` being checked.
        """
        return iter(())

    @classmethod
    def missing_reply_policy_for(cls, cfg: Any, *, private: bool) -> MissingReplyPolicy:
        """What a run over sites goes on without, with these settings of the algorithm.

        Args:
            cfg: the ``algorithm`` section.
            private: whether the run is under a privacy plan.
        """
        return cls.missing_reply_policy

    @classmethod
    def make_plan(
        cls, settings: PrivacySettings, *, rounds: int, rows_per_agent: float, agents: int = 1
    ) -> Plan:
        """The plan of its mechanism, every number of it public and fixed before the run.

        Args:
            settings: the privacy section.
            rounds: of the whole run; a support agent is visited at most once in each.
            rows_per_agent: declared labelled rows of one support agent, public.
            agents: number of support agents.

        Raises:
            accounting.errors.PlanError: no noise fits the budget.
        """
        if cls.mechanism == "census":
            return label_histogram.make_census_plan(settings, rows=rows_per_agent * agents)
        return dp_sgd.make_dp_sgd_plan(settings, rounds=rounds, rows_per_agent=rows_per_agent)

    def networks(self) -> Mapping[str, nn.Module]:
        """The networks by name, for checks; their weights mean nothing between visits."""
        return {}

    def check_private(self) -> None:
        """Raises PrivacyError when a private loss mixes rows. Owed where ``can_be_private``,
        except by a census: no network learns from its labelled rows."""
        if self.mechanism != "census":
            raise NotImplementedError(f"{type(self).__name__} cannot be trained privately")

    def try_private(self, device: torch.device) -> None:
        """Raises PrivacyError where private visits on this device would be refused, before one is
        paid for (``local_dp_sgd.tried_out``). Each visit tries the same by itself."""

    def canary_losses(self) -> Mapping[str, "CanaryLoss"]:
        """What the audit attacks: network -> how badly it knows one labelled row.

        The names are those of the fields of the messages that carry the networks. Used on rows
        that the audit makes up, never on an agent's.
        """
        return {"F": lambda F, x, y: cross_entropy(F(x), y)}

    def phases(self) -> tuple[Phase, ...]:
        """The stretches of a run; one by default."""
        return (Phase("train", self.cfg.rounds),)

    @abstractmethod
    def start(self, federation: "Federation") -> StateT:
        """The state before the first round."""

    @abstractmethod
    def round(self, state: StateT, federation: "Federation") -> StateT:
        """One round: talk to agents, return the new state."""

    def finish(self, state: StateT, federation: "Federation") -> StateT:
        """After the last round."""
        return state

    @abstractmethod
    def classifier(self, state: StateT) -> StateDict:
        """The weights that are evaluated and released."""

    def also_evaluated(self, state: StateT) -> Mapping[str, StateDict]:
        """Other classifiers whose accuracy is worth a curve: name -> weights."""
        return {}

    def metrics(self, state: StateT) -> Mapping[str, float]:
        """Numbers of the server's own for the tracker."""
        return {}

    def pictures(self, state: StateT, x: Tensor, y: Tensor) -> Mapping[str, np.ndarray]:
        """Pictures for TensorBoard: tag -> uint8 image.

        Args:
            x: held-out rows (N, *shape) in [-1, 1]; never rows of an agent.
            y: their classes (N,).
        """
        return {}
