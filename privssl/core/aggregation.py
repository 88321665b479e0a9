"""The weighted mean of agents' messages (FedAvg, McMahan et al. 2017).

Senders are untrusted: tensors must agree in names, shapes and types, and weights must be finite.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from privssl.core.agents import natural_order
from privssl.core.messages import Ack, MessageError, Reply, StateDict

#: Numbers averaged at once: small enough that their float64 copies stay in the cache.
PIECE = 2**18


def uniform_weight(_: Reply[Any]) -> float:
    """Return the same weight for every reply."""
    return 1.0


class WeightedMean:
    """The running weighted mean of one field over the agents that send it.

    Needs the memory of one network, not one per agent. Pass it to ``Federation.call_all`` as
    ``aggregator``.

    >>> from dataclasses import dataclass
    >>> from privssl.core.agents import AgentRef
    >>> from privssl.core.messages import Message
    >>> @dataclass(frozen=True)
    ... class Trained(Message):
    ...     F: StateDict
    >>> F = WeightedMean("F")
    >>> for name, value in (("q0", 1.0), ("q1", 4.0)):
    ...     message = Trained({"w": torch.tensor([value])})
    ...     F.add(Reply(AgentRef(name, "query"), message, weight=value))
    >>> F.value_or({})  # (1 * 1 + 4 * 4) / (1 + 4)
    {'w': tensor([3.4000])}
    """

    def __init__(
        self, name: str, weight: Callable[[Reply[Any]], float] = lambda reply: reply.weight
    ) -> None:
        """Set the field and its weights.

        Args:
            name: field of the message, a StateDict or None (not sent).
            weight: weight of a reply, >= 0 and finite.
        """
        self._name, self._weight = name, weight
        self._total, self._largest = 0.0, (0.0, "")  # of weights; the largest, and its sender
        self._first, self._like = "", dict[str, Tensor]()  # all others must have this form
        self._wide, self._pieces = dict[str, Tensor](), list[_Piece]()

    def add(self, reply: Reply[Any]) -> None:
        """Add a reply, unless it was declined, lacks the field or has weight 0.

        Raises:
            MessageError: its weight, or the sum of all, is negative or not finite, or its tensors
                differ from the first in names, shapes or types: broadcasting or a wider type could
                let one sender dominate the mean.
        """
        sent: StateDict | None = None if reply.declined else getattr(reply.payload, self._name)
        if sent is None:
            return
        weight, sender = self._weight(reply), reply.sender.id
        if not (math.isfinite(weight) and weight >= 0):
            raise MessageError(
                f"{sender} has the weight {weight} in the mean of {self._name}, which must be a "
                "number >= 0. Leave this agent out"
            )
        if not weight:
            return
        self._total, self._largest = self._total + weight, max(self._largest, (weight, sender))
        if not math.isfinite(self._total):  # all later weights would be 0
            largest, agent = self._largest
            raise MessageError(
                f"The sum of the weights in the mean of {self._name} overflows: {agent} has "
                f"{largest:g}. Leave this agent out"
            )
        if not self._first:
            self._first = sender
            self._like = {key: torch.empty_like(part, device="meta") for key, part in sent.items()}
            # float64 keeps a single agent's contribution to a mean over many
            flat_mean = torch.zeros(
                sum(part.numel() for part in sent.values()), dtype=torch.float64
            )
            means = torch.split(flat_mean, [part.numel() for part in sent.values()])
            self._wide = {
                key: mean.view(part.shape)
                for (key, part), mean in zip(sent.items(), means, strict=True)
            }
            self._pieces = _split_into_pieces(flat_mean, sent)
        self._check_form(sent, sender)
        flat = {key: part.reshape(-1) for key, part in sent.items()}
        for piece in self._pieces:
            values = [flat[key] if rows is None else flat[key][rows] for key, rows in piece.slices]
            torch._foreach_copy_(piece.copies, values)
            piece.mean.lerp_(piece.numbers, weight / self._total)

    def consume(self, reply: Reply[Any]) -> Reply[Any]:
        """Add a reply, and return it with an ``Ack`` in place of its content."""
        self.add(reply)
        return reply if reply.declined else dataclasses.replace(reply, content=Ack())

    def value_or(self, nobody: StateDict) -> StateDict:
        """Return the mean, or ``nobody`` if no reply was added."""
        if not self._first:
            return nobody
        return {
            key: (self._wide[key] if like.is_floating_point() else self._wide[key].round()).to(
                like.dtype
            )
            for key, like in self._like.items()
        }

    def _check_form(self, sent: StateDict, sender: str) -> None:
        """Raise MessageError unless names, shapes and types equal the first's."""
        forms = [
            {k: (t.dtype, t.shape) for k, t in weights.items()} for weights in (sent, self._like)
        ]
        if forms[0] == forms[1]:
            return
        for key in sorted(sent.keys() | self._like.keys()):
            form, expected = _describe_tensor(sent, key), _describe_tensor(self._like, key)
            if form != expected:
                raise MessageError(
                    f"{sender} and {self._first} sent {self._name} in unlike forms: {key} is "
                    f"{form} and {expected}. Leave the agent with the wrong one out"
                )


class _Piece(NamedTuple):
    """Numbers averaged at once, of one or several tensors."""

    slices: list[tuple[str, slice | None]]  # tensor and rows; None: all
    copies: list[Tensor]  # float64 copies of these,
    numbers: Tensor  # and one flat tensor of which they are views
    mean: Tensor  # of all replies so far


def _split_into_pieces(flat_mean: Tensor, sent: StateDict) -> list[_Piece]:
    """Split the mean ``flat_mean`` of all tensors into pieces."""
    groups: list[list[tuple[str, slice | None, int]]] = []
    free = 0
    for key, part in sent.items():
        count = part.numel()
        for start in range(0, count, PIECE):
            size = min(PIECE, count - start)
            if size > free:
                groups.append([])
                free = PIECE
            groups[-1].append((key, None if size == count else slice(start, start + size), size))
            free -= size
    buffer = torch.empty(min(PIECE, len(flat_mean)), dtype=torch.float64)
    pieces, offset = [], 0
    for group in groups:
        sizes = [size for *_, size in group]
        numbers = buffer[: sum(sizes)]
        copies, mean = list(torch.split(numbers, sizes)), flat_mean[offset : offset + len(numbers)]
        pieces.append(_Piece([(key, rows) for key, rows, _ in group], copies, numbers, mean))
        offset += len(numbers)
    return pieces


def average(
    replies: Sequence[Reply[Any]],
    name: str,
    *,
    otherwise: StateDict,
    weight: Callable[[Reply[Any]], float] = lambda reply: reply.weight,
) -> StateDict:
    """Return the ``WeightedMean`` of replies, added in natural order of the senders; ``otherwise``
    if none has it. Raises MessageError as ``WeightedMean.add``."""
    mean = WeightedMean(name, weight)
    for reply in sorted(replies, key=lambda reply: natural_order(reply.sender.id)):
        mean.add(reply)
    return mean.value_or(otherwise)


def _describe_tensor(weights: StateDict, key: str) -> str:
    """Describe type and shape of a tensor.

    >>> _describe_tensor({"w": torch.ones(2, 3)}, "w"), _describe_tensor({}, "w")
    ('float32 [2, 3]', 'absent')
    """
    if key not in weights:
        return "absent"
    return f"{str(weights[key].dtype).removeprefix('torch.')} {list(weights[key].shape)}"


def momentum_step(
    F: StateDict, velocity: StateDict, mean: StateDict, momentum: float
) -> tuple[StateDict, StateDict]:
    """Take a FedAvgM step: g = F - mean; v = momentum v + g; return F - v and v.

    This is SGD with rate 1 on a pseudo-gradient. Names that ``mean`` lacks are kept from F.
    """
    v = {name: momentum * velocity[name] + (F[name] - value) for name, value in mean.items()}
    return {**F, **{name: F[name] - step for name, step in v.items()}}, v
