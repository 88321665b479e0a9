"""FedMatch on a linear network and on toy rows, for its test files."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from privssl.algorithms.fedmatch.algorithm import FedMatch
from privssl.algorithms.fedmatch.exchange import FedMatchRequest
from privssl.algorithms.fedmatch.settings import FedMatchConfig
from privssl.core.agents import Agent, LabelledRows, UnlabelledRows
from privssl.core.messages import Message
from privssl.core.task import Context, Task
from tests.support.toy_worlds import (
    RecordingEngine,
    Simulation,
    at_clients,
    at_server,
    federated_data,
    make,
)

Floats = NDArray[np.float64]
PLACES = {"support": federated_data, "labels-at-server": at_server, "labels-at-client": at_clients}
#: Every row is confident and helpers are sent at once, so all code paths are taken.
EAGER: dict[str, Any] = {
    "threshold": 0.0, "helpers_every": 1, "learning_rate": 0.01, "batch_size": 10, "strong": "weak",
}  # fmt: skip


def fedmatch(**settings: Any) -> FedMatch:
    found = make("fedmatch", **settings)
    assert isinstance(found, FedMatch)
    return found


# A linear network on rows of two pixels, three classes: gradients are derived by hand. ---------

LINEAR = Task(3, (1, 1, 2), lambda: nn.Sequential(nn.Flatten(), nn.Linear(2, 3, bias=False)))
KEY = "1.weight"
SIGMA = np.array([[0.3, -0.2], [0.1, 0.5], [-0.4, 0.2]])
PSI = np.array([[0.2, 0.1], [-0.3, 0.1], [0.1, 0.000_001]])
HELPERS = [np.array([[0.9, -0.8], [0.0, 0.3], [-0.2, 0.4]]), np.array([[-0.5, 0.2]] * 3)]
LEVELS = np.array([[0, 255], [51, 204], [255, 102], [153, 153]])  # uint8
X = LEVELS / 127.5 - 1
Y = np.array([0, 1, 2, 1])


def weights(values: Floats) -> dict[str, Tensor]:
    return {KEY: torch.tensor(values, dtype=torch.float32)}


def softmax(logits: Floats) -> Floats:
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


def party(kind: str, levels: NDArray[Any] = LEVELS) -> Agent:
    x = torch.tensor(levels, dtype=torch.uint8).view(-1, 1, 1, 2)
    ids = torch.arange(len(x))
    with_labels = LabelledRows(x, torch.tensor(Y)[: len(x)], ids) if kind != "query" else None
    without = UnlabelledRows(x, ids) if kind != "support" else None
    return Agent(id="a0", held_labelled=with_labels, held_unlabelled=without)


class RecordingMeter:
    """A meter that records its observations."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.labels: list[int] = []
        self.kept: list[bool] = []

    def observe(self, ids: Tensor, labels: Tensor, kept: Tensor) -> None:
        self.ids += ids.tolist()
        self.labels += labels.tolist()
        self.kept += kept.tolist()


def context(round_number: int = 1, meter: RecordingMeter | None = None) -> Context:
    return Context(
        seed=0, round=round_number, agent="a0", visit_key="v", session_id="x",
        device=torch.device("cpu"), meter=meter,
    )  # fmt: skip


def linear(**settings: Any) -> FedMatch:
    """FedMatch with steps large enough for float32, no strong view and no truncation."""
    own: dict[str, Any] = {
        "strong": "none", "learning_rate": 0.05, "threshold": 0.0, "labelled_weight": 2.0,
        "agreement_weight": 0.7, "inter_client_weight": 0.3, "l2_weight": 1.5, "l1_weight": 0.02,
        "negligible": 1e-5, "smallest_change": 0.0, "batch_size": 4,
    } | settings  # fmt: skip
    return FedMatch(FedMatchConfig(**own), LINEAR)


def stepped_sigma(sigma: Floats, psi: Floats) -> Floats:
    """One step of Eq. 4 on all rows: the gradient of cross-entropy is (p - y) x."""
    p = softmax(X @ (sigma + psi).T)
    return np.asarray(sigma - 0.05 * 2.0 * (p - np.eye(3)[Y]).T @ X / len(X))


def stepped_psi(
    sigma: Floats, psi: Floats, helpers: list[Floats], tau: float = 0.0,
    sent: Floats | None = None, *, of_all: bool = False,
) -> Floats:  # fmt: skip
    """One step of Eq. 5 on all rows, with Eq. 1 and 3.

    sent: sigma at the start of the visit, with which helpers predict; None: ``sigma``.
    of_all: Eq. 1 uses all rows, not only the confident ones.
    """
    at_first = sigma if sent is None else sent
    everywhere = softmax(X @ (sigma + psi).T)
    sure = everywhere.max(axis=1) >= tau
    x, p = X[sure], everywhere[sure]
    said = [softmax(x @ (at_first + helper).T) for helper in helpers]
    votes = sum((np.eye(3)[h.argmax(axis=1)] for h in said), np.eye(3)[p.argmax(axis=1)])
    gradient = 2 * 1.5 * (psi - sigma) + 0.02 * np.sign(psi)
    if sure.any():
        y = np.eye(3)[votes.argmax(axis=1)]
        gradient = gradient + 0.7 * (p - y).T @ x / len(x)
    if of_all:
        x, p, said = X, everywhere, [softmax(X @ (at_first + helper).T) for helper in helpers]
    for h in said if len(x) else []:
        gradient = gradient + 0.3 * (p - h).T @ x / len(x) / len(said)
    return np.asarray(psi - 0.05 * gradient)


# Recorded messages -----


def row(*values: float) -> dict[str, Tensor]:
    return {"w": torch.tensor(values)}


def recorded(after: Simulation, round_number: int, step: str) -> dict[str, FedMatchRequest]:
    assert isinstance(after.engine, RecordingEngine)
    found: dict[str, Message] = {
        call.to.id: call.message
        for call, _ in after.engine.recorded
        if call.round == round_number and call.step.__name__ == step
    }
    return {
        agent: message for agent, message in found.items() if isinstance(message, FedMatchRequest)
    }


def psi_uploads(after: Simulation) -> dict[str, Any]:
    assert isinstance(after.engine, RecordingEngine)
    return {
        c.to.id: r.payload for c, r in after.engine.recorded if c.step.__name__ != "learn_sigma"
    }
