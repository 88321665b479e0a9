"""The engine for a GPU: agents of a parallel step train side by side, in one stream of kernels.

A small network leaves a GPU idle: nearly all of a step's time goes into starting its kernels. So
visits run in lockstep (``training/batched/scheduler.py``). A visit is what it always was, one
agent's walk through its batches with random numbers of its own. But where it calls a network of its
algorithm, or goes a step down a loss (``local_training.minimise``), it waits for the others, and
the pass or the step is done for all of them at once (``training/batched/stacking.py``). An
algorithm does not know of it.

First all passes that visits wait for; when every visit waits for a step, the steps: so one that had
more passes before a step meets the others again there. One with fewer steps leaves earlier. Steps
of DP-SGD go the same way (``privacy/batched_dp_sgd.py``). Each agent's account is charged by its
own visit, before its rows are read, and nothing of its rows or its noise enters another's network.

Each visit has a copy of the algorithm with networks of its own. An algorithm keeps nothing between
visits, so the copy serves another agent afterwards.

What is done one after the other as ever: a call without company (a sequential pass, as that of
Algorithm 2 of Fan et al.). Results equal those of the other engines up to the rounding of float32:
docs/batched_agents.md.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from privssl.algorithms.base import Algorithm
from privssl.core.agents import Agent
from privssl.core.engine import Call
from privssl.core.messages import Reply
from privssl.core.task import LabelMeter
from privssl.engines.local import LocalEngine
from privssl.privacy.batched_dp_sgd import can_sum, clipped_sums_batched, noisy_steps_batched
from privssl.privacy.dp_sgd import ClippedSum, NoisyOptimizerStep
from privssl.storage.spill_store import SpillStore
from privssl.training import local_training
from privssl.training.batched.deferred import BatchedCall, BatchRequest, request_handler
from privssl.training.batched.scheduler import Request, run_in_lockstep
from privssl.training.batched.stacking import (
    COPY,
    JointSteps,
    Pass,
    Stackable,
    can_compute,
    can_stack,
    run_calls_batched,
    run_passes_batched,
)


def unsupported_reason(device: torch.device) -> str | None:
    """Why agents cannot train side by side, as half a sentence; None: they can.

    >>> unsupported_reason(torch.device("mps"))
    'the device is mps, and this is for cuda (or cpu, where it is slower)'
    """
    if device.type not in ("cpu", "cuda"):
        return f"the device is {device}, and this is for cuda (or cpu, where it is slower)"
    return None


class BatchedEngine(LocalEngine):
    """Delivers the calls of a parallel step to visits in lockstep, all others one by one."""

    def __init__(
        self,
        agents: Sequence[Agent],
        *,
        algorithm: Algorithm[Any],
        at_once: int,
        seed: int,
        device: torch.device,
        meter: LabelMeter | None = None,
        check_wire: bool = False,
        spill_store: SpillStore | None = None,
    ) -> None:
        """``algorithm``: whose steps will be called; a step of anybody else is done one by one.

        ``at_once``: agents whose networks and batches are held at a time, >= 1.
        """
        super().__init__(
            agents,
            seed=seed,
            device=device,
            meter=meter,
            check_wire=check_wire,
            spill_store=spill_store,
        )
        self._algorithm, self._at_once = algorithm, at_once
        self._copies: list[Algorithm[Any]] = []

    def close(self) -> None:
        self._copies = []
        super().close()

    def _run_calls(self, calls: Sequence[Call]) -> Iterator[Reply[Any]]:
        together = self._that_may_meet(calls)
        if len(together) < 2:
            return super()._run_calls(calls)
        replies: dict[int, Reply[Any]] = {}
        for start in range(0, len(together), self._at_once):
            some = together[start : start + self._at_once]
            replies |= zip(some, self._side_by_side([calls[place] for place in some]), strict=True)
        return (replies.get(place) or self._visit(call) for place, call in enumerate(calls))

    def _that_may_meet(self, calls: Sequence[Call]) -> list[int]:
        """Places of the calls that may be in lockstep."""
        often = Counter(call.to.id for call in calls)
        return [
            place for place, call in enumerate(calls)
            if often[call.to.id] == 1
            and getattr(self._algorithm, call.step.__name__, None) == call.step
        ]  # fmt: skip

    def _side_by_side(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        while len(self._copies) < len(calls):
            self._copies.append(_asking_copy(self._algorithm))
        visits = [
            dataclasses.replace(call, step=getattr(own, call.step.__name__))
            for call, own in zip(calls, self._copies, strict=False)
        ]

        def piece(visit: Call) -> Callable[[Request], Reply[Any]]:
            def work(ask: Request) -> Reply[Any]:
                _ask.set(ask)  # the thread, and with it the context, is this piece's own

                def jointly(one: BatchRequest) -> Any:
                    return ask(one) if _can_be_joint(one) else one.run_single()

                with request_handler(jointly):
                    return self._visit(visit)

            return work

        steps, private = JointSteps(), JointSteps()
        at_once: tuple[tuple[type, Callable[[Any], Sequence[Any]]], ...] = (
            (Pass, run_passes_batched),
            (BatchedCall, run_calls_batched),
            (ClippedSum, clipped_sums_batched),
        )

        def answer(questions: Sequence[Any]) -> dict[int, Any]:
            for kind, as_one in at_once:
                wanted = {n: asked for n, asked in enumerate(questions) if isinstance(asked, kind)}
                if wanted:
                    return dict(zip(wanted, as_one(list(wanted.values())), strict=True))
            descents = [
                asked for asked in questions if isinstance(asked, local_training.OptimizerStep)
            ]
            noisy = [asked for asked in questions if isinstance(asked, NoisyOptimizerStep)]
            if descents:
                steps.take(descents)
            if noisy:
                noisy_steps_batched(noisy, private)
            return dict.fromkeys(range(len(questions)))

        return run_in_lockstep([piece(visit) for visit in visits], answer, self._device)


def _can_be_joint(one: BatchRequest) -> bool:
    if isinstance(one, BatchedCall):
        return can_compute(one)
    return can_sum(one) if isinstance(one, ClippedSum) else True


# Networks that ask ---------------------------------------------------------------------------

#: On the thread of a visit in lockstep: how it asks for what is done for all.
_ask: ContextVar[Request | None] = ContextVar("ask", default=None)


def _asking_copy(algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """A copy whose networks, where a visit calls them, ask for a pass together with others."""
    own = copy.deepcopy(algorithm)
    for name, network in _networks(own):
        stackable = Stackable(name, network)
        if not stackable.never:
            _let_ask(stackable)
    return own


def _networks(algorithm: Algorithm[Any]) -> Iterator[tuple[str, nn.Module]]:
    """All that an algorithm holds, by attribute, or attribute and name."""
    for name, value in vars(algorithm).items():
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                if isinstance(inner, nn.Module):
                    yield f"{name}.{key}", inner


def _let_ask(copy: Stackable) -> None:
    # In plain layout: gradients come out of a stack so, and need not be copied once more.
    network = copy.network.to(memory_format=torch.contiguous_format)
    alone = network.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        ask = _ask.get()  # None outside of visits, so also where the question is answered
        if ask is None or named or not can_stack(copy, inputs):
            return alone(*inputs, **named)
        return ask(Pass(copy, alone, inputs, torch.is_grad_enabled()))

    network.forward = forward
    setattr(network, COPY, copy)
