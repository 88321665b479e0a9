"""Rows of persons, where the unit of privacy is a person with several labelled records.

Under DP-SGD a person is sampled and clipped like a single row. What it adds depends on its own rows
alone, so the accounting of records holds for persons (sampling users: McMahan et al. 2018,
arXiv:1710.06963; Charles et al. 2024, arXiv:2407.07737). A census counts a few rows of each person,
with noise for that many.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from privssl.core.agents import rows_by_person


def choose_rows(group: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Choose ``count`` rows of a person at random: each once, and again only after all others."""
    order = group[torch.randperm(len(group), generator=rng)]
    return order[torch.arange(count) % len(order)]


def choose_few_of_each(persons: Sequence[str], count: int) -> Tensor:
    """Choose at most ``count`` rows of each person by a hash: sorted row numbers (int64).

    No other person has an influence on it.
    """
    chosen = list[int]()
    for name, rows in rows_by_person(persons).items():
        places = sorted(range(len(rows)), key=lambda place: _hash(name, place))
        chosen += [rows[place] for place in places[:count]]
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def _hash(name: str, place: int) -> bytes:
    return hashlib.sha256(f"{place} {name}".encode()).digest()
