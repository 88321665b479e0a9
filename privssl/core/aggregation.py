"""The average that a server takes of what agents send (FedAvg, McMahan et al. 2017).

Who sends may mean harm: an average is taken only of weights of one form, by shares that add up.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from privssl.core.agents import natural_order
from privssl.core.messages import Ack, MessageError, Reply, StateDict

#: Numbers that are averaged at once. Their float64 stay in a cache: of 1.6 million, that saves a
#: fifth of the time.
PIECE = 2**18


def uniform_weight(_: Reply[Any]) -> float:
    """The same share for every reply, as ``weight`` of a ``WeightedMean``."""
    return 1.0


class WeightedMean:
    """The weighted mean of one field over the agents that send it, taken while replies come.

    Each is added and let go, so that one network lies in memory and not one for each agent.
    ``Federation.ask_each`` fills it (``into``).

    >>> from dataclasses import dataclass
    >>> from privssl.core.agents import AgentRef
    >>> from privssl.core.messages import Message
    >>> @dataclass(frozen=True)
    ... class Trained(Message):
    ...     F: StateDict
    >>> F = WeightedMean("F")
    >>> for name, value in (("q0", 1.0), ("q1", 4.0)):
    ...     said = Trained({"w": torch.tensor([value])})
    ...     F.add(Reply(AgentRef(name, "query"), said, weight=value))
    >>> F.value_or({})  # (1 * 1 + 4 * 4) / (1 + 4)
    {'w': tensor([3.4000])}
    """

    def __init__(
        self, name: str, weight: Callable[[Reply[Any]], float] = lambda reply: reply.weight
    ) -> None:
        """
        Args:
            name: field of the message, a StateDict or None (not sent).
            weight: share of a reply, >= 0 and finite.
        """
        self._name, self._weight = name, weight
        self._total, self._largest = 0.0, (0.0, "")  # of shares; the largest, and whose it is
        self._first, self._like = "", dict[str, Tensor]()  # whose form is asked of all others
        self._wide, self._pieces = dict[str, Tensor](), list[_Piece]()

    def add(self, reply: Reply[Any]) -> None:
        """Count a reply, unless it is silent, lacks the field or has no share.

        Raises:
            MessageError: its share, or the sum of all, is negative or not finite, or its weights
                have other names, shapes or types than those of the first: by broadcasting or a
                wider type one sender could otherwise take over the mean.
        """
        sent: StateDict | None = None if reply.declined else getattr(reply.payload, self._name)
        if sent is None:
            return
        share, sender = self._weight(reply), reply.sender.id
        if not (math.isfinite(share) and share >= 0):
            raise MessageError(
                f"{sender} has the share {share} in the average of {self._name}: it must be a "
                "number >= 0. Leave this agent out"
            )
        if not share:
            return
        self._total, self._largest = self._total + share, max(self._largest, (share, sender))
        if not math.isfinite(self._total):  # every share would be 0, and the mean with it
            largest, whose = self._largest
            raise MessageError(
                f"the shares in the average of {self._name} add up to no number: {whose} has "
                f"{largest:g}. Leave this agent out"
            )
        if not self._first:
            self._first = sender
            self._like = {key: torch.empty_like(part, device="meta") for key, part in sent.items()}
            # float64: a sum over many agents must not lose what a single one changed
            whole = torch.zeros(sum(part.numel() for part in sent.values()), dtype=torch.float64)
            parts = torch.split(whole, [part.numel() for part in sent.values()])
            self._wide = {
                key: mean.view(part.shape)
                for (key, part), mean in zip(sent.items(), parts, strict=True)
            }
            self._pieces = _pieces(whole, sent)
        self._check_form(sent, sender)
        flat = {key: part.reshape(-1) for key, part in sent.items()}
        for piece in self._pieces:
            some = [flat[key] if rows is None else flat[key][rows] for key, rows in piece.where]
            torch._foreach_copy_(piece.rooms, some)
            piece.mean.lerp_(piece.numbers, share / self._total)

    def consume(self, reply: Reply[Any]) -> Reply[Any]:
        """Add a reply; what is left of it: whose it is, its share, and that it spoke."""
        self.add(reply)
        return reply if reply.declined else dataclasses.replace(reply, content=Ack())

    def value_or(self, nobody: StateDict) -> StateDict:
        """The mean; ``nobody`` where nothing was added: the caller must decide what that means."""
        if not self._first:
            return nobody
        return {
            key: (self._wide[key] if like.is_floating_point() else self._wide[key].round()).to(
                like.dtype
            )
            for key, like in self._like.items()
        }

    def _check_form(self, sent: StateDict, sender: str) -> None:
        """Raise MessageError unless weights are of the form of the first's."""
        forms = [
            {k: (t.dtype, t.shape) for k, t in weights.items()} for weights in (sent, self._like)
        ]
        if forms[0] == forms[1]:
            return
        for key in sorted(sent.keys() | self._like.keys()):
            here, there = _form(sent, key), _form(self._like, key)
            if here != there:
                raise MessageError(
                    f"{sender} and {self._first} sent {self._name} in unlike forms: {key} is "
                    f"{here} here and {there} there. Leave the agent with the wrong one out"
                )


class _Piece(NamedTuple):
    """Numbers that are averaged at once, of one field or of several."""

    where: list[tuple[str, slice | None]]  # which of each field's; None: all
    rooms: list[Tensor]  # for these, in float64,
    numbers: Tensor  # and all of them, one behind the other
    mean: Tensor  # of all replies so far; the same numbers


def _pieces(whole: Tensor, sent: StateDict) -> list[_Piece]:
    """``whole``: the mean of all fields, one behind the other, which the pieces share."""
    found: list[list[tuple[str, slice | None, int]]] = []
    left = 0
    for key, part in sent.items():
        count = part.numel()
        for begin in range(0, count, PIECE):
            some = min(PIECE, count - begin)
            if some > left:
                found.append([])
                left = PIECE
            found[-1].append((key, None if some == count else slice(begin, begin + some), some))
            left -= some
    room = torch.empty(min(PIECE, len(whole)), dtype=torch.float64)
    pieces, at = [], 0
    for group in found:
        sizes = [some for *_, some in group]
        numbers = room[: sum(sizes)]
        rooms, mean = list(torch.split(numbers, sizes)), whole[at : at + len(numbers)]
        pieces.append(_Piece([(key, rows) for key, rows, _ in group], rooms, numbers, mean))
        at += len(numbers)
    return pieces


def average(
    replies: Sequence[Reply[Any]],
    name: str,
    *,
    otherwise: StateDict,
    weight: Callable[[Reply[Any]], float] = lambda reply: reply.weight,
) -> StateDict:
    """``WeightedMean`` of replies that are here already.

    Args:
        replies: in any order; the sum is taken in natural order of the senders, so that the
            order of arrival cannot change a bit.
        name, weight: as of ``WeightedMean``.
        otherwise: the answer when nobody sent it.

    Raises:
        MessageError: see ``WeightedMean.add``.
    """
    mean = WeightedMean(name, weight)
    for reply in sorted(replies, key=lambda reply: natural_order(reply.sender.id)):
        mean.add(reply)
    return mean.value_or(otherwise)


def _form(weights: StateDict, key: str) -> str:
    """Type and shape of a tensor in words.

    >>> _form({"w": torch.ones(2, 3)}, "w"), _form({}, "w")
    ('float32 [2, 3]', 'absent')
    """
    if key not in weights:
        return "absent"
    return f"{str(weights[key].dtype).removeprefix('torch.')} {list(weights[key].shape)}"
