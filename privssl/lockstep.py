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
Ask = Callable[[Any], Any]
#: Some of the questions that wait, by their places -> their answers. The others wait on.
Answer = Callable[[Sequence[Any]], dict[int, Any]]


class GivenUp(BaseException):
    """Ends a piece of work, where it waits, that nobody needs any more."""


def in_lockstep(
    pieces: Sequence[Callable[[Ask], T]], answer: Answer, device: torch.device
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
    before = _chance(device)
    lanes: list[_Lane[T]] = []
    try:
        for piece in pieces:
            lanes.append(_Lane(piece, device))
            lanes[-1].go_on(None)
            if lanes[-1].error is not None:
                break
        while waiting := [lane for lane in _that_matter(lanes) if not lane.over]:
            answers = answer([lane.question for lane in waiting])
            for place, lane in enumerate(waiting):
                if place in answers and lane in _that_matter(lanes):
                    lane.go_on(answers[place])
    finally:
        for lane in lanes:
            lane.give_up()
        _set_chance(before, device)
    for lane in lanes:
        if lane.error is not None:
            raise lane.error
    return [lane.result for lane in lanes]


def _that_matter(lanes: "Sequence[_Lane[T]]") -> "Sequence[_Lane[T]]":
    """All before the first that failed."""
    failed = (place for place, lane in enumerate(lanes) if lane.error is not None)
    return lanes[: next(failed, len(lanes))]


class _Lane(Generic[T]):
    """One piece of work on its thread. ``go_on`` and ``give_up`` are for the others."""

    result: T

    def __init__(self, piece: Callable[[Ask], T], device: torch.device) -> None:
        self.question: Any = None
        self.error: BaseException | None = None
        self.over = False
        self._piece, self._device, self._given_up = piece, device, False
        self._chance = _chance(device)
        self._in: SimpleQueue[Any] = SimpleQueue()
        self._out: SimpleQueue[None] = SimpleQueue()
        # daemon: a process that must end does not wait for a thread that waits for it
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def go_on(self, answer: Any) -> None:
        """Let it run with an answer until it asks again or ends."""
        _set_chance(self._chance, self._device)
        self._in.put((answer,))
        self._out.get()
        self._chance = _chance(self._device)

    def give_up(self) -> None:
        """End it, wherever it is; if it runs, at its next question. May be called twice."""
        if not self.over:
            self._in.put(None)
        self._thread.join()

    def _live(self) -> None:
        try:
            self._next()
            self.result = self._piece(self._ask)
        except GivenUp:
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
            raise GivenUp
        return told[0]


def _chance(device: torch.device) -> list[Tensor]:
    """States of the generators that torch draws from when it is given none."""
    states = [torch.get_rng_state()]
    return states if device.type != "cuda" else [*states, torch.cuda.get_rng_state(device)]


def _set_chance(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
