"""Sparse differences between weights: the entries that FedMatch sends, and their number.

Jeong et al. (ICLR 2021), section 3.2, in the form of the authors' code, with two thresholds:

    w 1[|w| > negligible]   entries of psi that small count as 0 (``l1_thres`` of the code)
    d 1[|d| > change]       a difference that small is not sent (``delta`` of the code)

A cost is the number of entries sent, divided by the entries of one dense model. So 1.0 is what
FedAvg sends in one direction, the unit (100%) of the paper's tables. ``comm/up_bytes`` and
``comm/down_bytes`` are the bytes of the messages: dense by default, and with ``sparse_messages``
those of ``core/sparse_tensors.py``.

In an upload, an entry that is not sent keeps the server's value. In a download, the code counts the
entries but uses the dense weights; ``make_sparse_download`` gives the weights that were counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from privssl.core.messages import StateDict

Masks = Mapping[str, Tensor]  # name -> bool, where an entry is sent
#: Of a first visit: with nothing to compare, two dense models are sent.
FIRST_COST = 2.0


@dataclass(frozen=True)
class SparsityThresholds:
    """The two thresholds, >= 0."""

    negligible: float
    change: float


@dataclass(frozen=True, eq=False)
class DecomposedWeights:
    """The weights of one model, theta = sigma + psi, name by name."""

    sigma: StateDict
    psi: StateDict


@dataclass(frozen=True, eq=False)
class DownloadMasks:
    """Which entries of a download are sent."""

    sigma: Masks
    psi: Masks
    helpers: tuple[Masks, ...]


@dataclass(frozen=True, eq=False)
class Download:
    """An agent's weights after a sparse download, and its costs in dense models."""

    weights: DecomposedWeights
    cost_of_sigma: float
    cost_of_psi: float
    cost_of_helpers: float = 0.0
    masks: DownloadMasks | None = None  # None: a first visit, at which everything is sent

    @property
    def cost(self) -> float:
        return self.cost_of_sigma + self.cost_of_psi + self.cost_of_helpers


def zero_small_entries(weights: StateDict, negligible: float) -> dict[str, Tensor]:
    """w 1[|w| > negligible].

    >>> zero_small_entries({"w": torch.tensor([0.5, -0.25, -2.0])}, 0.5)["w"]
    tensor([ 0.,  0., -2.])
    """
    return {
        name: torch.where(find_changes(w, 0.0, negligible), w, 0.0) for name, w in weights.items()
    }


def find_changes(new: Tensor, old: Tensor | float, change: float) -> Tensor:
    """Where |new - old| > change. NaN differs, so that it is sent and refused."""
    return ~((new - old).abs() <= change)


def compute_upload_masks(
    updated: StateDict, received: StateDict, thresholds: SparsityThresholds, *, is_psi: bool
) -> dict[str, Tensor]:
    """Which entries an agent sends of sigma or psi; arguments of ``make_sparse_upload``."""
    compared = zero_small_entries(updated, thresholds.negligible) if is_psi else updated
    return {n: find_changes(w, received[n], thresholds.change) for n, w in compared.items()}


def make_sparse_upload(
    updated: StateDict, received: StateDict, thresholds: SparsityThresholds, *, is_psi: bool
) -> tuple[dict[str, Tensor], float]:
    """What an agent sends of sigma or psi, and the cost.

    Args:
        updated, received: the weights after and before local training.
        is_psi: small entries of psi count as 0 in the difference; their true value is sent.

    Returns:
        The weights with the old value where the difference is not sent, and the cost.
    """
    masks = compute_upload_masks(updated, received, thresholds, is_psi=is_psi)
    return _merge_entries(updated, received, masks), _count_sent(masks) / _count_entries(received)


def make_sparse_download(
    agent_weights: DecomposedWeights | None,
    server_weights: DecomposedWeights,
    helpers: Sequence[StateDict],
    thresholds: SparsityThresholds,
    *,
    decodable: bool = False,
) -> Download:
    """An agent's weights after sparse differences from ``agent_weights`` to ``server_weights``.

    Args:
        agent_weights: the agent's weights after its last visit; None at its first.
        helpers: psi of its helpers, each compared with the agent's own.
        decodable: an entry of a helper that is 0 is sent where the agent's own is not. The authors'
            code does not count it, and no receiver could know it.
    """
    if agent_weights is None:
        return Download(
            server_weights, FIRST_COST / 2 if server_weights.sigma else 0.0, FIRST_COST / 2
        )
    own_psi = zero_small_entries(agent_weights.psi, thresholds.negligible)
    server_psi = zero_small_entries(server_weights.psi, thresholds.negligible)
    psi_mask = {n: find_changes(w, own_psi[n], thresholds.change) for n, w in server_psi.items()}
    sigma_mask = {
        n: find_changes(w, agent_weights.sigma[n], thresholds.change)
        for n, w in server_weights.sigma.items()
    }
    helper_masks = []
    for helper in helpers:
        helper_psi = zero_small_entries(helper, thresholds.negligible)
        # Unless decodable, a helper's 0 is compared with 0, so that it is never counted.
        base = {
            n: own_psi[n] if decodable else own_psi[n].where(w != 0, 0.0)
            for n, w in helper_psi.items()
        }
        helper_masks.append(
            {n: find_changes(w, base[n], thresholds.change) for n, w in helper_psi.items()}
        )
    patched = DecomposedWeights(
        _merge_entries(server_weights.sigma, agent_weights.sigma, sigma_mask),
        _merge_entries(server_weights.psi, agent_weights.psi, psi_mask),
    )
    entries = _count_entries(server_weights.psi)
    return Download(
        patched, _count_sent(sigma_mask) / entries, _count_sent(psi_mask) / entries,
        sum(map(_count_sent, helper_masks)) / entries,
        DownloadMasks(sigma_mask, psi_mask, tuple(helper_masks)),
    )  # fmt: skip


def _merge_entries(
    new: StateDict, old: StateDict, masks: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    return {name: torch.where(masks[name], weight, old[name]) for name, weight in new.items()}


def _count_sent(masks: Mapping[str, Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks.values())


def _count_entries(weights: StateDict) -> int:
    return sum(weight.numel() for weight in weights.values())
