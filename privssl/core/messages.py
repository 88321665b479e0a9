"""Messages: frozen dataclasses of tensors and numbers, the only data that leaves an agent.

Each algorithm declares its message classes at the top of its file. This module has replies without
payload, and serialisation. Averaging is in ``core/aggregation.py``.

Senders are untrusted: deserialisation yields the expected class with finite tensors, or raises
``MessageError``.
"""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from accounting.canonical_json import decode_strictly
from accounting.errors import PlanError
from privssl.core.agents import AgentRef
from privssl.errors import UserError
from privssl.storage import tensor_files

StateDict = Mapping[str, Tensor]

MAX_HEADER_BYTES = 2**24  # names and shapes of the tensors of one message


class MessageError(UserError):
    """A message that is not the expected one, or cannot be used."""


@dataclass(frozen=True)
class Message:
    """Base of all messages. Fields are StateDict, Tensor, float, int, bool, str or None."""


@dataclass(frozen=True)
class Declined(Message):
    """The agent declined to work; the reason contains no data."""

    reason: str


#: Returned by a step whose account is exhausted; the run then ends as ``budget_exhausted``.
BUDGET_EXHAUSTED = Declined("privacy budget is spent")


@dataclass(frozen=True)
class NoReply(Declined):
    """No reply came, and the run continues without it; the reason is an error code."""


@dataclass(frozen=True)
class Ack(Message):
    """The agent worked and has nothing to send, or an aggregator has taken what it sent."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"this reply has no {name}: its step sent an Ack, or an aggregator took its message. "
            "Call without aggregator, and use privssl.core.aggregation.average"
        )


M = TypeVar("M", bound=Message)


class NoPayloadError(Exception):
    """A payload was read although the agent declined."""


@dataclass(frozen=True)
class Reply(Generic[M]):
    """One agent's answer.

    ``weight`` is the agent's weight in a mean: its number of rows, or 1.0 if counts are private.
    ``metrics`` are named numbers for the tracker; empty for rows with a privacy account.
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
        """Return the content. Raises NoPayloadError if the agent declined."""
        if isinstance(self.content, Declined):
            raise NoPayloadError(f"{self.sender.id} declined: {self.content.reason}")
        return self.content


def payload_bytes(message: Message) -> int:
    """Return the serialised size of a message's tensors and numbers, without framing."""
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


_SCALARS = bool | int | float | str | None


def serialize(message: Message) -> bytes:
    """Serialise as safetensors, with the numbers in the header. Inverse of ``deserialize``."""
    plain, tensors = to_parts(message)
    metadata = {"fields": json.dumps(plain, allow_nan=False)}
    return b"".join(tensor_files.pieces_of(tensors, metadata))


def to_parts(message: Message) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split a message into JSON values and tensors by name. Inverse of ``from_parts``.

    Raises TypeError if a field has a type that is not allowed in messages.
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
    """Deserialise a message of the given class; the bytes cannot choose another class.

    Unknown fields are ignored. Allocation is bounded by the bytes received, not by declared
    sizes.

    Raises:
        MessageError: the bytes are damaged, a field is missing or has another type than declared,
            or a tensor has another dtype or is not finite. The text contains names and types, no
            values.
    """
    message = from_parts(kind, *_read_parts(data))
    check(message)
    return message


def from_parts(kind: type[M], plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> M:
    """Build a message from its parts. Raises MessageError as ``deserialize``, but leaves dtypes and
    finiteness to ``check``."""
    allowed = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(kind):
        try:
            value = _read_field(spec.name, plain, tensors)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise MessageError(f"{kind.__name__}.{spec.name} is missing or damaged") from None
        if not _has_type(value, allowed[spec.name]):
            raise MessageError(f"{kind.__name__}.{spec.name} came as a {type(value).__name__}")
        values[spec.name] = value
    return kind(**values)


def _read_parts(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON values and the tensors of a message's bytes."""
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise MessageError(f"not a message: it declares a header of {size} bytes")
    try:
        header = decode_strictly(data[8 : 8 + size])
        plain = decode_strictly(header["__metadata__"]["fields"].encode())
        return plain, safetensors.torch.load(data)
    except (PlanError, SafetensorError, LookupError, TypeError, AttributeError) as error:
        raise MessageError(f"not a message: {error}") from None


def _read_field(name: str, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Return the value of one field. Raises LookupError if it is missing."""
    value = plain[name] if name in plain else tensors[name]
    if not isinstance(value, dict):
        return value
    [(tag, content)] = value.items()
    if tag == "float":
        return float(content)
    return {key: tensors[f"{name}/{key}"] for key in {"state_dict": content}[tag]}


def check(message: Message) -> None:
    """Raise MessageError if a field cannot be sent, a tensor's dtype is not allowed or a number is
    not finite."""
    for name, value in vars(message).items():
        field = f"{type(message).__name__}.{name}"
        if not _can_be_sent(value):
            raise MessageError(
                f"{field} is a {type(value).__name__}, which no message carries. Give a tensor, a "
                "state dict (names with tensors), a number, text or None"
            )
        check_numbers(field, value)


def _can_be_sent(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(tensor, Tensor) for tensor in value.values())
    return isinstance(value, Tensor | _SCALARS)


def check_numbers(field: str, value: Any) -> None:
    """Apply ``check`` to one field."""
    tensors = list(value.values()) if isinstance(value, dict) else [value]
    for tensor in (item for item in tensors if isinstance(item, Tensor)):
        if tensor.dtype not in tensor_files.DTYPE_NAMES:
            raise MessageError(f"{field} has a tensor of {tensor.dtype}")
        if tensor.is_floating_point() and not _is_finite(tensor):
            raise MessageError(
                f"{field} has numbers that are not finite. Its sender's training diverged (lower "
                "the learning rate), or it is malicious (leave it out)"
            )


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite. Their sum is a fast first test, which may overflow."""
    return math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())


def _has_type(value: Any, hint: Any) -> bool:
    """Return whether a value has a field's declared type; an int is accepted for a float."""
    kinds = (hint,) if hint == StateDict else typing.get_args(hint) or (hint,)
    if isinstance(value, dict):
        return StateDict in kinds
    return type(value) in kinds or (type(value) is int and float in kinds)
