"""The engine for a GPU: agents of a parallel step train in lockstep, in one stream of kernels.

A small network leaves a GPU idle, because most of a step's time is kernel launches. So steps of
several agents run in lockstep (``training/batched/scheduler.py``), each with its own batches and
random numbers. When a step calls a network or takes an optimiser step, it waits for the others, and
the operation is batched over all: forward passes first (``training/batched/stacking.py``,
``privacy/batched_dp_sgd.py``). Algorithms need no changes. Each account is charged by its own step,
before its rows are read, and no agent's rows or noise enter another's network.

Each step has a copy of the algorithm with its own networks, which is reused for another agent.
Single calls (a sequential pass) run as in the local engine. Results equal those of the other
engines up to float32 rounding: docs/batched_agents.md.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from privssl.algorithms.base import Algorithm
from privssl.core.agents import Agent
from privssl.core.engine import Call
from privssl.core.messages import Reply
from privssl.engines.local import EngineOptions, LocalEngine
from privssl.privacy.batched_dp_sgd import can_sum, clipped_sums_batched, noisy_steps_batched
from privssl.privacy.dp_sgd import ClippedSum, NoisyOptimizerStep
from privssl.training import local_training
from privssl.training.batched import deferred
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

#: Algorithms whose agents may train in lockstep: those that then launch at most a fifth of the
#: kernels. Others gain less than a factor of two, or are not measured (docs/batched_agents.md).
ALGORITHMS = frozenset(
    {"fedavg", "fedmatch_mixup", "fedprox", "fedsem", "fedssl", "mixmatch", "pseudo", "supervise"}
)


def unsupported_settings_reason(algorithm: str, precision: str) -> str | None:
    """Return why agents cannot train in lockstep, with advice; None if they can.

    >>> unsupported_settings_reason("fedssl", "bfloat16")
    'networks that multiply in bfloat16 are computed one by one. Give 1, or run.precision: float32'
    """
    if algorithm not in ALGORITHMS:
        return (
            f"agents of {algorithm} gain too little from it, if anything (docs/batched_agents.md). "
            "Leave it out"
        )
    if precision == "bfloat16":
        return (
            "networks that multiply in bfloat16 are computed one by one. Give 1, or "
            "run.precision: float32"
        )
    return None


def unsupported_reason(device: torch.device) -> str | None:
    """Return why agents cannot train in lockstep with this device, or None.

    >>> unsupported_reason(torch.device("mps"))
    'the device is mps, and this is for cuda (or cpu, where it is slower)'
    """
    if device.type not in ("cpu", "cuda"):
        return f"the device is {device}, and this is for cuda (or cpu, where it is slower)"
    return None


class BatchedEngine(LocalEngine):
    """Runs the calls of a parallel step in lockstep, all others one by one."""

    def __init__(
        self,
        agents: Sequence[Agent],
        *,
        algorithm: Algorithm[Any],
        at_once: int,
        **options: Unpack[EngineOptions],
    ) -> None:
        """
        Args:
            algorithm: whose steps run in lockstep.
            at_once: agents whose networks and batches are in memory at a time, >= 1."""
        super().__init__(agents, **options)
        self._algorithm, self._at_once = algorithm, at_once
        self._copies: list[Algorithm[Any]] = []

    def close(self) -> None:
        self._copies = []
        super().close()

    def _run_calls(self, calls: Sequence[Call]) -> Iterator[Reply[Any]]:
        batchable = self._find_batchable(calls)
        if len(batchable) < 2:
            return super()._run_calls(calls)
        replies: dict[int, Reply[Any]] = {}
        for start in range(0, len(batchable), self._at_once):
            chunk = batchable[start : start + self._at_once]
            replies |= zip(chunk, self._run_batched([calls[index] for index in chunk]), strict=True)
        return (replies.get(index) or self._run_call(call) for index, call in enumerate(calls))

    def _find_batchable(self, calls: Sequence[Call]) -> list[int]:
        """Return the indices of the calls that can run in lockstep."""
        call_counts = Counter(call.to.id for call in calls)
        return [
            index for index, call in enumerate(calls)
            if call_counts[call.to.id] == 1
            and getattr(self._algorithm, call.step.__name__, None) == call.step
        ]  # fmt: skip

    def _run_batched(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        while len(self._copies) < len(calls):
            self._copies.append(_copy_for_batching(self._algorithm))
        own_calls = [
            dataclasses.replace(call, step=getattr(clone, call.step.__name__))
            for call, clone in zip(calls, self._copies, strict=False)
        ]

        def make_task(call: Call) -> Callable[[Request], Reply[Any]]:
            account = self._agents[call.to.id].account
            visits_before = 0 if account is None else account.visits()

            def run_task(submit: Request) -> Reply[Any]:
                def handle_request(request: BatchRequest) -> Any:
                    charged = account is not None and account.visits() > visits_before
                    joint = _is_batchable(request) and (
                        not charged or isinstance(request, WHEN_CHARGED)
                    )
                    return submit(request) if joint else request.run_single()

                with request_handler(handle_request):  # a task has its own thread and context
                    return self._run_call(call)

            return run_task

        joint_steps, private_steps = JointSteps(), JointSteps()
        handlers: tuple[tuple[type, Callable[[Any], Sequence[Any]]], ...] = (
            (Pass, run_passes_batched),
            (BatchedCall, run_calls_batched),
            (ClippedSum, clipped_sums_batched),
        )

        def answer_requests(requests: Sequence[Any]) -> dict[int, Any]:
            for kind, run_batched in handlers:
                matching = {
                    n: request for n, request in enumerate(requests) if isinstance(request, kind)
                }
                if matching:
                    return dict(zip(matching, run_batched(list(matching.values())), strict=True))
            optimizer_steps = [
                request for request in requests if isinstance(request, local_training.OptimizerStep)
            ]
            noisy_steps = [
                request for request in requests if isinstance(request, NoisyOptimizerStep)
            ]
            if optimizer_steps:
                joint_steps.take(optimizer_steps)
            if noisy_steps:
                noisy_steps_batched(noisy_steps, private_steps)
            return dict.fromkeys(range(len(requests)))

        return run_in_lockstep(
            [make_task(call) for call in own_calls], answer_requests, self._device
        )


#: Batched operations of a step that may read private rows. The size of a stack affects the bits of
#: all in it, and other operations may be as many as an agent's private rows or coins determine.
WHEN_CHARGED = (ClippedSum, NoisyOptimizerStep)


def _is_batchable(request: BatchRequest) -> bool:
    if isinstance(request, BatchedCall):
        return can_compute(request)
    return can_sum(request) if isinstance(request, ClippedSum) else True


# Batched networks ----------------------------------------------------------------------------


def _copy_for_batching(algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """Copy an algorithm so that its networks' calls are batched with those of other steps."""
    clone = copy.deepcopy(algorithm)
    for name, network in _find_networks(clone):
        stackable = Stackable(name, network)
        if not stackable.never:
            _batch_forward(stackable)
    return clone


def _find_networks(algorithm: Algorithm[Any]) -> Iterator[tuple[str, nn.Module]]:
    """Yield an algorithm's networks, by attribute, or attribute and name."""
    for name, value in vars(algorithm).items():
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if isinstance(item, nn.Module):
                    yield f"{name}.{key}", item


def _batch_forward(stackable: Stackable) -> None:
    # Stacked gradients have this layout, which saves a copy.
    network = stackable.network.to(memory_format=torch.contiguous_format)
    single_forward = network.forward

    def forward(*inputs: Any, **kwargs: Any) -> Any:
        if kwargs or not can_stack(stackable, inputs):
            return single_forward(*inputs, **kwargs)
        return deferred.submit(Pass(stackable, single_forward, inputs, torch.is_grad_enabled()))

    network.forward = forward
    setattr(network, COPY, stackable)
