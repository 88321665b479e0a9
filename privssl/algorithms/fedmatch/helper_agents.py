"""Helper agents: FedMatch sends an agent the psi of agents with similar predictions.

Jeong et al. (ICLR 2021), section 3.1. The prediction of an agent's model for one image of noise,
the probe, is its embedding, as of its last visit. Every few rounds an agent gets the psi of the
agents with the nearest embeddings, its helpers. Their weights are frozen; they vote on
pseudo-labels (Eq. 3), and the divergence of predictions from theirs is a loss (Eq. 1).
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from privssl.core.agents import natural_order
from privssl.core.messages import StateDict
from privssl.core.rows import Shape


def draw_probe(shape: Shape, rng: torch.Generator) -> Tensor:
    """The row of noise (1, *shape) in [-1, 1]: normal, mean and deviation 125 of 255 levels,
    cut to 0..255. Authors' code."""
    levels = nn.init.trunc_normal_(torch.empty(1, *shape), 125.0, 125.0, 0.0, 255.0, generator=rng)
    return levels / 127.5 - 1


def nearest_agents(
    embeddings: Mapping[str, Tensor], agents: Iterable[str], count: int
) -> dict[str, tuple[str, ...]]:
    """The helpers of some agents, nearest first: scipy's KD-tree, Euclidean distance.

    Args:
        embeddings: agent -> (C,). One that is not finite is left out.
        agents: get helpers, if they have an embedding and another agent has one.
        count: H, >= 0; fewer where fewer other agents have embeddings.
    """
    embedded = sorted((a for a, e in embeddings.items() if e.isfinite().all()), key=natural_order)
    receivers = [agent for agent in agents if agent in embedded]
    if not receivers or not count or len(embedded) < 2:
        return {}
    from scipy.spatial import KDTree  # here: importing it takes 0.2 s

    tree = KDTree(torch.stack([embeddings[agent] for agent in embedded]).double().numpy())
    helpers = {}
    for agent in receivers:
        embedding = embeddings[agent].double().numpy()
        _, positions = tree.query(embedding, k=list(range(1, min(count + 1, len(embedded)) + 1)))
        # Dropped by name: among equal embeddings the agent is not always the first.
        others = [embedded[position] for position in positions if embedded[position] != agent]
        helpers[agent] = tuple(others[:count])
    return helpers


def pack_helpers(helpers: Sequence[StateDict]) -> dict[str, Tensor] | None:
    """The psi of several helpers as one mapping, "0/NAME", "1/NAME" and so on; None of none."""
    packed = {f"{number}/{n}": w for number, psi in enumerate(helpers) for n, w in psi.items()}
    return packed or None


def unpack_helpers(helpers: StateDict | None) -> list[dict[str, Tensor]]:
    """The inverse of ``pack_helpers``."""
    unpacked: dict[str, dict[str, Tensor]] = {}
    for key, weight in (helpers or {}).items():
        number, _, name = key.partition("/")
        unpacked.setdefault(number, {})[name] = weight
    return list(unpacked.values())


def vote_agreement(p: Tensor, helpers: Sequence[Tensor], min_confidence: float = 0.0) -> Tensor:
    """Votes for each class: Eq. 3. The pseudo-label is the class with most votes, the lowest of
    equals.

    Args:
        p: the agent's prediction (B, C).
        helpers: predictions of its helpers, each (B, C); may be none.
        min_confidence: a helper votes only where its largest probability is at least this.

    Returns:
        Whole numbers (B, C).

    >>> vote_agreement(torch.tensor([[0.9, 0.0, 0.1]]), [torch.tensor([[0.1, 0.0, 0.9]])] * 2)
    tensor([[1, 0, 2]])
    """
    classes = p.shape[1]
    votes = one_hot(p.argmax(dim=1), classes)
    for prediction in helpers:
        confident, choice = prediction.max(dim=1).values >= min_confidence, prediction.argmax(dim=1)
        votes = votes + one_hot(choice, classes) * confident[:, None]
    return votes
