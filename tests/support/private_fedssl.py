"""Configs, accounts and runs that test_private_fedssl.py shares with other tests."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm

from accounting.ledger import Account
from privssl.algorithms.fedssl.algorithm import FedSSL, FedSSLRequest, FedSSLUpdate
from privssl.core.agents import Agent, LabelledRows
from privssl.core.messages import Declined
from privssl.core.task import Context
from privssl.experiment import config
from privssl.experiment.config import Config
from privssl.experiment.prepare import Prepared
from privssl.runs import round_loop

TINY = """
run: {seed: 0, evaluate_every: 1000, images_every: 1000, checkpoint_every: 1, device: cpu}
data: {name: toy, labelled: 24, unlabelled: 30}
agents: {support: 2, query: 1}
model: {name: small_cnn, width: 4}
algorithm:
  {name: fedssl, rounds: 3, local_steps: 2, batch_size: 8, generator_width: 4, gate: 0.0,
   warm_up: 0}
"""
#: Two rounds of full batches: epsilon has a closed form, which is fast.
FULL_BATCHES = (
    TINY.replace("rounds: 3, local_steps: 2", "rounds: 2, local_steps: 1")
    + "privacy: {epsilon: 50.0, noise_multiplier: 4.0, sample_rate: 1.0, steps: 2}\n"
)
PRIVATE = TINY + "privacy: {epsilon: 50.0, noise_multiplier: 4.0, sample_rate: 0.5, steps: 2}\n"


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Config]:
    def load(*overrides: str, private: bool = True) -> Config:
        path = tmp_path / "tiny.yaml"
        path.write_text(PRIVATE if private else TINY)
        return config.load_config(path, overrides)

    return load


@contextlib.contextmanager
def accounts(prepared: Prepared, folder: Path) -> Iterator[dict[str, Agent]]:
    """The agents by id; labelled agents have open accounts."""
    with contextlib.ExitStack() as stack:
        for agent in prepared.labelled_agents:
            path, promise = folder / f"{agent.id}.jsonl", prepared.account_plans[agent.id]
            agent.account = Account.open(path, promise, resume=False)
            stack.callback(agent.account.close)
        yield {agent.id: agent for agent in prepared.federated_data.agents}


def carry_out(prepared: Prepared, folder: Path) -> dict[str, Any]:
    """Train a whole run without trackers; return its results.json."""
    folder.mkdir()
    round_loop.train(prepared, folder, list, None)
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def context(agent: str, key: str = "1", seed: int = 0) -> Context:
    return Context(seed, 1, agent, key, "a", torch.device("cpu"), telemetry=False)


def make_request(prepared: Prepared) -> FedSSLRequest:
    """The request of the first round of a run."""
    nets = prepared.algorithm.networks()
    F, G, D = ({k: v.clone() for k, v in nets[n].state_dict().items()} for n in ("F", "G", "D"))
    return FedSSLRequest(F, G, D, teacher=F, train_classifier=True, train_on_mixes=True)


def visit(prepared: Prepared, agent: Agent, ctx: Context) -> FedSSLUpdate | Declined:
    assert isinstance(prepared.algorithm, FedSSL)
    return prepared.algorithm.support_pass(agent, make_request(prepared), ctx)


# The budget -------------------------------------------------------------------------------------


def epsilon_of_full_batches(steps: int, noise: float, delta: float) -> float:
    """The exact epsilon of steps with every row in each: docs/privacy.md.

    With mu = sqrt(steps) / noise it solves
    delta = Phi(mu / 2 - eps / mu) - exp(eps) Phi(-mu / 2 - eps / mu).
    """
    mu = math.sqrt(steps) / noise

    def too_much(eps: float) -> float:
        tails = norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu)
        return float(tails) - delta

    return float(brentq(too_much, 0.0, 50.0))


class Sealed(LabelledRows):
    """Labelled rows that raise AssertionError when read; their number is public."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("x", "y"):
            raise AssertionError("a labelled row was read")
        return super().__getattribute__(name)


def sealed(prepared: Prepared) -> Prepared:
    """Make reading a labelled row of this run raise AssertionError."""
    for agent in prepared.labelled_agents:
        rows = agent.labelled
        agent.held_labelled = Sealed(rows.x, rows.y, rows.ids)
    return prepared
