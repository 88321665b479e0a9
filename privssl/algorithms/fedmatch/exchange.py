"""What travels in FedMatch: the messages, dense or sparse, and both ends that read and write them.

With ``sparse_messages`` (Jeong et al., section 3.2) agent and server both remember the agent's
weights as they were at the end of its last visit. Either side sends what differs from them. A first
visit is dense.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from privssl.algorithms.fedmatch.helper_agents import pack_helpers, unpack_helpers
from privssl.algorithms.fedmatch.settings import Hyperparameters
from privssl.algorithms.fedmatch.sparse_updates import (
    DecomposedWeights,
    Download,
    compute_upload_masks,
    make_sparse_upload,
)
from privssl.core.agents import AgentRef, QueryAgent
from privssl.core.federation import Roster
from privssl.core.messages import Message, MessageError, Reply, StateDict
from privssl.core.sparse_tensors import from_sparse, to_sparse
from privssl.core.task import Context

# Messages -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FedMatchRequest(Message):
    """Down to an agent: sigma and psi, and psi of its helpers (``helper_agents.pack_helpers``)."""

    sigma: StateDict
    psi: StateDict
    helpers: StateDict | None = None
    sparse: bool | None = None  # true: all three in sparse form, against what the agent holds
    learning_rate: float | None = None  # None: the agent's own


@dataclass(frozen=True)
class FedMatchUpdate(Message):
    """Up from an agent: what it trained; in sparse form with ``sparse_messages``."""

    sigma: StateDict | None
    psi: StateDict | None


# The server's end ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Downloads:
    """What a round sends: to which agents, which weights, which helpers."""

    agents: Roster
    by_agent: Mapping[str, Download]
    helpers: Mapping[str, Sequence[StateDict]]  # psi of each helper; only of agents that get any
    learning_rates: Mapping[str, float | None]
    sparse: bool  # differences travel as such

    def make_request(self, agent: AgentRef) -> FedMatchRequest:
        """The message for one agent."""
        download, helpers = self.by_agent[agent.id], self.helpers.get(agent.id, ())
        sigma, psi, masks = download.weights.sigma, download.weights.psi, download.masks
        learning_rate = self.learning_rates[agent.id]
        if not self.sparse or masks is None:
            return FedMatchRequest(sigma, psi, pack_helpers(helpers), learning_rate=learning_rate)
        sparse = [to_sparse(h, mask) for h, mask in zip(helpers, masks.helpers, strict=True)]
        return FedMatchRequest(
            to_sparse(sigma, masks.sigma),
            to_sparse(psi, masks.psi),
            pack_helpers(sparse),
            True,
            learning_rate,
        )

    def decode(self, reply: Reply[FedMatchUpdate]) -> Reply[FedMatchUpdate]:
        """The reply with dense weights. Raises MessageError if its sparse form is damaged."""
        if not self.sparse:
            return reply
        base, update = self.by_agent[reply.sender.id].weights, reply.payload
        try:
            dense = FedMatchUpdate(
                None if update.sigma is None else from_sparse(base.sigma, update.sigma),
                None if update.psi is None else from_sparse(base.psi, update.psi),
            )
        except MessageError as error:
            raise MessageError(f"{reply.sender.id}: {error}") from None
        return dataclasses.replace(reply, content=dense)


# The agent's end ----------------------------------------------------------------------------


def decode_request(
    agent: QueryAgent, msg: FedMatchRequest, *, keep_helpers: bool
) -> tuple[DecomposedWeights, list[dict[str, Tensor]]]:
    """The weights that an agent is sent, and psi of its helpers: new ones, or those it keeps."""
    sigma, psi, helpers = dict(msg.sigma), dict(msg.psi), unpack_helpers(msg.helpers)
    if msg.sparse:
        held_sigma, held_psi = (_recall(agent, f"held/{part}/") for part in ("sigma", "psi"))
        sigma, psi = from_sparse(held_sigma, sigma), from_sparse(held_psi, psi)
        helpers = [from_sparse(held_psi, helper) for helper in helpers]
    if keep_helpers:
        if helpers:
            memory = {k: v for k, v in agent.memory.items() if not k.startswith("helper/")}
            packed = pack_helpers(helpers) or {}
            agent.memory = memory | {f"helper/{k}": v for k, v in packed.items()}
        helpers = unpack_helpers(_recall(agent, "helper/"))
    return DecomposedWeights(sigma, psi), helpers


def encode_update(
    updated: DecomposedWeights, received: DecomposedWeights, agent: QueryAgent,
    hparams: Hyperparameters, ctx: Context,
) -> FedMatchUpdate:  # fmt: skip
    """The reply with what changed, and its costs as metrics; sigma is empty where it was fixed."""
    base, thresholds = {"sigma": received.sigma, "psi": received.psi}, hparams.sparsity_thresholds
    update: dict[str, StateDict] = {}
    costs = []
    for name, new, old in (
        ("sigma", updated.sigma, received.sigma),
        ("psi", updated.psi, received.psi),
    ):
        if not new:
            continue
        is_psi = name == "psi"
        base[name], cost = make_sparse_upload(new, old, thresholds, is_psi=is_psi)
        update[name] = base[name]
        if hparams.sparse_messages:
            update[name] = to_sparse(new, compute_upload_masks(new, old, thresholds, is_psi=is_psi))
        ctx.log_metric(f"train/cost_up_{name}", cost)
        costs.append(cost)
    ctx.log_metric("train/cost_up", sum(costs))
    if hparams.sparse_messages:  # what the next differences are from
        held = {f"held/{part}/{n}": w for part, ws in base.items() for n, w in ws.items()}
        agent.memory = {**agent.memory, **held}
    return FedMatchUpdate(update.get("sigma"), update["psi"])


def _recall(agent: QueryAgent, prefix: str) -> dict[str, Tensor]:
    """What an agent's memory has under a prefix, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in agent.memory.items()
        if name.startswith(prefix)
    }
