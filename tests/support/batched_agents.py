"""A float64 fixture that test_batched_agents.py shares with other tests."""

from collections.abc import Iterator

import pytest
import torch

from privssl.data import affine_augment
from privssl.training import local_training


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make networks, rows and all computations float64."""
    narrow = local_training.network_input
    monkeypatch.setattr(
        local_training, "network_input", lambda *x, **how: narrow(*x, **how).double()
    )
    torch.set_default_dtype(torch.float64)
    affine_augment._make_pixel_positions.cache_clear()  # it caches numbers of the default dtype
    yield
    torch.set_default_dtype(torch.float32)
    affine_augment._make_pixel_positions.cache_clear()
