"""Sparse differences between weights: the entries that FedMatch sends, and their number.

Jeong et al. (ICLR 2021), section 3.2, in the form of the authors' code, with two thresholds:

    w 1[|w| > negligible]   entries of psi that small count as 0 (``l1_thres`` of the code)
    d 1[|d| > change]       a difference that small is not sent (``delta`` of the code)

A cost is the number of entries sent, divided by the entries of one dense model: 1.0 is what FedAvg
sends in one direction, the unit (100%) of the paper's tables. ``comm/up_bytes`` and
``comm/down_bytes`` are the bytes of the messages, which are dense.

In an upload, an entry that is not sent keeps the server's value. In a download, the code counts the
entries but uses the dense weights; ``sparse_download`` gives the weights that were counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from privssl.core.messages import StateDict

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
class Download:
    """An agent's weights after a sparse download, and its cost in dense models."""

    weights: DecomposedWeights
    cost: float


def without_small(weights: StateDict, negligible: float) -> dict[str, Tensor]:
    """w 1[|w| > negligible].

    >>> without_small({"w": torch.tensor([0.5, -0.25, -2.0])}, 0.5)["w"]
    tensor([ 0.,  0., -2.])
    """
    return {name: torch.where(differs(w, 0.0, negligible), w, 0.0) for name, w in weights.items()}


def differs(new: Tensor, old: Tensor | float, change: float) -> Tensor:
    """Where |new - old| > change. NaN differs, so that it is sent and refused."""
    return ~((new - old).abs() <= change)


def sparse_upload(
    trained: StateDict, received: StateDict, cuts: SparsityThresholds, *, is_psi: bool
) -> tuple[dict[str, Tensor], float]:
    """What an agent sends of sigma or psi, and the cost.

    Args:
        trained, received: the weights after and before local training.
        is_psi: small entries of psi count as 0 in the difference; their true value is sent.

    Returns:
        The weights with the old value where the difference is not sent, and the cost.
    """
    compared = without_small(trained, cuts.negligible) if is_psi else trained
    sent = {n: differs(w, received[n], cuts.change) for n, w in compared.items()}
    return _merge(trained, received, sent), _count(sent) / _entries(received)


def sparse_download(
    held: DecomposedWeights | None,
    sent: DecomposedWeights,
    helpers: Sequence[StateDict],
    cuts: SparsityThresholds,
) -> Download:
    """The weights of an agent after sparse differences from ``held`` to ``sent``, and their cost.

    Args:
        held: the agent's weights after its last visit; None at its first.
        helpers: psi of its helpers, each compared with the agent's own.
    """
    if held is None:
        return Download(sent, FIRST_COST)
    own = without_small(held.psi, cuts.negligible)
    new = without_small(sent.psi, cuts.negligible)
    psi = {n: differs(w, own[n], cuts.change) for n, w in new.items()}
    sigma = {n: differs(w, held.sigma[n], cuts.change) for n, w in sent.sigma.items()}
    counted = _count(psi) + _count(sigma)
    for helper in helpers:
        theirs = without_small(helper, cuts.negligible)
        counted += _count(
            {
                n: differs(a, torch.where(a != 0, own[n], 0.0), cuts.change)
                for n, a in theirs.items()
            }
        )
    patched = DecomposedWeights(
        _merge(sent.sigma, held.sigma, sigma), _merge(sent.psi, held.psi, psi)
    )
    return Download(patched, counted / _entries(sent.psi))


def _merge(new: StateDict, old: StateDict, where: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.where(where[name], weight, old[name]) for name, weight in new.items()}


def _count(masks: Mapping[str, Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks.values())


def _entries(weights: StateDict) -> int:
    return sum(weight.numel() for weight in weights.values())
