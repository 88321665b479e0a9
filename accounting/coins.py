"""Where all noise that a claim rests on comes from: words of random bits that nobody can foretell.

They are made by OpenSSL's generator, which comes with Python (module ssl): AES-256 in counter mode
as NIST SP 800-90A has it, one for each thread. Google's differential-privacy library draws its
noise from the same function. Ours in addition has 32 bytes of the operating system mixed in
before every draw. So what is drawn owes nothing to the state of the process: not after a fork, and
not where a virtual machine is woken twice from one picture of its memory, which would otherwise
release two sums with one noise. No seed reaches it; nothing stores or resumes it.

Why not the operating system's bytes alone: Linux makes 0.3 to 0.5 GB of them a second, OpenSSL
7 GB, and a step of DP-SGD needs 8 bytes for every parameter (``benchmarks.private_step``).
"""

import os
import ssl

import numpy as np
from numpy.typing import NDArray

_FRESH = 32  # bytes of the operating system for each draw: 256 bits, as many as the key has


def random_words(count: int) -> NDArray[np.uint64]:
    """``count`` words of 64 coins each, all independent and fair.

    Raises:
        OSError, ssl.SSLError: the operating system, or OpenSSL, has no random bytes to give.
    """
    ssl.RAND_add(os.urandom(_FRESH), 0.0)  # 0.0: counts for nothing where OpenSSL has to be seeded
    return np.frombuffer(ssl.RAND_bytes(8 * count), dtype=np.uint64).copy()
