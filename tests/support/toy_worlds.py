"""Helpers of the tests of algorithms beside ``privssl.testing``.

Each engine here violates the contract of engines, for controls.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from privssl.algorithms import ALGORITHMS
from privssl.algorithms.base import Algorithm
from privssl.core.engine import Call
from privssl.core.messages import Message, Reply
from privssl.engines.local import LocalEngine
from privssl.privacy import noisy_optimizer, secure_noise
from privssl.testing.engines import DecliningEngine as DecliningEngine
from privssl.testing.engines import RecordingEngine as RecordingEngine
from privssl.testing.engines import ReverseOrderEngine as ReverseOrderEngine
from privssl.testing.engines import UnusedAlgorithmEngine as UnusedAlgorithmEngine
from privssl.testing.federations import QUICK as QUICK
from privssl.testing.federations import SHAPES as SHAPES
from privssl.testing.federations import Simulation as Simulation
from privssl.testing.federations import apart as apart
from privssl.testing.federations import at_clients as at_clients
from privssl.testing.federations import at_server as at_server
from privssl.testing.federations import federated_data as federated_data
from privssl.testing.federations import finite as finite
from privssl.testing.federations import flat as flat
from privssl.testing.federations import held_as_in as held_as_in
from privssl.testing.federations import make_algorithm
from privssl.testing.federations import rounds_to_simulate as rounds_to_simulate
from privssl.testing.federations import same_bits as same_bits
from privssl.testing.federations import simulate as simulate
from privssl.testing.federations import through_disk as through_disk
from privssl.testing.federations import toy_rows as toy_rows

TOY = toy_rows("image")


def make(name: str, **settings: Any) -> Algorithm[Any]:
    """An algorithm by name, as ``make_algorithm`` makes it."""
    return make_algorithm(ALGORITHMS[name], **settings)


# Engines ------------------------------------------------------------------------------------


class PlainLayoutEngine(UnusedAlgorithmEngine):
    """Networks in torch's default memory layout."""

    layout = torch.contiguous_format


class SharedMemoryEngine(LocalEngine):
    """Violates the contract: all agents share one memory."""

    def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        replies = []
        for call in calls:
            replies += list(super().deliver([call]))
            memory = self._agents[call.to.id].memory
            for agent in self._agents.values():
                agent.memory = memory
        return replies


class SharedMemoryReverseEngine(SharedMemoryEngine):
    """As SharedMemoryEngine, with agents visited in reverse order."""

    def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        return list(super().deliver(calls[::-1]))[::-1]


class Lossy(LocalEngine):
    """Violates the contract: messages are rounded to half precision."""

    def _copy_message(self, message: Message) -> Message:
        return type(message)(
            **{k: _halved(v) for k, v in vars(super()._copy_message(message)).items()}
        )


def _halved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.bfloat16().to(value.dtype)
    if isinstance(value, Mapping):
        return {key: _halved(item) for key, item in value.items()}
    return value


def without_noise(patch: pytest.MonkeyPatch) -> None:
    """Make private steps release their sums without noise and rounding."""
    patch.setattr(secure_noise, "secure_normal", np.zeros)
    patch.setattr(noisy_optimizer, "rounding_grid", lambda deviation: 0.0)


def unopened_account(**methods: Any) -> Any:
    """Return what an engine asks of an account that no step charges; ``methods`` come on top."""
    asked = {"visits": lambda: 0, "paid_visits": lambda: 0, "close": lambda: None}
    plan = SimpleNamespace(scope="sound", unit="record")
    return SimpleNamespace(**{**asked, "events": (), "plan": plan, **methods})
