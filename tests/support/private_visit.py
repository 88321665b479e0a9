"""A visit of FedSSL with changed rows, and the tensors that it sends."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from privssl.algorithms.fedssl.algorithm import FedSSL, FedSSLRequest, FedSSLUpdate
from privssl.core.agents import LabelledRows
from privssl.core.messages import Message, serialize
from privssl.experiment.prepare import Prepared
from tests.support.private_fedssl import accounts, context

ALL = ("privacy.update_at_support=[F, D, G]", "privacy.protect=[F, D, G]")


CLIP = 0.5
#: One step with every row. The learning rate is 1000, so float32 weights show the sum accurately.
ONE_STEP = (
    *("privacy.sample_rate=1.0", "privacy.steps=1", "privacy.learning_rate=1000.0"),
    *(f"privacy.clip_norm={CLIP}", "privacy.noise_multiplier=4.0"),
)


def visit_with(
    prepared: Prepared,
    folder: Path,
    change: Callable[[LabelledRows], LabelledRows],
    came: FedSSLRequest,
) -> dict[str, Tensor]:
    """The tensors that s0 sends with changed rows, as network/parameter -> tensor."""
    folder.mkdir()
    with accounts(prepared, folder) as agents:
        agent = agents["s0"]
        kept, agent.held_labelled = agent.labelled, change(as_floats(agent.labelled))
        try:
            assert isinstance(prepared.algorithm, FedSSL)
            sent = prepared.algorithm.support_pass(agent, came, context("s0"))
        finally:
            agent.held_labelled = kept
    assert isinstance(sent, FedSSLUpdate)
    trained = {name: getattr(sent, name) for name in ("F", "G", "D")}
    return {f"{n}/{k}": v for n, net in trained.items() if net is not None for k, v in net.items()}


def as_floats(rows: LabelledRows) -> LabelledRows:
    return LabelledRows(rows.x.float() / 255, rows.y, rows.ids)


def with_row(value: float) -> Callable[[LabelledRows], LabelledRows]:
    """Set all pixels of the fifth row to a value. NaN: a row without contribution."""

    def change(rows: LabelledRows) -> LabelledRows:
        x = rows.x.clone()
        x[4] = value
        return LabelledRows(x, rows.y, rows.ids)

    return change


def without_row(rows: LabelledRows) -> LabelledRows:
    left = torch.arange(len(rows)) != 4
    return LabelledRows(rows.x[left], rows.y[left], rows.ids[left])


def header(message: Message) -> dict[str, Any]:
    """The header of a serialised message: names, shapes and offsets of its tensors."""
    packed = serialize(message)
    found: dict[str, Any] = json.loads(packed[8 : 8 + int.from_bytes(packed[:8], "little")])
    return found


def tensor_names(message: Message) -> set[str]:
    return header(message).keys() - {"__metadata__"}
