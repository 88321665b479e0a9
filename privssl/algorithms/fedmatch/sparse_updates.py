"""Sparse differences between weights: the entries that FedMatch sends, and their number.

Jeong et al. (ICLR 2021), section 3.2, in the form of the authors' code, with two thresholds:

    w 1[|w| > negligible]   entries of psi that small count as 0 (``l1_thres`` of the code)
    d 1[|d| > change]       a difference that small is not sent (``delta`` of the code)

A cost is the number of entries sent, divided by the entries of one dense model. So 1.0 is what
FedAvg sends in one direction, the unit (100%) of the paper's tables. ``comm/up_bytes`` and
``comm/down_bytes`` are the bytes of the messages: dense by default, and with ``sparse_messages``
those of ``core/sparse_tensors.py``.

In an upload, an entry that is not sent keeps the server's value. In a download, the code counts the
entries but uses the dense weights; ``sparse_download`` gives the weights that were counted.
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


def without_small(weights: StateDict, negligible: float) -> dict[str, Tensor]:
    """w 1[|w| > negligible].

    >>> without_small({"w": torch.tensor([0.5, -0.25, -2.0])}, 0.5)["w"]
    tensor([ 0.,  0., -2.])
    """
    return {name: torch.where(differs(w, 0.0, negligible), w, 0.0) for name, w in weights.items()}


def differs(new: Tensor, old: Tensor | float, change: float) -> Tensor:
    """Where |new - old| > change. NaN differs, so that it is sent and refused."""
    return ~((new - old).abs() <= change)


def upload_mask(
    updated: StateDict, received: StateDict, thresholds: SparsityThresholds, *, is_psi: bool
) -> dict[str, Tensor]:
    """Which entries an agent sends of sigma or psi; arguments of ``sparse_upload``."""
    compared = without_small(updated, thresholds.negligible) if is_psi else updated
    return {n: differs(w, received[n], thresholds.change) for n, w in compared.items()}


def sparse_upload(
    updated: StateDict, received: StateDict, thresholds: SparsityThresholds, *, is_psi: bool
) -> tuple[dict[str, Tensor], float]:
    """What an agent sends of sigma or psi, and the cost.

    Args:
        updated, received: the weights after and before local training.
        is_psi: small entries of psi count as 0 in the difference; their true value is sent.

    Returns:
        The weights with the old value where the difference is not sent, and the cost.
    """
    masks = upload_mask(updated, received, thresholds, is_psi=is_psi)
    return _merge(updated, received, masks), _count(masks) / _entries(received)


def sparse_download(
    held: DecomposedWeights | None,
    server_weights: DecomposedWeights,
    helpers: Sequence[StateDict],
    thresholds: SparsityThresholds,
    *,
    decodable: bool = False,
) -> Download:
    """The weights of an agent after sparse differences from ``held`` to ``server_weights``.

    Args:
        held: the agent's weights after its last visit; None at its first.
        helpers: psi of its helpers, each compared with the agent's own.
        decodable: an entry of a helper that is 0 is sent where the agent's own is not. The authors'
            code does not count it, and no receiver could know it.
    """
    if held is None:
        return Download(
            server_weights, FIRST_COST / 2 if server_weights.sigma else 0.0, FIRST_COST / 2
        )
    own = without_small(held.psi, thresholds.negligible)
    new = without_small(server_weights.psi, thresholds.negligible)
    psi_mask = {n: differs(w, own[n], thresholds.change) for n, w in new.items()}
    sigma_mask = {
        n: differs(w, held.sigma[n], thresholds.change) for n, w in server_weights.sigma.items()
    }
    helper_masks = []
    for helper in helpers:
        other = without_small(helper, thresholds.negligible)
        # Unless decodable, a helper's 0 is compared with 0, so that it is never counted.
        base = {n: own[n] if decodable else own[n].where(w != 0, 0.0) for n, w in other.items()}
        helper_masks.append({n: differs(w, base[n], thresholds.change) for n, w in other.items()})
    patched = DecomposedWeights(
        _merge(server_weights.sigma, held.sigma, sigma_mask),
        _merge(server_weights.psi, held.psi, psi_mask),
    )
    entries = _entries(server_weights.psi)
    return Download(
        patched, _count(sigma_mask) / entries, _count(psi_mask) / entries,
        sum(map(_count, helper_masks)) / entries,
        DownloadMasks(sigma_mask, psi_mask, tuple(helper_masks)),
    )  # fmt: skip


def _merge(new: StateDict, old: StateDict, where: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.where(where[name], weight, old[name]) for name, weight in new.items()}


def _count(masks: Mapping[str, Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks.values())


def _entries(weights: StateDict) -> int:
    return sum(weight.numel() for weight in weights.values())
