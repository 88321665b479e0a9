"""All randomness that may be repeated derives from (seed, round, agent, purpose).

A generator is made where it is used and named after its purpose, so a result cannot depend
on the order of calls, on the number of processes, or on what ran before a resume.
The privacy mechanism (sampling masks, noise) never uses this module: see ``privacy/dp_sgd.py``.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def stream(seed: int, round_number: int, agent: str, purpose: str) -> torch.Generator:
    """A fresh CPU generator for one purpose of one agent in one round.

    Args:
        seed: ``run.seed`` of the config, >= 0.
        round_number: counted from 1; 0 is before the first round.
        agent: id of the agent, or "server" or "world".
        purpose: what it is for, for example "mixup". Two purposes never share numbers.

    >>> a, b = stream(0, 1, "q3", "mixup"), stream(0, 1, "q3", "mixup")
    >>> bool(torch.equal(torch.rand(4, generator=a), torch.rand(4, generator=b)))
    True
    """
    key = f"{seed}/{round_number}/{agent}/{purpose}".encode()
    # torch's CPU generator keeps 32 bits of its seed, so 32 good bits are all that can be given.
    word = int.from_bytes(hashlib.sha256(key).digest()[:4], "little")
    return torch.Generator().manual_seed(word)


@contextmanager
def seeded(generator: torch.Generator) -> Iterator[None]:
    """Torch's global generator draws from ``generator`` inside, and is put back after.

    For building networks: torch's initialisers take no generator of their own.
    """
    seed = int(torch.randint(2**31, (1,), generator=generator))
    with torch.random.fork_rng(devices=[]):
        if torch.accelerator.is_available():  # dropout there asks a generator of its own
            torch.manual_seed(seed)
        else:  # ten times as fast, and a step may ask for it
            torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def others_seeded(generator: torch.Generator) -> Iterator[None]:
    """The global generators of NumPy and Python draw from ``generator`` inside.

    For code from outside of privssl, whose libraries may use them. It takes five times as long as
    :func:`seeded`.
    """
    seed = int(torch.randint(2**31, (1,), generator=generator))
    of_numpy, of_python = np.random.get_state(legacy=False), random.getstate()
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)
