"""What leaves an agent: frozen dataclasses of tensors and numbers, and nothing else.

A message class stands at the top of its algorithm's file, so a reader sees what travels
before anything else. This module has what all of them share: the two ways of sending nothing,
the reply, and the bytes that a network would carry. What a server averages is
``core/aggregation.py``'s.

Who sends may mean harm. Bytes become the message that was asked for, with finite numbers in its
tensors, or a ``MessageError``.
"""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from accounting.canonical_json import decode_strictly
from accounting.errors import PlanError
from privssl.core.agents import AgentRef
from privssl.errors import UserError
from privssl.storage import tensor_files

StateDict = Mapping[str, Tensor]

MAX_HEADER_BYTES = 2**24  # names and shapes of the tensors of one message
#: Of what a message's tensors may be made; safetensors knows more, for which torch lacks maths.
DTYPES = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    }
)


class MessageError(UserError):
    """What another party sent is not the message that was asked for, or cannot be used."""


@dataclass(frozen=True)
class Message:
    """Base of all messages. Fields are StateDict, Tensor, float, int, bool, str or None."""


@dataclass(frozen=True)
class Declined(Message):
    """The agent declined to work; the reason is a sentence without data in it."""

    reason: str


#: What a step says that found its account empty: the run then ends as ``budget_exhausted``.
BUDGET_EXHAUSTED = Declined("privacy budget is spent")


@dataclass(frozen=True)
class NoReply(Declined):
    """No reply came, and the run goes on without it; the reason is a word of ``wire``."""


@dataclass(frozen=True)
class Ack(Message):
    """The agent worked and has nothing to send."""


M = TypeVar("M", bound=Message)


class NoPayloadError(Exception):
    """The content of a reply was read although its agent had been silent."""


@dataclass(frozen=True)
class Reply(Generic[M]):
    """One agent's answer.

    ``weight`` is the agent's share in an average: its number of rows, or 1.0 where counts
    must stay private. ``metrics`` are named numbers for the tracker (losses); empty at agents
    whose rows are under a privacy account.
    """

    sender: AgentRef
    content: M | Declined
    weight: float = 1.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def declined(self) -> bool:
        return isinstance(self.content, Declined)

    @property
    def payload(self) -> M:
        """The content. Raises SilentReply when the agent was silent."""
        if isinstance(self.content, Declined):
            raise NoPayloadError(f"{self.sender.id} was silent: {self.content.reason}")
        return self.content


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


def serialize(message: Message) -> bytes:
    """Message to bytes: safetensors, with the numbers in its header. Inverse of unpack."""
    plain, tensors = to_parts(message)
    metadata = {"fields": json.dumps(plain, allow_nan=False)}
    return b"".join(tensor_files.pieces_of(tensors, metadata))


def to_parts(message: Message) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What strict JSON can hold of a message, and its tensors by name. ``from_parts`` is the
    inverse.

    Raises:
        TypeError: a field is of a type that no message has.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for name, value in vars(message).items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, Mapping):
            plain[name] = {"state_dict": list(value)}
            tensors |= {f"{name}/{key}": tensor for key, tensor in value.items()}
        elif isinstance(value, float) and not math.isfinite(value):
            plain[name] = {"float": repr(value)}  # strict JSON has no infinity
        elif isinstance(value, _SCALARS):
            plain[name] = value
        else:
            raise TypeError(f"{type(message).__name__}.{name} is a {type(value).__name__}")
    return plain, tensors


def deserialize(kind: type[M], data: bytes) -> M:
    """Bytes to a message of the given class. Nothing in the bytes chooses what is built.

    Fields that the class does not have are left lying. Memory is taken for bytes that are there,
    never for a size that is only stated.

    Raises:
        MessageError: the bytes are not what ``serialize`` writes, a field is missing or of another
            type than the class declares, or a tensor is of no usual type or not finite. The text
            holds names and types, no values.
    """
    message = from_parts(kind, *_read_parts(data))
    check(message)
    return message


def from_parts(kind: type[M], plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> M:
    """A message of the given class from the parts of one. Raises MessageError as
    ``deserialize``, but
    for numbers: at those ``check`` looks."""
    allowed = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(kind):
        try:
            value = _value(spec.name, plain, tensors)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise MessageError(f"{kind.__name__}.{spec.name} is missing or damaged") from None
        if not _fits(value, allowed[spec.name]):
            raise MessageError(f"{kind.__name__}.{spec.name} came as a {type(value).__name__}")
        values[spec.name] = value
    return kind(**values)


def _read_parts(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The numbers and the tensors in the bytes of a message, by name."""
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise MessageError(f"not a message: it states a header of {size} bytes")
    try:
        header = decode_strictly(data[8 : 8 + size])
        plain = decode_strictly(header["__metadata__"]["fields"].encode())
        return plain, safetensors.torch.load(data)
    except (PlanError, SafetensorError, LookupError, TypeError, AttributeError) as error:
        raise MessageError(f"not a message: {error}") from None


def _value(name: str, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """What the bytes say of one field. LookupError: nothing."""
    value = plain[name] if name in plain else tensors[name]
    if not isinstance(value, dict):
        return value
    [(what, inner)] = value.items()
    if what == "float":
        return float(inner)
    return {key: tensors[f"{name}/{key}"] for key in {"state_dict": inner}[what]}


def check(message: Message) -> None:
    """Raise MessageError where a tensor of a message is of no usual type, or not finite."""
    for name, value in vars(message).items():
        check_numbers(f"{type(message).__name__}.{name}", value)


def check_numbers(field: str, value: Any) -> None:
    """Raise MessageError where a field's tensors are of no usual type, or not finite."""
    tensors = list(value.values()) if isinstance(value, dict) else [value]
    for tensor in (item for item in tensors if isinstance(item, Tensor)):
        if tensor.dtype not in DTYPES:
            raise MessageError(f"{field} has a tensor of {tensor.dtype}")
        if tensor.is_floating_point() and not _all_finite(tensor):
            raise MessageError(
                f"{field} has numbers that are not finite. Its sender's training diverged (lower "
                "the learning rate), or it means harm (leave it out)"
            )


def _all_finite(tensor: Tensor) -> bool:
    """Whether no number is infinite or NaN: then, and only then, can their sum be finite.

    The sum of finite numbers may overflow, so that another look is needed; it takes 20 times as
    long (1.6 million floats: 8 ms and 0.4 ms), and every message is looked at on both sides.
    """
    return math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a field's declared type; a whole number does for a float."""
    kinds = (hint,) if hint == StateDict else typing.get_args(hint) or (hint,)
    if isinstance(value, dict):
        return StateDict in kinds
    return type(value) in kinds or (type(value) is int and float in kinds)
