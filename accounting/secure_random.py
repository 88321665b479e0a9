"""Random bits for all noise that a claim rests on. No seed reaches them; nothing stores them.

OpenSSL makes them (module ssl), by AES-256 in counter mode as in NIST SP 800-90A. It is seeded
again before every draw, with 32 bytes of the operating system, so that nothing can be predicted
from the state of the process, and forks and virtual machines woken twice draw other bits as soon as
the operating system gives them other bytes. os.urandom alone is ten times slower, and a step of
DP-SGD needs 8 bytes for every parameter.
"""

import os
import ssl

import numpy as np
from numpy.typing import NDArray

#: Other libraries that Python may be built with ignore what is mixed in.
_IS_OPENSSL = ssl.OPENSSL_VERSION.startswith("OpenSSL ")
_MAX_BYTES = 2**26  # of one call; OpenSSL gives at most 2^31 - 1


def random_uint64(count: int) -> NDArray[np.uint64]:
    """``count`` words of 64 independent fair bits. Read-only.

    Raises:
        OSError, ssl.SSLError: the operating system, or OpenSSL, has no random bytes to give.
    """
    size = 8 * count
    if not _IS_OPENSSL:
        return np.frombuffer(os.urandom(size), dtype=np.uint64)
    ssl.RAND_add(os.urandom(32), 0.0)  # 0.0: not counted where OpenSSL finds no other seed
    parts = [ssl.RAND_bytes(min(_MAX_BYTES, size - at)) for at in range(0, size, _MAX_BYTES)]
    return np.frombuffer(b"".join(parts), dtype=np.uint64)
