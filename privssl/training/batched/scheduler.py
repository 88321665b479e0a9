"""Pieces of work in lockstep: where each of them asks a question, all are answered at once.

A piece is a plain function on a thread of its own, but of all threads one runs at a time: the turn
is handed on when a piece asks or ends, in the order of the pieces, so that nothing depends on the
clock. Threads are here for their stacks alone: a piece can stop in the middle of a call.

Torch's own generators belong to a process. Here each piece has them to itself: what one piece draws
or seeds, no other sees.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Request = Callable[[Any], Any]
#: Some of the questions that wait, by their places -> their answers. The others wait on.
Handler = Callable[[Sequence[Any]], dict[int, Any]]


class Cancelled(BaseException):
    """Ends a piece of work, where it waits, that nobody needs any more."""


def run_in_lockstep(
    functions: Sequence[Callable[[Request], T]], answer: Handler, device: torch.device
) -> list[T]:
    """What the pieces return, in their order.

    Args:
        pieces: each gets a function, takes its questions to it and gets the answers.
        answer: called on this thread, whenever every piece has ended or waits, with the questions
            of those that wait in the order of the pieces. It must answer at least one.
        device: whose generators the pieces draw from, beside the CPU's.

    Raises:
        The error of the first piece that fails. Pieces after it are given up, those before are
        carried on with, as one of them may fail as well: so it is the error that the same pieces
        raise one after the other.
    """
    before = _random_states(device)
    tasks: list[_Task[T]] = []
    try:
        for function in functions:
            tasks.append(_Task(function, device))
            tasks[-1].resume(None)
            if tasks[-1].error is not None:
                break
        while waiting := [task for task in _unfinished(tasks) if not task.over]:
            answers = answer([task.question for task in waiting])
            for place, task in enumerate(waiting):
                if place in answers and task in _unfinished(tasks):
                    task.resume(answers[place])
    finally:
        for task in tasks:
            task.cancel()
        _set_random_states(before, device)
    for task in tasks:
        if task.error is not None:
            raise task.error
    return [task.result for task in tasks]


def _unfinished(tasks: "Sequence[_Task[T]]") -> "Sequence[_Task[T]]":
    """All before the first that failed."""
    failed = (place for place, task in enumerate(tasks) if task.error is not None)
    return tasks[: next(failed, len(tasks))]


class _Task(Generic[T]):
    """One piece of work on its thread. ``resume`` and ``cancel`` are for the others."""

    result: T

    def __init__(self, function: Callable[[Request], T], device: torch.device) -> None:
        self.question: Any = None
        self.error: BaseException | None = None
        self.over = False
        self._piece, self._device, self._given_up = function, device, False
        self._chance = _random_states(device)
        self._in: SimpleQueue[Any] = SimpleQueue()
        self._out: SimpleQueue[None] = SimpleQueue()
        # daemon: a process that must end does not wait for a thread that waits for it
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def resume(self, answer: Any) -> None:
        """Let it run with an answer until it asks again or ends."""
        _set_random_states(self._chance, self._device)
        self._in.put((answer,))
        self._out.get()
        self._chance = _random_states(self._device)

    def cancel(self) -> None:
        """End it, wherever it is; if it runs, at its next question. May be called twice."""
        if not self.over:
            self._in.put(None)
        self._thread.join()

    def _live(self) -> None:
        try:
            self._next()
            self.result = self._piece(self._ask)
        except Cancelled:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.over = True
            self._out.put(None)

    def _ask(self, question: Any) -> Any:
        self.question = question
        self._out.put(None)
        return self._next()

    def _next(self) -> Any:
        told = None if self._given_up else self._in.get()
        if told is None:
            self._given_up = True  # also whatever it asks on its way out
            raise Cancelled
        return told[0]


def _random_states(device: torch.device) -> list[Tensor]:
    """States of the generators that torch draws from when it is given none."""
    states = [torch.get_rng_state()]
    return states if device.type != "cuda" else [*states, torch.cuda.get_rng_state(device)]


def _set_random_states(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
