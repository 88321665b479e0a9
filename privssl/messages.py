"""What leaves an agent: frozen dataclasses of tensors and numbers, and nothing else.

A message class stands at the top of its algorithm's file, so a reader sees what travels
before anything else. This module has what all of them share: the two ways of sending nothing,
the reply, the average that a server takes, and the bytes that a network would carry.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from privssl.agents import AgentRef, natural_order

StateDict = Mapping[str, Tensor]


@dataclass(frozen=True)
class Message:
    """Base of all messages. Fields are StateDict, Tensor, float, int, bool, str or None."""


@dataclass(frozen=True)
class Silence(Message):
    """The agent declined to work; the reason is a sentence without data in it."""

    reason: str


@dataclass(frozen=True)
class Done(Message):
    """The agent worked and has nothing to send."""


M = TypeVar("M", bound=Message)


class SilentReply(Exception):  # noqa: N818  (it is a state of affairs before it is an error)
    """The content of a reply was read although its agent had been silent."""


@dataclass(frozen=True)
class Reply(Generic[M]):
    """One agent's answer.

    ``weight`` is the agent's share in an average: its number of rows, or 1.0 where counts
    must stay private. ``notes`` are named numbers for the tracker (losses); empty at agents
    whose rows are under a privacy account.
    """

    sender: AgentRef
    content: M | Silence
    weight: float = 1.0
    notes: Mapping[str, float] = field(default_factory=dict)

    @property
    def silent(self) -> bool:
        return isinstance(self.content, Silence)

    @property
    def said(self) -> M:
        """The content. Raises SilentReply when the agent was silent."""
        if isinstance(self.content, Silence):
            raise SilentReply(f"{self.sender.id} was silent: {self.content.reason}")
        return self.content


def average(
    replies: Sequence[Reply[Any]],
    name: str,
    *,
    otherwise: StateDict,
    weight: Callable[[Reply[Any]], float] = lambda reply: reply.weight,
) -> StateDict:
    """Weighted mean of one field over the agents that sent it (FedAvg, McMahan et al.).

    Args:
        replies: in any order; the sum is taken in natural order of the senders, so that the
            order of arrival cannot change a bit.
        name: field of the message, a StateDict or None (not sent).
        otherwise: the answer when nobody sent it. Required: the caller must decide what an
            empty round means.
        weight: share of a reply, >= 0. All zero counts as nobody.
    """
    spoke = [r for r in replies if not r.silent and getattr(r.said, name) is not None]
    spoke = [r for r in spoke if weight(r) > 0]
    if not spoke:
        return otherwise
    spoke.sort(key=lambda reply: natural_order(reply.sender.id))
    total = sum(weight(r) for r in spoke)
    shares = [weight(r) / total for r in spoke]
    first: StateDict = getattr(spoke[0].said, name)
    mean = {}
    for key, like in first.items():
        # float64: a sum over many agents must not lose what a single one changed
        wide = torch.zeros(like.shape, dtype=torch.float64)
        for reply, share in zip(spoke, shares, strict=True):
            wide.add_(getattr(reply.said, name)[key].double(), alpha=share)
        mean[key] = (wide if like.is_floating_point() else wide.round()).to(like.dtype)
    return mean


def payload_bytes(message: Message) -> int:
    """Bytes of a message's tensors and numbers as they would travel, without framing."""
    total = 0
    for value in vars(message).values():
        tensors = value.values() if isinstance(value, Mapping) else [value]
        for item in tensors:
            if isinstance(item, Tensor):
                total += item.numel() * item.element_size()
            elif isinstance(item, str):
                total += len(item.encode())
            elif item is not None:
                total += 8
    return total


_SCALARS = (bool, int, float, str, type(None))


def pack(message: Message) -> bytes:
    """Message to bytes: safetensors, with the numbers in its header. Inverse of unpack."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for name, value in vars(message).items():
        if isinstance(value, Tensor):
            tensors[name] = _own_copy(value)
        elif isinstance(value, Mapping):
            plain[name] = {"state_dict": list(value)}
            tensors |= {f"{name}/{key}": _own_copy(tensor) for key, tensor in value.items()}
        elif isinstance(value, _SCALARS):
            plain[name] = value
        else:
            raise TypeError(f"{type(message).__name__}.{name} is a {type(value).__name__}")
    return safetensors.torch.save(tensors, {"fields": json.dumps(plain)})


def _own_copy(tensor: Tensor) -> Tensor:
    """Safetensors refuses tensors that share memory; at first F and its teacher are one."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def unpack(kind: type[M], data: bytes) -> M:
    """Bytes to a message of the given class. Nothing in the bytes chooses what is built."""
    header_size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_size])
    plain = json.loads(header["__metadata__"]["fields"])
    tensors = safetensors.torch.load(data)
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(kind):
        value = plain.get(spec.name)
        if isinstance(value, dict):
            value = {key: tensors[f"{spec.name}/{key}"] for key in value["state_dict"]}
        elif spec.name in tensors:
            value = tensors[spec.name]
        values[spec.name] = value
    return kind(**values)
