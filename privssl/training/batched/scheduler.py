"""Coroutines on threads whose requests are answered in batches.

When all tasks wait for a request, the requests are answered as one batch.

Exactly one task runs at a time, in their order, so results do not depend on timing. Threads are
used only because they can suspend inside a call. Each task has its own state of torch's global
generators.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Request = Callable[[Any], Any]
#: Waiting requests -> answers to some of them, by index.
Handler = Callable[[Sequence[Any]], dict[int, Any]]


class Cancelled(BaseException):
    """Ends a waiting task whose result is not needed."""


def run_in_lockstep(
    functions: Sequence[Callable[[Request], T]], answer: Handler, device: torch.device
) -> list[T]:
    """Run tasks; return their results in order.

    Args:
        functions: each gets a function that takes its requests and returns their answers.
        answer: called on this thread when every task has ended or waits, with the waiting requests
            in the tasks' order. It must answer at least one.
        device: whose generators the tasks use, beside the CPU's.

    Raises:
        The error of the first task that fails, as if the tasks ran one after the other: later tasks
        are cancelled, earlier ones continue, since one of them may fail too.
    """
    random_states = _get_random_states(device)
    tasks: list[_Task[T]] = []
    try:
        for function in functions:
            tasks.append(_Task(function, device))
            tasks[-1].resume(None)
            if tasks[-1].error is not None:
                break
        while waiting := [task for task in _select_unfailed(tasks) if not task.over]:
            answers = answer([task.request for task in waiting])
            for index, task in enumerate(waiting):
                if index in answers and task in _select_unfailed(tasks):
                    task.resume(answers[index])
    finally:
        for task in tasks:
            task.cancel()
        _set_random_states(random_states, device)
    for task in tasks:
        if task.error is not None:
            raise task.error
    return [task.result for task in tasks]


def _select_unfailed(tasks: "Sequence[_Task[T]]") -> "Sequence[_Task[T]]":
    """Return all tasks before the first that failed."""
    failed = (index for index, task in enumerate(tasks) if task.error is not None)
    return tasks[: next(failed, len(tasks))]


class _Task(Generic[T]):
    """One task on its thread."""

    result: T

    def __init__(self, function: Callable[[Request], T], device: torch.device) -> None:
        self.request: Any = None
        self.error: BaseException | None = None
        self.over = False
        self._function, self._device, self._cancelled = function, device, False
        self._chance = _get_random_states(device)
        self._in: SimpleQueue[Any] = SimpleQueue()
        self._out: SimpleQueue[None] = SimpleQueue()
        # daemon: a process that exits does not wait for it
        self._thread = threading.Thread(target=self._run_thread, daemon=True)
        self._thread.start()

    def resume(self, answer: Any) -> None:
        """Run it with an answer until its next request or its end."""
        _set_random_states(self._chance, self._device)
        self._in.put((answer,))
        self._out.get()
        self._chance = _get_random_states(self._device)

    def cancel(self) -> None:
        """Cancel it; if it runs, at its next request. May be called twice."""
        if not self.over:
            self._in.put(None)
        self._thread.join()

    def _run_thread(self) -> None:
        try:
            self._wait_for_answer()
            self.result = self._function(self._ask)
        except Cancelled:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.over = True
            self._out.put(None)

    def _ask(self, request: Any) -> Any:
        self.request = request
        self._out.put(None)
        return self._wait_for_answer()

    def _wait_for_answer(self) -> Any:
        answer = None if self._cancelled else self._in.get()
        if answer is None:
            self._cancelled = True  # also for requests while it unwinds
            raise Cancelled
        return answer[0]


def _get_random_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's global generators."""
    states = [torch.get_rng_state()]
    return states if device.type != "cuda" else [*states, torch.cuda.get_rng_state(device)]


def _set_random_states(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
