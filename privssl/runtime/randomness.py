"""Reproducible randomness, derived from (seed, round, agent, purpose).

A generator is created where it is used and keyed by its purpose, so results do not depend on the
order of calls, the number of processes, or a resume. The privacy mechanism (sampling masks, noise)
never uses this module: see ``privacy/dp_sgd.py``.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def stream(seed: int, round_number: int, agent: str, purpose: str) -> torch.Generator:
    """Return a new CPU generator for one purpose of one agent in one round.

    Args:
        seed: ``run.seed`` of the config, >= 0.
        round_number: counted from 1; 0 is before the first round.
        agent: id of the agent, or "server" or "world".
        purpose: of the numbers, for example "mixup". Different purposes have different generators.

    >>> a, b = stream(0, 1, "q3", "mixup"), stream(0, 1, "q3", "mixup")
    >>> bool(torch.equal(torch.rand(4, generator=a), torch.rand(4, generator=b)))
    True
    """
    key = f"{seed}/{round_number}/{agent}/{purpose}".encode()
    # torch's CPU generator keeps 32 bits of its seed, so more bits would be lost.
    word = int.from_bytes(hashlib.sha256(key).digest()[:4], "little")
    return torch.Generator().manual_seed(word)


@contextmanager
def seeded(generator: torch.Generator) -> Iterator[None]:
    """Seed torch's global generator from ``generator``; restore it afterwards.

    For building networks: torch's initialisers do not accept a generator.
    """
    seed = int(torch.randint(2**31, (1,), generator=generator))
    with torch.random.fork_rng(devices=[]):
        if torch.accelerator.is_available():  # dropout uses the accelerator's generator
            torch.manual_seed(seed)
        else:  # ten times as fast, for frequent calls in steps
            torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def others_seeded(generator: torch.Generator) -> Iterator[None]:
    """Seed the global generators of NumPy and Python from ``generator``; restore them afterwards.

    For plug-ins, whose libraries may use them. Five times as slow as :func:`seeded`.
    """
    seed = int(torch.randint(2**31, (1,), generator=generator))
    numpy_state, python_state = np.random.get_state(legacy=False), random.getstate()
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
