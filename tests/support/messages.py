"""A message and a reply that test_messages.py shares with other tests."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from privssl.core.agents import AgentRef
from privssl.core.messages import (
    Message,
    Reply,
    StateDict,
)


@dataclasses.dataclass(frozen=True)
class Note(Message):
    """A message with a field of every type."""

    w: StateDict | None
    t: Tensor | None = None
    number: float | None = None
    count: int = 0
    flag: bool = False
    text: str = ""


def reply(sender: str, value: Any, weight: float = 1.0) -> Reply[Note]:
    w = None if value is None else {"w": torch.as_tensor(value)}
    return Reply(AgentRef(sender, "query"), Note(w), weight)
